"""Calls at the edge of what tensors hold, and the scratch that a call may take."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import flash_attn_2_cuda
import pytest
import torch
from flash_attn import deterministic_mode, flash_attn_func, flash_attn_varlen_func
from harness import DEVICE, ROUTES, Config, Draw, Rows, cu_seqlens, dense, route, varlen
from limits import (
    FAR_KEYS,
    FAR_QUERIES,
    assert_that_a_cache_ends_where_it_ends,
    assert_that_a_cache_s_tokens_may_lie_far_apart,
    assert_that_all_new_keys_are_appended,
    assert_that_gradients_of_far_tokens_are_the_same,
    assert_that_gradients_of_rows_of_no_sequence_are_zeros,
    assert_that_gradients_past_named_lengths_are_nan,
    assert_that_rotary_tables_end_where_they_end,
    assert_that_rows_of_no_sequence_are_zeros,
    assert_that_the_extension_refuses_far_tokens,
    scratch,
)
from test_long import need_memory

pytestmark = pytest.mark.gpu

CONFIGS = [Config(heads=2, heads_k=1), Config(head_dim=128, dtype="bf16", heads=2, heads_k=2, causal=True)]
configs = pytest.mark.parametrize("config", CONFIGS, ids=str)


@configs
@pytest.mark.parametrize(
    ("where", "mode"), [("in one thread block", True), ("apart", True), ("as the GPU is filled", False)]
)
def test_a_cache_s_tokens_may_lie_far_apart(config: Config, where: str, mode: bool) -> None:
    config.need("fwd", "split")
    need_memory(2 * 2 * 391 * FAR_KEYS)
    assert_that_a_cache_s_tokens_may_lie_far_apart(config, where, mode)


@configs
def test_gradients_of_far_tokens_are_the_same(config: Config) -> None:
    config.need("split", "bwd")
    need_memory(2 * 2 * 141 * FAR_QUERIES)
    assert_that_gradients_of_far_tokens_are_the_same(config)


@configs
def test_the_extension_refuses_far_tokens(config: Config) -> None:
    config.need("bwd")
    assert_that_the_extension_refuses_far_tokens(config)


def test_probabilities_past_2_to_the_31_elements() -> None:
    """Those of the last head begin there. About a tenth of them are negative: dropped."""
    Config(heads=17, heads_k=17).need("fwd")
    need_memory(6 * 2**31)
    q, k, v = (
        torch.randn((2, 8192, 17, 64), generator=Draw(5).generator, device="cuda", dtype=torch.float16)
        for _ in range(3)
    )
    _, _, probabilities = flash_attn_func(q, k, v, dropout_p=0.1, return_attn_probs=True)
    for batch, head in ((0, 0), (1, 15), (1, 16)):
        dropped = (probabilities[batch, head] < 0).float().mean().item()
        assert 0.09 < dropped < 0.11, (batch, head, dropped)


@pytest.mark.sanitizer
@configs
@pytest.mark.parametrize("leftpad", [0, 37])
@pytest.mark.parametrize(("capacity", "length"), [(300, 301), (300, 380), (96, 97), (96, 1000)])
def test_a_cache_ends_where_it_ends(config: Config, capacity: int, length: int, leftpad: int) -> None:
    config.need("fwd", "split")
    for where in ROUTES:
        for in_larger in (False, True):
            assert_that_a_cache_ends_where_it_ends(
                config, capacity, length, where, True, in_larger, leftpad=leftpad
            )
    for splits in (0, 3):
        assert_that_a_cache_ends_where_it_ends(
            config, capacity, length, "", mode=False, leftpad=leftpad, num_splits=splits
        )
    if not leftpad and capacity == 96:
        assert_that_a_cache_ends_where_it_ends(config, capacity, length, "", mode=False, page=16)


@pytest.mark.sanitizer
@configs
@pytest.mark.parametrize("where", [*ROUTES, ""])
def test_rows_of_no_sequence_are_zeros(config: Config, where: str) -> None:
    """A route: with the mode on. Few rows behind the last sequence, many, and with a last one that is empty."""
    config.need("fwd", "split")
    draw = Draw(29)
    for lengths, past, slack in (
        ([(5, 300), (9, 700)], 30, 0),
        ([(130, 400), (70, 90)], 2000, 300),
        ([(64, 64), (0, 0)], 1, 0),
    ):
        sequences = [draw.sequence(config, *each) for each in lengths]
        with deterministic_mode(bool(where), split_size=256), route(where or "as the GPU is filled"):
            assert_that_rows_of_no_sequence_are_zeros(config, sequences, past, slack)


@configs
@pytest.mark.parametrize("mode", [True, False], ids=["on", "off"])
def test_longer_lengths_than_there_are_change_nothing(config: Config, mode: bool) -> None:
    """Nor do they take scratch: 4 GB at 2**24, before."""
    config.need("fwd", "split")
    sequences = [Draw(31).sequence(config, 32, 200)]
    results, taken = [], []
    for named in (200, 2**20, 2**24, 2**31 - 1):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with deterministic_mode(mode):
            results.append(varlen(config, sequences, slack=named - 200, slack_q=named - 200))
        taken.append(torch.cuda.max_memory_allocated() - before)
    for other in results[1:]:
        other.assert_same(results[0], "longer lengths")
    assert max(taken) < taken[0] + 2**20


@pytest.mark.sanitizer
@configs
@pytest.mark.parametrize(("filled", "new", "queries"), [(127, 1, 10), (100, 1, 100), (-5, 8, 10), (-5, 8, 2)])
def test_rotary_tables_end_where_they_end(config: Config, filled: int, new: int, queries: int) -> None:
    config.need("split")
    assert_that_rotary_tables_end_where_they_end(config, filled, new, queries)


@pytest.mark.parametrize("where", ["in one thread block", "apart"])
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize(("before", "window"), [(0, 16), (100, 0), (5, 511), (5, 512), (5, 513)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_new_keys_that_no_window_reaches_are_appended(
    head_dim: int, before: int, window: int, mask: bool, where: str
) -> None:
    config = Config(head_dim=head_dim, heads=4, heads_k=2, window=(window, 0), mask=mask)
    config.need("split")
    for queries, page in ((1, 0), (70, 0), (70, 256), (70, 16), (1, 48)):
        assert_that_all_new_keys_are_appended(config, before, 1024 - before, where, 256, queries, page=page)


@pytest.mark.sanitizer
@configs
@pytest.mark.parametrize("mode", [True, False], ids=["on", "off"])
def test_gradients_past_the_lengths_that_a_call_names_are_nan(config: Config, mode: bool) -> None:
    config.need("fwd", "split", "bwd")
    assert_that_gradients_past_named_lengths_are_nan(config, mode)


@pytest.mark.sanitizer
@configs
@pytest.mark.parametrize("mode", [True, False], ids=["on", "off"])
def test_gradients_of_rows_of_no_sequence_are_zeros(config: Config, mode: bool) -> None:
    config.need("fwd", "split", "bwd")
    assert_that_gradients_of_rows_of_no_sequence_are_zeros(config, mode)


@configs
def test_sequences_that_overlap_make_no_call_hang(config: Config) -> None:
    """In a process of its own, which ends where the GPU does not."""
    config.need("split", "bwd")
    # Without the interpreter's end, which autograd's threads may turn into an abort (pytorch#38230).
    code = (
        "import os, torch, limits; from harness import Config; "
        f"limits.overlapping_sequences({config!r}); torch.cuda.synchronize(); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent, timeout=1200)


@configs
@pytest.mark.parametrize("budget", [1, 100_000, 2_000_000])
def test_slices_of_a_call_have_its_bits(config: Config, budget: int) -> None:
    """Of blocks of rows, of heads and of sequences."""
    config.need("split")
    draw = Draw(budget)
    sequences = [draw.sequence(config, 200, 3000) for _ in range(3)]
    with deterministic_mode(split_size=256), route("apart"):
        expected = [dense(config, sequences, which) for which in range(3)]
        with scratch(budget):
            for which in range(3):
                dense(config, sequences, which).assert_same(expected[which], f"in slices of {budget} bytes")


def scratch_of(config: Config, batch: int, len_q: int, len_k: int, split_size: int) -> tuple[int, Rows]:
    """Bytes that a call takes beside its results, and its rows."""
    generator = Draw(len_k).generator

    def normal(length: int, heads: int) -> torch.Tensor:
        return torch.randn(
            (batch, length, heads, config.head_dim), generator=generator, device="cuda", dtype=torch.float16
        )

    q, k, v = normal(len_q, config.heads), normal(len_k, config.heads_k), normal(len_k, config.heads_k)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with deterministic_mode(split_size=split_size):
        out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True, **config.kwargs())
    kept = torch.cuda.memory_allocated() - before
    return torch.cuda.max_memory_allocated() - before - kept, Rows(out[0], lse[0])


def budget_of(config: Config, len_q: int, len_k: int) -> int:
    """Bytes of scratch that a call of one sequence may take: half of q, k, v and the result, and 512 MiB at most.

    And a 25th of that for the largest score and the sum of each row and chunk, and 1 MiB for allocations that
    are rounded up.
    """
    half = min((len_q * config.heads + len_k * config.heads_k) * config.head_dim * 2, 2**29)
    return half * 26 // 25 + 2**20


@pytest.mark.parametrize("head_dim", [64, 128])
def test_few_rows_on_a_million_keys_take_little_scratch(head_dim: int) -> None:
    """Each chunk has a thread block: with a partial result of each, 12 GiB at head dim 128."""
    config = Config(head_dim=head_dim, heads=32, heads_k=4)
    config.need("split")
    need_memory(2**34)
    budget = budget_of(config, 384, 2**20)
    with route("apart"):
        taken, sliced = scratch_of(config, 1, 384, 2**20, 512)
    assert budget // 2 < taken <= budget, f"{taken / 2**20:.0f} MiB"
    with route("in one thread block"):
        taken, alone = scratch_of(config, 1, 384, 2**20, 512)
    assert taken <= 2**20
    sliced.assert_same(alone, "in slices against in one thread block")
    taken, rows = scratch_of(config, 1, 384, 2**20, 512)
    assert taken <= 2 * 384 * 32 * (head_dim + 2) * 4 + 2**20, f"{taken / 2**20:.0f} MiB"
    rows.assert_same(alone, "in turns against in one thread block")


def test_prefill_takes_as_little_where_a_thread_block_has_no_room_to_fold() -> None:
    """As GPUs with 99 KiB of shared memory a block from head dim 128 on; without slices, 8 GiB."""
    config = Config(head_dim=128, heads=32, heads_k=8)
    config.need("split")
    need_memory(2**33)
    with route("apart"):
        taken, rows = scratch_of(config, 1, 32768, 32768, 2048)
    budget = budget_of(config, 32768, 32768)
    assert budget // 2 < taken <= budget, f"{taken / 2**20:.0f} MiB"
    with route("in one thread block"):
        _, alone = scratch_of(config, 1, 32768, 32768, 2048)
    rows.assert_same(alone, "in slices against in one thread block")


def test_short_sequences_beside_a_long_one_raise_no_scratch() -> None:
    """It follows from the queries that there are, not from the longest length of each."""
    config = Config(head_dim=128, heads=32, heads_k=8)
    config.need("split")
    need_memory(2**33)
    lengths = [16384, *[64] * 15]
    total = sum(lengths)
    generator = Draw(5).generator
    q, k, v = (
        torch.randn((total, heads, 128), generator=generator, device="cuda", dtype=torch.float16)
        for heads in (config.heads, config.heads_k, config.heads_k)
    )
    starts = cu_seqlens(lengths)
    with deterministic_mode(split_size=2048), route("apart"):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = flash_attn_varlen_func(q, k, v, starts, starts, 16384, 16384)
        kept = torch.cuda.memory_allocated() - before
        taken = torch.cuda.max_memory_allocated() - before - kept
        alone = flash_attn_func(q[None, -64:], k[None, -64:], v[None, -64:])
    budget = budget_of(config, total, 16384)
    assert budget // 2 < taken <= budget, f"{taken / 2**20:.0f} MiB"
    assert torch.equal(out[-64:].view(torch.int16), alone[0].view(torch.int16))


def test_gradients_whose_blocks_of_keys_32_bits_do_not_count_are_an_error() -> None:
    """Their thread blocks take places by a number of 32 bits."""
    Config().need("bwd")
    q, k = (
        torch.zeros(rows, heads, 64, dtype=torch.float16, device=DEVICE)
        for rows, heads in ((1, 2), (2**20, 1))
    )
    ends = torch.zeros(65_001, dtype=torch.int32, device=DEVICE)
    lse = torch.zeros(2, 1, device=DEVICE)
    with (
        deterministic_mode(),
        pytest.raises(ValueError, match=r"is too long for gradients of 65000 sequences"),
    ):
        flash_attn_2_cuda.varlen_bwd(
            q, q, k, k, q, lse, None, None, None, ends, ends, None, 1, 2**31 - 1, 0.0, 1.0, False, False, -1, -1,
            0.0, False,
        )  # fmt: skip
