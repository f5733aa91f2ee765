"""Attention's functions under the names, and with the arguments, of upstream's extension.

Python's half of the binding. It makes the tensors that a call returns and draws dropout's random state; the
library beside it (``core.so``, called through apache-tvm-ffi) checks and launches. Arguments go by place as
in upstream; results are lists. Those that begin with ``fork_`` take attn_mask, attn_bias and,
of forward calls, learnable_sink at their end.

Errors, all of them before a launch:
    RuntimeError: a shape, device or combination that no kernel takes; an error of CUDA's.
    ValueError, TypeError: a rank, length, value or dtype that no call takes, or not the deterministic mode.
    NotImplementedError: what this build does not have.
"""

import contextvars
import sys
import warnings
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import machine

machine.check()  # before the library is loaded, which would miss a symbol

import torch
import tvm_ffi

from . import random_state

if TYPE_CHECKING:
    from types import FrameType

_LIBRARY = Path(__file__).with_name("core.so")
_core = tvm_ffi.load_module(str(_LIBRARY))
_fwd, _varlen_fwd, _fwd_kvcache, _bwd, _varlen_bwd = (
    _core.get_function(name) for name in ("fwd", "varlen_fwd", "fwd_kvcache", "bwd", "varlen_bwd")
)
_fwd_kvcache_short = _core.get_function("fwd_kvcache_short")
tvm_ffi.register_error("NotImplementedError", NotImplementedError)
tvm_ffi.register_error("UserWarning", UserWarning)  # a warning of ours that the user made an error

_warned: set[str] = set()
_PACKAGES = ("flash_attn", "flash_attn_2_cuda", "torch", "tvm_ffi")


def _warn(text: str) -> None:
    """Warn once, of the line that called; a warning that is made an error is raised each time."""
    if text in _warned:
        return
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in _PACKAGES:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)
    _warned.add(text)


tvm_ffi.register_global_func("flash_attn.warn", _warn, override=True)

# The deterministic mode -----------------------------------------------------------------------------------

# A thread's or task's own mode, over the process-wide one: None, or the pair (enabled, split_size).
deterministic_scope: "contextvars.ContextVar[tuple[bool, int] | None]" = contextvars.ContextVar(
    "flash_attn.deterministic_mode", default=None
)
_scope = deterministic_scope.get
check_environment = _core.get_function("check_environment")
_check_split_size = _core.get_function("check_split_size")
_set_process_mode, _process_mode = (_core.get_function(name) for name in ("set_process_mode", "process_mode"))
_PROCESS_WIDE = -1  # in the place of a split size


def check_split_size(split_size: int | None) -> int:
    """split_size, or its default for None; ValueError for one that no kernel can take."""
    in_64_bits = split_size if split_size is None else max(-1, min(split_size, 1 << 62))
    checked: int = _check_split_size(in_64_bits, f"split_size={split_size}")
    return checked


def set_deterministic_mode(enabled: bool, split_size: int | None = None) -> None:
    """Set the process-wide mode; ValueError for tokens that no kernel can take."""
    _set_process_mode(enabled, check_split_size(split_size))


def get_deterministic_mode() -> tuple[bool, int]:
    """The mode that a call made here would use: (enabled, split_size)."""
    scope = deterministic_scope.get()
    if scope is not None:
        return scope
    word = _process_mode()
    return word >= 1 << 32, word & 0x7FFFFFFF


def _split_size() -> int:
    """What a call tells the core: tokens of a chunk, 0 for off, or that the process-wide mode holds."""
    scope = _scope()
    return _PROCESS_WIDE if scope is None else scope[1] if scope[0] else 0


# What there is --------------------------------------------------------------------------------------------


def kernel_set() -> list[str]:
    """Names of the kernels in this library, such as ``split_hdim64_fp16_causal``."""
    return str(_core.get_function("kernel_set")()).splitlines()


NEEDS_GPU = True  # tests run kernels where there is none
has_attn_bias = bool(_core.get_function("has_attn_bias")())
# For tests; both return what was set before. Paths, whatever the shape: go without Is_even_MN (1), fold in
# one thread block of 64 rows (2), apart (4) or in one of 128 rows where the call allows it (8); in turns
# (16); tiles for each head of queries (32); of 64 rows in the split kernels (64). Scratch: cut calls into
# slices whose scratch takes so many bytes, 0: as ever.
_test_paths, _test_scratch = (_core.get_function(name) for name in ("test_paths", "test_scratch"))

