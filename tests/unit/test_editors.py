"""``compile_commands.json``: what editors are told of the tree's files, and of our own."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scripts.base import layout
from scripts.base.errors import SeriesError
from scripts.base.git import Repository
from scripts.series import model, tree, uncommitted
from scripts.source import matrix
from scripts.wheels.compiling import editors, flags, kernels
from scripts.wheels.toolchain import compilers
from tests.unit.conftest import BASE, EDITED_SETUP, PIN, Make, checkout_of, write_files

CORE = f"{kernels.CORE}/more.cpp"
OWN = {
    "csrc/flash_attn/src/fork_rows.h": "#pragma once\nstruct Rows {};\n",
    "csrc/flash_attn/core/more.h": "#pragma once\nstruct More {};\n",
    CORE: '#include "more.h"\n#include "flash.h"\n#include "fork_rows.h"\nRows rows;\nMore more;\n',
}
# Upstream's header includes two of ours: the tree's copies, where nothing takes their place.
UPSTREAM = BASE | {
    "csrc/flash_attn/src/flash.h": '#pragma once\n#include "fork_rows.h"\n#include "../core/more.h"\n'
}


@pytest.fixture
def place(make_series: Make, tmp_path: Path) -> Path:
    make_series(("Change line 20", {"setup.py": EDITED_SETUP}), base=UPSTREAM)
    write_files(tmp_path / "fork", OWN)
    return tmp_path


def written(place: Path) -> tuple[tree.Tree, dict[str, dict[str, Any]]]:
    """A tree with the file beside it, and the commands by the file that each is of."""
    series = model.read(place / "patches", place / "fork")
    applied = tree.apply(series, PIN, checkout_of(UPSTREAM), place / "build/source")
    path = editors.write(matrix.load(layout.MATRIX), series, applied)
    assert path == place / "build/compile_commands.json"
    listed = json.loads(path.read_text(encoding="utf-8"))
    assert len({entry["file"] for entry in listed}) == len(listed)
    return applied, {Path(entry["file"]).relative_to(place).as_posix(): entry for entry in listed}


def test_kernel_files_have_the_flags_that_they_are_compiled_with(place: Path) -> None:
    target = matrix.load(layout.MATRIX).default()
    _, listed = written(place)
    for kernel in target.kernels:
        words = listed[f"build/source/csrc/flash_attn/src/{kernel.source}"]["arguments"]
        defined = [word for word in flags.NVCC_FLAGS if word.startswith(("-U", "-std"))]
        assert {*defined, flags.for_gpus(target.architectures)} <= {*words}
        assert words[1:3] == ["-x", "cuda"]
        strange = ("--expt", "-gencode", "--compress", "-Xc", "--frandom", "$", "-ccbin", "--use_fast")
        assert not [word for word in words if word.startswith(strange)], "clang takes no word of nvcc's own"


@pytest.mark.parametrize("folder", ["fork", "build/source"])
def test_a_file_of_ours_compiles_where_it_lies(place: Path, folder: str) -> None:
    _, listed = written(place)
    words = listed[f"{folder}/{CORE}"]["arguments"]
    command = ["g++", "-fsyntax-only", *(word for word in words[1:] if word != "-c")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for header in (name for name in OWN if name.endswith(".h")):
        assert f"{folder}/{header}" in listed


def test_links_follow_our_files(place: Path) -> None:
    written(place)
    header = "csrc/flash_attn/src/fork_rows.h"
    link = place / "build/editors" / header
    assert link.readlink() == place / "fork" / header
    (place / "fork" / header).rename(place / "fork/csrc/flash_attn/src/fork_other.h")
    _, listed = written(place)
    assert not link.is_symlink()
    assert link.with_name("fork_other.h").is_file()
    assert f"fork/{header}" not in listed


def test_a_file_in_a_link_s_place_is_somebody_s_work(place: Path) -> None:
    """Some editors write a file aside and rename it, to where a definition was found: over the link."""
    written(place)
    header = "csrc/flash_attn/src/fork_rows.h"
    link = place / "build/editors" / header
    link.unlink()
    link.write_text("edited\n")
    with pytest.raises(SeriesError, match=rf"{link} is a file.* {place / 'fork' / header}.*delete it"):
        written(place)
    assert link.read_text() == "edited\n"
    link.unlink()
    written(place)
    assert link.is_symlink()


def test_a_folder_of_links_may_become_a_file(place: Path) -> None:
    inside = "csrc/flash_attn/src/fork_more.h/rows.h"
    write_files(place / "fork", {inside: "#pragma once\n"})
    written(place)
    (place / "fork" / inside).unlink()
    (place / "fork" / inside).parent.rmdir()
    write_files(place / "fork", {"csrc/flash_attn/src/fork_more.h": "#pragma once\n"})
    written(place)
    assert (place / "build/editors/csrc/flash_attn/src/fork_more.h").is_symlink()


def test_the_tree_is_as_it_was(place: Path) -> None:
    applied, _ = written(place)
    assert uncommitted.changes(Repository(applied.root, SeriesError)) == ""
    applied.check_unchanged()
    assert tree.reusable(model.read(place / "patches", place / "fork"), PIN, applied.root) == applied


def test_no_toolchain_is_needed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilers, "_candidates", lambda: iter(()))
    _, listed = written(place)
    words = listed[f"fork/{CORE}"]["arguments"]
    assert not [word for entry in listed.values() for word in entry["arguments"] if "--cuda-path" in word]
    assert not (place / "user-cache").exists()
    assert words[0] == "clang++"


def test_a_tree_without_anything_to_compile_gets_none(place: Path) -> None:
    applied, _ = written(place)
    (place / "build/compile_commands.json").unlink()
    python = replace(applied, sources="")  # as a python upstream's tree is
    series = model.read(place / "patches", place / "fork")
    assert editors.write(matrix.load(layout.MATRIX), series, python) is None
    assert not (place / "build/compile_commands.json").exists()
