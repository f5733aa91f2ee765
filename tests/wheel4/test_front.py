"""One front door: with set_kernels("fa4"), flash_attn's functions run on flash_attn.cute's kernels.

These cases need the flash_attn wheel beside this one; without it they are skipped.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import machine
import pytest
import torch
from bits import Rows, assert_same_bits, same_bits
from caches import Appending
from calls import Gradients, _int32, dense, dense_gradients, varlen, varlen_gradients
from cases import neighbour, own, row
from flash_attn.cute import deterministic_mode
from problems import DEVICE, Config, Sequence, draw
from test_accuracy import _assert_accurate
from without_values import compiling

BESIDE = importlib.util.find_spec("flash_attn_2_cuda") is not None
if BESIDE:
    import flash_attn

    BESIDE = hasattr(flash_attn, "set_kernels")
if BESIDE:
    import fronts
    from flash_attn import fork_fa4, fork_kernels, kernels
    from fronts import call, gradients, seen

pytestmark = pytest.mark.skipif(
    not BESIDE, reason="the flash_attn wheel, whose functions these are, is not installed beside this one"
)
gpu = pytest.mark.gpu

NAMES = ("dense", "qkvpacked", "kvpacked", "varlen", "varlen_qkvpacked", "varlen_kvpacked")
CONFIGS = [
    Config(64, "fp16"),
    Config(64, causal=True, heads=8, heads_k=2),
    Config(96),
    Config(128, causal=True),
    Config(128, window=(300, 50), heads=8, heads_k=2),
    Config(192, "fp16", causal=True),
    Config(256, softcap=15.0, causal=True),
]
LENGTH = 600
SPLIT = 256
each = pytest.mark.parametrize("name", NAMES)
configs = pytest.mark.parametrize("config", CONFIGS, ids=str)


def goes(name: str, config: Config) -> bool:
    """A qkv has as many heads of keys as of queries."""
    return "qkv" not in name or config.heads == config.heads_k


def sequences_of(name: str, config: Config) -> list[Sequence]:
    mine = own(config, LENGTH)
    if name.startswith("varlen"):
        return [neighbour(config, 9), mine, neighbour(config, 129)]
    return [neighbour(config, LENGTH), mine]


def direct(name: str, config: Config, sequences: list[Sequence]) -> tuple[Rows, Gradients]:
    """The second sequence's results of the same call of flash_attn.cute."""
    if name.startswith("varlen"):
        return varlen(config, sequences, 1), varlen_gradients(config, sequences, 1)
    return dense(config, sequences, 1), dense_gradients(config, sequences, 1)


def assert_same(one: Rows, other: Rows, what: str) -> None:
    assert_same_bits(one.lse, other.lse, f"{what}, lse (head, row)")
    assert_same_bits(one.out, other.out, f"{what}, out (row, head, dim)")


# Results ----------------------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("mode", [False, True], ids=["off", "on"])
@configs
@each
def test_results_and_gradients_have_the_bits_of_flash_attn_cute(
    name: str, config: Config, mode: bool
) -> None:
    if not goes(name, config):
        return
    sequences = sequences_of(name, config)
    with deterministic_mode(mode, SPLIT if config.head_dim <= 128 else None), kernels("fa4", "error"):
        called = call(name, config, sequences, 1)
        expected, of_inputs = direct(name, config, sequences)
    assert_same(expected, called.rows, name)
    if mode:
        found = gradients(name, called, sequences, 1)
        for letter in "qkv":
            assert_same_bits(of_inputs[letter], found[letter], f"{name}, d{letter}")


@gpu
@configs
@each
def test_results_and_gradients_are_accurate(name: str, config: Config) -> None:
    if not goes(name, config):
        return
    sequences = sequences_of(name, config)
    with kernels("fa4", "error"):
        called = call(name, config, sequences, 1)
    _assert_accurate(config, sequences[1], called.rows, gradients(name, called, sequences, 1))


