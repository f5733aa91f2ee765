"""Build the C++ API's test program (``tests/cpp``) as a user builds a program, with CMake and GoogleTest."""

from __future__ import annotations

import shutil
import tarfile
import tempfile
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from debian.arfile import ArError
from debian.debfile import DebError, DebFile

from scripts.base import console, files, layout
from scripts.base.errors import CompileError, ToolchainError
from scripts.base.process import run
from scripts.wheels import debian, toolchain
from scripts.wheels.kernels import digest

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
                    says="scripts/wheels/cpp_tests.py says",
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


def build(folder: Path, definitions: Mapping[str, str]) -> Path:
    """Build the program in a folder, where an earlier build is taken up.

    Args:
        folder: of CMake's folders, one for each compiler, which CMake cannot change later.
        definitions: of CMake's variables, such as ``CMAKE_PREFIX_PATH``: which library it is built against.

    Raises:
        CompileError: CMake or the compiler failed.
        ToolchainError: CMake or GoogleTest cannot be had.
    """
    cmake = toolchain.tool("cmake")
    compiler = str(toolchain.host_compiler())
    place = folder / digest(compiler)
    settings = {
        "CMAKE_CXX_COMPILER": compiler,
        "GOOGLETEST_SOURCE": str(googletest(layout.cache("googletest"))),
        **definitions,
    }
    words = [f"-D{name}={value}" for name, value in settings.items()]
    configure: list[str | Path] = [cmake, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={toolchain.tool('ninja')}"]
    what = "could not build the test program of the C++ API"
    log = place.with_suffix(".log")
    run([*configure, "-S", SOURCES, "-B", place, *words], error=CompileError, what=what, log=log)
    run([cmake, "--build", place], error=CompileError, what=what, log=log)
    return place / PROGRAM