# Calls ----------------------------------------------------------------------------------------------------

# What is wanted of a forward call, as in core/binding.cpp: to run it, to check it alone, or to run it if
# kernels can load its tensors as they lie. The answer is whether that was done.
RUN, CHECK, RUN_LOADABLE = range(3)


def _rounded(length: int) -> int:
    return (length + 127) // 128 * 128


def _scalars(p_dropout: Any, softmax_scale: Any, causal: Any, left: Any, right: Any, softcap: Any) -> Any:
    """As the core takes them: callers may give tensors of one number, or numpy's."""
    return (
        *(float(p_dropout), float(softmax_scale), bool(causal)),
        *(index(left), index(right), float(softcap)),
    )


def _empty(like: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype or like.dtype, device=like.device)  # twice as fast as of a tuple


def _signed(*tensors: torch.Tensor | None) -> Any:
    """The tensors with their signs in memory: views such as ``x.conj().imag`` have the other sign there."""
    return [tensor.resolve_neg() if tensor is not None and tensor.is_neg() else tensor for tensor in tensors]


def check_signs(**tensors: torch.Tensor | None) -> None:
    """ValueError for a tensor that is used in place and has other signs in memory."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.is_neg():
            raise ValueError(
                f"{name} is a view whose memory has the other sign (is_neg), and is used in place: give a "
                "tensor that is none, such as resolve_neg() makes"
            )


def _float(like: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.float32, device=like.device)


_Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    p_dropout: float,
    softmax_scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    return_softmax: bool,
    generator: torch.Generator | None,
    attn_mask: torch.Tensor | None = None,
    attn_bias: torch.Tensor | None = None,
    learnable_sink: torch.Tensor | None = None,
) -> _Results:
    """Attention of (b, seqlen, h, d): out, lse; with dropout probabilities, if asked for, and rng_state."""
    if q.dim() != 4:  # which the core refuses, before it asks for results
        options = (0.0, 1.0, False, -1, -1, 0.0, 0, RUN, *_NO_DROPOUT)
        refused: _Results = _fwd(q, k, v, None, None, None, None, None, *options, None)
        return refused
    q, k, v, alibi_slopes, attn_bias, learnable_sink = _signed(
        q, k, v, alibi_slopes, attn_bias, learnable_sink
    )
    b, seqlen_q, h, _ = q.shape
    if out is None:
        out = torch.empty_like(q)
    else:
        check_signs(out=out)
    lse = _float(q, b, h, seqlen_q)
    scalars = (*_scalars(p_dropout, softmax_scale, causal, window_left, window_right, softcap), _split_size())
    scalars += (RUN,)
    if not p_dropout > 0.0:
        _refuse_probabilities(return_softmax)
        _fwd(q, k, v, out, lse, alibi_slopes, attn_mask, attn_bias, *scalars, *_NO_DROPOUT, learnable_sink)
        return out, lse, None, None
    probabilities = None
    if return_softmax:
        probabilities = _empty(q, (b, h, _rounded(seqlen_q), _rounded(k.shape[1])))
    state = random_state.draw(generator, q.device, b * h * 32)
    rng_state = _empty(q, (2,), torch.int64)
    drawn = (probabilities, rng_state, *state)
    _fwd(q, k, v, out, lse, alibi_slopes, attn_mask, attn_bias, *scalars, *drawn, learnable_sink)
    return out, lse, probabilities, rng_state


_NO_DROPOUT = (None, None, 0, 0, None, None)  # probabilities, rng_state, and what draw() gives


def _refuse_probabilities(return_softmax: bool) -> None:
    if return_softmax:
        raise RuntimeError("return_softmax is only supported when p_dropout > 0.0")


def varlen_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    seqused_k: torch.Tensor | None,
    leftpad_k: torch.Tensor | None,
    block_table: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    p_dropout: float,
    softmax_scale: float,
    zero_tensors: bool,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    return_softmax: bool,
    generator: torch.Generator | None,
    attn_mask: torch.Tensor | None = None,
    attn_bias: torch.Tensor | None = None,
    learnable_sink: torch.Tensor | None = None,
) -> _Results:
    """As ``forward``, of packed sequences (total, h, d)."""
    q, k, v, alibi_slopes, attn_bias, learnable_sink = _signed(
        q, k, v, alibi_slopes, attn_bias, learnable_sink
    )
    tables = (cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, block_table)
    scores = (alibi_slopes, attn_mask, attn_bias)
    p_dropout, softmax_scale, *rest = _scalars(
        p_dropout, softmax_scale, causal, window_left, window_right, softcap
    )
    scalars = (index(max_seqlen_q), index(max_seqlen_k), p_dropout, softmax_scale, bool(zero_tensors), *rest)
    scalars += (_split_size(), RUN)
    if q.dim() != 3:
        refused: _Results = _varlen_fwd(q, k, v, None, None, *tables, *scores, *scalars, *_NO_DROPOUT, None)
        return refused
    total_q, h, _ = q.shape
    if out is None:
        out = torch.empty_like(q)
    else:
        check_signs(out=out)
    lse = _float(q, h, total_q)
    if not p_dropout > 0.0:
        _refuse_probabilities(return_softmax)
        _varlen_fwd(q, k, v, out, lse, *tables, *scores, *scalars, *_NO_DROPOUT, learnable_sink)
        return out, lse, None, None
    b = cu_seqlens_q.numel() - 1
    probabilities = None
    if return_softmax:
        probabilities = _empty(q, (b, h, _rounded(max_seqlen_q), _rounded(max_seqlen_k)))
    state = random_state.draw(generator, q.device, b * h * 32)
    rng_state = _empty(q, (2,), torch.int64)
    drawn = (probabilities, rng_state, *state)
    _varlen_fwd(q, k, v, out, lse, *tables, *scores, *scalars, *drawn, learnable_sink)
    return out, lse, probabilities, rng_state


def check_forward(tensors: Any, lengths: Any, longest: Any, scalars: Any) -> None:
    """Raise what a forward call would, without a launch: for tensors that are traced.

    Args:
        tensors: q, k, v, alibi_slopes, attn_mask, attn_bias, learnable_sink, as stand-ins on the CPU of their
            shapes.
        lengths: of packed sequences, cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, block_table; else
            None.
        longest: max_seqlen_q and max_seqlen_k.
        scalars: p_dropout, softmax_scale, causal, window_left, window_right, softcap.
    """
    q, k, v, *others, learnable_sink = tensors
    if lengths is None:
        _fwd(q, k, v, None, None, *others, *scalars, 0, CHECK, *_NO_DROPOUT, learnable_sink)
    else:
        p_dropout, softmax_scale, *rest = scalars
        options = (*longest, p_dropout, softmax_scale, False, *rest, 0, CHECK)
        _varlen_fwd(q, k, v, None, None, *lengths, *others, *options, *_NO_DROPOUT, learnable_sink)


def _filled(q: torch.Tensor, results: Any) -> list[torch.Tensor]:
    """The results with upstream's empty tensors where a call has none."""
    out, lse, probabilities, rng_state = results
    if probabilities is None:
        probabilities = _empty(q, (0,))
    if rng_state is None:
        rng_state = _empty(q, (2,), torch.int64)
    return [out, lse, probabilities, rng_state]


