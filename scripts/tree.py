"""The series as commits in a work tree: apply it, export it.

One series on one base always ends in one commit id: author, committer and dates are fixed, and the base
is a commit of upstream's files alone. Applying is exact: no fuzz, no offset. What somebody did in the
tree is never thrown away unasked.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import shlex
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts import series as model
from scripts.base import console, files
from scripts.base.errors import SeriesError
from scripts.base.git import Repository
from scripts.source import upstream

if TYPE_CHECKING:
    from collections.abc import Sequence

    from scripts.series import Series
    from scripts.source.matrix import Upstream

_MARKER = "series.json"  # in the repository's .git: what was applied
_MARKER_FORMAT = 2
_AM = ("am", "--quiet", "--no-3way", "--committer-date-is-author-date", "--keep-cr")
_KEEP_OR_DROP = (
    "nox -s export writes commits to patches/; nox -s apply -- --reset replaces the tree, keeping its commits and stashes under refs/replaced"
)


@dataclass(frozen=True)
class Tree:
    """A work tree with the series applied."""

    root: Path
    base: str
    commit: str
    digest: str
    sources: str  # id of csrc: what the binding is compiled from, whatever the messages and the Python files say
    kernel_sources: str  # the same of what kernel files can include: all but the binding's own file
    seen: int = field(default_factory=time.time_ns, compare=False)  # when the files were what the ids say

    def check_unchanged(self) -> None:
        """What is made of the files is kept under the ids, so it must be made of what the ids say.

        Raises:
            SeriesError: a file was written since then.
        """
        for pattern in ("*", "csrc/**/*", "flash_attn/**/*"):
            for path in sorted(self.root.glob(pattern)):
                if path.is_file() and not path.name.startswith(".") and path.stat().st_ctime_ns > self.seen:
                    raise SeriesError(
                        f"{path} changed while it was being built from. Nothing that may be of both states was kept; build again. "
                        "(Nobody wrote it? Then the clock was set back: nox -s apply -- --reset)"
                    )


@dataclass(frozen=True)
class Exported:
    """File names in patches/ that an export wrote and removed."""

    written: tuple[str, ...]
    removed: tuple[str, ...]


def in_progress(root: Path) -> str | None:
    """The operation of git's that was not finished in a work tree."""
    names = {
        "rebase-merge": "rebase",
        "rebase-apply": "am or rebase",
        "CHERRY_PICK_HEAD": "cherry-pick",
        "REVERT_HEAD": "revert",
        "MERGE_HEAD": "merge",
    }
    return next((what for name, what in names.items() if (root / ".git" / name).exists()), None)


def pin_key(pin: Upstream) -> str:
    """What a base is made of."""
    return f"{pin.distribution} {pin.version} {pin.commit} {pin.cutlass} {pin.sdist_sha256}"


def _marker(root: Path) -> dict[str, Any] | None:
    """What was applied to a tree; None for a tree that is not ours. Of an older format the commit alone counts."""
    try:
        found: dict[str, Any] = json.loads((root / ".git" / _MARKER).read_text(encoding="utf-8"))
        current = found["format"] == _MARKER_FORMAT
        return found if current else {"commit": found["commit"], "pin": None, "digest": None, "base": ""}
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _write_marker(root: Path, pin: str, series: Series, base: str, commit: str, of: int) -> str:
    """Note what a tree is made of; the series' digest."""
    digest, patches = series.digest(base), {p.name: p.sha256 for p in series.patches}
    facts = {"format": _MARKER_FORMAT, "pin": pin, "digest": digest, "base": base, "commit": commit, "of": of, "patches": patches}
    files.write(root / ".git" / _MARKER, json.dumps(facts) + "\n")
    return digest


def try_patch(repository: Repository, path: Path) -> tuple[int, str]:
    """Whether git could apply a patch to the work tree, as an exit status, and what it says of each hunk; nothing is changed."""
    status, out, err = repository.attempt("apply", "--check", "--verbose", "--whitespace=nowarn", str(path))
    return status, f"{out}\n{err}"


