"""Build the C++ API's test program (``tests/cpp``) as a user builds a program, with CMake and GoogleTest."""

from __future__ import annotations

import shutil
import tarfile
import tempfile
import zipfile
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from debian.arfile import ArError
from debian.debfile import DebError, DebFile

from scripts.base import console, files, layout
from scripts.base.errors import CompileError, ToolchainError, WheelError
from scripts.base.process import run
from scripts.source import matrix
from scripts.wheels.compiling.kernels import digest
from scripts.wheels.packing import cpp_package
from scripts.wheels.toolchain import compilers, debian
from scripts.wheels.trust import binaries

if TYPE_CHECKING:
    from collections.abc import Mapping

SOURCES = layout.ROOT / "tests/cpp"
PROGRAM = "flash_attention_v2_tests"
# GoogleTest's source, which no wheel of the package index has.
_PACKAGE = "pool/main/g/googletest/googletest_1.12.1-0.2_all.deb"
_SHA256 = "927be72067517da503b6538026d451455c9e860f5dbfe237f792543db7d5a928"
_INSIDE = PurePosixPath("usr/src/googletest/googletest")


def googletest(shared: Path) -> Path:
    """The source of GoogleTest, in a folder that every clone shares.

    Raises:
        ToolchainError: it cannot be had.
    """
    folder = shared / PurePosixPath(_PACKAGE).stem
    with files.in_turn(shared / "lock", "fetches GoogleTest"):
        if not folder.is_dir():
            console.step("Fetching GoogleTest from Debian")
            with tempfile.TemporaryDirectory(dir=shared, prefix=".") as name:
                package = debian.bring(
                    _PACKAGE,
                    _SHA256,
                    Path(name),
                    says="scripts/wheels/proof/cpp_tests.py says",
                    otherwise="install GoogleTest and build tests/cpp yourself (its CMakeLists.txt says how)",
                )
                unfinished = Path(name) / "source"
                _unpack(package, unfinished)
                unfinished.replace(folder)
    return folder


def _unpack(package: Path, folder: Path) -> None:
    try:
        with DebFile(str(package)) as opened, opened.data.tgz() as archive:
            for member in archive:
                path = PurePosixPath(member.name.removeprefix("./"))
                content = archive.extractfile(member) if path.is_relative_to(_INSIDE) else None
                if content is None:
                    continue
                target = folder / path.relative_to(_INSIDE)
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("wb") as file:
                    shutil.copyfileobj(content, file)
    except (ArError, DebError, tarfile.TarError, OSError) as e:
        raise ToolchainError(f"{package.name} cannot be unpacked: {e}.") from e


def against_wheel(wheel: Path, cuda: str, folder: Path) -> Path:
    """Build the program against the library of a wheel, which need not be installed.

    Where the program runs, LD_LIBRARY_PATH says where the wheel's library and CUDA's runtime lie.

    Args:
        wheel: it.
        cuda: its release, whose headers and static runtime the program takes.
        folder: for what is unpacked and built; it need not be empty.

    Raises:
        CompileError: CMake or the compiler failed.
        ToolchainError: CMake, GoogleTest or the toolkit cannot be had.
        WheelError: the wheel has no library for C++.
    """
    with zipfile.ZipFile(wheel) as opened:
        names = [name for name in opened.namelist() if name.startswith("flash_attn/cpp/")]
        if not any(name.endswith(binaries.LIBRARY) for name in names):
            raise WheelError(f"{wheel} has no library for C++; build it again.")
        opened.extractall(folder / "wheel", names)  # noqa: S202 - of a zip, none lands outside the folder
    loaded = matrix.load(layout.MATRIX)
    target = next((target for target in loaded.targets if target.cuda == cuda), None)
    if target is None:
        raise ToolchainError(
            f"{wheel.name} is for CUDA {cuda}, which no target of {loaded.path.name} is for."
        )
    root = compilers.toolkit(target, layout.cache("toolkit"), folder).nvcc.parent.parent
    runtime = next(root.glob("lib*/libcudart_static.a"), None)
    if runtime is None:
        raise ToolchainError(
            f"{root} has no static CUDA runtime (libcudart_static.a), which the program takes."
        )
    return build(
        folder / "built",
        {
            "FlashAttentionV2_DIR": str(folder / "wheel/flash_attn/cpp" / cpp_package.CMAKE),
            "FLASH_ATTENTION_V2_RUNTIME": str(runtime),
            "FlashAttentionV2_CUDA_INCLUDE_DIR": str(root / "include"),
        },
    )


def option(wheel: Path, cuda: str, folder: Path) -> list[str | Path]:
    """The suite's option with the program; none where it cannot be had, and then its test is skipped."""
    console.note("building the tests of the C++ API")
    try:
        return [f"--cpp-tests={against_wheel(wheel, cuda, folder)}"]
    except ToolchainError as e:
        console.warn(f"the tests of the C++ API do not run: {e}")
        return []


def write(wheel: Path, cuda: str, path: Path) -> None:
    """Write the program that tests a wheel's library, for a GPU host without a network: aside, then renamed.

    Raises:
        BuildError: as :func:`against_wheel`.
    """
    with tempfile.TemporaryDirectory() as folder:
        files.copy(against_wheel(wheel, cuda, Path(folder)), path)


def build(folder: Path, definitions: Mapping[str, str]) -> Path:
    """Build the program in a folder, where an earlier build is taken up.

    Args:
        folder: of CMake's folders, one for each compiler, which CMake cannot change later.
        definitions: of CMake's variables, such as ``CMAKE_PREFIX_PATH``: which library it is built against.

    Raises:
        CompileError: CMake or the compiler failed.
        ToolchainError: CMake or GoogleTest cannot be had.
    """
    cmake = compilers.tool("cmake")
    compiler = str(compilers.host_compiler())
    place = folder / digest(compiler)
    settings = {
        "CMAKE_CXX_COMPILER": compiler,
        "GOOGLETEST_SOURCE": str(googletest(layout.cache("googletest"))),
        **definitions,
    }
    words = [f"-D{name}={value}" for name, value in settings.items()]
    configure: list[str | Path] = [cmake, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={compilers.tool('ninja')}"]
    what = "could not build the test program of the C++ API"
    log = place.with_suffix(".log")
    run([*configure, "-S", SOURCES, "-B", place, *words], error=CompileError, what=what, log=log)
    run([cmake, "--build", place], error=CompileError, what=what, log=log)
    return place / PROGRAM
