"""torch.compile over the functions: one graph, forward and backward, with sizes that change or come from values.

The graphs run on the CPU here. Their operators have kernels of this file there: attention by its definition, and its
gradients by autograd. So what is shown is what torch is told: shapes, gradients, which argument goes where.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import machine
import pytest
import torch
from flash_attn import cute
from flash_attn.cute import fork_traced
from torch import Tensor

FORWARD, BACKWARD = fork_traced._forward, fork_traced._backward


def _pieces(q: Tensor, k: Tensor, cu_q: Any, cu_k: Any) -> list[tuple[Any, Any]]:
    """Where the sequences of packed tensors lie; of a batch, all of it."""
    if cu_q is None:
        return [(..., ...)]
    spans = [[slice(*ends) for ends in pairwise(cu.tolist())] for cu in (cu_q, cu_k)]
    return list(zip(*spans, strict=True))


def _batched(piece: Any, *tensors: Tensor) -> list[Tensor]:
    """(batch, heads, tokens, head_dim), in float32."""
    return [(t if piece is ... else t[None, piece]).transpose(1, 2).float() for t in tensors]


def _heads_of(piece: Any) -> Any:
    """Where a log-sum-exp, (batch, heads, tokens) or (heads, tokens), has it."""
    return piece if piece is ... else (slice(None), piece)


def _weights(q: Tensor, k: Tensor, sink: Any, scale: Any, causal: bool, left: Any, right: Any) -> Any:
    """Of keys and of the sink, and the log-sum-exp."""
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * scale
    diagonal = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
    keys = torch.arange(k.shape[2])[None]
    right = 0 if causal else right
    hidden = torch.zeros(scores.shape[-2:], dtype=torch.bool)
    if left is not None and left >= 0:
        hidden |= keys < diagonal - left
    if right is not None and right >= 0:
        hidden |= keys > diagonal + right
    scores = scores.masked_fill(hidden, -math.inf)
    if sink is not None:
        scores = torch.cat([scores, sink.float()[:, None, None].expand(*scores.shape[:-1], 1)], dim=-1)
    p, lse = scores.softmax(-1), scores.logsumexp(-1)
    return p[..., : k.shape[2]], p[..., k.shape[2] :], lse


def attention(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """By its definition: the arguments of the operator."""
    cu_q, cu_k, _, _, longest_q, _, max_q, _, _, sink, scale, *window = rest[:14]
    if cu_q is not None:
        assert (longest_q if max_q is None else max_q) >= int(cu_q.diff().max())
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    lse = torch.empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=torch.float32)
    for rows, keys in _pieces(q, k, cu_q, cu_k):
        (queries,), (k_, v_) = _batched(rows, q), _batched(keys, k, v)
        p, _, found = _weights(queries, k_, sink, scale or q.shape[-1] ** -0.5, *window)
        result = (p @ v_.repeat_interleave(p.shape[1] // v_.shape[1], 1)).transpose(1, 2).to(q.dtype)
        out[rows] = result if rows is ... else result[0]
        lse[_heads_of(rows)] = found if rows is ... else found[0]
    return out, lse


def gradients(
    dout: Tensor, dlse: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    """Of the same: the arguments of the operator."""
    cu_q, cu_k, *_ = rest[:8]
    sink, scale, *window = rest[8:13]
    scale = scale or q.shape[-1] ** -0.5
    grads = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v)]
    dsink = q.new_zeros(0) if sink is None else torch.zeros_like(sink)
    for rows, keys in _pieces(q, k, cu_q, cu_k):
        (queries, d_out, out_), (k_, v_) = _batched(rows, q, dout, out), _batched(keys, k, v)
        groups = queries.shape[1] // k_.shape[1]
        p, of_sink, _ = _weights(queries, k_, sink, scale, *window)
        delta = (d_out * out_).sum(-1, keepdim=True)
        if dlse is not None:
            delta = delta - dlse[_heads_of(rows)][..., None]
        ds = p * (d_out @ v_.repeat_interleave(groups, 1).mT - delta) * scale
        found = [ds @ k_.repeat_interleave(groups, 1), ds.mT @ queries, p.mT @ d_out]
        for place, (grad, one) in enumerate(zip(grads, found, strict=True)):
            summed = one.unflatten(1, (-1, groups)).sum(2) if place > 0 else one
            where = keys if place > 0 else rows
            grad[where] = summed.transpose(1, 2) if where is ... else summed.transpose(1, 2)[0].to(grad.dtype)
        if sink is not None:
            dsink -= (of_sink * delta).sum((0, 2, 3)).to(sink.dtype)
    return (*grads, dsink)


def _outside_autograd(call: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with torch.no_grad():
            return tuple(t.detach().clone() for t in call(*args))

    return run


@pytest.fixture(autouse=True, scope="module")
def on_the_cpu() -> None:
    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        out, lse = attention(*args)
        return out, lse if args[-1] else lse.new_empty(0)

    def on_a_cache(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Any, v: Any, *rest: Any) -> Any:
        used = rest[3] if rest[2] is None else int(rest[2][0])
        if k is not None:
            k_cache[:, used : used + k.shape[1]], v_cache[:, used : used + k.shape[1]] = k, v
            used += k.shape[1]
        options = (None,) * 9 + (None, *rest[7:11])
        out, lse = attention(q, k_cache[:, :used], v_cache[:, :used], *options)
        return out, lse if rest[-1] else lse.new_empty(0)

    FORWARD.register_kernel("cpu")(_outside_autograd(forward))
    BACKWARD.register_kernel("cpu")(_outside_autograd(gradients))
    for operator in (fork_traced._read_cache, fork_traced._append_to_cache):
        operator.register_kernel("cpu")(_outside_autograd(on_a_cache))


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).half()


def sequences(lengths: list[int], heads: int = 4, heads_k: int = 2) -> dict[str, Any]:
    """Packed, each with as many keys as queries and 3 more."""
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    ends_k = torch.tensor([0, *(n + 3 for n in lengths)]).cumsum(0).int()
    total, total_k = int(ends[-1]), int(ends_k[-1])
    return {
        "q": draw(total, heads, 8), "k": draw(total_k, heads_k, 8), "v": draw(total_k, heads_k, 16),
        "cu_seqlens_q": ends, "cu_seqlens_k": ends_k,
        "max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths) + 3,
    }  # fmt: skip


def batch(size: int, length: int, heads: int = 4, heads_k: int = 2) -> dict[str, Any]:
    keys = length + 3
    return {
        "q": draw(size, length, heads, 8), "k": draw(size, keys, heads_k, 8), "v": draw(size, keys, heads_k, 16)
    }  # fmt: skip


def by_definition(inputs: dict[str, Any], options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    tables = [inputs.get(name) for name in ("cu_seqlens_q", "cu_seqlens_k")]
    longest = [inputs.get(name) for name in ("max_seqlen_q", "max_seqlen_k")]
    return attention(
        inputs["q"], inputs["k"], inputs["v"], *tables, None, None, None, None, *longest, None,
        options.get("learnable_sink"), options.get("softmax_scale"), options.get("causal", False),
        *options.get("window_size", (None, None)),
    )  # fmt: skip


def assert_traced(compiled: Callable[..., Any], inputs: dict[str, Any], options: dict[str, Any]) -> None:
    """Results and gradients of a compiled function are those of the definition, which autograd has without it."""
    found: list[list[Tensor]] = []
    names = [*"qkv", *(["learnable_sink"] if "learnable_sink" in options else [])]
    for call in (lambda i: compiled(**i, return_lse=True), lambda i: by_definition(i, i)):
        given = {**inputs, **options}
        leaves = {name: given[name].detach().clone().requires_grad_() for name in names}
        out, lse = call({**given, **leaves})
        loss = (out.float() * torch.arange(out.shape[-1])).sum() + lse.sum()
        found.append([out.detach(), lse.detach(), *torch.autograd.grad(loss, list(leaves.values()))])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=5e-2, rtol=5e-2)


OPTIONS = [
    {},
    {"causal": True, "softmax_scale": 0.3},
    {"window_size": (3, -1)},
    {"window_size": (None, 2)},
    {"learnable_sink": torch.linspace(-1, 1, 4)},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
def test_one_graph_serves_every_size(options: dict[str, Any]) -> None:
    """Of the first size one is compiled (Dynamo begins anew for a float, which it takes as a constant)."""
    graphs = []

    def backend(graph: Any, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return torch._dynamo.backends.debugging.aot_eager(graph, inputs)

    for function, make in (
        (cute.flash_attn_func, batch),
        (cute.flash_attn_varlen_func, lambda size, length: sequences([length] * size + [length + 2])),
    ):
        torch._dynamo.reset()
        graphs.clear()
        compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=backend)
        of_the_first = 0
        for size, length in ((3, 7), (5, 9), (6, 13)):  # no two sizes of the first are equal
            assert_traced(compiled, make(size, length), options)
            of_the_first = len(graphs) if size == 3 else of_the_first
        assert len(graphs) == of_the_first


@pytest.mark.parametrize("left", [0, 3])
@pytest.mark.parametrize("lengths", [[3, 5], [1, 1], [9, 1, 4], [7, 2, 3, 1, 6]], ids=str)
def test_lengths_and_bounds_that_come_from_values(lengths: list[int], left: int) -> None:
    """Tokens that are left out within the graph, a longest sequence by ``.item()``, a window by number."""
    inputs = sequences(lengths)
    keep = torch.cat([torch.ones(inputs["q"].shape[0], dtype=torch.bool), torch.zeros(3, dtype=torch.bool)])
    padded = torch.cat([inputs.pop("q"), torch.full((3, 4, 8), math.nan).half()])
    longest = torch.tensor([inputs.pop("max_seqlen_q"), inputs.pop("max_seqlen_k")])

    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        out = _UNPADDED(padded, keep, longest, left, inputs)
    expected, _ = by_definition(
        {**inputs, "q": padded[keep], "max_seqlen_q": int(longest[0])}, {"window_size": (left, -1)}
    )
    torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)


@torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
def _UNPADDED(padded: Tensor, keep: Tensor, longest: Tensor, left: int, inputs: dict[str, Any]) -> Tensor:  # noqa: N802
    out: Tensor = cute.flash_attn_varlen_func(
        padded[keep.nonzero()[:, 0]], max_seqlen_q=longest[0].item(), max_seqlen_k=longest[1].item(),
        window_size=(left, -1), **inputs,
    )[0]  # fmt: skip
    return out


def test_a_longest_sequence_may_be_a_tensor() -> None:
    inputs = sequences([3, 5])
    tensors = {name: torch.tensor(inputs[name]) for name in ("max_seqlen_q", "max_seqlen_k")}
    assert_traced(
        torch.compile(cute.flash_attn_varlen_func, fullgraph=True, backend="aot_eager"),
        {**inputs, **tensors},
        {},
    )


@pytest.mark.parametrize("appended", [0, 2])
def test_a_cache_is_changed_where_keys_are_appended(appended: int) -> None:
    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def step(q: Tensor, cache: Tensor, new: Any, used: Any) -> Tensor:
        given = () if new is None else (new, new)
        out, lse = cute.flash_attn_with_kvcache(
            q + 0, cache[0], cache[1], *given, cache_seqlens=used, causal=True, return_softmax_lse=True
        )
        return out + lse.mean() * 0

    for used in (5, 6, torch.tensor([7, 7], dtype=torch.int32)):
        q, cache = draw(2, 2, 4, 8), torch.stack([draw(2, 12, 4, 8)] * 2)
        new = draw(2, appended, 4, 8) if appended else None
        before, length = cache.clone(), int(used) if isinstance(used, int) else 7
        out = step(q, cache, new, used)
        if new is not None:
            before[:, :, length : length + 2] = new
        assert torch.equal(cache, before)
        tables = (None,) * 9 + (None, None, True, None, None)
        expected, _ = attention(q, *before[:, :, : length + appended], *tables)
        torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)


def test_no_result_has_an_lse_that_nobody_asked_for() -> None:
    compiled = torch.compile(cute.flash_attn_func, fullgraph=True, backend="aot_eager")
    inputs = batch(2, 5)
    with torch.no_grad():
        assert compiled(**inputs)[1] is None
    inputs["q"].requires_grad_()
    assert not compiled(**inputs)[1].requires_grad


def test_export_and_opcheck() -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = cute.flash_attn_func(q, k, v, causal=True)[0]
            return out

    inputs = batch(2, 5)
    sizes = {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}
    exported = torch.export.export(Layer(), tuple(inputs.values()), dynamic_shapes=(sizes,) * 3)
    other = batch(3, 9)
    expected, _ = by_definition(other, {"causal": True})
    torch.testing.assert_close(exported.module()(*other.values()), expected, atol=2e-2, rtol=2e-2)
    tensors = [t.requires_grad_() for t in inputs.values()]
    rest = ((None,) * 8, None, None, None, True, None, None, 0.0, 1, None, False, True)
    torch.library.opcheck(FORWARD, (*tensors, *rest[0], *rest[1:]))


def test_what_is_not_traced_says_so() -> None:
    compiled = torch.compile(cute.flash_attn_func, fullgraph=True, backend="aot_eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="without qv, gather_kv_indices, score_mod"):
        compiled(**batch(2, 5), score_mod=lambda *_: None)


def test_a_gradient_of_a_gradient_is_an_error() -> None:
    tensors = [t.requires_grad_() for t in batch(2, 5).values()]
    out, _ = FORWARD(*tensors, *(None,) * 10, None, False, None, None, 0.0, 1, None, False, True)
    (dq,) = torch.autograd.grad(out.sum(), tensors[0], create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        dq.sum().backward()


@pytest.mark.gpu
@pytest.mark.skipif(not machine.GPU, reason="compares with calls that are not traced")
@pytest.mark.parametrize("mode", [False, True], ids=["off", "on"])
def test_bits_are_those_of_calls_that_are_not_traced(mode: bool) -> None:
    torch._dynamo.reset()
    with cute.deterministic_mode(mode), torch.no_grad():
        compiled = torch.compile(cute.flash_attn_func, fullgraph=True, dynamic=True, backend="aot_eager")
        for length in (1, 300, 4500):
            q, k, v = (torch.randn(2, length, 4, 64, device="cuda").half() for _ in range(3))
            for window in ((-1, -1), (100, -1), (-1, 0)):
                expected = cute.flash_attn_func(q, k, v, window_size=window, return_lse=True)
                found = compiled(q, k, v, window_size=window, return_lse=True)
                for one, other in zip(found, expected, strict=True):
                    assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.skipif(not machine.GPU, reason="compares with calls that are not traced")
def test_gradients_have_the_bits_of_calls_that_are_not_traced() -> None:
    torch._dynamo.reset()
    cute.set_deterministic_mode(True)
    lengths = torch.tensor([0, 300, 309, 1000], dtype=torch.int32, device="cuda")
    places = {"cu_seqlens_q": lengths, "cu_seqlens_k": lengths, "max_seqlen_q": 691, "max_seqlen_k": 691}
    found = []
    for function in (
        cute.flash_attn_varlen_func,
        torch.compile(cute.flash_attn_varlen_func, fullgraph=True, backend="aot_eager"),
    ):
        torch.manual_seed(0)
        leaves = [torch.randn(1000, 4, 64, device="cuda").half().requires_grad_() for _ in range(3)]
        out, lse = function(*leaves, **places, causal=True, return_lse=True)
        found.append([out, lse, *torch.autograd.grad(out.float().square().sum() + lse.sum(), leaves)])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
