"""Gradients' bits: dq of a query, dk and dv of a key are the same in every call that their sequence may come in."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from shutil import which

import pytest
import torch
from flash_attn import deterministic_mode, flash_attn_func, set_deterministic_mode
from gradients import (
    Gradients,
    assert_accurate,
    assert_that_an_lse_is_read_wherever_it_lies,
    assert_that_gradients_are_taken_once,
    assert_that_losses_on_lse_have_gradients,
    assert_that_rows_are_read_alike_wherever_they_lie,
    dense,
    leaves,
    upstream_of,
    varlen,
)
from harness import Config, Draw, of_other_head_dims, seed_of

pytestmark = pytest.mark.gpu

CONFIGS = [
    Config(head_dim=d, dtype=t, causal=c) for d in (64, 128) for t in ("fp16", "bf16") for c in (False, True)
] + [
    Config(heads=8, heads_k=2, causal=True),
    Config(heads=8, heads_k=1, head_dim=128, dtype="bf16"),
    Config(window=(200, 0)),
    Config(window=(700, 50), head_dim=128, dtype="bf16"),
    Config(softcap=15.0, causal=True),
    Config(alibi=True, causal=True),
    Config(alibi=True),
    Config(head_dim=40, causal=True),
    Config(mask=True, heads=4, heads_k=2),
    Config(bias="fp16", causal=True, heads=4, heads_k=2),
    Config(mask=True, bias="fp32", head_dim=128, dtype="bf16", heads=4, heads_k=4),
    Config(sink="fp32", heads=8, heads_k=2, causal=True),
    Config(sink="bf16", head_dim=128, dtype="bf16", window=(200, 0)),
    Config(sink="fp16", mask=True, bias="fp16", heads=4, heads_k=2),
]
configs = pytest.mark.parametrize("config", list(dict.fromkeys([*CONFIGS, *of_other_head_dims()])), ids=str)


@configs
def test_rows_are_read_alike_wherever_they_lie(config: Config) -> None:
    config.need("split", "bwd")
    assert_that_rows_are_read_alike_wherever_they_lie(config)


@configs
@pytest.mark.parametrize("mode", [True, False], ids=["on", "off"])
def test_losses_on_lse_have_gradients(config: Config, mode: bool) -> None:
    config.need("split", "fwd", "bwd")
    with deterministic_mode(mode, split_size=512):
        assert_that_losses_on_lse_have_gradients(config)


@configs
def test_gradients_are_taken_once(config: Config) -> None:
    config.need("split", "fwd", "bwd")
    assert_that_gradients_are_taken_once(config)


@configs
def test_an_lse_is_read_wherever_it_lies(config: Config) -> None:
    config.need("fwd", "bwd")
    assert_that_an_lse_is_read_wherever_it_lies(config)


@configs
@pytest.mark.parametrize(("len_q", "len_k"), [(128, 2048), (1000, 1000), (777, 1777), (64, 900)])
def test_alone_in_a_batch_and_packed(
    config: Config, len_q: int, len_k: int, control: Callable[..., None]
) -> None:
    config.need("split", "fwd", "bwd")
    draw = Draw(seed_of(config, len_q, len_k))
    batch = [draw.sequence(config, len_q, len_k) for _ in range(5)]
    neighbours = [draw.sequence(config, 300, 2500), draw.sequence(config, 33, 901)]
    upstreams = [upstream_of(s, n) for n, s in enumerate([*batch, *neighbours])]
    packed = [neighbours[0], batch[3], neighbours[1]]
    packed_upstreams = [upstreams[5], upstreams[3], upstreams[6]]

    def alone() -> Gradients:
        return dense(config, [batch[3]], [upstreams[3]], 0)

    with deterministic_mode(split_size=512):
        expected = alone()
        dense(config, batch, upstreams[:5], 3, deterministic=False).assert_same(expected, "in a batch")
        varlen(config, packed, packed_upstreams, 1).assert_same(expected, "packed")
    assert_accurate(config, expected, batch[3], upstreams[3])
    control(not dense(config, batch, upstreams[:5], 3).same(alone()))


@pytest.mark.parametrize(
    ("config", "lengths"),
    [
        (Config(alibi=True, window=(700, 0)), (100, 512)),
        (Config(window=(-1, 130)), (257, 128)),
        (Config(window=(900, 900)), (300, 200)),
    ],
    ids=str,
)
def test_windows_wider_than_the_keys(config: Config, lengths: tuple[int, int]) -> None:
    """Upstream cuts them to the call's longest length, which is another window for a sequence beside a longer one."""
    config.need("split", "bwd")
    draw = Draw(seed_of(config, lengths))
    sequences = [draw.sequence(config, *lengths), draw.sequence(config, 300, 2000)]
    upstreams = [upstream_of(s, n) for n, s in enumerate(sequences)]
    with deterministic_mode(split_size=512):
        alone = dense(config, sequences[:1], upstreams[:1], 0)
        varlen(config, sequences, upstreams, 0).assert_same(alone, "beside a longer one")
    assert_accurate(config, alone, sequences[0], upstreams[0])


