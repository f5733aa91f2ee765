"""Compiling takes turns: the DSL keeps what it compiles in one place, and two threads mix it up.

``cute`` here is ``cutlass.cute`` with a ``compile`` of our own. Calls of compiled kernels do not wait.
"""

import functools
import sys
import threading
import types
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import cutlass.cute

__all__ = ["compile_in_turn", "cute", "once"]

_Called = TypeVar("_Called", bound=Callable[..., Any])
_turn = threading.RLock()


class _Waited(BaseException):
    """Another thread compiled meanwhile, maybe the same kernel: the call looks for it again."""


def compile_in_turn(*args: Any, **options: Any) -> Any:
    """``cutlass.cute.compile``, by one thread at a time."""
    if not _turn.acquire(blocking=False):
        with _turn:
            if not _is_looked_for():
                return _compile(*args, **options)
        raise _Waited
    try:
        return _compile(*args, **options)
    finally:
        _turn.release()


def _compile(*args: Any, **options: Any) -> Any:
    # The DSL warns of upstream's AuxData at each kernel, and takes it nevertheless. Filters are those of the
    # process, so they are changed in the turn alone.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Argument aux_data ", category=UserWarning)
        return cutlass.cute.compile(*args, **options)


def once(function: _Called) -> _Called:
    """A function that compiles what its cache lacks: it waits for others, and makes none of theirs again."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        while True:
            try:
                return function(*args, **kwargs)
            except _Waited:
                continue

    _looking.add(call.__code__)  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


_looking: set[types.CodeType] = set()


def _is_looked_for() -> bool:
    """Whether a caller of this thread looks for the kernel again. A call that does not wait never asks."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _looking:
            return True
        frame = frame.f_back
    return False


class _Cute(types.ModuleType):
    def __getattr__(self, name: str) -> Any:  # what the module makes when it is asked for
        return getattr(cutlass.cute, name)


cute: Any = _Cute("cutlass.cute")
vars(cute).update(vars(cutlass.cute))
cute.compile = compile_in_turn
