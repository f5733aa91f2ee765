"""The library that C++ and Python call, linked of small real objects; and the archive that it is packed into."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from scripts.base import sealed
from scripts.base.errors import SeriesError, ToolchainError, WheelError
from scripts.source import matrix
from scripts.wheels.building import build
from scripts.wheels.compiling import flags, kernels
from scripts.wheels.packing import cpp_archive, cpp_package, linking, wheel
from scripts.wheels.packing.linking import Product
from scripts.wheels.toolchain.compilers import Toolchain
from scripts.wheels.trust import binaries
from tests.unit.conftest import FACTS, KERNELS, ROOT, plan, toolchain

MATRIX = matrix.load(ROOT / "wheel_matrix.toml")
SOURCES = {
    "runtime": 'extern "C" __attribute__((visibility("default"))) int cudaRuntime() { return 40; }\n',
    "library": """
#include <string>
extern "C" int cudaRuntime();
#define SHOWN __attribute__((visibility("default")))
namespace flash { namespace core {
    SHOWN int run() { return cudaRuntime() + int(std::string("ab").size()); }
} }
extern "C" SHOWN int flash_attn_core() { return flash::core::run(); }
SHOWN int flash_attention_v2_forward() { return flash::core::run(); }
SHOWN int other() { return 1; }
extern "C" SHOWN int flash_attention_v2_c() { return flash_attention_v2_forward(); }
""",
    "binding": """
#include <string>
extern "C" int flash_attn_core();
extern "C" __attribute__((visibility("default"))) int __tvm_ffi_call() {
    return flash_attn_core() + int(std::string("").size());
}
""",
}


@pytest.fixture
def tools(tmp_path: Path) -> Toolchain:
    """A toolkit whose CUDA runtime is a function, and the machine's g++."""
    cxx = shutil.which("g++")
    assert cxx, "g++ is missing"
    place = tmp_path / "toolkit"
    (place / "bin").mkdir(parents=True)
    lib = place / "lib"
    lib.mkdir()
    for name, source in SOURCES.items():
        (tmp_path / f"{name}.cpp").write_text(source)
        hidden = [] if name == "runtime" else ["-fvisibility=hidden"]
        files = [str(tmp_path / f"{name}.cpp"), "-o", str(tmp_path / f"{name}.o")]
        subprocess.run([cxx, "-fPIC", *hidden, "-c", *files], check=True)
    for soname, folder in (("libcudart.so.13", lib), ("libtvm_ffi.so", tmp_path / "tvm-ffi/lib")):
        folder.mkdir(parents=True, exist_ok=True)
        shared: list[str | Path] = [
            cxx,
            "-shared",
            f"-Wl,-soname,{soname}",
            "-o",
            folder / soname,
            tmp_path / "runtime.o",
        ]
        subprocess.run(shared, check=True)
    subprocess.run(["ar", "rc", lib / "libcudart_static.a", tmp_path / "runtime.o"], check=True)
    made = toolchain(tmp_path, "exit 1\n")
    return dataclasses.replace(
        made, cxx=Path(cxx), toolkit=dataclasses.replace(made.toolkit, nvcc=place / "bin/nvcc")
    )


def link(tools: Toolchain, tmp_path: Path, product: Product, *objects: Path) -> Path:
    target = tmp_path / f"{product.name.lower()}.so"
    linking.link(tools, objects, target, tmp_path / "log.txt", product)
    return target


