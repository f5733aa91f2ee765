"""Gradients of what no sequence has are zero: of rows past ``cu_seqlens[-1]``, and of tokens that none uses.

Rows of a packed buffer behind its last sequence are cleared by the kernel that comes before upstream's
backward kernel. Each of its thread blocks looks where the sequences end, and takes its part of what lies
behind. So a call whose buffers end there launches and writes nothing more.

Tokens that ``seqused_q`` or ``seqused_k`` leaves out lie between others. Gradients are cleared beforehand, in
calls that give one of these alone.
"""

import functools
from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Constexpr, Int32, const_expr
from quack.compile_utils import make_fake_tensor

__all__ = ["clear", "fakes", "rest", "unused_are_zero"]

VECTOR = 8  # elements of 16 bits that a thread writes at once


def unused_are_zero(function: Callable[..., Any]) -> Callable[..., Any]:
    """``_flash_attn_bwd``, whose gradients are cleared first where a call says which tokens are used."""

    @functools.wraps(function)
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        for used, gradients in (("seqused_q", {"dq": q}), ("seqused_k", {"dk": k, "dv": v})):
            if kwargs.get(used) is not None:
                for name, like in gradients.items():
                    given = kwargs.get(name)
                    kwargs[name] = torch.zeros_like(like) if given is None else given.zero_()
        return function(q, k, v, *args, **kwargs)

    return call


def rest(cu_seqlens_q: Any, cu_seqlens_k: Any, dq: Any, dk: Any, dv: Any) -> tuple[Any, ...]:
    """What the kernel clears of: gradients in packed buffers, and where the keys of these end; else None."""
    keys = (None, None) if cu_seqlens_k is None else (dk, dv)
    return (None if cu_seqlens_q is None else dq, *keys, cu_seqlens_k)


def fakes(dtype: Any, has_queries: bool, has_keys: bool) -> tuple[Any, ...]:
    """The same, to compile for."""
    div = 128 // dtype.width
    total, heads = cute.sym_int(), cute.sym_int()

    def packed(is_there: bool) -> Any:
        shape = (total, heads, cute.sym_int())
        return make_fake_tensor(dtype, shape, divisibility=div) if is_there else None

    ends = make_fake_tensor(Int32, (cute.sym_int(),), divisibility=1) if has_keys else None
    queries = (cute.sym_int(), cute.sym_int(), cute.sym_int())
    dq = make_fake_tensor(dtype, queries, divisibility=div) if has_queries else None
    return (dq, packed(has_keys), packed(has_keys), ends)


@cute.jit
def clear(mdQ, mdK, mdV, mCuSeqlensQ, mCuSeqlensK, threads: Constexpr):
    """A thread block's part of all rows behind the last sequence."""
    if const_expr(mdQ is not None):
        _clear_rows(mdQ, mCuSeqlensQ, threads)
    if const_expr(mdK is not None):
        _clear_rows(mdK, mCuSeqlensK, threads)
        _clear_rows(mdV, mCuSeqlensK, threads)


@cute.jit
def _clear_rows(mX, mCuSeqlens, threads: Constexpr):
    tidx, _, _ = cute.arch.thread_idx()
    x, y, z = cute.arch.block_idx()
    size_x, size_y, size_z = cute.arch.grid_dim()
    block = x + size_x * (y + size_y * z)
    blocks = size_x * size_y * size_z
    end = mCuSeqlens[mCuSeqlens.shape[0] - 1]
    pieces = mX.shape[2] // VECTOR
    zeros = cute.make_rmem_tensor(VECTOR, mX.element_type)
    zeros.fill(mX.element_type(0.0))
    for row in cutlass.range(end + block, mX.shape[0], blocks, unroll=1):
        for i in cutlass.range(tidx, mX.shape[1] * pieces, threads, unroll=1):
            target = cute.local_tile(mX[row, i // pieces, None], (VECTOR,), (None,))
            cute.autovec_copy(zeros, target[None, i % pieces])
