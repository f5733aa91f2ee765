"""What upstream adds, drops and changes between two releases, where the build or a patch may not see it.

A merge without a conflict says nothing of a new kernel file, of a parameter that others pass by place, or
of a function that now means something else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scripts.series.upstream import public_functions, relied_functions, report as upstream_report
from scripts.series.upstream.report import Listing, Signature, UpstreamChanges
from scripts.source import build_script, kernel_set

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from scripts.base.git import Repository
    from scripts.series.upstream.move import Workspace
    from scripts.source.matrix_tables import Upstream


def compare(
    space: Workspace,
    patches: Sequence[str],
    git: tuple[Repository, str, str] | None = None,
    package: str | None = None,
) -> UpstreamChanges:
    """Compare the two bases of a workspace.

    Args:
        space: from :func:`scripts.series.upstream.move.workspace`.
        patches: their names, in the order of the series.
        package: of a python upstream.
        git: upstream's repository with the old and the new commit, where there is one.
        package: of a python upstream, its folder.
    """
    repository, bases = space.repository, (space.old_base, space.new_base)
    scripts = [build_script.read(_read(repository, base, "setup.py")) for base in bases]
    manifests = [_read(repository, base, "MANIFEST.in").decode("utf-8").splitlines() for base in bases]
    touched = relied_functions.touched(space, patches)
    files = _files(space, upstream_report.folder(package))
    there = repository.files(space.new_base, f"{kernel_set.FOLDER}/")
    return UpstreamChanges(
        files=files,
        sources=_listing(scripts[0].sources, scripts[1].sources),
        flags=_listing(scripts[0].flags, scripts[1].flags),
        manifest=_listing(*manifests),
        unknown_kernels=kernel_set.unknown(there),
        signatures=_signatures(space, package, touched),
        relied=relied_functions.changed(space, touched, git),
    )


def between(git: Repository | None, old: Upstream, new: Upstream) -> tuple[Repository, str, str] | None:
    """Upstream's repository with the commits of two pins; None where it does not have both."""
    if git is None or not git.is_top_level():
        return None
    commits = (old.commit, new.commit)
    if any(git.attempt("cat-file", "-e", f"{c}^{{commit}}")[0] for c in commits):
        return None
    return git, *commits


def _read(repository: Repository, commit: str, path: str) -> bytes:
    """A file of a commit; empty where it has none."""
    return repository.find(f"{commit}:{path}") or b""


def _listing(old: Iterable[str], new: Iterable[str]) -> Listing:
    before, after = dict.fromkeys(old), dict.fromkeys(new)
    return Listing(
        added=tuple(name for name in after if name not in before),
        gone=tuple(name for name in before if name not in after),
    )


def _files(space: Workspace, folder: str) -> Listing:
    listed = space.repository.run(
        "diff", "--name-status", "--no-renames", *_bases(space), "--", folder, writes=False
    )
    by_status: dict[str, list[str]] = {}
    for status, _, name in (line.partition("\t") for line in listed.splitlines()):
        by_status.setdefault(status, []).append(name)
    return Listing(
        added=tuple(by_status.get("A", ())),
        gone=tuple(by_status.get("D", ())),
        changed=tuple(by_status.get("M", ())),
    )


def _bases(space: Workspace) -> tuple[str, str]:
    return space.old_base, space.new_base


# --- signatures ---


def _public(
    repository: Repository, commit: str, package: str | None, touched: Mapping[str, relied_functions.Touched]
) -> dict[str, public_functions.Called]:
    def read(path: str) -> bytes:
        return _read(repository, commit, path)

    if package is None:
        return public_functions.of_extension(read)
    words: frozenset[str] = frozenset().union(*(t.python for t in touched.values()))
    return public_functions.of_package(package, read, words)


def _signatures(
    space: Workspace, package: str | None, touched: Mapping[str, relied_functions.Touched]
) -> tuple[Signature, ...]:
    old, new = (_public(space.repository, commit, package, touched) for commit in _bases(space))
    changed = []
    for called in dict.fromkeys([*old, *new]):
        before, after = old.get(called), new.get(called)
        parameters = [function.parameters if function else None for function in (before, after)]
        if (function := before or after) is None or parameters[0] == parameters[1]:
            continue
        file, name = function.file, function.name
        by = {patch: t for patch, t in touched.items() if (file, name) in t.functions}
        added = {patch: t.parameters.get((file, name), ()) for patch, t in by.items()}
        changed.append(
            Signature(
                function=called,
                file=file,
                old=parameters[0],
                new=parameters[1],
                patches=tuple(by),
                own={patch: names for patch, names in added.items() if names},
                named=tuple(p for p, t in touched.items() if _names(t, file, name, called)),
            )
        )
    return tuple(changed)


def _names(patch: relied_functions.Touched, file: str, name: str, called: str) -> bool:
    """Whether lines that a patch adds name a function: as Python calls it, or C++ does."""
    method = f".{called.rsplit('.', 1)[-1]}"
    if file == build_script.BINDING:
        return name in patch.cpp or method in patch.python
    return bool({name, method} & patch.python)
