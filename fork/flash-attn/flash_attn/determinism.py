"""The deterministic mode: the bits of a row depend on that row alone, not on the call it came in.

Gradients keep it as well: dq of a query, dk and dv of a key depend on their own sequence alone, with
``deterministic=True`` or without.

The mode lives in the extension, so that direct callers of ``flash_attn_2_cuda`` obey it too. It is read on
the host at each call: a ``torch.compile``d function obeys the mode it runs under, and its gradients the
process-wide one. That must be the same: with ALiBi slopes or more queries than keys, and a window as long as
the keys, gradients are those of another function otherwise. A captured CUDA graph keeps the mode it was
captured with, those that ``mode="reduce-overhead"`` captures included: there, compile one function for each
mode.

Environment, read when ``flash_attn`` is imported (a value that is none of these is a ``ValueError``):
    FA2_DETERMINISTIC: ``1`` or ``0``, the process-wide mode to start with. Default ``0``.
    FA2_SPLIT_SIZE: tokens, the default of ``split_size``. Default 2048.
    FA2_DEBUG: ``1`` prints to stderr how each forward call that may be split was.
    FA2_WAIT_LIMIT: seconds, 0 to 86400. A kernel whose thread blocks wait for each other ends with a message
        where none passes its turn on for so long. Default 120; 0: no limit.
    FA2_CHECK: ``1`` looks at the tables of each call on the GPU: cu_seqlens, lengths of caches, pages and
        indices. The first value that is wrong is a ``ValueError``. Each call waits for the GPU, so this is
        for finding mistakes. Calls that a CUDA graph captures are not looked at, which is warned about once.
        On FlashAttention-4's kernels it looks alone for sequences that are longer than max_seqlen_q or
        max_seqlen_k.
"""

import contextlib
import contextvars
import functools
import inspect
import os
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import flash_attn_2_cuda as flash_attn_gpu
import torch

flash_attn_gpu.check_environment()
_VARIABLES = (
    *("FA2_DETERMINISTIC", "FA2_SPLIT_SIZE", "FA2_DEBUG", "FA2_CHECK", "FA2_WAIT_LIMIT"),
    *("FA2_KERNELS", "FA2_KERNELS_OTHERWISE"),
)
for _name in sorted(os.environ):
    if _name.startswith("FA2_") and _name not in _VARIABLES:
        warnings.warn(f"flash_attn knows no variable {_name}; it knows {', '.join(_VARIABLES)}", stacklevel=2)

__all__ = ["DeterministicMode", "deterministic_mode", "get_deterministic_mode", "set_deterministic_mode"]


class DeterministicMode(NamedTuple):
    """The mode in force: whether it is on, and the tokens a chunk of keys has."""

    enabled: bool
    split_size: int


def _split_size(split_size: int | None) -> int | None:
    if split_size is not None and (isinstance(split_size, bool) or not isinstance(split_size, int)):
        raise TypeError(f"split_size={split_size!r} is not an int (tokens) or None")
    return split_size


def _enabled(enabled: bool) -> bool:
    if not isinstance(enabled, bool):
        raise TypeError(f"enabled={enabled!r} is not a bool")
    return enabled


def set_deterministic_mode(enabled: bool = True, split_size: int | None = None) -> None:
    """Turn the mode on or off for the whole process: every thread, from its next call on.

    A ``deterministic_mode(...)`` scope that is open goes before it.

    Args:
        enabled: on or off.
        split_size: tokens a chunk of keys has; keys are cut at 0, split_size, 2 * split_size, …, and
            their partial results folded from the last to the first. Part of the result's bits. A multiple
            of the kernel's kBlockN: 128 up to head_dim 128, else 64. A call for which it is not raises an
            error. ``None``: FA2_SPLIT_SIZE, or 2048.

    Raises:
        TypeError: an argument of another type.
        ValueError: a split_size that suits no head_dim.
    """
    flash_attn_gpu.set_deterministic_mode(_enabled(enabled), _split_size(split_size))


def get_deterministic_mode() -> DeterministicMode:
    """The mode a call made here and now would run under, scopes included."""
    return DeterministicMode(*flash_attn_gpu.get_deterministic_mode())


# The open scopes of this thread or task, the inner one last. Generators may close them in another order.
_scopes: "contextvars.ContextVar[tuple[deterministic_mode, ...]]" = contextvars.ContextVar(
    "flash_attn.deterministic_scopes", default=()
)


def _set_scopes(scopes: "tuple[deterministic_mode, ...]") -> None:
    _scopes.set(scopes)
    flash_attn_gpu.deterministic_scope.set(scopes[-1].mode if scopes else None)


def _eager(function: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled function that opens a scope breaks its graph here and goes on eagerly.

    As ``torch.compiler.disable``, which imports the compiler: that is done when something is compiled.
    """

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        if not torch.compiler.is_compiling():
            return function(*args)
        return torch.compiler.disable(function)(*args)

    return call


@_eager
def _open_scope(scope: "deterministic_mode") -> None:
    _set_scopes((*_scopes.get(), scope))


@_eager
def _close_scope(scope: "deterministic_mode") -> None:
    scopes = _scopes.get()
    places = [place for place, one in enumerate(scopes) if one is scope]
    if not places:
        raise RuntimeError(
            "deterministic_mode(): the scope was opened in another thread or asyncio task, or not at all"
        )
    _set_scopes(scopes[: places[-1]] + scopes[places[-1] + 1 :])


@_eager
def _default(split_size: int | None) -> int:
    return flash_attn_gpu.check_split_size(split_size)


_Decorated = TypeVar("_Decorated", bound=Callable[..., Any])


class deterministic_mode(contextlib.ContextDecorator):
    """Turn the mode on (or off) inside a ``with`` block, or for a function that it decorates.

    It holds for this thread or asyncio task alone: a thread started inside does not inherit it, and nor does
    autograd's, where activation checkpointing computes the forward pass again. Use
    :func:`set_deterministic_mode` for those. Scopes nest, the inner one goes first; threads and tasks may
    share one. A generator has no scopes of its own: one that it yields inside holds for whoever resumes it.
    Arguments and errors as in :func:`set_deterministic_mode`; decorating a generator or a coroutine function
    is a ``TypeError``, because its body runs after the call has returned.
    """

    def __init__(self, enabled: bool = True, split_size: int | None = None) -> None:
        self.mode = (_enabled(enabled), _default(_split_size(split_size)))

    def __enter__(self) -> None:
        _open_scope(self)

    def __exit__(self, *_: object) -> None:
        _close_scope(self)

    def __call__(self, function: _Decorated) -> _Decorated:
        """The function, which opens the scope at each call."""
        kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
        if any(kind(function) for kind in kinds):
            advice = (
                "inside its body"
                if kinds[0](function)
                else "around each part of its body that does not yield"
            )
            raise TypeError(f"deterministic_mode() cannot decorate {function!r}: open the scope {advice}")
        return super().__call__(function)
