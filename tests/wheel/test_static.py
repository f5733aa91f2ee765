"""What can be proved of a wheel without a GPU."""

from __future__ import annotations

import asyncio
import importlib.metadata
import inspect
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import flash_attn
import flash_attn_2_cuda
import pytest
import torch
from fatbin import architectures
from flash_attn import deterministic_mode, fork_info, get_deterministic_mode, set_deterministic_mode

DISTRIBUTION = importlib.metadata.distribution("flash_attn")


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


def test_version_names_the_fork_cuda_and_torch() -> None:
    info = fork_info()
    version, _, commit = info["upstream"]["version"].partition("+")  # of a commit that is no release
    passes_for = info.get("base_version", "")
    source = f"of.{version}." if passes_for else ""
    expected = f"{passes_for or version}+det.{info['fork_revision']}.{source}{f'{commit}.' if commit else ''}cu{info['cuda'].replace('.', '')}.torch{'.'.join(info['torch'].split('.')[:2])}"
    assert DISTRIBUTION.version == expected
    if commit:  # its files name the release that it came after, or that it leads to
        numbers = [re.match(r"\d+(\.\d+)*", text)[0] for text in (flash_attn.__version__, version)]
        assert numbers[0] == numbers[1]
    else:
        assert flash_attn.__version__ == version


def test_docstrings_tell_of_mask_and_bias_before_what_is_returned() -> None:
    functions = [
        getattr(flash_attn, name)
        for name in dir(flash_attn)
        if name.startswith("flash_attn_") and name.endswith(("func", "kvcache"))
    ]
    assert len(functions) == 7
    for function in functions:
        text = inspect.getdoc(function) or ""
        places = [
            re.search(rf"(?m)^ *{words}", text)
            for words in ("Arguments:", "    attn_mask: bool", "    attn_bias: dtype", "Return:")
        ]
        starts = [place.start() if place else -1 for place in places]
        assert -1 not in starts, function
        assert starts == sorted(starts), function


def test_torch_is_the_one_it_was_built_for() -> None:
    assert torch.__version__.split("+")[0] == fork_info()["torch"]
    assert torch.version.cuda == fork_info()["cuda"]


def test_requirement_on_torch_is_the_minor_release_it_was_built_for() -> None:
    series = ".".join(fork_info()["torch"].split(".")[:2])
    assert f"torch=={series}.*" in (DISTRIBUTION.requires or [])


