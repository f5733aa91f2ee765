"""Calls of flash_attn's functions, and the same calls of flash_attn.cute, which they are to give the bits of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import flash_attn
import machine
import torch
from bits import Rows
from calls import Gradients, _offsets, _packed
from flash_attn import fork_front
from problems import Config, Sequence
from torch import Tensor


@contextmanager
def eager() -> Iterator[None]:
    """Where tensors have no values, calls go to the kernels as those of plain tensors do, so that these compile."""
    if machine.GPU:
        yield
        return
    with mock.patch.object(fork_front, "is_plain", return_value=True):
        yield


def options(config: Config) -> dict[str, Any]:
    """Of flash_attn's functions."""
    return {"causal": config.causal, "window_size": config.window, "softcap": config.softcap}


@dataclass(frozen=True)
class Called:
    """A call's result, before gradients are asked for."""

    rows: Rows  # of one sequence
    out: Tensor  # of the call
    inputs: list[Tensor]
    names: list[str]  # of the inputs: "q", "k", "v", or those of them that a packed input has


Call = Callable[[Config, list[Sequence], int], Called]


def _stacked(sequences: list[Sequence], *names: str) -> Tensor:
    """(batch, seqlen, heads, head_dim), or of several names (batch, seqlen, 3 or 2, heads, head_dim)."""
    parts = [torch.stack([getattr(s, name) for s in sequences]) for name in names]
    return (torch.stack(parts, dim=2) if len(parts) > 1 else parts[0]).requires_grad_()


def _joined(sequences: list[Sequence], *names: str) -> Tensor:
    parts = [torch.cat([getattr(s, name) for s in sequences]) for name in names]
    return (torch.stack(parts, dim=1) if len(parts) > 1 else parts[0]).requires_grad_()


def _of_batch(
    function: Callable[..., Any],
    inputs: tuple[str, ...],
    config: Config,
    sequences: list[Sequence],
    which: int,
) -> Called:
    tensors = [_stacked(sequences, *names) for names in inputs]
    out, lse, _ = function(*tensors, return_attn_probs=True, **options(config))
    return Called(Rows(out[which].detach(), lse[which]), out, tensors, list(inputs))


def _of_packed(
    function: Callable[..., Any],
    inputs: tuple[str, ...],
    config: Config,
    sequences: list[Sequence],
    which: int,
) -> Called:
    tensors = [_joined(sequences, *names) for names in inputs]
    begins, places = _packed(sequences)
    lengths = [places[n] for n in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")]
    if "qkv" in inputs:
        lengths = lengths[::2]
    out, lse, _ = function(*tensors, *lengths, return_attn_probs=True, **options(config))
    rows = slice(begins[which], begins[which + 1])
    return Called(Rows(out[rows].detach(), lse[:, rows]), out, tensors, list(inputs))


def _bound(of: Callable[..., Called], name: str, *inputs: str) -> Call:
    return lambda config, sequences, which: of(getattr(flash_attn, name), inputs, config, sequences, which)


CALLS: dict[str, Call] = {
    "dense": _bound(_of_batch, "flash_attn_func", "q", "k", "v"),
    "qkvpacked": _bound(_of_batch, "flash_attn_qkvpacked_func", "qkv"),
    "kvpacked": _bound(_of_batch, "flash_attn_kvpacked_func", "q", "kv"),
    "varlen": _bound(_of_packed, "flash_attn_varlen_func", "q", "k", "v"),
    "varlen_qkvpacked": _bound(_of_packed, "flash_attn_varlen_qkvpacked_func", "qkv"),
    "varlen_kvpacked": _bound(_of_packed, "flash_attn_varlen_kvpacked_func", "q", "kv"),
}


def call(name: str, config: Config, sequences: list[Sequence], which: int = 0) -> Called:
    """A call of flash_attn, on the kernels that are chosen."""
    with eager():
        return CALLS[name](config, sequences, which)


def gradients(name: str, called: Called, sequences: list[Sequence], which: int = 0) -> Gradients:
    """Of q, k and v of a sequence."""
    packed = name.startswith("varlen")
    dout = (torch.cat if packed else torch.stack)([s.dout for s in sequences])
    if machine.GPU:
        found = list(torch.autograd.grad(called.out, called.inputs, dout))
    else:  # autograd would start CUDA
        with eager():
            found = [g for g in called.out.grad_fn.apply(dout, None, None) if g is not None]
    own: Gradients = {}
    for names, gradient in zip(called.names, found, strict=True):
        parts = gradient.unbind(-3) if len(names) > 1 else [gradient]
        for part, letter in zip(parts, names, strict=True):
            lengths = _offsets(len(getattr(s, letter)) for s in sequences)
            own[letter] = part[lengths[which] : lengths[which + 1]] if packed else part[which]
    return own


def seen(rows: Rows) -> Rows:
    """With the log-sum-exp that flash_attn gives a row which sees no key."""
    return Rows(rows.out, rows.lse.masked_fill(rows.lse == -torch.inf, torch.inf))
