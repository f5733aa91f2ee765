"""Compilers that are found, and what is said when one is missing."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from scripts.base import layout
from scripts.base.errors import ToolchainError
from scripts.source import matrix
from scripts.wheels.toolchain import compilers


def test_toolkits_of_another_release_or_without_headers_are_passed_over_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, release, headers in [("old", "12.4", True), ("bare", "13.0", False), ("good", "13.0", True)]:
        nvcc = tmp_path / name / "bin/nvcc"
        nvcc.parent.mkdir(parents=True)
        nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.99'\n")
        nvcc.chmod(0o755)
        if headers:
            (tmp_path / name / "include/cuda/std").mkdir(parents=True)
            (tmp_path / name / "include/cuda_runtime.h").touch()
    monkeypatch.setattr(
        compilers, "_candidates", lambda: iter([(tmp_path / name, name) for name in ("old", "bare", "good")])
    )
    found, passed = compilers.installed_toolkit("13.0")
    assert found is not None
    assert found.nvcc == tmp_path / "good/bin/nvcc"
    assert found.version == "V13.0.99"
    assert "is CUDA 12.4" in passed[0]
    assert "lacks cuda_runtime.h" in passed[1]


def test_a_cuda_that_neither_the_machine_nor_an_index_has_is_an_error_before_anything_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = dataclasses.replace(matrix.load(layout.MATRIX).default(), name="cu", cuda="12.8", toolkit=None)
    monkeypatch.setattr(compilers, "_candidates", lambda: iter([]))
    with pytest.raises(
        ToolchainError,
        match=r"target cu needs CUDA 12\.8, whose compiler no index has \(the machine has none\).*--containers",
    ):
        compilers.assemble(target, compilers.running_python(), tmp_path, cache=False)
    assert not [*tmp_path.iterdir()]
    assert compilers.out_of_reach(target)
    assert compilers.present(target, tmp_path) is None


def test_a_missing_compiler_and_a_missing_python_are_errors_that_say_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CXX", "absent-compiler")
    with pytest.raises(ToolchainError, match="absent-compiler is not on PATH"):
        compilers.host_compiler()
    with pytest.raises(ToolchainError, match=r"no python3\.99"):
        compilers.find_python("3.99")
