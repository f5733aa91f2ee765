"""The shortest way from the public functions to the library.

At batch 1 attention takes the host longer than the GPU. So a call on plain tensors that nothing traces is not
looked at in Python: the core checks it, and says whether kernels can load its tensors as they lie. Functions
here give None for a call that they do not serve, and for one that fails in the core, before its launch: the
caller then takes the long way, which runs it or says what is wrong. What is imported from here is for calls
on a cache, which fork_front.py makes itself.
"""

from typing import Any

import flash_attn_2_cuda as flash_attn_gpu
import torch
from torch.autograd import forward_ad

from .fork_kernels import OWN
from .fork_layout import gradient_like

# Looked up once: they are part of each call's time.
_Tensor, _empty, _empty_like, _float32 = torch.Tensor, torch.empty, torch.empty_like, torch.float32
_grad_enabled, _is_traced = torch.is_grad_enabled, torch._C._is_tracing
_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._functorch.peek_interpreter_stack
_fwd, _varlen_fwd, _fwd_kvcache = flash_attn_gpu._fwd, flash_attn_gpu._varlen_fwd, flash_attn_gpu._fwd_kvcache
_fwd_kvcache_short = flash_attn_gpu._fwd_kvcache_short
_split_size, _MANNER = flash_attn_gpu._split_size, flash_attn_gpu.RUN_LOADABLE
_NO_DROPOUT = flash_attn_gpu._NO_DROPOUT
_mode = flash_attn_gpu.get_deterministic_mode
# How torch.compile's code allocates, past torch's dispatcher: (sizes, strides, dtype) on the current device.
# A torch without it leaves calls to torch.empty.
_needs_gpu = flash_attn_gpu.NEEDS_GPU
_strided: Any = getattr(torch._C._dynamo.guards, f"_empty_strided_{'cuda' if _needs_gpu else 'cpu'}", None)
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None) if _needs_gpu else (lambda: -1)  # the CPU
if _strided is None or _current_device is None:

    def _current_device() -> None:
        """No GPU's number: no call allocates so."""


def _is_plain(q: Any, k: Any, v: Any) -> bool:
    """Whether no tracing, no mode, no subclass and no view of other signs is about these tensors."""
    return (
        type(q) is type(k) is type(v) is _Tensor
        and not _modes()
        and _transforms() is None
        and not _is_traced()
        and forward_ad._current_level < 0
        and not (q.is_neg() or k.is_neg() or v.is_neg())
    )


def _has_signs(*scores: Any) -> bool:
    """Whether one of slopes, bias and sink is a view of other signs than its memory's."""
    return any(isinstance(tensor, _Tensor) and tensor.is_neg() for tensor in scores)


def results(q: Any, b: int, seqlen_q: int, h: int, d: int, wants_lse: bool) -> tuple[Any, Any]:
    """Memory for out and lse, whose every element a call writes.

    For contiguous queries on the current GPU in less time than torch.empty takes: lse in half of it.
    """
    # The current GPU is asked for only where a tensor is on one: that starts CUDA.
    if (
        type(q) is _Tensor
        and q.is_contiguous()
        and ((at := q.get_device()) >= 0 or not _needs_gpu)
        and at == _current_device()
    ):
        row = h * d
        out = _strided((b, seqlen_q, h, d), (seqlen_q * row, row, d, 1), q.dtype)
        return out, _strided((b, h, seqlen_q), (h * seqlen_q, seqlen_q, 1), _float32) if wants_lse else None
    lse = _empty(b, h, seqlen_q, dtype=_float32, device=q.device) if wants_lse else None
    return _empty_like(q), lse


def _dense(
    q: Any, k: Any, v: Any, wants_lse: bool, split_size: int,
    scale: Any, causal: Any, window: Any, softcap: Any, slopes: Any, mask: Any, bias: Any,
    sink: Any = None,
) -> tuple[Any, Any] | None:  # fmt: skip
    """Return out and lse; None: a call that is not served.

    The core has memory of its own for an lse that nobody wants: an allocation takes a fifth of a short call.
    """
    b, seqlen_q, h, d = q.shape
    if d % 8:
        return None
    out, lse = results(q, b, seqlen_q, h, d, wants_lse)
    left, right = window
    ran = _fwd(
        q, k, v, out, lse, slopes, mask, bias, 0.0, d**-0.5 if scale is None else scale, causal, left, right,
        softcap, split_size, _MANNER, *_NO_DROPOUT, sink,
    )  # fmt: skip
    return (out, lse) if ran else None


def _varlen(
    q: Any, k: Any, v: Any, lengths: Any, longest: Any, wants_lse: bool, split_size: int,
    scale: Any, causal: Any, window: Any, softcap: Any, slopes: Any, mask: Any, bias: Any,
    sink: Any = None,
) -> tuple[Any, Any] | None:  # fmt: skip
    cu_seqlens_q, cu_seqlens_k, block_table = lengths
    total_q, h, d = q.shape
    if d % 8:
        return None
    # By torch.empty: with the mode off, rows past a max_seqlen_q that is too short keep what
    # torch.use_deterministic_algorithms fills them with.
    out = _empty_like(q)
    lse = _empty(h, total_q, dtype=_float32, device=q.device) if wants_lse else None
    ran = _varlen_fwd(
        q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, None, None, block_table, slopes, mask, bias,
        *longest, 0.0, d**-0.5 if scale is None else scale, False, causal, *window, softcap, split_size,
        _MANNER, *_NO_DROPOUT, sink,
    )  # fmt: skip
    return (out, lse) if ran else None


