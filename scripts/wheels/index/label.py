"""Whether what a wheel's name tells besides agrees with what is in it: its version's label, its build tag.

The label is the version's local part, such as ``det.2.cu13``: the series' release, and CUDA's major release.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

if TYPE_CHECKING:
    from collections.abc import Iterator

    from scripts.wheels.index.indexed_wheel import IndexedWheel


def mistakes(wheel: IndexedWheel) -> Iterator[str]:
    """What does not agree, each as a clause."""
    yield from _of_label(wheel)
    yield from _of_build_tag(wheel)
    yield from _of_requirements(wheel)


def _of_label(wheel: IndexedWheel) -> Iterator[str]:
    facts, label = wheel.facts, wheel.version.local or ""
    words = label.split(".")
    if words[:2] != ["det", str(facts.fork_revision)]:
        right = f"det.{facts.fork_revision}"
        yield f"the label {label or '(none)'} does not begin with {right}, as _fork.json says"
    public, _, commit = facts.upstream.version.partition("+")
    # A version of another release than the wheel's names the wheel's own after "of".
    if public != wheel.version.public and f".of.{public}" not in f".{label}":
        yield f"the version is {wheel.version.public}, _fork.json says upstream's is {public}"
    if commit and commit not in words:
        yield f"the label {label} does not name upstream's commit {commit}, as _fork.json says"
    named = [word for word in words if re.fullmatch(r"cu\d+", word)]
    if named != ([f"cu{facts.cuda_major}"] if facts.cuda else []):
        yield f"the label says CUDA {', '.join(named) or 'none'}, _fork.json says {facts.cuda or 'none'}"


def _of_build_tag(wheel: IndexedWheel) -> Iterator[str]:
    named = re.findall(r"(?:^|_)sm(\d+)(?=_|$)", wheel.build)
    if named and sorted(named) != sorted(wheel.facts.architectures):
        told_of = ", ".join(wheel.facts.architectures) or "none"
        yield f"the build tag says architectures {', '.join(named)}, _fork.json says {told_of}"


def _of_requirements(wheel: IndexedWheel) -> Iterator[str]:
    allowed = SpecifierSet(wheel.requires_python)
    for python in wheel.pythons:
        if python not in allowed and not any(tag.abi == "abi3" for tag in wheel.tags):
            told_of = wheel.requires_python
            yield f"the file name says Python {python}, METADATA says Requires-Python: {told_of}"
    tried = wheel.facts.torch
    asked = [r for r in map(Requirement, wheel.requirements) if r.name == "torch"]
    if tried and not (asked and asked[0].specifier.contains(tried)):
        yield f"METADATA asks for {asked[0] if asked else 'no torch'}, _fork.json says torch {tried}"
