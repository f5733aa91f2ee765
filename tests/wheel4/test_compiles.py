"""The GPU half's cases compile their kernels where there is no GPU (conftest.py). Here is what that rests on."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import compiled
import machine
import pytest
import torch
from bits import assert_same_bits
from calls import dense, dense_gradients, varlen
from cutlass import cute
from flash_attn.cute import flash_attn_with_kvcache, fork_kvcache, interface
from flash_attn.cute.fork_append import AppendKernel
from problems import DEVICE, Config, draw, reference
from without_values import compiling

pytestmark = pytest.mark.skipif(machine.GPU, reason="the GPU half compiles its kernels, and runs them")
FOLDER = Path(__file__).resolve().parent
BASE = Config(64, causal=True)
Asked = list[tuple[tuple[Any, ...], dict[str, Any]]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """What ``cute.compile`` is given by calls, which compile nothing then."""
    found: Asked = []
    monkeypatch.setattr(compiled.Once, "__call__", lambda _, *args, **options: found.append((args, options)))
    return found


def identities(
    asked: Asked, config: Config, call: Callable[..., object] = dense, queries: int = 300
) -> set[str]:
    """The kernels that a call asks for."""
    asked.clear()
    interface._flash_attn_fwd.compile_cache.clear()
    with compiling():
        call(config, [draw(config, queries, 300)])
    interface._flash_attn_fwd.compile_cache.clear()  # of what was not compiled
    return {compiled.identity(*args, **options) for args, options in asked}


@pytest.mark.parametrize(
    "other",
    [
        replace(BASE, head_dim=128),
        replace(BASE, dtype="fp16"),
        replace(BASE, causal=False),
        replace(BASE, heads_k=2),
        replace(BASE, sink=True),
        replace(BASE, softcap=15.0),
        replace(BASE, causal=False, window=(300, 50)),
    ],
    ids=str,
)
def test_another_kernel_has_another_identity(other: Config, asked: Asked) -> None:
    (one,) = identities(asked, BASE)
    assert identities(asked, other).isdisjoint({one})
    assert identities(asked, BASE, varlen).isdisjoint({one})


def test_a_value_that_is_compiled_in_is_part_of_the_identity(asked: Asked) -> None:
    one, other = (identities(asked, replace(BASE, softcap=softcap)) for softcap in (15.0, 30.0))
    assert one.isdisjoint(other)


def test_a_value_that_a_kernel_is_launched_with_is_none(asked: Asked) -> None:
    local = Config(64)
    one, other = (identities(asked, replace(local, window=window)) for window in ((300, 50), (20, 7)))
    assert one == other


def test_kernels_for_caches_are_keyed_by_what_is_one_element_many_times(asked: Asked) -> None:
    """A kernel is compiled for it: one for an expanded table takes no other table, and no such kernel takes its."""

    def kernels(queries: Callable[[torch.Tensor], torch.Tensor], columns: int, rows: int) -> int:
        """How many kernels append, after a call more."""
        with compiling():
            q = queries(torch.empty(3, 1, 4, 64, dtype=torch.bfloat16, device=DEVICE))
            table = torch.empty(rows, columns, dtype=torch.int32, device=DEVICE).expand(len(q), -1)
            cache = torch.empty(40, 16, 4, 64, dtype=torch.bfloat16, device=DEVICE)
            flash_attn_with_kvcache(q, cache, cache, cache_seqlens=9, page_table=table)
        return len(fork_kvcache.kernels.cache)

    caches = (fork_kvcache.kernels, interface._flash_attn_fwd.compile_cache)
    for cache in caches:
        cache.clear()
    found = [kernels(lambda q: q, 12, rows) for rows in (1, 3, 1, 3)]
    found += [kernels(view, 12, 1) for view in (lambda q: q[:1], lambda q: q[:1].expand(2, -1, -1, -1)[:1])]
    for cache in caches:
        cache.clear()  # of what was not compiled
    assert found == [1, 2, 2, 2, 2, 3]
    described = {
        compiled.identity(*args, **options) for args, options in asked if type(args[0]) is AppendKernel
    }
    assert len(described) == 3


def test_keys_of_one_identity_have_the_same_machine_code(asked: Asked, tmp_path: Path) -> None:
    """One query and many: flash_attn.cute's keys tell them apart, and no kernel of SM 9.0 does."""
    compile_kernel, made = cute.compile, []
    for queries in (1, 300):
        (one,) = identities(asked, BASE, queries=queries)
        ((args, options),) = asked
        with compiling():
            kernel = compile_kernel(*args, no_jit_engine=True, **options)
        path = tmp_path / f"{queries}.o"
        kernel.export_to_c(object_file_path=str(path), function_name="kernel")
        made.append((one, path.read_bytes()))
    assert made[0] == made[1]


class Kernel:
    """What ``cute.compile`` may be given."""

    def __init__(self, made_with: object) -> None:
        self.made_with = made_with

    def __call__(self, length: int, stages: Constexpr[int] = 1) -> None: ...  # noqa: F821


