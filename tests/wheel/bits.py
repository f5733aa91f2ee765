"""Comparing results bit by bit. Needs torch alone; tests/wheel4 uses it too."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class Mismatch(AssertionError):
    """Bits that differ, with the first place where they do."""

    def __init__(self, message: str, details: dict[str, Any]) -> None:
        super().__init__(message)
        self.details = details


def bits(tensor: Tensor) -> Tensor:
    """The tensor's bit patterns: -0.0 and +0.0 differ, a NaN equals itself."""
    return tensor.contiguous().view(torch.int16 if tensor.element_size() == 2 else torch.int32)


def same_bits(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and torch.equal(bits(left), bits(right))


def assert_same_bits(left: Tensor, right: Tensor, what: str) -> None:
    assert left.shape == right.shape, f"{what}: shapes {tuple(left.shape)} and {tuple(right.shape)}"
    if same_bits(left, right):
        return
    differing = (bits(left) != bits(right)).nonzero()
    index = tuple(int(i) for i in differing[0])
    width = 4 if left.element_size() == 2 else 8
    patterns = [f"0x{int(bits(t)[index]) & (16**width - 1):0{width}x}" for t in (left, right)]
    details = {
        "what": what,
        "index": list(index),
        "bits": patterns,
        "values": [repr(float(left[index])), repr(float(right[index]))],
        "differing": len(differing),
        "of": left.numel(),
    }
    raise Mismatch(
        f"{what}: first mismatch at {index}: {' and '.join(patterns)} ({details['values']}); {len(differing)} of {left.numel()} differ",
        details,
    )


@dataclass(frozen=True)
class Rows:
    """Results for one sequence: ``out`` (Lq, H, D) in the input's dtype, ``lse`` (H, Lq) in float32."""

    out: Tensor
    lse: Tensor

    def assert_same(self, other: Rows, what: str) -> None:
        assert_same_bits(self.lse, other.lse, f"{what}, lse (head, row)")
        assert_same_bits(self.out, other.out, f"{what}, out (row, head, dim)")

    def same(self, other: Rows) -> bool:
        return same_bits(self.lse, other.lse) and same_bits(self.out, other.out)


def joined(parts: Iterable[Rows]) -> Rows:
    """Rows of one sequence, one part after another."""
    out, lse = zip(*((part.out, part.lse) for part in parts), strict=True)
    return Rows(torch.cat(out), torch.cat(lse, dim=1))


def seed_of(*parts: object) -> int:
    """A seed that follows from what a case is called."""
    return functools.reduce(lambda seed, char: (seed * 31 + ord(char)) % 2**31, " ".join(map(str, parts)), 7)
