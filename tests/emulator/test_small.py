"""A few small causal calls of the extension, in the arguments that it has of upstream: one of each pass and layout.

They need three kernel files, ``--kernels hdim32,fp16,causal``, and take seconds.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import flash_attn_2_cuda as extension
import pytest
import torch

CHUNK = 256  # tokens: a multiple of each kernel's tile
DIM = 32


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half()


def inputs(
    batch: int, queries: int, keys: int, heads: int = 4, heads_k: int = 2, dim: int = DIM
) -> list[torch.Tensor]:
    return [
        drawn(batch, length, h, dim, seed=i)
        for i, (length, h) in enumerate([(queries, heads), (keys, heads_k), (keys, heads_k)])
    ]


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Causal attention in float64, aligned at the ends."""
    groups = q.shape[2] // k.shape[2]
    q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if bias is not None:
        scores = scores + bias
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(k.shape[2] - q.shape[2] + 1)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return (weights.nan_to_num(0) @ v).transpose(1, 2)


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours.double(), theirs, rtol=4e-3, atol=4e-3)


def same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return torch.equal(ours.contiguous().view(torch.int16), theirs.contiguous().view(torch.int16))


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **scores: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    call = extension.fork_fwd if scores else extension.fwd
    out, lse, *_ = call(
        q, k, v, None, None, 0.0, q.shape[-1] ** -0.5, True, -1, -1, 0.0, False, None, *scores.values()
    )
    return out, lse


def packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Of sequences of one length, in a packed call."""
    begins = [torch.arange(0, (len(t) + 1) * t.shape[1], t.shape[1], dtype=torch.int32) for t in (q, k)]
    flat = [t.flatten(0, 1) for t in (q, k, v)]
    options = (q.shape[-1] ** -0.5, False, True, -1, -1, 0.0, False, None)
    out, *_ = extension.varlen_fwd(
        *flat, None, *begins, None, None, None, None, q.shape[1], k.shape[1], 0.0, *options
    )
    return out.view_as(q)


def cached(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, new: int = 0, page: int = 0) -> torch.Tensor:
    """The last keys are appended; with pages, those of the pool lie in reverse."""
    old, batch = k.shape[1] - new, len(k)
    capacity = -(-k.shape[1] // (page or 1)) * (page or 1)
    caches = [torch.full((batch, capacity, *t.shape[2:]), torch.nan, dtype=t.dtype) for t in (k, v)]
    for cache, t in zip(caches, (k, v), strict=True):
        cache[:, :old] = t[:, :old]
    table = None
    if page:
        count = batch * capacity // page
        caches = [cache.reshape(count, page, *cache.shape[2:]).flip(0).contiguous() for cache in caches]
        table = torch.arange(count - 1, -1, -1, dtype=torch.int32).view(batch, -1)
    appended = [t[:, old:].contiguous() for t in (k, v)] if new else [None, None]
    lengths = torch.full((batch,), old, dtype=torch.int32)
    tables = (lengths, None, None, None, None, table, None)
    options = (q.shape[-1] ** -0.5, True, -1, -1, 0.0, True, 0)
    out, _ = extension.fwd_kvcache(q, *caches, *appended, *tables, None, *options)
    return out  # type: ignore[no-any-return]


def layouts(problem: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The rows of one problem, by how it is brought."""
    rows = {"dense": dense(*problem)[0], "packed": packed(*problem), "cached": cached(*problem)}
    rows["pages"] = cached(*problem, page=256)
    rows["appended"] = cached(*problem, new=5)
    return rows


def gradients(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **scores: Any
) -> list[torch.Tensor]:
    out, lse = dense(q, k, v, **scores)
    call, more = (extension.fork_bwd, [*scores.values(), True]) if scores else (extension.bwd, [])
    options = (0.0, q.shape[-1] ** -0.5, True, -1, -1, 0.0, False, None, None)
    return list(call(dout, q, k, v, out, lse, None, None, None, None, *options, *more))


EMULATOR = ctypes.CDLL(str(extension._LIBRARY))
EMULATOR.emulator_launches.restype = EMULATOR.emulator_instructions.restype = ctypes.c_ulonglong


def machine(order: int = 0, resident: int = 1) -> None:
    """The emulated GPU of 132 multiprocessors, looking for races.

    Args:
        order: of blocks and warps; 0: as they come, else the seed of a random one.
        resident: blocks that run side by side, in turns.
    """
    EMULATOR.emulator_set(132, order, 1, resident)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    machine()


@pytest.fixture
def mode() -> Iterator[None]:
    extension.set_deterministic_mode(True, CHUNK)
    yield
    extension.set_deterministic_mode(False)


@pytest.mark.parametrize("dim", [DIM, DIM - 8])
def test_results_are_right_in_every_layout(dim: int) -> None:
    problem = inputs(2, 70, 150, dim=dim)
    for rows in layouts(problem).values():
        close(rows, reference(*problem))


@pytest.mark.parametrize("heads_k", [1, 2])
def test_gradients_are_right(heads_k: int) -> None:
    problem, dout = inputs(2, 70, 150, heads=2, heads_k=heads_k), drawn(2, 70, 2, DIM, seed=9)
    exact = [t.double().requires_grad_() for t in problem]
    reference(*exact).backward(dout.double())
    for ours, theirs in zip(gradients(dout, *problem)[:3], exact, strict=True):
        assert theirs.grad is not None
        close(ours, theirs.grad)


