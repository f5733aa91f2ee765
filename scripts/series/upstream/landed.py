"""Which patches another release has already, and which patch needs which."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from unidiff.patch import PatchSet

from scripts.series.upstream.move import Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from scripts.base.git import Repository
    from scripts.series.model import Patch
    from scripts.series.upstream.move import Workspace


def needs(repository: Repository, commits: Sequence[str]) -> dict[str, frozenset[str]]:
    """For each commit the earlier ones that it needs.

    It changes their lines or stands beside them, or it includes their new files.
    """
    made: dict[str, str] = {}
    needed: dict[str, frozenset[str]] = {}
    for commit in commits:
        parsed = PatchSet(repository.diff_of(commit).decode("utf-8"))
        blamed_commits: set[str] = set()
        for file in parsed:
            if file.is_added_file:
                made[file.path] = commit
            else:
                ranges = [
                    f"-L{hunk.source_start},+{hunk.source_length}" for hunk in file if hunk.source_length
                ]
                if ranges:
                    blamed = repository.run(
                        "blame", "--porcelain", *ranges, f"{commit}^", "--", file.path, writes=False
                    )
                    blamed_commits |= set(re.findall(r"^([0-9a-f]{40}) \d+ \d+", blamed, re.MULTILINE))
            text = "\n".join(line.value for hunk in file for line in hunk if line.is_added)
            for path, maker in made.items():
                stem = path.rsplit("/", 1)[-1]
                module = path.removesuffix(".py").replace("/", ".")
                name = rf"({re.escape(module)}|\.+{re.escape(module.rpartition('.')[2])})"
                if f'#include "{stem}"' in text or re.search(rf"(from|import) {name}\b", text):
                    blamed_commits.add(maker)
        needed[commit] = frozenset(blamed_commits & set(commits) - {commit})
    return needed


def _patch_files(repository: Repository, commit: str, folder: Path) -> tuple[Path, list[Path]]:
    """A commit's diff as one file, and each of its substantial hunks as one."""
    whole = folder / f"{commit}.diff"
    whole.write_bytes(repository.diff_of(commit))
    hunks: list[Path] = []
    for file in PatchSet(whole.read_text(encoding="utf-8")):
        header = str(file).split("\n@@", 1)[0]
        for hunk in file:
            # A hunk that adds a brace or only removes lines would reverse-apply to many a file by chance.
            if not any(line.is_added and len(re.sub(r"\W", "", line.value)) >= 8 for line in hunk):
                continue
            path = folder / f"{commit}.{len(hunks)}.diff"
            path.write_text(f"{header}\n{hunk}", encoding="utf-8")
            hunks.append(path)
    return whole, hunks


def _reverses(repository: Repository, patch: Path) -> bool:
    status, _, _ = repository.attempt("apply", "--reverse", "--check", "--whitespace=nowarn", str(patch))
    return status == 0


def landed(space: Workspace, patches: Sequence[Patch]) -> dict[str, tuple[Outcome, str]]:
    """The patches whose changes the new base has, by reverse application from the last to the first.

    A patch that is there whole is taken out of the files before the one below it is looked for. The work tree
    is the new base's, before and after.
    """
    repository, outcomes = space.repository, {}
    with tempfile.TemporaryDirectory(prefix="fa2-landed-") as folder:
        for commit, patch in reversed(list(zip(space.commits, patches, strict=True))):
            whole, hunks = _patch_files(repository, commit, Path(folder))
            if _reverses(repository, whole) and hunks:
                repository.run("apply", "--reverse", "--whitespace=nowarn", str(whole))
                outcomes[patch.name] = (
                    Outcome.LANDED_IDENTICAL,
                    f"the whole patch reverse-applies to {space.new_name}",
                )
                continue
            there = sum(_reverses(repository, hunk) for hunk in hunks)
            if there:
                evidence = f"{there} of its {len(hunks)} hunks reverse-apply to {space.new_name}"
                outcomes[patch.name] = (
                    Outcome.LANDED_MODIFIED if 2 * there > len(hunks) else Outcome.CONFLICT,
                    evidence,
                )
    repository.discard(space.new_base)
    return outcomes


def landed_in(upstream: Repository, space: Workspace, old: str, new: str) -> dict[str, str]:
    """The series' commits whose patch-id a commit of upstream's between ``old`` and ``new`` has.

    Returns the series' commit to upstream's, told in a line.
    """
    by_patch_id = {_patch_id(space.repository, commit): commit for commit in space.commits}
    touched = sorted(
        {
            name
            for c in space.commits
            for name in space.repository.run("diff-tree", "--no-commit-id", "-r", "--name-only", c).split(
                "\n"
            )
        }
    )
    upstreams = {}
    for commit in upstream.run(
        "rev-list", "--no-merges", f"{old}..{new}", "--", *touched, writes=False
    ).split():
        if (own_commit := by_patch_id.get(_patch_id(upstream, commit))) is not None:
            upstreams[own_commit] = upstream.run("log", "-1", "--format=%h %s", commit, writes=False)
    return upstreams


def _patch_id(repository: Repository, commit: str) -> str:
    with tempfile.TemporaryDirectory(prefix="fa2-id-") as folder:
        diff = Path(folder) / "diff"
        diff.write_bytes(repository.diff_of(commit))
        return repository.run("patch-id", "--stable", writes=False, stdin=diff).split(" ")[0]