class _NotServed(Exception):
    pass


class StraightFunc(torch.autograd.Function):
    """Attention of plain tensors with gradients, without dropout, mask and bias.

    It saves the tensors that upstream's functions save: a checkpoint may meet one in the forward pass and the
    other in the recomputation.
    """

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, call: Any) -> Any:
        """Return out.

        Args:
            call: packed, the options up to the slopes, and deterministic. packed: None, or (cu_seqlens_q,
                cu_seqlens_k, block_table) and the longest lengths.
        """
        packed, (scale, causal, window, softcap, slopes), _ = call
        mode = _mode()  # once: another thread may change it
        split_size = mode[1] if mode[0] else 0
        try:
            own = (True, split_size, scale, causal, window, softcap, slopes, None, None)
            found = _varlen(q, k, v, packed[0], packed[1], *own) if packed else _dense(q, k, v, *own)
        except Exception as error:
            raise _NotServed from error
        if found is None:
            raise _NotServed
        out, lse = found
        ctx.call = (packed[1], *call[1:]) if packed else call
        ctx.fork_mode, ctx.fork_kernels = mode, OWN  # see fork_backward.py
        if packed:
            ctx.save_for_backward(q, k, v, out, lse, *packed[0][:2])
        else:
            ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> Any:
        from . import flash_attn_interface as interface

        q, k, v, out, lse, *cu_seqlens = ctx.saved_tensors
        longest, (scale, causal, window, softcap, slopes), deterministic = ctx.call
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        gradients = [gradient_like(tensor) for tensor in (q, k, v)]
        rest = (0.0, scale, causal, *window, softcap, slopes, deterministic)
        tensors = (dout, q, k, v, out, lse, *gradients)
        if cu_seqlens:
            lengths = (*cu_seqlens, *longest)
            interface._wrapped_flash_attn_varlen_backward(*tensors, *lengths, *rest, rng_state=None)
        else:
            interface._wrapped_flash_attn_backward(*tensors, *rest, rng_state=None)
        return (*gradients, None)


# Without what torch's Function.apply does for functorch, whose transforms _is_plain leaves to the long way.
_apply = super(torch.autograd.Function, StraightFunc).apply


def _records(q: Any, k: Any, v: Any, bias: Any, sink: Any) -> bool:
    """Whether autograd records a call on these."""
    return (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (bias is not None and (type(bias) is not _Tensor or bias.requires_grad))
        or (sink is not None and (type(sink) is not _Tensor or sink.requires_grad))
    )


def _recorded(
    q: Any, k: Any, v: Any, packed: Any, options: Any, deterministic: bool, mask: Any, bias: Any, sink: Any
) -> torch.Tensor | None:
    if not (mask is bias is sink is None):
        return None
    try:  # hooks on saved tensors run in here, and raise what they want
        return _apply(q, k, v, (packed, options, deterministic))
    except _NotServed:
        return None


def dense(
    q: Any, k: Any, v: Any, scale: Any, causal: Any, window: Any, softcap: Any, slopes: Any,
    deterministic: bool, mask: Any, bias: Any, sink: Any,
) -> torch.Tensor | None:  # fmt: skip
    """``flash_attn_func`` without dropout."""
    if not _is_plain(q, k, v) or (not slopes is bias is sink is None and _has_signs(slopes, bias, sink)):
        return None
    if _grad_enabled() and _records(q, k, v, bias, sink):
        options = (scale, causal, window, softcap, slopes)
        return _recorded(q, k, v, None, options, deterministic, mask, bias, sink)
    try:
        size = _split_size()
        found = _dense(q, k, v, False, size, scale, causal, window, softcap, slopes, mask, bias, sink)
    except Exception:
        return None
    return found and found[0]


def varlen(
    q: Any, k: Any, v: Any, lengths: Any, longest: Any, scale: Any, causal: Any, window: Any, softcap: Any,
    slopes: Any, deterministic: bool, mask: Any, bias: Any, sink: Any,
) -> torch.Tensor | None:  # fmt: skip
    """``flash_attn_varlen_func`` without dropout; lengths are cu_seqlens_q, cu_seqlens_k and block_table."""
    if not _is_plain(q, k, v) or (not slopes is bias is sink is None and _has_signs(slopes, bias, sink)):
        return None
    if _grad_enabled() and _records(q, k, v, bias, sink):
        options, packed = (scale, causal, window, softcap, slopes), (lengths, longest)
        return _recorded(q, k, v, packed, options, deterministic, mask, bias, sink)
    own = (False, _split_size(), scale, causal, window, softcap, slopes, mask, bias, sink)
    try:
        found = _varlen(q, k, v, lengths, longest, *own)
    except Exception:
        return None
    return found and found[0]
