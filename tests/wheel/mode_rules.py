"""The rules that every package of this repository keeps for its deterministic mode, as cases.

A module of a suite imports all of them, and has two fixtures: ``package``, and ``in_process``, which runs code in a
process that has imported the package as ``f``. tests/wheel4 does so too.
"""

from __future__ import annotations

import asyncio
import subprocess
import threading
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest

Process = Callable[..., "subprocess.CompletedProcess[str]"]

VARIABLES = ("FA2_DETERMINISTIC", "FA2_SPLIT_SIZE", "FA2_DEBUG")
LARGEST = 2**30
# No multiple of 64, none that is positive, or one that overflows.
BAD_SIZES = (0, -512, 100, LARGEST + 64, 2**31, 2**32, 2**40)
BAD_TEXTS = ("abc", "0", "-512", "100", "512.0", "٥١٢", " 512", "+512", "4294967296", "99999999999999999999")


def test_the_package_has_the_surface(package: ModuleType) -> None:
    for name in ("deterministic_mode", "get_deterministic_mode", "set_deterministic_mode", "fork_info"):
        assert callable(getattr(package, name))
        assert name in getattr(package, "__all__", [name])


def test_mode_is_off_by_default_with_2048_tokens(in_process: Process) -> None:
    done = in_process("print(tuple(f.get_deterministic_mode()))")
    assert done.stdout.strip() == "(False, 2048)", done.stderr


def test_environment_sets_the_defaults(in_process: Process) -> None:
    code = "print(tuple(f.get_deterministic_mode())); f.set_deterministic_mode(True, 512); f.set_deterministic_mode(True); print(f.get_deterministic_mode().split_size)"
    done = in_process(code, FA2_DETERMINISTIC="1", FA2_SPLIT_SIZE="1024")
    assert done.stdout.split("\n")[:2] == ["(True, 1024)", "1024"], done.stderr


def test_environment_is_read_once(in_process: Process) -> None:
    code = "import os; os.environ['FA2_SPLIT_SIZE'] = 'bad'; f.set_deterministic_mode(True); print(f.get_deterministic_mode().split_size)"
    done = in_process(code, FA2_SPLIT_SIZE="1024")
    assert done.stdout.strip() == "1024", done.stderr


@pytest.mark.parametrize(
    ("name", "value"),
    [("FA2_DETERMINISTIC", "yes"), ("FA2_DETERMINISTIC", "2"), ("FA2_DEBUG", "on")]
    + [("FA2_SPLIT_SIZE", text) for text in BAD_TEXTS],
)
def test_bad_environment_is_an_error_at_import_that_names_it(
    name: str, value: str, in_process: Process
) -> None:
    done = in_process("", **{name: value})
    assert done.returncode != 0
    # A ValueError, not an ImportError: "try: import …" must not take it for a missing package.
    assert f"ValueError: {name}='{value}'" in done.stderr


@pytest.mark.parametrize("size", BAD_SIZES)
def test_bad_split_size_is_a_value_error_that_names_it(size: int, package: ModuleType) -> None:
    text = f"split_size={size} is not a positive multiple of 64 tokens up to {LARGEST}"
    with pytest.raises(ValueError, match=text):
        package.set_deterministic_mode(True, size)
    with pytest.raises(ValueError, match=text):
        package.deterministic_mode(split_size=size)
    assert package.get_deterministic_mode() == (False, 2048)


@pytest.mark.parametrize("size", [64, 192, LARGEST])
def test_a_multiple_of_64_is_taken(size: int, package: ModuleType) -> None:
    with package.deterministic_mode(split_size=size):
        assert package.get_deterministic_mode() == (True, size)
    package.set_deterministic_mode(True, size)
    assert package.get_deterministic_mode() == (True, size)


@pytest.mark.parametrize("bad", ["512", 512.0, True])
def test_arguments_of_another_type_are_type_errors(bad: object, package: ModuleType) -> None:
    for function in (package.set_deterministic_mode, package.deterministic_mode):
        with pytest.raises(TypeError, match="split_size"):
            function(True, bad)
        with pytest.raises(TypeError, match="enabled"):
            function(512)


def test_scopes_nest_and_end_with_an_exception(package: ModuleType) -> None:
    mode, now = package.deterministic_mode, package.get_deterministic_mode
    package.set_deterministic_mode(True, 1024)
    with mode(split_size=2048):
        assert now() == (True, 2048)
        with pytest.raises(KeyError, match="off"), mode(False):
            raise KeyError("on" if now().enabled else "off")
        assert now() == (True, 2048)
    assert now() == (True, 1024)


