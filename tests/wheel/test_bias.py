"""attn_mask and attn_bias: results and gradients against float64, memory, and the gradient's bits.

The rows' contract with both is in test_contract.py and test_gradients.py.
"""

from __future__ import annotations

import gc
import math
from dataclasses import replace
from typing import Any

import flash_attn_2_cuda
import pytest
import torch
from flash_attn import deterministic_mode, flash_attn_func
from harness import DEVICE, DTYPES, Config, assert_same_bits, of_other_head_dims, route, seed_of
from masks import (
    assert_close,
    assert_that_a_mask_is_read_alike_wherever_it_lies,
    assert_that_blocks_of_keys_may_be_left_out,
    assert_that_no_number_but_infinity_hides,
    by_definition,
    draw_inputs,
    strided,
)
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not flash_attn_2_cuda.has_attn_bias, reason="this wheel has no attn_mask and attn_bias"
    ),
]

NAMES = ("dq", "dk", "dv", "dbias")
# Of (batch, heads, queries, keys): "k" stands for the heads of k and v, 1 for a dimension that is shared.
SHAPES = ["bhqk", "1hqk", "bkqk", "b1qk", "11qk", "bh1k", "b11k", "111k", "bhq1", "1111"]
EDGES = [1, 2, 63, 64, 65, 127, 128, 129, 255, 256, 257, 513, 1000, 4095, 4097]
CONFIGS = [
    Config(heads=4, heads_k=2),
    Config(heads=4, heads_k=2, causal=True, dtype="bf16"),
    Config(heads=4, heads_k=2, head_dim=128, dtype="bf16"),
    Config(heads=4, heads_k=2, head_dim=128, causal=True),
    Config(heads=4, heads_k=2, head_dim=40, causal=True),
    Config(heads=4, heads_k=2, head_dim=72, dtype="bf16"),
]


def sizes(shape: str, config: Config, batch: int, len_q: int, len_k: int) -> tuple[int, ...]:
    whole = (batch, config.heads_k if shape[1] == "k" else config.heads, len_q, len_k)
    return tuple(1 if letter == "1" else size for letter, size in zip(shape, whole, strict=True))


def check(
    config: Config, inputs: list[Tensor], mask: Tensor | None, bias: Tensor | None, split_size: int = 512
) -> None:
    """Results and gradients, with the mode on and off, are as accurate as PyTorch's."""
    config.need("split", "bwd")
    own: dict[str, Any] = {}
    leaves = [t.detach().requires_grad_() for t in inputs]
    if mask is not None:
        own["attn_mask"] = mask
    if bias is not None:
        own["attn_bias"] = bias.requires_grad_()
        leaves.append(own["attn_bias"])
    upstream = torch.randn(inputs[0].shape, device=DEVICE).to(inputs[0].dtype)
    right_out, right = by_definition(config, torch.float64, leaves, mask, upstream)
    plain_out, plain = by_definition(config, DTYPES[config.dtype], leaves, mask, upstream)
    for mode in (False, True):
        with deterministic_mode(mode, split_size):
            out = flash_attn_func(*leaves[:3], **config.kwargs(), **own)
            gradients = torch.autograd.grad(out, leaves, upstream)
        assert_close(f"out, mode {mode}", out, right_out, plain_out)
        for name, got, expected, other in zip(NAMES, gradients, right, plain, strict=False):
            assert_close(f"{name}, mode {mode}", got, expected, other)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("len_k", EDGES)
def test_shapes_and_edges(config: Config, shape: str, len_k: int) -> None:
    """Every alignment from 2 to 16 bytes comes by: the storage begins at another element each time."""
    torch.manual_seed(seed_of(config, shape, len_k))
    inputs = draw_inputs(len_k, config, 2, 100, len_k)
    offset = seed_of(shape, len_k) % 8
    mask = strided(
        torch.rand(sizes(shape, config, 2, 100, len_k), device=DEVICE) < 0.7, offset, (0, 1, 2, 3), 1
    )
    values = torch.randn(sizes(shape, config, 2, 100, len_k), device=DEVICE)
    dtype = torch.float32 if offset % 2 else DTYPES[config.dtype]
    check(config, inputs, mask, strided(values.to(dtype), offset, (0, 1, 2, 3), 1))


