from __future__ import annotations

import dataclasses
from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path

import pytest

from scripts.base import layout, pip
from scripts.base.errors import SeriesError, ToolchainError
from scripts.lab import emulator, serving_clients
from scripts.series import model, tree
from scripts.wheels.compiling import kernels, ninja
from scripts.wheels.toolchain.torch_environment import Environment
from tests.unit.conftest import BASE, PIN, TWO, checkout_of, toolchain


def test_a_package_of_files_that_were_edited_meanwhile_is_not_kept(
    make_series: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is named by the commit. Compilers and linker are stand-ins."""
    patches = model.read(make_series(*TWO, base=BASE | {"flash_attn_2_cuda/__init__.py": ""}))
    base = BASE | {"flash_attn_2_cuda/__init__.py": ""}
    applied = tree.apply(patches, PIN, checkout_of(base), tmp_path / "source")
    edited = applied.root / "flash_attn/__init__.py"
    committed = edited.read_text()

    def compile_and_edit(*_: object) -> ninja.Compiled:
        edited.write_text("edited\n")
        return ninja.Compiled((Path("a.o"),), 1, 0, 0, 0)

    monkeypatch.setattr(layout, "BUILD", tmp_path / "build")
    monkeypatch.setattr(emulator, "interpreter", lambda *_: [])
    monkeypatch.setattr(serving_clients, "site", lambda *_: tmp_path)
    monkeypatch.setattr(emulator, "run", lambda command, **_: Path(command[command.index("-o") + 1]).touch())
    monkeypatch.setattr(kernels, "binding_units", lambda *_: [])
    monkeypatch.setattr(kernels, "kernel_units", lambda *_: [])
    monkeypatch.setattr(ninja, "compile_units", compile_and_edit)
    tools = toolchain(tmp_path, "exit 1\n")
    with pytest.raises(SeriesError, match=r"__init__\.py changed while it was being built from"):
        emulator.package(tools, applied, (), "90", None)
    edited.write_text(committed)
    monkeypatch.setattr(ninja, "compile_units", lambda *_: ninja.Compiled((Path("a.o"),), 0, 0, 0, 0))
    site = emulator.package(tools, tree.apply(patches, PIN, checkout_of(base), applied.root), (), "90", None)[
        0
    ]
    assert (site / "flash_attn/__init__.py").read_text() == committed


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Environment]:
    """Make an environment into which this script installs, which notes how it is called."""

    def made(script: str) -> Environment:
        python = tmp_path / "python"
        python.write_text(f"#!/bin/sh\necho $* >> {tmp_path}/calls\n{script}\n", encoding="utf-8")
        python.chmod(0o755)
        monkeypatch.setattr(pip, "installing", lambda *words: [*words])
        return dataclasses.replace(toolchain(tmp_path, "").environment, python=python)

    return made


INSTALL = 'while [ "$1" != --target ]; do shift; done; mkdir -p "$2"; touch "$2/module.py"'


def test_packages_beside_the_emulator_are_installed_once_without_their_dependencies(
    tmp_path: Path, environment: Callable[[str], Environment]
) -> None:
    env = environment(INSTALL)
    places = [serving_clients.site(env, tmp_path / "beside", "engine", ["engine==1"]) for _ in range(2)]
    assert places[0] == places[1]
    assert (places[0] / "module.py").exists()
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 1
    assert "--no-deps" in calls[0]
    assert calls[0].endswith("engine==1")
    assert serving_clients.site(env, tmp_path / "beside", "engine", ["engine==2"]) != places[0]


def test_an_install_that_fails_leaves_nothing(
    tmp_path: Path, environment: Callable[[str], Environment]
) -> None:
    env = environment(INSTALL + "; exit 1")
    with pytest.raises(ToolchainError, match="could not install engine's packages"):
        serving_clients.site(env, tmp_path / "beside", "engine", ["engine==1"])
    assert list((tmp_path / "beside").iterdir()) == []


@pytest.mark.parametrize("client", serving_clients.NAMES)
def test_a_client_s_packages_are_pinned_and_its_tests_are_there(client: str) -> None:
    lines = (emulator.SUITE / f"{client}.txt").read_text().splitlines()
    assert [line for line in lines if not line.startswith("#") and "==" not in line] == []
    assert [path for path in serving_clients.tests_of(client) if not Path(path).is_file()] == []


def test_the_suite_leaves_out_what_needs_a_client() -> None:
    ignored = {Path(word.partition("=")[2]) for word in serving_clients.tests_of(None)[1:]}
    needing = {
        path for path in emulator.SUITE.glob("test_*.py") if "pytest.importorskip(" in path.read_text()
    }
    assert ignored == needing


def test_clients_find_the_plugins_that_the_tree_has(tmp_path: Path) -> None:
    serving = tmp_path / "source/flash_attn/serving"
    serving.mkdir(parents=True)
    (serving / "vllm.py").touch()
    place = serving_clients.announced(tmp_path / "source", tmp_path / "emulator")
    assert place == serving_clients.announced(tmp_path / "source", tmp_path / "emulator")  # kept
    (found,) = distributions(path=[str(place)])
    assert found.metadata["Name"] == "flash_attn"
    assert [(point.group, point.value) for point in found.entry_points] == [
        ("vllm.general_plugins", "flash_attn.serving.vllm:register")
    ]
    (serving / "sglang.py").touch()
    (other,) = distributions(
        path=[str(serving_clients.announced(tmp_path / "source", tmp_path / "emulator"))]
    )
    assert {point.group for point in other.entry_points} == {"vllm.general_plugins", "sglang.srt.plugins"}
