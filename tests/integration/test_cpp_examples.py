"""The examples of the C++ API's page compile, and run: on interpreted kernels, and with a CUDA runtime that finds no GPU."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from scripts.base import layout
from scripts.base.errors import VerifyError
from scripts.base.process import run
from scripts.commands import arguments
from scripts.lab import emulated_library, emulator
from scripts.series import clone
from scripts.source import matrix, upstream
from scripts.wheels.compiling import kernels
from scripts.wheels.toolchain import compilers
from scripts.wheels.trust import binaries

pytestmark = [pytest.mark.network, pytest.mark.nvcc, pytest.mark.in_turn(6)]

EXAMPLES = layout.ROOT / "docs/examples"
# What the examples call: head dim 64, float16, causal, keys that no thread blocks share.
KERNELS = f"{emulator.KERNELS},fwd,causal", "hdim64,fp16,fwd,causal"


@dataclass(frozen=True)
class Built:
    """A library, what programs link beside it, and the file that has the CUDA runtime."""

    library: Path
    headers: list[Path]
    runtime: Path
    cxx: Path

    @property
    def linked(self) -> list[str]:
        own = [str(self.library), f"-Wl,-rpath,{self.library.parent}"]
        if self.runtime != self.library:
            own += [str(self.runtime), f"-Wl,-rpath,{self.runtime.parent}"]
        return own


def cuda_runtime(tools: compilers.Toolchain) -> Path:
    """NVIDIA's runtime, of the toolkit that compiles."""
    root = tools.toolkit.nvcc.parent.parent
    found = sorted(path for name in ("lib64", "lib") for path in (root / name).glob("libcudart.so.*"))
    assert found, f"{root} has no CUDA runtime"
    return found[0]


@pytest.fixture(scope="module")
def parts() -> tuple[compilers.Toolchain, Path, tuple[Path, ...]]:
    loaded = matrix.load(layout.MATRIX)
    tools = compilers.assemble(loaded.default(), None, layout.BUILD, cache=True)
    _, applied = clone.apply(loaded, upstream.Source.AUTO)
    chosen = tuple(kernel for words in KERNELS for kernel in arguments.kernel_choice(words))
    objects = emulated_library.library_objects(tools, applied, chosen, "90", None)
    return tools, applied.root / kernels.API, objects


@pytest.fixture(scope="module")
def emulated(parts: tuple[compilers.Toolchain, Path, tuple[Path, ...]]) -> Built:
    tools, api, objects = parts
    library = emulated_library.library(tools, objects)
    (library.parent / "libflash_attention_v2.so").unlink(missing_ok=True)
    (library.parent / "libflash_attention_v2.so").symlink_to(library.name)
    return Built(library, [api, *emulated_library.cuda_headers(tools)], library, tools.cxx)


@pytest.fixture(scope="module")
def without_gpu(
    parts: tuple[compilers.Toolchain, Path, tuple[Path, ...]], tmp_path_factory: pytest.TempPathFactory
) -> Built:
    """The same objects on NVIDIA's runtime."""
    tools, api, objects = parts
    runtime = cuda_runtime(tools)
    library = tmp_path_factory.mktemp("library") / binaries.LIBRARY
    run(
        [tools.cxx, "-shared", f"-Wl,-soname,{library.name}", "-o", library, *objects, runtime],
        error=VerifyError,
        what="could not link the library",
    )
    (library.parent / "libflash_attention_v2.so").symlink_to(library.name)
    return Built(library, [api, *emulated_library.cuda_headers(tools)], runtime, tools.cxx)


