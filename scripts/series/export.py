"""Commits of a work tree as patches: write them back to ``patches/``, and only what changed."""

from __future__ import annotations

import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.base import files
from scripts.base.errors import SeriesError
from scripts.base.git import Repository
from scripts.series import compared, listing, marker, model, tree
from scripts.series.places import command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from scripts.series.marker import Applied


@dataclass(frozen=True)
class Exported:
    """File names in patches/ that an export wrote and removed."""

    written: tuple[str, ...]
    removed: tuple[str, ...]


def format_patches(repository: Repository, base: str, target: Path, tip: str = "HEAD") -> list[str]:
    """Write the commits after ``base`` as canonical patches into ``target``; return their names in order.

    A name is the subject's, without a number: the order is in ``series`` alone, so that a patch which comes,
    goes or moves renames no other.

    Raises:
        SeriesError: a merge or an empty commit, which no patch can hold; two that would have one name.
    """
    for commit in repository.commits(base, tip):
        about = repository.run("log", "-1", "--format=%h %s", commit, writes=False)
        if re.match(r"\w+ (fixup|squash|amend)! ", about):
            raise SeriesError(
                f"{repository.root}: commit {about} is not folded into its patch yet: "
                "git rebase -i --autosquash base"
            )
        if " " in repository.run("log", "-1", "--format=%P", commit, writes=False):
            raise SeriesError(
                f"{repository.root}: commit {about} is a merge; a series is a line (git rebase makes one)."
            )
        if not repository.run("diff-tree", "--no-commit-id", "--name-only", commit, writes=False):
            raise SeriesError(f"{repository.root}: commit {about} changes no file; drop it (git rebase -i).")
    options = [
        "--zero-commit",
        "--no-signature",
        "--no-numbered",
        "--no-renames",
        "--diff-algorithm=histogram",
        "--stat=72",
    ]
    options += [
        "--no-attach",
        "--no-thread",
        "--no-add-header",
        "--no-encode-email-headers",
        "--no-full-index",
        "--abbrev=12",
    ]
    options += ["--filename-max-length=100", f"--output-directory={target.resolve()}"]
    out = repository.run("format-patch", *options, f"{base}..{tip}", writes=False)
    return _without_numbers(repository, [Path(line) for line in out.splitlines()])


def _without_numbers(repository: Repository, numbered: list[Path]) -> list[str]:
    """Rename what git numbered; the names in order."""
    names: list[str] = []
    for path in numbered:
        name = re.sub(r"^\d+-", "", path.name)
        if name in names:
            raise SeriesError(
                f"{repository.root}: two commits would be {name}; give one of them another subject (git "
                "rebase -i, and reword)."
            )
        path.replace(path.with_name(name))
        names.append(name)
    return names


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


def exported_patches(repository: Repository, base: str, tip: str = "HEAD") -> dict[str, bytes]:
    """The commits after ``base`` as patches, each of them well-formed.

    Raises:
        SeriesError: a commit's message lacks what a patch needs; it names the commit.
    """
    with tempfile.TemporaryDirectory(prefix="fa2-export-") as folder:
        names = format_patches(repository, base, Path(folder), tip)
        for name in names:
            try:
                model.parse_patch(Path(folder) / name)
            except SeriesError as e:
                fault = re.sub(r"^.*\.patch:\d+: ", "", str(e))
                raise SeriesError(
                    f"{repository.root}: the commit of {name}: {fault} (git commit --amend, or git rebase -i "
                    "and reword.)"
                ) from e
        return {name: (Path(folder) / name).read_bytes() for name in names}


def _carry_over(repository: Repository, applied: Applied) -> str:
    """How to take one's own commits from a tree to the one that a new apply makes."""
    reset = command("apply", repository.root, "--reset")
    own = repository.run("log", "--reverse", "--format=%h", f"{applied.commit}..HEAD", writes=False).split()
    if not own:
        return f"Run {reset} for the whole series"
    pick = f"git -C {repository.root} cherry-pick {' '.join(own)}"
    return f"Run {reset}, which keeps your commits, then {pick}"


def export(root: Path, folder: Path, *, check: bool = False) -> Exported:
    """Write the work tree's commits back to the folder.

    Args:
        root: the work tree.
        folder: patches/; written aside and swapped.
        check: write nothing, and raise where anything would change.

    Raises:
        SeriesError: uncommitted changes, an operation in progress, no commits, a part of a series, patches
            that
            changed since the tree was applied; with ``check``, a difference.
    """
    repository = Repository(root, SeriesError)
    applied = _exportable(repository)
    patches = exported_patches(repository, applied.base)
    if not patches:
        raise SeriesError(f"{root} has no commits on its base; nothing was exported.")
    different = (
        _differences(folder, patches)
        if (folder / listing.LISTING).is_file()
        else [f"{listing.LISTING} is missing"]
    )
    if not different:
        _remember(repository, applied, folder, patches)
        return Exported((), ())
    current, known = model.digests(folder), applied.patches
    moved = sorted(name for name in current.keys() | known.keys() if current.get(name) != known.get(name))
    if check:
        anew = f"Run {command('export', root)}, or {command('apply', root)}."
        way_out = f"{_carry_over(repository, applied)}." if moved else anew
        raise SeriesError(f"{folder} is not what {root} says: {', '.join(different)}. {way_out}")
    if moved:
        raise SeriesError(
            f"{folder} changed since {root} was applied from it: {', '.join(moved)}. "
            f"Exporting would undo that. {_carry_over(repository, applied)}."
        )
    written = write_folder(folder, patches)
    _remember(repository, applied, folder, patches)
    return written


def _exportable(repository: Repository) -> Applied:
    """What was applied to a work tree whose commits can be exported.

    Raises:
        SeriesError: uncommitted changes, an operation in progress, another base, or a part of a series.
    """
    root = repository.root
    if not repository.is_top_level():
        raise SeriesError(f"{root} is no work tree of the series; {command('apply', root)} makes it.")
    if told := tree.unfinished(root):
        raise SeriesError(f"{told}.")
    if changed := compared.changes(repository):
        raise SeriesError(f"{root} has uncommitted changes:\n{changed}\nCommit them, or drop them.")
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


def _remember(repository: Repository, applied: Applied, folder: Path, patches: dict[str, bytes]) -> None:
    """Give the tree, which agrees with patches/, the commits that the series has everywhere.

    What it is, is noted in it.
    """
    series = model.read(folder)
    base, head = applied.base, repository.resolve("HEAD")
    if head != applied.commit:
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
            copy.run("checkout", "--quiet", "--detach", base)
            copy.run(*tree.AM, *(str(folder.resolve() / name) for name in patches))
            repository.run("fetch", "--quiet", "--no-tags", str(copy.root), "HEAD")
            canonical = copy.resolve("HEAD")
        if repository.resolve(f"{canonical}^{{tree}}") != repository.resolve("HEAD^{tree}"):
            raise SeriesError(
                f"{folder}: the patches do not give the files of {repository.root}; "
                "this is a fault of export."
            )
        repository.run(
            "update-ref", "-m", "export: the same files with the series' own dates", "HEAD", canonical
        )
        head = canonical
    marker.write_marker(repository.root, applied.pin, series, base, head, len(patches))