@pytest.mark.parametrize("config", of_other_head_dims(heads=4, heads_k=2), ids=str)
@pytest.mark.parametrize("shape", ["bhqk", "1kqk", "11qk"])
@pytest.mark.parametrize(("len_q", "len_k"), [(1, 900), (100, 257), (300, 1300)])
def test_other_head_dims(config: Config, shape: str, len_q: int, len_k: int) -> None:
    config.need("split", "bwd")
    torch.manual_seed(seed_of(config, shape, len_q))
    inputs = draw_inputs(len_q, config, 2, len_q, len_k)
    mask = torch.rand(sizes(shape, config, 2, len_q, len_k), device=DEVICE) < 0.7
    bias = torch.randn(sizes(shape, config, 2, len_q, len_k), device=DEVICE).to(DTYPES[config.dtype])
    check(config, inputs, mask, bias)


@pytest.mark.parametrize("order", [(0, 1, 3, 2), (3, 2, 1, 0), (2, 0, 3, 1)], ids=str)
@pytest.mark.parametrize("gap", [1, 3])
def test_views_in_any_order_and_with_gaps(order: tuple[int, ...], gap: int) -> None:
    config = Config(heads=4, heads_k=2)
    torch.manual_seed(3)
    inputs = draw_inputs(3, config, 2, 100, 700)
    mask, values = (
        torch.rand(2, 4, 100, 700, device=DEVICE) < 0.7,
        torch.randn(2, 4, 100, 700, device=DEVICE).half(),
    )
    check(config, inputs, strided(mask, 5, order, gap), strided(values, 3, order, gap))


@pytest.mark.parametrize("config", [*CONFIGS, Config(heads=4, heads_k=4, window=(300, 50))], ids=str)
@pytest.mark.parametrize(("len_q", "len_k"), [(100, 700), (1000, 1000), (300, 2500)])
def test_blocks_of_keys_that_no_query_sees(config: Config, len_q: int, len_k: int) -> None:
    config.need("fwd", "split", "bwd")
    assert_that_blocks_of_keys_may_be_left_out(config, len_q, len_k)


@pytest.mark.parametrize("length", [4095, 4096, 8192])
def test_the_published_misaligned_address(length: int) -> None:
    """(batch 1, heads 2 and 1, head dim 128, causal): rows of 8190 bytes, which vector loads cannot take."""
    config = Config(heads=2, heads_k=1, head_dim=128, causal=True)
    config.need("split", "bwd")
    torch.manual_seed(length)
    inputs = draw_inputs(length, config, 1, length, length)
    check(
        config,
        inputs,
        torch.rand(1, 1, length, length, device=DEVICE) < 0.7,
        torch.randn(1, 1, length, length, device=DEVICE).half(),
    )


@pytest.mark.parametrize("mode", [False, True])
def test_views_take_no_memory(mode: bool) -> None:
    """Forward and what is kept for backward: nothing beyond the outputs, whatever the view."""
    config = Config(heads=16, heads_k=16)
    config.need("split", "bwd")
    q, k, v = (t.requires_grad_() for t in draw_inputs(1, config, 4, 2048, 2048))
    mask = (torch.rand(4, 1, 1, 2048, device=DEVICE) < 0.7).expand(4, 16, 2048, 2048)
    bias = torch.randn(1, 16, 2048, 1, device=DEVICE).half().expand(4, 16, 2048, 2048)

    def taken(**own: Any) -> tuple[int, int]:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with deterministic_mode(mode, 2048):
            out = flash_attn_func(q, k, v, **own)
        peak, kept = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
        del out
        return peak, kept

    plain_peak, plain_kept = taken()
    peak, kept = taken(attn_mask=mask, attn_bias=bias)
    assert peak <= plain_peak + 4096
    assert kept <= plain_kept + 4096


@pytest.mark.parametrize(
    "shape",
    [(4, 16, 2048, 2048), (1, 16, 2048, 2048), (1, 1, 2048, 2048), (1, 16, 256, 256), (1, 1, 1, 2048)],
    ids=str,
)
def test_the_gradient_of_a_bias_takes_its_own_memory(shape: tuple[int, ...]) -> None:
    """And where few tiles are shared by many, 16 MiB more at most."""
    config = Config(heads=16, heads_k=16)
    config.need("split", "bwd")
    q, k, v = (t.requires_grad_() for t in draw_inputs(1, config, 4, max(shape[2], 256), shape[3]))
    bias = torch.zeros(shape, device=DEVICE).half().requires_grad_()

    def peak(*leaves: Tensor) -> int:
        out = flash_attn_func(q, k, v, attn_bias=bias if leaves[-1] is bias else bias.detach())
        gc.collect()  # so that what other cases left is not freed meanwhile
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(out, leaves, torch.ones_like(out))
        return torch.cuda.max_memory_allocated() - before

    beside = 0 if bias.numel() >= 2048 * 2048 else 16 << 20
    assert peak(q, bias) - peak(q) <= bias.numel() * bias.element_size() + beside + 4096


