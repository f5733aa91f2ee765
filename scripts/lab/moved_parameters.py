"""Whether two kernels run the same code but for where their parameters lie in constant bank 0.

Two things are asked of their instructions. In pairs, they have the same bits but those that hold an offset.
And what nvdisasm reads as ``c[0x0][OFFSET]`` gives one map of bytes, both ways: a field that moved is another
offset wherever it is read, and no other field has it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scripts.lab.disassembly import SIZE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from scripts.lab.objects import Executed

# Where an instruction has an offset in a constant bank, in bytes: operands and LDC; LDCU.
_SHIFTS, _BITS = (38, 37), 0xFFFF
_MAY_BE = sum({1 << shift + bit for shift in _SHIFTS for bit in range(16)})
_KEPT = (~_MAY_BE & (1 << 8 * SIZE) - 1).to_bytes(SIZE, "little")
_BANK = re.compile(r"\bc\[0x0\]\[(?:U?R\w+\+)?0x([0-9a-f]+)\]")
_OPCODE = re.compile(r"(?:@!?\w+ )?(\S+)")
_LOADS = {".U8": 1, ".S8": 1, ".U16": 2, ".S16": 2, ".64": 8, ".128": 16}
_WIDE = re.compile(r"D[A-Z]+\b|.*\.(WIDE|F64)\b")  # may read 8 bytes


@dataclass(frozen=True)
class Uses:
    """Of two kernels alike but for offsets: the instructions of both that may name a parameter."""

    pairs: frozenset[tuple[bytes, bytes]]
    old: range  # where parameters lie
    new: range


def masked(text: bytes) -> bytes:
    """Machine code without what may be an offset in a constant bank."""
    count = len(text) // SIZE
    kept = int.from_bytes(text[: count * SIZE], "little") & int.from_bytes(_KEPT * count, "little")
    return kept.to_bytes(count * SIZE, "little") + text[count * SIZE :]


def alike(old: Executed, new: Executed) -> Uses | None:
    """What may name a parameter in both; None where they differ in more than offsets can explain."""
    if old.beside != new.beside or masked(old.text) != masked(new.text):
        return None
    pairs = set(zip(_instructions(old.text), _instructions(new.text), strict=True))
    kept = frozenset(
        (a, b) for a, b in pairs if a != b or any(o in old.parameters for o in _offsets(a).values())
    )
    return Uses(kept, old.parameters, new.parameters)


def _instructions(text: bytes) -> list[bytes]:
    return [text[at : at + SIZE] for at in range(0, len(text), SIZE)]


def _offsets(instruction: bytes) -> dict[int, int]:
    """By the place of the field: what offset it would be."""
    number = int.from_bytes(instruction, "little")
    return {shift: number >> shift & _BITS for shift in _SHIFTS}


@dataclass(frozen=True)
class _Read:
    """What an instruction reads of constant bank 0."""

    bytes_: range
    rest: int  # the instruction without the offset


def _read(said: str, instruction: bytes) -> _Read | None:
    """The bytes of constant bank 0 that an instruction reads; None where it reads no other.

    >>> word = (0x228 << 38 | 5).to_bytes(16, "little")
    >>> _read("ULDC.64 UR4, c[0x0][0x228] ", word), _read("@P0 LDC.U8 R4, c[0x0][R2+0x228] ", word)
    (_Read(bytes_=range(552, 560), rest=5), _Read(bytes_=range(552, 553), rest=5))
    >>> _read("IMAD.WIDE R2, R4, R5, c[0x0][0x228] ", word), _read("LDC R2, c[0x4][0x228] ", word)
    (_Read(bytes_=range(552, 560), rest=5), None)
    """
    found = _BANK.search(said)
    start = int(found[1], 16) if found else -1
    shift = next((shift for shift, offset in _offsets(instruction).items() if offset == start), None)
    if shift is None:
        return None
    opcode = _OPCODE.match(said)
    word = opcode[1] if opcode else ""
    loads = re.match(r"U?LDCU?(?=\.|$)", word)
    wide = 8 if _WIDE.match(word) else 4
    width = next((n for end, n in _LOADS.items() if word.endswith(end)), 4) if loads else wide
    rest = int.from_bytes(instruction, "little") & ~(_BITS << shift)
    return _Read(range(start, start + width), rest)


def consistent(uses: Uses, said: Mapping[bytes, str]) -> bool:
    """Whether one map takes every parameter that the old kernel reads to the one that the new kernel reads.

    Args:
        uses: of both kernels.
        said: what each instruction says.
    """
    forth: dict[int, int] = {}
    back: dict[int, int] = {}
    for one, other in uses.pairs:
        ours, theirs = _read(said[one], one), _read(said[other], other)
        if not (ours and theirs and ours.bytes_.start in uses.old and theirs.bytes_.start in uses.new):
            if one != other:
                return False
            continue
        if ours.rest != theirs.rest:
            return False
        for a, b in zip(ours.bytes_, theirs.bytes_, strict=True):
            if forth.setdefault(a, b) != b or back.setdefault(b, a) != a:
                return False
    return True