@pytest.mark.parametrize("has_torch", [True, False])
def test_the_doctor_knows_the_wheel_and_runs_where_it_does_not_import(
    has_torch: bool, tmp_path: Path
) -> None:
    """A folder with an empty torch, first on the path, stands for a torch that does not import."""
    if not has_torch:
        (tmp_path / "torch").mkdir()
        (tmp_path / "torch/__init__.py").write_text("raise ImportError('broken')")
    done = subprocess.run(
        [sys.executable, "-m", "flash_attn.doctor", "--json"],
        check=False,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    told = json.loads(done.stdout)
    info = fork_info()
    assert told["wheel"]["version"] == DISTRIBUTION.version
    assert told["wheel"]["architectures"] == info["architectures"]
    stopping = {problem["check"] for problem in told["problems"] if problem["stops"] == "import"}
    assert stopping == (set() if has_torch else {"torch-cpu"})
    assert bool(told["import"]["flash_attn"]) is not has_torch


def test_wheel_carries_both_licence_files() -> None:
    names = {Path(str(f)).name for f in DISTRIBUTION.files or []}
    assert {"LICENSE", "NOTICE"} <= names


def test_provenance_is_complete() -> None:
    info = fork_info()
    assert re.fullmatch(r"[0-9a-f]{40}", info["upstream"]["commit"])
    assert re.fullmatch(r"[0-9a-f]{64}", info["series"]["digest"])
    assert re.fullmatch(r"[0-9a-f]{40}", info["series"]["commit"])
    assert all(p["name"].endswith(".patch") and p["subject"] for p in info["series"]["patches"])
    assert info["nvcc"]["flags"] and info["nvcc"]["version"]


def test_kernels_inside_are_those_the_provenance_names() -> None:
    assert sorted(flash_attn_2_cuda.kernel_set()) == sorted(fork_info()["kernel_set"])


def test_masks_and_biases_are_taken_if_the_provenance_says_so() -> None:
    provenance = json.loads(Path(flash_attn.__file__).with_name("_fork.json").read_text(encoding="utf-8"))
    assert provenance["attn_bias"] is flash_attn_2_cuda.has_attn_bias is fork_info()["attn_bias"]


def test_machine_code_is_for_the_architectures_the_provenance_names() -> None:
    assert architectures(Path(flash_attn_2_cuda.__file__)) == {
        f"sm_{a}" for a in fork_info()["architectures"]
    }


def test_upstream_surface_is_all_there() -> None:
    functions = [
        "flash_attn_func",
        "flash_attn_kvpacked_func",
        "flash_attn_qkvpacked_func",
        "flash_attn_varlen_func",
    ]
    functions += [
        "flash_attn_varlen_kvpacked_func",
        "flash_attn_varlen_qkvpacked_func",
        "flash_attn_with_kvcache",
    ]
    for name in functions:
        parameters = inspect.signature(getattr(flash_attn, name)).parameters
        assert all(
            parameters[own].kind is inspect.Parameter.KEYWORD_ONLY for own in ("attn_mask", "attn_bias")
        )
    for name in ("fwd", "varlen_fwd", "bwd", "varlen_bwd", "fwd_kvcache"):
        assert callable(getattr(flash_attn_2_cuda, name))
    assert list(inspect.signature(flash_attn.flash_attn_func).parameters)[:6] == [
        "q",
        "k",
        "v",
        "dropout_p",
        "softmax_scale",
        "causal",
    ]


def test_mode_is_off_by_default_with_2048_tokens() -> None:
    done = run_python(
        "import flash_attn; print(tuple(flash_attn.get_deterministic_mode()))",
        FA2_DETERMINISTIC="",
        FA2_SPLIT_SIZE="",
    )
    assert done.stdout.strip() == "(False, 2048)", done.stderr


def test_environment_sets_the_defaults() -> None:
    code = "import flash_attn as f; print(tuple(f.get_deterministic_mode())); f.set_deterministic_mode(True, 512); f.set_deterministic_mode(True); print(f.get_deterministic_mode().split_size)"
    done = run_python(code, FA2_DETERMINISTIC="1", FA2_SPLIT_SIZE="1024")
    assert done.stdout.split("\n")[:2] == ["(True, 1024)", "1024"], done.stderr


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("FA2_DETERMINISTIC", "yes"),
        ("FA2_DETERMINISTIC", "2"),
        ("FA2_DEBUG", "on"),
        ("FA2_SPLIT_SIZE", "abc"),
        ("FA2_SPLIT_SIZE", "0"),
    ]
    + [("FA2_SPLIT_SIZE", v) for v in ("-512", "100", "512.0", "99999999999999999999", "4294967296")],
)
def test_bad_environment_is_an_error_at_import_that_names_it(name: str, value: str) -> None:
    done = run_python("import flash_attn", **{name: value})
    assert done.returncode != 0
    # A ValueError, not an ImportError: "try: import flash_attn" must not take it for a missing package.
    assert f"ValueError: {name}='{value}'" in done.stderr


@pytest.mark.parametrize("bad", [0, -512, 100, 2**30 + 64, 2**31, 2**40])
def test_bad_split_size_is_a_value_error_that_names_it(bad: int) -> None:
    for call in (
        lambda: set_deterministic_mode(True, bad),
        lambda: deterministic_mode(split_size=bad).__enter__(),
    ):
        with pytest.raises(ValueError, match=f"split_size={bad}"):
            call()
    assert get_deterministic_mode() == (False, 2048)


@pytest.mark.parametrize("bad", ["512", 512.0, True])
def test_split_size_of_another_type_is_a_type_error(bad: object) -> None:
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


def test_scope_decorates_a_function() -> None:
    @deterministic_mode(split_size=256)
    def inside() -> tuple[bool, int]:
        return tuple(get_deterministic_mode())  # type: ignore[return-value]

    assert inside() == (True, 256)
    assert inside() == (True, 256)
    assert not get_deterministic_mode().enabled


