"""Results and gradients against float64: at most twice as far off as PyTorch's operations in the input's dtype."""

from __future__ import annotations

import math

import pytest
import torch
from bits import Rows
from calls import Gradients, dense, dense_gradients, paged, varlen, varlen_gradients
from cases import CONFIGS, PAGES
from problems import DTYPES, Config, Sequence, draw, reference
from torch import Tensor

pytestmark = pytest.mark.gpu

LENGTHS = [(333, 517), (517, 517), (1, 1100)]


def _assert_close(got: Tensor, exact: Tensor, plain: Tensor, what: str) -> None:
    error = (got.double() - exact).abs().max().item()
    allowed = 2 * (plain.double() - exact).abs().max().item() + 1e-4
    if what == "dsink":  # so few numbers that PyTorch's error may be a small one: one step of the dtype more
        allowed += exact.abs().max().item() * torch.finfo(got.dtype).eps
    assert error <= allowed, f"{what} is off by {error:.3g}; PyTorch's own error allows {allowed:.3g}"


def _assert_accurate(
    config: Config, sequence: Sequence, rows: Rows, gradients: Gradients | None = None
) -> None:
    exact, plain = reference(config, sequence), reference(config, sequence, DTYPES[config.dtype])
    _assert_close(rows.out, exact.rows.out, plain.rows.out, "out")
    sees = exact.rows.lse.isfinite()
    assert torch.equal(rows.lse.isfinite(), sees)
    off = (rows.lse.double() - exact.rows.lse)[sees].abs().max().item()
    assert off <= 2e-3, f"lse is off by {off:.3g}"
    for name, gradient in (gradients or {}).items():
        _assert_close(gradient, exact.gradients[name], plain.gradients[name], f"d{name}")


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_batch(config: Config, lengths: tuple[int, int]) -> None:
    sequence = draw(config, *lengths)
    gradients = dense_gradients(config, [sequence]) if min(lengths) > 1 else None
    _assert_accurate(config, sequence, dense(config, [sequence]), gradients)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_packed(config: Config) -> None:
    sequences = [draw(config, len_q, len_k, len_q) for len_q, len_k in ((9, 9), (333, 517), (128, 640))]
    for which, sequence in enumerate(sequences):
        gradients = varlen_gradients(config, sequences, which)
        gradients.pop("sink", None)  # of the whole call
        _assert_accurate(config, sequence, varlen(config, sequences, which), gradients)


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_pages(config: Config, page: int) -> None:
    sequences = [draw(config, len_q, len_k, len_q) for len_q, len_k in ((9, 9), (333, 517), (1, 640))]
    for which, sequence in enumerate(sequences):
        _assert_accurate(config, sequence, paged(config, sequences, page, which))


@pytest.mark.parametrize("config", [c for c in CONFIGS if c.causal and not c.sink], ids=str)
def test_rows_that_see_no_key(config: Config) -> None:
    """More queries than keys: the first see none. Their results are 0, their lse is -inf."""
    rows = dense(config, [draw(config, 300, 100)])
    assert not rows.out[:200].any()
    assert (rows.lse[:, :200] == -math.inf).all()
    assert rows.lse[:, 200:].isfinite().all()
