"""Which kernel files a change of the tree reaches, by what they include."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from scripts.matrix import ALL_KERNELS

if TYPE_CHECKING:
    from scripts.git import Repository
    from scripts.matrix import Kernel

_SOURCES = "csrc/flash_attn"


def includes(repository: Repository, commit: str) -> dict[str, frozenset[str]]:
    """For every source of upstream's and ours the sources that it includes, directly."""
    names = repository.files(commit, _SOURCES)
    by_name = {name.rsplit("/", 1)[-1]: name for name in names}
    found = {}
    for name in names:
        if name.endswith((".h", ".cu", ".cpp", ".cuh")):
            text = repository.read(f"{commit}:{name}").decode("utf-8", errors="replace")
            listed = re.findall(r'^\s*#\s*include\s*[<"]([^">]+)[">]', text, re.MULTILINE)
            found[name] = frozenset(by_name[i.rsplit("/", 1)[-1]] for i in listed if i.rsplit("/", 1)[-1] in by_name)
    return found


def _reach(graph: dict[str, frozenset[str]], start: str) -> set[str]:
    seen, waiting = set(), [start]
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += graph.get(name, frozenset())
    return seen


def kernels(repository: Repository, old: str, new: str) -> tuple[Kernel, ...]:
    """The kernel files whose objects may differ between two commits."""
    changed = set(repository.run("diff", "--name-only", old, new, "--", _SOURCES, writes=False).split("\n"))
    if repository.run("diff", "--name-only", old, new, "--", "csrc/cutlass", writes=False):
        return ALL_KERNELS
    graphs = [includes(repository, commit) for commit in (old, new)]
    return tuple(k for k in ALL_KERNELS if any(changed & _reach(graph, f"{_SOURCES}/src/{k.source}") for graph in graphs))
