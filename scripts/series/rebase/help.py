"""What a person is told where a rebase stops: the place, what is behind it, and the next commands."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.base.errors import SeriesError
from scripts.base.git import Repository
from scripts.series.rebase import remembered
from scripts.series.rebase.state import ABORT, GO_ON, SKIP, USE
from scripts.series.upstream import landed, move

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from scripts.series.rebase.folder import Folder
    from scripts.series.rebase.resolution import Stop
    from scripts.series.rebase.state import State


def why(folder: Folder, state: State, judged: move.Move) -> str:
    """Why the rebase stops at a patch, and what a person may do."""
    stop = folder.stop(state)
    old, new, source = state.old_pin.version, state.new_pin.version, folder.source
    place, total = len(state.done) + 1, len(state.patches)
    lines = [f"patch {place} of {total}, {judged.patch}: {judged.outcome.value} on {new}."]
    lines += ["    " + line for line in judged.evidence]
    lines += _history(folder, state, judged)
    if needing := dependents(folder, state):
        lines.append(f"  later patches that need it: {', '.join(needing)}")
    whole = judged.outcome in (move.Outcome.LANDED_IDENTICAL, move.Outcome.EMPTY)
    if whole or judged.outcome is move.Outcome.LANDED_MODIFIED:
        lines.append(f"  left out, if upstream has all of it: {SKIP}")
    bases = f"{state.old_base[:12]} {state.new_base[:12]}"
    lines += [
        f"  what {new} changed there: git -C {source} diff {bases} -- FILE",
        f"  the patch as it was:      git -C {source} show {stop.commit[:12]}   (against {old})",
    ]
    if whole:
        return "\n".join((*lines, f"  or: {ABORT}"))
    lines += remembered_lines(remembered.offers(folder.resolutions, stop), USE)
    lines += [
        f"  to resolve it:            edit the files in {source}, then {GO_ON}",
        f"  or: {SKIP}   or: {ABORT}",
    ]
    return "\n".join(lines)


def remembered_lines(offers: Sequence[remembered.Offer], use: str) -> list[str]:
    """What is remembered, as diffs, and the command that takes it."""
    if not offers:
        return []
    return [
        *(f"      {line}" for offer in offers for line in offer.diff),
        f"  it was resolved before, as this diff shows; to take that: {use}",
    ]


def dependents(folder: Folder, state: State) -> list[str]:
    """The patches after the next one that need it, by their names: their lines or includes are its."""
    commits = folder.space(state).commits
    graph = landed.needs(folder.repository, commits)
    place = len(state.done)
    reached = {commits[place]}
    for commit in commits[place + 1 :]:
        if graph[commit] & reached:
            reached.add(commit)
    return [name for name, c in zip(state.patches, commits, strict=True) if c in reached][1:]


def _history(folder: Folder, state: State, judged: move.Move) -> list[str]:
    """Upstream's commits between the two releases on the lines in question, where git has both.

    On the files, where no line can be named.
    """
    upstream = Repository(folder.root / "upstream", SeriesError)
    old, new = state.old_pin.commit, state.new_pin.commit
    if not upstream.is_top_level() or any(upstream.attempt("cat-file", "-e", c)[0] for c in (old, new)):
        return []
    log = ("log", "--oneline", "--no-decorate", f"{old}..{new}")
    spans = [f"-L{span}" for span in _spans(folder.stop(state), state.new_base)]
    if spans:
        status, told, _ = upstream.attempt(*log[:-1], "--no-patch", *spans, log[-1])
        if status == 0 and told:
            return ["  upstream's commits on these lines:", *("    " + line for line in told.splitlines())]
    places = [line.split(":")[0] for line in judged.evidence]
    touched = sorted({place.split(" ")[0] for place in places if "/" in place})
    told = upstream.run(*log, "--", *touched, writes=False) if touched else ""
    return (
        ["  upstream's commits on these files:", *("    " + line for line in told.splitlines())]
        if told
        else []
    )


def _spans(stop: Stop, base: str) -> Iterator[str]:
    """The conflicting lines of a release as ``FIRST,LAST:FILE``."""
    for name in stop.open_files:
        path = stop.repository.root / name
        if not path.is_file():
            continue
        ours, blocks = ours_of(path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True))
        with tempfile.TemporaryDirectory(prefix="fa2-ours-") as folder:
            contents = Path(folder) / "ours"
            contents.write_text("".join(ours), encoding="utf-8")
            for first, last in blocks:
                # Where upstream removed the lines, those beside them.
                for wider in (0, 1) if first <= last else (1,):
                    span = f"-L{max(first - wider, 1)},{min(last + wider, len(ours))}"
                    _, blamed, _ = stop.repository.attempt(
                        "blame", "--porcelain", "--contents", str(contents), span, "--", name
                    )
                    found = sorted(int(n) for n in re.findall(rf"(?m)^{base} (\d+) \d+", blamed))
                    if found:
                        yield f"{found[0]},{found[-1]}:{name}"
                        break


def ours_of(lines: list[str]) -> tuple[list[str], list[tuple[int, int]]]:
    """A file with conflicts resolved to the side that was there, and where those sides are.

    >>> ours_of(["a", "<<<<<<< HEAD", "b", "||||||| base", "c", "=======", "d", ">>>>>>> patch", "e"])
    (['a', 'b', 'e'], [(2, 2)])
    >>> ours_of(["a", "<<<<<<< HEAD", "||||||| base", "c", "=======", "d", ">>>>>>> patch"])
    (['a'], [(2, 1)])
    """
    kept: list[str] = []
    blocks: list[tuple[int, int]] = []
    ours, inside = True, False
    for line in lines:
        if line.startswith("<<<<<<< "):
            inside, first = True, len(kept) + 1
        elif inside and line.startswith("||||||| "):
            ours = False
            blocks.append((first, len(kept)))
        elif inside and line.startswith(">>>>>>> "):
            ours, inside = True, False
        elif ours:
            kept.append(line)
    return kept, blocks
