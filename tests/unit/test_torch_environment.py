"""The torch that a binding is compiled against."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from scripts.base.errors import ToolchainError
from scripts.wheels.toolchain import torch_environment


@pytest.mark.parametrize(("version", "taken"), [("2.13.0", "2.13.0+cu130"), ("2.13.0+cu130", "2.13.0+cu130")])
def test_pip_is_asked_for_no_torch_for_the_cpu(version: str, taken: str) -> None:
    """Which counts as newer than "2.13.0", and lies in some machines' folders."""
    wanted = Requirement(torch_environment.torch_for_cuda(version)).specifier
    assert list(wanted.filter(["2.13.0+cpu", "2.13.0+cu130", "2.12.0"])) == [taken]


@pytest.mark.parametrize(("release", "folders"), [("13.0", ["cu13"]), ("12.4", ["cublas", "cuda_runtime"])])
def test_cuda_s_libraries_lie_in_one_folder_or_before_13_in_many(
    tmp_path: Path, release: str, folders: list[str]
) -> None:
    for name in folders:
        (tmp_path / "nvidia" / name / "include").mkdir(parents=True)
    env = torch_environment.Environment(
        Path(sys.executable), tmp_path, "cp312", tmp_path, "2.6.0", release, cxx11_abi=False
    )
    assert [path.relative_to(tmp_path / "nvidia").as_posix() for path in env.cuda] == folders


def test_missing_python_headers_are_an_error_that_names_the_package(tmp_path: Path) -> None:
    env = torch_environment.Environment(
        Path(sys.executable), tmp_path, "cp312", tmp_path, "2.11.0", "13.0", cxx11_abi=True
    )
    with pytest.raises(ToolchainError, match=r"no Python\.h .*python3\.12-dev"):
        torch_environment.check_headers(env)
    (tmp_path / "Python.h").touch()
    torch_environment.check_headers(env)
