"""Each kernel that a run asks for where there is no GPU is compiled once, by the first process that asks for it.

A kernel is what ``cute.compile`` is given: the class of the kernel and what it was made with, and the types of its
arguments. flash_attn.cute's own keys tell apart more than that: on SM 9.0 also whether one tile has all queries of
a call, which no kernel there depends on. So a kernel serves several keys, layouts and configurations.

A run may remember which kernels have compiled. Another one leaves them out while flash_attn.cute's sources, the
toolchain and the architecture are the same: all that the DSL's file cache would find a kernel by, and the identity.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

# Variables that the processes of a run share: its folder, and the one where runs remember.
FOLDER, REMEMBERED = "FLASH_ATTN_4_SUITE_RUN", "FLASH_ATTN_4_SUITE_REMEMBERED"
_DONE = ".done"
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class Symbols:
    """Numbers for symbolic sizes, as they come: which of a kernel's sizes are one is part of its types."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}

    def of(self, sizes: Iterable[Any]) -> list[int]:
        from cutlass.cute.typing import SymInt

        ids = [id(size) for size in sizes if isinstance(size, SymInt)]
        return [self._numbers.setdefault(i, len(self._numbers)) for i in ids]


def described(value: Any, symbols: Symbols, constant: bool = True) -> str:
    """What a kernel depends on of a value: of a number that it gets when it is launched, the type alone.

    Raises:
        TypeError: the text of a value would differ from process to process.
    """
    from flash_attn.cute import utils

    if hasattr(value, "__cache_key__"):
        return _tensor(value, symbols)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        return str({name: described(part, symbols, constant) for name, part in value.items()})
    if inspect.isfunction(value):
        return utils.hash_callable(value)
    if type(value).__module__.startswith("flash_attn."):  # a kernel that another one is made of
        return made(value, symbols)
    if value is None or constant:
        return _text(value)
    return type(value).__name__


def made(kernel: Any, symbols: Symbols) -> str:
    """A kernel's class, and what it was made with."""
    parts = {name: described(value, symbols) for name, value in sorted(vars(kernel).items())}
    return f"{type(kernel).__module__}.{type(kernel).__qualname__} {parts}"


def _tensor(value: Any, symbols: Symbols) -> str:
    from cutlass.cute.runtime import _FakeTensor

    if not isinstance(value, _FakeTensor):
        return _text(value.__cache_key__)
    return f"{value!r} {value.__cache_key__[:3]} {symbols.of((*value.shape, *value.stride))}"


def _text(value: object) -> str:
    text = repr(value)
    if _ADDRESS.search(text):
        raise TypeError(
            f"{text} is no description of what a kernel is made with: see tests/wheel4/compiled.py"
        )
    return text


def identity(kernel: Any, *arguments: Any, **options: Any) -> str:
    """A digest of all that ``cute.compile`` makes a kernel of."""
    symbols, signature = Symbols(), inspect.signature(kernel)
    text = [made(kernel, symbols), str(options.pop("options", ""))]
    for name, value in signature.bind(*arguments, **options).arguments.items():
        constant = "Constexpr" in str(signature.parameters[name].annotation)
        text.append(f"{name}: {described(value, symbols, constant)}")
    return hashlib.sha256("\n".join(text).encode()).hexdigest()


def _folder() -> Path:
    return Path(os.environ[FOLDER])


def _is_first(name: str) -> bool:
    try:
        (_folder() / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class Once:
    """In place of ``cute.compile``: compiles what no process of this run has asked for yet. Nothing is launched."""

    def __init__(self, compile_kernel: Callable[..., Any]) -> None:
        self._compile = compile_kernel

    def __call__(self, kernel: Any, *arguments: Any, **options: Any) -> None:
        name = identity(kernel, *arguments, **options)
        if not _is_first(name):
            return
        seconds, known = "remembered", _remembered(name)
        if known is None or not known.exists():
            began = time.process_time()
            # To its machine code. Code for the host to call it, which takes a fifth of the time, nobody would call.
            self._compile(kernel, *arguments, no_jit_engine=True, **options)
            seconds = str(time.process_time() - began)
            if known is not None:
                known.parent.mkdir(parents=True, exist_ok=True)
                known.touch()
        (_folder() / f"{name}{_DONE}").write_text(f"{type(kernel).__name__} {seconds}", encoding="utf-8")


def _remembered(name: str) -> Path | None:
    """Where a kernel is noted that has compiled; None: this run remembers nothing."""
    folder = os.environ.get(REMEMBERED)
    return Path(folder) / _made_of() / name if folder else None


@functools.cache
def _made_of() -> str:
    """What every kernel of a process is made of: sources, toolchain, architecture."""
    from flash_attn.cute import cache_utils, fork_cache

    return hashlib.sha256(
        cache_utils._compute_source_fingerprint().encode() + fork_cache.target()
    ).hexdigest()


@contextmanager
def once() -> Iterator[None]:
    from cutlass import cute

    with mock.patch.object(cute, "compile", _once(cute.compile)):
        yield


@functools.cache
def _once(compile_kernel: Callable[..., Any]) -> Once:
    return Once(compile_kernel)


def figures(folder: Path) -> dict[str, Any]:
    """How many kernels a run asked for, compiled and remembered, and CPU seconds of compiles by class of kernel."""
    paths = list(folder.iterdir())
    done = [path.read_text(encoding="utf-8").split() for path in paths if path.suffix == _DONE]
    seconds: dict[str, float] = {}
    for kind, own in done:
        if own != "remembered":
            seconds[kind] = round(seconds.get(kind, 0.0) + float(own), 1)
    remembered = sum(own == "remembered" for _, own in done)
    found = {
        "asked_for": len(paths) - len(done),
        "compiled": len(done) - remembered,
        "remembered": remembered,
    }
    return {**found, "seconds": seconds}
