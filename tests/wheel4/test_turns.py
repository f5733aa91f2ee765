"""First calls from several threads at once: compiling takes turns, and each kernel is compiled once."""

from __future__ import annotations

import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import machine
import pytest
import torch
from cutlass import cute
from flash_attn.cute import flash_attn_func, fork_compile, interface
from flash_attn.cute.cache_utils import JITCache
from problems import DEVICE

KINDS = [(64, False), (64, True)] * 3


@pytest.fixture
def empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel is known, neither here nor in a folder."""
    for function in (interface._flash_attn_fwd, interface._flash_attn_bwd):
        monkeypatch.setattr(function, "compile_cache", JITCache())


def compiled_by_threads(call: Any) -> int:
    """How many kernels threads compile that begin to call at once; a warning is an error."""
    made, compile_kernel = [], cute.compile
    start = threading.Barrier(len(KINDS))

    def counted(*args: Any, **options: Any) -> Any:
        made.append(args)
        return compile_kernel(*args, **options)

    def run(kind: tuple[int, bool]) -> None:
        start.wait()
        call(*kind)

    with (
        mock.patch.object(cute, "compile", counted),
        warnings.catch_warnings(),
        ThreadPoolExecutor(len(KINDS)) as threads,
    ):
        warnings.simplefilter("error", UserWarning)
        list(threads.map(run, KINDS))
    return len(made)


@pytest.mark.skipif(machine.GPU, reason="compiles, and launches nothing")
def test_threads_compile_in_turns_and_once(empty: None) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    entering = threading.Lock()  # which torch does not do for threads

    def call(head_dim: int, causal: bool) -> None:
        with entering:
            mode = FakeTensorMode()
            mode.__enter__()
        try:
            q, k, v = (torch.empty(2, 300, 4, head_dim, dtype=torch.float16, device=DEVICE) for _ in range(3))
            interface._flash_attn_fwd(q, k, v, causal=causal)
        finally:
            with entering:
                mode.__exit__(None, None, None)

    no_gpu = {"current_device": lambda: 0, "synchronize": lambda: None}
    with mock.patch.multiple(torch.cuda, **no_gpu):
        assert compiled_by_threads(call) == len(set(KINDS))


@pytest.mark.gpu
@pytest.mark.skipif(not machine.GPU, reason="launches what it compiles")
def test_threads_have_their_results(empty: None) -> None:
    torch.manual_seed(0)
    inputs = {d: [torch.randn(2, 300, 4, d, device=DEVICE).half() for _ in range(3)] for d, _ in KINDS}
    found: dict[tuple[int, bool], list[torch.Tensor]] = {}

    def call(head_dim: int, causal: bool) -> None:
        leaves = [t.detach().clone().requires_grad_() for t in inputs[head_dim]]
        out, _ = flash_attn_func(*leaves, causal=causal, deterministic=True)
        out.sum().backward()
        found.setdefault((head_dim, causal), []).append(torch.cat([out, *(t.grad for t in leaves)]))

    compiled_by_threads(call)
    torch.cuda.synchronize()
    for results in found.values():
        assert len(results) == 3
        assert all(torch.equal(one, results[0]) for one in results)


def test_a_thread_that_waited_looks_again_and_one_alone_compiles() -> None:
    """A caller that has no cache compiles when its turn has come."""
    cache: dict[str, Any] = {}
    inside, go = threading.Event(), threading.Event()
    made = []

    def compile_kernel(name: str) -> str:
        made.append(name)
        if not go.is_set():
            inside.set()
            go.wait(300)
        return name

    @fork_compile.once
    def look(name: str) -> Any:
        return nested(name)

    @fork_compile.once
    def nested(name: str) -> Any:
        if name not in cache:
            cache[name] = fork_compile.compile_in_turn(name)
        return cache[name]

    def late(call: Any) -> Any:
        inside.wait(300)
        waiting.release()
        return call("a")

    waiting = threading.Semaphore(0)
    with mock.patch.object(cute, "compile", compile_kernel), ThreadPoolExecutor(3) as threads:
        first = threads.submit(look, "a")
        others = [threads.submit(late, call) for call in (look, fork_compile.compile_in_turn)]
        for _ in others:
            waiting.acquire(timeout=300)
        go.set()
        assert [future.result(300) for future in (first, *others)] == ["a"] * 3
    assert len(made) in (2, 3)  # a thread may look before the first has put its kernel into the cache


def test_a_compile_that_fails_ends_its_turn() -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("no registers left")

    for _ in range(2):
        with (
            mock.patch.object(cute, "compile", fails),
            pytest.raises(RuntimeError, match="no registers left"),
        ):
            fork_compile.once(fork_compile.compile_in_turn)("kernel")