@gpu
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    "head_dim", [*sorted({16 * n for n in range(1, 17)} - {64, 96, 128, 192, 256}), 60, 90]
)
def test_every_head_dim_that_is_served(head_dim: int, causal: bool) -> None:
    """Those between the usual ones, and two that are padded: results, gradients, packed calls and caches."""
    config = Config(head_dim, causal=causal, heads=4, heads_k=2)
    sequences = sequences_of("varlen", config)
    mine = sequences[1]
    with deterministic_mode(split_size=None), kernels("fa4", "error"):
        called = call("dense", config, [mine])
        found = gradients("dense", called, [mine])
        packed = call("varlen", config, sequences, 1)
        cached = in_a_cache(config, sequences, 5)
    _assert_accurate(config, mine, called.rows, found)
    assert_same(called.rows, packed.rows, "packed")
    assert_same(row(called.rows, LENGTH - 5, LENGTH), cached, "in a cache")


# The contract -----------------------------------------------------------------------------------------------


def in_a_cache(
    config: Config, sequences: list[Sequence], new: int, which: int = 1, page: int | None = None
) -> Rows:
    """The last rows of a sequence, whose tokens flash_attn's function appends to a cache."""
    call = Appending(config, [replace(s, q=s.q, k=s.k) for s in sequences], new, 1024, page=page)
    places, caches = call.buffers()
    lengths = _int32([len(s.k) - new for s in sequences])
    q, k, v = (torch.stack([getattr(s, n)[-new:] for s in sequences]) for n in "qkv")
    table = {"block_table": places["page_table"]} if page else {}
    with torch.no_grad():
        out, lse = flash_attn.flash_attn_with_kvcache(
            q,
            *caches,
            k,
            v,
            cache_seqlens=lengths,
            return_softmax_lse=True,
            **table,
            **fronts.options(config),
        )
    return Rows(out[which], lse[which])


@gpu
@configs
def test_rows_are_those_of_the_sequence_alone(config: Config) -> None:
    """In a batch, packed, decoded from a cache in pages of two sizes, and appended to one without."""
    mine = own(config, LENGTH)
    others = [neighbour(config, LENGTH, i) for i in range(5)]
    with deterministic_mode(split_size=SPLIT if config.head_dim <= 128 else None), kernels("fa4", "error"):
        alone = call("dense", config, [mine]).rows
        assert_same(alone, call("dense", config, [*others, mine], 5).rows, "in a batch")
        assert_same(
            alone,
            call("varlen", config, [neighbour(config, 9), mine, neighbour(config, 700)], 1).rows,
            "packed",
        )
        for page, new in itertools.product((None, 16, 256), (1, 7)):
            cached = in_a_cache(config, [neighbour(config, 300), mine], new, page=page)
            assert_same(row(alone, LENGTH - new, LENGTH), cached, f"{new} appended, pages of {page}")


@gpu
@configs
def test_gradients_are_those_of_the_sequence_alone(config: Config) -> None:
    mine = own(config, LENGTH)
    batch = [neighbour(config, LENGTH, i) for i in range(3)] + [mine]
    packed = [neighbour(config, 9), mine, neighbour(config, 700)]
    with deterministic_mode(), kernels("fa4", "error"):
        called = [
            call("dense", config, [mine]),
            call("dense", config, batch, 3),
            call("varlen", config, packed, 1),
        ]
    alone = gradients("dense", called[0], [mine])
    among, beside = gradients("dense", called[1], batch, 3), gradients("varlen", called[2], packed, 1)
    for letter in "qkv":
        assert_same_bits(alone[letter], among[letter], f"d{letter} in a batch")
        assert_same_bits(alone[letter], beside[letter], f"d{letter} packed")


@gpu
def test_control_the_kernels_are_part_of_what_bits_depend_on(control: Any) -> None:
    config = Config(128, "fp16", causal=True)
    if not machine.GPU:
        return
    with kernels("fa4", "error"):
        one = call("dense", config, [own(config, LENGTH)]).rows
    control(not same_bits(one.out, call("dense", config, [own(config, LENGTH)]).rows.out))


# What differs between the packages --------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("name", ["dense", "varlen"])
def test_rows_that_see_no_key_are_as_in_flash_attn(name: str) -> None:
    """Zeros, +inf, and gradients of 0."""
    config = Config(128, causal=True)
    mine = draw(config, 300, 100)
    with kernels("fa4", "error"):
        called = call(name, config, [mine])
    found = gradients(name, called, [mine])
    assert not called.rows.out[:200].any()
    assert (called.rows.lse[:, :200] == math.inf).all()
    assert called.rows.lse[:, 200:].isfinite().all()
    assert not found["q"][:200].any()
    _assert_accurate(
        config,
        mine,
        Rows(called.rows.out, called.rows.lse.masked_fill(called.rows.lse == math.inf, -math.inf)),
        found,
    )


