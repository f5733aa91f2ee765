"""The files of the wheel, and what it says of itself."""

from __future__ import annotations

import importlib
from importlib import metadata
from pathlib import Path

import pytest
from flash_attn import cute

# Programs and tools of upstream's, which import what no user has.
_NOT_IMPORTED = {
    "benchmark",
    "benchmark_flash_attention_fp8",
    "bench_utils",
    "sm90_config_search",
    "cute_dsl_ptxas",
}
MODULES = sorted(p.stem for p in Path(cute.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("name", sorted(set(MODULES) - _NOT_IMPORTED - {"__init__"}))
def test_every_module_imports(name: str) -> None:
    importlib.import_module(f"flash_attn.cute.{name}")


def test_provenance_names_upstream_and_the_patches() -> None:
    info = cute.fork_info()
    assert info["format"] == 1
    assert len(info["upstream"]["sdist_sha256"]) == 64
    assert [p["name"] for p in info["series"]["patches"]]
    assert all(len(p["sha256"]) == 64 for p in info["series"]["patches"])


def test_upstream_s_surface_is_all_there() -> None:
    for name in ("flash_attn_func", "flash_attn_varlen_func"):
        assert callable(getattr(cute, name))


def test_the_distribution_owns_flash_attn_cute_alone() -> None:
    try:
        files = metadata.files("flash-attn-4")
    except metadata.PackageNotFoundError:
        pytest.skip("the wheel was unpacked, not installed")
    tops = {"/".join(path.parts[:2]) for path in files or () if ".dist-info" not in path.parts[0]}
    assert tops == {"flash_attn/cute"}
