"""Masks and biases of every shape, and what they must give."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from flash_attn import deterministic_mode, flash_attn_func
from harness import DTYPES, Config, Draw, Sequence, assert_same_bits, reference
from torch import Tensor


def strided(values: Tensor, offset: int, order: tuple[int, ...], gap: int) -> Tensor:
    """The same values, begun so many elements into a storage, with the dimensions in that order there, and gaps between keys."""
    shape = [values.shape[n] for n in order]
    shape[-1] *= gap
    storage = torch.zeros(offset + math.prod(shape), dtype=values.dtype, device=values.device)
    view = storage[offset:].view(shape)[..., ::gap].permute(*sorted(range(len(order)), key=order.__getitem__))
    with torch.no_grad():
        view.copy_(values)
    return view.detach()


def whole(tensor: Tensor, config: Config, size: tuple[int, int, int]) -> Tensor:
    """Expanded to (batch, heads, queries, keys)."""
    if tensor.shape[1] == config.heads_k != config.heads:
        tensor = tensor.repeat_interleave(config.heads // config.heads_k, 1)
    return tensor.expand(size[0], config.heads, *size[1:])


def by_definition(
    config: Config, dtype: torch.dtype, inputs: list[Tensor], mask: Tensor | None, upstream: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Results and gradients of a dense batch by operations of PyTorch in that type."""
    q, k, v, *bias = leaves = [t.detach().to(dtype).requires_grad_() for t in inputs]
    size = (q.shape[0], q.shape[1], k.shape[1])
    out = torch.stack(
        [
            reference(
                config,
                Sequence(
                    q[n],
                    k[n],
                    v[n],
                    None if mask is None else whole(mask, config, size)[n],
                    *(whole(t, config, size)[n] for t in bias),
                ),
                dtype=dtype,
            ).out
            for n in range(size[0])
        ]
    )
    return out, list(torch.autograd.grad(out, leaves, upstream.to(dtype)))


def assert_close(what: str, got: Tensor, exact: Tensor, plain: Tensor) -> None:
    assert got.isfinite().all(), what
    error = (got.double() - exact).abs().max().item()
    allowed = 2 * (plain.double() - exact).abs().max().item() + 2e-3 * max(1.0, exact.abs().max().item())
    assert error <= allowed, f"{what} is off by {error:.3g}, PyTorch's own error allows {allowed:.3g}"


def draw_inputs(seed: int, config: Config, batch: int, len_q: int, len_k: int) -> list[Tensor]:
    draw = Draw(seed)
    sequences = [draw.sequence(config, len_q, len_k) for _ in range(batch)]
    return [torch.stack([getattr(s, name) for s in sequences]) for name in "qkv"]


