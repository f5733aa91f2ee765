"""Gradients' bits: dq of a query, dk and dv of a key are the same in every call that their sequence may come in."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from flash_attn import deterministic_mode, flash_attn_func, set_deterministic_mode
from gradients import Gradients, assert_accurate, dense, leaves, upstream_of, varlen
from harness import Config, Draw, seed_of

pytestmark = pytest.mark.gpu

CONFIGS = [Config(head_dim=d, dtype=t, causal=c) for d in (64, 128) for t in ("fp16", "bf16") for c in (False, True)] + [
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
]
configs = pytest.mark.parametrize("config", CONFIGS, ids=str)


@configs
@pytest.mark.parametrize(("len_q", "len_k"), [(128, 2048), (1000, 1000), (777, 1777), (64, 900)])
def test_alone_in_a_batch_and_packed(config: Config, len_q: int, len_k: int, control: Callable[..., None]) -> None:
    config.need("split", "fwd", "bwd")
    draw = Draw(seed_of(config, len_q, len_k))
    batch = [draw.sequence(config, len_q, len_k) for _ in range(5)]
    neighbours = [draw.sequence(config, 300, 2500), draw.sequence(config, 33, 901)]
    upstreams = [upstream_of(s, n) for n, s in enumerate([*batch, *neighbours])]
    packed = [neighbours[0], batch[3], neighbours[1]]
    packed_upstreams = [upstreams[5], upstreams[3], upstreams[6]]

    def alone() -> Gradients:
        return dense(config, [batch[3]], [upstreams[3]], 0)

    with deterministic_mode():
        expected = alone()
        dense(config, batch, upstreams[:5], 3, deterministic=False).assert_same(expected, "in a batch")
        varlen(config, packed, packed_upstreams, 1).assert_same(expected, "packed")
    assert_accurate(config, expected, batch[3], upstreams[3])
    control(not dense(config, batch, upstreams[:5], 3).same(alone()))


@pytest.mark.parametrize(
    ("config", "lengths"),
    [(Config(alibi=True, window=(700, 0)), (100, 512)), (Config(window=(-1, 130)), (257, 128)), (Config(window=(900, 900)), (300, 200))],
    ids=str,
)
def test_windows_wider_than_the_keys(config: Config, lengths: tuple[int, int]) -> None:
    """Upstream cuts them to the call's longest length, which is another window for a sequence beside a longer one."""
    config.need("split", "bwd")
    draw = Draw(seed_of(config, lengths))
    sequences = [draw.sequence(config, *lengths), draw.sequence(config, 300, 2000)]
    upstreams = [upstream_of(s, n) for n, s in enumerate(sequences)]
    with deterministic_mode():
        alone = dense(config, sequences[:1], upstreams[:1], 0)
        varlen(config, sequences, upstreams, 0).assert_same(alone, "beside a longer one")
    assert_accurate(config, alone, sequences[0], upstreams[0])


@pytest.mark.parametrize("config", [Config(), Config(head_dim=128, dtype="bf16", causal=True)], ids=str)
def test_fifty_runs(config: Config) -> None:
    config.need("split", "bwd")
    draw = Draw(seed_of(config, "runs"))
    batch = [draw.sequence(config, 1000, 2500) for _ in range(4)]
    upstreams = [upstream_of(s, n) for n, s in enumerate(batch)]
    with deterministic_mode():
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
    set_deterministic_mode(True)
    expected = dense(config, [sequence], [upstream], 0)
    set_deterministic_mode(False)
    q, k, v = leaves(tuple(torch.stack([getattr(s, name) for s in (sequence, other)]) for name in "qkv"))
    with deterministic_mode():
        out = flash_attn_func(q, k, v)
    gradients = torch.autograd.grad(out, (q, k, v), torch.stack([upstream, upstream]))
    Gradients(*(g[0] for g in gradients)).assert_same(expected, "after the scope")


@pytest.mark.sanitizer
@configs
def test_small_shapes_for_compute_sanitizer(config: Config) -> None:
    config.need("split", "bwd")
    draw = Draw(seed_of(config, "sanitizer"))
    sequences = [draw.sequence(config, 130, 1100), draw.sequence(config, 65, 800)]
    upstreams = [upstream_of(s, n) for n, s in enumerate(sequences)]
    with deterministic_mode():
        assert_accurate(config, varlen(config, sequences, upstreams, 0), sequences[0], upstreams[0])
