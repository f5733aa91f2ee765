"""Where a rebase stands, for somebody who comes back to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from scripts.series import unfinished
from scripts.series.rebase import help as rebase_help
from scripts.series.rebase import remembered
from scripts.series.rebase.state import ABORT, GO_ON, SKIP, USE

if TYPE_CHECKING:
    from scripts.series.rebase.folder import Folder
    from scripts.series.rebase.resolution import Stop
    from scripts.series.rebase.state import State

_MARKER = b"<<<<<<< "


@dataclass(frozen=True)
class Standing:
    """Where a rebase stands."""

    old: str  # releases
    new: str
    done: int
    total: int
    skipped: tuple[str, ...]
    patch: str  # the next one; empty when all have moved
    stopped: bool  # it waits for a person
    evidence: str  # that the release has it; empty where nothing shows that
    conflicts: tuple[str, ...]  # FILE:LINE, or FILE where no marker is left
    remembered: tuple[str, ...]  # how conflicts were resolved before, as diffs, and how to take that
    remaining: tuple[str, ...]  # the patches after it
    commands: tuple[str, ...]  # that go on from here, each with what it does
    source: str
    wrote: str  # what the end of the rebase had begun to write, or to take back; empty where nothing

    @property
    def lines(self) -> tuple[str, ...]:
        """In words."""
        lines = [f"rebase from {self.old} to {self.new}, in {self.source}"]
        lines += [f"skipped: {name}" for name in self.skipped]
        if not self.patch:
            lines.append(f"all {self.total} patches have moved; {self.wrote or 'nothing is written yet'}")
        else:
            why = "waits for you" if self.stopped else "is next (a run was interrupted)"
            lines.append(f"patch ({self.done + 1}/{self.total}) {self.patch} {why}")
            lines += [f"    {self.evidence}"] if self.evidence else []
            lines += [f"    {place}: conflict" for place in self.conflicts]
            lines += self.remembered
            lines.append(f"then {len(self.remaining)} more{':' if self.remaining else ''}")
            lines += [f"    {name}" for name in self.remaining]
        return (*lines, "next:", *(f"    {command}" for command in self.commands))


def standing(folder: Folder) -> Standing:
    """Where the rebase in a folder stands.

    Raises:
        UsageError: there is none.
        SeriesError: its state is damaged.
    """
    state = folder.load()
    names = list(state.patches)
    done = len(state.done)
    stop = folder.stop(state) if done < len(names) else None
    stopped = stop is not None and (state.stopped or unfinished.is_picking(folder.source))
    offers = remembered.offers(folder.resolutions, stop) if stop and stopped else ()
    return Standing(
        old=state.old_pin.version,
        new=state.new_pin.version,
        done=done,
        total=len(names),
        skipped=tuple(f"{d.patch}: {d.reason}" for d in state.done if d.reason),
        patch=stop.name if stop else "",
        stopped=stopped,
        evidence=": ".join(state.landed.get(stop.name, ())) if stop else "",
        conflicts=tuple(_places(stop)) if stop else (),
        remembered=tuple(rebase_help.remembered_lines(offers, USE)),
        remaining=tuple(names[done + 1 :]),
        commands=_commands(folder, state, stop) if stop and stopped else (f"{GO_ON}   goes on", ABORT),
        source=str(folder.source),
        wrote=_wrote(state),
    )


def _wrote(state: State) -> str:
    """What the end of the rebase had begun when a run ended, in words; empty where it wrote nothing."""
    if state.aborting:
        return f"{state.written} were being taken back when a run ended: some are, some are not"
    told = f"{state.written} were being written when a run ended: some may be, some may not"
    return told if state.moved else ""


def _places(stop: Stop) -> list[str]:
    """Where a person is awaited: the first marker of each file with a conflict."""
    places = []
    for name in stop.open_files:
        path = stop.repository.root / name
        lines = path.read_bytes().splitlines() if path.is_file() else []
        marked = next((i for i, line in enumerate(lines, 1) if line.startswith(_MARKER)), None)
        places.append(f"{name}:{marked}" if marked else f"{name} (no marker is left)")
    return places


def _commands(folder: Folder, state: State, stop: Stop) -> tuple[str, ...]:
    git = f"git -C {folder.source}"
    commands = [
        f"{git} show {stop.commit[:12]}   the patch as it was",
        f"{git} diff {state.old_base[:12]} {state.new_base[:12]} -- FILE   what upstream changed",
    ]
    if stop.open_files:
        commands += [f"{git} diff   the conflict", f"edit the files in {folder.source}, then {GO_ON}"]
    return (*commands, f"{SKIP}   leaves it out", ABORT)
