"""What editors are told of C++ and CUDA: ``compile_commands.json``, which clangd and clang-tidy read.

It lies beside the work tree, where clangd finds it both for the tree's files and for our own in ``fork/``: it
looks in each folder above a file, and in ``build`` of each. It is made without a compiler; where the machine
has a CUDA toolkit, it names that one's headers.

Our own files are compiled beside links to the tree's, where links to ``fork/`` take the place of the copies:
clang would take a file and its copy for two with the same definitions.
"""

from __future__ import annotations

import json
import shlex
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.base import files, layout
from scripts.base.errors import SeriesError
from scripts.series import own as own_files
from scripts.wheels.compiling import kernels
from scripts.wheels.toolchain import compilers, tvm_ffi

if TYPE_CHECKING:
    from collections.abc import Iterator

    from scripts.series.model import Series
    from scripts.series.tree import Tree
    from scripts.source.matrix import Matrix, Target

NAME = "compile_commands.json"
_BESIDE = "editors"  # a folder beside it
_LINKED = "csrc/flash_attn"
_LIBCUDACXX = "cccl"  # which nvcc 13 finds by itself
# clang includes this of cuRAND with every CUDA file, and toolkits of a package index lack it.
_OF_CURAND = "curand_mtgp32_kernel.h"
_SEEN_AS = "90"  # the compute capability whose code editors show, where the target has it
_APART = ("-isystem",)  # options whose value is the next word
_SHARED = ("-D", "-U", "-std=")  # that clang takes as nvcc does
_LANGUAGE = {"nvcc": "cuda", "core": "c++"}


def write(loaded: Matrix, series: Series, applied: Tree) -> Path | None:
    """Write it for the default target's files; None of a tree that has nothing to compile."""
    if not applied.sources:
        return None
    folder = applied.root.parent
    _link(folder / _BESIDE, series, applied)
    place, content = folder / NAME, json.dumps(list(_commands(loaded, series, applied)), indent=1) + "\n"
    if not place.is_file() or place.read_text(encoding="utf-8") != content:
        files.write(place, content)
    return place


def _link(folder: Path, series: Series, applied: Tree) -> None:
    """Make the folder of links; those that are right stay, which costs no time.

    Raises:
        SeriesError: a file is in a link's place.
    """
    names = [
        p.relative_to(applied.root).as_posix() for p in (applied.root / _LINKED).rglob("*") if p.is_file()
    ]
    own = series.own
    wanted = {folder / n: own.place(n) if n in own.contents else applied.root / n for n in names}
    for link in list((folder / _LINKED).rglob("*")):
        if link.is_symlink() and (link not in wanted or link.readlink() != wanted[link]):
            link.unlink(missing_ok=True)  # another run may have done it
            own_files.remove_empty(folder, link)
    for link, file in wanted.items():
        if not link.is_symlink():
            link.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                link.symlink_to(file)
        if not link.is_symlink():
            raise SeriesError(
                f"{link} is a file where a link to {file} was: an editor wrote it in the link's place. Take "
                "what was changed there into the file, then delete it."
            )
    (folder / _OF_CURAND).touch()


def _commands(loaded: Matrix, series: Series, applied: Tree) -> Iterator[dict[str, object]]:
    """A command for each file that is compiled, and for each header of ours; those of ``fork/`` too."""
    target = loaded.default()
    plan = kernels.Plan(
        applied, _toolchain(target), target.kernels, target.architectures, applied.root.parent
    )
    rules = {unit.source: unit.rule for unit in (*kernels.kernel_units(plan), *kernels.binding_units(plan))}
    rules |= {
        name: "core" if name.startswith((kernels.CORE, kernels.API)) else "nvcc"
        for name in series.own.contents
        if name.endswith(".h")
    }
    linked = applied.root.parent / _BESIDE
    words = {rule: _words(plan, target, rule) for rule in sorted({*rules.values()})}
    for name, rule in sorted(rules.items()):
        yield _command(applied, applied.root / name, words[rule])
        if name in series.own.contents:
            there, here = f"-I{applied.root / _LINKED}", f"-I{linked / _LINKED}"
            own = [word.replace(there, here) for word in words[rule]]
            yield _command(applied, series.own.place(name), own)


def _command(applied: Tree, file: Path, words: list[str]) -> dict[str, object]:
    return {"directory": str(applied.root), "file": str(file), "arguments": [*words, "-c", str(file)]}


def _words(plan: kernels.Plan, target: Target, rule: str) -> list[str]:
    """The command of a rule in words that clang takes: what only nvcc knows is left out."""
    given = iter(shlex.split(kernels.command_of(plan, rule))[1:])
    words = ["clang++", "-x", _LANGUAGE[rule]]
    if rule == "nvcc":
        seen = _SEEN_AS if _SEEN_AS in target.architectures else target.architectures[0]
        words += [f"--cuda-gpu-arch=sm_{seen}", *_cuda(plan)]
    for word in given:
        if word in _APART:
            words += [word, next(given)]
        elif word.startswith("-I"):  # whole: of some files it is another folder's
            words.append(f"-I{plan.tree.root / word[2:]}")
        elif word.startswith(_SHARED):
            words.append(word)
    return words


def _cuda(plan: kernels.Plan) -> list[str]:
    """Where clang finds CUDA; nothing where the machine has none, and clang looks itself."""
    found: list[str] = []
    for folder in plan.toolchain.toolkit.include:
        found += [f"--cuda-path={folder.parent}", "-isystem", str(folder / _LIBCUDACXX)]
    beside = plan.tree.root.parent / _BESIDE
    lacks = not any((folder / _OF_CURAND).is_file() for folder in plan.toolchain.toolkit.include)
    return [*found, *(["-isystem", str(beside)] if lacks else [])]


def _toolchain(target: Target) -> compilers.Toolchain:
    """What a build of this target would run, as far as that is known without installing or running it."""
    toolkit = compilers.there(target) or compilers.Toolkit(Path("nvcc"), target.cuda, "", (), "none is there")
    ffi = tvm_ffi.TvmFfi(layout.cache("tvm-ffi") / tvm_ffi.VERSION)
    return compilers.Toolchain(toolkit, Path("g++"), "", Path("ninja"), None, None, ffi)