@pytest.mark.parametrize("mode", [False, True])
@pytest.mark.parametrize("shape", ["bhqk", "1hqk", "b1qk", "11qk", "bk1k", "111k"])
def test_the_gradient_of_a_bias_is_the_same_in_every_run(mode: bool, shape: str) -> None:
    config = Config(heads=8, heads_k=4)
    config.need("split", "bwd")
    torch.manual_seed(1)
    q, k, v = draw_inputs(1, config, 3, 1000, 1500)
    bias = torch.randn(sizes(shape, config, 3, 1000, 1500), device=DEVICE).requires_grad_()
    results = []
    for _ in range(10):
        with deterministic_mode(mode, 512):
            out = flash_attn_func(q, k, v, attn_bias=bias)
            results.append(torch.autograd.grad(out, bias, torch.ones_like(out))[0])
    for result in results[1:]:
        assert_same_bits(result, results[0], "dbias")


def test_the_gradient_of_one_sequence_s_bias_does_not_depend_on_the_batch() -> None:
    """Sums of heads, of queries, of both, and of nothing."""
    config = Config(heads=8, heads_k=4)
    config.need("split", "bwd")
    torch.manual_seed(1)
    inputs = draw_inputs(1, config, 5, 1000, 1500)
    for shape in ("b11k", "b1qk", "bk1k", "bhqk"):
        bias = torch.randn(sizes(shape, config, 5, 1000, 1500), device=DEVICE)

        def gradient(which: slice, bias: Tensor = bias) -> Tensor:
            own = bias[which].clone().requires_grad_()
            with deterministic_mode(split_size=512):
                out = flash_attn_func(*(t[which] for t in inputs), attn_bias=own)
                return torch.autograd.grad(out, own, torch.ones_like(out))[0]

        assert_same_bits(gradient(slice(0, 5))[3], gradient(slice(3, 4))[0], f"dbias {shape}")


@pytest.mark.parametrize(("batch", "heads", "length"), [(300, 1, 9), (40, 16, 200), (40, 4, 500)])
def test_the_gradient_of_a_bias_that_many_sequences_share(batch: int, heads: int, length: int) -> None:
    """More than there are parts of a tile: thread blocks find several sequences' scores, and in the first case some none."""
    torch.manual_seed(1)
    config = Config(heads=heads, heads_k=heads)
    inputs = draw_inputs(3, config, batch, length, length)
    check(config, inputs, None, torch.randn(1, heads, length, length, device=DEVICE).half())


@pytest.mark.sanitizer
@pytest.mark.parametrize("shape", ["bhqk", "1hqk", "bk1k", "111k"])
def test_small_shapes_for_compute_sanitizer(shape: str) -> None:
    config = Config(heads=2, heads_k=1)
    torch.manual_seed(2)
    inputs = draw_inputs(2, config, 2, 70, 301)
    mask, values = (torch.rand(sizes(shape, config, 2, 70, 301), device=DEVICE) for _ in range(2))
    check(
        config,
        inputs,
        strided(mask < 0.7, 1, (0, 1, 2, 3), 1),
        strided(values.half(), 1, (0, 1, 2, 3), 1),
        split_size=256,
    )


