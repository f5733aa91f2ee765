"""Commits of a work tree as patches: write them back to ``patches/``, and only what changed."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.base import files
from scripts.base.errors import SeriesError
from scripts.base.git import Repository
from scripts.series import (
    formatting,
    ground,
    kept_commits,
    listing,
    marker,
    model,
    own_tree,
    tree,
    uncommitted,
    unfinished,
)
from scripts.series import own as own_files
from scripts.series.own import OwnFiles
from scripts.series.places import command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from scripts.series.marker import Applied


@dataclass(frozen=True)
class Exported:
    """What an export wrote and removed: names of patches, and our own files by their paths in the tree."""

    written: tuple[str, ...]
    removed: tuple[str, ...]
    own_written: tuple[str, ...] = ()
    own_removed: tuple[str, ...] = ()
    own_behind: tuple[str, ...] = ()  # changed in fork/ alone; the tree has them by the next apply


def held(folder: Path) -> dict[str, bytes]:
    """The patches and the ``series`` that lie in a folder, by file name; none where there is no folder."""
    return (
        {
            p.name: p.read_bytes()
            for p in folder.iterdir()
            if p.suffix == ".patch" or p.name == listing.LISTING
        }
        if folder.is_dir()
        else {}
    )


def changed(before: dict[str, bytes], after: dict[str, bytes]) -> Exported:
    """Which files are written and removed between the two."""
    return Exported(
        tuple(sorted(name for name, content in after.items() if before.get(name) != content)),
        tuple(sorted(before.keys() - after.keys())),
    )


def write_folder(folder: Path, patches: dict[str, bytes], notes: Sequence[str] = ()) -> Exported:
    """Make ``folder`` hold exactly these patches, in this order.

    What else lies there stays, and so do the comments in ``series``; ``notes`` are added to them, at the end.
    """
    old, footer = listing.read(folder) if (folder / listing.LISTING).is_file() else ((), ())
    footer = (*footer, *(note for note in notes if note not in footer))
    after = patches | {listing.LISTING: listing.render(list(patches), old, footer).encode()}
    changes = changed(held(folder), after)
    if not (changes.written or changes.removed):
        return changes
    tree.sweep(folder)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=tree.temporary_prefix(folder)) as temporary:
        copy = Path(temporary) / folder.name
        if folder.is_dir():
            shutil.copytree(folder, copy, symlinks=True)
        copy.mkdir(exist_ok=True)
        for name in changes.removed:
            (copy / name).unlink()
        for name in changes.written:
            with files.writing(folder / name):
                (copy / name).write_bytes(after[name])
        if folder.is_dir():
            files.exchange(copy, folder)
        else:
            copy.replace(folder)
    return changes


def _differences(folder: Path, patches: dict[str, bytes]) -> list[str]:
    """How the folder differs from these patches: content, order, missing and stray files."""
    entries, _ = listing.read(folder)
    names = [entry.name for entry in entries]
    held_patches = {p.name: p.read_bytes() for p in folder.glob("*.patch")}
    different = [
        f"{name} would change"
        for name in patches
        if name in held_patches and held_patches[name] != patches[name]
    ]
    different += [f"{name} would be added" for name in patches if name not in held_patches]
    different += [f"{name} would be removed" for name in sorted(held_patches) if name not in patches]
    if not different and names != list(patches):
        different.append(f"{listing.LISTING} has another order or lacks a name")
    return different


def _carry_over(repository: Repository, applied: Applied) -> str:
    """How to take one's own commits from a tree to the one that a new apply makes."""
    reset = command("apply", repository.root, "--reset")
    own = repository.run("log", "--reverse", "--format=%h", f"{applied.commit}..HEAD", writes=False).split()
    if not own:
        return f"Run {reset} for the whole series"
    pick = f"git -C {repository.root} cherry-pick {' '.join(own)}"
    return f"Run {reset}, which keeps your commits, then {pick}"


def export(
    root: Path, folder: Path, own: Path | None = None, *, package: str | None = None, check: bool = False
) -> Exported:
    """Write the work tree's commits back to the folder, and what changed in our own files, committed or not.

    Args:
        root: the work tree.
        folder: patches/; written aside and swapped.
        own: the folder of our own files; None: patches add them.
        package: of a python upstream, its folder.
        check: write nothing, and raise where anything would change.

    Raises:
        SeriesError: uncommitted changes of upstream's files, an operation in progress, no commits, a part of
            a series, patches or own files that changed since the tree was applied; with ``check``, a
            difference.
    """
    repository = Repository(root, SeriesError)
    applied = _exportable(repository, own)
    contents = own_tree.exportable(repository, applied, package) if own else None
    if contents is None and (changed := uncommitted.changes(repository)):
        raise SeriesError(own_tree.not_committed(root, changed))
    # What HEAD stands on is another commit of our own files after a kill, or a reset to an older export.
    base = applied.base if contents is None else ground.upstream_of(repository, applied.base)
    there = formatting.split(repository, base, contents)
    if not there.patches and (applied.patches or not own):
        raise SeriesError(f"{root} has no commit that changes a file of upstream's; nothing was exported.")
    if kept := unfinished.held_elsewhere(repository, model.digests(folder).keys() - there.patches):
        raise SeriesError(f"{kept}; nothing was exported.")
    different = (
        _differences(folder, there.patches)
        if (folder / listing.LISTING).is_file()
        else [f"{listing.LISTING} is missing"]
    )
    in_tree, in_fork = OwnFiles(own, there.own), own_files.read(own).digests
    merged = own_files.merge(applied.own, in_fork, in_tree.digests)
    moved = _moved(applied, folder, there)
    if check and (different or merged.changes):
        back = _carry_over(repository, applied) if moved else ""
        raise SeriesError(_in_words(root, folder, different, merged, in_tree, back))
    _require_exportable(repository, applied, folder, moved, merged, in_tree)
    if own:
        own_files.require_room(own, merged)
    written = write_folder(folder, there.patches) if different else Exported((), ())
    if own:
        own_files.write_back(own, there.own, merged, in_fork)
    _remember(repository, applied, folder, there, own)
    return replace(written, own_written=merged.write, own_removed=merged.remove, own_behind=merged.behind)