@pytest.mark.parametrize("config", [Config(), Config(head_dim=128, dtype="bf16", causal=True)], ids=str)
def test_fifty_runs(config: Config) -> None:
    config.need("split", "bwd")
    draw = Draw(seed_of(config, "runs"))
    batch = [draw.sequence(config, 1000, 2500) for _ in range(4)]
    upstreams = [upstream_of(s, n) for n, s in enumerate(batch)]
    with deterministic_mode(split_size=512):
        expected = dense(config, batch, upstreams, 2)
        for run in range(50):
            dense(config, batch, upstreams, 2, deterministic=False).assert_same(expected, f"run {run}")


def test_gradients_take_the_mode_of_their_forward_call() -> None:
    """Autograd runs the backward pass on a thread that a scope does not reach, and here after the scope has ended."""
    config = Config()
    config.need("split", "bwd")
    draw = Draw(17)
    sequence, other = (draw.sequence(config, 500, 4096) for _ in range(2))
    upstream = upstream_of(sequence, 1)
    set_deterministic_mode(True, 512)
    expected = dense(config, [sequence], [upstream], 0)
    set_deterministic_mode(False)
    q, k, v = leaves(tuple(torch.stack([getattr(s, name) for s in (sequence, other)]) for name in "qkv"))
    with deterministic_mode(split_size=512):
        out = flash_attn_func(q, k, v)
    gradients = torch.autograd.grad(out, (q, k, v), torch.stack([upstream, upstream]))
    Gradients(*(g[0] for g in gradients)).assert_same(expected, "after the scope")


def test_gradients_of_two_streams_at_once() -> None:
    """Thread blocks wait for their turn at dQ: also where those of another call take their place on the GPU."""
    config = Config(heads=16, heads_k=16, causal=True)
    config.need("split", "bwd")
    draw = Draw(23)
    problems = [[draw.sequence(config, 2000, 2000) for _ in range(4)] for _ in range(2)]
    upstreams = [[upstream_of(s, n) for n, s in enumerate(batch)] for batch in problems]
    with deterministic_mode(split_size=512):
        expected = [dense(config, *each, 3) for each in zip(problems, upstreams, strict=True)]
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream() for _ in problems]
        got = []
        for _ in range(10):  # all queued before the first is waited for
            for stream, *each in zip(streams, problems, upstreams, strict=True):
                with torch.cuda.stream(stream):
                    got.append(dense(config, *each, 3))
        torch.cuda.synchronize()
    for run, one in enumerate(got):
        one.assert_same(expected[run % 2], f"call {run}")


