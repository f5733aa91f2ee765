"""Attention on a cache of keys and values: appended to in place, in pages or not."""

from typing import Any, NamedTuple

import torch
from flash_attn.cute.cache_utils import get_jit_cache
from flash_attn.cute.cute_dsl_utils import (
    get_broadcast_dims,
    maybe_contiguous,
    to_cute_tensor,
    torch2cute_dtype_map,
)
from flash_attn.cute.fork_append import Append, AppendKernel
from flash_attn.cute.fork_cache_checks import Cache, check, check_splits
from flash_attn.cute.fork_compile import cute, once
from flash_attn.cute.fork_traced import traced_kvcache
from flash_attn.cute.fork_window import sides
from flash_attn.cute.interface import _flash_attn_fwd, _get_device_arch
from flash_attn.cute.testing import is_fake_mode
from torch import Tensor

kernels: Any = get_jit_cache("fwd_append")  # that append, as they are compiled
Window = tuple[int | None, int | None]


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    learnable_sink: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    block_table: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of new queries on a cache, as ``flash_attn.flash_attn_with_kvcache``; forward alone.

    With ``k`` and ``v`` the cache is updated in place first: the rows of each sequence are written behind the
    ``cache_seqlens`` tokens that it has. Nothing is read on the host, so a CUDA graph may hold the call. What
    the cache holds past a sequence's end does not matter: it may be NaN.

    Args:
        q: (batch, seqlen_q, heads, head_dim), float16 or bfloat16; head dims are multiples of 16.
        k_cache, v_cache: (sequences, capacity, heads_k, head_dim), or with ``page_table`` (pages, page size,
            heads_k, head_dim), with pages of any size. Used in place, so rows begin at multiples of 16 bytes.
        k, v: (batch, seqlen_new, heads_k, head_dim); with them ``cache_seqlens`` is asked for.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2), of q's dtype; rotary_dim is a multiple of 16.
            They turn k, each by its position, and q: in a causal call or one with a window each query by its
            own, counted from ``cache_seqlens``, else all by ``cache_seqlens``. The arithmetic is float32,
            rounded at the end.
        cache_seqlens: int, or int32 (batch): tokens in the cache before the call. None: the cache is full.
        cache_batch_idx: int32 (batch), which of the cache's sequences; not with pages. None: the first ones.
        cache_leftpad: not supported.
        page_table: int32 (batch, pages of a sequence); ``block_table`` is the same.
        softmax_scale: None: head_dim ** -0.5.
        causal, window_size: aligned to the end of the keys, new ones included. None or -1: no limit.
        softcap: 0: none.
        rotary_interleaved: turn dimensions 0 and 1, 2 and 3, …; else 0 and rotary_dim / 2, ….
        learnable_sink: (heads), a logit for each.
        num_splits: as in ``flash_attn_varlen_func``; 0 is 1. On compute capability 9.x no more than 1, but
            with the mode on, which warns once and cuts keys at multiples of ``split_size``.
        return_softmax_lse: also return the log-sum-exp, float32 (batch, heads, seqlen_q); -inf where a query
            sees no key.
        out: (batch, seqlen_q, heads, head_dim of v), of q's dtype, where to put the result; its rows begin at
            multiples of 16 bytes.

    A sequence that does not fit its cache: nothing is written past the end. Queries that would need what is
    missing are NaN, with a causal mask or a window without a right side; in other calls all queries of the
    sequence are. Queries behind the rotary tables are NaN.

    Raises:
        ValueError: an argument does not fit; it names which.
        NotImplementedError: cache_leftpad; more splits than kernels of this GPU have.
    """
    if page_table is not None and block_table is not None:
        raise ValueError("page_table and block_table are two names of one argument; give one")
    table = page_table if page_table is not None else block_table
    if torch.compiler.is_compiling() and cache_leftpad is None:
        return traced_kvcache(
            q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, table,
            softmax_scale, causal, window_size, softcap, rotary_interleaved, learnable_sink, num_splits,
            return_softmax_lse, out,
        )  # fmt: skip
    cache = Cache(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        k=k,
        v=v,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        cache_seqlens=cache_seqlens,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        table=table,
        learnable_sink=learnable_sink,
        out=out,
    )
    check(cache)
    check_splits(num_splits, _get_device_arch())
    left, right = sides(*window_size)
    right = 0 if causal else right
    prepared = prepare(cache, return_softmax_lse, (left, right), rotary_interleaved)
    out, lse, *_ = _flash_attn_fwd(
        prepared.q,
        k_cache,
        v_cache,
        seqused_q=prepared.used[0],
        seqused_k=prepared.used[1],
        max_seqlen_q=q.shape[1],
        page_table=prepared.table,
        softmax_scale=softmax_scale,
        causal=causal,
        softcap=softcap,
        window_size_left=left,
        window_size_right=right,
        learnable_sink=_dense(learnable_sink),
        num_splits=max(num_splits, 1),
        return_lse=return_softmax_lse,
        out=prepared.out,
        lse=prepared.lse,
        pages_by_row=True,
    )
    return (out, lse) if return_softmax_lse else out


class Prepared(NamedTuple):
    """What attention takes of a cache."""

    q: Tensor
    table: Tensor
    used: Tensor  # (2, batch), int32: queries and keys
    out: Tensor
    lse: Tensor | None


def prepare(cache: Cache, wants_lse: bool, window: Window, interleaved: bool) -> Prepared:
    """Append new keys and values, turn them and the queries, and say what attention may read."""
    q = _strided(cache.q)
    given = (cache.k, cache.v, cache.rotary_cos, cache.rotary_sin)
    k, v, cos, sin = (None if t is None else _strided(t) for t in given)
    batch, seqlen_q, heads, _ = q.shape
    lengths = cache.cache_seqlens
    if isinstance(lengths, int):
        lengths = torch.full((batch,), lengths, dtype=torch.int32, device=q.device)
    in_pages = cache.table is not None
    table = _dense(cache.table) if in_pages else _empty(q, (batch, 1), torch.int32)
    out = cache.out
    if out is None:
        out = _empty(q, (batch, seqlen_q, heads, cache.v_cache.shape[-1]), q.dtype)
    prepared = Prepared(
        q=q if cos is None else _empty(q, q.shape, q.dtype),
        table=table,
        used=_empty(q, (2, batch), torch.int32),
        out=out,
        lse=_empty(q, (batch, heads, seqlen_q), torch.float32) if wants_lse else None,
    )
    append = Append(
        in_pages=in_pages,
        rotary=None if cos is None else "interleaved" if interleaved else "halves",
        by_row=window != (None, None),
        ends_at_diagonal=window[1] == 0,
    )
    turned = None if cos is None else prepared.q
    floats = (q, turned, k, v, cache.k_cache, cache.v_cache)
    tables = (_dense(lengths), _dense(cache.cache_batch_idx), table, cos, sin)
    written = (prepared.out, prepared.lse, prepared.used)
    _launch(append, q.dtype, (*floats, *tables, *written))
    return prepared


def _empty(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=like.device)


def _strided(tensor: Tensor) -> Tensor:
    """Rows as kernels load them, and no dimension that is one element many times, as kernels are compiled."""
    tensor = maybe_contiguous(tensor)
    return tensor.contiguous() if 0 in tensor.stride() else tensor


def _dense(tensor: Tensor | None) -> Tensor | None:
    """A table whose last dimension lies dense, as kernels are compiled for; of one element too."""
    if tensor is None or tensor.stride(-1) == 1:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


@once
def _launch(append: Append, dtype: torch.dtype, tensors: tuple[Tensor | None, ...]) -> None:
    """Run the kernel; where tensors have no values, compile it."""
    # A kernel is compiled for dimensions that are one element many times, as those of an expanded table.
    key = (dtype, append, *(None if t is None else get_broadcast_dims(t) for t in tensors))
    if key not in kernels:
        of_floats = [dtype == t.dtype if t is not None else True for t in tensors]
        kernels[key] = cute.compile(
            AppendKernel(torch2cute_dtype_map[dtype], append),
            *(
                to_cute_tensor(t, assumed_align=16 if floats else 4)
                for t, floats in zip(tensors, of_floats, strict=True)
            ),
            cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
            options="--enable-tvm-ffi",
        )
    q = tensors[0]
    if not is_fake_mode() and q is not None and q.shape[0] > 0:
        kernels[key](*tensors)