def _prove_exact(repository: Repository, path: Path) -> None:
    """``git am`` takes a hunk that moved; we do not: it may have moved into another function."""
    status, report = try_patch(repository, path)
    if "Skipped patch" in report:
        raise SeriesError(f"{path.name}: git skipped it: {repository.root} is inside another repository.")
    offsets = re.findall(r"^Hunk #\d+ succeeded at .*$", report, re.MULTILINE)
    if status != 0 or offsets:
        lines = [line for line in report.splitlines() if line.startswith(("error:", "Hunk #")) and line != "error: while searching for:"]
        raise SeriesError(f"{path.name} does not apply exactly:\n" + "\n".join("    " + line for line in lines))


def _work_at_stake(repository: Repository, marker: dict[str, Any]) -> str | None:
    """What is in a tree and in no patch, in words; None when it may be replaced."""
    root = repository.root
    if operation := in_progress(root):
        return f"{root} is in the middle of a {operation}; finish it there (git status tells how) or abort it"
    if changed := repository.run("status", "--porcelain").strip():
        return f"{root} has changes that are in no patch:\n{changed}\nCommit them there"
    head, known = repository.resolve("HEAD"), marker["commit"]
    ahead = repository.run("log", "--format=    %h %s", head, "--branches", f"^{known}", writes=False)
    if ahead:
        return f"{root} has commits that are in no patch:\n{ahead}"
    linked = "\n".join(f"    linked work tree {p.name}" for p in (root / ".git/worktrees").glob("*"))
    if kept := f"{repository.run('stash', 'list', writes=False)}{linked}":
        return f"{root} has stashes or linked work trees:\n{kept}"
    if head != known:
        count = len(repository.commits(head, known))
        return f"{root} lacks the last {count} of the commits that nox -s apply made (git reset?)"
    return None


def _moment(root: Path) -> int:
    """Now, by the clock of the file system that a tree lies on, in nanoseconds."""
    stamp = root / ".git/seen"
    stamp.touch()
    return stamp.stat().st_mtime_ns


def unsaved(root: Path) -> str | None:
    """What is in a finished tree and in no patch, in words; None when there is nothing, or no tree."""
    marker = _marker(root)
    return _work_at_stake(Repository(root, SeriesError), marker) if marker else None


def _reuse(series: Series, pin: Upstream, root: Path, *, reset: bool) -> Tree | None:
    """The finished tree when it is of these bytes; None when it may be replaced."""
    if not root.exists():
        return None
    finished = Repository(root, SeriesError)
    marker = _marker(root)
    if marker is None or not finished.is_top_level():
        if reset and (root / ".git").is_dir():
            return None
        raise SeriesError(f"{root} is nothing that nox -s apply made; move it away, or delete it.")
    if reset:
        return None
    seen = _moment(root)
    if stake := _work_at_stake(finished, marker):
        raise SeriesError(f"{stake}." if in_progress(root) else f"{stake}. {_KEEP_OR_DROP}.")
    digest = series.digest(marker["base"])
    if (marker["pin"], marker["digest"]) != (pin_key(pin), digest):
        return None
    return Tree(root, marker["base"], marker["commit"], digest, *sources(finished), seen)


def sources(repository: Repository) -> tuple[str, str]:
    """Ids of what the binding and the kernels are compiled from; both in cutlass where a tree has it."""
    csrc = repository.resolve("HEAD:csrc")
    _, listed, _ = repository.attempt("ls-tree", "HEAD", "csrc/flash_attn/", "csrc/cutlass/")
    kernels = [line for line in listed.splitlines() if not line.endswith("/flash_api.cpp")]
    return csrc, hashlib.sha256("\n".join(kernels).encode()).hexdigest()


def reusable(series: Series, pin: Upstream, root: Path) -> Tree | None:
    """The finished tree where it is exactly this series and nothing else is in it."""
    try:
        return _reuse(series, pin, root, reset=False)
    except SeriesError:
        return None


def sweep(root: Path) -> None:
    """Remove what killed runs left beside a folder."""
    for left in root.parent.glob(f"{aside_prefix(root)}*"):
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)


def aside_prefix(root: Path) -> str:
    """How the folders begin in which another is made aside; no name that a person would give."""
    return f".{root.name}.fa2-aside-"


def make_base(root: Path, pin: Upstream, checkout: upstream.Checkout) -> str:
    """Make a repository of upstream's files as they are; the commit's id follows from them and the release's name."""
    upstream.materialise(checkout, root)
    repository = Repository.create(root, SeriesError)
    repository.run("add", "--all", "--force")
    repository.run("commit", "--quiet", "-m", f"{pin.distribution} {pin.version}")
    return repository.resolve("HEAD")


