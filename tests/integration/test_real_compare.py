"""What a patch does to kernels, of a real compiler's objects."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from scripts.lab import compare, objects
from scripts.wheels.compiling import flags
from tests.integration.wheels import KERNELS, ROOT, said, scripts, tools
from tests.unit.conftest import whole_wheel

pytestmark = [pytest.mark.network, pytest.mark.nvcc]
SOURCE = """
__global__ void plain(float *data) { data[threadIdx.x] += 1.f; }
__global__ void local(float *data, const int *order) {
    float all[24];
    for (int n = 0; n < 24; ++n) { all[order[n]] = data[n]; }
    for (int n = 0; n < 24; ++n) { data[threadIdx.x * 24 + n] = all[order[n + 24]]; }
}
"""


# Fields lie elsewhere by MORE, and are used otherwise by SWAPPED.
PARAMETERS = """
struct Params { MORE float *out; float *in; long stride; int rows; bool masked; unsigned short step; };
__global__ void flash_NAME_kernel(Params p) {
    const long row = blockIdx.x;
    if (p.masked && row < p.rows) { p.SWAPPED[row * p.stride] += p.in[threadIdx.x * p.step]; }
}
__global__ void flash_other_kernel(float *data) { data[threadIdx.x] *= 2.f; }
"""


def test_registers_stack_and_local_memory_are_those_that_ptxas_tells(tmp_path: Path) -> None:
    found_tools = tools(cache=False)
    source, item = tmp_path / "kernels.cu", tmp_path / "kernels.o"
    source.write_text(SOURCE, encoding="utf-8")
    options = [f"-ccbin={found_tools.cxx}", "-arch=sm_90", "-Xptxas=-v"]
    command: list[str | Path] = [found_tools.toolkit.nvcc, *options, "-c", source, "-o", item]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    found = {compare.spell(name): code for name, code in objects.read_kernels(item, "90").items()}
    assert len(found) == 2
    for name, code in found.items():
        own = told.partition(f"Compiling entry function '{name}'")[2]
        assert code.stack == int(re.findall(r"(\d+) bytes stack frame", own)[0])
        assert code.registers == int(re.findall(r"Used (\d+) registers", own)[0])
        in_local = "local" in name
        assert (code.stack >= 24 * 4) == in_local
        assert (code.stores > 0, code.loads > 0) == (in_local, in_local)
    assert objects.read_kernels(item, "80") == {}


@pytest.mark.in_turn(6)
def test_a_patch_that_changes_no_kernel_and_one_that_takes_some_away() -> None:
    told = {}
    for patch in ("Read pages", "Choose a call"):  # four compiles
        command = ("compare", "--patch", patch, "--kernels", KERNELS, "--source", "sdist", "--json")
        (told[patch],) = json.loads(said(*command))["files"]
    nothing, fewer = told.values()
    assert len(nothing["same"]) > 10  # head dim 32 has one tile size forward
    assert nothing["changed"] == nothing["gone"] == nothing["new"] == []
    gone = " ".join(kernel["spelled"] for kernel in fewer["gone"])
    assert all(word in gone for word in ("softcap", "dropout", "alibi"))
    assert [kernel["spelled"] for kernel in fewer["same"]][:1] == ["flash_fwd_kernel 32x128x128x4 causal"]
    assert not list((ROOT / "build").glob("compare-*"))


def test_kernels_that_include_torch_are_not_compared() -> None:
    done = scripts("compare", "--patch", "2", "--source", "sdist")
    assert done.returncode == 2
    assert (
        "kernel files include torch until Keep-torch-out-of-the-kernels.patch; compare patches that come after it."
        in done.stderr
    )
    assert not list((ROOT / "build").glob("compare-*"))


def test_wheels_whose_parameters_moved_and_whose_kernels_have_other_names(tmp_path: Path) -> None:
    found_tools = tools(cache=False)

    def wheel(folder: str, **words: str) -> Path:
        source, item = tmp_path / f"{folder}.cu", tmp_path / f"{folder}.so"
        text = PARAMETERS
        for word in ("MORE", "NAME", "SWAPPED"):
            text = text.replace(word, words.get(word, {"NAME": "old", "SWAPPED": "out"}.get(word, "")))
        source.write_text(text, encoding="utf-8")
        targets = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in ("80", "90", "120")]
        options = [f"-ccbin={found_tools.cxx}", "-Xcompiler=-fPIC", "-shared", *flags.COMPRESS, *targets]
        subprocess.run([found_tools.toolkit.nvcc, *options, source, "-o", item], check=True)
        return whole_wheel(tmp_path / folder, more={"flash_attn_2_cuda.so": item.read_bytes()})

    def compared(old: Path, new: Path, *options: str) -> tuple[int, dict[str, list[str]]]:
        done = scripts("compare", "--json", "--wheels", old, new, *options)
        assert done.returncode in (0, 1), done.stderr
        told = json.loads(done.stdout)["kernels"]
        kinds = ("renamed", "moved", "changed", "gone")
        return done.returncode, {k: sorted(one["architecture"] for one in told[k]) for k in kinds if told[k]}

    every = ["120", "80", "90"]
    old, moved = wheel("old"), wheel("moved", MORE="const int *more; bool own;")
    assert compared(old, old) == (0, {})
    assert compared(old, moved) == (1, {"changed": every})
    assert compared(old, moved, "--ignore-offsets") == (0, {"moved": every})
    both = wheel("both", MORE="const int *more;", NAME="new")
    assert compared(old, both, "--ignore-offsets") == (1, {"gone": every})
    assert compared(old, both, "--ignore-names", "--ignore-offsets") == (0, {"moved": every})
    assert compared(old, wheel("named", NAME="new"), "--ignore-names") == (0, {"renamed": every})
    assert compared(old, wheel("used", SWAPPED="in"), "--ignore-offsets") == (1, {"changed": every})