def compiled(name: str, folder: Path, built: Built) -> list[str]:
    """The command that runs an example."""
    source, program = EXAMPLES / name, folder / "program"
    includes = [word for path in built.headers for word in ("-isystem", str(path))]
    if name.endswith(".py"):
        return [sys.executable, str(source), str(built.library), str(built.runtime)]
    if name.endswith(".rs"):
        rustc = shutil.which("rustc")
        if rustc is None:
            pytest.skip("there is no rustc, so the example in Rust was not compiled")
        words = [f"-Clink-arg={word}" for word in built.linked]
        command: list[str | Path] = [rustc, "--edition=2021", "-Dwarnings", source, "-o", program, *words]
    elif name.endswith(".c"):
        compiler = shutil.which("cc") or "gcc"
        command = [compiler, "-std=c11", "-Wall", "-Wextra", "-Werror", *includes, source, "-o", program]
        command += built.linked
    else:
        command = [built.cxx, "-std=c++17", "-Wall", *includes, source, "-o", program, *built.linked]
    run(command, error=VerifyError, what=f"could not compile {name}")
    return [str(program)]


def ran(command: list[str], **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env={**os.environ, **more}, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("basic.cpp", r"out\[0\]\[511\]\[7\]: -?\d\.\d{4} -?\d\.\d{4} -?\d\.\d{4} …\n"),
        ("forward.c", r"lse of the last token: \d\.\d{3}, \d\.\d{3}, \d\.\d{3}, \d\.\d{3}\n"),
        ("forward.py", r"last row: -?\d\.\d{4} -?\d\.\d{4} -?\d\.\d{4} -?\d\.\d{4}\n"),
        ("forward.rs", r"128 rows; the first is its value, as it should be\n"),
    ],
)
def test_an_example_runs_to_its_end_on_interpreted_kernels(
    name: str, said: str, tmp_path: Path, emulated: Built
) -> None:
    done = ran(compiled(name, tmp_path, emulated))
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.fullmatch(said, done.stdout), done.stdout


def test_an_example_says_which_kernels_the_library_lacks(tmp_path: Path, emulated: Built) -> None:
    done = ran(compiled("training.cpp", tmp_path, emulated))
    assert done.returncode == 1
    assert "no kernels for head dim 64 in BFloat16" in done.stderr, done.stderr


@pytest.mark.parametrize("name", ["basic.cpp", "forward.c", "training.cpp", "forward.py", "forward.rs"])
def test_an_example_without_a_gpu_ends_with_a_clear_error(
    name: str, tmp_path: Path, without_gpu: Built
) -> None:
    done = ran(compiled(name, tmp_path, without_gpu), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"no CUDA-capable device|CUDA driver version is insufficient", done.stdout + done.stderr)


def test_the_documented_example_has_the_documented_lines() -> None:
    """What the interface's documentation calls is called so, line by line."""
    text = (EXAMPLES / "basic.cpp").read_text(encoding="utf-8")
    for line in (
        "    FlashAttentionV2Config config;\n    config.batch_size = 1;\n    config.seq_len = 512;\n",
        "    config.use_causal_mask = true;\n    config.dropout_rate = 0.1f;\n    config.seed = 42;\n",
        "    half *d_q, *d_k, *d_v, *d_o, *d_l;\n",
        "    cudaError_t err = flash_attention_v2_forward(\n        d_q, d_k, d_v, d_o, d_l, config\n    );\n",
    ):
        assert line in text


def test_the_program_that_the_page_begins_with_runs(tmp_path: Path, emulated: Built) -> None:
    blocks = re.findall(r"```cpp\n(.*?)```", (layout.ROOT / "docs/cpp.md").read_text("utf-8"), re.DOTALL)
    whole = [block for block in blocks if "int main(" in block]
    assert whole
    source = tmp_path / "page.cpp"
    source.write_text(whole[0], encoding="utf-8")
    includes = [word for path in emulated.headers for word in ("-isystem", str(path))]
    command: list[str | Path] = [emulated.cxx, "-std=c++17", "-Wall", "-Werror", *includes, source]
    run([*command, "-o", tmp_path / "page", *emulated.linked], error=VerifyError, what="docs/cpp.md")
    done = ran([str(tmp_path / "page")])
    assert done.returncode == 0, done.stdout + done.stderr
