from __future__ import annotations

import hashlib
import io
import subprocess
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.base.errors import ToolchainError
from scripts.source import matrix_tables
from scripts.wheels.toolchain import debian
from tests.unit.conftest import PackageIndex

PROGRAMS = {
    "./usr/bin/nvcc": "the script",
    "./usr/lib/nvidia-cuda-toolkit/bin/nvcc": "the compiler",
    "./usr/lib/nvidia-cuda-toolkit/bin/cicc": "cicc",
    "./usr/lib/nvidia-cuda-toolkit/bin/crt/link.stub": "stub",
    "./usr/lib/nvidia-cuda-toolkit/libdevice/libdevice.10.bc": "bitcode",
    "./usr/bin/ptxas": "ptxas",
    "./usr/share/doc/readme": "text",
}


def deb(path: Path, contents: dict[str, str]) -> Path:
    """A Debian package: an ar archive of a version, control files and data."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:xz") as archive:
        for name, text in contents.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(text), 0o644 if name.endswith((".stub", ".bc")) else 0o755
            archive.addfile(member, io.BytesIO(text.encode()))
    control = io.BytesIO()
    with tarfile.open(fileobj=control, mode="w:xz"):
        pass
    parts = [
        ("debian-binary", b"2.0\n"),
        ("control.tar.xz", control.getvalue()),
        ("data.tar.xz", data.getvalue()),
    ]
    body = b"".join(
        f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(part):<10}`\n".encode()
        + part
        + b"\n" * (len(part) % 2)
        for name, part in parts
    )
    path.write_bytes(b"!<arch>\n" + body)
    return path


def headers(folder: Path) -> None:
    """A wheel of the package index with one header."""
    folder.mkdir()
    with zipfile.ZipFile(folder / "cuda_headers-1-py3-none-any.whl", "w") as archive:
        archive.writestr("nvidia/cuda_runtime/include/cuda_runtime.h", "// runtime\n")
        archive.writestr(
            "cuda_headers-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: cuda-headers\nVersion: 1\n"
        )
        archive.writestr(
            "cuda_headers-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("cuda_headers-1.dist-info/RECORD", "")


def wanted(package: Path, **other: str) -> matrix_tables.Assembled:
    fields = {
        "package": "pool/c/cuda_12.4~1_amd64.deb",
        "sha256": hashlib.sha256(package.read_bytes()).hexdigest(),
        **other,
    }
    return matrix_tables.Assembled(**fields, headers=("cuda-headers==1",))


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, list[str]]]:
    package = deb(tmp_path / "cuda.deb", PROGRAMS)
    asked: list[str] = []

    def page(path: str) -> tuple[bytes, int]:
        asked.append(path)
        content = package.read_bytes()
        return content, len(content)

    server = PackageIndex("", page)
    headers(tmp_path / "index")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv(debian.MIRROR, f"http://127.0.0.1:{server.server.server_port}/debian/")
    yield package, asked
    server.close()


def test_a_toolkit_is_assembled_where_nvcc_looks_for_its_parts(
    tmp_path: Path, mirror: tuple[Path, list[str]]
) -> None:
    package, asked = mirror
    shared = tmp_path / "shared"
    shared.mkdir()
    debian.assemble(wanted(package), shared / "12.4.1", tmp_path / "log")
    assert asked == ["/debian/pool/c/cuda_12.4~1_amd64.deb"]
    found = {
        p.relative_to(shared / "12.4.1").as_posix(): p.read_text() for p in shared.rglob("*") if p.is_file()
    }
    assert found.pop("bin/nvcc.profile").startswith("TOP = ")
    assert found == {
        "bin/nvcc": "the compiler",
        "bin/ptxas": "ptxas",
        "bin/crt/link.stub": "stub",
        "nvvm/bin/cicc": "cicc",
        "nvvm/libdevice/libdevice.10.bc": "bitcode",
        "include/cuda_runtime.h": "// runtime\n",
    }
    assert (shared / "12.4.1/bin/nvcc").stat().st_mode & 0o111
    assert [p.name for p in shared.iterdir()] == ["12.4.1"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"sha256": "0" * 64}, r"has sha256 [0-9a-f]{64}, \[toolkits\] of wheel_matrix\.toml says 0{64}"),
        ({"headers": ("absent-headers==1",)}, "could not install CUDA's headers"),
    ],
)
def test_what_is_not_as_the_matrix_says_is_not_kept(
    tmp_path: Path, mirror: tuple[Path, list[str]], change: dict[str, object], expected: str
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    with pytest.raises(ToolchainError, match=expected):
        debian.assemble(wanted(mirror[0]).model_copy(update=change), shared / "12.4.1", tmp_path / "log")
    assert not [*shared.iterdir()]


def test_a_mirror_that_does_not_answer_is_named_with_what_to_do(
    tmp_path: Path, mirror: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(debian.MIRROR, "http://127.0.0.1:9/debian")
    with pytest.raises(
        ToolchainError, match=r"could not fetch http://127\.0\.0\.1:9/debian/pool/.*DEBIAN_MIRROR"
    ):
        debian.assemble(wanted(mirror[0]), tmp_path / "12.4.1", tmp_path / "log")


@pytest.mark.parametrize("content", [None, {}, {"./usr/bin/ptxas": "ptxas"}])
def test_a_package_without_a_compiler_or_no_package_is_an_error(
    tmp_path: Path, content: dict[str, str] | None
) -> None:
    package = tmp_path / "some.deb"
    if content is None:
        package.write_bytes(b"<html>not found</html>")
    else:
        deb(package, content)
    with pytest.raises(ToolchainError, match=r"some\.deb (cannot be unpacked|has no nvcc)"):
        debian.unpack(package, tmp_path / "toolkit")


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        (
            "http://mirror.example/debian-security/\nhttps://mirror.example/debian/\n",
            "https://mirror.example/debian",
        ),
        ("http://a.example/ubuntu/\n", None),
    ],
)
def test_the_mirror_is_that_of_the_machine_s_apt(
    monkeypatch: pytest.MonkeyPatch, listed: str, expected: str | None
) -> None:
    monkeypatch.delenv(debian.MIRROR, raising=False)
    monkeypatch.setattr(
        subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 0, listed, "")
    )
    if expected:
        assert debian.mirror() == expected
        return
    with pytest.raises(ToolchainError, match="set DEBIAN_MIRROR"):
        debian.mirror()
