"""One wheel of an index, as it says of itself.

A wheel says what it is in its METADATA, WHEEL, RECORD and ``_fork.json``. ``contents`` compares them and its
file name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from scripts.base.documents import OpenDocument
from scripts.wheels.trust.models import Provenance

if TYPE_CHECKING:
    from email.message import Message
    from pathlib import Path

    from packaging.tags import Tag
    from packaging.version import Version


class UpstreamFacts(OpenDocument):
    """The release that a wheel was made of."""

    version: str


class WheelFacts(Provenance):
    """What ``_fork.json`` holds, as far as an index tells it. A wheel of Python alone has no CUDA."""

    upstream: UpstreamFacts
    fork_revision: int
    cuda: str = ""
    architectures: tuple[str, ...] = ()
    kernel_set: tuple[str, ...] = ()

    @property
    def cuda_major(self) -> str:
        """Such as ``13``; none: any."""
        return self.cuda.partition(".")[0]


@dataclass(frozen=True)
class IndexedWheel:
    """A wheel that agrees with itself, as far as an index tells of it."""

    path: Path
    name: str  # of the distribution, such as flash-attn
    version: Version
    build: str  # the build tag, such as 24_hdim64_sm90; often empty
    tags: frozenset[Tag]
    metadata: bytes = field(repr=False)
    said: Message = field(repr=False)
    facts: WheelFacts
    sha256: str
    size: int

    @property
    def requires_python(self) -> str:
        """As METADATA has it; empty: any."""
        return str(self.said.get("Requires-Python", ""))

    @property
    def extras(self) -> list[str]:
        """The extras that METADATA provides."""
        return list(self.said.get_all("Provides-Extra", []))

    @property
    def requirements(self) -> list[str]:
        """What METADATA asks for."""
        return list(self.said.get_all("Requires-Dist", []))

    @cached_property
    def torch(self) -> SpecifierSet:
        """The torch releases that it asks for; an empty set of specifiers: any."""
        required = map(Requirement, self.requirements)
        return next((r.specifier for r in required if r.name == "torch" and not r.marker), SpecifierSet())

    @property
    def pythons(self) -> tuple[str, ...]:
        """The CPythons of its tags, such as ``3.12``; none: all that ``requires_python`` allows."""
        cpythons = {tag.interpreter[2:] for tag in self.tags if tag.interpreter.startswith("cp")}
        return tuple(f"{each[0]}.{each[1:]}" for each in sorted(cpythons))
