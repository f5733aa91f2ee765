"""Which kernels flash_attn's functions run on: this package's, or FlashAttention-4's, of flash_attn_4.

``set_kernels("fa4")`` chooses for the process, ``with kernels("fa4"):`` for a thread or asyncio task.
FlashAttention-4's kernels are for Hopper (compute capability 9.x). They serve dense, packed and varlen calls,
and those on a cache, forward and backward. Which calls they serve follows from the GPU, dtype, head dim and
options alone, never from shapes or lengths: with the deterministic mode on, decode has the bits of prefill on
them too. They do not serve ALiBi slopes, dropout, attn_mask, attn_bias, learnable_sink and cache_leftpad, nor
head dims that are no multiple of 16 once padded to one of 8. Such calls run on this package's kernels, or
with ``otherwise="error"`` are a ``NotImplementedError``.

Bits depend on the kernels. A call's gradients are computed by those that its forward call ran on. A
``torch.compile``d function obeys what it runs under, and its gradients the process-wide choice.

Environment, read when ``flash_attn`` is imported (a value that is none of these is a ``ValueError``):
    FA2_KERNELS: ``fa2`` or ``fa4``, the process-wide choice to start with. Default ``fa2``.
    FA2_KERNELS_OTHERWISE: ``fa2`` or ``error``, what becomes of calls that they do not serve. Default
        ``fa2``.
"""

import contextlib
import contextvars
import functools
import inspect
import os
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

from . import fork_fa4
from .determinism import _eager

__all__ = ["Kernels", "get_kernels", "kernels", "set_kernels"]

FAMILIES, OTHERWISE = ("fa2", "fa4"), ("fa2", "error")
SERVED_DTYPES = (torch.float16, torch.bfloat16)
# Padded to a multiple of 8, as ever: those at which all of their kernels compile, of caches and gradients.
SERVED_HEAD_DIMS = frozenset(range(16, 257, 16))
SERVED_CAPABILITY = 9  # its major part
LARGEST_HEAD_DIM = 256  # of any kernels

ON = False  # whether any thread may have chosen other kernels: where none has, a call costs this test
_DEBUG = os.environ.get("FA2_DEBUG") == "1"
_Result = TypeVar("_Result")
_calls: "Counter[str]" = Counter()  # since somebody asked


class Kernels(NamedTuple):
    """The choice in force: ``family`` fa2 or fa4, and what becomes of calls that fa4's do not serve."""

    family: str
    otherwise: str


OWN = Kernels("fa2", "fa2")


class Asked(NamedTuple):
    """All of a call that decides which kernels serve it. Shapes and lengths are not among it."""

    capability: tuple[int, int]
    dtype: torch.dtype
    head_dim: int
    options: tuple[str, ...] = ()  # what it has that may not be served


