"""attn_mask and attn_bias of every shape, stride and alignment: results and gradients against float64."""

from __future__ import annotations

import math
from typing import Any

import flash_attn_2_cuda
import pytest
import torch
from conftest import DIM, HALF, HALF_NAME, MACHINE, Machine, built, problems
from flash_attn import (
    deterministic_mode,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from harness import (
    DTYPES,
    KERNELS,
    Config,
    Draw,
    Rows,
    Sequence,
    assert_accurate,
    assert_same_bits,
    dense,
    reference,
    route,
)
from hypothesis import given
from hypothesis import strategies as st
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

WITH_BACKWARD = any(name.startswith("bwd") for name in KERNELS)


@st.composite
def configs(draw: st.DrawFn) -> Config:
    heads, heads_k = draw(st.sampled_from([(1, 1), (2, 2), (4, 2), (4, 1)]))
    causal = draw(st.booleans())
    return built(
        head_dim=draw(st.sampled_from([DIM, DIM, DIM - 8])),
        heads=heads,
        heads_k=heads_k,
        causal=causal,
        window=(-1, -1) if causal else draw(st.sampled_from([(-1, -1), (-1, -1), (150, 20)])),
        softcap=draw(st.sampled_from([0.0, 0.0, 15.0])),
        alibi=draw(st.sampled_from([False, False, True])),
    )


heads_of = st.sampled_from(["1", "heads_k", "heads"])
orders = st.permutations([0, 1, 2, 3]).map(tuple)


@problems(25)
@given(
    configs(),
    st.integers(1, 3),
    st.integers(1, 200),
    st.one_of(st.integers(1, 400), st.sampled_from([1, 127, 128, 129, 255, 256, 257])),
    st.tuples(st.booleans(), heads_of, st.booleans(), st.booleans()),
    st.tuples(st.booleans(), heads_of, st.booleans(), st.booleans()),
    st.sampled_from(["mask", "bias", "both"]),
    st.sampled_from([HALF_NAME, "fp32"]),
    st.tuples(st.integers(0, 7), orders, st.sampled_from([1, 1, 2])),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_every_shape_stride_and_alignment(
    config: Config,
    batch: int,
    len_q: int,
    len_k: int,
    mask_shape: tuple[bool, str, bool, bool],
    bias_shape: tuple[bool, str, bool, bool],
    which: str,
    dtype: str,
    layout: tuple[int, tuple[int, ...], int],
    mode: bool,
    seed: int,
) -> None:
    config.need("split")
    mode |= (
        max(config.window) >= len_k
    )  # without the mode, upstream drops an edge that lies beyond the keys, whatever the queries
    inputs = draw_inputs(seed, config, batch, len_q, len_k)

    def shape(broadcast: tuple[bool, str, bool, bool]) -> tuple[int, ...]:
        sizes = (
            batch,
            {"1": 1, "heads_k": config.heads_k, "heads": config.heads}[broadcast[1]],
            len_q,
            len_k,
        )
        return tuple(1 if one is True else size for one, size in zip(broadcast, sizes, strict=True))

    generator = torch.Generator().manual_seed(seed)
    own: dict[str, Any] = {}
    if which != "bias":
        own["attn_mask"] = strided(torch.rand(shape(mask_shape), generator=generator) < 0.6, *layout)
    if which != "mask":
        bias = torch.randn(shape(bias_shape), generator=generator).to(DTYPES[dtype])
        own["attn_bias"] = strided(bias, *layout).requires_grad_()
        inputs.append(own["attn_bias"])
    upstream = torch.randn(inputs[0].shape, generator=generator).to(HALF)
    leaves = [t if t.requires_grad else t.requires_grad_() for t in inputs]
    with deterministic_mode(mode, 256):
        out = flash_attn_func(*leaves[:3], **config.kwargs(), **own)
        exact_out, exact = by_definition(config, torch.float64, inputs, own.get("attn_mask"), upstream)
        plain_out, plain = by_definition(config, HALF, inputs, own.get("attn_mask"), upstream)
        assert_close("out", out, exact_out, plain_out)
        if not WITH_BACKWARD:
            return
        gradients = torch.autograd.grad(out, leaves, upstream)
    for name, got, right, other in zip(("dq", "dk", "dv", "dbias"), gradients, exact, plain, strict=False):
        assert got.dtype == leaves[("dq", "dk", "dv", "dbias").index(name)].dtype
        assert_close(name, got, right, other)


@pytest.mark.skipif(not WITH_BACKWARD, reason="built without backward kernels (--kernels)")
@pytest.mark.parametrize("mode", ["off", "deterministic=True", "on"])
@pytest.mark.parametrize(
    "shape",
    [(3, 4, 300, 400), (1, 4, 300, 400), (3, 1, 300, 400), (1, 1, 300, 400), (3, 2, 1, 400), (1, 1, 1, 400)],
    ids=str,
)
def test_the_gradient_of_a_bias_is_the_same_in_every_run(
    machine: Machine, mode: str, shape: tuple[int, ...]
) -> None:
    """Whatever the order of blocks and warps and how many run side by side: sums of several heads, sequences and queries included.

    That of q as well, where that is asked for.
    """
    config = built(heads=4, heads_k=2)
    config.need("split", "bwd")
    q, k, v = (t.requires_grad_() for t in draw_inputs(7, config, 3, 300, 400))
    bias = torch.randn(
        shape, generator=torch.Generator().manual_seed(1)
    ).requires_grad_()  # float32: half_t would round orders away
    mask = (
        torch.rand(3, 4, 3, 4, generator=torch.Generator().manual_seed(2))
        .repeat_interleave(100, 2)
        .repeat_interleave(100, 3)
        < 0.5
    )
    results = []
    for order, resident in [(0, 1), (1, 48), (2, 24), (3, 7)]:
        machine.set(order=order, resident=resident)
        with deterministic_mode(mode == "on", 256):
            out = flash_attn_func(
                q, k, v, attn_mask=mask, attn_bias=bias, deterministic=mode == "deterministic=True"
            )
            results.append(torch.autograd.grad(out, (bias, q), torch.ones_like(out)))
    for dbias, dq in results[1:]:
        assert_same_bits(dbias, results[0][0], "dbias")
        if mode != "off":
            assert_same_bits(dq, results[0][1], "dq")


@pytest.mark.skipif(not WITH_BACKWARD, reason="built without backward kernels (--kernels)")
def test_the_gradient_of_a_bias_that_many_sequences_share() -> None:
    """More than there are parts of a tile: some thread blocks find several sequences' scores, and some none."""
    config = built(heads=1, heads_k=1)
    config.need("split", "bwd")
    generator = torch.Generator().manual_seed(1)
    bias = torch.randn(1, 1, 2, 9, generator=generator).to(HALF).requires_grad_()
    leaves = [*(t.requires_grad_() for t in draw_inputs(3, config, 300, 2, 9)), bias]
    upstream = torch.randn(leaves[0].shape, generator=generator).to(HALF)
    gradients = torch.autograd.grad(flash_attn_func(*leaves[:3], attn_bias=bias), leaves, upstream)
    exact, plain = (
        by_definition(config, dtype, leaves, None, upstream)[1] for dtype in (torch.float64, HALF)
    )
    for name, got, right, other in zip(("dq", "dk", "dv", "dbias"), gradients, exact, plain, strict=True):
        assert_close(name, got, right, other)


@pytest.mark.skipif(not WITH_BACKWARD, reason="built without backward kernels (--kernels)")
@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("kind", ["rows", "shared rows", "a row each", "a row"])
@pytest.mark.parametrize(
    "lengths",
    [[(130, 300), (1, 20), (70, 70), (0, 9)], [(1, 40), (1, 5), (1, 300), (1, 20)]],
    ids=["queries", "one query"],
)
def test_packed_sequences(heads: int, kind: str, lengths: list[tuple[int, int]]) -> None:
    """(heads, total_q or 1, keys), and (batch or 1, heads, 1, keys)."""
    config = built(heads=4, heads_k=2, causal=True)
    config.need("split", "bwd")
    draw = Draw(5)
    sequences = [draw.sequence(config, *length) for length in lengths]
    longest, total = max(len(s.k) for s in sequences), sum(len(s.q) for s in sequences)
    shape = {
        "rows": (heads, total, longest),
        "shared rows": (heads, 1, longest),
        "a row each": (4, heads, 1, longest),
        "a row": (1, heads, 1, longest),
    }[kind]
    bias = torch.randn(shape, generator=draw.generator).to(HALF).requires_grad_()
    mask = torch.rand(shape, generator=draw.generator) < 0.7
    packed = [torch.cat([getattr(s, name) for s in sequences]).requires_grad_() for name in "qkv"]
    upstream = torch.randn(packed[0].shape, generator=draw.generator).to(HALF)
    starts = [
        torch.tensor([0, *(len(getattr(s, name)) for s in sequences)]).cumsum(0).to(torch.int32)
        for name in "qk"
    ]
    out = flash_attn_varlen_func(
        *packed,
        *starts,
        max(len(s.q) for s in sequences),
        longest,
        attn_mask=mask,
        attn_bias=bias,
        causal=True,
    )
    gradients = torch.autograd.grad(out, (*packed, bias), upstream)

    def of_sequence(tensor: Tensor, n: int, repeat: bool = True) -> Tensor:
        rows = slice(int(starts[0][n]), int(starts[0][n + 1]))
        own = (
            tensor[n % tensor.shape[0]]
            if tensor.dim() == 4
            else tensor[:, rows]
            if tensor.shape[1] > 1
            else tensor
        )
        own = own[..., : len(sequences[n].k)].expand(-1, len(sequences[n].q), -1)
        return own.repeat_interleave(4 // heads, 0)

    def exact(dtype: torch.dtype) -> tuple[Tensor, tuple[Tensor, ...]]:
        leaves = [t.detach().to(dtype).requires_grad_() for t in (*packed, bias)]
        parts = [
            reference(
                config,
                Sequence(
                    *(
                        t[int(s[n]) : int(s[n + 1])]
                        for t, s in zip(leaves[:3], (starts[0], starts[1], starts[1]), strict=True)
                    ),
                    of_sequence(mask, n),
                    of_sequence(leaves[3], n),
                ),
                dtype=dtype,
            ).out
            for n in range(4)
        ]
        result = torch.cat(parts)
        return result, torch.autograd.grad(result, leaves, upstream.to(dtype))

    (right_out, right), (plain_out, plain) = exact(torch.float64), exact(HALF)
    assert_close("out", out, right_out, plain_out)
    for name, got, expected, other in zip(("dq", "dk", "dv", "dbias"), gradients, right, plain, strict=True):
        assert_close(name, got, expected, other)


@pytest.mark.skipif(not WITH_BACKWARD, reason="built without backward kernels (--kernels)")
@pytest.mark.parametrize("shape", [(1, 300, 400), (1, 1, 400), (1, 1, 1, 400)], ids=str)
def test_a_longest_query_that_is_named_too_short_ends(shape: tuple[int, ...]) -> None:
    """Its gradients are wrong, as upstream's are, NaN where all queries share a bias; it must not wait for ever, nor write elsewhere."""
    built().need("split", "bwd")
    q, k = torch.randn(300, 2, DIM).to(HALF).requires_grad_(), torch.randn(400, 2, DIM).to(HALF)
    starts = [torch.tensor([0, end], dtype=torch.int32) for end in (300, 400)]
    bias = torch.zeros(shape).requires_grad_()
    out = flash_attn_varlen_func(q, k, k, *starts, 128, 400, attn_bias=bias)
    dbias = torch.autograd.grad(out, (q, bias), torch.ones_like(out))[1]
    assert shape[-2] > 1 or dbias.isnan().all()


def test_gradients_of_calls_that_share_a_kernel_leave_its_limit_of_shared_memory() -> None:
    """Slopes with a softcap take the kernels of a bias, which need more; the emulator calls a lowered limit an error."""
    config = built(heads=2, heads_k=2)
    config.need("split", "bwd")
    q, k, v = (t.requires_grad_() for t in draw_inputs(3, config, 1, 70, 130))
    for options in ({"attn_bias": torch.zeros(70, 130)}, {"alibi_slopes": torch.full((2,), 0.1)}):
        out = flash_attn_func(q, k, v, softcap=15.0, **options)
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))


@pytest.mark.parametrize("value", [torch.finfo(torch.float32).min, -1e9, -1e30, -65504.0])
@pytest.mark.parametrize("options", [{"softmax_scale": 1.0}, {"softcap": 30.0}, {}], ids=str)
@pytest.mark.parametrize("hidden", [44, 270])
@pytest.mark.parametrize("dtype", [HALF_NAME, "fp32"])
def test_large_negative_biases_hide_as_a_mask_does(
    value: float, options: dict[str, float], hidden: int, dtype: str
) -> None:
    """Padding comes last and is visited first: the scores that all rows begin with are such."""
    config = built(heads=2, heads_k=2)
    config.need("split")
    q, k, v = (t.requires_grad_() for t in draw_inputs(3, config, 1, 70, 600))
    seen = torch.arange(600) < 600 - hidden
    bias = torch.where(seen, 0.0, value).to(DTYPES[dtype])
    for mode in (False, True):
        with deterministic_mode(mode, 256):
            out, expected = (
                flash_attn_func(q, k, v, attn_bias=bias, **options),
                flash_attn_func(q, k, v, attn_mask=seen, **options),
            )
            assert_close("out", out, expected.double(), expected)
            if WITH_BACKWARD:
                for got, right in zip(
                    *(torch.autograd.grad(o, (q, k, v), torch.ones_like(o)) for o in (out, expected)),
                    strict=True,
                ):
                    assert_close("gradient", got, right.double(), right)


def test_a_query_all_of_whose_biases_are_the_least_attends_as_without() -> None:
    config = built(heads=1, heads_k=1)
    config.need("split")
    q, k, v = draw_inputs(3, config, 1, 3, 300)
    for dtype in (HALF, torch.float32):
        out = flash_attn_func(q, k, v, attn_bias=torch.full((3, 300), torch.finfo(dtype).min, dtype=dtype))
        assert (out - flash_attn_func(q, k, v)).abs().max() < 5e-3  # scores that large have a coarser grid


def test_nan_in_a_bias_is_not_lost() -> None:
    config = built(heads=1, heads_k=1)
    config.need("split")
    q, k, v = draw_inputs(3, config, 1, 3, 300)
    bias = torch.zeros(3, 300)
    bias[1, 77] = math.nan
    out = flash_attn_func(q, k, v, attn_bias=bias)
    assert out[0, 1].isnan().all()
    assert out[0, [0, 2]].isfinite().all()


@pytest.mark.parametrize("processors", [1, 132])
@pytest.mark.parametrize("kind", ["(B, 1, 1, S)", "(B, H, S, S)"])
def test_tiles_that_a_mask_hides_are_not_computed(machine: Machine, kind: str, processors: int) -> None:
    """Half of the keys hidden in blocks: about half of the instructions forward; backward, hidden tiles are still loaded."""
    config = built(heads=2, heads_k=2)
    config.need("fwd", "split")
    machine.set(processors=processors)
    q, k, v = (t.requires_grad_() for t in draw_inputs(3, config, 1, 256, 2048))
    keys = (torch.arange(2048) // 512 % 2).bool()
    size = (1, 2, 256, 2048) if "H" in kind else (1, 1, 1, 2048)
    passes = {"forward": None, "backward": None} if WITH_BACKWARD else {"forward": None}
    counts: dict[str, list[int]] = {name: [] for name in passes}
    for mask in (torch.ones(size, dtype=torch.bool), keys.expand(size)):
        with deterministic_mode(split_size=2048):
            before = machine.instructions
            out = flash_attn_func(q, k, v, attn_mask=mask)
            counts["forward"].append(machine.instructions - before)
            if WITH_BACKWARD:
                before = machine.instructions
                out.sum().backward()
                counts["backward"].append(machine.instructions - before)
    for name, (full, half) in counts.items():
        assert half < {"forward": 0.7, "backward": 0.8}[name] * full, f"{name}: {half} of {full}"


@pytest.mark.parametrize("queries", [1, 64, 256])
@pytest.mark.parametrize("kind", ["simple", "own mask", "slopes"])
def test_taller_thread_blocks_take_fewer_instructions_to_the_same_bits(
    machine: Machine, kind: str, queries: int
) -> None:
    """Calls that fill the GPU have 128 rows in a thread block, if they have so many; one multiprocessor is soon full.

    Simple calls have the standard kernel for that, others up to head dim 64 a split kernel.
    """
    config = built(heads=4, heads_k=4, alibi=kind == "slopes")
    config.need("fwd", "split")
    q, k, v = draw_inputs(3, config, 1, queries, 1000)
    generator = torch.Generator().manual_seed(1)
    own = {"attn_bias": torch.randn(4, queries, 1000, generator=generator).to(HALF)}
    if kind == "own mask":
        own["attn_mask"] = torch.rand(queries, 1000, generator=generator) < 0.9
    results, counts = [], []
    for processors in (1, 132):
        machine.set(processors=processors)
        before = machine.instructions
        with deterministic_mode(split_size=1024):
            results.append(flash_attn_func(q, k, v, **own, **config.kwargs()))
        counts.append(machine.instructions - before)
    assert_same_bits(results[0], results[1], "128 rows, 64 rows")
    assert (
        counts[0] < 0.95 * counts[1]
        if (DIM <= 64 or kind == "simple") and queries > 64
        else counts[0] == counts[1]
    ), counts
    assert kind != "simple" or queries <= 64 or counts[0] < 0.8 * counts[1]


@problems(16)
@given(
    st.lists(st.sampled_from(["seen", "hidden", "in part"]), min_size=1, max_size=9),
    st.integers(-127, 0),
    st.integers(1, 300),
    st.sampled_from(["mask", "bias", "both", "own mask", "own mask and bias"]),
    st.booleans(),
    st.sampled_from(
        [0, 256, 2048] if DIM <= 64 else [256, 2048]
    ),  # with the mode off, steps of the softmax differ above 64
    st.integers(0, 2**31),
)
def test_simple_calls_have_the_bits_of_others(
    tiles: list[str], short: int, len_q: int, kind: str, causal: bool, split_size: int, seed: int
) -> None:
    """A mask that all queries share, and a mask or bias whose rows lie in pieces of sixteen bytes: kernels that ask for little, and those for all calls."""
    config = built(heads=2, heads_k=1, causal=causal)
    config.need("fwd", "split")
    MACHINE.set(processors=1)  # so that upstream does not split keys where the mode is off
    generator = torch.Generator().manual_seed(seed)
    len_k = 128 * len(tiles) + short
    q, k, v = (t.requires_grad_() for t in draw_inputs(seed, config, 2, len_q, len_k))
    own = {}
    if kind != "bias":
        share = torch.tensor(
            [{"seen": 1.0, "hidden": 0.0, "in part": 0.5}[tile] for tile in tiles]
        ).repeat_interleave(128)[:len_k]
        own["attn_mask"] = torch.rand(2, 1, 1, len_k, generator=generator) < share
        if "own" in kind:
            wide = torch.zeros(2, 2, len_q, len_k + -len_k % 16, dtype=torch.bool)
            rows = torch.rand(2, 2, len_q, 1, generator=generator)
            seen = torch.rand(2, 2, len_q, len_k, generator=generator) < share
            own["attn_mask"] = wide[..., :len_k].copy_(seen & (rows < 0.9))
    if "bias" in kind or kind == "both":
        bias = torch.randn(1, 2, len_q, len_k + -len_k % 8, generator=generator).to(HALF)
        bias[torch.rand(bias.shape, generator=generator) < 0.02] = -math.inf
        own["attn_bias"] = bias[..., :len_k]
    results = []
    for where in ("in one thread block", "in the standard kernel"):
        with route(where), deterministic_mode(split_size > 0, split_size or 256):
            out, lse, _ = flash_attn_func(q, k, v, causal=causal, return_attn_probs=True, **own)
        results.append(Rows(out.flatten(0, 1), lse.transpose(0, 1).flatten(1)))
    results[0].assert_same(results[1], "64 rows, 128 rows")


@problems(12)
@given(
    st.lists(st.booleans(), min_size=1, max_size=11),
    st.integers(-100, 0),
    st.sampled_from([{}, {"causal": True}, {"window_size": (300, 0)}]),
    st.booleans(),
)
def test_a_mask_that_all_queries_share_has_the_bits_of_one_written_out(
    tiles: list[bool], short: int, options: dict[str, Any], mode: bool
) -> None:
    """Kernels look ahead in the one, and agree on each tile of the other at a barrier. Backward, simple masks have kernels of their own."""
    config = built(heads=1, heads_k=1)
    config.need("split")
    len_k = len(tiles) * 128 + short
    inputs = [t.requires_grad_() for t in draw_inputs(3, config, 2, 70, len_k)]
    shared = torch.tensor(tiles).repeat_interleave(128)[:len_k].expand(2, 1, 1, len_k).clone()
    shared[0] &= torch.rand(len_k, generator=torch.Generator().manual_seed(1)) < 0.5
    results, gradients = [], []
    with deterministic_mode(mode, 256):
        for mask in (shared, shared.expand(2, 1, 70, len_k).contiguous()):
            out, lse, _ = flash_attn_func(*inputs, attn_mask=mask, return_attn_probs=True, **options)
            results.append(Rows(out.flatten(0, 1), lse.transpose(0, 1).flatten(1)))
            gradients.append(torch.autograd.grad(out, inputs, torch.ones_like(out)) if WITH_BACKWARD else ())
    results[0].assert_same(results[1], "shared and written out")
    for name, left, right in zip(("dq", "dk", "dv"), *gradients, strict=False):
        assert_same_bits(left, right, f"{name}, shared and written out")
    if not any(tiles):
        assert (out == 0).all()


@pytest.mark.parametrize("dtype", [HALF, torch.float32])
@pytest.mark.parametrize("processors", [1, 132])
def test_a_bias_has_the_same_bits_from_any_byte_on(
    machine: Machine, processors: int, dtype: torch.dtype
) -> None:
    """Rows that all begin with a piece of 16 bytes, anywhere in one, and whose keys do not follow each other, which are read one by one."""
    config = built(heads=2, heads_k=2)
    config.need("split")
    machine.set(processors=processors)
    inputs = [t.requires_grad_() for t in draw_inputs(3, config, 1, 140, 304)]
    bias = torch.randn(2, 140, 304, generator=torch.Generator().manual_seed(1)).to(dtype)
    upstream = torch.randn(1, 140, 2, DIM, generator=torch.Generator().manual_seed(2)).to(HALF)

    def results(bias: torch.Tensor) -> list[torch.Tensor]:
        with deterministic_mode(split_size=256):
            out = flash_attn_func(*inputs, attn_bias=bias)
            return [out, *(torch.autograd.grad(out, inputs, upstream) if WITH_BACKWARD else ())]

    expected = results(bias)
    views = [strided(bias[None], offset, (0, 1, 2, 3), 1)[0] for offset in range(1, 8)]
    odd = torch.empty(2, 140, 305, dtype=dtype)[..., 1:].copy_(bias)
    for view in (*views, odd, bias.transpose(1, 2).contiguous().transpose(1, 2)):
        for name, result, own in zip(("out", "dq", "dk", "dv"), expected, results(view), strict=False):
            assert_same_bits(own, result, f"{name}, strides {view.stride()}, offset {view.storage_offset()}")


@pytest.mark.parametrize("dtype", [HALF_NAME, "fp32"])
@pytest.mark.parametrize(("scale", "softcap"), [(None, 0.0), (0.125, 0.0), (None, 30.0)])
def test_no_number_but_infinity_hides(dtype: str, scale: float | None, softcap: float) -> None:
    """The inverse of a scale may be one number of float16, or a sum of two."""
    config = built(heads=2, heads_k=1, softcap=softcap)
    config.need("split")
    assert_that_no_number_but_infinity_hides(config, dtype, scale, WITH_BACKWARD)


@pytest.mark.parametrize("causal", [False, True])
def test_a_mask_is_read_alike_wherever_it_lies(causal: bool) -> None:
    config = built(heads=2, heads_k=1, causal=causal)
    config.need("split")
    assert_that_a_mask_is_read_alike_wherever_it_lies(config, WITH_BACKWARD)


def test_hidden_keys_and_values_change_nothing() -> None:
    config = built(heads=1, heads_k=1)
    config.need("split")
    q, k, v = draw_inputs(3, config, 1, 40, 700)
    mask = torch.rand(1, 1, 1, 700, generator=torch.Generator().manual_seed(1)) < 0.5
    bias = torch.zeros(1, 1, 1, 700)
    results = []
    for garbage in (0.0, 60000.0):
        for tensor in (k, v):
            tensor[:, ~mask[0, 0, 0]] = garbage
        bias[~mask] = math.nan if garbage else 0.0
        with deterministic_mode(split_size=256):
            out, lse, _ = flash_attn_func(q, k, v, attn_mask=mask, attn_bias=bias, return_attn_probs=True)
        results.append(Rows(out[0], lse[0]))
    results[1].assert_same(results[0], "garbage in hidden keys")


@pytest.mark.skipif(not WITH_BACKWARD, reason="built without backward kernels (--kernels)")
def test_a_query_without_keys_has_zeros_and_finite_gradients() -> None:
    config = built(heads=2, heads_k=1)
    config.need("split", "bwd")
    inputs = [t.requires_grad_() for t in draw_inputs(3, config, 1, 70, 300)]
    mask = torch.ones(70, 300, dtype=torch.bool)
    mask[5], mask[64:] = False, False
    bias = torch.zeros(70, 300)
    bias[9] = -math.inf
    inputs.append(bias.requires_grad_())
    out, lse, _ = flash_attn_func(*inputs[:3], attn_mask=mask, attn_bias=bias, return_attn_probs=True)
    for row in (5, 9, *range(64, 70)):
        assert (out[0, row] == 0).all()
        assert (lse[0, :, row] == math.inf).all()
    gradients = torch.autograd.grad(out, inputs, torch.ones_like(out))
    assert all(g.isfinite().all() for g in gradients)
    assert (gradients[0][0, 5] == 0).all()
    assert (gradients[3][5] == 0).all()


def test_views_are_kept_for_gradients_as_views() -> None:
    q, k, v = (t.requires_grad_() for t in draw_inputs(3, built(heads=2, heads_k=2), 2, 60, 80))
    built().need("split")
    own = {
        "attn_mask": mask(2, 1, 1, 80).expand(2, 2, 60, 80),
        "attn_bias": torch.zeros(1, 1, 60, 1).to(HALF).expand(2, 2, 60, 80),
    }
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        flash_attn_func(q, k, v, **own)
    for given_view in own.values():
        assert any(t.data_ptr() == given_view.data_ptr() and t.stride() == given_view.stride() for t in kept)


def test_packed_forms_are_the_plain_ones() -> None:
    config = built(heads=2, heads_k=2)
    config.need("split")
    q, k, v = draw_inputs(3, config, 2, 90, 90)
    own = {"attn_mask": torch.rand(2, 1, 90, 90) < 0.5, "attn_bias": torch.randn(2, 90, 90).to(HALF)}
    expected = flash_attn_func(q, k, v, **own)
    assert_same_bits(flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), **own), expected, "qkvpacked")
    assert_same_bits(flash_attn_kvpacked_func(q, torch.stack([k, v], 2), **own), expected, "kvpacked")
    starts = torch.tensor([0, 90, 180], dtype=torch.int32)
    rows = {name: t.expand(2, 2, 90, 90).transpose(0, 1).reshape(2, 180, 90) for name, t in own.items()}
    flat = [t.reshape(180, 2, DIM) for t in (q, k, v)]
    expected = flash_attn_varlen_func(*flat, starts, starts, 90, 90, **rows)
    assert_same_bits(
        flash_attn_varlen_qkvpacked_func(torch.stack(flat, 1), starts, 90, **rows),
        expected,
        "varlen_qkvpacked",
    )
    assert_same_bits(
        flash_attn_varlen_kvpacked_func(flat[0], torch.stack(flat[1:], 1), starts, starts, 90, 90, **rows),
        expected,
        "varlen_kvpacked",
    )


