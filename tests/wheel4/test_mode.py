"""The mode's Python surface, alone and beside a flash_attn that keeps the mode."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import machine
import pytest
import torch
from calls import dense, dense_gradients
from flash_attn import cute
from flash_attn.cute import deterministic_mode, get_deterministic_mode, set_deterministic_mode
from problems import Config, draw

# It loads a part of flash_attn.cute that needs neither CUTLASS nor torch, so that a process takes little time.
MODE = "import sys, types, importlib.util as u\np = types.ModuleType('flash_attn.cute')\np.__path__ = {path!r}\nsys.modules['flash_attn.cute'] = p\nfrom flash_attn.cute import fork_mode as f, fork_log\n"


def run_python(code: str, path: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code after the mode's import; ``path``: a folder with another flash_attn."""
    found = [str(path), *sys.path] if path else sys.path
    clean = dict.fromkeys(("FA2_DETERMINISTIC", "FA2_SPLIT_SIZE", "FA2_DEBUG"), "")
    env = {**os.environ, **clean, **environment, "PYTHONPATH": os.pathsep.join(filter(None, found))}
    words = [sys.executable, "-c", MODE.format(path=list(cute.__path__)) + code]
    return subprocess.run(words, env=env, capture_output=True, text=True, check=False)


def test_the_package_has_the_surface() -> None:
    for name in ("deterministic_mode", "get_deterministic_mode", "set_deterministic_mode", "fork_info"):
        assert name in cute.__all__
        assert callable(getattr(cute, name))


def test_import_needs_neither_torch_nor_an_extension() -> None:
    done = run_python("print(sorted({'torch', 'flash_attn_2_cuda', 'cutlass'} & set(sys.modules)))")
    assert done.stdout.strip() == "[]", done.stderr


WATCH = """
import sys, traceback, torch
start, files = torch.cuda._lazy_init, []
def watched():
    files.extend(frame.filename for frame in traceback.extract_stack())
    return start()
torch.cuda._lazy_init = watched
import flash_attn.cute
print(sorted({name for name in files if "fork_" in name}), torch.cuda.is_initialized())
"""


