"""What a file of the tree is for: its feature, patches that touch or call it, kernel files, tests."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scripts.series import affected_kernels, own

if TYPE_CHECKING:
    from pathlib import Path

    from scripts.base.git import Repository
    from scripts.series.features import Features
    from scripts.series.model import Series
    from scripts.source.kernel_set import Kernel


@dataclass(frozen=True)
class Hook:
    """A patch that touches a file, or whose lines name it."""

    patch: str
    through: str = ""  # the file of ours that its lines name in the file's place


@dataclass(frozen=True)
class FileReach:
    """What a file is for."""

    path: str
    ours: bool
    features: tuple[str, ...]  # its own; of upstream's files those of the patches that touch it
    patches: tuple[Hook, ...]
    kernels: tuple[Kernel, ...]  # that include it
    tests: tuple[str, ...]  # of its features, and of the patches that touch it


def find(
    repository: Repository, commit: str, path: str, series: Series, told: Features | None, root: Path
) -> FileReach:
    """What a file of the whole tree is for.

    Args:
        repository: a tree with the series.
        commit: its last.
        path: of a file that it has.
        series: the patches, and our own files.
        told: the features of our own files.
        root: of this repository, in which tests are looked for.
    """
    graph = affected_kernels.includes(repository, commit)
    ours = path in series.own.contents
    touching = [patch for patch in series.patches if any(change.path == path for change in patch.files)]
    hooks = _hooks(series, graph, path) if ours else tuple(Hook(patch.name) for patch in touching)
    features = (told.of(path) if told else ()) if ours else tuple(dict.fromkeys(p.feature for p in touching))
    tests = [test for patch in touching for test in affected_kernels.tests(patch, root)]
    tests += [test for name in features if told and name in told.entries for test in told.entries[name].tests]
    kernels = affected_kernels.including(graph, path)
    return FileReach(path, ours, features, hooks, kernels, tuple(dict.fromkeys(tests)))


def _hooks(series: Series, graph: dict[str, frozenset[str]], path: str) -> tuple[Hook, ...]:
    """The patches that name a file of ours; where none does, those of files that include it, and so on."""
    seen, level = {path}, [path]
    while level:
        named = {
            patch.name: next((name for name in level if patch.calls(name)), None) for patch in series.patches
        }
        if hooks := [Hook(patch, "" if name == path else name) for patch, name in named.items() if name]:
            return tuple(hooks)
        level = [
            name
            for name, content in series.own.contents.items()
            if name not in seen and any(_uses(name, content, graph, below) for below in level)
        ]
        seen.update(level)
    return ()


def _uses(name: str, content: bytes, graph: dict[str, frozenset[str]], path: str) -> bool:
    """Whether one file of ours includes or imports another."""
    if not (name.endswith(".py") and path.endswith(".py")):
        return path in graph.get(name, ())
    imports = re.findall(r"(?m)^\s*(?:from|import) .*(?:\n(?:    .*|\)))*", content.decode())
    return own.naming(path).search("\n".join(imports)) is not None
