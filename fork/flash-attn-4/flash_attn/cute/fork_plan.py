"""Calls like an earlier one: what was chosen for that is launched again, and nothing is looked at anew.

Choosing takes upstream's function longer on the host than a decode step takes on the GPU. Served are calls of
``flash_attn_func`` on plain tensors that want no gradients, with options that are numbers, on SM 9.0. Others
take upstream's way, and so does the first call of each kind. Kernels and arguments are the same, so bits are.
"""

import functools
import os
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from flash_attn.cute import fa_logging, fork_log, fork_rows, fork_split
from flash_attn.cute.fork_mode import DeterministicMode, get_deterministic_mode
from torch.autograd import forward_ad

MOST = 4096  # plans that are kept: a cache that grows by a token a step makes one for each
_TENSORS = 5  # q, k, v, out and lse are a kernel's first arguments; the last two are of partial results

_NUMBERS = frozenset((type(None), bool, int, float))
_Tensor = torch.Tensor
_is_compiling = torch.compiler.is_compiling
_modes, _jit_trace = torch._C._len_torch_dispatch_stack, torch._C._get_tracing_state
_transforms = torch._C._functorch.peek_interpreter_stack


class Kind(NamedTuple):
    """All that a call's launches follow from, but for addresses."""

    tensors: tuple[Any, ...]
    options: tuple[Any, ...]  # and their types
    mode: DeterministicMode
    around: tuple[Any, ...]


class Plan(NamedTuple):
    """What a call launched."""

    kernel: Callable[..., None]
    options: tuple[Any, ...]  # of the kernel, after the tensors
    out: tuple[int, ...]
    lse: tuple[int, ...] | None
    chunks: fork_split.Chunks | None
    tile_m: int
    combine: Callable[..., None] | None
    combine_options: tuple[Any, ...]


class _Recording(threading.local):
    """Of the call that this thread makes, if it is to be remembered: the launches of kernel and combine."""

    on = False
    launched: tuple[Any, ...] = ()  # and under which mode
    combined: tuple[Any, ...] = (None, ())


_recording = _Recording()
_plans: dict[Kind, Plan] = {}


def forget() -> None:
    """For tests: no call is remembered."""
    _plans.clear()


def remembered() -> tuple[Plan, ...]:
    """For tests: the plans of all calls that are remembered."""
    return tuple(_plans.values())


def note_kernel(
    kernel: Callable[..., None], arguments: Any, chunks: Any, tile_m: int, mode: DeterministicMode
) -> None:
    """Beside the launch of a call's kernel, which was chosen under that mode."""
    if _recording.on:
        _recording.launched = (mode, kernel, arguments, chunks, tile_m)


def note_combine(kernel: Callable[..., None], options: Any) -> None:
    """Beside the launch of the kernel that folds partial results; options are what follows lse."""
    if _recording.on:
        _recording.combined = (kernel, options)


def kind(
    q: Any, k: Any, v: Any, qv: Any = None, gather_kv_indices: Any = None, softmax_scale: Any = None,
    causal: Any = False, window_size: Any = (None, None), learnable_sink: Any = None, softcap: Any = 0.0,
    num_splits: Any = 1, pack_gqa: Any = None, deterministic: Any = False, *, return_lse: Any = False,
) -> Kind | None:  # fmt: skip
    """A call's kind; None for one that is not served."""
    if (
        not type(q) is type(k) is type(v) is _Tensor
        or not (qv is gather_kv_indices is learnable_sink is None)
        or _modes()
        or _transforms() is not None
        or _jit_trace() is not None
        or forward_ad._current_level >= 0
        or q.requires_grad or k.requires_grad or v.requires_grad
        or fork_log.DEBUG
        or (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16
    ):  # fmt: skip
        return None
    options = (
        softmax_scale, causal, window_size[0], window_size[1], softcap, num_splits, pack_gqa, return_lse,
    )  # fmt: skip
    types = tuple(map(type, options))  # 1, 1.0 and True are equal
    if not _NUMBERS.issuperset(types):  # whose values may change
        return None
    return Kind(
        (q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), q.dtype, k.dtype, v.dtype,
         q.device, k.device, v.device),
        (options, types),
        get_deterministic_mode(),
        (fork_split.forced(), fork_rows.forced(), fa_logging.get_fa_log_level(),
         os.environ.get("FLASH_ATTENTION_NUM_SMS")),
    )  # fmt: skip


def remembering(function: Callable[..., Any]) -> Callable[..., Any]:
    """``flash_attn_func``, which remembers what it launched."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _is_compiling():  # which would trace kind() too
            return function(*args, **kwargs)
        try:
            asked = kind(*args, **kwargs)
            plan = None if asked is None else _plans.get(asked)
        except (TypeError, ValueError, AttributeError, LookupError, RuntimeError):
            # other arguments, or such as upstream refuses
            asked = plan = None
        if plan is not None:
            return _run(plan, *(args if len(args) == 3 else _inputs(*args, **kwargs)))
        return function(*args, **kwargs) if asked is None else _record(asked, function, args, kwargs)

    return call


def _inputs(q: Any = None, k: Any = None, v: Any = None, *_: Any, **__: Any) -> tuple[Any, Any, Any]:
    return q, k, v


def _run(plan: Plan, q: Any, k: Any, v: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    device = q.device
    out = torch.empty(*plan.out, dtype=q.dtype, device=device)
    lse = None if plan.lse is None else torch.empty(*plan.lse, dtype=torch.float32, device=device)
    partial = fork_split.allocate(plan.chunks, out, plan.tile_m)
    plan.kernel(q, k, v, out, lse, *plan.options, *partial)
    if plan.combine is not None:
        plan.combine(*partial, out, lse, *plan.combine_options)
    return out, lse


def _record(asked: Kind, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    _recording.on, _recording.launched, _recording.combined = True, (), (None, ())
    try:
        found = function(*args, **kwargs)
        launched, combined = _recording.launched, _recording.combined
    finally:
        _recording.on, _recording.launched, _recording.combined = False, (), (None, ())
    # The mode may have changed since the kind was told.
    if launched and launched[0] == asked.mode and _as_given(launched[2], args, kwargs):
        _, kernel, arguments, chunks, tile_m = launched
        options = tuple(arguments[_TENSORS:-2])
        if not any(isinstance(option, _Tensor) for option in (*options, *combined[1])):
            if len(_plans) >= MOST:
                _plans.clear()
            out, lse = found
            lse_shape = None if lse is None else tuple(lse.shape)
            _plans[asked] = Plan(kernel, options, tuple(out.shape), lse_shape, chunks, tile_m, *combined)
    return found


def _as_given(arguments: Any, args: Any, kwargs: Any) -> bool:
    """Whether the kernel read the caller's tensors, and no copies of them."""
    pairs = zip(arguments, _inputs(*args, **kwargs), strict=False)
    return all(used.data_ptr() == given.data_ptr() for used, given in pairs)
