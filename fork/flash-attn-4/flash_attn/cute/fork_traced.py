"""The functions as torch.compile and torch.export trace them: operators, with their shapes and gradients.

Sizes, bounds of windows and lengths may be symbolic. An operator calls the function that it stands for, so
bits and errors are the same. A call that is not traced comes by none of this. Gradients obey the mode that
is in force where they are computed, which is that of the process: nobody notes that of the forward call.

Not traced are calls with functions, or lists or tuples of tensors, among their arguments (score_mod, block
sparsity and their kind), and those of SM 10.0's schedules: there the graph breaks.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from flash_attn.cute.fork_mode import get_deterministic_mode
from torch import Tensor

__all__ = ["traced", "traced_kvcache"]

_TABLES = (
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, "
    "Tensor? longest_q, Tensor? longest_k, SymInt? max_seqlen_q, SymInt? max_seqlen_k"
)
_OPTIONS = "float? softmax_scale, bool causal, SymInt? window_left, SymInt? window_right, float softcap"
_CACHE = (
    "(Tensor q, Tensor{} k_cache, Tensor{} v_cache, Tensor? k, Tensor? v, Tensor? rotary_cos, "
    "Tensor? rotary_sin, Tensor? cache_seqlens, SymInt? length, Tensor? cache_batch_idx, Tensor? page_table, "
    "Tensor? learnable_sink, "
    f"{_OPTIONS}, bool rotary_interleaved, SymInt num_splits, bool return_lse) -> (Tensor, Tensor)"
)


class _Context(Protocol):
    """What autograd keeps of a call."""

    saved_tensors: tuple[Tensor | None, ...]
    options: tuple[Any, ...]
    longest: tuple[Any, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...


def _operator(name: str, schema: str, changes: tuple[str, ...] = ()) -> Any:
    return torch.library.custom_op(
        f"flash_attn_cute::{name}", mutates_args=changes, device_types="cuda", schema=schema
    )


def _or(tensor: Tensor | None, number: int | None) -> Any:
    return number if tensor is None else tensor


# Forward ----------------------------------------------------------------------------------------------------


@_operator(
    "forward",
    f"(Tensor q, Tensor k, Tensor v, {_TABLES}, Tensor? page_table, Tensor? learnable_sink, {_OPTIONS}, "
    "SymInt num_splits, bool? pack_gqa, bool deterministic, bool return_lse) -> (Tensor, Tensor)",
)
def _forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Any, cu_seqlens_k: Any, seqused_q: Any, seqused_k: Any,
    longest_q: Any, longest_k: Any, max_seqlen_q: Any, max_seqlen_k: Any, page_table: Any,
    learnable_sink: Any, softmax_scale: Any, causal: bool, window_left: Any, window_right: Any,
    softcap: float, num_splits: int, pack_gqa: Any, deterministic: bool, return_lse: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    from flash_attn.cute import interface

    q, k, v = q.detach(), k.detach(), v.detach()
    options = {
        "softmax_scale": softmax_scale, "causal": causal, "window_size": (window_left, window_right),
        "softcap": softcap, "num_splits": num_splits, "pack_gqa": pack_gqa, "return_lse": return_lse,
    }  # fmt: skip
    if learnable_sink is not None:
        options["learnable_sink"] = learnable_sink.detach()
    tables = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, page_table)
    if (
        all(table is None for table in tables)
        and max_seqlen_q is max_seqlen_k is longest_q is longest_k is None
    ):
        out, lse = interface.flash_attn_func(q, k, v, **options)
    else:
        out, lse = interface.flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_q=seqused_q,
            seqused_k=seqused_k, max_seqlen_q=_or(longest_q, max_seqlen_q),
            max_seqlen_k=_or(longest_k, max_seqlen_k), page_table=page_table, **options,
        )  # fmt: skip
    return out, _no_lse(q) if lse is None else lse


def _no_lse(q: Tensor) -> Tensor:
    return q.new_empty((0,), dtype=torch.float32)


def _out(q: Tensor, v: Tensor) -> Tensor:
    dtype = q.dtype if q.dtype in (torch.float16, torch.bfloat16) else torch.bfloat16
    return q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=dtype)


def _lse(q: Tensor) -> Tensor:
    *batch, tokens, heads, _ = q.shape
    return q.new_empty((*batch, heads, tokens), dtype=torch.float32)


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _out(q, v), _lse(q) if rest[-1] else _no_lse(q)


# Gradients --------------------------------------------------------------------------------------------------


@_operator(
    "backward",
    "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_TABLES}, Tensor? learnable_sink, {_OPTIONS}, bool deterministic) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _backward(
    dout: Tensor, dlse: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_seqlens_q: Any,
    cu_seqlens_k: Any, seqused_q: Any, seqused_k: Any, longest_q: Any, longest_k: Any, max_seqlen_q: Any,
    max_seqlen_k: Any, learnable_sink: Any, softmax_scale: Any, causal: bool, window_left: Any,
    window_right: Any, softcap: float, deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from flash_attn.cute import interface

    dq, dk, dv = (t.new_empty(t.shape) for t in (q, k, v))  # in the order that the traced shapes have
    dq, dk, dv, *dsink = interface._flash_attn_bwd(
        q, k, v, out, dout, lse, softmax_scale, causal, softcap, window_size_left=window_left,
        window_size_right=window_right, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        seqused_q=seqused_q, seqused_k=seqused_k, max_seqlen_q=_or(longest_q, max_seqlen_q),
        max_seqlen_k=_or(longest_k, max_seqlen_k), dq=dq, dk=dk, dv=dv, dlse=dlse,
        deterministic=deterministic or get_deterministic_mode().enabled, learnable_sink=learnable_sink,
    )  # fmt: skip
    return dq, dk, dv, dsink[0] if dsink else q.new_empty((0,))


@_backward.register_fake
def _(dout: Tensor, dlse: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    sink = rest[10]
    dsink = q.new_empty((0,)) if sink is None else sink.new_empty(sink.shape)
    return (*(t.new_empty(t.shape) for t in (q, k, v)), dsink)


def _keep(ctx: _Context, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *rest = inputs
    tables, (longest, rest) = rest[:6], (rest[6:8], rest[8:])
    _, sink, scale, causal, left, right, softcap, _, _, deterministic, _ = rest
    ctx.save_for_backward(q, k, v, *output, *tables, sink)
    ctx.longest, ctx.options = tuple(longest), (scale, causal, left, right, softcap, deterministic)


def _differentiate(ctx: _Context, dout: Any, dlse: Any) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, *tables, sink = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    dq, dk, dv, dsink = _backward(dout, dlse, q, k, v, out, lse, *tables, *ctx.longest, sink, *ctx.options)
    return dq, dk, dv, *(None,) * 9, None if sink is None else dsink, *(None,) * 9


_forward.register_autograd(_differentiate, setup_context=_keep)


# Caches -----------------------------------------------------------------------------------------------------


def _on_a_cache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Any, v: Any, rotary_cos: Any, rotary_sin: Any,
    cache_seqlens: Any, length: Any, cache_batch_idx: Any, page_table: Any, learnable_sink: Any,
    softmax_scale: Any, causal: bool, window_left: Any, window_right: Any, softcap: float,
    rotary_interleaved: bool, num_splits: int, return_lse: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    from flash_attn.cute import fork_kvcache

    found = fork_kvcache.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, _or(cache_seqlens, length), cache_batch_idx,
        page_table=page_table, softmax_scale=softmax_scale, causal=causal,
        window_size=(window_left, window_right), softcap=softcap, rotary_interleaved=rotary_interleaved,
        learnable_sink=learnable_sink, num_splits=num_splits, return_softmax_lse=return_lse,
    )  # fmt: skip
    return found if return_lse else (found, _no_lse(q))


def _shapes_on_a_cache(q: Tensor, k_cache: Tensor, v_cache: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _out(q, v_cache), _lse(q) if rest[-1] else _no_lse(q)


# One that appends changes its caches, and says so; for the other, a compiler need not keep any.
_read_cache = _operator("read_cache", _CACHE.format("", ""))(_on_a_cache)
_changed = ("k_cache", "v_cache")
_append_to_cache = _operator("append_to_cache", _CACHE.format("(a!)", "(b!)"), _changed)(_on_a_cache)
for _cache_operator in (_read_cache, _append_to_cache):
    _cache_operator.register_fake(_shapes_on_a_cache)


# Public functions' arguments --------------------------------------------------------------------------------


def traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """What stands for a public function where it is traced."""

    def dense(
        q: Any, k: Any, v: Any, qv: Any = None, gather_kv_indices: Any = None, softmax_scale: Any = None,
        causal: bool = False, window_size: Any = (None, None), learnable_sink: Any = None,
        softcap: float = 0.0, num_splits: int = 1, pack_gqa: Any = None, deterministic: bool = False,
        *others: Any, return_lse: bool = False, **named: Any,
    ) -> Any:  # fmt: skip
        if qv is not None or gather_kv_indices is not None or others or _has_any(named):
            torch._dynamo.graph_break(msg=_NOT_TRACED)
            return function(
                q, k, v, qv, gather_kv_indices, softmax_scale, causal, window_size, learnable_sink, softcap,
                num_splits, pack_gqa, deterministic, *others,
                **({} if len(others) > _BEFORE_LSE[0] else {"return_lse": return_lse}), **named,
            )  # fmt: skip
        return _traced(
            q, k, v, (None,) * 8, None, learnable_sink, softmax_scale, causal, window_size, softcap,
            num_splits, pack_gqa, deterministic, return_lse,
        )  # fmt: skip

    def packed(
        q: Any, k: Any, v: Any, qv: Any = None, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None,
        max_seqlen_q: Any = None, max_seqlen_k: Any = None, min_seqlen_k: Any = None, seqused_q: Any = None,
        seqused_k: Any = None, gather_kv_indices: Any = None, page_table: Any = None,
        softmax_scale: Any = None, causal: bool = False, window_size: Any = (None, None),
        learnable_sink: Any = None, softcap: float = 0.0, num_splits: int = 1, pack_gqa: Any = None,
        deterministic: bool = False, *others: Any, return_lse: bool = False, **named: Any,
    ) -> Any:  # fmt: skip
        if qv is not None or gather_kv_indices is not None or others or _has_any(named):
            torch._dynamo.graph_break(msg=_NOT_TRACED)
            return function(
                q, k, v, qv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, min_seqlen_k, seqused_q,
                seqused_k, gather_kv_indices, page_table, softmax_scale, causal, window_size, learnable_sink,
                softcap, num_splits, pack_gqa, deterministic, *others,
                **({} if len(others) > _BEFORE_LSE[1] else {"return_lse": return_lse}), **named,
            )  # fmt: skip
        longest = [t if isinstance(t, Tensor) else None for t in (max_seqlen_q, max_seqlen_k)]
        numbers = [None if isinstance(n, Tensor) else n for n in (max_seqlen_q, max_seqlen_k)]
        return _traced(
            q, k, v, (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, *longest, *numbers), page_table,
            learnable_sink, softmax_scale, causal, window_size, softcap, num_splits, pack_gqa, deterministic,
            return_lse,
        )  # fmt: skip

    found: Callable[..., Any] = packed if function.__name__ == "flash_attn_varlen_func" else dense
    return found


_NOT_TRACED = (
    "torch.compile traces flash_attn.cute without qv, gather_kv_indices, score_mod, mask_mod, aux_tensors, "
    "block sparsity and scheduler_metadata"
)
_BEFORE_LSE = (7, 6)  # of other arguments by place, those before return_lse: dense, packed


def _has_any(named: dict[str, Any]) -> bool:
    return any(value is not None and value is not False for value in named.values())


def _traced(
    q: Tensor, k: Tensor, v: Tensor, tables: Any, page_table: Any, learnable_sink: Any, softmax_scale: Any,
    causal: bool, window_size: Any, softcap: float, num_splits: int, pack_gqa: Any, deterministic: bool,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    left, right = window_size
    inputs = (q, k, v) if learnable_sink is None else (q, k, v, learnable_sink)
    wants = return_lse or (torch.is_grad_enabled() and any(t.requires_grad for t in inputs))
    out, lse = _forward(
        q, k, v, *tables, page_table, learnable_sink, softmax_scale, bool(causal), left, right,
        0.0 if softcap is None else softcap, num_splits, pack_gqa, bool(deterministic), wants,
    )  # fmt: skip
    return out, lse if return_lse else lse.detach() if wants else None


def traced_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Any, v: Any, rotary_cos: Any, rotary_sin: Any,
    cache_seqlens: Any, cache_batch_idx: Any, page_table: Any, softmax_scale: Any, causal: bool,
    window_size: Any, softcap: float, rotary_interleaved: bool, learnable_sink: Any, num_splits: int,
    return_lse: bool, out: Any,
) -> Any:  # fmt: skip
    """``flash_attn_with_kvcache``, traced. It has no gradients."""
    is_tensor = isinstance(cache_seqlens, Tensor)
    operator = _read_cache if k is None and v is None else _append_to_cache
    tensors = [None if t is None else t.detach() for t in (q, k_cache, v_cache, k, v, rotary_cos, rotary_sin)]
    found, lse = operator(
        *tensors, cache_seqlens if is_tensor else None, None if is_tensor else cache_seqlens,
        cache_batch_idx, page_table, None if learnable_sink is None else learnable_sink.detach(),
        softmax_scale, bool(causal), *window_size, softcap, bool(rotary_interleaved), num_splits,
        bool(return_lse),
    )  # fmt: skip
    if out is not None:
        found = out.copy_(found)
    return (found, lse) if return_lse else found