@gpu
def test_sequences_without_queries_or_keys() -> None:
    config = Config(128, causal=True)
    empty, mine = draw(config, 0, 0), own(config, LENGTH)
    without_keys = Sequence(
        *(
            t[: 5 * (name in ("q", "dout"))]
            for name, t in zip(("q", "k", "v", "dout"), (mine.q, mine.k, mine.v, mine.dout), strict=True)
        )
    )
    sequences = [empty, without_keys, mine, draw(config, 0, 200)]
    with deterministic_mode(split_size=SPLIT), kernels("fa4", "error"):
        called = call("varlen", config, sequences, 1)
        assert not called.rows.out.any()
        assert (called.rows.lse == math.inf).all()
        assert_same(
            call("dense", config, [mine]).rows, call("varlen", config, sequences, 2).rows, "beside none"
        )
        found = gradients("varlen", called, sequences, 1)
        without_queries = gradients("varlen", call("varlen", config, sequences, 3), sequences, 3)
    assert not found["q"].any()
    assert not without_queries["k"].any()
    assert not without_queries["v"].any()


@gpu
def test_no_keys_at_all() -> None:
    config = Config(128)
    mine = own(config, LENGTH)
    offsets = _int32([0, LENGTH])
    with kernels("fa4", "error"), fronts.eager(), torch.no_grad():
        out, lse, _ = flash_attn.flash_attn_varlen_func(
            mine.q, mine.k, mine.v, offsets, offsets, LENGTH, 0, return_attn_probs=True
        )
    assert not out.any()
    assert (lse == math.inf).all()


@gpu
@pytest.mark.parametrize("page", [16, 128, 256])
def test_packed_calls_on_pages(page: int) -> None:
    """Lengths of keys come from cu_seqlens_k, as in flash_attn. What pages hold behind them is NaN.

    Pages of 128, a tile's keys, would be loaded whole if the call did not ask for their rows.
    """
    config = Config(128, causal=True, heads=8, heads_k=2)
    sequences = [neighbour(config, 300), own(config, LENGTH)]
    cache = Appending(config, sequences, 0, 1024, page=page)
    places, caches = cache.buffers()
    begins = _int32([0, 300, 300 + LENGTH])
    q = torch.cat([s.q for s in sequences])
    with deterministic_mode(split_size=SPLIT), kernels("fa4", "error"), fronts.eager(), torch.no_grad():
        out, lse, _ = flash_attn.flash_attn_varlen_func(
            q, *caches, begins, begins, LENGTH, LENGTH, causal=True, return_attn_probs=True,
            block_table=places["page_table"],
        )  # fmt: skip
        assert_same(call("dense", config, [sequences[1]]).rows, Rows(out[300:], lse[:, 300:]), "pages")


def test_a_sequence_that_is_longer_than_its_call_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """FA2_CHECK=1 makes it an error before any kernel runs: the backward pass may wait for ever."""
    q, out = torch.zeros(309, 4, 64, dtype=torch.bfloat16), torch.zeros(0)
    offsets = torch.tensor([0, 9, 309], dtype=torch.int32)
    ran: list[tuple[int, int]] = []
    monkeypatch.setattr(
        fork_fa4, "_gradients", lambda *given: ran.append((given[-1]["max_seqlen_q"], given[-1]["max_seqlen_k"])) or [q] * 3
    )  # fmt: skip

    def backward(max_seqlen_q: int, max_seqlen_k: int) -> None:
        options = (None, max_seqlen_q, max_seqlen_k, 0.0, 0.1, False, True, -1, -1, 0.0, True)
        fork_fa4.varlen_bwd(out, q, q, q, q, out, None, None, None, offsets, offsets, *options)

    backward(300, 299)
    monkeypatch.setattr(fork_fa4, "_CHECK", True)
    backward(300, 300)
    with pytest.raises(ValueError, match="FA2_CHECK: max_seqlen_q is 299; sequence 1 has 300 tokens of q"):
        backward(299, 300)
    with pytest.raises(ValueError, match="FA2_CHECK: max_seqlen_k is 299; sequence 1 has 300 tokens of k"):
        backward(300, 299)
    backward(300, 0)  # says that there are no keys
    assert ran == [(300, 299), (300, 300)]
    lengths = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": 300, "max_seqlen_k": 48}
    used = torch.tensor([48, 47], dtype=torch.int32)  # and no others of a buffer's
    fork_fa4._check_longest(lengths, used)
    with pytest.raises(ValueError, match="max_seqlen_k is 48; sequence 0 has 49 tokens of k"):
        fork_fa4._check_longest(lengths, used + 1)