def call(**own: Any) -> None:
    q, k = torch.randn(2, 5, 4, DIM).to(HALF), torch.randn(2, 7, 2, DIM).to(HALF)
    dropout = own.pop("dropout_p", 0.0)
    flash_attn_func(q, k, k, dropout, **own)


def call_equal_heads(**own: Any) -> None:
    q, k = torch.randn(2, 5, 2, DIM).to(HALF), torch.randn(2, 7, 2, DIM).to(HALF)
    flash_attn_func(q, k, k, **own)


def call_packed(**own: Any) -> None:
    q, k, starts = (
        torch.randn(10, 4, DIM).to(HALF),
        torch.randn(14, 2, DIM).to(HALF),
        [torch.tensor(s, dtype=torch.int32) for s in ([0, 5, 10], [0, 7, 14])],
    )
    flash_attn_varlen_func(q, k, k, *starts, 5, 7, **own)


def call_cache(**own: Any) -> None:
    q, k = torch.randn(2, 5, 4, DIM).to(HALF), torch.randn(2, 7, 2, DIM).to(HALF)
    flash_attn_with_kvcache(q, k, k, cache_seqlens=torch.tensor([5, 6], dtype=torch.int32), **own)


def mask(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bool)


DENSE = r"allowed is \(2 or 1, 4 or 2 or 1, 5 or 1, 7 or 1\)"


