"""The row contract in the standard forward kernel alone: one kernel file shows it, causal or full.

``nox -s tests`` runs these of a single file. Each case names the path that it takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from conftest import DIM, Machine, built
from flash_attn import deterministic_mode
from harness import KERNELS, Config, Draw, Rows, Sequence, assert_accurate, dense, route, varlen

SPLIT = 128 if DIM <= 128 else 64  # the shortest: a block of keys
# One chunk, which nothing folds; three, the last of them short.
LENGTHS = pytest.mark.parametrize("keys", [SPLIT - 48, 2 * SPLIT + 5])


@pytest.fixture
def config() -> Config:
    files = [name for name in KERNELS if name.startswith("fwd_")]
    if not files:
        pytest.skip("built without standard kernels (--kernels)")
    return built(heads=2, heads_k=1, causal=any(name.endswith("_causal") for name in files))


@pytest.fixture(autouse=True)
def _in_the_standard_kernel() -> Iterator[None]:
    with deterministic_mode(split_size=SPLIT), route("in the standard kernel"):
        yield


def problem(config: Config, keys: int, queries: int = 20) -> tuple[list[Sequence], int]:
    """Three sequences, and which of them is looked at."""
    draw = Draw(11)
    return [draw.sequence(config, queries, keys) for _ in range(3)], 1


@LENGTHS
@pytest.mark.parametrize("sink", ["", "fp32"])
def test_rows_are_right(config: Config, machine: Machine, keys: int, sink: str) -> None:
    if sink:  # the more heads, the more keys the last one's outweighs
        config = replace(config, heads=8, sink=sink)
    sequences, which = problem(config, keys)
    before = machine.launches
    assert_accurate(config, dense(config, [sequences[which]]), sequences[which])
    assert machine.launches == before + 1, "another kernel folds"


@LENGTHS
def test_a_row_is_the_same_alone_in_a_batch_and_packed(config: Config, keys: int) -> None:
    sequences, which = problem(config, keys)
    alone = dense(config, [sequences[which]])
    dense(config, sequences, which).assert_same(alone, "in a batch")
    others = [Draw(12).sequence(config, 3, keys + 200), *sequences]
    varlen(config, others, which + 1).assert_same(alone, "packed beside a longer one")


def test_the_last_rows_are_the_same_as_in_the_whole(config: Config) -> None:
    (sequence, *_), _ = problem(config, 2 * SPLIT + 5)
    whole = dense(config, [sequence])
    expected = Rows(whole.out[13:], whole.lse[:, 13:])
    last = sequence.rows(13, 20) if config.causal else replace(sequence, q=sequence.q[13:])
    dense(config, [last]).assert_same(expected, "the last seven alone")


@pytest.mark.parametrize("order", [1, 2])
def test_a_row_does_not_depend_on_the_order_of_thread_blocks(
    config: Config, machine: Machine, order: int
) -> None:
    sequences, which = problem(config, 2 * SPLIT + 5)
    expected = dense(config, sequences, which)
    machine.set(processors=3, order=order, resident=4)
    dense(config, sequences, which).assert_same(expected, "in another order")


def test_the_size_of_chunks_is_part_of_the_bits(config: Config) -> None:
    """The control: two sizes fold otherwise."""
    sequences, which = problem(config, 4 * SPLIT)
    first = dense(config, sequences, which)
    with deterministic_mode(split_size=2 * SPLIT):
        assert not dense(config, sequences, which).same(first)