def test_importing_the_package_starts_no_cuda_of_its_own() -> None:
    """Where there is a GPU, quack-kernels 0.6.5 starts it at import; the fork's files do not."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WATCH], capture_output=True, text=True, check=True
    )
    files, started = done.stdout.strip().rsplit(maxsplit=1)
    assert files == "[]"
    assert started == str(machine.GPU)


def test_mode_is_off_by_default_with_2048_tokens() -> None:
    done = run_python("print(tuple(f.get_deterministic_mode()))")
    assert done.stdout.strip() == "(False, 2048)", done.stderr


def test_environment_sets_the_defaults_and_is_read_once() -> None:
    code = "import os; print(tuple(f.get_deterministic_mode())); os.environ['FA2_SPLIT_SIZE'] = 'bad'; f.set_deterministic_mode(True, 512); f.set_deterministic_mode(True); print(f.get_deterministic_mode().split_size)"
    done = run_python(code, FA2_DETERMINISTIC="1", FA2_SPLIT_SIZE="1024")
    assert done.stdout.split("\n")[:2] == ["(True, 1024)", "1024"], done.stderr


@pytest.mark.parametrize(
    ("name", "value"),
    [("FA2_DETERMINISTIC", v) for v in ("yes", "2")]
    + [("FA2_DEBUG", "on")]
    + [
        ("FA2_SPLIT_SIZE", v)
        for v in ("abc", "0", "-512", "100", "512.0", "٥١٢", "99999999999999999999", "4294967296")
    ],
)
def test_bad_environment_is_an_error_at_import_that_names_it(name: str, value: str) -> None:
    done = run_python("", **{name: value})
    assert done.returncode != 0
    assert f"ValueError: {name}='{value}'" in done.stderr


@pytest.mark.parametrize("bad", [0, -512, 100, 2**30 + 64, 2**40])
def test_bad_split_size_is_a_value_error_that_names_it(bad: int) -> None:
    for call in (lambda: set_deterministic_mode(True, bad), lambda: deterministic_mode(split_size=bad)):
        with pytest.raises(ValueError, match=f"split_size={bad} is not a positive multiple of 64"):
            call()
    assert not get_deterministic_mode().enabled


@pytest.mark.parametrize("bad", ["512", 512.0, True])
def test_arguments_of_another_type_are_type_errors(bad: object) -> None:
    with pytest.raises(TypeError, match="split_size"):
        set_deterministic_mode(True, bad)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="enabled"):
        set_deterministic_mode(512)  # type: ignore[arg-type]


def test_scopes_nest_and_end_with_an_exception() -> None:
    set_deterministic_mode(True, 1024)
    with deterministic_mode(split_size=2048):
        assert get_deterministic_mode() == (True, 2048)
        with pytest.raises(KeyError, match="off"), deterministic_mode(False):
            raise KeyError("on" if get_deterministic_mode().enabled else "off")
        assert get_deterministic_mode() == (True, 2048)
    assert get_deterministic_mode() == (True, 1024)


def test_scope_decorates_a_function_and_refuses_what_runs_later() -> None:
    @deterministic_mode(split_size=256)
    def inside(depth: int) -> tuple[bool, int]:
        return inside(depth - 1) if depth else tuple(get_deterministic_mode())  # type: ignore[return-value]

    assert inside(2) == (True, 256)
    assert not get_deterministic_mode().enabled

    async def coroutine() -> None:
        pass

    def generator() -> Iterator[None]:
        yield

    for function, advice in ((coroutine, "inside its body"), (generator, "around each part of its body")):
        with pytest.raises(TypeError, match=f"cannot decorate .*: open the scope {advice}"):
            deterministic_mode()(function)


def test_scopes_that_generators_close_in_another_order_leave_nothing_open() -> None:
    def generator(split_size: int) -> Iterator[None]:
        with deterministic_mode(split_size=split_size):
            yield

    one, other = generator(512), generator(1024)
    next(one)
    next(other)
    one.close()  # type: ignore[attr-defined]
    assert get_deterministic_mode() == (True, 1024)
    other.close()  # type: ignore[attr-defined]
    assert not get_deterministic_mode().enabled


def test_a_scope_that_was_opened_elsewhere_is_not_closed_here() -> None:
    with pytest.raises(RuntimeError, match="opened in another thread or asyncio task, or not at all"):
        deterministic_mode().__exit__(None, None, None)


def test_scope_stays_in_its_thread_and_the_process_mode_reaches_all() -> None:
    seen: list[tuple[bool, int]] = []

    def look() -> None:
        thread = threading.Thread(target=lambda: seen.append(tuple(get_deterministic_mode())))  # type: ignore[arg-type]
        thread.start()
        thread.join()

    with deterministic_mode(split_size=512):
        look()
    set_deterministic_mode(True, 1024)
    look()
    assert seen == [(False, 2048), (True, 1024)]


def test_scopes_of_interleaved_asyncio_tasks_do_not_mix() -> None:
    async def task(size: int, rounds: int) -> bool:
        with deterministic_mode(split_size=size):
            for _ in range(rounds):
                await asyncio.sleep(0)
                if get_deterministic_mode() != (True, size):
                    return False
        return not get_deterministic_mode().enabled

    async def main() -> list[bool]:
        return await asyncio.gather(task(256, 3), task(512, 7), task(1024, 2))

    assert all(asyncio.run(main()))


def test_mode_set_by_many_threads_is_never_seen_half_changed() -> None:
    pairs = {(True, 256), (False, 1024)}
    stop = threading.Event()

    def write(enabled: bool, size: int) -> None:
        while not stop.is_set():
            set_deterministic_mode(enabled, size)

    set_deterministic_mode(True, 256)
    writers = [threading.Thread(target=write, args=pair) for pair in pairs]
    for thread in writers:
        thread.start()
    seen = {tuple(get_deterministic_mode()) for _ in range(20000)}
    stop.set()
    for thread in writers:
        thread.join()
    assert seen <= pairs


@pytest.fixture
def beside(tmp_path: Path) -> Callable[[str], Path]:
    """A folder with a flash_attn whose determinism.py has this text; of ``-``, it has none."""

    def make(text: str) -> Path:
        package = tmp_path / "flash_attn"
        package.mkdir()
        (package / "__init__.py").touch()
        if text != "-":
            (package / "determinism.py").write_text(text)
        return tmp_path

    return make


NAMES = (
    "DeterministicMode = deterministic_mode = get_deterministic_mode = set_deterministic_mode = 'its own'\n"
)


def test_flash_attn_s_switch_is_this_one(beside: Callable[[str], Path]) -> None:
    done = run_python("print(f.SHARED, f.set_deterministic_mode)", beside(NAMES))
    assert done.stdout.strip() == "True its own", done.stderr


@pytest.mark.parametrize(
    "text", ["-", "import flash_attn_2_cuda\n"], ids=["upstream's", "without its extension"]
)
def test_beside_a_flash_attn_without_a_mode_it_keeps_its_own(
    beside: Callable[[str], Path], text: str
) -> None:
    done = run_python(
        "print(f.SHARED, tuple(f.get_deterministic_mode()))", beside(text), FA2_DETERMINISTIC="1"
    )
    assert done.stdout.strip() == "False (True, 2048)", done.stderr


def test_another_module_that_flash_attn_misses_is_not_passed_over(beside: Callable[[str], Path]) -> None:
    done = run_python("", beside("import no_such_module\n"))
    assert "ModuleNotFoundError: No module named 'no_such_module'" in done.stderr


def test_a_call_prints_a_line_with_its_shapes_and_mode(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from flash_attn.cute import fork_log

    monkeypatch.setattr(fork_log, "DEBUG", True)
    config = Config(64, heads=2, heads_k=1)
    with machine.compiling(), deterministic_mode(split_size=512):
        dense(config, [draw(config, 128, 256)])
    first = capsys.readouterr().err.splitlines()[0]
    assert first == (
        "[flash-attn] cute.flash_attn_fwd: q=(1, 128, 2, 64) k=(1, 256, 1, 64) v=(1, 256, 1, 64) "
        "deterministic_mode=1 split_size=512"
    )
    with machine.compiling():
        dense_gradients(config, [draw(config, 128, 256)])
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("[flash-attn]")] == [
        "cute.flash_attn_fwd:",
        "cute.flash_attn_bwd:",
    ]
    assert "deterministic_mode=0 split_size=2048" in lines[-1]
    monkeypatch.setattr(fork_log, "DEBUG", False)
    with machine.compiling(), torch.no_grad():
        dense(config, [draw(config, 128, 256)])
    assert "[flash-attn]" not in capsys.readouterr().err
