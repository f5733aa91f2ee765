"""Gradients in deterministic mode: dq of a query, dk and dv of a key depend on their own sequence alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import DIM, HALF, HALF_NAME, MACHINE, Machine, built, problems
from flash_attn import deterministic_mode, flash_attn_func, flash_attn_varlen_func, set_deterministic_mode
from gradients import (
    Gradients,
    assert_accurate,
    assert_that_an_lse_is_read_wherever_it_lies,
    assert_that_gradients_are_taken_once,
    assert_that_losses_on_lse_have_gradients,
    assert_that_rows_are_read_alike_wherever_they_lie,
    dense,
    far_along,
    leaves,
    upstream_of,
    varlen,
)
from harness import KERNELS, Config, Draw
from hypothesis import given
from hypothesis import strategies as st
from limits import (
    assert_that_gradients_of_far_tokens_are_the_same,
    assert_that_gradients_of_rows_of_no_sequence_are_zeros,
    assert_that_gradients_past_named_lengths_are_nan,
    assert_that_the_extension_refuses_far_tokens,
    overlapping_sequences,
)

pytestmark = pytest.mark.skipif(
    not any(name.startswith("bwd") for name in KERNELS), reason="built without backward kernels (--kernels)"
)


@st.composite
def configs(draw: st.DrawFn) -> Config:
    causal = draw(st.booleans())
    heads, heads_k = draw(st.sampled_from([(1, 1), (2, 1), (4, 2)]))
    return built(
        head_dim=draw(st.sampled_from([DIM, DIM, DIM - 8])),
        heads=heads,
        heads_k=heads_k,
        causal=causal,
        window=(-1, -1)
        if causal
        else draw(st.sampled_from([(-1, -1), (40, 0), (150, 20), (-1, 30), (700, 0), (-1, 300), (600, 600)])),
        softcap=draw(st.sampled_from([0.0, 0.0, 15.0])),
        alibi=draw(st.sampled_from([False, False, True])),
        mask=draw(st.sampled_from([False, False, True])),
        bias=draw(st.sampled_from(["", "", HALF_NAME, "fp32"])),
    )


lengths = st.one_of(st.integers(160, 500), st.sampled_from([256, 384]))
machines = st.tuples(st.sampled_from([4, 132]), st.integers(1, 100), st.just(True), st.integers(1, 5))


@problems(20)
@given(configs(), lengths, lengths, st.integers(0, 2**31), machines, st.data())
def test_gradients_are_the_same_alone_in_a_batch_and_packed(
    config: Config,
    len_q: int,
    len_k: int,
    seed: int,
    machine: tuple[int, int, bool, int],
    data: st.DataObject,
) -> None:
    config.need("split", "bwd")
    draw = Draw(seed)
    own, other = (draw.sequence(config, len_q, len_k) for _ in range(2))
    neighbour = draw.sequence(config, data.draw(lengths), data.draw(lengths))
    upstreams = [upstream_of(s, n) for n, s in enumerate((own, other, neighbour))]
    with deterministic_mode(split_size=256):
        alone = dense(config, [own], upstreams[:1], 0)
        MACHINE.set(*machine)
        dense(config, [other, own], [upstreams[1], upstreams[0]], 1, deterministic=False).assert_same(
            alone, "in a batch"
        )
        varlen(config, [neighbour, own], [upstreams[2], upstreams[0]], 1).assert_same(alone, "packed")
    assert_accurate(config, alone, own, upstreams[0])


@pytest.mark.parametrize(("heads_k", "mask", "bias"), [(1, False, ""), (2, True, HALF_NAME)])
def test_rows_are_read_alike_wherever_they_lie(heads_k: int, mask: bool, bias: str) -> None:
    config = built(heads=2, heads_k=heads_k, mask=mask, bias=bias)
    config.need("split", "bwd")
    assert_that_rows_are_read_alike_wherever_they_lie(config)


@pytest.mark.parametrize("mode", [True, False], ids=["on", "off"])
@pytest.mark.parametrize(("causal", "heads_k"), [(False, 1), (True, 2)])
def test_gradients_past_the_lengths_that_a_call_names_are_nan(causal: bool, heads_k: int, mode: bool) -> None:
    config = built(heads=2, heads_k=heads_k, causal=causal)
    config.need("fwd", "split", "bwd")
    assert_that_gradients_past_named_lengths_are_nan(config, mode)


@pytest.mark.parametrize("mode", [True, False], ids=["on", "off"])
@pytest.mark.parametrize(("causal", "heads_k"), [(False, 1), (True, 2)])
def test_gradients_of_rows_of_no_sequence_are_zeros(causal: bool, heads_k: int, mode: bool) -> None:
    config = built(heads=2, heads_k=heads_k, causal=causal)
    config.need("fwd", "split", "bwd")
    assert_that_gradients_of_rows_of_no_sequence_are_zeros(config, mode)


LOSSES = pytest.mark.parametrize(
    "own",
    [
        {"heads_k": 2},
        {"window": (30, 5)},
        {"softcap": 15.0},
        {"mask": True, "bias": "fp32"},
        {"sink": "fp32"},
    ],
    ids=str,
)


@pytest.mark.parametrize("mode", [True, False], ids=["on", "off"])
@LOSSES
def test_losses_on_lse_have_gradients(own: dict[str, Any], mode: bool) -> None:
    config = built(**{"heads": 2, "heads_k": 1} | own)
    config.need("fwd", "split", "bwd")
    with deterministic_mode(mode, split_size=256):
        assert_that_losses_on_lse_have_gradients(config)


@LOSSES
def test_gradients_are_taken_once(own: dict[str, Any]) -> None:
    config = built(**{"heads": 2, "heads_k": 1} | own)
    config.need("fwd", "split", "bwd")
    assert_that_gradients_are_taken_once(config)


def test_an_lse_is_read_wherever_it_lies() -> None:
    config = built(heads=2, heads_k=1)
    config.need("fwd", "bwd")
    assert_that_an_lse_is_read_wherever_it_lies(config)


def test_gradients_of_far_tokens_are_the_same() -> None:
    config = built(heads=1, heads_k=1)
    config.need("split", "bwd")
    assert_that_gradients_of_far_tokens_are_the_same(config)


def test_the_extension_refuses_far_tokens() -> None:
    config = built(heads=1, heads_k=1)
    config.need("bwd")
    assert_that_the_extension_refuses_far_tokens(config)


@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("causal", [False, True])
def test_sequences_that_overlap_make_no_call_hang(machine: Machine, causal: bool, order: int) -> None:
    config = built(heads=1, heads_k=1, causal=causal)
    config.need("split", "bwd")
    machine.set(order=order, resident=4)
    overlapping_sequences(config)


def test_a_sequence_past_the_last_query_is_an_error(machine: Machine) -> None:
    """Not a wait without an end."""
    config = built(heads=1, heads_k=1)
    config.need("split", "bwd")
    machine.set(resident=4)
    sequence = Draw(5).sequence(config, 300, 300)
    inputs = leaves((sequence.q, sequence.k, sequence.v))
    cu_q, cu_k = (
        torch.tensor([0, 300, 300], dtype=torch.int32),
        torch.tensor([0, 100, 300], dtype=torch.int32),
    )
    with deterministic_mode(split_size=256):
        out = flash_attn_varlen_func(*inputs, cu_q, cu_k, 300, 200)
        cu_q.data[2] = 10**6  # which the backward pass reads
        with pytest.raises(RuntimeError, match="outside any allocation"):
            torch.autograd.grad(out, inputs, upstream_of(sequence, 1))


def test_a_backward_pass_whose_forward_nobody_noted_takes_the_process_wide_mode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where the forward pass was traced, and the backward pass runs eagerly."""
    config = built(heads=1, heads_k=1)
    config.need("split", "bwd")
    sequence = Draw(4).sequence(config, 200, 600)
    upstream = upstream_of(sequence, 1)
    set_deterministic_mode(True, 256)
    expected = dense(config, [sequence], [upstream], 0)
    inputs = leaves((sequence.q[None], sequence.k[None], sequence.v[None]))
    with monkeypatch.context() as traced:
        traced.setattr(torch.compiler, "is_compiling", lambda: True)
        out = flash_attn_func(*inputs)
    Gradients(*(g[0] for g in torch.autograd.grad(out, inputs, upstream[None]))).assert_same(
        expected, "traced forward"
    )


