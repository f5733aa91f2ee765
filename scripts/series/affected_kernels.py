"""What a change of the tree reaches: kernel files, by what they include; upstream's lines; tests."""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unidiff.patch import PatchSet

from scripts.series import guards
from scripts.source.kernel_set import ALL_KERNELS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from scripts.base.git import Repository
    from scripts.series.model import Patch
    from scripts.source.kernel_set import Kernel

_SOURCES = "csrc/flash_attn"


def includes(repository: Repository, commit: str) -> dict[str, frozenset[str]]:
    """For every source of upstream's and ours the sources that it includes, directly."""
    names = repository.files(commit, _SOURCES)
    included = {}
    for name in names:
        if name.endswith((".h", ".cu", ".cpp", ".cuh")):
            text = repository.read(f"{commit}:{name}").decode("utf-8", errors="replace")
            listed = re.findall(r'^\s*#\s*include\s*[<"]([^">]+)[">]', text, re.MULTILINE)
            included[name] = frozenset(_meant(name, said, names) for said in listed) - {""}
    return included


def _meant(by: str, said: str, names: Sequence[str]) -> str:
    """The source that a file includes, beside it if there is one; empty: none of these.

    >>> names = ["csrc/a/s.h", "csrc/b/s.h", "csrc/c.h"]
    >>> [_meant("csrc/b/x.cpp", said, names) for said in ("s.h", "a/s.h", "../c.h", "cute/c.h", "vector")]
    ['csrc/b/s.h', 'csrc/a/s.h', 'csrc/c.h', 'csrc/c.h', '']
    """
    beside = posixpath.normpath(posixpath.join(posixpath.dirname(by), said))
    if beside in names:
        return beside
    last = posixpath.basename(said)
    fitting = [name for name in names if posixpath.basename(name) == last]
    return next((name for name in fitting if name.endswith(f"/{said}")), fitting[0] if fitting else "")


def _reach(graph: dict[str, frozenset[str]], start: str) -> set[str]:
    seen, waiting = set(), [start]
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += graph.get(name, frozenset())
    return seen


def including(graph: dict[str, frozenset[str]], path: str) -> tuple[Kernel, ...]:
    """The kernel files that include a file, however deep."""
    return tuple(k for k in ALL_KERNELS if path in _reach(graph, f"{_SOURCES}/src/{k.source}"))


def kernels(repository: Repository, old: str, new: str) -> tuple[Kernel, ...]:
    """The kernel files whose objects may differ between two commits."""
    changed = set(repository.run("diff", "--name-only", old, new, "--", _SOURCES, writes=False).split("\n"))
    if repository.run("diff", "--name-only", old, new, "--", "csrc/cutlass", writes=False):
        return ALL_KERNELS
    graphs = [includes(repository, commit) for commit in (old, new)]
    return tuple(
        k
        for k in ALL_KERNELS
        if any(changed & _reach(graph, f"{_SOURCES}/src/{k.source}") for graph in graphs)
    )


@dataclass(frozen=True)
class Reach:
    """What a patch touches and reaches."""

    upstream: tuple[str, ...]  # FILE:FIRST-LAST of the pinned release
    own: tuple[str, ...]  # files of ours that it adds, or that its lines name
    kernels: tuple[Kernel, ...]  # whose objects may be others with it
    binding: bool  # whether what is compiled for each torch and Python may be
    tests: tuple[str, ...]  # of its guards, and those that its message names


def _places(repository: Repository, base: str, commit: str) -> Iterator[str]:
    """Upstream's lines that a commit replaces or adds lines between.

    Blame knows where they were before other patches moved them.
    """
    diff = repository.run(
        "show", "--format=", "--no-renames", "--no-ext-diff", "--unified=1", commit, writes=False
    )
    for file in PatchSet(diff):
        for hunk in () if file.is_added_file else file:
            span = f"-L{hunk.source_start},+{hunk.source_length}"
            blamed = repository.run(
                "blame", "-s", "--porcelain", span, f"{commit}^", "--", file.path, writes=False
            )
            lines = sorted(int(line) for line in re.findall(rf"(?m)^{base} (\d+) \d+", blamed))
            if lines:
                yield f"{file.path}:{lines[0]}" + (f"-{lines[-1]}" if lines[-1] > lines[0] else "")


def tests(patch: Patch, root: Path) -> tuple[str, ...]:
    """The tests of a patch's guards, and those that its message names and that a repository has."""
    named = [guards.parse(text) for text in patch.guards]
    found = [f"{guard.path}::{guard.what}" for guard in named if guard.kind == "test"]
    found += [name for name in re.findall(r"\btests/[\w./]*\w", patch.body) if (root / name).exists()]
    return tuple(dict.fromkeys(found))


def reach(
    repository: Repository, base: str, commit: str, patch: Patch, root: Path, ours: Iterable[str] = ()
) -> Reach:
    """What a patch of the series reaches.

    Args:
        repository: a tree with the series as commits.
        base: the commit of the pinned release's files.
        commit: the patch's.
        patch: as it was read.
        root: of this repository, in which tests are looked for.
        ours: our own files, by their paths in the tree.
    """
    before = frozenset(repository.files(base))
    added = [change.path for change in patch.files if change.path not in before]
    called = [path for path in ours if patch.calls(path)]
    binding = any(change.path.startswith(_SOURCES) or change.path.endswith(".py") for change in patch.files)
    return Reach(
        tuple(_places(repository, base, commit)),
        tuple(dict.fromkeys((*added, *called))),
        kernels(repository, f"{commit}^", commit),
        binding,
        tests(patch, root),
    )