def shown(library: Path) -> set[str]:
    """What a library defines for others, by nm: names with their versions."""
    command = ["nm", "-D", "-C", "--defined-only", str(library)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return {line.split(maxsplit=2)[2] for line in lines if line.split()[1] != "A"}


def test_the_archive_s_library_shows_the_interface_and_holds_the_runtime(
    tools: Toolchain,
    tmp_path: Path,
) -> None:
    library = link(tools, tmp_path, Product.ARCHIVED, tmp_path / "library.o")
    assert shown(library) == {
        "flash_attention_v2_c@@FLASH_ATTENTION_V2_1",
        "flash_attention_v2_forward()@@FLASH_ATTENTION_V2_1",
    }
    assert not [name for name in binaries.needed(library) if "cudart" in name]
    assert linking.static_libraries(library) == ["libcudart_static.a"]


def test_python_loads_a_binding_that_finds_library_and_runtime_from_its_own_place(
    tools: Toolchain,
    tmp_path: Path,
) -> None:
    """As a wheel is installed: no variable says where anything is, or one says where an archive is."""
    archive = tmp_path / "archive"
    archive.mkdir()
    link(tools, tmp_path, Product.ARCHIVED, tmp_path / "library.o").replace(archive / binaries.LIBRARY)
    library = link(tools, tmp_path, Product.LIBRARY, tmp_path / "library.o")
    binding = link(tools, tmp_path, Product.BINDING, tmp_path / "binding.o", library)
    private = {name for name in shown(library) if name.endswith("FLASH_ATTENTION_V2_PRIVATE")}
    assert private == {"flash_attn_core@@FLASH_ATTENTION_V2_PRIVATE"}
    assert shown(binding) == {"__tvm_ffi_call"}
    site = tmp_path / "site"
    places = {
        f"{kernels.FORK.extension}/{binaries.EXTENSION}": binding,
        binaries.LIBRARY_IN_WHEEL: library,
        "nvidia/cu13/lib/libcudart.so.13": tools.toolkit.nvcc.parent.parent / "lib/libcudart.so.13",
    }
    for place, file in places.items():
        (site / place).parent.mkdir(parents=True, exist_ok=True)
        file.replace(site / place)
    code = "import ctypes, sys; ctypes.CDLL(sys.argv[1]); print(ctypes.CDLL(sys.argv[2]).__tvm_ffi_call())"
    loaded = [tmp_path / "tvm-ffi/lib/libtvm_ffi.so", site / kernels.FORK.extension / binaries.EXTENSION]
    command = [sys.executable, "-c", code, *map(str, loaded)]
    env = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    for more in ({}, {"LD_LIBRARY_PATH": str(archive)}):
        done = subprocess.run(command, capture_output=True, text=True, env=env | more, check=False)
        assert (done.stdout, done.stderr) == ("42\n", "")


@pytest.mark.parametrize(
    ("release", "place"), [("12.4", "nvidia/cuda_runtime/lib"), ("13.2", "nvidia/cu13/lib")]
)
def test_the_runtime_is_looked_for_where_torch_s_packages_have_it(
    tmp_path: Path, release: str, place: str
) -> None:
    tools = toolchain(tmp_path, "exit 1\n")
    tools = dataclasses.replace(tools, toolkit=dataclasses.replace(tools.toolkit, release=release))
    options = linking.link_options(tools, Product.LIBRARY)
    assert f"-Wl,-rpath,$ORIGIN/../../../{place}" in options
    assert f"-l:libcudart.so.{release.partition('.')[0]}" in options


def test_calls_of_kernel_files_are_wrapped_where_the_kernels_are(tmp_path: Path) -> None:
    tools = toolchain(tmp_path, "exit 1\n")
    launch = {"cudaFuncSetAttribute", "cudaGetDevice", "cudaDeviceGetAttribute"}
    launch |= {"__cudaGetKernel", "__cudaLaunchKernel"}
    assert "-DFORK_WRAPPED" in flags.CORE_FLAGS
    for product in Product:
        options = linking.link_options(tools, product)
        wrapped = {option.removeprefix("-Wl,--wrap=") for option in options if "--wrap=" in option}
        assert wrapped == (launch if product in (Product.LIBRARY, Product.ARCHIVED) else set())


def test_a_build_may_do_without_wrapped_calls() -> None:
    """Compiler and linker agree, or the library would lack a function or call itself for ever."""
    code = "from scripts.wheels.compiling import flags; print(flags.WRAPPED, '-DFORK_WRAPPED' in flags.CORE_FLAGS)"
    env = {**os.environ, "FORK_NO_WRAP": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout == "() False\n"


def test_a_program_s_own_function_of_the_same_name_changes_nothing(tools: Toolchain, tmp_path: Path) -> None:
    library = link(tools, tmp_path, Product.ARCHIVED, tmp_path / "library.o")
    (tmp_path / "main.cpp").write_text("""
#include <cstdio>
extern "C" int flash_attention_v2_c();
int flash_attention_v2_forward() { return 1; }
namespace flash { namespace core { int run() { return 1; } } }
extern "C" int cudaRuntime() { return 1; }
int main() { std::printf("%d", flash_attention_v2_c()); }
""")
    (tmp_path / binaries.LIBRARY).symlink_to(library)
    program = [str(tmp_path / "main.cpp"), "-rdynamic", str(library), f"-Wl,-rpath,{tmp_path}"]
    subprocess.run([str(tools.cxx), *program, "-o", str(tmp_path / "main")], check=True)
    done = subprocess.run([tmp_path / "main"], check=True, capture_output=True, text=True)
    assert done.stdout == "42"


def test_a_toolkit_without_the_static_runtime_is_told(
    tools: Toolchain,
) -> None:
    linking.require_static_runtime(tools)
    (tools.toolkit.nvcc.parent.parent / "lib/libcudart_static.a").unlink()
    with pytest.raises(ToolchainError, match=r"toolkit has no libcudart_static\.a.*set CUDA_HOME"):
        linking.require_static_runtime(tools)


# The archive ----------------------------------------------------------------------------------------------


def now(planned: kernels.Plan) -> kernels.Plan:
    """The plan with its tree as it is at this moment."""
    return dataclasses.replace(planned, tree=dataclasses.replace(planned.tree, seen=time.time_ns()))


@pytest.fixture
def made(tmp_path: Path) -> kernels.Plan:
    planned = plan(tmp_path, toolchain(tmp_path, "exit 1\n"), KERNELS[:1])
    root = planned.tree.root
    texts = {
        f"{kernels.API}/flash_attention_v2.h": '#include "flash_attention_v2_c.h"\n',
        f"{kernels.API}/flash_attention_v2_c.h": '#define FLASH_ATTENTION_V2_VERSION \\\n    "1.2.3" /* x */\n',
        "csrc/cutlass/include/cutlass/cutlass.h": "/*****\n * Copyright (c) N\n *\n * Redistribution and use in…\n *\n ****/\n#pragma once\n",
        "LICENSE": "BSD\n",
        "AUTHORS": "Tri Dao\n",
    }
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    library = tmp_path / "library.so"
    subprocess.run(["gcc", "-shared", "-x", "c", "/dev/null", "-o", library], check=True)
    return now(planned)


def pack(made: kernels.Plan, tmp_path: Path, out: str = "dist") -> Path:
    return cpp_archive.pack(
        MATRIX, MATRIX.default(), made, tmp_path / "library.so", dict(FACTS), tmp_path / out
    )


def test_its_name_says_version_kernels_gpus_cuda_and_platform(made: kernels.Plan, tmp_path: Path) -> None:
    path = pack(made, tmp_path)
    other = dataclasses.replace(made, architectures=("80", "90"))
    words = wheel.build_tag(made)
    assert words.endswith("_sm90")
    assert path.name == f"flash_attention_v2-2.8.3.post1+det.2-{words}-cu13-linux-x86_64.tar.gz"
    assert cpp_archive.file_name(MATRIX, MATRIX.default(), other) != path.name
    assert not list(path.parent.glob(".*"))


def test_one_folder_holds_all_of_one_owner_and_one_date_in_order(made: kernels.Plan, tmp_path: Path) -> None:
    path = pack(made, tmp_path)
    top = path.name.removesuffix(".tar.gz")
    with tarfile.open(path) as archive:
        entries = archive.getmembers()
    names = [entry.name.removeprefix(f"{top}/") for entry in entries]
    assert names == sorted(names)
    assert names == [
        "include/flash_attention_v2.h",
        "include/flash_attention_v2_c.h",
        "lib/cmake/FlashAttentionV2/FlashAttentionV2Config.cmake",
        "lib/cmake/FlashAttentionV2/FlashAttentionV2ConfigVersion.cmake",
        "lib/cmake/FlashAttentionV2/FlashAttentionV2Targets.cmake",
        "lib/libflash_attention_v2.so",
        "lib/libflash_attention_v2.so.1",
        "lib/pkgconfig/flash_attention_v2.pc",
        "share/flash_attention_v2/_fork.json",
        "share/flash_attention_v2/flash_attention_v2.cdx.json",
        *(
            f"share/licenses/flash_attention_v2/{name}"
            for name in ("AUTHORS", "CUDA-RUNTIME", "CUTLASS", "LICENSE", "NOTICE")
        ),
    ]
    assert {(e.uid, e.gid, e.uname, e.gname, e.mtime) for e in entries} == {(0, 0, "", "", 1735689600)}
    modes = {name: entry.mode for name, entry in zip(names, entries, strict=True)}
    assert modes["lib/libflash_attention_v2.so.1"] == 0o755
    assert modes["lib/pkgconfig/flash_attention_v2.pc"] == 0o644
    (link,) = (entry for entry in entries if entry.issym())
    assert (link.name, link.linkname) == (f"{top}/lib/libflash_attention_v2.so", "libflash_attention_v2.so.1")
    assert path.read_bytes()[4:8] == bytes(4), "gzip's own date"


def test_the_same_inputs_give_the_same_bytes(
    made: kernels.Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = pack(made, tmp_path)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1")
    monkeypatch.setenv("TZ", "Pacific/Kiritimati")
    before = os.umask(0o077)
    try:
        assert pack(made, tmp_path, "again").read_bytes() == first.read_bytes()
    finally:
        os.umask(before)


def test_two_archives_that_differ_are_told_by_file(made: kernels.Plan, tmp_path: Path) -> None:
    first = pack(made, tmp_path)
    (made.tree.root / "AUTHORS").write_text("Somebody\n")
    second = pack(now(made), tmp_path, "again")
    with pytest.raises(WheelError, match=r"share/licenses/flash_attention_v2/AUTHORS"):
        build.again_same(first, lambda _: second)


def contents(path: Path) -> dict[str, str]:
    """The text files of an archive, without its folder."""
    with tarfile.open(fileobj=io.BytesIO(path.read_bytes())) as archive:
        files = {e.name.partition("/")[2]: archive.extractfile(e) for e in archive if e.isfile()}
        return {name: f.read().decode("utf-8", "replace") for name, f in files.items() if f is not None}


def test_it_says_what_it_is_made_of(made: kernels.Plan, tmp_path: Path) -> None:
    files = contents(pack(made, tmp_path))
    told = files["share/flash_attention_v2/_fork.json"]
    assert sealed.flaw(told.encode()) == ""
    facts = json.loads(told)
    assert not {"torch", "requires_torch", "tvm_ffi"} & set(facts)
    assert facts["kernel_set"] == FACTS["kernel_set"]
    bom = json.loads(files["share/flash_attention_v2/flash_attention_v2.cdx.json"])
    component = bom["metadata"]["component"]
    assert component["purl"] == "pkg:generic/flash_attention_v2@2.8.3.post1%2Bdet.2.cu13"
    assert component["pedigree"]["ancestors"][0]["purl"] == "pkg:pypi/flash-attn@2.8.3.post1"
    assert "apache-tvm-ffi" not in {part["name"] for part in bom["components"]}
    assert (
        files["share/licenses/flash_attention_v2/CUTLASS"]
        == "Copyright (c) N\n\nRedistribution and use in…\n"
    )


@pytest.mark.parametrize("product", [Product.LIBRARY, Product.ARCHIVED])
def test_files_of_cmake_and_pkg_config_have_their_values(
    made: kernels.Plan, tmp_path: Path, product: Product
) -> None:
    files = cpp_package.files(made.tree.root, tmp_path / "library.so", made.toolchain, product)
    texts = {
        Path(name).name: text.decode() for name, text in files.items() if "lib/" in name and ".so" not in name
    }
    assert not [name for name, text in texts.items() if "@" in text]
    assert 'set(PACKAGE_VERSION "1.2.3")' in texts["FlashAttentionV2ConfigVersion.cmake"]
    assert "\nVersion: 1.2.3\n" in texts["flash_attention_v2.pc"]
    packages = "/../../nvidia/cu13" in texts["FlashAttentionV2Config.cmake"]
    assert packages is (product is Product.LIBRARY)


@pytest.mark.parametrize(("version", "told"), [("2.0.0", "is 2.0.0"), ("one", "is none")])
def test_a_header_of_another_major_version_than_the_library_s_name_is_refused(
    made: kernels.Plan, tmp_path: Path, version: str, told: str
) -> None:
    header = made.tree.root / kernels.API / "flash_attention_v2_c.h"
    header.write_text(f'#define FLASH_ATTENTION_V2_VERSION "{version}"\n')
    with pytest.raises(WheelError, match=rf"{told}, and the library is libflash_attention_v2\.so\.1"):
        pack(made, tmp_path)


def test_cutlass_without_its_licence_is_refused(made: kernels.Plan, tmp_path: Path) -> None:
    (made.tree.root / "csrc/cutlass/include/cutlass/cutlass.h").write_text("#pragma once\n")
    with pytest.raises(WheelError, match=r"cutlass\.h begins with CUTLASS's licence no more"):
        pack(made, tmp_path)


def test_a_tree_that_changes_meanwhile_makes_no_archive(made: kernels.Plan, tmp_path: Path) -> None:
    (made.tree.root / kernels.API / "flash_attention_v2.h").write_text("other\n")
    with pytest.raises(SeriesError, match="changed while it was being built from"):
        pack(made, tmp_path)
    assert not (tmp_path / "dist").exists()


def test_core_and_interface_have_objects_of_one_name_in_two_places(tmp_path: Path) -> None:
    planned = plan(tmp_path, toolchain(tmp_path, "exit 1\n"))
    for folder in (kernels.CORE, kernels.API):
        (planned.tree.root / folder).mkdir(parents=True, exist_ok=True)
        (planned.tree.root / folder / "small_kernels.cu").write_text("//\n")
    units = {unit.source: unit for unit in kernels.binding_units(planned)}
    two = [units[f"{folder}/small_kernels.cu"] for folder in (kernels.CORE, kernels.API)]
    assert {unit.rule for unit in two} == {"nvcc"}
    assert two[0].target.name == two[1].target.name
    assert two[0].target != two[1].target
