from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.base.errors import SeriesError
from scripts.base.git import Repository
from scripts.series import affected_kernels, model, tree
from scripts.source import kernel_set
from tests.unit.conftest import BASE, PIN, ROOT, Make, TreeOf, checkout_of

SRC = "csrc/flash_attn/src"
KERNEL, OTHER = kernel_set.ALL_KERNELS[:2]
FILES = BASE | {
    f"{SRC}/{KERNEL.source}": '#include "launch.h"\n',
    f"{SRC}/{OTHER.source}": "// stands alone\n",
    f"{SRC}/launch.h": "".join(f"int line_{i};\n" for i in range(1, 31)),
    "csrc/flash_attn/flash_api.cpp": "// the binding\n",
}
LAUNCH = FILES[f"{SRC}/launch.h"]
BEFORE = LAUNCH.replace("int line_3;\n", "int line_3;\nint ours;\nint more;\n")
SERIES = (
    ("Add two lines before", {f"{SRC}/launch.h": BEFORE}),
    (
        "Change the twentieth line",
        {f"{SRC}/launch.h": BEFORE.replace("line_20;", "line_20 = 1;"), f"{SRC}/fork.h": "// ours\n"},
    ),
    (
        "Change a line of ours",
        {
            f"{SRC}/launch.h": BEFORE.replace("line_20;", "line_20 = 1;").replace(
                "int ours;\nint more;\n", "int ours;\n"
            )
        },
    ),
    (
        "Add a module",
        {"flash_attn/fork.py": "part = 1\n"},
        "test tests/guards/test_torch_free.py::test_no_kernel_file_reaches_torch",
    ),
)


@pytest.fixture
def reached(make_series: Make, tree_of: TreeOf) -> list[affected_kernels.Reach]:
    whole = model.read(make_series(*SERIES, base=FILES))
    applied = tree_of(whole, FILES)
    repository = Repository(applied.root, SeriesError)
    commits = repository.commits(applied.base, applied.commit)
    return [
        affected_kernels.reach(repository, applied.base, commit, patch, ROOT)
        for commit, patch in zip(commits, whole.patches, strict=True)
    ]


def test_lines_are_those_of_the_release_whatever_patches_before_moved(
    reached: list[affected_kernels.Reach],
) -> None:
    assert [found.upstream for found in reached] == [
        (f"{SRC}/launch.h:3-4",),
        (f"{SRC}/launch.h:19-21",),
        (f"{SRC}/launch.h:4",),
        (),
    ]
    assert [found.own for found in reached] == [(), (f"{SRC}/fork.h",), (), ("flash_attn/fork.py",)]


def test_kernel_files_are_those_that_include_what_changed(reached: list[affected_kernels.Reach]) -> None:
    assert [found.kernels for found in reached] == [(KERNEL,), (KERNEL,), (KERNEL,), ()]
    assert [found.binding for found in reached] == [True] * 4


def test_tests_are_those_of_guards_and_message(
    reached: list[affected_kernels.Reach], make_series: Callable[..., Path], tmp_path: Path
) -> None:
    assert [found.tests for found in reached] == [
        (),
        (),
        (),
        ("tests/guards/test_torch_free.py::test_no_kernel_file_reaches_torch",),
    ]
    folder = tmp_path / "other"
    folder.mkdir()
    patches = make_series(SERIES[0], base=FILES, folder=folder)
    (path,) = patches.glob("*.patch")
    path.write_text(
        path.read_text().replace(
            "nothing else does.",
            "nothing else does.\n\nSee tests/emulator, tests/absent.py and tests/unit/test_affected_kernels.py.",
        )
    )
    whole = model.read(patches)
    applied = tree.apply(whole, PIN, checkout_of(FILES), folder / "source")
    found = affected_kernels.reach(
        Repository(applied.root, SeriesError), applied.base, applied.commit, whole.patches[0], ROOT
    )
    assert found.tests == ("tests/emulator", "tests/unit/test_affected_kernels.py")
