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
from operator import index as operator_index
from typing import Any

import flash_attn_2_cuda as flash_attn_gpu
import torch
from torch.utils._python_dispatch import _disable_current_modes

from . import fork_kernels, fork_straight
from .fork_straight import (
    _MANNER,
    _fwd_kvcache,
    _fwd_kvcache_short,
    _has_signs,
    _is_traced,
    _split_size,
    _Tensor,
    results,
)

_modes, _transforms = torch._C._len_torch_dispatch_stack, torch._C._functorch.peek_interpreter_stack
_scope, _PROCESS_WIDE = flash_attn_gpu.deterministic_scope.get, flash_attn_gpu._PROCESS_WIDE
_is_compiling, _is_read_by_dynamo = torch.compiler.is_compiling, torch.compiler.is_dynamo_compiling
_Parameter = torch.nn.Parameter
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def is_plain(*given: Any) -> bool:
    """Whether the tensors among these have memory that nothing but the call sees.

    So there is no tracing, no mode and no subclass, of any of them.
    """
    if _is_compiling() or _modes() or _transforms() is not None or _is_traced():
        return False
    for one in given:  # a loop: a generator takes longer
        if one is None:
            continue
        kind = type(one)
        if kind is _Tensor or kind is _Parameter:
            if one.is_meta or one.is_neg():
                return False
        elif isinstance(one, torch.Tensor):
            return False
    return True


