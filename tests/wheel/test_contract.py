"""The rows' bits: the same in every call that the row may come in.

Each case computes one sequence alone, then through a transform, with the mode on, and compares the bits
of out and lse. The same tensors go through the same transform with the mode off: that is the negative
control. ``must_differ`` marks those where upstream is known to give other bits on some GPU; a run in
which none of them differs fails (conftest.py).
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace

import flash_attn_2_cuda
import pytest
import torch
from flash_attn import deterministic_mode, flash_attn_func, flash_attn_with_kvcache, set_deterministic_mode
from harness import (
    DEVICE,
    ROUTES,
    Config,
    Draw,
    Rows,
    Sequence,
    assert_accurate,
    assert_same_bits,
    cache,
    dense,
    in_pages,
    joined,
    of_other_head_dims,
    paged,
    reference,
    route,
    seed_of,
    varlen,
)
from kernel_names import DIMS
from rotary import Appending

pytestmark = pytest.mark.gpu

Call = Callable[[], Rows]

CONFIGS = [
    Config(head_dim=d, dtype=t, causal=c) for d in (64, 128) for t in ("fp16", "bf16") for c in (False, True)
]
FEATURES = [
    Config(heads=8, heads_k=2, causal=True),
    Config(heads=8, heads_k=1, head_dim=128, dtype="bf16"),
    Config(window=(200, 0)),
    Config(window=(700, 50), head_dim=128, dtype="bf16"),
    Config(window=(-1, 30)),
    Config(window=(300, -1), causal=False),
    Config(softcap=15.0, causal=True),
    Config(softcap=30.0, head_dim=128, dtype="bf16"),
    Config(alibi=True, causal=True),
    Config(alibi=True),
    Config(alibi=True, window=(700, 0), heads_k=4),
    Config(head_dim=40, causal=True),
    Config(head_dim=72, dtype="bf16"),
    Config(mask=True, heads=4, heads_k=2),
    Config(bias="fp16", causal=True, heads=4, heads_k=2),
    Config(mask=True, bias="fp32", head_dim=128, dtype="bf16", window=(700, 50), heads=4, heads_k=4),
    Config(mask=True, bias="fp32", head_dim=40, softcap=15.0, alibi=True, heads=4, heads_k=4),
    Config(sink="fp32", heads=8, heads_k=2, causal=True),
    Config(sink="bf16", head_dim=128, dtype="bf16", window=(200, 0)),
    Config(sink="fp16", mask=True, bias="fp16", heads=4, heads_k=2),
]
EVERY = list(dict.fromkeys([*CONFIGS, *FEATURES, *of_other_head_dims()]))
configs = pytest.mark.parametrize("config", EVERY, ids=str)
EDGE_LENGTHS = [1, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 640, 1023, 1025, 1100, 4097]


def compare(
    config: Config,
    alone: Call,
    transformed: Call,
    control: Callable[..., None],
    must_differ: bool = False,
    split_size: int = 512,
) -> None:
    config.need("split")
    with deterministic_mode(split_size=split_size):
        expected = alone()
        got = transformed()
    got.assert_same(expected, f"{config}, split_size {split_size}")
    if not config.lacks("fwd"):
        control(not transformed().same(alone()), must_differ)


def compare_in_a_batch(
    config: Config,
    batch: list[Sequence],
    which: int,
    control: Callable[..., None],
    must_differ: bool = False,
    split_size: int = 512,
) -> None:
    """One sequence alone and among the others."""
    compare(
        config,
        lambda: dense(config, [batch[which]]),
        lambda: dense(config, batch, which),
        control,
        must_differ,
        split_size,
    )


@configs
@pytest.mark.parametrize(("len_q", "len_k"), [(64, 64), (128, 2048), (300, 1777), (1, 4096), (513, 513)])
@pytest.mark.parametrize("position", [0, 3])
def test_batch_size_and_position(
    config: Config, len_q: int, len_k: int, position: int, control: Callable[..., None]
) -> None:
    draw = Draw(seed_of(config, len_q, len_k, position))
    batch = [draw.sequence(config, len_q, len_k) for _ in range(8)]
    compare_in_a_batch(config, batch, position, control)


FILLING = [
    Config(),
    Config(causal=True, dtype="bf16", head_dim=128),
    Config(mask=True),
    Config(mask=True, causal=True, dtype="bf16", heads_k=2),
    Config(bias="fp16", causal=True),
    Config(bias="bf16", dtype="bf16", window=(700, 50)),
    Config(mask=True, bias="fp32", softcap=15.0, alibi=True),
    Config(mask=True, bias="fp16", head_dim=128, heads_k=4),
    Config(bias="fp16", head_dim=128),
    Config(bias="bf16", dtype="bf16", head_dim=128, causal=True, heads_k=2),
]


@pytest.mark.parametrize("config", FILLING, ids=str)
@pytest.mark.parametrize("split_size", [512, 2048])
@pytest.mark.parametrize(
    "len_k", [1776, 1777]
)  # a bias's rows begin at multiples of sixteen bytes, or anywhere
def test_a_batch_that_fills_the_gpu(
    config: Config, split_size: int, len_k: int, control: Callable[..., None]
) -> None:
    """Such calls have taller thread blocks, up to head dim 64 with a mask or a bias too; one sequence alone leaves the GPU idle."""
    config.need("split")
    processors = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    batch = -(
        -2 * processors // (config.heads * 3)
    )  # 300 rows make three blocks of 128; two blocks to a multiprocessor
    draw = Draw(seed_of(config, "filled", split_size, len_k))
    sequences = [draw.sequence(config, 300, len_k) for _ in range(batch)]
    for which in (0, batch - 1):
        compare_in_a_batch(config, sequences, which, control, split_size=split_size)
        assert_accurate(config, dense(config, sequences, which), sequences[which])


@pytest.mark.parametrize(
    ("config", "batch", "len_q", "len_k"),
    [
        (Config(), 8, 128, 2048),
        (Config(heads=32, heads_k=8), 8, 1, 4096),
        (Config(), 16, 1, 8192),
        (Config(causal=True), 4, 512, 512),
        (Config(heads=4, heads_k=4, causal=True), 8, 300, 1777),
    ],
    ids=str,
)
def test_shapes_at_which_upstream_fails(
    config: Config, batch: int, len_q: int, len_k: int, control: Callable[..., None]
) -> None:
    draw = Draw(seed_of(config, batch, len_q, len_k))
    sequences = [draw.sequence(config, len_q, len_k) for _ in range(batch)]
    for which in range(batch):
        compare_in_a_batch(config, sequences, which, control, must_differ=True)


@pytest.mark.parametrize("split_size", [256, 512, 2048])
def test_published_case_eight_against_four_and_four(split_size: int, control: Callable[..., None]) -> None:
    """B 8 against 4 + 4 at L 2048, H 32, D 64. Upstream's own bits are equal there on an H200: no control."""
    config = Config(heads=32, heads_k=32)
    config.need("split")
    draw = Draw(seed_of("published", split_size))
    batch = [draw.sequence(config, 2048, 2048) for _ in range(8)]
    with deterministic_mode(split_size=split_size):
        whole = [dense(config, batch, i) for i in range(8)]
        halves = [dense(config, batch[:4], i) for i in range(4)] + [
            dense(config, batch[4:], i) for i in range(4)
        ]
    for i in range(8):
        halves[i].assert_same(whole[i], f"sequence {i}, split_size {split_size}")


