"""The deterministic mode where no flash_attn keeps it: same names, checks, errors and environment.

Two layers, as there: the process's mode is one tuple, so that threads never see half of a change; over it
lies a context variable, of which each thread and each asyncio task has its own.
"""

import contextlib
import contextvars
import inspect
import os
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from flash_attn.cute.fork_environment import env_switch

__all__ = ["DeterministicMode", "deterministic_mode", "get_deterministic_mode", "set_deterministic_mode"]

_DEFAULT_SPLIT_SIZE = 2048
_GRANULE = 64  # of split_size, in flash_attn too
_MAX_SPLIT_SIZE = 2**30  # leaves room for sums with sequence lengths in an int


class DeterministicMode(NamedTuple):
    """The mode in force: whether it is on, and the tokens a chunk of keys has."""

    enabled: bool
    split_size: int


def _checked(split_size: int, source: str) -> int:
    if not (0 < split_size <= _MAX_SPLIT_SIZE and split_size % _GRANULE == 0):
        raise ValueError(
            f"{source} is not a positive multiple of {_GRANULE} tokens up to {_MAX_SPLIT_SIZE}; "
            "multiples of 128, such as 2048, suit every head_dim"
        )
    return split_size


def _env_split_size() -> int:
    text = os.environ.get("FA2_SPLIT_SIZE") or str(_DEFAULT_SPLIT_SIZE)
    digits = text.isascii() and text.isdigit() and len(text) <= 10
    return _checked(int(text) if digits else 0, f"FA2_SPLIT_SIZE='{text}'")


_default_split_size = _env_split_size()
_process = DeterministicMode(env_switch("FA2_DETERMINISTIC"), _default_split_size)
# The open scopes of this thread or task, the inner one last. Generators may close them in another order.
_scopes: "contextvars.ContextVar[tuple[deterministic_mode, ...]]" = contextvars.ContextVar(
    "flash_attn.cute.deterministic_scopes", default=()
)


def _mode(enabled: bool, split_size: int | None) -> DeterministicMode:
    if not isinstance(enabled, bool):
        raise TypeError(f"enabled={enabled!r} is not a bool")
    if split_size is None:
        return DeterministicMode(enabled, _default_split_size)
    if isinstance(split_size, bool) or not isinstance(split_size, int):
        raise TypeError(f"split_size={split_size!r} is not an int (tokens) or None")
    return DeterministicMode(enabled, _checked(split_size, f"split_size={split_size}"))


def set_deterministic_mode(enabled: bool = True, split_size: int | None = None) -> None:
    """Turn the mode on or off for the whole process: every thread, from its next call on.

    A ``deterministic_mode(...)`` scope that is open goes before it.

    Args:
        enabled: on or off.
        split_size: tokens a chunk of keys has; keys are cut at 0, split_size, 2 * split_size, …
            ``None``: FA2_SPLIT_SIZE, or 2048.

    Raises:
        TypeError: an argument of another type.
        ValueError: a split_size that suits no head_dim.
    """
    global _process
    _process = _mode(enabled, split_size)


def get_deterministic_mode() -> DeterministicMode:
    """The mode a call made here and now would run under, scopes included."""
    scopes = _scopes.get()
    return scopes[-1].mode if scopes else _process


_Decorated = TypeVar("_Decorated", bound=Callable[..., Any])


class deterministic_mode(contextlib.ContextDecorator):
    """Turn the mode on (or off) inside a ``with`` block, or for a function that it decorates.

    It holds for this thread or asyncio task alone: a thread started inside does not inherit it, and nor do
    autograd's, which compute gradients. Use :func:`set_deterministic_mode` for those. Scopes nest, the inner
    one goes first; threads and tasks may share one. A generator has no scopes of its own: one that it yields
    inside holds for whoever resumes it. Arguments and errors as in :func:`set_deterministic_mode`; decorating
    a generator or a coroutine function is a ``TypeError``, because its body runs after the call has returned.
    """

    def __init__(self, enabled: bool = True, split_size: int | None = None) -> None:
        self.mode = _mode(enabled, split_size)

    def __enter__(self) -> None:
        _scopes.set((*_scopes.get(), self))

    def __exit__(self, *_: object) -> None:
        scopes = _scopes.get()
        places = [place for place, one in enumerate(scopes) if one is self]
        if not places:
            raise RuntimeError(
                "deterministic_mode(): the scope was opened in another thread or asyncio task, or not at all"
            )
        _scopes.set(scopes[: places[-1]] + scopes[places[-1] + 1 :])

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