def operator(traced: Callable[..., Any], function: Any) -> Callable[..., Any]:
    """What runs upstream's function: itself where all tensors that are given are plain, else its operator."""
    plain = getattr(function, "_init_fn", function)
    parameters = inspect.signature(plain, eval_str=True).parameters.values()
    names = [one.name for one in parameters]
    tensors = [one.name for one in parameters if "Tensor" in str(one.annotation)]

    def looked_at(count: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Where tensors stand of so many arguments by place, and the names of others."""
        by_place = [name for name in tensors if names.index(name) < count]
        return tuple(map(names.index, by_place)), tuple(tensors[len(by_place) :])

    by_count = [looked_at(count) for count in range(len(names) + 1)]

    @functools.wraps(plain)
    def run(*args: Any, **kwargs: Any) -> Any:
        places, others = by_count[len(args)]
        given = [args[place] for place in places] + [kwargs.get(name) for name in others]
        return (plain if is_plain(*given) else traced)(*args, **kwargs)

    return run


def check_devices(*given: Any) -> None:
    """Raise RuntimeError where tensors among these are on the CPU, or some of them on meta."""
    devices = {one.device.type for one in given if isinstance(one, torch.Tensor)}
    if "cpu" in devices and flash_attn_gpu.NEEDS_GPU:
        raise RuntimeError("flash_attn's tensors must be on CUDA; one is on cpu")
    if "meta" in devices and len(devices) > 1:  # results would be memory that nobody wrote
        raise RuntimeError("flash_attn's tensors must be on CUDA; one is on meta, where it has no memory")


def check_traced(
    tensors: Any, scalars: Any, lengths: Any = None, longest: Any = (0, 0), scores: Any = (None, None, None)
) -> None:
    """Raise for a call that is traced what it would raise when it runs, where its numbers are known.

    A number of a program that takes others too is not asked: each answer would be a guard on it.
    """
    given = [tensor for tensor in (*tensors, *(lengths or ()), *scores) if tensor is not None]
    check_devices(*given)
    numbers = (*longest, *scalars, *(size for tensor in given for size in tensor.shape))
    if any(isinstance(number, _SYMBOLS) for number in numbers):
        return
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
    if make is _cache_door:
        from .fork_cache import by_operator  # which imports this module

        function = by_operator(function)
    long_way = _explained(function)
    return functools.wraps(function)(make(long_way)) if make else long_way


def _apart(args: tuple[Any, ...]) -> list[Any]:
    """With views in the place of tensors that came before.

    Of one that an autograd function is given twice, Dynamo keeps one of the gradients and loses the others.
    """
    found: list[Any] = []
    for one in args:
        again = False
        for other in found:
            again = again or one is other
        found.append(one.view_as(one) if again and isinstance(one, torch.Tensor) else one)
    return found


def _explained(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _is_compiling():
            return function(*_apart(args), **kwargs)
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


def _of_each_sequence(q: Any, length: int) -> Any:
    """The cache's length for each of q's sequences: upstream has one for each row of the cache, or page."""
    if not isinstance(q, torch.Tensor) or q.dim() == 0:
        return length  # for explain()
    # What torch.full says of one names no argument. A guard on one that is traced would bound it.
    if not (_is_read_by_dynamo() or 0 <= length < 2**31):
        _explain_lengths(length)
    return torch.full(q.shape[:1], length, dtype=torch.int32, device=q.device)


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
        if type(cache_seqlens) is int:
            cache_seqlens = _of_each_sequence(q, cache_seqlens)
        # Of Dynamo alone, which is a constant: tensors of other tracers, torch.export's too, have no memory,
        # and the library refuses them.
        if not (fork_kernels.ON or _is_read_by_dynamo()):
            # Without a function of its own, and for traced tensors too: upstream has no operator here.
            try:
                b, seqlen_q, h, d = q.shape
                # Else torch.jit.trace or symbolic shapes; or views of other signs than their memory's
                if type(d) is int and d % 8 == 0 and not (q.is_neg() or k_cache.is_neg() or v_cache.is_neg()):
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
                    elif _has_signs(k, v, rotary_cos, rotary_sin, alibi_slopes, attn_bias, learnable_sink):
                        ran = False
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
    *("k", "v", "cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "block_table"),
    *("rotary_cos", "rotary_sin", "cache_batch_idx", "cache_leftpad"),
    *("alibi_slopes", "attn_mask", "attn_bias", "learnable_sink"),
)
_INTS = ("max_seqlen", "max_seqlen_q", "max_seqlen_k", "num_splits")
_NUMBERS_ALONE = ("dropout_p", "softmax_scale", "softcap")


def explain(function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Raise an error in our words if a failed call's arguments are such as no call takes.

    Raises:
        TypeError: an argument of another type, or no arguments that the function has.
        ValueError: the number of a tensor's dimensions, no head dim, an int that no kernel takes.
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
            raise TypeError(f"{name} must be a torch.Tensor on the GPU; it is a {_kind(value)}") from None
        allowed = dims.get(name)
        allowed = (allowed,) if isinstance(allowed, int) else allowed
        if allowed and value.dim() not in allowed:
            raise ValueError(
                f"{name} must have {' or '.join(map(str, allowed))} dimensions; it has shape "
                f"{list(value.shape)} ({function.__name__}'s docstring has them)"
            ) from None
        if name in dims and value.device.type == "cpu" and flash_attn_gpu.NEEDS_GPU:
            raise RuntimeError(f"{name} must be on CUDA; it is on cpu: move it with .cuda()") from None
        if value.device.type == "meta":  # a call whose tensors all are gives tensors of their kind
            raise RuntimeError(f"{name} must be on CUDA; it is on meta, where it has no memory") from None
        if name in dims and value.shape[-1] == 0:
            raise ValueError(f"{name} has head_dim 0; it must be 1 or more: {list(value.shape)}") from None
    for name, value in given.items():
        _explain_number(name, value)


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".replace("builtins.", "")


def _explain_number(name: str, value: Any) -> None:
    """Raise TypeError or ValueError for an argument that is no tensor, and that no call takes."""
    if name == "cache_seqlens" and value is not None:
        _explain_lengths(value)
    elif name in _INTS and not -(2**63) <= _index(value, name, "an int") < 2**63:
        told = "is no length" if name != "num_splits" else "does not fit in 64 bits"
        raise ValueError(f"{name}={value} {told}") from None
    elif name == "window_size":
        words = "two ints (left, right), -1 for no limit"
        if not isinstance(value, (tuple, list)) or len(value) != 2:
            raise TypeError(f"{name} must be {words}; it is {value!r}") from None
        if any(not -(2**63) <= _index(side, name, words) < 2**63 for side in value):
            raise ValueError(f"{name}={value} does not fit in 64 bits; -1 is for no limit") from None
    elif name in _NUMBERS_ALONE and not (value is None and name == "softmax_scale"):
        try:
            float(value)
        except (TypeError, ValueError):
            raise TypeError(f"{name} must be a number; it is {value!r}") from None


def _explain_lengths(value: Any) -> None:
    """The same of cache_seqlens."""
    if not isinstance(value, (int, torch.Tensor)):
        raise TypeError(
            f"cache_seqlens must be an int or an int32 torch.Tensor (batch_size,) on the GPU; it is a "
            f"{_kind(value)}"
        ) from None
    if isinstance(value, int) and not 0 <= value < 2**31:
        raise ValueError(f"cache_seqlens={value} is no length") from None
    if isinstance(value, torch.Tensor) and value.device.type == "meta":
        raise RuntimeError("cache_seqlens must be on CUDA; it is on meta, where it has no memory") from None


def _index(value: Any, name: str, words: str) -> int:
    """As an int, which numpy's ints and tensors of one int are too."""
    try:
        return operator_index(value)
    except TypeError:
        raise TypeError(f"{name} must be {words}; it is {value!r}") from None
