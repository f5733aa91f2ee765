"""The patch series: read it, check it, apply it as commits, write the commits back.

One series on one base always ends in one commit id: author, committer and dates are fixed, and the base
is a commit of upstream's files alone. Applying is exact: no fuzz, no offset.
"""

from __future__ import annotations

import email.policy
import hashlib
import json
import re
import shutil
import tempfile
from dataclasses import dataclass
from email.parser import BytesParser
from pathlib import Path
from typing import TYPE_CHECKING

from scripts import upstream
from scripts.errors import SeriesError
from scripts.git import Repository

if TYPE_CHECKING:
    from scripts.matrix import Upstream

FEATURES = ("build", "determinism", "long-sequences", "mask-bias")
_STATUS = re.compile(r"Pending|Submitted \[.+\]|Backport \[.+\]|Inappropriate \[.+\]")
_MARKER = "series.json"  # in the repository's .git: what was applied
_MARKER_FORMAT = 1


@dataclass(frozen=True)
class Patch:
    """One mail file of ``git format-patch``."""

    name: str
    content: bytes
    subject: str
    body: str
    upstream_status: str
    feature: str
    files: tuple[str, ...]


@dataclass(frozen=True)
class Series:
    """The patches in order."""

    folder: Path
    patches: tuple[Patch, ...]

    def digest(self, base: str) -> str:
        """SHA-256 over the base, the order and the bytes of every patch."""
        sha = hashlib.sha256()
        for part in (base.encode(), *(x for p in self.patches for x in (p.name.encode(), p.content))):
            sha.update(len(part).to_bytes(8, "big") + part)
        return sha.hexdigest()


@dataclass(frozen=True)
class Tree:
    """A work tree with the series applied."""

    root: Path
    base: str
    commit: str
    digest: str


def parse_patch(path: Path) -> Patch:
    """Read one patch; a SeriesError names what its header lacks."""
    content = path.read_bytes()
    message = BytesParser(policy=email.policy.default).parsebytes(content)
    text = content.decode("utf-8")
    subject = re.sub(r"^\[PATCH[^\]]*\] ", "", str(message["Subject"] or "").replace("\n", ""))
    if not subject:
        raise SeriesError(f"{path}: no Subject; patches are mail files written by git format-patch (nox -s export writes them).")
    payload = text.partition("\n\n")[2]
    body, separator, diff = payload.partition("\n---\n")
    if not separator or "\ndiff --git " not in diff:
        raise SeriesError(f"{path}: no diff after the message.")
    trailers = dict(re.findall(r"^(Upstream-Status|Feature): (.+)$", body, re.MULTILINE))
    for name, known in (("Upstream-Status", "Pending, Submitted [where], Backport [commit], Inappropriate [why]"), ("Feature", ", ".join(FEATURES))):
        if name not in trailers:
            raise SeriesError(f"{path}: the message has no trailer {name}: one of {known}.")
    if not _STATUS.fullmatch(trailers["Upstream-Status"]):
        raise SeriesError(
            f"{path}: Upstream-Status {trailers['Upstream-Status']!r} is not Pending, Submitted [where], Backport [commit] or Inappropriate [why]."
        )
    if trailers["Feature"] not in FEATURES:
        raise SeriesError(f"{path}: Feature {trailers['Feature']!r} is none of {', '.join(FEATURES)}.")
    prose = re.split(r"^Upstream-Status: ", body, maxsplit=1, flags=re.MULTILINE)[0].strip()
    files = tuple(re.findall(r"^diff --git a/(\S+) b/", diff, re.MULTILINE))
    return Patch(path.name, content, subject, prose, trailers["Upstream-Status"], trailers["Feature"], files)


def read(folder: Path) -> Series:
    """Read ``series`` and the patches it names; every file in the folder must be named once."""
    listing = folder / "series"
    try:
        lines = listing.read_text(encoding="utf-8").splitlines()
    except OSError as e:
        raise SeriesError(f"{listing}: {e.strerror}.") from e
    names: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        name = line.partition("#")[0].strip()
        if not name:
            continue
        if name in names:
            raise SeriesError(f"{listing}:{number}: {name} is already named in line {names[name]}.")
        if not (folder / name).is_file():
            raise SeriesError(f"{listing}:{number}: {folder / name} does not exist.")
        names[name] = number
    if stray := sorted(p.name for p in folder.glob("*.patch") if p.name not in names):
        raise SeriesError(f"{listing}: does not name {', '.join(stray)}; add a line, or delete the file.")
    return Series(folder, tuple(parse_patch(folder / name) for name in names))


def _prove_exact(repository: Repository, path: Path) -> None:
    """``git am`` takes a hunk that moved; we do not: it may have moved into another function."""
    status, out, err = repository.attempt("apply", "--check", "--verbose", "--whitespace=nowarn", str(path))
    report = f"{out}\n{err}"
    if "Skipped patch" in report:
        raise SeriesError(f"{path.name}: git skipped it: {repository.root} is inside another repository.")
    offsets = re.findall(r"^Hunk #\d+ succeeded at .*$", report, re.MULTILINE)
    if status != 0 or offsets:
        lines = [line for line in report.splitlines() if line.startswith(("error:", "Hunk #"))]
        raise SeriesError(f"{path.name} does not apply exactly:\n" + "\n".join("    " + line for line in lines))