def ways(bias: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The same bias (heads, queries, keys) as kernels bring it by different ways."""
    yield (
        "rows at sixteen bytes",
        torch.nn.functional.pad(bias, [0, -bias.shape[-1] % 8])[..., : bias.shape[-1]],
    )
    yield "rows anywhere", strided(bias[None], 1, (0, 1, 2, 3), 1)[0]
    yield "keys apart", bias.transpose(1, 2).contiguous().transpose(1, 2)


def everything(
    inputs: list[Tensor], upstream: Tensor, with_gradients: bool, **options: Any
) -> dict[str, Tensor]:
    """Results of a call with the mode on, and gradients."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    if "attn_bias" in options:
        options["attn_bias"] = options["attn_bias"].detach().requires_grad_()
        leaves.append(options["attn_bias"])
    with deterministic_mode(split_size=256):
        out, lse, _ = flash_attn_func(*leaves[:3], return_attn_probs=True, **options)
        gradients = torch.autograd.grad(out, leaves, upstream) if with_gradients else ()
    return {
        "out": out.detach(),
        "lse": lse.detach(),
        **dict(zip(("dq", "dk", "dv", "dbias"), gradients, strict=False)),
    }


def assert_that_a_mask_is_read_alike_wherever_it_lies(config: Config, with_gradients: bool = True) -> None:
    """Rows at multiples of eight bytes, whole octets of keys and not, rows anywhere, keys apart; any byte but 0 is True."""
    draw = Draw(7)
    for len_k in (512, 300):
        sequence = draw.sequence(config, 140, len_k)
        inputs = [t[None] for t in (sequence.q, sequence.k, sequence.v)]
        upstream = torch.randn(inputs[0].shape, generator=draw.generator, device=inputs[0].device).to(
            inputs[0].dtype
        )
        mask = torch.rand((config.heads, 140, len_k), generator=draw.generator, device=inputs[0].device) < 0.5
        mask[:, 70:, :200] = False
        alike = {
            "keys apart": strided(mask[None], 0, (0, 1, 2, 3), 2)[0],
            "rows anywhere": strided(mask[None], 1, (0, 1, 2, 3), 1)[0],
            "rows at eight bytes": torch.nn.functional.pad(mask, [8, 8 + -len_k % 8])[..., 8 : 8 + len_k],
            "other bytes": (
                mask.to(torch.uint8)
                * torch.randint(1, 256, mask.shape, generator=draw.generator, device=mask.device)
            )
            .to(torch.uint8)
            .view(torch.bool),
        }
        expected = everything(
            inputs, upstream, with_gradients, **config.kwargs(), attn_mask=alike["keys apart"]
        )
        exact, plain = (
            by_definition(config, dtype, inputs, mask[None], upstream)
            for dtype in (torch.float64, inputs[0].dtype)
        )
        assert_close("out", expected["out"], exact[0], plain[0])
        for n, name in enumerate(("dq", "dk", "dv") if with_gradients else ()):
            assert_close(name, expected[name], exact[1][n], plain[1][n])
        for way, own in alike.items():
            for name, result in everything(
                inputs, upstream, with_gradients, **config.kwargs(), attn_mask=own
            ).items():
                assert_same_bits(result, expected[name], f"{way}, {len_k} keys, {name}")


def assert_that_no_number_but_infinity_hides(
    config: Config, dtype: str, scale: float | None, with_gradients: bool = True
) -> None:
    """-inf in a bias has the bits of a mask; what lies in keys that a mask hides changes none, and NaN elsewhere is not lost.

    With a softcap scores before the bias are small, and each of their bits weighs: it would show if what lies beside a
    score moved one.
    """
    draw = Draw(5)
    sequence = draw.sequence(config, 140, 301)
    inputs = [t[None] for t in (sequence.q, sequence.k, sequence.v)]
    upstream = torch.randn(inputs[0].shape, generator=draw.generator, device=inputs[0].device).to(
        inputs[0].dtype
    )
    uniform = torch.rand((config.heads, 140, 301), generator=draw.generator, device=inputs[0].device)
    mask, bias = uniform < 0.7, (8 * uniform - 4).to(DTYPES[dtype])
    mask[:, 3], mask[:, :, 128:192] = False, False
    nothing, largest = torch.zeros_like(bias), 65280.0 if dtype == "bf16" else 65504.0
    options = {"softmax_scale": scale, "softcap": config.softcap}
    hidden = everything(inputs, upstream, with_gradients, **options, attn_mask=mask)
    both = everything(inputs, upstream, with_gradients, **options, attn_mask=mask, attn_bias=bias)
    for way, own in ways(nothing.masked_fill(~mask, -math.inf)):
        found = everything(inputs, upstream, with_gradients, **options, attn_bias=own)
        for name, result in hidden.items():
            assert_same_bits(found[name], result, f"-inf for a mask, {way}, {name}")
    for garbage in (math.nan, math.inf, -math.inf, largest, -largest):
        for way, own in ways(bias.masked_fill(~mask, garbage)):
            found = everything(inputs, upstream, with_gradients, **options, attn_mask=mask, attn_bias=own)
            for name, result in found.items():
                assert_same_bits(result, both[name], f"{garbage} in hidden keys, {way}, {name}")
    bias[0, 7, 13], mask[0, 7, 13] = math.nan, True
    for way, own in ways(bias):
        out = everything(inputs, upstream, False, **options, attn_mask=mask, attn_bias=own)["out"]
        assert out[0, 7, 0].isnan().all(), f"NaN in a key that is seen, {way}"
        out[0, 7, 0] = both["out"][0, 7, 0]
        assert_same_bits(out, both["out"], f"the other rows beside NaN, {way}")


def assert_that_blocks_of_keys_may_be_left_out(config: Config, len_q: int, len_k: int) -> None:
    """Where a mask that all queries share hides whole blocks of keys, gradients are right, and the same beside other masks."""
    block = 128
    inputs = draw_inputs(7, config, 3, len_q, len_k)
    blocks = -(-len_k // block)
    hides = [lambda n: n % 2 == 0, lambda n: n != blocks - 1, lambda n: 0 < n < blocks - 1]
    rows = [[not hidden(key // block) for key in range(len_k)] for hidden in hides]
    mask = torch.tensor(rows, device=inputs[0].device)[:, None, None]
    upstream = torch.randn(inputs[0].shape, device=inputs[0].device).to(inputs[0].dtype)

    def gradients(which: slice) -> tuple[Tensor, ...]:
        leaves = [t[which].detach().clone().requires_grad_() for t in inputs]
        out = flash_attn_func(*leaves, **config.kwargs(), attn_mask=mask[which])
        return torch.autograd.grad(out, leaves, upstream[which])

    exact = by_definition(config, torch.float64, inputs, mask, upstream)[1]
    plain = by_definition(config, DTYPES[config.dtype], inputs, mask, upstream)[1]
    for mode in (False, True):
        with deterministic_mode(mode, 256):
            together = gradients(slice(None))
            alone = [gradients(slice(n, n + 1)) for n in range(3)]
        for name, got, right, other in zip(("dq", "dk", "dv"), together, exact, plain, strict=True):
            assert_close(f"{name}, mode {mode}", got, right, other)
        hidden = ~mask.expand(-1, 1, 1, len_k)[:, 0, 0]
        assert not together[1][hidden].any(), "dk of a hidden key"
        assert not together[2][hidden].any(), "dv of a hidden key"
        for n, own in enumerate(alone if mode else ()):
            for name, got, whole_batch in zip(("dq", "dk", "dv"), own, together, strict=True):
                assert_same_bits(got[0], whole_batch[n], f"{name} of sequence {n}")