@configs
@pytest.mark.parametrize("length", EDGE_LENGTHS)
def test_lengths_around_tile_and_split_edges(
    config: Config, length: int, control: Callable[..., None]
) -> None:
    """A sequence alone, packed with longer and shorter ones, and in caches of several capacities."""
    draw = Draw(seed_of(config, length))
    len_q = min(length, 200)
    sequence = draw.sequence(config, len_q, length)
    neighbours = [
        draw.sequence(config, 33, 900),
        draw.sequence(config, len_q, 4500),
        draw.sequence(config, 1, 1),
    ]
    compare(
        config,
        lambda: dense(config, [sequence]),
        lambda: varlen(config, [neighbours[0], sequence, *neighbours[1:]], 1),
        control,
    )
    for capacity in (length, length + 1, 5000):
        compare(
            config,
            lambda: dense(config, [sequence]),
            lambda capacity=capacity: cache(config, [sequence], capacity),
            control,
        )


@configs
def test_neighbour_contents(config: Config, control: Callable[..., None]) -> None:
    draw = Draw(seed_of(config, "contents"))
    own = draw.sequence(config, 130, 1100)
    first = [draw.sequence(config, 130, 1100) for _ in range(3)]
    other = [replace(s, q=s.q * 30, k=s.k * 30, v=s.v * 1000) for s in first]
    compare(config, lambda: dense(config, [*first, own], 3), lambda: dense(config, [*other, own], 3), control)


@configs
def test_neighbour_lengths(config: Config, control: Callable[..., None]) -> None:
    draw = Draw(seed_of(config, "lengths"))
    own = draw.sequence(config, 257, 640)
    neighbours = [
        draw.sequence(config, q, k) for q, k in [(1, 3000), (700, 700), (64, 8192), (0, 100), (50, 0)]
    ]
    for some in (neighbours[:1], neighbours[:3], neighbours):
        compare(
            config,
            lambda: varlen(config, [own]),
            lambda some=some: varlen(config, [*some, own], len(some)),
            control,
        )


@configs
def test_named_longest_length(config: Config, control: Callable[..., None]) -> None:
    """max_seqlen_k is a bound: a caller may name a larger one than the batch has."""
    sequence = Draw(seed_of(config, "slack")).sequence(config, 65, 1000)
    compare(
        config, lambda: varlen(config, [sequence]), lambda: varlen(config, [sequence], slack=7000), control
    )


