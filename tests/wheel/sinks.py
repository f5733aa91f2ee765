"""What learnable_sink must give, in calls of every kind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from flash_attn import (
    deterministic_mode,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from harness import DEVICE, DTYPES, Config, Draw, Sequence, assert_same_bits, cu_seqlens, reference
from masks import assert_close
from torch import Tensor


def call(
    config: Config, sequences: list[Sequence], packed: bool, with_gradients: bool = True, **own: Any
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """out, lse, and the inputs with gradients."""
    join = torch.cat if packed else torch.stack
    leaves = [join([getattr(s, name) for s in sequences]) for name in "qkv"]
    if with_gradients:
        leaves = [leaf.requires_grad_() for leaf in leaves]
    # In one order, so that bits can be compared with the mode off too.
    options = {**config.kwargs(), **own, "return_attn_probs": True, "deterministic": True}
    if not packed:
        out, lse, _ = flash_attn_func(*leaves, **options)
        return out, lse, leaves
    lengths = [[len(getattr(s, name)) for s in sequences] for name in "qk"]
    out, lse, _ = flash_attn_varlen_func(*leaves, *map(cu_seqlens, lengths), *map(max, lengths), **options)
    return out, lse, leaves


def assert_that_no_sink_is_a_sink_of_minus_infinity(config: Config, sequences: list[Sequence]) -> None:
    """Bits of out and of gradients; and the log-sum-exp leaves any sink out."""
    nothing = torch.full((config.heads,), -torch.inf, device=DEVICE)
    something = torch.linspace(-2, 5, config.heads, device=DEVICE)
    for packed in (False, True):
        out, lse, leaves = call(config, sequences, packed)
        dout = torch.randn_like(out)
        plain = torch.autograd.grad(out, leaves, dout)
        same, same_lse, same_leaves = call(config, sequences, packed, learnable_sink=nothing)
        assert_same_bits(same, out, f"out, packed: {packed}")
        assert_same_bits(same_lse, lse, f"lse, packed: {packed}")
        gradients = torch.autograd.grad(same, same_leaves, dout)
        for name, got, expected in zip(("dq", "dk", "dv"), gradients, plain, strict=True):
            assert_same_bits(got, expected, f"{name}, packed: {packed}")
        other, other_lse, _ = call(config, sequences, packed, learnable_sink=something)
        assert_same_bits(other_lse, lse, f"lse beside a sink, packed: {packed}")
        assert (other != out).any()


def assert_that_gradients_are_right(config: Config, sequences: list[Sequence]) -> None:
    """Of q, k, v and the sink, dense and packed, against operations of PyTorch in float64; and the same from run to run."""
    sink = config.kwargs()["learnable_sink"]
    for packed in (False, True) if len({s.q.shape for s in sequences}) == 1 else (True,):
        leaf = sink.clone().requires_grad_()
        out, _, leaves = call(config, sequences, packed, learnable_sink=leaf)
        dout = torch.randn_like(out)
        got = torch.autograd.grad(out, [*leaves, leaf], dout, retain_graph=True)
        again = torch.autograd.grad(out, [*leaves, leaf], dout, retain_graph=True)
        assert_same_bits(again[3], got[3], "dsink from run to run")
        alone, _, _ = call(config, sequences, packed, with_gradients=False, learnable_sink=leaf)
        assert_same_bits(
            torch.autograd.grad(alone, leaf, dout)[0], got[3], "dsink where nothing else has one"
        )
        exact = _by_definition(config, sequences, packed, dout, torch.float64)
        plain = _by_definition(config, sequences, packed, dout, DTYPES[config.dtype])
        for name, one, right, other in zip(("dq", "dk", "dv", "dsink"), got, exact, plain, strict=True):
            assert_close(f"{name}, packed: {packed}", one, right, other)


def _by_definition(
    config: Config, sequences: list[Sequence], packed: bool, dout: Tensor, dtype: torch.dtype
) -> list[Tensor]:
    sink = config.kwargs()["learnable_sink"].to(dtype).requires_grad_()
    leaves = [[getattr(s, name).to(dtype).requires_grad_() for s in sequences] for name in "qkv"]
    outs = [
        reference(config, Sequence(q, k, v), dtype=dtype, sink=sink).out
        for q, k, v in zip(*leaves, strict=True)
    ]
    join = torch.cat if packed else torch.stack
    total = torch.autograd.grad(join(outs), [*(t for some in leaves for t in some), sink], dout.to(dtype))
    count = len(sequences)
    return [*(join(total[n : n + count]) for n in range(0, 3 * count, count)), total[-1]]


def assert_that_unused_rows_have_no_part(config: Config) -> None:
    """Of packed tensors that are longer than their sequences, with NaN there."""
    draw = Draw(9)
    sequences = [draw.sequence(config, 70, 90), draw.sequence(config, 33, 200)]
    sink = config.kwargs()["learnable_sink"]
    results = []
    for before, after in ((0, 0), (5, 40)):
        leaf = sink.clone().requires_grad_()
        q = torch.cat([s.q for s in sequences])
        filler = torch.full_like(q[:1], torch.nan)
        q = torch.cat([filler.expand(before, -1, -1), q, filler.expand(after, -1, -1)]).requires_grad_()
        k, v = (torch.cat([getattr(s, name) for s in sequences]) for name in "kv")
        starts = cu_seqlens([70, 33]) + before, cu_seqlens([90, 200])
        options = {**config.kwargs(), "learnable_sink": leaf}
        out = flash_attn_varlen_func(q, k, v, *starts, 70, 200, **options)
        dout = torch.ones_like(out)
        results.append(torch.autograd.grad(out, leaf, dout)[0])
    torch.testing.assert_close(
        results[1], results[0], rtol=1e-5, atol=1e-5
    )  # one order for each number of rows


def ways(config: Config) -> Iterator[tuple[str, Tensor, Tensor]]:
    """The same call of each function: its name, the result, and what flash_attn_func gives."""
    same_heads = replace(config, heads_k=config.heads)
    own = {"causal": True, "learnable_sink": config.kwargs()["learnable_sink"]}
    for of, functions in ((config, ("kv", "cache")), (same_heads, ("qkv",))):
        sequence = Draw(2).sequence(of, 40, 40)
        q, k, v = (getattr(sequence, name)[None] for name in "qkv")
        expected = flash_attn_func(q, k, v, **own)
        starts = cu_seqlens([40])
        if "qkv" in functions:
            qkv = torch.stack([q, k, v], dim=2)
            yield "flash_attn_qkvpacked_func", flash_attn_qkvpacked_func(qkv, **own), expected
            packed = flash_attn_varlen_qkvpacked_func(qkv[0], starts, 40, **own)
            yield "flash_attn_varlen_qkvpacked_func", packed[None], expected
            continue
        kv = torch.stack([k, v], dim=2)
        yield "flash_attn_kvpacked_func", flash_attn_kvpacked_func(q, kv, **own), expected
        packed = flash_attn_varlen_kvpacked_func(q[0], kv[0], starts, starts, 40, 40, **own)
        yield "flash_attn_varlen_kvpacked_func", packed[None], expected
        packed = flash_attn_varlen_func(q[0], k[0], v[0], starts, starts, 40, 40, **own)
        yield "flash_attn_varlen_func", packed[None], expected
        yield "flash_attn_with_kvcache", flash_attn_with_kvcache(q, k, v, **own), expected


def assert_that_all_functions_take_one(config: Config) -> None:
    with deterministic_mode(split_size=256):
        for name, got, expected in ways(config):
            assert_same_bits(got, expected, name)


def assert_that_wrong_sinks_are_told(config: Config) -> None:
    sequence = Draw(3).sequence(config, 8, 8)
    inputs = [getattr(sequence, name)[None] for name in "qkv"]
    good = torch.zeros(config.heads, device=DEVICE)
    wrong: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, r"learnable_sink has shape \[\d+\]; allowed is \[\d+\]", {"learnable_sink": good[1:]}),
        (ValueError, "learnable_sink has shape", {"learnable_sink": good[None]}),
        (TypeError, "learnable_sink has dtype Long", {"learnable_sink": good.long()}),
        (ValueError, "learnable_sink must be contiguous", {"learnable_sink": good.repeat(2)[::2]}),
        (NotImplementedError, "dropout_p > 0", {"learnable_sink": good, "dropout_p": 0.1}),
        (TypeError, "learnable_sink must be a torch.Tensor", {"learnable_sink": [0.0] * config.heads}),
    ]
    for error, words, options in wrong:
        with pytest.raises(error, match=words):
            flash_attn_func(*inputs, **options)
    slopes = torch.full((config.heads,), 0.5, device=DEVICE)
    flash_attn_func(*inputs, learnable_sink=good, alibi_slopes=slopes)
    for causal in ({"causal": True}, {"window_size": (-1, 0)}, {"window_size": (8, 0)}):
        with pytest.raises(NotImplementedError, match="does not go with alibi_slopes"):
            flash_attn_func(*inputs, learnable_sink=good, alibi_slopes=slopes, **causal)
    with pytest.raises(ValueError, match="learnable_sink has shape"):
        flash_attn_with_kvcache(*inputs, learnable_sink=good[1:])
