"""Whether a wheel's file name, its metadata, and the label of its version say the same.

The label is the version's local part, such as ``det.1.cu130.torch2.11``: the series' release, CUDA, torch.
"""

from __future__ import annotations

import re
from email.parser import BytesParser
from typing import TYPE_CHECKING

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.tags import Tag, parse_tag
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

if TYPE_CHECKING:
    from collections.abc import Iterator

    from scripts.wheels.index_wheel import IndexedWheel


def mistakes(wheel: IndexedWheel, about: bytes) -> list[str]:
    """What does not agree, each as a clause; ``about`` is the file WHEEL."""
    return [*_of_metadata(wheel), *_of_tags(wheel, about), *_of_label(wheel), *_of_torch(wheel)]


def _of_metadata(wheel: IndexedWheel) -> Iterator[str]:
    name, version = wheel.said["name"], wheel.said["version"]
    if canonicalize_name(name) != wheel.name:
        yield f"the file name says {wheel.name}, METADATA says {name}"
    try:
        same = Version(version) == wheel.version
    except InvalidVersion:
        same = False
    if not same:
        yield f"the file name says version {wheel.version}, METADATA says {version}"


def _of_tags(wheel: IndexedWheel, about: bytes) -> Iterator[str]:
    told = BytesParser().parsebytes(about)
    tags = {tag for line in told.get_all("Tag", []) for tag in parse_tag(line)}
    if tags != wheel.tags:
        yield f"the file name says tags {_spelled(wheel.tags)}, WHEEL says {_spelled(tags) or 'none'}"
    if (build := told.get("Build", "")) != wheel.build:
        yield f"the file name says build {wheel.build or 'none'}, WHEEL says {build or 'none'}"
    allowed = SpecifierSet(wheel.requires_python)
    for python in wheel.pythons:
        if python not in allowed and not any(tag.abi == "abi3" for tag in wheel.tags):
            told_of = wheel.requires_python
            yield f"the file name says Python {python}, METADATA says Requires-Python: {told_of}"
    named = re.findall(r"(?:^|_)sm(\d+)(?=_|$)", wheel.build)
    if named and sorted(named) != sorted(wheel.facts.architectures):
        told_of = ", ".join(wheel.facts.architectures) or "none"
        yield f"the build tag says architectures {', '.join(named)}, _fork.json says {told_of}"


def _spelled(tags: frozenset[Tag] | set[Tag]) -> str:
    return ", ".join(sorted(map(str, tags)))


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
    spellings = {f"cu{facts.cuda.replace('.', '')}", f"cu{facts.cuda_major}"} if facts.cuda else set()
    if len(named) != bool(facts.cuda) or not spellings.issuperset(named):
        yield f"the label says CUDA {', '.join(named) or 'none'}, _fork.json says {facts.cuda or 'none'}"


def _of_torch(wheel: IndexedWheel) -> Iterator[str]:
    built_for = wheel.facts.torch
    named = re.search(r"(?:^|\.)torch(\d+(?:\.\d+)*)$", wheel.version.local or "")
    if named and not f"{built_for}.".startswith(f"{named[1]}."):
        yield f"the label says torch {named[1]}, _fork.json says {built_for or 'none'}"
    asked = [r for r in map(Requirement, wheel.said.get("requires_dist", [])) if r.name == "torch"]
    if built_for and not (asked and asked[0].specifier.contains(built_for)):
        told = asked[0] if asked else "no torch"
        yield f"METADATA asks for {told}, _fork.json says torch {built_for}"