small = {"attn_bias": torch.ones(5, 7).to(HALF)}
fp16 = pytest.mark.skipif(HALF_NAME != "fp16", reason="of fp16 alone: bfloat16 has no such limit")
OTHER_HALF, OTHER_DTYPE = {
    "fp16": (torch.bfloat16, "attn_bias has dtype BFloat16; allowed is that of q, Half, or Float"),
    "bf16": (torch.float16, "attn_bias has dtype Half; allowed is that of q, BFloat16, or Float"),
}[HALF_NAME]


@pytest.mark.parametrize(
    ("call", "own", "error", "message"),
    [
        (call, {"attn_mask": mask(2, 4, 5, 6)}, ValueError, rf"attn_mask has shape \[2, 4, 5, 6\]; {DENSE}"),
        (call, {"attn_mask": mask(3, 5, 7)}, ValueError, DENSE),
        (
            call_equal_heads,
            {"attn_mask": mask(3, 5, 7)},
            ValueError,
            r"allowed is \(2 or 1, 2 or 1, 5 or 1, 7 or 1\)",
        ),
        (call, {"attn_mask": mask(1, 2, 4, 5, 7)}, ValueError, DENSE),
        (call, {"attn_bias": torch.tensor(1.0).to(HALF)}, ValueError, DENSE),
        (call, {"attn_mask": torch.ones(5, 7)}, TypeError, "attn_mask has dtype Float; allowed is Bool"),
        (call, {"attn_bias": torch.ones(5, 7).to(OTHER_HALF)}, TypeError, OTHER_DTYPE),
        (call, {"attn_bias": torch.ones(5, 7, dtype=torch.int32)}, TypeError, "attn_bias has dtype Int"),
        (
            call,
            {"attn_mask": mask(5, 7), "dropout_p": 0.1},
            NotImplementedError,
            "do not go with dropout_p > 0",
        ),
        (call, {"attn_bias": torch.ones(5, 7), "softmax_scale": 0.0}, ValueError, "softmax_scale=0"),
        pytest.param(
            call,
            small | {"softmax_scale": 1e-6},
            ValueError,
            "of dtype Half does not go with softmax_scale=1e-06; Float does",
            marks=fp16,
        ),
        pytest.param(
            call,
            small | {"softcap": 1e-6},
            ValueError,
            "of dtype Half does not go with softcap=1e-06; Float does",
            marks=fp16,
        ),
        (
            call_packed,
            {"attn_mask": mask(2, 4, 5, 7)},
            ValueError,
            r"allowed is \(4 or 2 or 1, 10 \(all queries\) or 1, 7 or 1\), or \(2 or 1, 4 or 2 or 1, 1, 7 or 1\)",
        ),
        (call_packed, {"attn_mask": mask(5, 7)}, ValueError, "all queries"),
        (call_cache, {"attn_mask": mask(5, 6)}, ValueError, DENSE),
        (
            call_cache,
            {"attn_mask": mask(5, 7), "cache_leftpad": torch.tensor([0, 1], dtype=torch.int32)},
            NotImplementedError,
            "leftpad_k: mask the padding",
        ),
    ],
)
def test_what_does_not_fit_is_named(
    call: Any, own: dict[str, Any], error: type[Exception], message: str
) -> None:
    built().need("split")
    with pytest.raises(error, match=message):
        call(**own)


