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
from scripts.series import formatting, ground, listing, marker, model, tree, uncommitted
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
    applied = _exportable(repository)
    contents = _own_files(repository, applied, package) if own else None
    if contents is None and (changed := uncommitted.changes(repository)):
        raise SeriesError(_uncommitted(root, changed))
    there = formatting.split(repository, applied.base, contents)
    if not there.patches:
        raise SeriesError(f"{root} has no commits on its base; nothing was exported.")
    different = (
        _differences(folder, there.patches)
        if (folder / listing.LISTING).is_file()
        else [f"{listing.LISTING} is missing"]
    )
    in_tree = OwnFiles(own, there.own)
    merged = own_files.merge(applied.own, own_files.read(own).digests, in_tree.digests)
    moved = _moved(applied, folder, there)
    if check and (different or merged.changes):
        told = ", ".join((*different, *(f"{in_tree.place(name)} differs" for name in merged.changes)))
        anew = f"Run {command('export', root)}, or {command('apply', root)}."
        way_out = f"{_carry_over(repository, applied)}." if moved else anew
        raise SeriesError(f"{folder} is not what {root} says: {told}. {way_out}")
    _require_exportable(repository, applied, folder, moved, merged)
    written = write_folder(folder, there.patches) if different else Exported((), ())
    if own:
        own_files.write_back(own, there.own, merged)
    _remember(repository, applied, folder, there, own)
    return replace(written, own_written=merged.write, own_removed=merged.remove)


def _uncommitted(root: Path, changed: str) -> str:
    return f"{root} has uncommitted changes:\n{changed}\nCommit them, or drop them."


def _own_files(repository: Repository, applied: Applied, package: str | None) -> dict[str, bytes]:
    """Our own files as they lie in a work tree.

    Raises:
        SeriesError: files of upstream's are changed and not committed, or no build reads some file.
    """
    root = repository.root
    theirs = frozenset(repository.files(ground.upstream_of(repository, applied.base)))
    listed = uncommitted.differences(repository)
    if changed := [line for line in listed if line[3:] in theirs]:
        raise SeriesError(_uncommitted(root, "\n".join(changed)))
    if strange := [line[3:] for line in listed if not own_files.is_ours_to_touch(line[3:], package)]:
        raise SeriesError(
            f"{root} has files that no build reads ({own_files.where_ours(package)}): {', '.join(strange)}. "
            "Delete them, or move them out of the tree."
        )
    if not listed and (told := uncommitted.changes(repository)):  # in the index alone
        raise SeriesError(_uncommitted(root, told))
    gone = {line[3:] for line in listed if line.startswith(" D")}
    names = {*repository.files("HEAD"), *(line[3:] for line in listed)} - theirs - gone
    return {name: (root / name).read_bytes() for name in sorted(names)}


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
    repository: Repository, applied: Applied, folder: Path, moved: list[str], merged: own_files.Merged
) -> None:
    """Refuse to write over what changed since the tree was made of it."""
    root = repository.root
    if moved:
        raise SeriesError(
            f"{folder} changed since {root} was applied from it: {', '.join(moved)}. "
            f"Exporting would undo that. {_carry_over(repository, applied)}."
        )
    if merged.both:
        raise SeriesError(
            f"our own files changed in {root} and in fork/, and not to the same: {', '.join(merged.both)}. "
            f"Give both the same content, then {command('export', root)}."
        )


def _exportable(repository: Repository) -> Applied:
    """What was applied to a work tree whose commits can be exported.

    Raises:
        SeriesError: an operation in progress, another base, or a part of a series.
    """
    root = repository.root
    if not repository.is_top_level():
        raise SeriesError(f"{root} is no work tree of the series; {command('apply', root)} makes it.")
    if told := tree.unfinished(root):
        raise SeriesError(f"{told}.")
    applied = marker.read_marker(root)
    if applied is None or not applied.pin:
        raise SeriesError(f"{root} is nothing that nox -s apply of this version made; nothing was exported.")
    if len(applied.patches) < applied.of:
        raise SeriesError(
            f"{root} holds the first {len(applied.patches)} of {applied.of} patches (apply --to): "
            f"exporting it would drop the rest. {_carry_over(repository, applied)}, and amend there (git "
            "rebase -i)."
        )
    status, _, _ = repository.attempt("merge-base", "--is-ancestor", applied.base, "HEAD")
    if status != 0:
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
            copy = Repository(Path(temporary) / "source", SeriesError)
            repository.run(
                "clone",
                "--quiet",
                "--shared",
                "--no-checkout",
                str(repository.root),
                str(copy.root),
                writes=False,
            )
            copy.run("checkout", "--quiet", "--detach", there.base)
            copy.run(*tree.AM, *(str(folder.resolve() / name) for name in there.patches))
            repository.run("fetch", "--quiet", "--no-tags", str(copy.root), "HEAD")
            canonical = copy.resolve("HEAD")
        if repository.resolve(f"{canonical}^{{tree}}") != repository.resolve(f"{there.tip}^{{tree}}"):
            raise SeriesError(
                f"{folder}: the patches do not give the files of {repository.root}; "
                "this is a fault of export."
            )
        repository.run(
            "update-ref", "-m", "export: the same files with the series' own dates", "HEAD", canonical
        )
        repository.run("read-tree", "HEAD")  # the index; the files are the same
        repository.run("tag", "--force", "base", there.base)
        head = canonical
    marker.write_marker(repository.root, applied.pin, series, there.base, head, len(there.patches))