def _in_words(
    root: Path, folder: Path, different: list[str], merged: own_files.Merged, in_tree: OwnFiles, back: str
) -> str:
    """What patches/ and fork/ have otherwise than a tree, and the next command.

    ``back``: that command, where patches/ changed since the tree was made of it.
    """
    told = ", ".join((*different, *(f"{in_tree.place(name)} differs" for name in merged.changes)))
    folders = ((folder, different), (in_tree.folder, merged.changes))
    where = [str(one) for one, is_other in folders if is_other]
    if back:
        way_out = f"{back}."
    elif merged.both:
        way_out = f"Give both the same content, then {command('export', root)}."
    elif not (different or merged.write or merged.remove):
        way_out = f"Run {command('apply', root)}."
    else:
        way_out = f"Run {command('export', root)}, or {command('apply', root)}."
    return f"{' and '.join(where)} {'are' if where[1:] else 'is'} not what {root} says: {told}. {way_out}"


def _moved(applied: Applied, folder: Path, there: formatting.Split) -> list[str]:
    """The patches that changed since the tree was made of them, and not to what the tree says."""
    current, known = model.digests(folder), applied.patches
    wanted = {name: hashlib.sha256(content).hexdigest() for name, content in there.patches.items()}
    return [
        name
        for name in sorted(current.keys() | known.keys())
        if current.get(name) not in (known.get(name), wanted.get(name))
    ]


def _require_exportable(
    repository: Repository,
    applied: Applied,
    folder: Path,
    moved: list[str],
    merged: own_files.Merged,
    in_tree: OwnFiles,
) -> None:
    """Refuse to write over what changed since the tree was made of it."""
    root = repository.root
    if moved:
        raise SeriesError(
            f"{folder} changed since {root} was applied from it: {', '.join(moved)}. "
            f"Exporting would undo that. {_carry_over(repository, applied)}."
        )
    if merged.both:
        both = ", ".join(str(in_tree.place(name)) for name in merged.both)
        raise SeriesError(
            f"our own files changed in {root} and in fork/, and not to the same: {both}. "
            f"Give both the same content, then {command('export', root)}."
        )


def _exportable(repository: Repository, own: Path | None) -> Applied:
    """What was applied to a work tree whose commits can be exported.

    Raises:
        SeriesError: an operation in progress, another base, or a part of a series.
    """
    root = repository.root
    if not repository.is_top_level():
        raise SeriesError(f"{root} is no work tree of the series; {command('apply', root)} makes it.")
    if told := unfinished.in_words(root) or unfinished.off_branch(repository):
        raise SeriesError(f"{told}; nothing was exported.")
    applied = marker.read_marker(root)
    if applied is None or not applied.pin:
        raise SeriesError(f"{root} is nothing that nox -s apply of this version made; nothing was exported.")
    if len(applied.patches) < applied.of:
        raise SeriesError(
            f"{root} holds the first {len(applied.patches)} of {applied.of} patches (apply --to): "
            f"exporting it would drop the rest. {_carry_over(repository, applied)}, and amend there (git "
            "rebase -i)."
        )
    if own:
        stands = ground.upstream_of(repository, "HEAD") == ground.upstream_of(repository, applied.base)
    else:
        stands = repository.attempt("merge-base", "--is-ancestor", applied.base, "HEAD")[0] == 0
    if not stands:
        raise SeriesError(
            f"{root}: HEAD does not stand on the base {applied.base[:12]} any more; nothing was exported."
        )
    return applied


def _remember(
    repository: Repository, applied: Applied, folder: Path, there: formatting.Split, own: Path | None
) -> None:
    """Give the tree, which agrees with patches/ and fork/, the commits that the series has everywhere.

    What it is, is noted in it.
    """
    series = replace(model.read(folder), own=OwnFiles(own, there.own))
    head = repository.resolve("HEAD")
    if (there.base, head) != (applied.base, applied.commit) or there.tip != head:
        with tempfile.TemporaryDirectory(prefix="fa2-export-") as temporary:
            copy = repository.shared_copy(Path(temporary) / "source")
            copy.run("checkout", "--quiet", "--detach", there.base)
            if there.patches:
                copy.run(*tree.AM, *(str(folder.resolve() / name) for name in there.patches))
            repository.run("fetch", "--quiet", "--no-tags", str(copy.root), "HEAD")
            canonical = copy.resolve("HEAD")
        if repository.resolve(f"{canonical}^{{tree}}") != repository.resolve(f"{there.tip}^{{tree}}"):
            raise SeriesError(
                f"{folder}: the patches do not give the files of {repository.root}; "
                "this is a fault of export."
            )
        kept_commits.keep_tips(repository, applied.commit, head)
        repository.run("read-tree", canonical)  # the index; the files are the same
        repository.run("tag", "--force", "base", there.base)
        repository.run(
            "update-ref", "-m", "export: the same files with the series' own dates", "HEAD", canonical
        )
        head = canonical
    marker.write_marker(repository.root, applied.pin, series, there.base, head, len(there.patches))