@problems(25)
@given(
    configs(),
    st.integers(1, 40),
    st.integers(0, 300),
    st.sampled_from(["", "none, rotated", "appended", "appended, rotated", "appended, rotated in pairs"]),
    st.sampled_from([1, 132]),
    st.integers(0, 2**31),
)
def test_a_mask_and_a_bias_of_nothing_change_no_bit(
    config: Config, new: int, before: int, keys: str, processors: int, seed: int
) -> None:
    """Kernels of their own ask at run time what others are compiled for: keys to append, softcap, slopes; and rotary embeddings."""
    config.need("split")
    sequence = Draw(seed).sequence(config, new, before + new)
    capacity, held = before + new + 7, before if "appended" in keys else before + new
    angles = torch.outer(torch.arange(capacity), 0.7 ** torch.arange(DIM // 4)).float()
    options: dict[str, Any] = {"cache_seqlens": torch.tensor([held], dtype=torch.int32), **config.kwargs()}
    if "rotated" in keys:
        options |= {
            "rotary_cos": angles.cos().to(HALF),
            "rotary_sin": angles.sin().to(HALF),
            "rotary_interleaved": "pairs" in keys,
        }
    nothing = {
        "attn_mask": torch.ones(capacity, dtype=torch.bool),
        "attn_bias": torch.zeros(1).expand(1, new, capacity),
    }
    found = []
    for own in ({}, nothing):
        caches = tuple(
            torch.full((1, capacity, *known.shape[1:]), math.nan).to(known.dtype)
            for known in (sequence.k, sequence.v)
        )
        for buffer, known in zip(caches, (sequence.k, sequence.v), strict=True):
            buffer[0, :held] = known[:held]
        fresh = (sequence.k[None, held:], sequence.v[None, held:]) if keys else ()
        MACHINE.set(processors, order=seed % 100)
        with deterministic_mode(split_size=256):
            out, lse = flash_attn_with_kvcache(
                sequence.q[None], *caches, *fresh, return_softmax_lse=True, **options, **own
            )
        found.append((Rows(out[0], lse[0]), torch.cat(caches)[:, : before + new]))
    found[1][0].assert_same(found[0][0], "with a mask and a bias of nothing")
    assert_same_bits(found[1][1], found[0][1], "keys and values in the cache")


def test_a_call_says_so_where_mask_and_bias_were_left_out() -> None:
    """--kernels …,no-bias; and all else is as it was."""
    config = built(heads=2, heads_k=2, causal=True, alibi=True)
    if f"split_hdim{DIM}_{HALF_NAME}_causal" not in KERNELS:
        pytest.skip("built without the causal split kernels (--kernels)")
    sequence = Draw(5).sequence(config, 20, 300)
    with deterministic_mode(split_size=256):
        rows = dense(config, [sequence])
    assert_accurate(config, rows, sequence)
    inputs = [t[None] for t in (sequence.q, sequence.k, sequence.v)]
    own = {"attn_mask": mask(20, 300)}
    if flash_attn_2_cuda.has_attn_bias:
        with deterministic_mode(split_size=256):
            assert_same_bits(
                flash_attn_func(*inputs, **config.kwargs(), **own)[0],
                rows.out,
                "with a mask that hides nothing",
            )
    else:
        with pytest.raises(NotImplementedError, match="this wheel was built without attn_mask and attn_bias"):
            flash_attn_func(*inputs, causal=True, **own)


def test_a_call_leaves_nothing_to_the_next() -> None:
    """Mask and bias reach C++ beside upstream's arguments: a call that fails must not hand them on."""
    config = built(heads=4, heads_k=2)
    config.need("fwd", "split")
    q, k, v = draw_inputs(3, config, 2, 5, 7)
    expected = flash_attn_func(q, k, v)
    with pytest.raises(ValueError, match="attn_mask"):
        flash_attn_func(q, k, v, attn_mask=mask(2, 4, 5, 6))
    flash_attn_func(q, k, v, attn_mask=mask(1, 7) & False)
    assert_same_bits(flash_attn_func(q, k, v), expected, "after a call with a mask")


def test_a_bias_alone_may_require_a_gradient() -> None:
    """Only the bias requires a gradient."""
    config = built(heads=2, heads_k=2)
    config.need("split", "bwd")
    q, k, v = draw_inputs(3, config, 1, 60, 80)
    bias = torch.zeros(60, 80).requires_grad_()
    MACHINE.set(order=1, resident=3)
    (gradient,) = torch.autograd.grad(flash_attn_func(q, k, v, attn_bias=bias).float().pow(2).sum(), bias)
    assert gradient.shape == bias.shape
    assert gradient.abs().sum() > 0
    assert (
        gradient.sum(-1).abs().max() < 2 * torch.finfo(HALF).eps
    )  # adding to all keys of a query changes nothing


@pytest.mark.parametrize("causal", [False, True])
def test_blocks_of_keys_that_no_query_sees(causal: bool) -> None:
    config = built(heads=2, heads_k=1, causal=causal)
    config.need("fwd", "split", "bwd")
    assert_that_blocks_of_keys_may_be_left_out(config, 70, 600)