def base_of(pin: Upstream, checkout: upstream.Checkout) -> str:
    """The id of the commit that :func:`make_base` makes."""
    with tempfile.TemporaryDirectory(prefix="fa2-base-") as folder:
        return make_base(Path(folder) / "source", pin, checkout)


def _keep(repository: Repository, old: Path) -> str:
    """Take over the commits of the tree that is replaced, linked work trees' too: exported ones may be in no patch any more. Returns where."""
    place = f"refs/replaced/{datetime.now(timezone.utc):%Y%m%d-%H%M%S-%f}"
    replaced = Repository(old, SeriesError)
    replaced.attempt("add", "--all")
    if replaced.attempt("diff", "--cached", "--quiet", "HEAD")[0] != 0:
        tree = replaced.run("write-tree").strip()
        loose = replaced.run("commit-tree", "-p", "HEAD", "-m", "what was not committed", tree).strip()
        replaced.run("update-ref", "refs/heads/uncommitted", loose)
        console.warn(f"{old} had changes that were not committed; they are kept as the commit {place}/heads/uncommitted")
    for number, stash in enumerate(replaced.run("stash", "list", "--format=%H", writes=False).split()):
        replaced.run("update-ref", f"refs/stashes/{number}", stash)
    linked = re.findall(r"^HEAD (\w+)$", replaced.run("worktree", "list", "--porcelain", writes=False), re.MULTILINE)
    for number, head in enumerate(linked):
        replaced.run("update-ref", f"refs/linked/{number}", head)
    names = (("HEAD", "HEAD"), ("refs/heads/*", "heads/*"), ("refs/stashes/*", "stashes/*"), ("refs/linked/*", "linked/*"))
    heads = [f"+{name}:{place}/{kept}" for name, kept in names]
    status, _, err = repository.attempt("fetch", "--quiet", "--no-tags", str(old), *heads)
    if status != 0:
        raise SeriesError(f"{old}: its commits could not be taken over, so it was left as it is:\n{err}")
    repository.attempt("fetch", "--quiet", "--no-tags", str(old), f"+refs/tags/*:{place}/tags/*", "+refs/replaced/*:refs/replaced/*")
    return place


def apply(series: Series, pin: Upstream, checkout: upstream.Checkout, root: Path, *, of: int | None = None, reset: bool = False) -> Tree:
    """Make ``root`` a repository with upstream's files as one commit and each patch as one more.

    A tree that was applied from the same bytes is taken as it is. Otherwise it is made aside and renamed,
    so that an interrupted run leaves the old one or none.

    Args:
        series: the patches to apply.
        pin: the release they are for.
        checkout: its files.
        root: the work tree.
        of: how many patches the whole series has, where ``series`` is a part; such a tree is not exported.
        reset: replace a finished tree whatever is in it.

    Raises:
        SeriesError: a patch does not apply exactly, or the finished tree holds work that is in no patch.
    """
    if (reused := _reuse(series, pin, root, reset=reset)) is not None:
        return reused
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        sweep(root)
        aside = Path(tempfile.mkdtemp(dir=root.parent, prefix=aside_prefix(root)))
    except OSError as e:
        raise SeriesError(f"{root.parent}: cannot make a folder there: {e.strerror}.") from e
    try:
        work = aside / "tree"
        base = make_base(work, pin, checkout)
        repository = Repository(work, SeriesError)
        for patch in series.patches:
            path = (series.folder / patch.name).resolve()
            _prove_exact(repository, path)
            repository.run(*_AM, str(path))
        commit = repository.resolve("HEAD")
        digest = _write_marker(work, pin_key(pin), series, base, commit, of or len(series.patches))
        repository.run("tag", "base", base)
        if root.exists():
            place = _keep(repository, root)
            _exchange(work, root)
            console.note(f"{root} was made anew; the commits that it had are kept there as {place}")
        else:
            work.replace(root)
        return Tree(root, base, commit, digest, *sources(Repository(root, SeriesError)), _moment(root))
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def format_patches(repository: Repository, base: str, target: Path, tip: str = "HEAD") -> list[str]:
    """Write the commits after ``base`` as canonical patches into ``target``; return their names in order.

    Raises:
        SeriesError: a merge or an empty commit, which no patch can hold.
    """
    for commit in repository.commits(base, tip):
        about = repository.run("log", "-1", "--format=%h %s", commit, writes=False)
        if re.match(r"\w+ (fixup|squash|amend)! ", about):
            raise SeriesError(f"{repository.root}: commit {about} is not folded into its patch yet: git rebase -i --autosquash base")
        if " " in repository.run("log", "-1", "--format=%P", commit, writes=False):
            raise SeriesError(f"{repository.root}: commit {about} is a merge; a series is a line (git rebase makes one).")
        if not repository.run("diff-tree", "--no-commit-id", "--name-only", commit, writes=False):
            raise SeriesError(f"{repository.root}: commit {about} changes no file; drop it (git rebase -i).")
    options = ["--zero-commit", "--no-signature", "--no-numbered", "--no-renames", "--diff-algorithm=histogram", "--stat=72"]
    options += ["--no-attach", "--no-thread", "--no-add-header", "--no-encode-email-headers", "--no-full-index", "--abbrev=12"]
    options += ["--filename-max-length=100", f"--output-directory={target.resolve()}"]
    out = repository.run("format-patch", *options, f"{base}..{tip}", writes=False)
    return [Path(line).name for line in out.splitlines()]