@pytest.mark.sanitizer
@pytest.mark.parametrize(("mode", "split_size"), [(False, 2048), (True, 128), (True, 2048)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_small_simple_calls_for_compute_sanitizer(head_dim: int, mode: bool, split_size: int) -> None:
    """In the kernels that ask for little: chunks folded in between, or shared memory for four tiles of a mask; and the gradient of the bias."""
    config = Config(heads=2, heads_k=1, head_dim=head_dim)
    config.need("fwd", "split", "bwd")
    batch = 1 if mode else 32  # so many that upstream splits no keys
    q, k, v = (t.requires_grad_() for t in draw_inputs(2, config, batch, 200, 304))
    bias = torch.randn(1, 2, 200, 304, device=DEVICE).half().requires_grad_()
    seen = (torch.arange(304, device=DEVICE) % 3 > 0)[None, None, None]
    own = torch.rand(1, 2, 200, 304, device=DEVICE) < 0.7
    own[..., 128:256] = False
    with route("in the standard kernel"), deterministic_mode(mode, split_size):
        out = flash_attn_func(q, k, v, attn_bias=bias)
        gradients = torch.autograd.grad(out, (q, k, v, bias), torch.ones_like(out))
        masked = flash_attn_func(q, k, v, attn_bias=bias.detach(), attn_mask=seen)
        gradients += torch.autograd.grad(masked, (q, k, v), torch.ones_like(out))
        by_rows = flash_attn_func(q, k, v, attn_mask=own)
    assert all(t.isfinite().all() for t in (out, masked, by_rows, *gradients))


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_gradients_under_a_shared_mask_have_the_bits_of_one_written_out(
    head_dim: int, causal: bool, with_bias: bool
) -> None:
    """Kernels that ask for little, and those for all calls: with whole blocks of keys hidden, and keys in others."""
    config = Config(heads=4, heads_k=2, head_dim=head_dim, causal=causal)
    config.need("split", "bwd")
    inputs = [t.requires_grad_() for t in draw_inputs(3, config, 2, 300, 1000)]
    keys = torch.rand(2, 1, 1, 1000, device=DEVICE) < 0.7
    keys[0, ..., 128:384] = False
    keys[1, ..., 640:] = False
    own = {"attn_bias": torch.randn(1, 4, 300, 1000, device=DEVICE).half()} if with_bias else {}
    found = []
    for mask in (keys, keys.expand(2, 4, 300, 1000).contiguous()):
        with deterministic_mode(split_size=512):
            out = flash_attn_func(*inputs, causal=causal, attn_mask=mask, **own)
            found.append((out, *torch.autograd.grad(out, inputs, torch.ones_like(out))))
    for name, left, right in zip(("out", "dq", "dk", "dv"), *found, strict=True):
        assert_same_bits(left, right, f"{name}, shared and written out")


def test_a_query_without_keys_has_zeros_and_finite_gradients() -> None:
    config = Config(heads=2, heads_k=1)
    config.need("split", "bwd")
    inputs = [t.requires_grad_() for t in draw_inputs(3, config, 1, 70, 300)]
    mask = torch.ones(70, 300, dtype=torch.bool, device=DEVICE)
    mask[64:] = False
    bias = torch.zeros(70, 300, device=DEVICE)
    bias[9] = -math.inf
    out, lse, _ = flash_attn_func(
        *inputs, attn_mask=mask, attn_bias=bias.requires_grad_(), return_attn_probs=True
    )
    for row in (9, *range(64, 70)):
        assert (out[0, row] == 0).all()
        assert (lse[0, :, row] == math.inf).all()
    gradients = torch.autograd.grad(out, [*inputs, bias], torch.ones_like(out))
    assert all(g.isfinite().all() for g in gradients)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mode", [False, True])
def test_a_sequence_all_of_whose_keys_a_shared_mask_hides_has_zeros(head_dim: int, mode: bool) -> None:
    """No tile of it is visited but the last, whose scores must all be hidden, whatever lies in shared memory."""
    config = Config(heads=4, heads_k=2, head_dim=head_dim)
    config.need("split")
    q, k, v = draw_inputs(3, config, 2, 100, 1000)
    mask = torch.ones(2, 1, 1, 1000, dtype=torch.bool, device=DEVICE)
    mask[0] = False
    with deterministic_mode(mode, 512):
        out, lse, _ = flash_attn_func(q, k, v, attn_mask=mask, return_attn_probs=True)
        alone = flash_attn_func(q[1:], k[1:], v[1:], attn_mask=mask[1:])
    assert (out[0] == 0).all()
    assert (lse[0] == math.inf).all()
    assert_same_bits(out[1:], alone, "the other sequence, alone")


@pytest.mark.parametrize(
    ("scale", "softcap"), [(None, 0.0), (0.125, 0.0), (1.0, 0.0), (0.01, 0.0), (None, 30.0)]
)
@pytest.mark.parametrize(
    "config",
    [Config(head_dim=d, dtype=t, heads=4, heads_k=2) for d in (64, 128) for t in ("fp16", "bf16")],
    ids=str,
)
@pytest.mark.parametrize("of_queries_type", [True, False])
def test_no_number_but_infinity_hides(
    config: Config, scale: float | None, softcap: float, of_queries_type: bool
) -> None:
    config.need("split", "bwd")
    assert_that_no_number_but_infinity_hides(
        replace(config, softcap=softcap), config.dtype if of_queries_type else "fp32", scale
    )


@pytest.mark.parametrize(
    "config",
    [
        Config(head_dim=d, dtype=t, heads=4, heads_k=2, causal=c)
        for d in (64, 128)
        for t in ("fp16", "bf16")
        for c in (False, True)
    ],
    ids=str,
)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("own_mask", [False, True])
@pytest.mark.parametrize("split_size", [0, 512, 2048])
def test_simple_calls_have_the_bits_of_others(
    config: Config, with_bias: bool, own_mask: bool, split_size: int
) -> None:
    """A mask that all queries share, and a mask or bias whose rows lie in pieces of sixteen bytes: kernels that ask for little, and those for all calls."""
    config.need("fwd", "split")
    if not split_size and config.head_dim > 64:
        pytest.skip("with the mode off, kernels take the softmax in other steps above head dim 64")
    if split_size == 512 and config.head_dim > 64 and (own_mask or with_bias):
        pytest.skip(
            "chunks leave no shared memory for a bias or each query's own mask: there is one kernel alone"
        )
    torch.manual_seed(split_size)
    batch, len_q, len_k = 64, 300, 1777  # fills a GPU, so that upstream splits no keys where the mode is off
    q, k, v = draw_inputs(3, config, batch, len_q, len_k)
    share = torch.tensor([1.0, 0.0, 0.5, 1.0, 0.0], device=DEVICE)[
        torch.arange(len_k, device=DEVICE) // 128 % 5
    ]
    own: dict[str, Any] = {"attn_mask": torch.rand(batch, 1, 1, len_k, device=DEVICE) < share}
    if own_mask:
        wide = torch.zeros(batch, 1, len_q, len_k + -len_k % 16, dtype=torch.bool, device=DEVICE)
        own["attn_mask"] = wide[..., :len_k].copy_(torch.rand(batch, 1, len_q, len_k, device=DEVICE) < share)
    if with_bias:
        bias = torch.randn(1, 4, len_q, len_k + -len_k % 8, device=DEVICE).to(q.dtype)
        own["attn_bias"] = bias.masked_fill_(torch.rand(bias.shape, device=DEVICE) < 0.01, -math.inf)[
            ..., :len_k
        ]
    results = []
    for where in ("in one thread block", "in the standard kernel"):
        with route(where), deterministic_mode(split_size > 0, split_size or 512):
            results.append(flash_attn_func(q, k, v, causal=config.causal, return_attn_probs=True, **own)[:2])
    for name, left, right in zip(("out", "lse"), *results, strict=True):
        assert_same_bits(left, right, f"{name}, 64 rows and 128 rows")


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_mask_is_read_alike_wherever_it_lies(config: Config) -> None:
    config.need("split", "bwd")
    assert_that_a_mask_is_read_alike_wherever_it_lies(config)


def test_a_bias_on_another_device_is_an_error() -> None:
    Config().need("split")
    q = torch.zeros(1, 5, 4, 64, device=DEVICE).half()
    with pytest.raises(ValueError, match="attn_bias is on cpu, q on cuda"):
        flash_attn_func(q, q, q, attn_bias=torch.zeros(5, 5).half())


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("value", [torch.finfo(torch.float32).min, -1e9, -1e30, -65504.0])
@pytest.mark.parametrize("options", [{"softmax_scale": 1.0}, {"softcap": 30.0}, {}], ids=str)
@pytest.mark.parametrize("of_queries_type", [True, False])
def test_large_negative_biases_hide_as_a_mask_does(
    dtype: str, value: float, options: dict[str, float], of_queries_type: bool
) -> None:
    """Padding comes last and is visited first: the scores that all rows begin with are such."""
    config = Config(heads=2, heads_k=2, dtype=dtype, head_dim=128)
    config.need("split", "bwd")
    q, k, v = (t.requires_grad_() for t in draw_inputs(3, config, 1, 70, 900))
    seen = torch.arange(900, device=DEVICE) < 500
    bias = torch.where(seen, 0.0, value).to(q.dtype if of_queries_type else torch.float32)
    out, expected = (
        flash_attn_func(q, k, v, attn_bias=bias, **options),
        flash_attn_func(q, k, v, attn_mask=seen, **options),
    )
    assert_close("out", out, expected.double(), expected)
    for got, right in zip(
        *(torch.autograd.grad(o, (q, k, v), torch.ones_like(o)) for o in (out, expected)), strict=True
    ):
        assert_close("gradient", got, right.double(), right)
