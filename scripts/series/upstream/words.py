"""What upstream changed, told to people: rows of a table, and a short list."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scripts.series.upstream import report as upstream_report
from scripts.source import kernel_set

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from scripts.series.upstream.report import Listing, Signature, UpstreamChanges

_SHOWN = 4


def rows(changes: UpstreamChanges, package: str | None = None) -> dict[str, str]:
    """Cells of a table by the names of their rows; the same rows for every release of an upstream.

    Args:
        changes: to be told.
        package: of a python upstream, of which nothing is compiled.
    """
    relied = {r.place for r in changes.relied}
    by = {r.patch for r in changes.relied}
    compiled = {
        "kernel files that are not known here": _many(len(changes.unknown_kernels)),
        "sources in setup.py": _counts(changes.sources),
        "flags in setup.py": _counts(changes.flags),
        "lines of MANIFEST.in": _counts(changes.manifest),
    }
    return {
        f"files of {upstream_report.folder(package)}": _counts(changes.files),
        **({} if package else compiled),
        "parameters of public functions": _many(len(changes.signatures)),
        "functions that patches rely on": f"{len(relied)}, of {_patches_and_files(by)}" if relied else "–",
    }


def lines(changes: UpstreamChanges, patches: Sequence[str], package: str | None = None) -> list[str]:
    """The same as a list, with names and commits; empty where nothing changed.

    Args:
        changes: to be told.
        patches: all names of the series, in order. People know patches by their numbers.
        package: of a python upstream.
    """
    numbers = {patch: number for number, patch in enumerate(patches, 1)}
    told = []
    if changes.unknown_kernels:
        told.append(f"not known here: {_few(changes.unknown_kernels)}. A wheel would lack them.")
        told += kernel_set.how_to_know(changes.unknown_kernels).splitlines()
    for what, listing in (
        (upstream_report.folder(package), changes.files),
        ("setup.py compiles", changes.sources),
        ("setup.py's flags", changes.flags),
        ("MANIFEST.in", changes.manifest),
    ):
        told += [f"{what}: {words}" for words in _listing(listing)]
    for signature in changes.signatures:
        told += _signature(signature, numbers)
    return [*told, *_relied(changes, numbers)]


def _relied(changes: UpstreamChanges, numbers: Mapping[str, int]) -> Iterator[str]:
    """Functions that patches rely on, each with its patches and with upstream's commits."""
    for place in dict.fromkeys(r.place for r in changes.relied):
        those = [r for r in changes.relied if r.place == place]
        became = "has changed" if those[0].became == "changed" else "is gone"
        by = [
            f"{how} {_named([r.patch for r in those if r.how == verb], numbers)}"
            for verb, how in (("changes", "has lines of"), ("names", "named by"))
            if any(r.how == verb for r in those)
        ]
        yield f"{place[0]}: {place[1]} {became}; {', '.join(by)}"
        yield from (f"    {commit}" for commit in those[0].commits)


def _signature(signature: Signature, numbers: Mapping[str, int]) -> Iterator[str]:
    yield f"{signature.function} {signature.what}"
    if signature.patches:
        yield f"    has lines of {_named(signature.patches, numbers)}"
    for patch, own in signature.own.items():
        yield f"    {_named([patch], numbers)} gives it {', '.join(own)}: look at who passes by place"
    if signature.named:
        yield f"    named by {_named(signature.named, numbers)}: look at what is passed by place"


def _listing(listing: Listing) -> Iterator[str]:
    for verb, names in (("added", listing.added), ("gone", listing.gone), ("changed", listing.changed)):
        if names:
            yield f"{len(names)} {verb}: {_few([name.rsplit('/', 1)[-1] for name in names])}"


def _named(patches: Sequence[str], numbers: Mapping[str, int]) -> str:
    """How people name patches, and our own files.

    >>> numbers = {"A.patch": 1, "B.patch": 12}
    >>> _named(["A.patch", "B.patch"], numbers), _named(["A.patch", "src/fork_a.h"], numbers)
    ('patches 1, 12', 'patch 1, fork_a.h')
    """
    those = [str(numbers[patch]) for patch in patches if patch in numbers]
    files = [patch.rsplit("/", 1)[-1] for patch in patches if patch not in numbers]
    listed = [f"patch{'es' * (len(those) > 1)} {', '.join(those)}"] if those else []
    return ", ".join((*listed, *files))


def _few(names: Sequence[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _many(count: int) -> str:
    return str(count) if count else "–"


def _patches_and_files(names: Collection[str]) -> str:
    """How many of each.

    >>> _patches_and_files(["A.patch"]), _patches_and_files(["A.patch", "B.patch", "src/a.h"])
    ('1 patch', '2 patches, 1 own file')
    """
    patches = sum(name.endswith(".patch") for name in names)
    files = len(names) - patches
    counts = [f"{patches} patch{'es' * (patches > 1)}"] if patches else []
    return ", ".join((*counts, *([f"{files} own file{'s' * (files > 1)}"] if files else [])))


def _counts(listing: Listing) -> str:
    """How many names came, went and changed.

    >>> from scripts.series.upstream.report import Listing
    >>> _counts(Listing(added=("a",), changed=("b", "c"))), _counts(Listing())
    ('+1 ~2', '–')
    """
    counts = [("+", listing.added), ("−", listing.gone), ("~", listing.changed)]
    return " ".join(f"{sign}{len(names)}" for sign, names in counts if names) or "–"
