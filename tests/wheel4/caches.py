"""Calls on a cache: what it holds before, which tokens a call appends, and the rows that come of it.

What a cache holds that is no token of a sequence is NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from bits import Rows
from calls import _int32
from flash_attn.cute import flash_attn_with_kvcache
from problems import DEVICE, DTYPES, Config, Sequence
from torch import Tensor


@dataclass(frozen=True)
class Appending:
    """The last ``new`` tokens of each sequence come to a cache that holds those before; queries are as many."""

    config: Config
    sequences: list[Sequence]
    new: int
    capacity: int
    page: int | None = None
    rotary: str | None = None  # "interleaved" or "halves"
    order: list[int] = field(default_factory=list)  # the cache's sequences; empty: as they come
    used: int | None = None  # of the new tokens; None: all

    def one_by_one(self) -> list[Appending]:
        """The same tokens, a call for each."""
        return [replace(self, used=n) for n in range(self.new)]

    def tables(self) -> dict[str, Any]:
        """The arguments of the embedding."""
        if self.rotary is None:
            return {}
        places = torch.arange(self.capacity, device=DEVICE)
        steps = 0.7 ** torch.arange(self.config.head_dim // 4, device=DEVICE)  # of half the head dim
        angles = torch.outer(places.float(), steps.float())
        cos, sin = (t.to(DTYPES[self.config.dtype]) for t in (angles.cos(), angles.sin()))
        return {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": self.rotary == "interleaved"}

    def turned(self, which: int = 0) -> Sequence:
        """A sequence whose last tokens the embedding has turned, by the float32 arithmetic of flash_attn's kernels."""
        own, tables = self.sequences[which], self.tables()
        if not tables:
            return own
        turns_each = self.config.causal or self.config.window != (-1, -1)
        places = torch.arange(len(own.k) - self.new, len(own.k), device=DEVICE)

        def turn(rows: Tensor, at: Tensor) -> Tensor:
            cos, sin = (tables[f"rotary_{name}"][at].float().unsqueeze(1) for name in ("cos", "sin"))
            x, rest = (
                rows[-self.new :].float().split([2 * cos.shape[-1], rows.shape[-1] - 2 * cos.shape[-1]], -1)
            )
            interleaved = tables["rotary_interleaved"]
            one, other = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
            pairs = (one * cos - other * sin, one * sin + other * cos)
            done = torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)
            return torch.cat([done, rest], -1).to(rows.dtype)

        q = turn(own.q, places if turns_each else places[:1].expand(self.new))
        before = len(own.k) - self.new
        return replace(
            own, q=torch.cat([own.q[: -self.new], q]), k=torch.cat([own.k[:before], turn(own.k, places)])
        )

    def buffers(self) -> tuple[dict[str, Any], list[Tensor]]:
        """What a call takes besides tokens, and the caches of keys and of values, as if none was appended."""
        count = len(self.sequences)
        places: dict[str, Any] = {}
        if self.page is not None:
            width = self.capacity // self.page
            order = list(reversed(range(count * width)))
            table = torch.tensor(order, dtype=torch.int32).view(count, width)
            places["page_table"] = table.to(DEVICE)
        elif self.order:
            places["cache_batch_idx"] = _int32(self.order)
        caches = []
        for name in "kv":
            sample = getattr(self.sequences[0], name)
            rows = torch.full(
                (count, self.capacity, *sample.shape[1:]), math.nan, dtype=sample.dtype, device=DEVICE
            )
            for i, sequence in enumerate(self.sequences):
                before = len(sequence.k) - self.new
                rows[i, :before] = getattr(sequence, name)[:before]
            caches.append(self._placed(rows))
        return places, caches

    def _placed(self, rows: Tensor) -> Tensor:
        """Rows of the sequences (count, capacity, …) as the cache holds them, between sequences of others."""
        if self.page is not None:
            return rows.view(-1, self.page, *rows.shape[2:]).flip(0).contiguous()
        if not self.order:
            return rows
        cache = torch.full((max(self.order) + 2, *rows.shape[1:]), math.nan, dtype=rows.dtype, device=DEVICE)
        for i, place in enumerate(self.order):
            cache[place] = rows[i]
        return cache

    def rows_of(self, cache: Tensor, which: int = 0) -> Tensor:
        """A sequence's part of a cache (capacity, …)."""
        if self.page is not None:
            width = self.capacity // self.page
            return cache.flip(0).reshape(-1, self.capacity, *cache.shape[2:])[which] if width else cache
        return cache[self.order[which] if self.order else which]

    def call(self, places: dict[str, Any], caches: list[Tensor], which: int = 0) -> Rows:
        """The rows of a sequence's new queries; the caches are appended to."""
        start, stop = (0, self.new) if self.used is None else (self.used, self.used + 1)
        lengths = _int32([len(s.k) - self.new + start for s in self.sequences])
        q, k, v = (
            torch.stack(
                [getattr(s, name)[len(getattr(s, name)) - self.new :][start:stop] for s in self.sequences]
            )
            for name in "qkv"
        )
        out, lse = flash_attn_with_kvcache(
            q, *caches, k, v, cache_seqlens=lengths, return_softmax_lse=True, learnable_sink=self.config.sinks(),
            **places, **self.tables(), **self.config.options(),
        )  # fmt: skip
        return Rows(out[which], lse[which])

    def rows(self, which: int = 0) -> Rows:
        """Of a call on fresh caches."""
        return self.call(*self.buffers(), which)
