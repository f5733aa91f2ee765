from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.base import layout
from scripts.base.errors import SeriesError
from scripts.lab import emulator
from scripts.series import model, tree
from scripts.wheels import compiling, kernels
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

    def compile_and_edit(*_: object) -> compiling.Compiled:
        edited.write_text("edited\n")
        return compiling.Compiled((Path("a.o"),), 1, 0, 0, 0)

    monkeypatch.setattr(layout, "BUILD", tmp_path / "build")
    monkeypatch.setattr(emulator, "interpreter", lambda *_: [])
    monkeypatch.setattr(emulator, "_tools_for_tests", lambda *_: tmp_path)
    monkeypatch.setattr(emulator, "run", lambda command, **_: Path(command[command.index("-o") + 1]).touch())
    monkeypatch.setattr(kernels, "binding_units", lambda *_: [])
    monkeypatch.setattr(kernels, "kernel_units", lambda *_: [])
    monkeypatch.setattr(compiling, "compile_units", compile_and_edit)
    tools = toolchain(tmp_path, "exit 1\n")
    with pytest.raises(SeriesError, match=r"__init__\.py changed while it was being built from"):
        emulator.package(tools, applied, (), "90", None)
    edited.write_text(committed)
    monkeypatch.setattr(compiling, "compile_units", lambda *_: compiling.Compiled((Path("a.o"),), 0, 0, 0, 0))
    site = emulator.package(tools, tree.apply(patches, PIN, checkout_of(base), applied.root), (), "90", None)[
        0
    ]
    assert (site / "flash_attn/__init__.py").read_text() == committed