def fwd(q: torch.Tensor, *arguments: Any) -> list[torch.Tensor]:
    """out, lse, probabilities, rng_state; arguments as ``forward``."""
    return _filled(q, forward(q, *arguments))


def varlen_fwd(q: torch.Tensor, *arguments: Any) -> list[torch.Tensor]:
    """out, lse, probabilities, rng_state; arguments as ``varlen_forward``."""
    return _filled(q, varlen_forward(q, *arguments))


fork_fwd, fork_varlen_fwd = fwd, varlen_fwd


def fwd_kvcache(
    q: torch.Tensor,
    kcache: torch.Tensor,
    vcache: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    seqlens_k: torch.Tensor | None,
    rotary_cos: torch.Tensor | None,
    rotary_sin: torch.Tensor | None,
    cache_batch_idx: torch.Tensor | None,
    leftpad_k: torch.Tensor | None,
    block_table: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    out: torch.Tensor | None,
    softmax_scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    rotary_interleaved: bool,
    num_splits: int,
    attn_mask: torch.Tensor | None = None,
    attn_bias: torch.Tensor | None = None,
    learnable_sink: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Out and lse of queries (b, seqlen, h, d) on a cache, to which k and v are appended first."""
    check_signs(k_cache=kcache, v_cache=vcache, out=out)
    q, k, v, rotary_cos, rotary_sin = _signed(q, k, v, rotary_cos, rotary_sin)
    alibi_slopes, attn_bias, learnable_sink = _signed(alibi_slopes, attn_bias, learnable_sink)
    caches = None
    if q.dim() == 4 and q.shape[3] % 8:
        caches = (kcache, vcache)
        q, kcache, vcache, k, v = (_padded(tensor) for tensor in (q, kcache, vcache, k, v))
    result = torch.empty_like(q) if out is None or caches else out
    lse = _float(q, q.shape[0], q.shape[2], q.shape[1]) if q.dim() == 4 else None
    _, *scalars = _scalars(0.0, softmax_scale, causal, window_left, window_right, softcap)
    _fwd_kvcache(
        q, kcache, vcache, result, lse, k, v, seqlens_k, rotary_cos, rotary_sin, cache_batch_idx, leftpad_k,
        block_table, alibi_slopes, attn_mask, attn_bias, *scalars, bool(rotary_interleaved),
        index(num_splits), _split_size(), RUN, learnable_sink,
    )  # fmt: skip
    if caches:
        result = _cut(result, out, caches, (kcache, vcache) if k is not None else None)
    return [result, lse]


fork_fwd_kvcache = fwd_kvcache


def _padded(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """With zeros behind, up to a head dim that is a multiple of 8."""
    return None if tensor is None else torch.nn.functional.pad(tensor, [0, -tensor.shape[-1] % 8])


def _cut(result: torch.Tensor, out: torch.Tensor | None, caches: Any, appended: Any) -> torch.Tensor:
    """The result of a call on padded tensors, and the caches that it appended to, without the padding."""
    head_dim = caches[0].shape[-1]
    result = result[..., :head_dim]
    for cache, padded in zip(caches, appended or (), strict=False):
        cache.copy_(padded[..., :head_dim])
    if out is not None:
        out.copy_(result)
    return result


# What a backward call writes, in the order in which the core takes it: dq, dk, dv; dk and dv for each head of
# queries, where torch adds those of a group up; softmax_d, the rows' sums of dout * out, None for ranks that
# the core refuses; and dbias. No NamedTuple, which takes three times as long to make.
_Made = tuple[
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor | None,
    torch.Tensor | None,
    torch.Tensor | None,
    torch.Tensor | None,
]


def _added_up(made: _Made) -> list[torch.Tensor | None]:
    """dq, dk, dv, softmax_d and dbias, once the core has run."""
    dq, dk, dv, dk_heads, dv_heads, softmax_d, dbias = made
    if dk_heads is not None and dv_heads is not None:
        for total, of_heads in ((dk, dk_heads), (dv, dv_heads)):
            torch.sum(of_heads.unflatten(-2, (total.shape[-2], -1)), dim=-2, out=total)
    return [dq, dk, dv, softmax_d, dbias]


def _rows(lse: torch.Tensor) -> torch.Tensor:
    """A log-sum-exp, or its gradient, as kernels read it."""
    return lse if lse.is_contiguous() and not lse.is_neg() else lse.resolve_neg().contiguous()


def _made(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    ordered: bool,
    attn_bias: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
) -> _Made:
    """Memory for the gradients, where the caller has none.

    Args:
        ordered: whether the core adds the gradients of a group's heads up.
        attn_bias: None where nobody wants its gradient.
        cu_seqlens_q: of packed sequences, else None.
    """
    softmax_d = dk_heads = dv_heads = None
    if q.dim() == k.dim() == (4 if cu_seqlens_q is None else 3):
        h = q.shape[-2]
        if cu_seqlens_q is None:
            softmax_d = _float(q, q.shape[0], h, _rounded(q.shape[1]))
        else:
            softmax_d = _float(q, h, q.shape[0] + 128 * (cu_seqlens_q.numel() - 1))
        # As upstream, by torch's sum; in the mode the core adds in order.
        if h != k.shape[-2] and not ordered:
            shape = (*k.shape[:-2], h, k.shape[-1])
            dk_heads, dv_heads = _empty(k, shape), _empty(k, shape)
    return (
        torch.empty_like(q) if dq is None else dq,
        torch.empty_like(k) if dk is None else dk,
        torch.empty_like(v) if dv is None else dv,
        dk_heads,
        dv_heads,
        softmax_d,
        None if attn_bias is None else _empty(attn_bias, tuple(attn_bias.shape)),
    )


def fork_bwd(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    p_dropout: float,
    softmax_scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    deterministic: bool,
    generator: torch.Generator | None = None,
    rng_state: torch.Tensor | None = None,
    attn_mask: torch.Tensor | None = None,
    attn_bias: torch.Tensor | None = None,
    wants_bias: bool = False,
    dlse: torch.Tensor | None = None,
) -> list[torch.Tensor | None]:
    """As ``bwd``, and with a loss on lse.

    Args:
        wants_bias: whether the gradient of attn_bias, the last result, is wanted.
        dlse: the gradient of lse, of its shape; the rows' sums are then without it.
    """
    scalars = _scalars(p_dropout, softmax_scale, causal, window_left, window_right, softcap)
    enabled, split_size = get_deterministic_mode()  # once: another thread may change it
    ordered = enabled and not scalars[0] > 0.0
    check_signs(dq=dq, dk=dk, dv=dv)
    dout, q, k, v, out, alibi_slopes, attn_bias = _signed(dout, q, k, v, out, alibi_slopes, attn_bias)
    made = _made(q, k, v, dq, dk, dv, ordered, attn_bias if wants_bias else None, None)
    _bwd(
        dout, q, k, v, out, _rows(lse), *made, alibi_slopes, attn_mask, attn_bias, rng_state, *scalars,
        bool(deterministic), split_size if enabled else 0, False, dlse if dlse is None else _rows(dlse),
    )  # fmt: skip
    return _added_up(made)


def bwd(*arguments: Any) -> list[torch.Tensor | None]:
    """dq, dk, dv and the rows' sums of dout * out; arguments as ``fork_bwd``, up to rng_state."""
    return fork_bwd(*arguments)[:4]


def fork_varlen_bwd(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    alibi_slopes: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    p_dropout: float,
    softmax_scale: float,
    zero_tensors: bool,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    deterministic: bool,
    generator: torch.Generator | None = None,
    rng_state: torch.Tensor | None = None,
    attn_mask: torch.Tensor | None = None,
    attn_bias: torch.Tensor | None = None,
    wants_bias: bool = False,
    dlse: torch.Tensor | None = None,
) -> list[torch.Tensor | None]:
    """As ``fork_bwd``, of packed sequences."""
    p_dropout, softmax_scale, *rest = _scalars(
        p_dropout, softmax_scale, causal, window_left, window_right, softcap
    )
    enabled, split_size = get_deterministic_mode()  # once, as in fork_bwd
    ordered = enabled and not p_dropout > 0.0
    check_signs(dq=dq, dk=dk, dv=dv)
    dout, q, k, v, out, alibi_slopes, attn_bias = _signed(dout, q, k, v, out, alibi_slopes, attn_bias)
    made = _made(q, k, v, dq, dk, dv, ordered, attn_bias if wants_bias else None, cu_seqlens_q)
    _varlen_bwd(
        dout, q, k, v, out, _rows(lse), *made, cu_seqlens_q, cu_seqlens_k, alibi_slopes, attn_mask,
        attn_bias, rng_state, index(max_seqlen_q), index(max_seqlen_k), p_dropout, softmax_scale,
        bool(zero_tensors), *rest, bool(deterministic), split_size if enabled else 0, False,
        dlse if dlse is None else _rows(dlse),
    )  # fmt: skip
    return _added_up(made)


def varlen_bwd(*arguments: Any) -> list[torch.Tensor | None]:
    """As ``bwd``, of packed sequences; arguments as ``fork_varlen_bwd``, up to rng_state."""
    return fork_varlen_bwd(*arguments)[:4]