def _exchange(one: Path, other: Path) -> None:
    """Swap two folders in one step, so that neither name is ever missing (renameat2 of Linux)."""
    libc = ctypes.CDLL(None, use_errno=True)
    at_fdcwd, rename_exchange = -100, 2
    if libc.renameat2(at_fdcwd, os.fsencode(one), at_fdcwd, os.fsencode(other), rename_exchange) != 0:
        code = ctypes.get_errno()
        place, copy = shlex.quote(str(other)), shlex.quote(f"{other}.copy")
        raise SeriesError(
            f"{other} could not be replaced in one step: {os.strerror(code)} (the lower layer of an overlay, a file system without exchange?). "
            f"Nothing was changed. Copy it to where it can be: cp -a {place} {copy} && rm -r {place} && mv {copy} {place}"
        )


def held(folder: Path) -> dict[str, bytes]:
    """The patches and the ``series`` that lie in a folder, by file name; none where there is no folder."""
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.suffix == ".patch" or p.name == model.LISTING} if folder.is_dir() else {}


def changed(before: dict[str, bytes], after: dict[str, bytes]) -> Exported:
    """Which files are written and removed between the two."""
    return Exported(
        tuple(sorted(name for name, content in after.items() if before.get(name) != content)), tuple(sorted(before.keys() - after.keys()))
    )


def write_folder(folder: Path, patches: dict[str, bytes], notes: Sequence[str] = ()) -> Exported:
    """Make ``folder`` hold exactly these patches, in this order.

    What else lies there stays, and so do the comments in ``series``; ``notes`` are added to them, at the end.
    """
    old, footer = model.listing(folder) if (folder / model.LISTING).is_file() else ((), ())
    footer = (*footer, *(note for note in notes if note not in footer))
    after = patches | {model.LISTING: model.render_listing(list(patches), old, footer).encode()}
    changes = changed(held(folder), after)
    if not (changes.written or changes.removed):
        return changes
    sweep(folder)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=aside_prefix(folder)) as temporary:
        aside = Path(temporary) / folder.name
        if folder.is_dir():
            shutil.copytree(folder, aside, symlinks=True)
        aside.mkdir(exist_ok=True)
        for name in changes.removed:
            (aside / name).unlink()
        for name in changes.written:
            (aside / name).write_bytes(after[name])
        if folder.is_dir():
            _exchange(aside, folder)
        else:
            aside.replace(folder)
    return changes


def _differences(folder: Path, patches: dict[str, bytes]) -> list[str]:
    """How the folder differs from these patches: content, order, missing and stray files."""
    entries, _ = model.listing(folder)
    names = [entry.name for entry in entries]
    found = {p.name: p.read_bytes() for p in folder.glob("*.patch")}
    different = [f"{name} would change" for name in patches if name in found and found[name] != patches[name]]
    different += [f"{name} would be added" for name in patches if name not in found]
    different += [f"{name} would be removed" for name in sorted(found) if name not in patches]
    if not different and names != list(patches):
        different.append(f"{model.LISTING} has another order or lacks a name")
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
                raise SeriesError(f"{repository.root}: the commit of {name}: {fault} (git commit --amend, or git rebase -i and reword.)") from e
        return {name: (Path(folder) / name).read_bytes() for name in names}