@configs
@pytest.mark.parametrize("length", [640, 1000, 1100, 2000])
@pytest.mark.parametrize("len_q", [1, 70])
def test_cache_capacity(config: Config, length: int, len_q: int, control: Callable[..., None]) -> None:
    sequence = Draw(seed_of(config, length, len_q)).sequence(config, len_q, length)
    for capacity in (2304, 4096, 8192):
        compare(
            config,
            lambda: cache(config, [sequence], 2048),
            lambda capacity=capacity: cache(config, [sequence], capacity),
            control,
            must_differ=length > 640,
        )


@configs
@pytest.mark.parametrize("len_q", [1, 130])
def test_batch_in_a_cache_of_unequal_lengths(
    config: Config, len_q: int, control: Callable[..., None]
) -> None:
    draw = Draw(seed_of(config, "cache batch", len_q))
    lengths = [130, 513, 1100, 2047, 4000]
    sequences = [draw.sequence(config, len_q, length) for length in lengths]
    for which, sequence in enumerate(sequences):
        compare(
            config,
            lambda sequence=sequence: dense(config, [sequence]),
            lambda which=which: cache(config, sequences, 4096, which),
            control,
        )


@pytest.mark.parametrize("page", [16, 48, 256])
@configs
def test_paged_cache_with_shuffled_pages(config: Config, page: int, control: Callable[..., None]) -> None:
    """Whatever the size of pages: smaller than a tile of keys, across the ends of tiles, and whole tiles."""
    draw = Draw(seed_of(config, "paged"))
    sequences = [draw.sequence(config, 9, length) for length in (600, 1300, 257)]
    for which in range(3):
        compare(
            config,
            lambda which=which: dense(config, [sequences[which]]),
            lambda which=which: paged(config, sequences, draw.generator, which, page),
            control,
        )


@pytest.mark.parametrize("page", [16, 48, 256])
@configs
def test_packed_queries_on_pages(config: Config, page: int, control: Callable[..., None]) -> None:
    draw = Draw(seed_of(config, "packed on pages"))
    sequences = [draw.sequence(config, q, k) for q, k in ((1, 600), (300, 1300), (9, 257))]
    for which in range(3):
        compare(
            config,
            lambda which=which: dense(config, [sequences[which]]),
            lambda which=which: varlen(
                config, sequences, which, pages=in_pages(sequences, draw.generator, page)
            ),
            control,
        )


@configs
@pytest.mark.parametrize("lengths", [(300, 300), (700, 1777), (130, 4097)], ids=str)
def test_chunked_prefill_and_decode(
    config: Config, lengths: tuple[int, int], control: Callable[..., None]
) -> None:
    """Queries in pieces, each with the keys up to its own end, down to one token at a time."""
    if not config.causal and config.window[1] != 0:
        pytest.skip("a row of a call that looks ahead sees keys that its piece does not have")
    config.need("split")
    sequence = Draw(seed_of(config, lengths)).sequence(config, *lengths)
    whole = functools.partial(dense, config, [sequence])

    def pieces(cuts: list[int]) -> Rows:
        return joined(
            dense(config, [sequence.rows(start, stop)])
            for start, stop in zip([0, *cuts], [*cuts, lengths[0]], strict=True)
        )

    compare(config, whole, lambda: pieces([37, 64, 128]), control)
    with deterministic_mode(split_size=512):
        expected = whole()
        for row in (0, 1, 63, 64, 100, lengths[0] - 1):
            one = dense(config, [sequence.rows(row, row + 1)])
            one.assert_same(
                Rows(expected.out[row : row + 1], expected.lse[:, row : row + 1]),
                f"{config}, row {row} alone",
            )