def test_gradients_without_keys_are_zero() -> None:
    q, k, v = inputs(1, 8, 8)
    dq, *_ = gradients(q, q, k[:, :0], v[:, :0])
    assert not dq.any()


@pytest.mark.parametrize("keys", [100, 600])
def test_a_row_has_one_result_in_every_layout(mode: None, keys: int) -> None:
    problem = inputs(3, 70, keys)
    alone = dense(*(t[:1] for t in problem))[0]
    close(alone, reference(*(t[:1] for t in problem)))
    assert {name for name, rows in layouts(problem).items() if not same(rows[:1], alone)} == set()
    last = dense(problem[0][:1, -20:], *(t[:1] for t in problem[1:]))[0]
    assert same(last, alone[:, -20:])


def test_without_the_mode_a_row_follows_the_call() -> None:
    """The control: what the case above asks does not hold by itself."""
    problem = inputs(3, 70, 600)
    alone = dense(*(t[:1] for t in problem))[0]
    assert {name for name, rows in layouts(problem).items() if not same(rows[:1], alone)}


@pytest.mark.parametrize("path", [2, 8])
def test_a_row_has_one_result_whichever_kernel_folds(mode: None, path: int) -> None:
    """Chunks of a call of few rows are spread over thread blocks, and a second kernel folds; here one block walks them."""
    problem = inputs(1, 150, 600)
    first = EMULATOR.emulator_launches()
    spread = dense(*problem)[0]
    second = EMULATOR.emulator_launches()
    close(spread, reference(*problem))
    before = extension._test_paths(path)
    try:
        assert same(dense(*problem)[0], spread)
    finally:
        extension._test_paths(before)
    assert (second - first, EMULATOR.emulator_launches() - second) == (2, 1)


def in_other_orders() -> Iterator[None]:
    """Of thread blocks, several of which run side by side."""
    for order in (1, 2, 3):
        machine(order=order, resident=4)
        yield


def test_gradients_depend_neither_on_the_batch_nor_on_the_order_of_blocks(mode: None) -> None:
    problem, dout = inputs(3, 70, 600), drawn(3, 70, 4, DIM, seed=9)
    alone = gradients(dout[:1], *(t[:1] for t in problem))[:3]
    for _ in in_other_orders():
        for ours, one in zip(gradients(dout, *problem)[:3], alone, strict=True):
            assert same(ours[:1], one)


def test_without_the_mode_gradients_follow_the_order_of_blocks() -> None:
    """The control."""
    problem = inputs(2, 200, 600)  # enough that some sum rounds otherwise
    dout = drawn(2, 200, 4, DIM, seed=9)
    dq, *_ = gradients(dout, *problem)
    assert not all(same(gradients(dout, *problem)[0], dq) for _ in in_other_orders())


@pytest.mark.parametrize("page", [16, 48])
def test_small_pages_hold_the_same_keys(mode: None, page: int) -> None:
    problem = inputs(2, 20, 600)
    assert same(cached(*problem, page=page), dense(*problem)[0])
    assert same(cached(*problem, new=7, page=page), dense(*problem)[0])


@pytest.mark.parametrize("queries", [4, 9])  # 16 rows in a tile, which has kernels of its own, or 36
def test_heads_that_share_tiles_have_the_results_of_heads_with_keys_of_their_own(
    mode: None, queries: int
) -> None:
    q, k, v = inputs(2, queries, 700, heads=8)
    first = EMULATOR.emulator_instructions()
    shared = dense(q, k, v)[0]
    second = EMULATOR.emulator_instructions()
    close(shared, reference(q, k, v))
    assert same(shared, dense(q, *(t.repeat_interleave(4, dim=2) for t in (k, v)))[0])
    assert 2 * (second - first) < EMULATOR.emulator_instructions() - second, "no tile was shared"


def scores(queries: int, keys: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A mask and a bias, and both as one number in float64."""
    mask = drawn(1, 1, queries, keys, seed=7) > -1
    mask[..., 0] = True
    bias = drawn(1, 4, queries, keys, seed=8)
    return {"attn_mask": mask, "attn_bias": bias}, bias.double().masked_fill(~mask, -torch.inf)


@pytest.mark.parametrize("queries", [20, 150])
def test_a_mask_and_a_bias_are_applied(queries: int) -> None:
    problem = inputs(2, queries, 300)
    given, exact = scores(queries, 300)
    close(dense(*problem, **given)[0], reference(*problem, bias=exact))


def test_gradients_with_a_mask_and_a_bias_are_right() -> None:
    problem, dout = inputs(2, 70, 150), drawn(2, 70, 4, DIM, seed=9)
    given, exact_scores = scores(70, 150)
    exact = [t.double().requires_grad_() for t in problem]
    exact_scores.requires_grad_()
    reference(*exact, bias=exact_scores).backward(dout.double())
    ours = gradients(dout, *problem, **given)
    for one, theirs in zip(ours[:3], exact, strict=True):
        assert theirs.grad is not None
        close(one, theirs.grad)
    assert exact_scores.grad is not None
    close(ours[4], exact_scores.grad.masked_fill(~given["attn_mask"], 0))