def test_scope_decorates_a_function(package: ModuleType) -> None:
    @package.deterministic_mode(split_size=256)
    def inside() -> tuple[bool, int]:
        return tuple(package.get_deterministic_mode())  # type: ignore[return-value]

    assert inside() == (True, 256)
    assert inside() == (True, 256)
    assert not package.get_deterministic_mode().enabled


def test_scope_decorates_concurrent_and_recursive_calls(package: ModuleType) -> None:
    barrier = threading.Barrier(4)

    @package.deterministic_mode(split_size=256)
    def inside(depth: int) -> bool:
        if depth:
            return bool(inside(depth - 1))
        barrier.wait(600)
        return bool(package.get_deterministic_mode() == (True, 256))

    seen: list[bool] = []
    threads = [threading.Thread(target=lambda: seen.append(inside(3))) for _ in range(4)]
    _run(threads)
    assert seen == [True] * 4


def test_scope_refuses_to_decorate_what_runs_after_the_call(package: ModuleType) -> None:
    async def coroutine() -> None:
        pass

    def generator() -> Iterator[None]:
        yield

    for function, advice in (
        (coroutine, "inside its body"),
        (generator, "around each part of its body that does not yield"),
    ):
        with pytest.raises(TypeError, match=f"cannot decorate .*: open the scope {advice}"):
            package.deterministic_mode()(function)


def test_scopes_that_generators_close_in_another_order_leave_nothing_open(package: ModuleType) -> None:
    def generator(split_size: int) -> Iterator[None]:
        with package.deterministic_mode(split_size=split_size):
            yield

    one, other = generator(512), generator(1024)
    next(one)
    next(other)
    one.close()  # type: ignore[attr-defined]
    assert package.get_deterministic_mode() == (True, 1024)
    other.close()  # type: ignore[attr-defined]
    assert not package.get_deterministic_mode().enabled


def test_threads_and_tasks_share_a_scope(package: ModuleType) -> None:
    shared, now = package.deterministic_mode(split_size=512), package.get_deterministic_mode
    seen: list[object] = []

    def thread(barrier: threading.Barrier) -> None:
        with shared, shared:
            barrier.wait(600)
            seen.append(now())
            barrier.wait(600)
        seen.append(now())

    async def task() -> None:
        with shared:
            await asyncio.sleep(0)
            seen.append(now())
        seen.append(now())

    async def tasks() -> None:
        await asyncio.gather(task(), task())

    meeting = threading.Barrier(2)
    _run([threading.Thread(target=thread, args=(meeting,)) for _ in range(2)])
    asyncio.run(tasks())
    off = now()
    assert not off.enabled
    assert seen.count((True, 512)) == seen.count(off) == 4


def test_a_scope_that_was_opened_elsewhere_is_not_closed_here(package: ModuleType) -> None:
    scope = package.deterministic_mode()
    with pytest.raises(RuntimeError, match="opened in another thread or asyncio task, or not at all"):
        scope.__exit__(None, None, None)


def test_scope_stays_in_its_thread_and_the_process_mode_reaches_all(package: ModuleType) -> None:
    seen: list[tuple[bool, int]] = []

    def look() -> None:
        _run([threading.Thread(target=lambda: seen.append(tuple(package.get_deterministic_mode())))])

    with package.deterministic_mode(split_size=512):
        look()
    package.set_deterministic_mode(True, 1024)
    look()
    assert seen == [(False, 2048), (True, 1024)]


def test_scopes_of_interleaved_asyncio_tasks_do_not_mix(package: ModuleType) -> None:
    async def task(size: int, rounds: int) -> bool:
        with package.deterministic_mode(split_size=size):
            for _ in range(rounds):
                await asyncio.sleep(0)
                if package.get_deterministic_mode() != (True, size):
                    return False
        return not package.get_deterministic_mode().enabled

    async def main() -> list[bool]:
        return await asyncio.gather(task(256, 3), task(512, 7), task(1024, 2))

    assert all(asyncio.run(main()))
    assert not package.get_deterministic_mode().enabled


def test_mode_set_by_many_threads_is_never_seen_half_changed(package: ModuleType) -> None:
    pairs = {(True, 256), (False, 1024)}
    seen: set[tuple[bool, int]] = set()
    stop = threading.Event()

    def write(enabled: bool, size: int) -> None:
        while not stop.is_set():
            package.set_deterministic_mode(enabled, size)

    def read() -> None:
        seen.update(tuple(package.get_deterministic_mode()) for _ in range(20000))

    package.set_deterministic_mode(True, 256)
    writers = [threading.Thread(target=write, args=pair) for pair in pairs]
    for thread in writers:
        thread.start()
    _run([threading.Thread(target=read) for _ in range(2)])
    stop.set()
    for thread in writers:
        thread.join()
    assert seen <= pairs


def _run(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


__all__ = [name for name in globals() if name.startswith("test_")]
