"""When the compile cache should have answered."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from scripts.base import layout
from scripts.base.errors import CompileError
from scripts.wheels.compiling import compile_cache
from scripts.wheels.compiling.kernels import Unit
from tests.unit.conftest import toolchain

TOLD = compile_cache.Stats(hits=0, misses=1, location="Redis: one", version="0")
TOOLS = cast("Any", SimpleNamespace(toolkit=SimpleNamespace(nvcc="nvcc"), cxx="g++"))
UNIT = Unit("kernel.cu", Path("kernel.o"), "nvcc", 1, 1.0, key="0123")


@pytest.fixture(autouse=True)
def _caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "cache", lambda name: tmp_path / name)
    monkeypatch.delenv("SCCACHE_RECACHE", raising=False)


def test_a_file_that_went_through_the_cache_before_must_be_answered() -> None:
    compile_cache.check(TOLD, TOOLS, [UNIT], time.time())
    with pytest.raises(CompileError, match="1 of these files went through it before"):
        compile_cache.check(TOLD, TOOLS, [UNIT], time.time() + 1)


def test_one_that_another_build_compiled_meanwhile_need_not_be() -> None:
    began = time.time() - 1
    compile_cache.check(TOLD, TOOLS, [UNIT], time.time())
    compile_cache.check(TOLD, TOOLS, [UNIT], began)


def test_a_clone_gets_no_object_of_another_one_whose_headers_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real sccache, real g++: sources and commands are the same, and the folders' names go into no key."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ here")
    tools = dataclasses.replace(toolchain(tmp_path, "", cache=True), cxx=Path(compiler))
    monkeypatch.setenv("SCCACHE_DIR", str(tmp_path / "sccache"))  # the server's
    made = {}
    for value in (1, 2):
        clone = tmp_path / f"clone{value}"
        clone.mkdir()
        (clone / "value.h").write_text(f"constexpr int kValue = {value};\n")
        (clone / "one.cpp").write_text('#include "value.h"\nint value() { return kValue; }\n')
        with compile_cache.server(tools, clone, clone / "log") as env:
            command = [str(tools.sccache), compiler, "-c", "one.cpp", "-o", "one.o"]
            for _ in range(2):  # the second is answered by the cache
                subprocess.run(command, cwd=clone, env={**os.environ, **env}, check=True)
            assert compile_cache.stats(tools, env).hits == 1
        made[value] = (clone / "one.o").read_bytes()
    assert made[1] != made[2]
