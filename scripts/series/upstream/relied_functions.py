"""Upstream's functions that each patch changes or names, and which of them another release has otherwise."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from unidiff.patch import PatchSet

from scripts.series.upstream.report import Relied
from scripts.source import functions

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from unidiff.patch import Hunk

    from scripts.base.git import Repository
    from scripts.series.upstream.move import Workspace
    from scripts.series.upstream.report import Place
    from scripts.source.functions import Function

_SOURCES = "csrc/flash_attn"


@dataclass(frozen=True)
class Touched:
    """What a patch changes in upstream's files."""

    functions: frozenset[Place]
    cpp: frozenset[str] = frozenset()  # words of the lines that it adds, in whichever file
    python: frozenset[str] = frozenset()  # the same; after a dot with the dot too
    parameters: dict[Place, tuple[str, ...]] = field(default_factory=dict)  # that it gives a function


def touched(space: Workspace, patches: Sequence[str]) -> dict[str, Touched]:
    """The old base's functions that each patch's lines lie in; of our own files, by path, what they name."""
    at_base = _Functions(space.repository, space.old_base)
    found = {}
    for name, commit in zip(patches, space.commits, strict=True):
        before, after = _Functions(space.repository, f"{commit}^"), _Functions(space.repository, commit)
        places: set[Place] = set()
        parameters: dict[Place, tuple[str, ...]] = {}
        parsed = PatchSet(space.repository.diff_of(commit).decode("utf-8"))
        for file in parsed:
            if file.is_added_file or not at_base.of(file.path):
                continue
            old, new = before.of(file.path), after.of(file.path)
            names = {n for hunk in file for a, b in _lines(hunk) for n in functions.names_at(old, a, b)}
            for function in names & set(at_base.of(file.path)):
                places.add((file.path, function))
                own = [p for p in _parameters(new, function) if p not in _parameters(old, function)]
                if own:
                    parameters[file.path, function] = tuple(own)
        found[name] = Touched(frozenset(places), *_words(parsed), parameters)
    upstream = frozenset(space.repository.files(space.upstream))
    for path in space.repository.files(space.old_base):
        if path not in upstream:
            text = (space.repository.find(f"{space.old_base}:{path}") or b"").decode("utf-8")
            found[path] = Touched(frozenset(), *_words_of(path, text))
    return found


def _words(parsed: PatchSet) -> tuple[frozenset[str], frozenset[str]]:
    """Those of the lines that a patch adds: of C++, and of Python."""
    cpp: set[str] = set()
    python: set[str] = set()
    for file in parsed:
        added = "".join(line.value for hunk in file for line in hunk if line.is_added)
        words = _words_of(file.path, added)
        cpp |= words[0]
        python |= words[1]
    return frozenset(cpp), frozenset(python)


def _words_of(path: str, text: str) -> tuple[frozenset[str], frozenset[str]]:
    if path.endswith(functions.CPP):
        return frozenset(re.findall(r"\w+", text)), frozenset()
    return frozenset(), frozenset(re.findall(r"\.?\w+", text) if path.endswith(".py") else [])


def changed(
    space: Workspace,
    touched_by_patch: Mapping[str, Touched],
    git: tuple[Repository, str, str] | None = None,
) -> tuple[Relied, ...]:
    """Of the functions that patches change or name, those that the new base has otherwise.

    A file that is gone is told by the patch's outcome.
    """
    files = {file for t in touched_by_patch.values() for file, _ in t.functions}
    became = _became(space, files)
    relied = {
        patch: {place: how for place in sorted(became) if (how := _how(t, place)) is not None}
        for patch, t in touched_by_patch.items()
    }
    commits = _commits(git, {place for places in relied.values() for place in places}) if git else {}
    return tuple(
        Relied(patch=patch, how=how, file=p[0], function=p[1], became=became[p], commits=commits.get(p, ()))
        for patch, places in relied.items()
        for p, how in places.items()
    )


def _how(patch: Touched, place: Place) -> Literal["changes", "names"] | None:
    if place in patch.functions:
        return "changes"
    file, name = place
    last = name.rsplit(".", 1)[-1]
    if file.endswith(".py"):
        # Upstream's generator of kernel files, among the C++, is called by nobody.
        return "names" if not file.startswith(_SOURCES) and {last, f".{last}"} & patch.python else None
    return "names" if last in patch.cpp else None


def _became(space: Workspace, files: set[str]) -> dict[Place, Literal["changed", "gone"]]:
    """The old base's functions in its C++ and in these files that the new base has otherwise, or no more."""
    old, new = (_Functions(space.repository, base) for base in (space.old_base, space.new_base))
    differing = space.repository.run(
        "diff",
        "--name-only",
        "--diff-filter=M",
        space.old_base,
        space.new_base,
        "--",
        _SOURCES,
        *files,
        writes=False,
    )
    became: dict[Place, Literal["changed", "gone"]] = {}
    for file in differing.splitlines():
        for name, function in old.of(file).items():
            if name not in new.of(file):
                became[file, name] = "gone"
            elif new.of(file)[name].meaning != function.meaning:
                became[file, name] = "changed"
    return became


def _commits(git: tuple[Repository, str, str], places: Iterable[Place]) -> dict[Place, tuple[str, ...]]:
    """Upstream's commits after the old release that changed functions.

    ``git log -L`` follows lines, and tells of a comment as well; here the function's text is compared.
    """
    upstream, first, last = git
    by_file: dict[str, set[str]] = {}
    for file, name in places:
        by_file.setdefault(file, set()).add(name)
    found: dict[Place, list[str]] = {}
    for file, names in by_file.items():
        listed = upstream.run(
            "log", "--no-merges", "--format=%H %h %s", f"{first}..{last}", "--", file, writes=False
        )
        for commit, _, title in (line.partition(" ") for line in listed.splitlines()):
            before, after = (_Functions(upstream, c).of(file) for c in (f"{commit}^", commit))
            for name in names:
                if _meaning(before, name) != _meaning(after, name):
                    found.setdefault((file, name), []).append(title)
    return {place: tuple(titles) for place, titles in found.items()}


@dataclass(frozen=True)
class _Functions:
    """Those of the files of one commit."""

    repository: Repository
    commit: str
    _known: dict[str, Mapping[str, Function]] = field(default_factory=dict)

    def of(self, path: str) -> Mapping[str, Function]:
        """Those of a file; none where the commit lacks it."""
        if path not in self._known:
            content = self.repository.find(f"{self.commit}:{path}")
            self._known[path] = {} if content is None else functions.functions(path, content)
        return self._known[path]


def _parameters(found: Mapping[str, Function], name: str) -> tuple[str, ...]:
    return found[name].parameters if name in found else ()


def _meaning(found: Mapping[str, Function], name: str) -> str:
    return found[name].meaning if name in found else ""


def _lines(hunk: Hunk) -> Iterator[tuple[int, int]]:
    """The lines before the patch that a hunk removes or adds lines between, as first and last."""
    at = hunk.source_start - 1  # the last line that was passed
    for line in hunk:
        if line.is_added:
            # Between two lines: a function that has both.
            yield (at, at + 1)
        else:
            at = line.source_line_no or at
            if line.is_removed:
                yield (at, at)