@pytest.mark.parametrize("mode", [True, False], ids=["on", "off"])
@pytest.mark.parametrize("own", [{}, {"attn_bias": (2, 1, 1)}], ids=["plain", "bias"])
def test_without_keys_there_are_outputs_and_gradients_of_zeros(
    mode: bool, own: dict[str, tuple[int, ...]]
) -> None:
    built().need("split", "bwd")
    for packed in (False, True):
        lead = () if packed else (1,)
        q, k, v = (
            torch.randn(*lead, length, heads, DIM).to(HALF).requires_grad_()
            for length, heads in ((70, 2), (0, 1), (0, 1))
        )
        options = {name: torch.zeros(shape).requires_grad_() for name, shape in own.items()}
        starts = [torch.tensor([0, length], dtype=torch.int32) for length in (70, 0)]
        with deterministic_mode(mode, split_size=256):
            out = (
                flash_attn_varlen_func(q, k, v, *starts, 70, 0, **options)
                if packed
                else flash_attn_func(q, k, v, **options)
            )
        gradients = torch.autograd.grad(out, [q, k, v, *options.values()], torch.ones_like(out))
        for result in (out, *gradients):
            assert (result == 0).all()


@pytest.mark.parametrize("mode", [True, False], ids=["on", "off"])
def test_a_sequence_past_2_to_the_31_elements(mode: bool) -> None:
    """Its sums for dQ, in float32 (rows, heads, head_dim), begin past what 32 bits count."""
    config = built(heads=8, heads_k=8)
    config.need("fwd", "split", "bwd")
    sequence = Draw(3).sequence(config, 70, 150)
    upstream = upstream_of(sequence, 1)
    with deterministic_mode(mode, split_size=256):
        far_along(config, sequence, upstream, 2**31 // (8 * DIM) + 70).assert_same(
            varlen(config, [sequence], [upstream], 0), "far along against alone"
        )


