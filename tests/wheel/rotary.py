"""New keys and queries, turned by the rotary embedding and appended to a cache: at once, or token by token."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import harness
import torch
from flash_attn import flash_attn_with_kvcache
from gradients import begun_at
from harness import DTYPES, Config, Rows, Sequence
from torch import Tensor


@dataclass(frozen=True)
class Appending:
    """A call that appends the last ``new`` keys of each sequence to a cache that holds those before; queries are as many."""

    config: Config
    sequences: list[Sequence]
    new: int
    capacity: int
    interleaved: bool
    first: int = 0  # elements into their storages that the tables begin

    def alone(self) -> Appending:
        """Of the first sequence, without the others."""
        return replace(self, sequences=self.sequences[:1])

    def _rotary(self) -> dict[str, Any]:
        places = torch.arange(self.capacity, device=harness.DEVICE)
        angles = torch.outer(
            places, 0.7 ** torch.arange(self.config.head_dim // 2, device=harness.DEVICE)
        ).float()
        dtype = DTYPES[self.config.dtype]
        cos, sin = (begun_at(table.to(dtype), self.first, 0) for table in (angles.cos(), angles.sin()))
        return {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": self.interleaved}

    def _caches(self) -> tuple[Tensor, ...]:
        shape = (len(self.sequences), self.capacity, self.config.heads_k, self.config.head_dim)
        buffers = tuple(
            torch.full(shape, math.nan, dtype=DTYPES[self.config.dtype], device=harness.DEVICE)
            for _ in range(2)
        )
        for row, sequence in enumerate(self.sequences):
            for buffer, known in zip(buffers, (sequence.k, sequence.v), strict=True):
                buffer[row, : len(known) - self.new] = known[: len(known) - self.new]
        return buffers

    def turned(self) -> Sequence:
        """The first sequence as the embedding leaves it: its queries, and the keys that the call appends."""
        own, rotary = self.sequences[0], self._rotary()
        places = slice(len(own.k) - self.new, len(own.k))
        cos, sin = (rotary[f"rotary_{name}"][places].float().unsqueeze(1) for name in ("cos", "sin"))

        def turn(rows: Tensor) -> Tensor:
            x = rows[-self.new :].float()
            one, other = (x[..., ::2], x[..., 1::2]) if self.interleaved else x.chunk(2, dim=-1)
            pairs = (one * cos - other * sin, one * sin + other * cos)
            return (torch.stack(pairs, -1).flatten(-2) if self.interleaved else torch.cat(pairs, -1)).to(
                rows.dtype
            )

        return replace(own, q=turn(own.q), k=torch.cat([own.k[: -self.new], turn(own.k)]))

    def _append(self, buffers: tuple[Tensor, ...], start: int, stop: int) -> tuple[Tensor, Tensor]:
        lengths = torch.tensor(
            [len(s.k) - self.new + start for s in self.sequences], dtype=torch.int32, device=harness.DEVICE
        )
        q, k, v = (
            torch.stack([getattr(s, name)[-self.new :][start:stop] for s in self.sequences]) for name in "qkv"
        )
        own = {"cache_seqlens": lengths, "return_softmax_lse": True, **self._rotary(), **self.config.kwargs()}
        out, lse = flash_attn_with_kvcache(q, *buffers, k, v, **own)
        return out, lse

    def at_once(self) -> Rows:
        """The rows of the first sequence."""
        out, lse = self._append(self._caches(), 0, self.new)
        return Rows(out[0], lse[0])

    def one_by_one(self) -> Rows:
        """The same, token by token."""
        buffers = self._caches()
        parts = [self._append(buffers, n, n + 1) for n in range(self.new)]
        return Rows(torch.cat([out[0] for out, _ in parts]), torch.cat([lse[0] for _, lse in parts], dim=1))
