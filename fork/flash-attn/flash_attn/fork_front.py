"""The public functions' front door: the shortest way to the library, and errors in our words.

A call that nothing else sees goes straight to the library (fork_straight.py). Others go through torch's
operators, as in upstream. An operator takes as long on the host as a short attention does on the GPU, so it
is left out where nothing sees it.

A call that failed is looked at again, argument by argument: the first mistakes of a new user end in a line
that names the argument, and not in an error of torch's that leads elsewhere.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import flash_attn_2_cuda as flash_attn_gpu
import torch
from torch.utils._python_dispatch import _disable_current_modes

from . import fork_kernels, fork_straight
from .fork_straight import (
    _MANNER,
    _fwd_kvcache,
    _fwd_kvcache_short,
    _is_traced,
    _split_size,
    _Tensor,
    results,
)

_modes, _transforms = torch._C._len_torch_dispatch_stack, torch._C._functorch.peek_interpreter_stack
_scope, _PROCESS_WIDE = flash_attn_gpu.deterministic_scope.get, flash_attn_gpu._PROCESS_WIDE
_is_compiling, _is_read_by_dynamo = torch.compiler.is_compiling, torch.compiler.is_dynamo_compiling
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def is_plain(*tensors: Any) -> bool:
    """Whether these tensors have memory that nothing but the call sees: no tracing, no mode, no subclass."""
    if _is_compiling() or _modes() or _transforms() is not None or _is_traced():
        return False
    for tensor in tensors:  # a loop: a generator takes longer
        if type(tensor) not in _PLAIN or tensor.is_meta or tensor.is_neg():
            return False
    return True


def operator(traced: Callable[..., Any], function: Any) -> Callable[..., Any]:
    """What runs upstream's function: itself where dout, q, k and v are plain tensors, else its operator."""
    plain = getattr(function, "_init_fn", function)
    # Its first arguments, by place or by name.
    looked_at = [name for name in inspect.signature(plain).parameters if name in ("dout", "q", "k", "v")]
    count = len(looked_at)

    @functools.wraps(plain)
    def run(*args: Any, **kwargs: Any) -> Any:
        tensors = args[:count]
        if len(args) < count:  # one that is missing is no tensor, and the operator says so
            tensors += tuple(kwargs.get(name) for name in looked_at[len(args) :])
        return (plain if is_plain(*tensors) else traced)(*args, **kwargs)

    return run


def check_traced(
    tensors: Any, scalars: Any, lengths: Any = None, longest: Any = (0, 0), scores: Any = (None, None, None)
) -> None:
    """Raise for a call that is traced what it would raise when it runs, where its sizes are known."""
    given = [tensor for tensor in (*tensors, *(lengths or ()), *scores) if tensor is not None]
    if any(not isinstance(size, int) for tensor in given for size in tensor.shape):
        return
    for tensor in given:
        if tensor.device.type == "cpu" and flash_attn_gpu.NEEDS_GPU:
            raise RuntimeError("flash_attn's tensors must be on CUDA; one is on cpu")
    with _disable_current_modes():

        def stand_in(tensor: Any) -> Any:
            """Of the same shape, and nearly no memory."""
            if tensor is None:
                return None
            return torch.empty(tensor.shape[-1:], dtype=tensor.dtype).expand(tensor.shape)

        q, k, v, alibi_slopes = map(stand_in, tensors)
        packed = None if lengths is None else tuple(map(stand_in, lengths))
        tensors = (q, k, v, alibi_slopes, *map(stand_in, scores))
        try:
            flash_attn_gpu.check_forward(tensors, packed, longest, scalars)
        except NotImplementedError:  # of a kernel that this wheel lacks, and that the call may not need
            if not fork_kernels.ON:
                raise


def random_state(dropout_p: float, rng_state: Any) -> Any:
    """What is saved of it for the backward pass: as on the straight way, nothing without dropout."""
    return rng_state if dropout_p > 0 else None


def door(function: Callable[..., Any]) -> Callable[..., Any]:
    """The public function, behind the front door."""
    make = _STRAIGHT.get(function.__name__)
    long_way = _explained(function)
    return functools.wraps(function)(make(long_way)) if make else long_way