def test_without_the_mode_the_order_of_blocks_shows(machine: Machine) -> None:
    """The negative control: the emulator's random order reaches upstream's atomics."""
    heads = 1 if HALF_NAME == "fp16" else 8  # bfloat16 rounds more of it away
    config = built(heads=heads, heads_k=heads)
    config.need("fwd", "split", "bwd")
    sequence = Draw(4).sequence(config, 200, 1024)
    upstream = upstream_of(sequence, 1)
    results = []
    for order in (1, 2, 3):
        machine.set(order=order, resident=4)
        results.append(dense(config, [sequence], [upstream], 0, deterministic=False).dq)
    assert not (torch.equal(results[0], results[1]) and torch.equal(results[0], results[2]))


def test_the_mode_of_the_forward_call_is_that_of_its_gradients(machine: Machine) -> None:
    config = built(heads=1, heads_k=1)
    config.need("split", "bwd")
    sequence = Draw(4).sequence(config, 200, 1024)
    upstream = upstream_of(sequence, 1)[None]
    results = []
    for order in (1, 2, 3):
        machine.set(order=order, resident=4)
        inputs = leaves((sequence.q[None], sequence.k[None], sequence.v[None]))
        with deterministic_mode(split_size=256):
            out = flash_attn_func(*inputs)
        results.append(torch.autograd.grad(out, inputs, upstream)[0])
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
