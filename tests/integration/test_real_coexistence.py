"""The wheels of flash-attn and flash-attn-4 in one environment: by pip in either order, either removed."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from wheel.wheelfile import WheelFile

from scripts.source import kernel_set
from scripts.wheels.compiling import kernels
from scripts.wheels.packing import metadata, wheel
from scripts.wheels.packing.linking import Product
from tests.integration.wheels import MATRIX, applied_apart
from tests.unit.conftest import toolchain

pytestmark = pytest.mark.network

# As much of torch as setup.py asks for when nothing is to be compiled.
TORCH = """
__version__ = "2.11.0"
class version: cuda, hip = "13.0", None
class _C: _GLIBCXX_USE_CXX11_ABI = True
"""
EXTENSIONS = "from setuptools.command.build_ext import build_ext as BuildExtension\nCppExtension = CUDAExtension = CUDA_HOME = ROCM_HOME = IS_HIP_EXTENSION = None\n"
FOUR = ("__init__.py", "interface.py", "cute_dsl_utils.py")  # names that a file of either could have


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Our wheel with an extension that is none, packed as ever; and one with flash-attn-4's layout."""
    folder = tmp_path_factory.mktemp("wheels")
    series, applied = applied_apart("flash-attn", folder)
    stand_in = folder / "python/torch/utils"
    stand_in.mkdir(parents=True)
    (stand_in.parent / "__init__.py").write_text(TORCH)
    (stand_in / "__init__.py").touch()
    (stand_in / "cpp_extension.py").write_text(EXTENSIONS)
    into = ["--quiet", "--target", str(folder / "python"), "setuptools", "wheel", "packaging"]
    subprocess.run([sys.executable, "-m", "pip", "install", *into], check=True)
    python = folder / "run-python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{folder / "python"}" exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    plan = kernels.Plan(
        applied, toolchain(folder, "exit 1\n"), kernel_set.ALL_KERNELS[:1], ("90",), folder / "build"
    )
    code = Path(sys.executable).resolve()  # a file of machine code, as good as any
    facts = metadata.provenance(MATRIX, MATRIX.default(), series, plan)
    linked = {Product.LIBRARY: code, Product.BINDING: code}
    packed = wheel.pack(MATRIX, MATRIX.default(), plan, linked, facts, folder / "dist")
    four = folder / "dist/flash_attn_4-4.0-py3-none-any.whl"
    with WheelFile(four, "w") as archive:
        for name in FOUR:
            archive.writestr(f"flash_attn/cute/{name}", f"name = {name!r}\n")
        said = "Metadata-Version: 2.1\nName: flash-attn-4\nVersion: 4.0\n"
        archive.writestr("flash_attn_4-4.0.dist-info/METADATA", said)
        archive.writestr(
            "flash_attn_4-4.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
    return {"flash-attn": packed, "flash-attn-4": four}


def files_of(path: Path) -> set[str]:
    with zipfile.ZipFile(path) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_the_wheel_leaves_to_others_what_is_theirs(wheels: dict[str, Path]) -> None:
    files = files_of(wheels["flash-attn"])
    assert not [n for n in files if n.startswith(("flash_attn/cute/", "flash_attn/flash_attn_triton_amd/"))]
    assert {
        "flash_attn/__init__.py",
        "flash_attn/determinism.py",
        "flash_attn/layers/rotary.py",
        "flash_attn/ops/triton/rotary.py",
        "flash_attn_2_cuda/__init__.py",
        "flash_attn_2_cuda/core.so",
        "flash_attn/cpp/lib/libflash_attention_v2.so.1",
    } <= files
    assert not files & files_of(wheels["flash-attn-4"])


@pytest.mark.parametrize(
    ("first", "second", "removed"),
    [
        (*order, removed)
        for order in itertools.permutations(("flash-attn", "flash-attn-4"))
        for removed in order
    ],
)
def test_either_is_installed_and_removed_beside_the_other(
    wheels: dict[str, Path], tmp_path: Path, first: str, second: str, removed: str
) -> None:
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=False)
    (site,) = environment.glob("lib/python*/site-packages")
    python = environment / "bin/python"

    def pip(*arguments: str | Path) -> None:
        command = [sys.executable, "-m", "pip", "--python", python, *arguments]
        subprocess.run(command, check=True, capture_output=True)

    def there(name: str) -> bool:
        with zipfile.ZipFile(wheels[name]) as archive:
            return all((site / n).read_bytes() == archive.read(n) for n in files_of(wheels[name]))

    for name in (first, second):
        pip("install", "--no-deps", "--no-index", wheels[name])
    assert there(first)
    assert there(second)
    pip("uninstall", "--yes", removed)
    kept = second if removed == first else first
    assert there(kept)
    assert not [n for n in files_of(wheels[removed]) if (site / n).exists()]
    # Python finds the subpackage in the folder that both share, with flash_attn/__init__.py or without.
    if kept == "flash-attn":
        return
    code = "import flash_attn.cute.interface as i; print(i.name, i.__file__)"
    for beside in (False, True):
        if beside:
            (site / "flash_attn/__init__.py").write_text("own = True\n")
            code += "; import flash_attn, pkgutil; print(flash_attn.own, [m.name for m in pkgutil.iter_modules(flash_attn.__path__)])"
        done = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
        assert done.stdout.startswith("interface.py ")
        assert beside == ("True ['cute']" in done.stdout)


def test_the_stand_in_is_as_pip_would_build_it(wheels: dict[str, Path]) -> None:
    """What setup.py packs for pip is what our wheel holds: one list for both."""
    source = wheels["flash-attn"].parent.parent / "source"
    out = source.parent / "pip"
    shutil.copytree(source, out, ignore=shutil.ignore_patterns(".git"))
    (out / "csrc/cutlass/include/cutlass").mkdir(parents=True, exist_ok=True)
    (out / "csrc/cutlass/include/cutlass/cutlass.h").touch()
    env = {"FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE", "FLASH_ATTENTION_FORCE_BUILD": "TRUE", "CUDA_HOME": ""}
    subprocess.run(
        [source.parent / "run-python", "setup.py", "--quiet", "build_py", "--build-lib", out / "lib"],
        cwd=out,
        env=env,
        check=True,
        capture_output=True,
    )
    built = {p.relative_to(out / "lib").as_posix() for p in (out / "lib").rglob("*.py")}
    assert built == {name for name in files_of(wheels["flash-attn"]) if name.endswith(".py")}