def _explained(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _is_compiling():
            return function(*args, **kwargs)
        try:
            return function(*args, **kwargs)
        except Exception:
            explain(function, args, kwargs)
            raise

    return call


# Upstream's signatures again: arguments that are passed on by place take the least time. What goes wrong on
# the straight way goes wrong on the long one too, and is told there.
def _dense_door(long_way: Callable[..., Any]) -> Callable[..., Any]:
    def call(
        q: Any, k: Any, v: Any, dropout_p: float = 0.0, softmax_scale: float | None = None,
        causal: bool = False, window_size: Any = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None,
        deterministic: bool = False, return_attn_probs: bool = False, *, attn_mask: Any = None,
        attn_bias: Any = None, learnable_sink: Any = None,
    ) -> Any:  # fmt: skip
        if not (fork_kernels.ON or _is_compiling()) and dropout_p == 0.0 and not return_attn_probs:
            out = fork_straight.dense(
                q, k, v, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, attn_mask,
                attn_bias, learnable_sink,
            )  # fmt: skip
            if out is not None:
                return out
        return long_way(
            q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
            return_attn_probs, attn_mask=attn_mask, attn_bias=attn_bias, learnable_sink=learnable_sink,
        )  # fmt: skip

    return call


def _varlen_door(long_way: Callable[..., Any]) -> Callable[..., Any]:
    def call(
        q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int,
        dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
        window_size: Any = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None,
        deterministic: bool = False, return_attn_probs: bool = False, block_table: Any = None, *,
        attn_mask: Any = None, attn_bias: Any = None, learnable_sink: Any = None,
    ) -> Any:  # fmt: skip
        if not (fork_kernels.ON or _is_compiling()) and dropout_p == 0.0 and not return_attn_probs:
            out = fork_straight.varlen(
                q, k, v, (cu_seqlens_q, cu_seqlens_k, block_table), (max_seqlen_q, max_seqlen_k),
                softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, attn_mask,
                attn_bias, learnable_sink,
            )  # fmt: skip
            if out is not None:
                return out
        return long_way(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
            causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs, block_table,
            attn_mask=attn_mask, attn_bias=attn_bias, learnable_sink=learnable_sink,
        )  # fmt: skip

    return call


def _cache_door(long_way: Callable[..., Any]) -> Callable[..., Any]:
    def call(
        q: Any, k_cache: Any, v_cache: Any, k: Any = None, v: Any = None, rotary_cos: Any = None,
        rotary_sin: Any = None, cache_seqlens: Any = None, cache_batch_idx: Any = None,
        cache_leftpad: Any = None, block_table: Any = None, softmax_scale: float | None = None,
        causal: bool = False, window_size: Any = (-1, -1), softcap: float = 0.0,
        rotary_interleaved: bool = True, alibi_slopes: Any = None, num_splits: int = 0,
        return_softmax_lse: bool = False, *, attn_mask: Any = None, attn_bias: Any = None,
        learnable_sink: Any = None,
    ) -> Any:  # fmt: skip
        # Of Dynamo alone, which is a constant: tensors of other tracers, torch.export's too, have no memory,
        # and the library refuses them.
        if not (fork_kernels.ON or _is_read_by_dynamo()):
            # Without a function of its own, and for traced tensors too: upstream has no operator here.
            try:
                b, seqlen_q, h, d = q.shape
                if type(d) is int and d % 8 == 0:  # else torch.jit.trace or symbolic shapes
                    if type(cache_seqlens) is int:
                        shape, device = k_cache.shape[:1], k_cache.device
                        cache_seqlens = torch.full(shape, cache_seqlens, dtype=torch.int32, device=device)
                    # What results() and _split_size() do for most calls, in place: calling them takes a
                    # decoding step 4 % more of the host's time.
                    if (
                        not return_softmax_lse
                        and type(q) is _Tensor
                        and q.is_contiguous()
                        and ((at := q.get_device()) >= 0 or not fork_straight._needs_gpu)
                        and at == fork_straight._current_device()
                    ):
                        row = h * d
                        strides = (seqlen_q * row, row, d, 1)
                        out, lse = fork_straight._strided((b, seqlen_q, h, d), strides, q.dtype), None
                    else:
                        out, lse = results(q, b, seqlen_q, h, d, return_softmax_lse)
                    split_size = _PROCESS_WIDE if _scope() is None else _split_size()
                    if (
                        k is None and v is None and rotary_cos is None and rotary_sin is None
                        and cache_batch_idx is None and cache_leftpad is None and alibi_slopes is None
                        and attn_mask is None and attn_bias is None and window_size == (-1, -1)
                        and softcap == 0.0 and learnable_sink is None
                    ):  # fmt: skip
                        ran = _fwd_kvcache_short(
                            q, k_cache, v_cache, out, lse, cache_seqlens, block_table, softmax_scale, causal,
                            num_splits, split_size,
                        )  # fmt: skip
                    else:
                        scale = d**-0.5 if softmax_scale is None else softmax_scale
                        left, right = window_size
                        ran = _fwd_kvcache(
                            q, k_cache, v_cache, out, lse, k, v, cache_seqlens, rotary_cos, rotary_sin,
                            cache_batch_idx, cache_leftpad, block_table, alibi_slopes, attn_mask, attn_bias,
                            scale, causal, left, right, softcap, rotary_interleaved, num_splits, split_size,
                            _MANNER, learnable_sink,
                        )  # fmt: skip
                    if ran:
                        return (out, lse) if return_softmax_lse else out
            except Exception:
                pass  # which happens on the long way too
        return long_way(
            q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad,
            block_table, softmax_scale, causal, window_size, softcap, rotary_interleaved, alibi_slopes,
            num_splits, return_softmax_lse, attn_mask=attn_mask, attn_bias=attn_bias,
            learnable_sink=learnable_sink,
        )  # fmt: skip

    return call


_STRAIGHT = {
    "flash_attn_func": _dense_door,
    "flash_attn_varlen_func": _varlen_door,
    "flash_attn_with_kvcache": _cache_door,
}

# The dimensions of the first arguments, by function; those of a cache may be pages.
_DIMS: dict[str, dict[str, Any]] = {
    "flash_attn_func": {"q": 4, "k": 4, "v": 4},
    "flash_attn_qkvpacked_func": {"qkv": 5},
    "flash_attn_kvpacked_func": {"q": 4, "kv": 5},
    "flash_attn_varlen_func": {"q": 3, "k": (3, 4), "v": (3, 4)},
    "flash_attn_varlen_qkvpacked_func": {"qkv": 4},
    "flash_attn_varlen_kvpacked_func": {"q": 3, "kv": 4},
    "flash_attn_with_kvcache": {"q": 4, "k_cache": 4, "v_cache": 4},
}
_TENSORS = (
    *("k", "v", "cu_seqlens_q", "cu_seqlens_k", "block_table"),
    *("alibi_slopes", "attn_mask", "attn_bias", "learnable_sink"),
)


def explain(function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Raise an error in our words if a failed call's arguments are such as no call takes.

    Raises:
        TypeError: an argument that is no tensor, or no arguments that the function has.
        ValueError: the number of a tensor's dimensions.
        RuntimeError: a tensor that no GPU has.
    """
    try:
        given = inspect.signature(function).bind(*args, **kwargs).arguments
    except TypeError as error:
        raise TypeError(f"{function.__name__}() {error}") from None
    dims = _DIMS[function.__name__]
    for name in (*dims, *(name for name in _TENSORS if name not in dims)):
        value = given.get(name)
        if value is None and name not in dims:
            continue
        if not isinstance(value, torch.Tensor):
            kind = f"{type(value).__module__}.{type(value).__qualname__}".replace("builtins.", "")
            raise TypeError(f"{name} must be a torch.Tensor on the GPU; it is a {kind}") from None
        allowed = dims.get(name)
        allowed = (allowed,) if isinstance(allowed, int) else allowed
        if allowed and value.dim() not in allowed:
            raise ValueError(
                f"{name} must have {' or '.join(map(str, allowed))} dimensions; it has shape "
                f"{list(value.shape)} ({function.__name__}'s docstring has them)"
            ) from None
        if name in dims and value.device.type == "cpu" and flash_attn_gpu.NEEDS_GPU:
            raise RuntimeError(f"{name} must be on CUDA; it is on cpu: move it with .cuda()") from None