def test_scope_decorates_concurrent_and_recursive_calls() -> None:
    barrier = threading.Barrier(4)

    @deterministic_mode(split_size=256)
    def inside(depth: int) -> bool:
        if depth:
            return inside(depth - 1)
        barrier.wait(10)
        return get_deterministic_mode() == (True, 256)

    seen: list[bool] = []
    threads = [threading.Thread(target=lambda: seen.append(inside(3))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True] * 4


def test_scope_refuses_to_decorate_what_runs_after_the_call() -> None:
    async def coroutine() -> None:
        pass

    def generator() -> Iterator[None]:
        yield

    for function, advice in (
        (coroutine, "inside its body"),
        (generator, "around each part of its body that does not yield"),
    ):
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


def test_threads_and_tasks_share_a_scope() -> None:
    shared = deterministic_mode(split_size=512)
    seen: list[object] = []

    def thread(barrier: threading.Barrier) -> None:
        with shared, shared:
            barrier.wait(10)
            seen.append(get_deterministic_mode())
            barrier.wait(10)
        seen.append(get_deterministic_mode())

    async def task() -> None:
        with shared:
            await asyncio.sleep(0)
            seen.append(get_deterministic_mode())
        seen.append(get_deterministic_mode())

    async def tasks() -> None:
        await asyncio.gather(task(), task())

    meeting = threading.Barrier(2)
    threads = [threading.Thread(target=thread, args=(meeting,)) for _ in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    asyncio.run(tasks())
    off = get_deterministic_mode()
    assert not off.enabled
    assert seen.count((True, 512)) == seen.count(off) == 4


def test_a_scope_that_was_opened_elsewhere_is_not_closed_here() -> None:
    scope = deterministic_mode()
    with pytest.raises(RuntimeError, match="opened in another thread or asyncio task, or not at all"):
        scope.__exit__(None, None, None)


def test_environment_is_read_once() -> None:
    code = "import os, flash_attn as f; os.environ['FA2_SPLIT_SIZE'] = 'bad'; f.set_deterministic_mode(True); print(f.get_deterministic_mode().split_size)"
    done = run_python(code, FA2_SPLIT_SIZE="1024")
    assert done.stdout.strip() == "1024", done.stderr


def test_scope_stays_in_its_thread_and_the_process_mode_reaches_all() -> None:
    seen: dict[str, object] = {}

    def other(name: str) -> None:
        seen[name] = tuple(get_deterministic_mode())

    def run(name: str) -> None:
        thread = threading.Thread(target=other, args=(name,))
        thread.start()
        thread.join()

    with deterministic_mode(split_size=512):
        run("in scope")
    set_deterministic_mode(True, 1024)
    run("process")
    assert seen == {"in scope": (False, 2048), "process": (True, 1024)}


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
    assert not get_deterministic_mode().enabled


def test_mode_set_by_many_threads_is_never_seen_half_changed() -> None:
    pairs = {(True, 256), (False, 1024)}
    torn: list[object] = []
    stop = threading.Event()

    def write(enabled: bool, size: int) -> None:
        while not stop.is_set():
            set_deterministic_mode(enabled, size)

    def read() -> None:
        torn.extend(
            mode for mode in (tuple(get_deterministic_mode()) for _ in range(20000)) if mode not in pairs
        )

    set_deterministic_mode(True, 256)
    writers = [threading.Thread(target=write, args=pair) for pair in pairs]
    readers = [threading.Thread(target=read) for _ in range(2)]
    for thread in writers + readers:
        thread.start()
    for thread in readers:
        thread.join()
    stop.set()
    for thread in writers:
        thread.join()
    assert not torn


@torch.library.custom_op("fork_test::split_size_now", mutates_args=())
def split_size_now(x: torch.Tensor) -> torch.Tensor:
    enabled, size = flash_attn_2_cuda.get_deterministic_mode()
    return torch.full_like(x, size if enabled else 0)


@split_size_now.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_compiled_function_obeys_the_mode_it_runs_under() -> None:
    """An operator that reads the mode as the forward pass does, compiled once and called in several modes."""
    compiled = torch.compile(lambda x: split_size_now(x) + 0, backend="aot_eager", fullgraph=True)
    x = torch.zeros(1)
    assert compiled(x).item() == 0
    with deterministic_mode(split_size=256):
        assert compiled(x).item() == 256
        with deterministic_mode(split_size=512):
            assert compiled(x).item() == 512
    set_deterministic_mode(True, 1024)
    assert compiled(x).item() == 1024
    set_deterministic_mode(False)
    assert compiled(x).item() == 0


def test_scope_inside_a_compiled_function() -> None:
    @torch.compile(backend="aot_eager")
    def function(x: torch.Tensor) -> torch.Tensor:
        before = split_size_now(x)
        with deterministic_mode(split_size=768):
            inside = split_size_now(x)
        return torch.stack([before, inside, split_size_now(x)])

    for _ in range(2):
        assert function(torch.zeros(1)).flatten().tolist() == [0, 768, 0]


@pytest.mark.parametrize(("torch_version", "cuda"), [("1.99.0", None), (None, "99.0"), (None, "None")])
def test_another_torch_or_cuda_is_refused_by_name_before_a_symbol_is_missed(
    torch_version: str | None, cuda: str | None
) -> None:
    code = "import torch\n"
    code += f"torch.__version__ = {torch_version!r}\n" if torch_version else ""
    code += f"torch.version.cuda = {None if cuda == 'None' else cuda!r}\n" if cuda else ""
    code += "import sys\ntry:\n    import flash_attn\nexcept ImportError as error:\n    print(error, 'flash_attn_2_cuda' in sys.modules)\n"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    wanted = ".".join(fork_info()["torch"].split(".")[:2])
    assert (
        f"built for torch {wanted} with CUDA {fork_info()['cuda'].split('.')[0]}; here is torch "
        in done.stdout
    )
    assert (torch_version or cuda if cuda != "None" else "absent") in done.stdout
    assert f"Install the wheel for this torch, or torch {wanted}.*." in done.stdout
    assert done.stdout.rstrip().endswith("False"), "the extension was loaded first"
