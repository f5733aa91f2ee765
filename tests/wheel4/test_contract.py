"""The rows' bits, layout by layout: how many elements differ from those of the sequence alone.

Each case is a cell of the contract's table (``--contract``). A cell must hold none, also of gradients, which are
taken with ``deterministic=True``. The negative control takes tiles of another size, which gives other bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from bits import Rows, assert_same_bits, bits, same_bits
from calls import dense, dense_gradients
from cases import BACKWARD, CONFIGS, FORWARD, other_tiles, own
from problems import Config
from torch import Tensor

pytestmark = pytest.mark.gpu

OTHER_TILES_IN_PAGES = Config(96)  # 144 keys without pages, for which their loader has no whole steps


def _differing(pairs: list[tuple[str, Tensor, Tensor]]) -> tuple[int, int]:
    """How many elements differ, and of how many."""
    return sum(int((bits(a) != bits(b)).sum()) for _, a, b in pairs), sum(a.numel() for _, a, _ in pairs)


def _of(alone: Rows, other: Rows) -> list[tuple[str, Tensor, Tensor]]:
    return [("lse (head, row)", alone.lse, other.lse), ("out (row, head, dim)", alone.out, other.out)]


def _told(
    cell: Callable[..., None], layout: str, config: Config, pairs: list[tuple[str, Tensor, Tensor]]
) -> None:
    assert all(a.shape == b.shape for _, a, b in pairs)
    cell(layout, str(config), *_differing(pairs))
    if layout.startswith("in pages") and config == OTHER_TILES_IN_PAGES:
        return  # the mode is off: see test_pages_have_the_bits_of_no_pages_at_every_head_dim
    for name, alone, other in pairs:
        assert_same_bits(alone, other, f"{layout}, {name}")


@pytest.mark.parametrize("layout", FORWARD)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_rows_are_those_of_the_sequence_alone(config: Config, layout: str, cell: Callable[..., None]) -> None:
    _told(cell, layout, config, [pair for rows in FORWARD[layout](config) for pair in _of(*rows)])


@pytest.mark.parametrize("layout", BACKWARD)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_gradients_are_those_of_the_sequence_alone(
    config: Config, layout: str, cell: Callable[..., None]
) -> None:
    alone, other = BACKWARD[layout](config)
    _told(cell, layout, config, [(f"d{name}", alone[name], other[name]) for name in "qkv"])


@pytest.mark.parametrize("config", [c for c in CONFIGS if c.head_dim == 128 and c.feature == "bf16"], ids=str)
def test_control_tiles_of_another_size_give_other_bits(config: Config, control: Any) -> None:
    mine = own(config)
    control(not same_bits(dense(config, [mine]).out, other_tiles(config, mine).out))


@pytest.mark.parametrize("config", [c for c in CONFIGS if c.head_dim == 128], ids=str)
def test_control_gradients_in_any_order(config: Config, control: Any) -> None:
    """Without ``deterministic=True`` they may differ from run to run."""
    mine = own(config)
    one, two = (dense_gradients(config, [mine], deterministic=False) for _ in range(2))
    control(any(not same_bits(one[name], two[name]) for name in "qkv"), must_differ=False)