@configs
def test_head_subset(config: Config, control: Callable[..., None]) -> None:
    if config.alibi:
        pytest.skip("ALiBi's slopes are per head of the call")
    sequence = Draw(seed_of(config, "heads")).sequence(config, 100, 1500)
    part = Config(**{**config.__dict__, "heads": config.heads // config.heads_k, "heads_k": 1})
    groups = part.heads
    own = (None if t is None else t[:groups] for t in (sequence.mask, sequence.bias))
    first = Sequence(sequence.q[:, :groups], sequence.k[:, :1], sequence.v[:, :1], *own)

    def subset() -> Rows:
        rows = dense(config, [sequence])
        return Rows(rows.out[:, :groups], rows.lse[:groups])

    compare(config, subset, lambda: dense(part, [first]), control)


@pytest.mark.parametrize("config", [Config(), Config(head_dim=128, dtype="bf16", causal=True)], ids=str)
@pytest.mark.parametrize("load", [False, True], ids=["alone", "beside-a-loaded-stream"])
def test_fifty_runs(config: Config, load: bool) -> None:
    config.need("split")
    draw = Draw(seed_of(config, "runs"))
    batch = [draw.sequence(config, 300, 2500) for _ in range(4)]
    stop = threading.Event()

    def keep_busy() -> None:
        matrix = torch.randn(2048, 2048, device="cuda", dtype=torch.float16)
        with torch.cuda.stream(torch.cuda.Stream()):
            while not stop.is_set():
                for _ in range(20):
                    matrix @ matrix
                torch.cuda.current_stream().synchronize()

    worker = threading.Thread(target=keep_busy)
    if load:
        worker.start()
    try:
        with deterministic_mode(split_size=512):
            expected = dense(config, batch, 2)
            for run in range(50):
                dense(config, batch, 2).assert_same(expected, f"run {run}")
    finally:
        stop.set()
        if load:
            worker.join()


def test_strided_inputs_and_given_output() -> None:
    """Views of a packed tensor, and heads-first memory, hold the same rows."""
    config = Config(heads=4, heads_k=4, causal=True)
    config.need("split")
    sequence = Draw(3).sequence(config, 260, 260)
    packed = torch.stack([sequence.q, sequence.k, sequence.v], dim=1)[None]
    with deterministic_mode(split_size=512):
        expected = dense(config, [sequence])
        q, k, v = packed.unbind(2)
        out, lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
        Rows(out[0], lse[0]).assert_same(expected, "packed")
        q, k, v = (
            t[None].transpose(1, 2).contiguous().transpose(1, 2) for t in (sequence.q, sequence.k, sequence.v)
        )
        out, lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
        Rows(out[0], lse[0]).assert_same(expected, "heads first")


def test_a_cache_whose_rows_no_kernel_can_load_is_an_error() -> None:
    """Before any launch: a misaligned address would end the process's use of the GPU."""
    Config().need("split")
    q, cache = (
        torch.zeros(1, 1, 2, 64, device=DEVICE).half(),
        torch.zeros(1, 256, 2, 65, device=DEVICE).half(),
    )
    with pytest.raises(ValueError, match=r"k_cache .*begin at no multiple of 16 bytes"):
        flash_attn_with_kvcache(q, cache[..., :64], cache[..., :64])


def test_a_cache_whose_head_dim_is_no_multiple_of_eight_is_padded() -> None:
    """As upstream has it, new keys written back: its rows begin anywhere, but what kernels load is a copy."""
    Config().need("split")
    q, cache = (
        torch.randn(2, 3, 2, 59, device=DEVICE).half(),
        torch.randn(2, 300, 2, 59, device=DEVICE).half(),
    )
    lengths = torch.tensor([7, 200], dtype=torch.int32, device=DEVICE)
    whole = [torch.nn.functional.pad(t, [0, 5]) for t in (q, cache, cache)]
    scale = 59**-0.5
    expected = flash_attn_with_kvcache(
        whole[0], whole[1], whole[2], whole[0], whole[0], cache_seqlens=lengths, softmax_scale=scale
    )
    keys, values = cache.clone(), cache.clone()
    out = flash_attn_with_kvcache(q, keys, values, q, q, cache_seqlens=lengths, softmax_scale=scale)
    assert_same_bits(out, expected[..., :59], "out")
    for kept, padded in zip((keys, values), whole[1:], strict=True):
        assert_same_bits(kept, padded[..., :59], "cache")


@pytest.mark.parametrize("where", ROUTES)
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_a_view_as_the_output_gets_its_rows_and_no_more(head_dim: int, where: str) -> None:
    """In the standard kernel a part of the running result lies in these rows while chunks are folded."""
    config = Config(head_dim=head_dim, heads=4, heads_k=4, causal=True)
    config.need("split")
    sequence = Draw(4).sequence(config, 300, 1500)
    q, k, v = (t[None] for t in (sequence.q, sequence.k, sequence.v))
    wide = torch.full((1, 300 + 8, 4, 2 * head_dim), 7.0, dtype=q.dtype, device="cuda")
    with deterministic_mode(split_size=512):
        expected = dense(config, [sequence])
        with route(where):
            out, lse, *_ = flash_attn_2_cuda.fwd(
                q,
                k,
                v,
                wide[:, :300, :, :head_dim],
                None,
                0.0,
                head_dim**-0.5,
                True,
                -1,
                -1,
                0.0,
                False,
                None,
            )
    Rows(out[0], lse[0]).assert_same(expected, where)
    assert torch.equal(wide[:, :300, :, :head_dim], out)
    assert (wide[:, :300, :, head_dim:] == 7.0).all()
    assert (wide[:, 300:] == 7.0).all()


@configs
def test_rows_that_see_no_key(config: Config, control: Callable[..., None]) -> None:
    """More queries than keys: in causal and windowed calls the first rows see nothing and give zeros."""
    draw = Draw(seed_of(config, "empty"))
    sequence = draw.sequence(config, 400, 70)
    neighbour = draw.sequence(config, 400, 3000)
    compare(
        config, lambda: varlen(config, [sequence]), lambda: varlen(config, [neighbour, sequence], 1), control
    )
    with deterministic_mode(split_size=512):
        got = varlen(config, [neighbour, sequence], 1)
    assert_accurate(config, got, sequence)
    exact = reference(config, sequence)
    hidden = ~exact.lse.isfinite()
    assert not got.out.transpose(0, 1)[hidden].any()


@configs
@pytest.mark.parametrize("lengths", [(1, 1025), (65, 2000), (513, 4097), (256, 4096)], ids=str)
@pytest.mark.parametrize("split_size", [256, 1024, 8192])
def test_chunks_fold_to_the_same_bits_whichever_kernel_folds(
    config: Config, lengths: tuple[int, int], split_size: int
) -> None:
    config.need("split")
    draw = Draw(seed_of(config, lengths, split_size, "routes"))
    sequences = [
        draw.sequence(config, *lengths),
        draw.sequence(config, lengths[0], 700),
        draw.sequence(config, lengths[0], 1),
    ]
    results: dict[str, list[Rows]] = {}
    for where in ROUTES:
        with deterministic_mode(split_size=split_size), route(where):
            calls = [
                dense(config, sequences[:1]),
                varlen(config, sequences, 0),
                cache(config, sequences, 5000, 0),
            ]
            results[where] = [*calls, cache(config, sequences, 5000, 1), varlen(config, sequences, 2)]
    first, *others = ROUTES
    for where in others:
        for one, other in zip(results[first], results[where], strict=True):
            other.assert_same(one, f"{config}, split_size {split_size}, {where}")


@pytest.mark.parametrize("page", [16, 128])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_chunks_of_a_cache_in_pages_fold_in_turns(head_dim: int, page: int) -> None:
    """Not in tiles of 128 rows, whose kernel reads no pages. The cache has room for more chunks than there are."""
    config = Config(head_dim=head_dim, heads=4, heads_k=2, causal=True)
    config.need("split")
    draw = Draw(7)
    sequences = [draw.sequence(config, 200, keys) for keys in (600, 1500)]
    with deterministic_mode(split_size=256), route("apart, in turns"):
        for which, sequence in enumerate(sequences):
            got = paged(config, sequences, draw.generator, which, page)
            got.assert_same(dense(config, [sequence]), f"sequence {which}")


@configs
@pytest.mark.parametrize("split_size", [512, 1024])
@pytest.mark.parametrize("lengths", [(1, 1), (200, 200), (77, 1500), (1, 4097), (600, 1025)], ids=str)
def test_accuracy(config: Config, split_size: int, lengths: tuple[int, int]) -> None:
    config.need("split")
    sequence = Draw(seed_of(config, lengths, split_size)).sequence(config, *lengths)
    with deterministic_mode(split_size=split_size):
        got = dense(config, [sequence])
    assert_accurate(config, got, sequence)


@configs
def test_accuracy_of_varlen_and_poisoned_cache(config: Config) -> None:
    config.need("split")
    draw = Draw(seed_of(config, "cache accuracy"))
    sequences = [draw.sequence(config, 5, length) for length in (5, 900, 1537)]
    with deterministic_mode(split_size=512):
        for which, sequence in enumerate(sequences):
            assert_accurate(config, varlen(config, sequences, which), sequence)
            assert_accurate(config, cache(config, sequences, 2000, which), sequence)


def test_appending_to_a_cache_gives_the_rows_of_a_dense_call() -> None:
    config = Config(causal=True, heads=8, heads_k=2)
    config.need("split")
    sequence = Draw(11).sequence(config, 700, 700)
    buffers = [
        torch.full((1, 2048, 2, 64), float("nan"), dtype=torch.float16, device="cuda") for _ in range(2)
    ]
    with deterministic_mode(split_size=512):
        expected = dense(config, [sequence])
        for start, stop in [(0, 500), (500, 501), (501, 630), (630, 700)]:
            length = torch.tensor([start], dtype=torch.int32, device="cuda")
            new = [t[None, start:stop].contiguous() for t in (sequence.q, sequence.k, sequence.v)]
            out, lse = flash_attn_with_kvcache(
                new[0], *buffers, new[1], new[2], cache_seqlens=length, causal=True, return_softmax_lse=True
            )
            Rows(out[0], lse[0]).assert_same(
                Rows(expected.out[start:stop], expected.lse[:, start:stop]), f"appended {start}:{stop}"
            )


def test_nan_in_a_visible_key_is_not_lost() -> None:
    config = Config()
    config.need("split")
    sequence = Draw(5).sequence(config, 70, 2000)
    sequence.k[1300] = float("nan")
    with deterministic_mode(split_size=512):
        assert dense(config, [sequence]).out.isnan().all()


def test_fewer_keys_named_than_there_are_is_nan_not_a_wrong_sum() -> None:
    config = Config()
    config.need("split")
    sequence = Draw(6).sequence(config, 70, 2000)
    with deterministic_mode(split_size=512):
        short = varlen(config, [sequence], slack=-1000)
    assert short.out.isnan().all()
    assert short.lse.isnan().all()


@pytest.mark.sanitizer
def test_fewer_queries_named_than_there_are_is_nan_and_touches_no_other_row() -> None:
    config = Config(heads=4, heads_k=4)
    config.need("split")
    draw = Draw(14)
    sequences = [draw.sequence(config, n, 600) for n in (10, 50, 10)]
    with deterministic_mode(split_size=512):
        whole = [varlen(config, sequences, i) for i in range(3)]
        short = [varlen(config, sequences, i, slack_q=-40) for i in range(3)]
    with deterministic_mode(split_size=512), route("apart"):
        for i in range(3):
            varlen(config, sequences, i, slack_q=-40).assert_same(short[i], f"sequence {i}, folded apart")
    for i in (0, 2):
        short[i].assert_same(whole[i], f"sequence {i}")
    Rows(short[1].out[:10], short[1].lse[:, :10]).assert_same(
        Rows(whole[1].out[:10], whole[1].lse[:, :10]), "rows that were named"
    )
    assert short[1].out[10:].isnan().all()
    assert short[1].lse[:, 10:].isnan().all()


def test_split_size_beyond_every_sequence() -> None:
    config = Config()
    config.need("split")
    sequence = Draw(15).sequence(config, 70, 2000)
    with deterministic_mode(split_size=2**30):
        assert_accurate(config, dense(config, [sequence]), sequence)


GRADIENTS = [
    Config(causal=True),
    Config(heads_k=2),
    Config(window=(200, 0)),
    Config(alibi=True, causal=True),
    Config(softcap=15.0),
    Config(head_dim=128, dtype="bf16", causal=True),
]


@pytest.mark.parametrize("config", GRADIENTS, ids=str)
def test_gradients_fit_the_forward_pass(config: Config) -> None:
    """The backward pass runs on our out and lse: its error is at most twice that of PyTorch's own operations."""
    config.need("split", "fwd", "bwd")
    sequence = Draw(seed_of(config, "gradients")).sequence(config, 700, 700)
    upstreams = torch.randn_like(sequence.q)

    def gradients(call: Callable[[Sequence], torch.Tensor]) -> list[torch.Tensor]:
        leaves = [t.detach().clone().requires_grad_() for t in (sequence.q, sequence.k, sequence.v)]
        return list(torch.autograd.grad(call(Sequence(*leaves)), leaves, upstreams))

    with deterministic_mode(split_size=512):
        got = gradients(lambda s: dense(config, [s]).out)
    exact = gradients(lambda s: reference(config, s).out.to(upstreams.dtype))
    plain = gradients(lambda s: reference(config, s, dtype=upstreams.dtype).out)
    for name, ours, right, other in zip("qkv", got, exact, plain, strict=True):
        error, allowed = ((t.double() - right.double()).abs().max().item() for t in (ours, other))
        assert error <= 2 * allowed + 1e-3, (
            f"d{name} is off by {error:.3g}, PyTorch's own error is {allowed:.3g}"
        )


def test_split_size_is_part_of_the_bits() -> None:
    """Were it ignored, these two would be equal."""
    config = Config()
    config.need("split")
    sequence = Draw(8).sequence(config, 128, 4096)
    with deterministic_mode(split_size=256):
        small = dense(config, [sequence])
    with deterministic_mode(split_size=2048):
        large = dense(config, [sequence])
    assert not small.same(large)


@pytest.mark.parametrize(
    ("head_dim", "split_size", "valid"), [(64, 192, "128, 256, 384"), (128, 192, "128, 256, 384")]
)
def test_split_size_between_blocks_is_an_error_that_names_valid_ones(
    head_dim: int, split_size: int, valid: str
) -> None:
    config = Config(head_dim=head_dim)
    config.need("split")
    sequence = Draw(1).sequence(config, 4, 300)
    for call in (dense, varlen, functools.partial(cache, capacity=400)):
        with (
            deterministic_mode(split_size=split_size),
            pytest.raises(ValueError, match=rf"split_size={split_size} .*head_dim {head_dim}.*{valid}"),
        ):
            call(config, [sequence])


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("scale", [0.0, -0.125])
def test_a_scale_that_is_not_positive_is_an_error(scale: float, softcap: float) -> None:
    config = Config()
    config.need("split")
    sequence = Draw(5).sequence(config, 3, 600)
    q, k, v = (t[None] for t in (sequence.q, sequence.k, sequence.v))
    with (
        deterministic_mode(split_size=512),
        pytest.raises(ValueError, match=f"softmax_scale={scale:g} is not greater than 0"),
    ):
        flash_attn_func(q, k, v, softmax_scale=scale, softcap=softcap)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    "config",
    [Config(head_dim=d, dtype=t, causal=True, heads_k=4) for d in (64, 128) for t in ("fp16", "bf16")],
    ids=str,
)
def test_rotary_rows_at_once_and_token_by_token(config: Config, interleaved: bool) -> None:
    config.need("split")
    draw = Draw(seed_of(config, "rotary"))
    sequences = [draw.sequence(config, 9, length + 9) for length in (1500, 100, 700)]
    appending = Appending(config, sequences, 9, 2000, interleaved)
    with deterministic_mode(split_size=512):
        expected = appending.at_once()
        appending.alone().one_by_one().assert_same(expected, "token by token")
        replace(appending, first=1).at_once().assert_same(
            expected, "tables that begin at no multiple of 16 bytes"
        )
    assert_accurate(config, expected, appending.turned())


def test_a_cuda_graph_of_a_call_that_folds_chunks_and_of_one_within_a_chunk() -> None:
    """Both are the same kernel, which asks for less shared memory in the second."""
    config = Config()
    config.need("split")
    draw = Draw(19)
    sequences = [draw.sequence(config, 128, length) for length in (2048, 256)]
    with deterministic_mode(split_size=256), route("in one thread block"):
        expected = [dense(config, [s]) for s in sequences]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = [dense(config, [s]) for s in sequences]
        dense(config, sequences[1:])
        for rows in captured:
            rows.out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        for rows, own in zip(captured, expected, strict=True):
            rows.assert_same(own, "replayed")


def test_cuda_graph_keeps_the_mode_it_was_captured_with(control: Callable[..., None]) -> None:
    config = Config()
    config.need("split", "fwd")
    draw = Draw(9)
    batch = [draw.sequence(config, 128, 2048) for _ in range(8)]
    q, k, v = (torch.stack([getattr(s, name) for s in batch]) for name in "qkv")
    with deterministic_mode(split_size=512):
        expected = flash_attn_func(q, k, v, return_attn_probs=True)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = flash_attn_func(q, k, v, return_attn_probs=True)
    for tensor in captured[:2]:
        tensor.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    Rows(*captured[:2]).assert_same(Rows(*expected[:2]), "replayed with the mode off")
    control(not Rows(*flash_attn_func(q, k, v, return_attn_probs=True)[:2]).same(Rows(*expected[:2])))


def test_compiled_call_obeys_the_mode_it_runs_under() -> None:
    config = Config()
    config.need("split", "fwd")
    sequence = Draw(10).sequence(config, 128, 2048)
    q, k, v = (t[None] for t in (sequence.q, sequence.k, sequence.v))
    compiled = torch.compile(lambda q, k, v: flash_attn_func(q, k, v) * 1, backend="aot_eager")
    for split_size in (None, 256, 1024, None):
        with deterministic_mode(split_size is not None, split_size):
            got = compiled(q, k, v)
            expected = flash_attn_func(q, k, v)
        assert torch.equal(got, expected)


def test_threads_with_scopes_of_their_own() -> None:
    config = Config()
    config.need("split")
    sequence = Draw(12).sequence(config, 128, 4096)
    expected = {}
    for size in (256, 512, 1024, 2048):
        with deterministic_mode(split_size=size):
            expected[size] = dense(config, [sequence])
    failures: list[BaseException] = []

    def work(size: int) -> None:
        try:
            with deterministic_mode(split_size=size):
                for _ in range(20):
                    dense(config, [sequence]).assert_same(expected[size], f"thread with split_size {size}")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(size,)) for size in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def test_process_wide_mode_reaches_a_call() -> None:
    config = Config()
    config.need("split")
    sequence = Draw(13).sequence(config, 128, 2048)
    set_deterministic_mode(True, 1024)
    process = dense(config, [sequence])
    set_deterministic_mode(False)
    with deterministic_mode(split_size=1024):
        dense(config, [sequence]).assert_same(process, "scope against process")


