from __future__ import annotations

import dataclasses
import shutil
import zipfile
from pathlib import Path

import pytest

from scripts.base.errors import ToolchainError, WheelError
from scripts.base.process import run
from scripts.wheels.packing import linking, wheel
from scripts.wheels.trust import binaries, companions
from tests.unit.conftest import toolchain, whole_wheel
from tests.unit.waiting import WHEN_OPEN, both_in_turn


def linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> Path:
    """A real object that throws, linked by a real g++ with ``flags``, as the extension is."""
    cxx = shutil.which("g++")
    assert cxx, "g++ is missing"
    (tmp_path / "thrower.cpp").write_text(
        '#include <stdexcept>\nvoid thrower() { throw std::runtime_error("x"); }\n'
    )
    run(
        [cxx, "-fPIC", "-c", tmp_path / "thrower.cpp", "-o", tmp_path / "thrower.o"],
        error=WheelError,
        what="no object",
    )
    monkeypatch.setattr(linking, "_TORCH_LIBRARIES", ())
    compiler = tmp_path / "cxx"
    compiler.write_text(
        f'#!/bin/sh\nfor last; do case "$last" in -l*) ;; *) set -- "$@" "$last";; esac; shift; done\nexec {cxx} "$@" {" ".join(flags)}\n'
    )
    compiler.chmod(0o755)
    tools = toolchain(tmp_path, "exit 1\n")
    tools = dataclasses.replace(tools, cxx=compiler)
    linking.link(tools, [tmp_path / "thrower.o"], tmp_path / "extension.so", tmp_path / "log")
    return tmp_path / "extension.so"


def test_an_extension_asks_for_the_shared_libstdcxx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "libstdc++.so.6" in binaries.needed(linked(tmp_path, monkeypatch))


def test_static_libraries_are_those_whose_code_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")  # the linker's words are of no language
    target = linked(tmp_path, monkeypatch)
    assert linking.static_libraries(target) == []
    run(["ar", "rc", tmp_path / "libcode.a", tmp_path / "thrower.o"], error=WheelError, what="no archive")
    target.unlink()
    assert not linking.is_linked(target)
    tools = dataclasses.replace(toolchain(tmp_path, "exit 1\n"), cxx=tmp_path / "cxx")
    whole = ["-Wl,--whole-archive", tmp_path / "libcode.a", "-Wl,--no-whole-archive"]
    linking.link(tools, whole, target, tmp_path / "log")  # type: ignore[arg-type]
    assert linking.is_linked(target)
    assert linking.static_libraries(target) == ["libcode.a"]
    assert not list(tmp_path.glob("*.map"))


def test_two_builds_in_one_clone_link_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notes: list[str]
) -> None:
    target = linked(tmp_path, monkeypatch)
    compiler = tmp_path / "slow"
    compiler.write_text(f'#!/bin/sh\necho >> "$0.calls"\n{WHEN_OPEN}exec {tmp_path / "cxx"} "$@"\n')
    compiler.chmod(0o755)
    tools = dataclasses.replace(toolchain(tmp_path, "exit 1\n"), cxx=compiler)
    target.unlink()
    both_in_turn(
        lambda: linking.link(tools, [tmp_path / "thrower.o"], target, tmp_path / "log"), compiler, notes
    )
    assert target.exists()
    assert (tmp_path / "slow.calls").read_text() == "\n"


def test_no_path_from_the_environment_gets_into_an_extension(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_RUN_PATH", "/home/somebody/lib")
    assert b"/home/somebody/lib" not in linked(tmp_path, monkeypatch).read_bytes()


def test_a_compiler_that_links_libstdcxx_statically_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(WheelError, match=r"linked libstdc\+\+ into the library of a wheel"):
        linked(tmp_path, monkeypatch, "-static-libstdc++")
    assert not list(tmp_path.glob("extension*"))


@pytest.mark.parametrize("option", ["", "-static-libstdc++"])
def test_a_library_of_three_lines_tells_such_a_compiler(tmp_path: Path, option: str) -> None:
    compiler = tmp_path / "cxx"
    compiler.write_text(f'#!/bin/sh\nexec {shutil.which("g++")} "$@" {option}\n')
    compiler.chmod(0o755)
    tools = dataclasses.replace(toolchain(tmp_path, "exit 1\n"), cxx=compiler)
    if option:
        with pytest.raises(ToolchainError, match=r"cxx linked libstdc\+\+ into a library; .* or set CXX"):
            linking.require_shared_libstdcxx(tools)
    else:
        linking.require_shared_libstdcxx(tools)


def test_entries_have_one_date_and_an_order(tmp_path: Path) -> None:
    """Of the same files a wheel is the same bytes; metadata comes last, as its format recommends."""
    with zipfile.ZipFile(whole_wheel(tmp_path, more={"a.py": b"", "z.py": b""})) as archive:
        entries = archive.infolist()
    assert {entry.date_time for entry in entries} == {wheel.DATE}
    *names, record = (entry.filename for entry in entries)
    assert names == sorted(names, key=lambda name: (".dist-info/" in name, name))
    assert record.endswith(".dist-info/RECORD")


@pytest.mark.parametrize(("content", "kept"), [("the same", True), ("other", False)])
def test_a_proof_is_kept_for_the_bytes_that_it_is_of(tmp_path: Path, content: str, kept: bool) -> None:
    place = tmp_path / "x.whl"
    place.write_text("the same")
    companions.proof(place).write_text("{}")
    (tmp_path / "aside").write_text(content)
    wheel.publish(tmp_path / "aside", place)
    assert place.read_text() == content
    assert companions.proof(place).exists() == kept