@pytest.mark.parametrize("shape", [(1, 1, 300, 700), (2, 4, 300, 700)], ids=["shared", "own"])
def test_a_cuda_graph_of_gradients(shape: tuple[int, ...]) -> None:
    """What counts the turns at dQ starts anew in each replay, and so do the parts of a gradient that sequences share."""
    config = Config(heads=4, heads_k=2, bias="fp16")
    config.need("split", "bwd")
    draw = Draw(29)
    sequences = [draw.sequence(config, 300, 700) for _ in range(2)]
    inputs = leaves(tuple(torch.stack([getattr(s, name) for s in sequences]) for name in "qkv"))
    bias = torch.randn(shape, generator=draw.generator, device="cuda", dtype=torch.float16).requires_grad_()
    upstream = torch.stack([upstream_of(s, n) for n, s in enumerate(sequences)])

    def gradients() -> Gradients:
        return Gradients(
            *torch.autograd.grad(flash_attn_func(*inputs, attn_bias=bias), (*inputs, bias), upstream)
        )

    stream = torch.cuda.Stream()
    with deterministic_mode(split_size=512):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            expected = gradients()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = gradients()
    for replay in range(5):
        for _, gradient in captured:
            gradient.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        captured.assert_same(expected, f"replay {replay}")


@pytest.mark.skipif(
    not (find_spec("triton") and which("cc")), reason="torch.compile needs triton and a C compiler"
)
def test_compiled_gradients_are_those_of_the_eager_call() -> None:
    config = Config(heads=4, heads_k=2, mask=True, bias="fp16")
    config.need("split", "bwd")
    sequence = Draw(31).sequence(config, 300, 700)
    upstream = upstream_of(sequence, 1).transpose(0, 1)[None]
    q, k, v, bias = leaves(
        tuple(
            t[None]
            for t in (sequence.q.transpose(0, 1), sequence.k, sequence.v, sequence.bias)
            if t is not None
        )
    )

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return flash_attn_func(q.transpose(1, 2), k, v, attn_mask=sequence.mask, attn_bias=bias).transpose(
            1, 2
        )

    set_deterministic_mode(True)
    expected, got = (
        torch.autograd.grad(f(q, k, v, bias), (q, k, v, bias), upstream)
        for f in (call, torch.compile(call, fullgraph=True))
    )
    Gradients(*got).assert_same(Gradients(*expected), "compiled")


@pytest.mark.skipif(
    not (find_spec("triton") and which("cc")), reason="torch.compile needs triton and a C compiler"
)
@pytest.mark.parametrize("own", [{}, {"sink": "fp32"}, {"bias": "fp16"}], ids=str)
def test_compiled_losses_on_lse_have_the_gradients_of_the_eager_call(own: dict[str, str]) -> None:
    config = Config(heads=4, heads_k=2, **own)
    config.need("split", "bwd")
    sequence = Draw(37).sequence(config, 300, 700)
    inputs = leaves(tuple(getattr(sequence, name)[None] for name in "qkv"))
    options = config.kwargs() | ({} if sequence.bias is None else {"attn_bias": sequence.bias})

    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True, **options)
        return lse.square().sum() + out.float().sum()

    set_deterministic_mode(True)
    expected, got = (
        torch.autograd.grad(f(*inputs), inputs) for f in (loss, torch.compile(loss, fullgraph=True))
    )
    Gradients(*got).assert_same(Gradients(*expected), "compiled")


@pytest.mark.sanitizer
@configs
def test_small_shapes_for_compute_sanitizer(config: Config) -> None:
    config.need("split", "bwd")
    draw = Draw(seed_of(config, "sanitizer"))
    sequences = [draw.sequence(config, 130, 1100), draw.sequence(config, 65, 800)]
    upstreams = [upstream_of(s, n) for n, s in enumerate(sequences)]
    with deterministic_mode(split_size=512):
        assert_accurate(config, varlen(config, sequences, upstreams, 0), sequences[0], upstreams[0])