def test_dropout_is_warned_of_once() -> None:
    code = """
import torch, warnings, flash_attn
flash_attn.set_deterministic_mode(True)
q = torch.randn(1, 64, 2, 64, device="cuda", dtype=torch.float16)
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    for _ in range(3):
        flash_attn.flash_attn_func(q, q, q, dropout_p=0.5)
print(sum("dropout" in str(w.message) for w in seen))
"""
    Config().need("fwd")
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.stdout.strip() == "1", done.stderr


def drop(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q over itself with dropout: out, and the generator's seed and offset that it used."""
    out, _, _, state = flash_attn_2_cuda.fwd(q, q, q, None, None, 0.3, 0.125, False, -1, -1, 0.0, False, None)
    return out, state


def test_dropout_draws_from_torch_s_generator() -> None:
    Config().need("fwd")
    q = torch.randn(2, 96, 4, 64, device="cuda", dtype=torch.float16)
    generator = torch.cuda.default_generators[q.device.index]
    torch.cuda.manual_seed(1234)
    places, results = [], []
    for _ in range(2):
        places.append([1234, generator.get_offset()])
        out, state = drop(q)
        results.append(out)
        assert state.tolist() == places[-1]
    assert places[0] != places[1]
    assert not torch.equal(*results)
    torch.cuda.manual_seed(1234)
    assert torch.equal(drop(q)[0], results[0])


def test_dropout_and_draws_of_other_threads_never_get_the_same_numbers() -> None:
    """Lost draws are few: six of 36,000 were, where an offset was read in one step and moved in another."""
    Config().need("fwd")
    q = torch.randn(1, 16, 2, 64, device="cuda", dtype=torch.float16)
    generator = torch.cuda.default_generators[q.device.index]
    before = generator.get_offset()
    torch.rand(8, device="cuda")
    own, others = q.shape[0] * q.shape[2] * 32, generator.get_offset() - before
    calls, states = 10000, []

    def attend() -> None:
        states.extend(drop(q)[1] for _ in range(calls))

    def draw() -> None:
        for _ in range(calls):
            torch.rand(8, device="cuda")

    torch.cuda.manual_seed(5)
    begin = generator.get_offset()
    threads = [threading.Thread(target=work) for work in (attend, draw, attend, draw)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    offsets = torch.stack(states)[:, 1].sort().values
    assert (offsets.diff() >= own).all()
    assert generator.get_offset() - begin == 2 * calls * (own + others)


def test_with_fa2_check_calls_may_be_captured() -> None:
    """Their tables are not looked into, which is warned about once."""
    code = """
import torch, flash_attn
q = torch.randn(40, 2, 64, device="cuda", dtype=torch.float16)
starts = torch.tensor([0, 30, 40], dtype=torch.int32, device="cuda")
cache, lengths = torch.randn(2, 64, 2, 64, device="cuda", dtype=torch.float16), starts[1:]

def calls():
    packed = flash_attn.flash_attn_varlen_func(q, q, q, starts, starts, 30, 30)
    return packed, flash_attn.flash_attn_with_kvcache(q[:2, None], cache, cache, cache_seqlens=lengths)

expected = calls()
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    got = calls()
graph.replay()
torch.cuda.synchronize()
print(all(map(torch.equal, got, expected)))
"""
    Config().need("fwd", "split")
    env = {**os.environ, "FA2_CHECK": "1"}
    done = subprocess.run([sys.executable, "-c", code], check=False, env=env, capture_output=True, text=True)
    assert done.stdout.strip() == "True", done.stderr
    assert done.stderr.count("FA2_CHECK=1 does not look into the tables") == 1, done.stderr


def test_a_cuda_graph_draws_dropout_anew_at_each_replay() -> None:
    Config().need("fwd")
    q = torch.randn(2, 96, 4, 64, device="cuda", dtype=torch.float16)
    drop(q)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, state = drop(q)
    # Beginning a capture, torch writes the generator's seed on the capture's stream, which a replay on another does not wait for.
    torch.cuda.synchronize()
    torch.cuda.manual_seed(77)
    replayed = []
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        replayed.append((out.clone(), state.tolist()))
    torch.cuda.manual_seed(77)
    for got, place in replayed:
        expected, used = drop(q)
        assert place == used.tolist()
        assert torch.equal(got, expected)


def test_a_launch_that_cuda_refuses_is_torch_s_error_with_file_and_line() -> None:
    """No call that passes our checks is refused for itself; after a fault CUDA refuses each in that process."""
    code = """
import torch, flash_attn
q = torch.randn(2, 64, 2, 64, device="cuda", dtype=torch.float16)
flash_attn.flash_attn_func(q, q, q)  # later calls need no other memory
try:
    torch._assert_async(torch.zeros((), device="cuda"))
    torch.cuda.synchronize()
except RuntimeError:
    try:
        flash_attn.flash_attn_func(q, q, q)
    except RuntimeError as error:
        print(error, flush=True)
"""
    Config().need("fwd")
    env = {**os.environ, "TORCH_SHOW_CPP_STACKTRACES": "1", "FA2_DETERMINISTIC": "0"}
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, env=env)
    assert "CUDA error: device-side assert triggered" in done.stdout, done.stderr
    assert "flash_fwd_launch_template.h:" in done.stdout


def test_debug_line() -> None:
    code = """
import torch, flash_attn
q = torch.randn(8, 4096, 4, 64, device="cuda", dtype=torch.float16)
with flash_attn.deterministic_mode(split_size=512):
    flash_attn.flash_attn_func(q, q, q)
"""
    Config().need("split")
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "FA2_DEBUG": "1"},
    )
    assert (
        "[flash-attn] set_params_splitkv: B=8 S_k=4096 S_q=4096 n_blocks=32 num_splits=8 fixed_tokens=512\n"
        in done.stderr
    )