def _carry_over(repository: Repository, marker: dict[str, Any]) -> str:
    """How to take one's own commits from a tree to the one that a new apply makes."""
    own = repository.run("log", "--reverse", "--format=%h", f"{marker['commit']}..HEAD", writes=False).split()
    if not own:
        return "Run nox -s apply -- --reset for the whole series"
    return f"Run nox -s apply -- --reset, which keeps your commits, then git -C {repository.root} cherry-pick {' '.join(own)}"


def export(root: Path, folder: Path, *, check: bool = False) -> Exported:
    """Write the work tree's commits back to the folder.

    Args:
        root: the work tree.
        folder: patches/; written aside and swapped.
        check: write nothing, and raise where anything would change.

    Raises:
        SeriesError: uncommitted changes, an operation in progress, no commits, a part of a series, patches that
            changed since the tree was applied; with ``check``, a difference.
    """
    repository = Repository(root, SeriesError)
    if not repository.is_top_level():
        raise SeriesError(f"{root} is no work tree of the series; nox -s apply makes it.")
    if operation := in_progress(root):
        raise SeriesError(f"{root} is in the middle of a {operation}; finish it there (git status tells how), or abort it.")
    if changed := repository.run("status", "--porcelain").strip():
        raise SeriesError(f"{root} has uncommitted changes:\n{changed}\nCommit them, or drop them.")
    marker = _marker(root)
    if marker is None or marker["pin"] is None:
        raise SeriesError(f"{root} is nothing that nox -s apply of this version made; nothing was exported.")
    if len(marker["patches"]) < marker["of"]:
        raise SeriesError(
            f"{root} holds the first {len(marker['patches'])} of {marker['of']} patches (apply --to): exporting it would drop the rest. "
            f"{_carry_over(repository, marker)}, and amend there (git rebase -i)."
        )
    status, _, _ = repository.attempt("merge-base", "--is-ancestor", marker["base"], "HEAD")
    if status != 0:
        raise SeriesError(f"{root}: HEAD does not stand on the base {marker['base'][:12]} any more; nothing was exported.")
    patches = exported_patches(repository, marker["base"])
    if not patches:
        raise SeriesError(f"{root} has no commits on its base; nothing was exported.")
    different = _differences(folder, patches) if (folder / model.LISTING).is_file() else [f"{model.LISTING} is missing"]
    if not different:
        _remember(repository, marker, folder, patches)
        return Exported((), ())
    if check:
        raise SeriesError(f"{folder} is not what {root} says: {', '.join(different)}. Run nox -s export, or nox -s apply.")
    now = model.digests(folder)
    if moved := sorted(name for name in now.keys() | marker["patches"].keys() if now.get(name) != marker["patches"].get(name)):
        raise SeriesError(
            f"{folder} changed since {root} was applied from it: {', '.join(moved)}. Exporting would undo that. {_carry_over(repository, marker)}."
        )
    written = write_folder(folder, patches)
    _remember(repository, marker, folder, patches)
    return written


def _remember(repository: Repository, marker: dict[str, Any], folder: Path, patches: dict[str, bytes]) -> None:
    """The tree and patches/ agree: give the tree the commits that the series has everywhere, and note what it is."""
    series = model.read(folder)
    base, head = marker["base"], repository.resolve("HEAD")
    if head != marker["commit"]:
        with tempfile.TemporaryDirectory(prefix="fa2-export-") as aside:
            copy = Repository(Path(aside) / "source", SeriesError)
            repository.run("clone", "--quiet", "--shared", "--no-checkout", str(repository.root), str(copy.root), writes=False)
            copy.run("checkout", "--quiet", "--detach", base)
            copy.run(*_AM, *(str(folder.resolve() / name) for name in patches))
            repository.run("fetch", "--quiet", "--no-tags", str(copy.root), "HEAD")
            applied = copy.resolve("HEAD")
        if repository.resolve(f"{applied}^{{tree}}") != repository.resolve("HEAD^{tree}"):
            raise SeriesError(f"{folder}: the patches do not give the files of {repository.root}; this is a fault of export.")
        repository.run("update-ref", "-m", "export: the same files with the series' own dates", "HEAD", applied)
        head = applied
    _write_marker(repository.root, marker["pin"], series, base, head, len(patches))
