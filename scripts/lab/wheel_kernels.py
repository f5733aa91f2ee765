"""Two wheels side by side: which kernels run other machine code, and which other files differ.

Bytes are compared first. Instructions are decoded only where offsets of parameters are to be left out, and of
these only such as may name one.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict, deque
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from scripts.base import console
from scripts.base.errors import UsageError, WheelError
from scripts.lab import disassembly, machine_code, moved_parameters, objects

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence

    from elftools.elf.elffile import ELFFile

    from scripts.lab.objects import Code, Executed
    from scripts.wheels.trust.contents import Contents

    Decode = Callable[[str, Collection[bytes]], Mapping[bytes, str]]

# What tells how a wheel was made; it differs wherever anything does.
_PROVENANCE = ("/_fork.json", ".dist-info/RECORD")
_SBOMS = ".dist-info/sboms/"


@dataclass(frozen=True, eq=False)
class Kernel:
    """One kernel of a wheel, for one compute capability."""

    architecture: str
    name: str  # mangled
    piece: objects.Entry = field(repr=False)
    digest: bytes = field(repr=False)  # of all that a GPU runs of it

    @property
    def executed(self) -> Executed:
        """All that a GPU runs of it."""
        return _executed(self.piece)[self.name]

    @property
    def code(self) -> Code:
        """Its code with its figures."""
        return _codes(self.piece)[self.name]


@dataclass(frozen=True)
class Pair:
    """A kernel of both wheels."""

    old: Kernel
    new: Kernel


@dataclass(frozen=True)
class LeftOut:
    """What makes no difference."""

    names: bool = False
    offsets: bool = False


@dataclass(frozen=True)
class Compared:
    """The kernels of two wheels, by what became of them."""

    same: tuple[Pair, ...]
    renamed: tuple[Pair, ...]  # the same code by another name
    moved: tuple[Pair, ...]  # the same but for offsets of parameters, by whatever name
    changed: tuple[Pair, ...]
    gone: tuple[Kernel, ...]
    new: tuple[Kernel, ...]

    @property
    def differs(self) -> bool:
        """Whether there is more than what was to be left out."""
        return bool(self.changed or self.gone or self.new)


@lru_cache(maxsize=8)  # kernels of a piece are asked for one after the other
def _executed(piece: objects.Entry) -> dict[str, Executed]:
    return objects.executed(_cubin(piece))


@lru_cache(maxsize=8)
def _codes(piece: objects.Entry) -> dict[str, Code]:
    return objects.codes(_cubin(piece))


def _cubin(piece: objects.Entry) -> ELFFile:
    cubin = machine_code.cubin(piece)
    if cubin is None:
        raise WheelError(
            f"a piece of the code for compute capability {piece.architecture} is PTX, or is packed in "
            "another way than nvcc does by --compress-mode=size; it cannot be compared."
        )
    return cubin


def pieces(wheel: Contents) -> list[objects.Entry]:
    """The pieces of a wheel's code for GPUs."""
    return [piece for extension in wheel.extensions.values() for piece in machine_code.pieces(extension)]


def kernels(
    wheel: Contents, held: Sequence[objects.Entry], count: Callable[[str], None] = lambda _: None
) -> list[Kernel]:
    """The kernels in the pieces of a wheel; ``count`` is told of each piece.

    Raises:
        WheelError: there is none of FlashAttention's, or code that cannot be read.
    """
    found = []
    for piece in held:
        try:
            executed = _executed(piece)
        except WheelError as e:
            raise WheelError(f"{wheel.path}: {e}") from None
        for name, code in executed.items():
            digest = hashlib.sha256(code.text + code.beside.encode()).digest()
            found.append(Kernel(piece.architecture, name, piece, digest))
        count(wheel.path.name)
    if not any("flash" in kernel.name for kernel in found):
        raise WheelError(f"{wheel.path} holds no kernels of FlashAttention; there is nothing to compare.")
    return found


def _require_same_gpus(wheels: Mapping[str, Sequence[Kernel]]) -> None:
    told = {name: sorted({kernel.architecture for kernel in held}, key=int) for name, held in wheels.items()}
    if len({tuple(each) for each in told.values()}) > 1:
        listed = "; ".join(f"{name}: {', '.join(each)}" for name, each in told.items())
        raise UsageError(
            f"the two wheels are for other compute capabilities, and cannot be compared: {listed}."
        )


def _take(
    old: Sequence[Kernel], new: Sequence[Kernel], key: Callable[[Kernel], Hashable]
) -> tuple[list[Pair], list[Kernel], list[Kernel]]:
    """Pairs of the same key, and what is left of either."""
    there: dict[Hashable, deque[Kernel]] = defaultdict(deque)
    for kernel in new:
        there[key(kernel)].append(kernel)
    pairs = [Pair(kernel, there[key(kernel)].popleft()) for kernel in old if there[key(kernel)]]
    return pairs, *_without(pairs, old, new)