@gpu
def test_a_window_that_is_open_on_one_side() -> None:
    for window in ((300, -1), (-1, 50), (-1, 0), (2**31 - 1, 2**31 - 1)):
        config = Config(128, window=window)
        alike = replace(config, window=(-1, -1)) if window[0] > 2**30 else config
        mine = own(alike, LENGTH)
        with kernels("fa4", "error"):
            assert_same(seen(dense(alike, [mine])), call("dense", config, [mine]).rows, str(window))


# What they do not serve -------------------------------------------------------------------------------------


def unserved_calls() -> dict[str, Callable[..., Any]]:
    """By what is not served: a call of q, k, v (batch, seqlen, heads, head_dim)."""
    function, cached = flash_attn.flash_attn_func, flash_attn.flash_attn_with_kvcache

    def slopes(q: torch.Tensor) -> torch.Tensor:
        return torch.full((q.shape[2],), 0.1, device=q.device)

    def mask(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return torch.ones((1, 1, q.shape[1], k.shape[1]), dtype=torch.bool, device=q.device)

    return {
        "alibi_slopes": lambda q, k, v: function(q, k, v, alibi_slopes=slopes(q)),
        "dropout_p": lambda q, k, v: function(q, k, v, dropout_p=0.1),
        "attn_mask": lambda q, k, v: function(q, k, v, attn_mask=mask(q, k)),
        "attn_bias": lambda q, k, v: function(q, k, v, attn_bias=mask(q, k).to(q.dtype)),
        "cache_leftpad": lambda q, k, v: cached(
            q, k, v, cache_leftpad=torch.zeros(len(q), dtype=torch.int32, device=q.device)
        ),
        "alibi_slopes ": lambda q, k, v: cached(q, k, v, alibi_slopes=slopes(q)),
        "attn_mask ": lambda q, k, v: cached(q, k, v, attn_mask=mask(q, k)),
        "head_dim 72": lambda q, k, v: function(*(torch.nn.functional.pad(t, [0, 8]) for t in (q, k, v))),
    }


UNSERVED = ("alibi_slopes", "dropout_p", "attn_mask", "attn_bias", "cache_leftpad", "alibi_slopes ", "attn_mask ", "head_dim 72")  # fmt: skip


@gpu
@pytest.mark.parametrize("what", UNSERVED)
def test_what_is_not_served_is_refused_or_runs_on_the_other_kernels(what: str) -> None:
    config = Config(64, "fp16")
    mine = own(config, LENGTH)
    inputs = [t[None] for t in (mine.q, mine.k, mine.v)]
    run = unserved_calls()[what]
    with fronts.eager(), torch.no_grad():
        with (
            kernels("fa4", "error"),
            pytest.raises(NotImplementedError, match=f"kernels do not serve {what.strip()};"),
        ):
            run(*inputs)
        if not machine.GPU or what.startswith("head_dim"):
            return  # the other kernels need a GPU, and may not be in that wheel
        before = dict(flash_attn.fork_info()["runs_on"]["calls"])
        torch.manual_seed(0)
        with kernels("fa4"):
            result = run(*inputs)
        after = flash_attn.fork_info()["runs_on"]["calls"]
        torch.manual_seed(0)
        assert_same_bits(run(*inputs), result, what)
    told = f"fa2: {what.strip()}"
    assert after[told] == before.get(told, 0) + 1


@gpu
def test_a_mistake_is_told_in_flash_attn_s_words() -> None:
    config = Config(64, "fp16", heads=4, heads_k=2)
    mine = own(config, LENGTH)
    q, k, v = (t[None] for t in (mine.q, mine.k, mine.v))
    wrong: list[tuple[Callable[[], Any], str]] = [
        (lambda: flash_attn.flash_attn_func(q.float(), k.float(), v.float()), "only support fp16 and bf16"),
        (lambda: flash_attn.flash_attn_func(q, k.bfloat16(), v), "query and k must have the same dtype"),
        (lambda: flash_attn.flash_attn_func(q[:, :, :3], k, v), "must divide number of heads in query"),
        (lambda: flash_attn.flash_attn_func(q, k, v[:, :-1]), "v must have shape"),
        (lambda: flash_attn.flash_attn_func(q, k, v[..., :32]), "v must have shape"),
    ]
    for run, text in wrong[not machine.GPU :]:  # the first goes to the other kernels, which need a GPU
        with (
            kernels("fa4", "error"),
            fronts.eager(),
            torch.no_grad(),
            pytest.raises((RuntimeError, ValueError), match=text),
        ):
            run()


# PyTorch around it ------------------------------------------------------------------------------------------


def inputs_of(config: Config) -> list[torch.Tensor]:
    mine = own(config, LENGTH)
    return [t[None].clone().requires_grad_() for t in (mine.q, mine.k, mine.v)]


@gpu
def test_gradients_are_computed_by_the_kernels_of_the_forward_call() -> None:
    """Outside the scope, and although another choice holds then."""
    config = Config(128, causal=True)
    mine = own(config, LENGTH)
    with deterministic_mode(), kernels("fa4", "error"):
        called = call("dense", config, [mine])
        expected = dense_gradients(config, [mine])
    found = gradients("dense", called, [mine])
    for letter in "qkv":
        assert_same_bits(expected[letter], found[letter], f"d{letter}")


@gpu
@pytest.mark.parametrize("grad", [False, True], ids=["forward", "with gradients"])
def test_a_compiled_function_gives_the_same_bits(grad: bool) -> None:
    if not machine.GPU:
        return
    config = Config(128, causal=True)
    dout = own(config, LENGTH).dout[None]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = flash_attn.flash_attn_func(q * 1.0, k, v, causal=True)
        return result

    compiled = torch.compile(attend, fullgraph=True)
    flash_attn.set_kernels("fa4", "error")
    flash_attn.set_deterministic_mode(True, SPLIT)
    try:
        results = []
        for function in (attend, compiled):
            inputs = inputs_of(config)
            with torch.set_grad_enabled(grad):
                out = function(*inputs)
            results.append([out.detach(), *(torch.autograd.grad(out, inputs, dout) if grad else [])])
    finally:
        flash_attn.set_kernels("fa2")
    for eager, traced in zip(*results, strict=True):
        assert_same_bits(eager, traced, "compiled")


@gpu
def test_activation_checkpointing_gives_the_same_bits() -> None:
    if not machine.GPU:
        return
    from torch.utils.checkpoint import checkpoint

    config = Config(128, causal=True)
    dout = own(config, LENGTH).dout[None]
    flash_attn.set_kernels("fa4", "error")
    flash_attn.set_deterministic_mode(True, SPLIT)
    try:
        results = []
        for around in (lambda f, *t: f(*t), lambda f, *t: checkpoint(f, *t, use_reentrant=False)):
            inputs = inputs_of(config)
            out = around(lambda q, k, v: flash_attn.flash_attn_func(q, k, v, causal=True), *inputs)
            results.append(torch.autograd.grad(out, inputs, dout))
    finally:
        flash_attn.set_kernels("fa2")
    for plain, again in zip(*results, strict=True):
        assert_same_bits(plain, again, "checkpoint")


@gpu
def test_a_cuda_graph_replays_them() -> None:
    config = Config(128, causal=True)
    if not machine.GPU:
        return
    held = [t.detach() for t in inputs_of(config)]
    with kernels("fa4", "error"), torch.no_grad():
        expected = flash_attn.flash_attn_func(*held, causal=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = flash_attn.flash_attn_func(*held, causal=True)
    graph.replay()
    assert_same_bits(expected, out, "CUDA graph")


def test_a_compiled_function_does_not_look_into_a_call_on_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would trace what compiles the kernels."""
    traced: list[bool] = []

    def attend(q: torch.Tensor, *_: Any) -> list[torch.Tensor]:
        traced.append(torch.compiler.is_compiling())
        return [q * 2.0, q]

    monkeypatch.setattr(fork_fa4, "fork_fwd_kvcache", attend)
    q = torch.ones(2, 1, 4, 64, dtype=torch.bfloat16, device=DEVICE if machine.GPU else "cpu")
    cache = q.expand(-1, 16, -1, -1).contiguous()

    @torch.compile(backend="eager")
    def step(q: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = flash_attn.flash_attn_with_kvcache(q * 3.0, cache, cache) + 1.0
        return result

    flash_attn.set_kernels("fa4", "error")
    try:
        assert torch.equal(step(q), q * 7.0)
    finally:
        flash_attn.set_kernels("fa2")
    assert traced == [False]


@gpu
def test_tensors_on_another_gpu_than_the_current_one() -> None:
    if not machine.GPU:
        return
    if torch.cuda.device_count() < 2:
        pytest.skip("this host has one GPU")
    config = Config(128, causal=True)
    mine = own(config, LENGTH)
    moved = Sequence(*(t.to("cuda:1") for t in (mine.q, mine.k, mine.v, mine.dout)))
    found = []
    with deterministic_mode(split_size=SPLIT), kernels("fa4", "error"):
        for sequence in (mine, moved):
            called = call("dense", config, [sequence])
            q, k, v = (t[None] for t in (sequence.q[-7:], sequence.k, sequence.v))
            cached = flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=LENGTH, causal=True)
            grads = gradients("dense", called, [sequence])
            found.append([called.rows.out, called.rows.lse, cached, *(grads[letter] for letter in "qkv")])
    assert torch.cuda.current_device() == 0
    for here, there in zip(*found, strict=True):
        assert_same_bits(here, there.to(here.device), "on another GPU")


def test_kernels_are_launched_on_the_gpu_of_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    scopes = [fork_fa4._on(torch.device(name)) for name in ("cuda:1", "cuda:0", "cuda", "cpu")]
    assert [getattr(scope, "idx", None) for scope in scopes] == [1, None, None, None]


@gpu
def test_strides_of_results_are_those_of_the_queries() -> None:
    """A compiled caller relies on them."""
    config = Config(64, "fp16")
    mine = own(config, LENGTH)
    q, k, v = (t.transpose(0, 1).contiguous().transpose(0, 1)[None] for t in (mine.q, mine.k, mine.v))
    with kernels("fa4", "error"), fronts.eager(), torch.no_grad():
        out = flash_attn.flash_attn_func(q, k, v)
    assert out.stride() == torch.empty_like(q).stride()


# The choice, which needs no GPU -----------------------------------------------------------------------------


def test_the_choice_sees_neither_shapes_nor_lengths() -> None:
    """It is a function of what Asked has, and of calls nothing else is asked."""
    assert fork_kernels.Asked._fields == ("capability", "dtype", "head_dim", "options")
    seen_by_shape: dict[Any, set[Any]] = {}
    shapes = itertools.product((1, 3), (1, 129, 5000), (1, 8), (40, 64, 72, 112, 128, 256))
    with compiling(), kernels("fa4"):
        for batch, length, heads, head_dim in shapes:
            for dtype in (torch.float16, torch.bfloat16, torch.float32):
                q = torch.empty((batch, length, heads, head_dim), dtype=dtype, device=DEVICE)
                packed = torch.empty((batch * length, heads, head_dim), dtype=dtype, device=DEVICE)
                for slopes in (None, q):
                    for tensor in (q, packed):
                        taken = fork_kernels.takes_fa4("call", tensor, alibi_slopes=slopes)
                        seen_by_shape.setdefault((dtype, head_dim, slopes is None), set()).add(taken)
    assert all(len(taken) == 1 for taken in seen_by_shape.values())
    assert {key for key, taken in seen_by_shape.items() if taken == {True}} == {
        (dtype, head_dim, True)
        for dtype in (torch.float16, torch.bfloat16)
        for head_dim in (64, 112, 128, 256)
    }


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"head_dim": 60}, None),
        ({"head_dim": 40}, "head_dim 40"),
        ({"head_dim": 112}, None),
        ({"head_dim": 264}, "head_dim 264"),
        ({"dtype": torch.float32}, "dtype torch.float32"),
        ({"capability": (8, 0)}, "compute capability 8.0"),
        ({"capability": (10, 0)}, "compute capability 10.0"),
        ({"options": ("alibi_slopes",)}, "alibi_slopes"),
        ({"options": ("attn_mask", "attn_bias")}, "attn_mask and attn_bias"),
    ],
)
def test_what_is_served(change: dict[str, Any], reason: str | None) -> None:
    asked = fork_kernels.Asked((9, 0), torch.bfloat16, 128)
    assert fork_kernels.unserved(asked._replace(**change)) == reason


def test_scopes_nest_and_the_process_s_choice_is_under_them() -> None:
    with compiling():
        assert flash_attn.get_kernels() == ("fa2", "fa2")
        with flash_attn.kernels("fa4"):
            with flash_attn.kernels("fa4", "error"):
                assert flash_attn.get_kernels() == ("fa4", "error")
            assert flash_attn.get_kernels() == ("fa4", "fa2")
            with pytest.raises(KeyError, match="fa2"), flash_attn.kernels():
                raise KeyError(flash_attn.get_kernels().family)
            assert flash_attn.get_kernels().family == "fa4"
        flash_attn.set_kernels("fa4")
        assert flash_attn.get_kernels() == ("fa4", "fa2")
        flash_attn.set_kernels("fa2")
        assert flash_attn.get_kernels() == ("fa2", "fa2")


def test_a_scope_decorates_what_runs_within_the_call() -> None:
    async def late() -> None:
        pass

    with compiling():
        assert flash_attn.kernels("fa4")(flash_attn.get_kernels)() == ("fa4", "fa2")
        with pytest.raises(TypeError, match=r"cannot decorate .* open the scope inside its body"):
            flash_attn.kernels("fa4")(late)


@pytest.mark.parametrize("words", [("fa3",), ("fa4", "raise"), (None,)])
def test_another_word_is_an_error(words: tuple[Any, ...]) -> None:
    for function in (flash_attn.set_kernels, flash_attn.kernels):
        with pytest.raises(ValueError, match="is neither"):
            function(*words)


def run_python(code: str, *first: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(map(str, (*first, *sys.path)))
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, **environment, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


def test_until_somebody_asks_nothing_is_loaded() -> None:
    done = run_python(
        "import flash_attn, sys; print(flash_attn.fork_kernels.ON, 'flash_attn.cute' in sys.modules)"
    )
    assert done.stdout.strip() == "False False", done.stderr


def test_the_environment_chooses_and_loads_nothing_yet() -> None:
    code = "import flash_attn, sys; print(*flash_attn.get_kernels(), 'cutlass' in sys.modules)"
    done = run_python(code, FA2_KERNELS="fa4", FA2_KERNELS_OTHERWISE="error")
    assert done.stdout.strip() == "fa4 error False", done.stderr


@pytest.mark.parametrize(("name", "value"), [("FA2_KERNELS", "fa5"), ("FA2_KERNELS_OTHERWISE", "raise")])
def test_bad_environment_is_an_error_at_import_that_names_it(name: str, value: str) -> None:
    done = run_python("import flash_attn", **{name: value})
    assert f"ValueError: {name}='{value}' is neither" in done.stderr


def test_a_gpu_that_they_do_not_serve_is_one_error() -> None:
    done = run_python("import flash_attn; flash_attn.set_kernels('fa4')", FLASH_ATTENTION_ARCH="sm_80")
    assert "RuntimeError: kernels 'fa4' serve compute capability 9.x; this GPU has 8.0" in done.stderr


@pytest.mark.parametrize("environment", [{}, {"FA2_KERNELS": "fa4"}], ids=["asked for", "in the environment"])
@pytest.mark.parametrize(
    ("older", "text"), [(True, "upstream's or an older one"), (False, "is not installed")]
)
def test_a_wheel_that_is_missing_or_too_old_is_one_error(
    older: bool, text: str, environment: dict[str, str], tmp_path: Path
) -> None:
    """A copy of flash_attn without the other package, or with one that lacks the function for caches."""
    package = tmp_path / "flash_attn"
    package.mkdir()
    for path in Path(flash_attn.__file__).parent.iterdir():
        if path.name not in ("cute", "__pycache__"):
            (package / path.name).symlink_to(path)
    if older:
        (package / "cute").mkdir()
        (package / "cute/__init__.py").touch()
    done = run_python("import flash_attn; flash_attn.set_kernels('fa4')", tmp_path, **environment)
    assert "RuntimeError: kernels 'fa4' need" in done.stderr
    assert text in done.stderr
    assert "nox -s build -- --upstream flash-attn-4" in done.stderr


@gpu
def test_a_call_prints_which_kernels_ran(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_kernels, "_DEBUG", True)
    config = Config(64, "fp16")
    with kernels("fa4", "error"):
        call("dense", config, [own(config, LENGTH)])
    assert "[flash-attn] fwd: kernels=fa4" in capsys.readouterr().err
