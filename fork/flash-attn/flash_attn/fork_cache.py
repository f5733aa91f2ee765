"""``flash_attn_with_kvcache`` as operators of torch's: for programs that are traced, and for wrapped tensors.

torch.compile and torch.export write an operator into their graph, and leave what it does for the run. A
tensor subclass without memory of its own unwraps itself on the way to an operator. Calls on plain tensors
need none.

There are two: a call that appends new keys writes to its caches, and a compiler that is told so of any other
call may copy the caches.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from .fork_front import check_devices, is_plain
from .fork_layout import result_like


@functools.cache
def _upstreams() -> Callable[..., Any]:
    from . import flash_attn_interface as interface

    function: Callable[..., Any] = inspect.unwrap(interface.flash_attn_with_kvcache)
    return function


def _attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    rotary_cos: torch.Tensor | None,
    rotary_sin: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    cache_batch_idx: torch.Tensor | None,
    cache_leftpad: torch.Tensor | None,
    block_table: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    attn_mask: torch.Tensor | None,
    attn_bias: torch.Tensor | None,
    learnable_sink: torch.Tensor | None,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    rotary_interleaved: bool,
    num_splits: int,
    wants_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out (batch, seqlen, nheads, headdim) and its log-sum-exp, empty where it is not wanted."""
    found = _upstreams()(
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad,
        block_table, softmax_scale, causal, (window_size_left, window_size_right), softcap,
        rotary_interleaved, alibi_slopes, num_splits, wants_lse, attn_mask=attn_mask, attn_bias=attn_bias,
        learnable_sink=learnable_sink,
    )  # fmt: skip
    return found if wants_lse else (found, q.new_empty(0, dtype=torch.float32))


def _traced(q: torch.Tensor, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    check_devices(q, *given)
    missing = -q.shape[-1] % 8  # as the kernels, which write whole rows of padded ones
    out = result_like(torch.nn.functional.pad(q, [0, missing]) if missing else q)
    of_rows = (q.shape[0], q.shape[2], q.shape[1]) if given[-1] else (0,)
    return out[..., : q.shape[-1]] if missing else out, q.new_empty(of_rows, dtype=torch.float32)


reading = torch.library.custom_op("flash_attn::_fork_cache", _attend, mutates_args=(), device_types="cuda")
appending = torch.library.custom_op(
    "flash_attn::_fork_cache_append", _attend, mutates_args=("k_cache", "v_cache"), device_types="cuda"
)
for _operator in (reading, appending):
    _operator.register_fake(_traced)


def _without_gradient(tensor: Any) -> Any:
    """Calls on a cache have none, whatever their tensors are part of."""
    return tensor.detach() if isinstance(tensor, torch.Tensor) and tensor.requires_grad else tensor


def by_operator(function: Callable[..., Any]) -> Callable[..., Any]:
    """Upstream's flash_attn_with_kvcache for plain tensors, and the operators for others."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_plain():  # the tensors are asked where the call fails: that takes longer
            try:
                return function(*args, **kwargs)
            except Exception:
                if is_plain(*args, *kwargs.values()):
                    raise
        return _call_operator(*args, **kwargs)

    return call


def _call_operator(
    q: Any, k_cache: Any, v_cache: Any, k: Any = None, v: Any = None, rotary_cos: Any = None,
    rotary_sin: Any = None, cache_seqlens: Any = None, cache_batch_idx: Any = None,
    cache_leftpad: Any = None, block_table: Any = None, softmax_scale: Any = None, causal: Any = False,
    window_size: Any = (-1, -1), softcap: Any = 0.0, rotary_interleaved: Any = True, alibi_slopes: Any = None,
    num_splits: Any = 0, return_softmax_lse: Any = False, *, attn_mask: Any = None, attn_bias: Any = None,
    learnable_sink: Any = None,
) -> Any:  # fmt: skip
    if isinstance(cache_seqlens, (int, torch.SymInt)):
        cache_seqlens = torch.full(q.shape[:1], cache_seqlens, dtype=torch.int32, device=q.device)
    tensors = (
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad,
        block_table, alibi_slopes, attn_mask, attn_bias, learnable_sink,
    )  # fmt: skip
    out, lse = (reading if k is None else appending)(
        *map(_without_gradient, tensors), q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
        causal, *window_size, softcap, rotary_interleaved, num_splits, return_softmax_lse,
    )  # fmt: skip
    return (out, lse) if return_softmax_lse else out