def _without(
    pairs: Sequence[Pair], old: Sequence[Kernel], new: Sequence[Kernel]
) -> tuple[list[Kernel], list[Kernel]]:
    taken = {id(kernel) for pair in pairs for kernel in (pair.old, pair.new)}
    left = ([kernel for kernel in half if id(kernel) not in taken] for half in (old, new))
    return next(left), next(left)


def _moved(candidates: Sequence[Pair], decode: Decode) -> list[Pair]:
    """Of these pairs, those that are the same but for offsets; none has a kernel that an earlier one has."""
    uses = {}
    with console.steps("comparing", len(candidates)) as count:
        for pair in candidates:
            found = moved_parameters.alike(pair.old.executed, pair.new.executed)
            if found is not None:
                uses[pair] = found
            count(pair.old.name)
    asked: dict[str, set[bytes]] = defaultdict(set)
    for pair, found in uses.items():
        asked[pair.old.architecture].update(word for both in found.pairs for word in both)
    said = {architecture: decode(architecture, words) for architecture, words in asked.items()}
    pairs: list[Pair] = []
    taken: set[int] = set()
    for pair, found in uses.items():
        if taken.isdisjoint((id(pair.old), id(pair.new))) and moved_parameters.consistent(
            found, said[pair.old.architecture]
        ):
            pairs.append(pair)
            taken |= {id(pair.old), id(pair.new)}
    return pairs


def _could_be(old: Sequence[Kernel], new: Sequence[Kernel]) -> Iterator[Pair]:
    """Pairs, by whatever name, whose instructions differ in offsets alone."""
    there: dict[Hashable, list[Kernel]] = defaultdict(list)
    for kernel in new:
        there[_but_offsets(kernel)].append(kernel)
    for kernel in old:
        yield from (Pair(kernel, other) for other in there[_but_offsets(kernel)])


def _but_offsets(kernel: Kernel) -> Hashable:
    code = kernel.executed
    text = hashlib.sha256(moved_parameters.masked(code.text) + code.beside.encode()).digest()
    return kernel.architecture, text


def compare(
    old: Sequence[Kernel],
    new: Sequence[Kernel],
    left_out: LeftOut,
    decode: Decode = disassembly.decode,
) -> Compared:
    """What became of each kernel.

    Args:
        old: those of one wheel.
        new: those of the other.
        left_out: what makes no difference.
        decode: nvdisasm, for offsets.

    Raises:
        UsageError: the wheels are for other compute capabilities.
        ToolchainError: there is no nvdisasm, where it is needed.
    """
    _require_same_gpus({"old": old, "new": new})
    same, old, new = _take(old, new, lambda k: (k.architecture, k.name, k.digest))
    moved: list[Pair] = []
    renamed: list[Pair] = []
    by_name = _take(old, new, lambda k: (k.architecture, k.name))[0]
    if left_out.offsets:
        moved = _moved(by_name, decode)
        old, new = _without(moved, old, new)
    if left_out.names:
        renamed, old, new = _take(old, new, lambda k: (k.architecture, k.digest))
    if left_out.names and left_out.offsets:
        more = _moved(list(_could_be(old, new)), decode)
        moved += more
        old, new = _without(more, old, new)
    changed, old, new = _take(old, new, lambda k: (k.architecture, k.name))
    return Compared(tuple(same), tuple(renamed), tuple(moved), tuple(changed), tuple(old), tuple(new))


@dataclass(frozen=True)
class Files:
    """The files of two wheels that differ, by name, without the version; compiled ones that one lacks."""

    changed: tuple[str, ...]
    gone: tuple[str, ...]
    new: tuple[str, ...]

    @property
    def differs(self) -> bool:
        """Whether any does."""
        return bool(self.changed or self.gone or self.new)


def files(old: Contents, new: Contents) -> Files:
    """The files that differ, but for provenance and the wheel's own version."""
    before, after = _told(old), _told(new)
    return Files(
        tuple(sorted(name for name in before.keys() & after.keys() if before[name] != after[name])),
        tuple(sorted(before.keys() - after.keys())),
        tuple(sorted(after.keys() - before.keys())),
    )


def _told(wheel: Contents) -> dict[str, bytes]:
    version, compiled = wheel.version.encode(), wheel.extensions
    return {
        name.replace(f"-{wheel.version}.dist-info/", ".dist-info/"): (
            b"" if name in compiled else content.replace(version, b"VERSION")
        )
        for name, content in wheel.files.items()
        if not name.endswith(_PROVENANCE) and _SBOMS not in name
    }
