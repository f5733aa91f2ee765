"""When the compile cache should have answered."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from scripts.base import layout
from scripts.base.errors import CompileError
from scripts.wheels import compile_cache
from scripts.wheels.kernels import Unit

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
