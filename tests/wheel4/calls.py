"""How one sequence may be laid out in a call. Each function gives the rows of the sequence asked for.

On tensors without values (without_values.py) a call compiles its kernels and gives tensors without values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import accumulate
from typing import Any

import machine
import torch
from bits import Rows
from flash_attn.cute import flash_attn_func, flash_attn_varlen_func, interface
from problems import DEVICE, Config, Sequence
from torch import Tensor

Gradients = dict[str, Tensor]


def _offsets(lengths: Iterable[int]) -> list[int]:
    return list(accumulate(lengths, initial=0))


def _int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32).to(DEVICE)


def _packed(sequences: list[Sequence]) -> tuple[list[int], dict[str, Any]]:
    """Where the queries of each begin, and what a call of packed sequences takes besides tensors."""
    len_q, len_k = [len(s.q) for s in sequences], [len(s.k) for s in sequences]
    lengths = {"max_seqlen_q": max(len_q), "max_seqlen_k": max(len_k)}
    places = {"cu_seqlens_q": _int32(_offsets(len_q)), "cu_seqlens_k": _int32(_offsets(len_k))}
    return _offsets(len_q), {**places, **lengths}


@torch.no_grad()
def dense(config: Config, sequences: list[Sequence], which: int = 0) -> Rows:
    """A batch of sequences of equal lengths."""
    q, k, v = (torch.stack([getattr(s, name) for s in sequences]) for name in "qkv")
    out, lse = flash_attn_func(q, k, v, learnable_sink=config.sinks(), return_lse=True, **config.options())
    return Rows(out[which], lse[which])


@torch.no_grad()
def varlen(config: Config, sequences: list[Sequence], which: int = 0) -> Rows:
    """Sequences packed end to end."""
    q, k, v = (torch.cat([getattr(s, name) for s in sequences]) for name in "qkv")
    begins, places = _packed(sequences)
    sink = config.sinks()
    out, lse = flash_attn_varlen_func(
        q, k, v, **places, learnable_sink=sink, return_lse=True, **config.options()
    )
    rows = slice(begins[which], begins[which + 1])
    return Rows(out[rows], lse[:, rows])


@torch.no_grad()
def paged(config: Config, sequences: list[Sequence], page: int, which: int = 0) -> Rows:
    """Keys in pages, the last page first; what no sequence uses of them is 7, its spare page NaN."""
    counts = [math.ceil(len(s.k) / page) for s in sequences]
    width = max(counts) + 1
    spare = sum(counts)
    table = [[spare] * width for _ in sequences]
    places = iter(reversed(range(spare)))
    parts: dict[int, tuple[int, int]] = {}
    for i, count in enumerate(counts):
        for j in range(count):
            table[i][j] = next(places)
            parts[table[i][j]] = (i, j)

    def pages(name: str) -> Tensor:
        sample = getattr(sequences[0], name)
        buffer = sample.new_full((spare + 1, page, *sample.shape[1:]), 7.0)
        buffer[spare] = math.nan
        for place, (i, j) in parts.items():
            part = getattr(sequences[i], name)[j * page : (j + 1) * page]
            buffer[place, : len(part)] = part
        return buffer

    begins, packed = _packed(sequences)
    out, lse = flash_attn_varlen_func(
        torch.cat([s.q for s in sequences]),
        pages("k"),
        pages("v"),
        cu_seqlens_q=packed["cu_seqlens_q"],
        max_seqlen_q=packed["max_seqlen_q"],
        max_seqlen_k=packed["max_seqlen_k"],
        seqused_k=_int32([len(s.k) for s in sequences]),
        page_table=torch.tensor(table, dtype=torch.int32).to(DEVICE),
        learnable_sink=config.sinks(),
        return_lse=True,
        **config.options(),
    )
    rows = slice(begins[which], begins[which + 1])
    return Rows(out[rows], lse[:, rows])


def _differentiate(
    config: Config, tensors: list[Tensor], dout: Tensor, places: dict[str, Any], deterministic: bool
) -> list[Tensor]:
    """Gradients of q, k, v and of the sink where there is one."""
    options, sink = config.options(), config.sinks()
    if not machine.GPU:  # autograd would start CUDA; the same kernels, called as it calls them
        left, right = options.pop("window_size")  # type: ignore[misc]
        sides = {"window_size_left": left, "window_size_right": right}
        q, k, v = tensors
        given = {**options, **sides, **places, "learnable_sink": sink}
        out, lse, *_ = interface._flash_attn_fwd(q, k, v, return_lse=True, **given)
        return list(interface._flash_attn_bwd(q, k, v, out, dout, lse, deterministic=deterministic, **given))
    function = flash_attn_varlen_func if places else flash_attn_func
    inputs = [t.detach().requires_grad_() for t in (*tensors, *([] if sink is None else [sink]))]
    own = None if sink is None else inputs[3]
    out, _ = function(*inputs[:3], **places, learnable_sink=own, deterministic=deterministic, **options)
    return list(torch.autograd.grad(out, inputs, dout))


def dense_gradients(
    config: Config, sequences: list[Sequence], which: int = 0, deterministic: bool = True
) -> Gradients:
    """Of a sequence in a batch of sequences of equal lengths. A sink's gradient is the whole batch's."""
    q, k, v, dout = (torch.stack([getattr(s, name) for s in sequences]) for name in ("q", "k", "v", "dout"))
    dq, dk, dv, *dsink = _differentiate(config, [q, k, v], dout, {}, deterministic)
    return {"q": dq[which], "k": dk[which], "v": dv[which], **({"sink": dsink[0]} if dsink else {})}


def varlen_gradients(
    config: Config, sequences: list[Sequence], which: int = 0, deterministic: bool = True
) -> Gradients:
    """Of a sequence among others packed end to end. A sink's gradient is the whole call's."""
    q, k, v, dout = (torch.cat([getattr(s, name) for s in sequences]) for name in ("q", "k", "v", "dout"))
    begins, places = _packed(sequences)
    keys = _offsets(len(s.k) for s in sequences)
    dq, dk, dv, *dsink = _differentiate(config, [q, k, v], dout, places, deterministic)
    rows, own = slice(begins[which], begins[which + 1]), slice(keys[which], keys[which + 1])
    return {"q": dq[rows], "k": dk[own], "v": dv[own], **({"sink": dsink[0]} if dsink else {})}