@functools.cache
def unserved(asked: Asked) -> str | None:
    """What FlashAttention-4's kernels do not serve of a call; None where they serve it."""
    if asked.capability[0] != SERVED_CAPABILITY:
        return "compute capability {}.{}".format(*asked.capability)
    if asked.dtype not in SERVED_DTYPES:
        return f"dtype {asked.dtype}"
    if -(-asked.head_dim // 8) * 8 not in SERVED_HEAD_DIMS:
        return f"head_dim {asked.head_dim}"
    return " and ".join(asked.options) or None


# The switch ------------------------------------------------------------------------------------------------


def _checked(family: str, otherwise: str) -> Kernels:
    for name, value, known in (("family", family, FAMILIES), ("otherwise", otherwise, OTHERWISE)):
        if value not in known:
            raise ValueError(f"{name}={value!r} is neither {known[0]!r} nor {known[1]!r}")
    return Kernels(family, otherwise)


def _of_environment() -> Kernels:
    found = []
    for name, known in (("FA2_KERNELS", FAMILIES), ("FA2_KERNELS_OTHERWISE", OTHERWISE)):
        value = os.environ.get(name) or known[0]
        if value not in known:
            raise ValueError(f"{name}='{value}' is neither {known[0]} nor {known[1]}")
        found.append(value)
    return Kernels(*found)


_process = _of_environment()
_others: set[int] = set()  # scopes of other kernels that are open somewhere
_changing = threading.RLock()  # reentrant: a scope may be collected while another is opened


def _renew() -> None:
    global ON
    ON = bool(_others) or _process.family != "fa2"


def _appeared(scope: int) -> None:
    with _changing:
        _others.add(scope)
        _renew()


def _gone(scope: int) -> None:
    with _changing:
        _others.discard(scope)
        _renew()


class _Opened:
    """What a scope leaves in a context. Asyncio copies contexts to tasks, where it may outlive the block."""

    def __init__(self, scope: "kernels") -> None:
        self.scope, self.choice = scope, scope.choice
        if self.choice.family != "fa2":
            _appeared(id(self))
            weakref.finalize(self, _gone, id(self)).atexit = False


class _Held:
    """The scope of a call of our own, of a choice that was made already."""

    def __init__(self, choice: Kernels) -> None:
        self.choice = choice


def under(choice: Kernels, function: Callable[..., _Result], *given: Any) -> _Result:
    """Run one call under a choice that was made already: quicker than in a ``kernels`` scope."""
    if choice.family == "fa2":
        before = _scopes.set(_OWN_HELD)
        try:
            return function(*given)
        finally:
            _scopes.reset(before)
    held = _Held(choice)
    _appeared(id(held))
    before = _scopes.set((held,))
    try:
        return function(*given)
    finally:
        _scopes.reset(before)
        _gone(id(held))


_OWN_HELD = (_Held(OWN),)
_scopes: "contextvars.ContextVar[tuple[_Opened | _Held, ...]]" = contextvars.ContextVar(
    "flash_attn.kernels_scopes", default=()
)
if _process.family == "fa4":
    fork_fa4.check_installed()  # without importing it, which takes seconds and may start CUDA
    _renew()


@_eager
def _prepared(family: str, otherwise: str) -> Kernels:
    """The choice, if there are such kernels here."""
    choice = _checked(family, otherwise)
    if choice.family == "fa4":
        fork_fa4.check_usable(SERVED_CAPABILITY)
    return choice


def set_kernels(family: str = "fa2", otherwise: str = "fa2") -> None:
    """Choose the kernels for the whole process: every thread, from its next call on. Scopes go first.

    Args:
        family: ``"fa2"``, this package's; ``"fa4"``, those of the flash_attn_4 wheel.
        otherwise: where calls go that ``"fa4"`` does not serve: ``"fa2"``, or ``"error"`` for a
            ``NotImplementedError`` that names what is not served.

    Raises:
        ValueError: another word.
        RuntimeError: the flash_attn_4 wheel is missing, or another one, or does not serve this GPU.
    """
    global _process
    choice = _prepared(family, otherwise)
    with _changing:
        _process = choice
        _renew()


def get_kernels() -> Kernels:
    """The choice that a call made here and now would run under, scopes included."""
    scopes = _scopes.get()
    return scopes[-1].choice if scopes else _process


_Decorated = TypeVar("_Decorated", bound=Callable[..., Any])


class kernels(contextlib.ContextDecorator):
    """Choose the kernels inside a ``with`` block, or for a function that it decorates.

    It holds for this thread or asyncio task alone, as ``deterministic_mode`` does: threads started inside do
    not inherit it, nor does activation checkpointing in backward. Arguments and errors as in
    :func:`set_kernels`.
    """

    def __init__(self, family: str = "fa2", otherwise: str = "fa2") -> None:
        self.choice = _prepared(family, otherwise)

    @_eager
    def __enter__(self) -> None:
        _scopes.set((*_scopes.get(), _Opened(self)))

    @_eager
    def __exit__(self, *_: object) -> None:
        scopes = _scopes.get()
        places = [place for place, one in enumerate(scopes) if getattr(one, "scope", None) is self]
        if not places:
            raise RuntimeError(
                "kernels(): the scope was opened in another thread or asyncio task, or not at all"
            )
        _scopes.set(scopes[: places[-1]] + scopes[places[-1] + 1 :])

    def __call__(self, function: _Decorated) -> _Decorated:
        """The function, which opens the scope at each call."""
        late = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
        if any(kind(function) for kind in late):  # its body runs after the call has returned
            raise TypeError(f"kernels() cannot decorate {function!r}: open the scope inside its body")
        return super().__call__(function)


def told() -> Any:
    """For fork_info: the choice, how many calls which kernels ran, and what fa4's are made of if loaded."""
    choice = get_kernels()
    return {**choice._asdict(), "calls": dict(_calls), "flash_attn_4": fork_fa4.provenance()}


# Calls, by the names and arguments of flash_attn_2_cuda -----------------------------------------------------


def takes_fa4(function: str, q: torch.Tensor, **options: Any) -> bool:
    """Whether a call runs on FlashAttention-4's kernels.

    Args:
        function: its name, for people.
        q: the queries.
        options: what the call has of those that they do not serve; None and False: it has it not.

    Raises:
        NotImplementedError: they do not serve it, and calls are not to go elsewhere.
    """
    choice = get_kernels()
    if choice.family != "fa4":
        return False
    present = tuple(name for name, value in options.items() if value is not None and value is not False)
    asked = Asked(fork_fa4.capability(q.device), q.dtype, q.shape[-1], present)
    reason = unserved(asked)
    # Of a call that no kernels serve, the others say what is wrong.
    others_may = asked.dtype in SERVED_DTYPES and asked.head_dim <= LARGEST_HEAD_DIM
    if reason is not None and choice.otherwise == "error" and others_may:
        raise NotImplementedError(
            f"{function}: FlashAttention-4's kernels do not serve {reason}; "
            "set_kernels('fa4', otherwise='fa2') lets such calls run on flash_attn's own"
        )
    _tell(function, reason)
    return reason is None


def _tell(function: str, reason: str | None) -> None:
    _calls["fa4" if reason is None else f"fa2: {reason}"] += 1
    if _DEBUG:
        words = "kernels=fa4" if reason is None else f"kernels=fa2, for fa4's do not serve {reason}"
        sys.stderr.write(f"[flash-attn] {function}: {words}\n")


def fwd(*given: Any) -> Any:
    return _run("fwd", given) if ON else fork_fa4.own.fwd(*given)


def varlen_fwd(*given: Any) -> Any:
    return _run("varlen_fwd", given) if ON else fork_fa4.own.varlen_fwd(*given)


def bwd(*given: Any) -> Any:
    return _run("bwd", given) if ON else fork_fa4.own.bwd(*given)


def varlen_bwd(*given: Any) -> Any:
    return _run("varlen_bwd", given) if ON else fork_fa4.own.varlen_bwd(*given)


def fork_fwd_kvcache(*given: Any) -> Any:
    """Its last argument, which the other has not, is whether the log-sum-exp is wanted."""
    return _run("fork_fwd_kvcache", given) if ON else fork_fa4.own.fork_fwd_kvcache(*given[:-1])


def _run(name: str, given: tuple[Any, ...]) -> Any:
    options = fork_fa4.options_of(name, given)
    first = given[1] if name.endswith("bwd") else given[0]  # q
    if takes_fa4(name, first, **options):
        return getattr(fork_fa4, name)(*given)
    return getattr(fork_fa4.own, name)(*(given[:-1] if name == "fork_fwd_kvcache" else given))
