"""learnable_sink on kernels that run here; test_rows.py draws calls with one too."""

from __future__ import annotations

import pytest
import sinks
from conftest import built
from flash_attn import deterministic_mode
from harness import Draw

modes = pytest.mark.parametrize("mode", [False, True], ids=["off", "on"])


@modes
def test_no_sink_is_one_of_minus_infinity(mode: bool) -> None:
    config = built(heads=2, heads_k=1, causal=True)
    config.need("fwd", "split", "bwd")
    draw = Draw(1)
    with deterministic_mode(mode, 128):
        sinks.assert_that_no_sink_is_a_sink_of_minus_infinity(config, [draw.sequence(config, 40, 150)])


@modes
def test_gradients(mode: bool) -> None:
    config = built(heads=4, heads_k=2, causal=True, sink="fp32")
    config.need("fwd", "split", "bwd")
    draw = Draw(2)
    with deterministic_mode(mode, 128):
        sinks.assert_that_gradients_are_right(config, [draw.sequence(config, 40, 150) for _ in range(2)])
        sinks.assert_that_gradients_are_right(
            config, [draw.sequence(config, 1, 70), draw.sequence(config, 30, 30)]
        )


def test_unused_rows_have_no_part() -> None:
    config = built(heads=2, heads_k=1, sink="fp32")
    config.need("fwd", "split", "bwd")
    sinks.assert_that_unused_rows_have_no_part(config)


def test_all_functions_take_one() -> None:
    config = built(heads=2, heads_k=1, sink="bf16")
    config.need("fwd", "split")
    sinks.assert_that_all_functions_take_one(config)


def test_wrong_sinks_are_told() -> None:
    config = built(heads=2, heads_k=1)
    config.need("fwd", "split")
    sinks.assert_that_wrong_sinks_are_told(config)
