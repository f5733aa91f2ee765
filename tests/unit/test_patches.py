"""The table of patches; and of one file, what it is for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from scripts.base.errors import SeriesError
from scripts.base.git import Repository
from scripts.commands import patches
from scripts.series import affected_kernels, model
from scripts.source import kernel_set
from tests.unit.conftest import BASE, Command, Make, stand_on, write_files

SRC = "csrc/flash_attn/src"
KERNEL = kernel_set.ALL_KERNELS[0]
FILES = BASE | {f"{SRC}/{KERNEL.source}": '#include "launch.h"\n', f"{SRC}/launch.h": "int a;\n"}
OWN = {
    f"{SRC}/fork_walk.h": '#include "fork_fold.h"\n',
    f"{SRC}/fork_fold.h": '#include "fork_sum.h"\n',
    f"{SRC}/fork_sum.h": "#pragma once\n",
    "csrc/flash_attn/api/fork_s.h": "#pragma once\n",
    "csrc/flash_attn/core/fork_s.h": "#pragma once\n",
    "csrc/flash_attn/api/fork_s.cpp": '#include "fork_s.h"\n#include "core/fork_c.h"\n',
    "csrc/flash_attn/core/fork_c.h": '#include "fork_s.h"\n#include "fork_walk.h"\n',
    "flash_attn/fork_front.py": "from . import (\n    fork_way,\n)\n",
    "flash_attn/fork_way.py": "import torch\n",
    "flash_attn/fork_walk.py": "import torch\n",  # which a header has the name of
    "flash_attn/serving.py": "import torch  # fork_way is not imported\n",
}
TABLE = f"""[walk]
title = "Chunks are walked"
files = ["{SRC}/*"]
tests = ["tests/emulator"]
[front]
title = "The front"
files = ["flash_attn/*"]
"""
CALL = ("Call the walk", {f"{SRC}/launch.h": 'int a;\n#include "fork_walk.h"\n'})
FRONT = (
    "Ask the front",
    {"flash_attn/__init__.py": BASE["flash_attn/__init__.py"] + "from . import fork_front\n"},
)


def test_eighty_columns_cut_no_name(make_series: Callable[..., Path]) -> None:
    name = "csrc/flash_attn/src/flash_bwd_launch_template_of_a_long_name.h"
    series = model.read(make_series(("Add a header", {name: "int a;\n"})))
    console = Console(width=80, record=True)
    console.print(patches._table(series, {1: []}))
    text = console.export_text()
    folded = "".join(line.split("│")[2].strip() for line in text.splitlines() if line.count("│") == 5)
    assert folded == "src/flash_bwd_launch_template_of_a_long_name.h (new)"
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.fixture
def repository(make_series: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One like this, with its series applied, on which commands work."""
    root = tmp_path / "repository"
    write_files(root, {"fork/flash-attn.toml": TABLE, "tests/emulator/test_it.py": ""})
    make_series(CALL, FRONT, base=FILES, folder=root, to="patches/flash-attn")
    stand_on(root, FILES, OWN, monkeypatch)
    return root


def asked(command: Command, file: str, *more: str) -> dict[str, object]:
    done = command("patches", "--json", *more, "--", file)
    assert done.status == 0, done.err
    facts: dict[str, object] = json.loads(done.out)
    return facts


@pytest.mark.parametrize(
    ("file", "through"),
    [("fork_walk.h", ""), ("fork_fold.h", f"{SRC}/fork_walk.h"), ("fork_sum.h", f"{SRC}/fork_walk.h")],
)
@pytest.mark.parametrize("folder", ["fork/flash-attn/", "", "build/source/", "./fork/../"])
def test_a_header_of_ours_has_the_patch_that_includes_it_or_what_includes_it(
    repository: Path, command: Command, file: str, through: str, folder: str
) -> None:
    assert asked(command, f"{folder}{SRC}/{file}") == {
        "path": f"{SRC}/{file}",
        "upstream": "flash-attn",
        "ours": True,
        "features": ["walk"],
        "patches": [{"patch": "Call-the-walk.patch", "through": through}],
        "kernels": [KERNEL.name],
        "kernel_words": ",".join(kernel_set.spell_kernels((KERNEL,))),
        "tests": ["tests/emulator"],
    }


@pytest.mark.parametrize(
    ("file", "hooks"),
    [
        ("fork_front.py", [{"patch": "Ask-the-front.patch", "through": ""}]),
        ("fork_way.py", [{"patch": "Ask-the-front.patch", "through": "flash_attn/fork_front.py"}]),
        ("serving.py", []),
        ("fork_walk.py", []),
    ],
)
def test_a_module_of_ours_has_the_patch_that_imports_it(
    repository: Path, command: Command, file: str, hooks: list[dict[str, str]]
) -> None:
    told = asked(command, str(repository / "fork/flash-attn/flash_attn" / file))
    assert (told["features"], told["patches"], told["kernels"]) == (["front"], hooks, [])


def test_of_headers_of_one_name_the_one_beside_the_file_is_meant(repository: Path) -> None:
    tree = Repository(repository / "build/source", SeriesError)
    graph = affected_kernels.includes(tree, "HEAD")
    core = "csrc/flash_attn/core"
    assert graph["csrc/flash_attn/api/fork_s.cpp"] == {"csrc/flash_attn/api/fork_s.h", f"{core}/fork_c.h"}
    assert graph[f"{core}/fork_c.h"] == {f"{core}/fork_s.h", f"{SRC}/fork_walk.h"}


def test_a_file_of_upstream_s_has_the_patches_that_touch_it(repository: Path, command: Command) -> None:
    told = asked(command, "launch.h")
    assert (told["ours"], told["features"]) == (False, ["build"])
    assert told["patches"] == [{"patch": "Call-the-walk.patch", "through": ""}]
    assert told["kernels"] == [KERNEL.name]
    assert asked(command, "setup.py")["patches"] == []
    shown = command("patches", f"{SRC}/launch.h")
    assert re.search(r"patches that touch it +│ 1 Call the walk", shown.out)


def test_a_patch_is_still_named_by_place_words_or_file(repository: Path, command: Command) -> None:
    for name in ("1", "the walk", "patches/flash-attn/Call-the-walk.patch"):
        told = asked(command, name)
        assert told["patch"] == "Call-the-walk.patch"
        assert told["own"] == [f"{SRC}/fork_walk.h"], "those that its lines name"
    assert asked(command, "2")["own"] == ["flash_attn/fork_front.py"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["fork/flash-attn/flash_attn/gone.py"], "is no file of fork/, none of flash-attn's tree"),
        (["csrc/gone.h"], "is no file of fork/, none of flash-attn's tree"),
        (["gone.h"], "names no patch of the series"),
        (["fork_wlak.h"], "Files of ours with such a name: fork_walk.h"),
        (
            ["fork_s.h"],
            "fork_s.h is csrc/flash_attn/api/fork_s.h, csrc/flash_attn/core/fork_s.h in the tree;",
        ),
        (
            ["--upstream", "flash-attn-4", f"fork/flash-attn/{SRC}/fork_sum.h"],
            "is flash-attn's, and --upstream says",
        ),
    ],
)
def test_what_is_neither_is_one_error(
    repository: Path, command: Command, words: list[str], said: str
) -> None:
    done = command("patches", *words)
    assert done.status == SeriesError.exit_code
    assert done.err.count(said) == 1
    assert "Traceback" not in done.err