def test_call_for_a_kernel_that_was_left_out_says_what_there_is() -> None:
    missing = [d for d in DIMS if f"split_hdim{d}_fp16" not in flash_attn_2_cuda.kernel_set()]
    if not missing:
        pytest.skip("this wheel has every forward kernel")
    config = Config(head_dim=missing[0])
    sequence = Draw(1).sequence(config, 4, 300)
    with (
        deterministic_mode(split_size=512),
        pytest.raises(
            RuntimeError,
            match=f"this wheel has no kernels for head_dim {missing[0]} float16 forward; it has forward: ",
        ),
    ):
        dense(config, [sequence])


@pytest.mark.sanitizer
@pytest.mark.parametrize("config", EVERY, ids=str)
def test_small_shapes_for_compute_sanitizer(config: Config) -> None:
    config.need("split")
    draw = Draw(seed_of(config, "sanitizer"))
    sequences = [draw.sequence(config, 65, 600), draw.sequence(config, 65, 1030)]
    with deterministic_mode(split_size=512):
        dense(config, sequences[:1])
        assert_accurate(config, varlen(config, sequences, 1), sequences[1])
        assert_accurate(config, cache(config, sequences, 1100, 0), sequences[0])
        assert_accurate(config, paged(config, sequences, draw.generator, 0), sequences[0])
        # Which so few rows would not get
        for where in ("in one thread block", "apart, in turns", "in the standard kernel"):
            with route(where):
                assert_accurate(config, varlen(config, sequences, 1), sequences[1])