def _reuse(series: Series, root: Path, digest: str) -> Tree | None:
    """The finished tree when it is of these bytes; None when it may be replaced."""
    finished = Repository(root, SeriesError)
    marker = root / ".git" / _MARKER
    if not marker.is_file() or not finished.is_top_level():
        return None
    advice = "run nox -s export to keep them, or delete the folder to start from the series"
    if changed := finished.run("status", "--porcelain").strip():
        raise SeriesError(f"{root} has changes that are in no patch:\n{changed}\nCommit them there and {advice}.")
    found = json.loads(marker.read_text(encoding="utf-8"))
    head = finished.run("rev-parse", "HEAD").strip()
    if head == found["commit"]:
        same = found.get("format") == _MARKER_FORMAT and found["digest"] == digest
        return Tree(root, found["base"], head, digest) if same else None
    with tempfile.TemporaryDirectory(dir=root.parent) as folder:
        names = format_patches(root, found["base"], Path(folder))
        exported = {name: (Path(folder) / name).read_bytes() for name in names}
    if exported != {p.name: p.content for p in series.patches}:
        raise SeriesError(f"{root} has commits that are in no patch; {advice}.")
    return None


def apply(series: Series, pin: Upstream, checkout: upstream.Checkout, root: Path) -> Tree:
    """Make ``root`` a repository with upstream's files as one commit and each patch as one more.

    A tree that was applied from the same bytes is taken as it is. Otherwise it is made aside and renamed,
    so that an interrupted run leaves the old one or none.

    Raises:
        SeriesError: a patch does not apply exactly, or the finished tree was changed by hand.
    """
    digest = series.digest(f"{pin.distribution} {pin.version} {pin.commit} {pin.cutlass}")
    if (reused := _reuse(series, root, digest)) is not None:
        return reused
    root.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(dir=root.parent, prefix=root.name + "."))
    try:
        work = aside / "tree"
        upstream.materialise(checkout, work)
        repository = Repository.create(work, SeriesError)
        repository.run("add", "--all", "--force")
        repository.run("commit", "--quiet", "-m", f"{pin.distribution} {pin.version}")
        base = repository.run("rev-parse", "HEAD").strip()
        for patch in series.patches:
            path = (series.folder / patch.name).resolve()
            _prove_exact(repository, path)
            repository.run("am", "--quiet", "--no-3way", "--committer-date-is-author-date", "--keep-cr", str(path))
        commit = repository.run("rev-parse", "HEAD").strip()
        facts = {"format": _MARKER_FORMAT, "digest": digest, "base": base, "commit": commit}
        (work / ".git" / _MARKER).write_text(json.dumps(facts) + "\n", encoding="utf-8")
        shutil.rmtree(root, ignore_errors=True)
        work.replace(root)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return Tree(root, base, commit, digest)


def format_patches(tree: Path, base: str, target: Path) -> list[str]:
    """Write the commits after ``base`` as canonical patches into ``target``; return their names in order."""
    repository = Repository(tree, SeriesError)
    options = ["--zero-commit", "--no-signature", "--no-numbered", "--no-renames", "--diff-algorithm=histogram"]
    options += [
        "--stat=72",
        "--no-attach",
        "--no-thread",
        "--no-add-header",
        "--no-encode-email-headers",
        "--no-full-index",
        "--abbrev=12",
        "--filename-max-length=100",
    ]
    out = repository.run("format-patch", *options, f"--output-directory={target.resolve()}", f"{base}..HEAD", writes=False)
    return [Path(line).name for line in out.splitlines()]


def export(tree: Path, folder: Path, *, check: bool = False) -> list[str]:
    """Write the work tree's commits back to the folder; return the names of files that changed.

    The folder is written aside and swapped. With ``check`` nothing is written.

    Raises:
        SeriesError: uncommitted changes, an operation in progress, no commits; with ``check``, a difference.
    """
    repository = Repository(tree, SeriesError)
    if not repository.is_top_level():
        raise SeriesError(f"{tree} is no work tree of the series; nox -s apply makes it.")
    if changed := repository.run("status", "--porcelain").strip():
        raise SeriesError(f"{tree} has uncommitted changes:\n{changed}\nCommit them, or drop them.")
    if any((tree / ".git" / name).exists() for name in ("rebase-merge", "rebase-apply", "CHERRY_PICK_HEAD", "MERGE_HEAD")):
        raise SeriesError(f"{tree} is in the middle of a rebase, am or cherry-pick; finish it first.")
    base = repository.run("rev-list", "--max-parents=0", "HEAD").strip()
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=folder.name + ".") as temporary:
        aside = Path(temporary) / "new"
        aside.mkdir()
        names = format_patches(tree, base, aside)
        if not names:
            raise SeriesError(f"{tree} has no commits on its base; nothing was exported.")
        (aside / "series").write_text("".join(name + "\n" for name in names), encoding="utf-8")
        before = {p.name: p.read_bytes() for p in folder.iterdir()} if folder.is_dir() else {}
        after = {p.name: p.read_bytes() for p in aside.iterdir()}
        changed_names = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
        if changed_names and check:
            raise SeriesError(f"{folder} is not what {tree} says: {', '.join(changed_names)} would change. Run nox -s export.")
        if changed_names:
            old = Path(temporary) / "old"
            if folder.is_dir():
                folder.replace(old)
            aside.replace(folder)
    return changed_names
