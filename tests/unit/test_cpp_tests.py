from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from scripts.base import layout
from scripts.base.errors import CompileError, ToolchainError
from scripts.wheels.proof import cpp_tests
from scripts.wheels.toolchain import debian
from tests.unit.test_debian import deb

CONTENTS = {
    "./usr/src/googletest/googletest/src/gtest-all.cc": "// all",
    "./usr/src/googletest/googletest/include/gtest/gtest.h": "// header",
    "./usr/src/googletest/googlemock/src/gmock-all.cc": "// not used",
    "./usr/share/doc/googletest/README": "text",
}


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package in the place of Debian's, brought without a network."""
    package = deb(tmp_path / "googletest.deb", CONTENTS)

    def bring(_: str, sha256: str, folder: Path, **__: str) -> Path:
        assert sha256 == cpp_tests._SHA256
        target = folder / package.name
        target.write_bytes(package.read_bytes())
        return target

    monkeypatch.setattr(debian, "bring", bring)
    return package


def test_googletest_s_source_is_taken_out_of_debian_s_package_once(
    tmp_path: Path, packaged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shared"
    source = cpp_tests.googletest(shared)
    assert {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()} == {
        "src/gtest-all.cc",
        "include/gtest/gtest.h",
    }
    monkeypatch.setattr(debian, "bring", lambda *_, **__: pytest.fail("it was there already"))
    assert cpp_tests.googletest(shared) == source


def test_a_package_that_cannot_be_unpacked_leaves_nothing(tmp_path: Path, packaged: Path) -> None:
    packaged.write_bytes(b"<html>not found</html>")
    with pytest.raises(ToolchainError, match=r"googletest\.deb cannot be unpacked"):
        cpp_tests.googletest(tmp_path / "shared")
    assert [path.name for path in (tmp_path / "shared").iterdir()] in ([], ["lock"])


def test_googletest_is_named_by_a_digest() -> None:
    assert len(cpp_tests._SHA256) == len(hashlib.sha256().hexdigest())
    assert cpp_tests._PACKAGE.startswith("pool/main/g/googletest/")


def test_what_cmake_says_of_an_error_is_shown(
    tmp_path: Path, packaged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "cache", lambda part: tmp_path / part)
    monkeypatch.setattr(cpp_tests, "SOURCES", tmp_path / "absent")
    with pytest.raises(CompileError, match=r"could not build the test program of the C\+\+ API.*absent"):
        cpp_tests.build(tmp_path / "built", {})