def test_a_kernel_is_compiled_by_the_first_process_that_asks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(compiled.FOLDER, str(tmp_path))
    monkeypatch.delenv(compiled.REMEMBERED)
    made: list[object] = []
    processes = [compiled.Once(lambda *args, **_: made.append(args)) for _ in range(2)]
    for process in processes:
        for given in ((Kernel(1), 300), (Kernel(1), 400), (Kernel(2), 300), (Kernel(1), 300, 2)):
            process(*given)
    assert len(made) == 3
    found = compiled.figures(tmp_path)
    assert found == {"asked_for": 3, "compiled": 3, "remembered": 0, "seconds": {"Kernel": 0.0}}


def test_a_later_run_leaves_out_what_compiled_while_its_makings_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(compiled.REMEMBERED, str(tmp_path / "remembered"))
    made: list[object] = []

    def run(name: str, *kernels: Kernel) -> tuple[int, int]:
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.setenv(compiled.FOLDER, str(folder))
        process = compiled.Once(lambda kernel, *_, **__: made.append(kernel.made_with))
        for kernel in kernels:
            process(kernel, 300)
        return compiled.figures(folder)["compiled"], compiled.figures(folder)["remembered"]

    assert run("first", Kernel(1)) == (1, 0)
    assert run("second", Kernel(1), Kernel(2)) == (1, 1)
    monkeypatch.setattr(compiled, "_made_of", lambda: "other sources")
    assert run("third", Kernel(1), Kernel(2)) == (2, 0)
    assert made == [1, 2, 1, 2]


def test_what_kernels_are_made_of_follows_from_the_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    """And from sources and toolchain, by what test_cache.py shows of the folder."""
    from flash_attn.cute import fork_cache

    before = compiled._made_of.__wrapped__()
    monkeypatch.setattr(fork_cache, "target", lambda: b"another")
    assert compiled._made_of.__wrapped__() != before


def test_a_kernel_that_does_not_compile_is_asked_for_and_not_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(compiled.FOLDER, str(tmp_path / "run"))
    monkeypatch.setenv(compiled.REMEMBERED, str(tmp_path / "remembered"))
    (tmp_path / "run").mkdir()

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no registers left")

    with pytest.raises(RuntimeError, match="no registers left"):
        compiled.Once(fails)(Kernel(1), 300)
    assert compiled.figures(tmp_path / "run")["asked_for"] == 1
    assert compiled.figures(tmp_path / "run")["compiled"] == 0
    assert not (tmp_path / "remembered").exists()


def test_a_kernel_that_cannot_be_described_is_an_error() -> None:
    with pytest.raises(TypeError, match="no description of what a kernel is made with"):
        compiled.identity(Kernel(object()), 300)


def test_a_case_goes_on_whatever_it_asks_of_values() -> None:
    with compiling():
        mine = draw(BASE, 300, 300)
        rows = dense(BASE, [mine])
        assert_same_bits(rows.out, rows.out.clone(), "out")
        assert rows.lse.isfinite().all()
        assert (rows.lse == -math.inf).all()
        assert not rows.out.any()
        assert (rows.out - 1).abs().max().item() <= 0
        assert torch.equal(rows.out, rows.out + 1)
        assert len(rows.lse[rows.lse.isfinite()]) == 1
        exact = reference(BASE, mine)
        assert exact.gradients["k"].shape == mine.k.shape


OTHERS = {  # what their kernels take, of upstream's own checks
    "sm_80": ([Config(d, causal=c) for d in (64, 128) for c in (False, True)], False),
    "sm_100": ([Config(d, causal=c) for d in (64, 128) for c in (False, True)] + [Config(256)], True),
    "sm_120": ([Config(d, causal=c) for d in (64, 128) for c in (False, True)], False),
}


@pytest.mark.in_parts
@pytest.mark.skipif("FORK_OTHER_ARCHITECTURE" in os.environ, reason="is a process of this test")
@pytest.mark.parametrize("architecture", OTHERS)
def test_some_kernels_of_other_architectures_compile(architecture: str, tmp_path: Path) -> None:
    """In a process of its own, because the architecture is read when CUTLASS is imported."""
    environment = {
        **os.environ,
        "FORK_OTHER_ARCHITECTURE": architecture,
        compiled.FOLDER: str(tmp_path),
        **machine.environment_for(architecture),
    }
    path = os.pathsep.join([str(FOLDER), str(FOLDER.parent / "wheel"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", "import test_compiles; test_compiles.compile_here()"]
    done = subprocess.run(
        command,
        env={**environment, "PYTHONPATH": path},
        cwd=FOLDER,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    figures = compiled.figures(tmp_path)
    done = figures["compiled"] + figures["remembered"]
    assert figures["asked_for"] == done >= len(OTHERS[architecture][0])


def compile_here() -> None:
    """Compile forward of this architecture's configurations, and backward where it is deterministic."""
    configs, backward = OTHERS[machine.architecture()]
    with compiling():
        for config in configs:
            dense(config, [draw(config, 300, 300)])
            if backward:
                dense_gradients(config, [draw(config, 300, 300)], deterministic=True)
