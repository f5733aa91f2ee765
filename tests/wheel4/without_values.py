"""Cases of the GPU half where there is no GPU: tensors have shapes and no values, and calls compile their kernels and stop.

What a case asks of values, then holds: that all are so, that bits are equal, that an error is small. So it runs to
its end, and makes every call that it makes on a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import compiled
import machine
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_OPS = torch.ops.aten


class Answers(TorchDispatchMode):
    """Answers questions about values, which tensors without values raise for."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is _OPS._local_scalar_dense.default:
            (asked,) = args
            return (
                0.0 if asked.is_floating_point() else asked.dtype == torch.bool and hasattr(asked, "all_of")
            )
        if func is _OPS.equal.default:
            return True
        if func is _OPS.index.Tensor and any(t is not None and t.dtype == torch.bool for t in args[1]):
            chosen, (mask,) = args  # as if one was
            return chosen.new_empty((1, *chosen.shape[mask.dim() :]))
        found = func(*args, **(kwargs or {}))
        if func is _OPS.all.default:
            found.all_of = True
        return found


def _gradients(_: Any, inputs: list[Tensor], *__: Any) -> tuple[Tensor, ...]:
    """Of torch.autograd.grad, which would start CUDA: calls.py asks flash_attn.cute itself for gradients here."""
    return tuple(torch.empty_like(t) for t in inputs)


@functools.cache
def _shapes() -> Any:
    """One for all cases, so that they may share tensors."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


def _no_gpu() -> dict[str, Any]:
    """What torch.cuda answers where CUDA does not start."""
    return {
        "current_device": lambda: 0,  # DLPack asks
        "synchronize": lambda: None,
        "reset_peak_memory_stats": lambda: None,
        "memory_allocated": lambda: 0,
        "max_memory_allocated": lambda: 0,
    }


def _hardware() -> Any:
    """What schedules of SM 10.0 ask the driver for."""
    from cutlass.utils.hardware_info import HardwareInfo

    clusters = lambda _, cluster_size, **__: machine.multiprocessors() // cluster_size  # noqa: E731
    return mock.patch.multiple(
        HardwareInfo,
        __init__=lambda *_, **__: None,
        get_device_multiprocessor_count=lambda *_: machine.multiprocessors(),
        get_max_active_clusters=clusters,
    )


@contextmanager
def compiling() -> Iterator[None]:
    """Calls compile their kernels and stop. On a GPU nothing changes."""
    if machine.GPU:
        yield
        return
    with ExitStack() as stack:
        stack.enter_context(_hardware())
        stack.enter_context(mock.patch.multiple(torch.cuda, **_no_gpu()))
        stack.enter_context(mock.patch.object(torch.autograd, "grad", _gradients))
        stack.enter_context(compiled.once())
        stack.enter_context(_shapes())
        stack.enter_context(Answers())
        yield
