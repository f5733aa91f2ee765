"""The commands as a user calls them, and the wheel of one kernel file that tests share."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from scripts.base import layout
from scripts.series import clone, model, tree
from scripts.source import matrix, upstream
from scripts.wheels.compiling import flags
from scripts.wheels.toolchain import compilers

ROOT = layout.ROOT
MATRIX = matrix.load(layout.MATRIX)
KERNELS = "hdim32,fp16,fwd,causal"  # the file that compiles fastest; its PTX is emulated too


def scripts(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a command of this repository; what it said, and how it ended."""
    return subprocess.run(
        [sys.executable, "-m", "scripts", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def said(*arguments: object) -> str:
    """What a command of this repository says that ends well."""
    done = scripts(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(out: Path, *arguments: str) -> str:
    """Build the wheel, or with ``--cpp`` the archive, of that file; what the command said."""
    return said("build", "--kernels", KERNELS, "--source", "sdist", "--out", out, *arguments)


def tools(*, cache: bool = True) -> compilers.Toolchain:
    """The default target's, without torch."""
    return compilers.assemble(MATRIX.default(), None, layout.BUILD, cache=cache)


def applied(*where: Path, **options: Any) -> tree.Tree:
    """The default upstream's series, in this clone's work tree or elsewhere."""
    return clone.apply(MATRIX, upstream.Source.SDIST, *where, **options)[1]


def applied_apart(name: str, folder: Path) -> tuple[model.Series, tree.Tree]:
    """An upstream's series, in a folder of its own, which nothing else works in."""
    loaded = MATRIX.of(name)
    patches = model.read(ROOT / loaded.table.series, ROOT / str(loaded.table.own))
    found = upstream.find(loaded.upstream, folder / "none", layout.cache("sdist"), upstream.Source.SDIST)
    return patches, tree.apply(patches, loaded.upstream, found, folder / "source")


def nvcc(arch: str, code: str, *options: object) -> subprocess.CompletedProcess[str]:
    """Run the default target's, as a build for that GPU does, to PTX (``compute``) or machine code (``sm``)."""
    found = tools()
    command = [found.toolkit.nvcc, f"-ccbin={found.cxx}", *flags.NVCC_FLAGS, flags.for_gpus([arch])]
    command += [f"-gencode=arch=compute_{arch},code={code}_{arch}"]
    command += [*(f"-I{folder}" for folder in found.toolkit.include), *options]
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=False, env=flags.environment()
    )


def program(source: str, folder: Path, *options: object) -> list[str]:
    """The lines that a program of C++ says which the default target's compiler makes of a text."""
    (folder / "program.cpp").write_text(source, encoding="utf-8")
    made = folder / "program"
    command = [tools().cxx, "-std=c++17", *options, folder / "program.cpp", "-o", made]
    subprocess.run(list(map(str, command)), check=True)
    return subprocess.run([made], capture_output=True, text=True, check=True).stdout.splitlines()
