"""Objects and wheels are the same wherever they are made, and what one clone compiled answers another."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from scripts.base import layout
from scripts.base.errors import CompileError, WheelError
from scripts.base.process import run
from scripts.series.tree import Tree
from scripts.source import kernel_set, matrix
from scripts.wheels.compiling import flags, kernels, ninja
from scripts.wheels.toolchain import compilers

pytestmark = [pytest.mark.network, pytest.mark.nvcc]

ROOT = Path(__file__).resolve().parents[2]
KERNEL = kernel_set.parse_kernels("hdim32,fp16,fwd,causal")
# What differs between two compiles of one file unless nvcc is told otherwise: names of what is static, and __FILE__. Like
# upstream's, the file defines a specialisation alone: a plain function's name would serve nvcc in place of its process id.
HEADER = """#include <cstdio>
#include <cuda/std/tuple>
#include <cuda_runtime.h>
namespace { __device__ int counter; __global__ void hidden(int *p) { p[0] = counter; cuda::std::ignore = 3; } }
static __global__ void also_hidden(int *p) { p[1] = counter; }
inline void tell() { std::puts(__FILE__); }
template <typename T> void launch(T *p);
"""
FILE = """#include "flash_fwd_launch_template.h"
template <> void launch(int *p) { tell(); also_hidden<<<1, 1>>>(p); hidden<<<1, 1>>>(p); }
"""


@pytest.fixture(scope="module")
def target() -> matrix.Target:
    return matrix.load(ROOT / "wheel_matrix.toml").default()


def compiled(
    target: matrix.Target, clone: Path, monkeypatch: pytest.MonkeyPatch, cache: Path | None
) -> tuple[bytes, ninja.Compiled]:
    """What a small kernel file of a clone becomes in an extension, which has no symbol table."""
    source = clone / "source/csrc/flash_attn/src"
    source.mkdir(parents=True)
    (source / "flash_fwd_launch_template.h").write_text(HEADER)
    (source / KERNEL[0].source).write_text(FILE)
    if cache is not None:
        monkeypatch.setenv("SCCACHE_DIR", str(cache))
    tools = compilers.assemble(target, None, ROOT / "build", cache=cache is not None)
    plan = kernels.Plan(
        Tree(clone / "source", "b" * 40, "c" * 40, "d" * 64, "e" * 40, "f" * 64),
        tools,
        KERNEL,
        ("90",),
        clone / "build",
    )
    done = ninja.compile_units(plan, kernels.kernel_units(plan), 1)
    library = clone / "library.so"
    run([tools.cxx, "-shared", "-s", "-o", library, *done.objects], error=WheelError, what="could not link")
    return library.read_bytes(), done


def test_what_a_clone_compiled_answers_another_and_is_what_it_would_have_compiled(
    target: matrix.Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    first, cold = compiled(target, tmp_path / "one", monkeypatch, cache)
    second, warm = compiled(target, tmp_path / "another/with/a/longer/path", monkeypatch, cache)
    # As another user, whose copies of the kernel files lie elsewhere.
    ours = layout.cache
    monkeypatch.setattr(
        layout, "cache", lambda part: tmp_path / "another-user" if part == "units" else ours(part)
    )
    alone, uncached = compiled(target, tmp_path / "without-a-cache", monkeypatch, None)
    assert cold.cache_hits == 0
    assert (warm.cache_misses, warm.built) == (0, 1)
    assert warm.cache_hits == cold.cache_misses > 0
    assert (uncached.cache_hits, uncached.cache_misses) == (0, 0)
    assert first == second == alone
    assert str(tmp_path).encode() not in first
    assert b"csrc/flash_attn/src/flash_fwd_launch_template.h" in first


@pytest.mark.parametrize("emptied", [False, True])
def test_a_cache_that_answers_nothing_it_was_asked_before_is_an_error(
    target: matrix.Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, emptied: bool
) -> None:
    """Unless it was emptied since, which is the user's right."""
    monkeypatch.setattr(layout, "cache", lambda part: tmp_path / "user-cache" / part)
    cache = tmp_path / "cache"
    compiled(target, tmp_path / "one", monkeypatch, cache)
    for entry in [p for p in cache.rglob("*") if p.is_file()]:
        entry.unlink()
    if emptied:
        assert compiled(target, tmp_path / "two", monkeypatch, cache)[1].cache_hits == 0
    else:
        (cache / "0").mkdir(exist_ok=True)
        (cache / "0/of-something-else").touch()
        os.utime(cache / "0/of-something-else", (1, 1))
        with pytest.raises(
            CompileError, match=r"answered none of \d+ calls, though 1 of these files went through it before"
        ):
            compiled(target, tmp_path / "two", monkeypatch, cache)
    assert list((tmp_path / "two/build/kernels").rglob("*.o")), "the object is kept"


def test_a_call_that_the_cache_refuses_is_an_error(
    target: matrix.Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "NVCC_FLAGS", (*flags.NVCC_FLAGS, "-M"))
    with pytest.raises(CompileError, match="could not keep some calls: -M"):
        compiled(target, tmp_path / "one", monkeypatch, tmp_path / "cache")
