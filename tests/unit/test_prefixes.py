from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest

from scripts import __main__
from scripts.base import layout
from scripts.base.errors import SeriesError, UsageError
from scripts.series import clone, model, prefixes, tree
from scripts.source import kernel_set
from tests.unit.conftest import BASE, EDITED_SETUP, Command, Make, TreeOf, toolchain

EDITS = [(f"Add part {i}", {f"flash_attn/part_{i}.py": f"part = {i}\n"}) for i in range(1, 6)]
NAMES = ["base", *(f"Add-part-{i}.patch" for i in range(1, 6))]
Applied = tuple[model.Series, tree.Tree]


@pytest.fixture
def applied(make_series: Make, tree_of: TreeOf) -> Applied:
    whole = model.read(make_series(*EDITS))
    return whole, tree_of(whole)


def test_each_runs_after_every_prefix_in_its_tree(applied: Applied, tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = (
        f'echo "$FA2_PATCH $(ls flash_attn | wc -l) $FA2_SOURCE" >> {log}; test ! -e flash_attn/part_3.py'
    )
    runs = prefixes.at(*applied, prefixes.shell(command), tmp_path / "build", range(len(NAMES)))
    assert [r.patch for r in runs] == NAMES
    assert [r.passed for r in runs] == [True] * 3 + [False] * 3
    assert [line.split()[:2] for line in log.read_text().splitlines()] == [
        [name, str(i + 1)] for i, name in enumerate(NAMES)
    ]
    assert {Path(line.split()[2]).name for line in log.read_text().splitlines()} == {"source"}
    assert not list((tmp_path / "build").iterdir())


def test_what_a_run_leaves_does_not_reach_the_next(applied: Applied, tmp_path: Path) -> None:
    check = prefixes.shell("test ! -e left && touch left && echo x >> setup.py")
    runs = prefixes.at(*applied, check, tmp_path / "build", range(len(NAMES)))
    assert all(r.passed for r in runs)


@pytest.mark.parametrize("first", range(1, 6))
def test_bisect_names_the_first_patch_that_fails(applied: Applied, tmp_path: Path, first: int) -> None:
    found, runs = prefixes.bisect(*applied, f"test ! -e flash_attn/part_{first}.py", tmp_path / "build")
    assert found == NAMES[first]
    assert len(runs) <= 5


def test_bisect_steps_over_what_cannot_be_tested(applied: Applied, tmp_path: Path) -> None:
    skip_third = "case $FA2_PATCH in Add-part-3*) exit 125;; esac; "
    found, _ = prefixes.bisect(*applied, f"{skip_third} test ! -e flash_attn/part_2.py", tmp_path / "build")
    assert found == NAMES[2]
    with pytest.raises(UsageError, match=r"one of Add-part-3\.patch, Add-part-4\.patch; .*125"):
        prefixes.bisect(*applied, f"{skip_third} test ! -e flash_attn/part_4.py", tmp_path / "build")


def test_bisect_tells_what_it_cannot_start_from(applied: Applied, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be tested on upstream"):
        prefixes.bisect(*applied, "exit 125", tmp_path / "build")
    with pytest.raises(UsageError, match="did not find the command"):
        prefixes.bisect(*applied, "absent-command", tmp_path / "build")


def test_bisect_of_what_always_passes_or_always_fails(applied: Applied, tmp_path: Path) -> None:
    assert prefixes.bisect(*applied, "true", tmp_path / "build")[0] is None
    with pytest.raises(UsageError, match="fails on upstream without any patch"):
        prefixes.bisect(*applied, "false", tmp_path / "build")


@pytest.fixture
def view(applied: Applied, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands see this series."""
    monkeypatch.setattr(clone, "view", lambda *_: nullcontext(applied))


@pytest.mark.usefixtures("view")
def test_a_bisect_that_finds_the_patch_has_succeeded(capfd: pytest.CaptureFixture[str]) -> None:
    __main__.main_inner(["bisect", "--run", "test ! -e flash_attn/part_3.py"])
    assert f"✓ {NAMES[3]} is the first patch with which it fails." in capfd.readouterr().out


@pytest.mark.usefixtures("view")
def test_each_names_every_failure() -> None:
    with pytest.raises(
        SeriesError, match=r"(?s)fails on 2 of 6:.*Add-part-4.*status 1.*Add-part-5.*status 1"
    ):
        __main__.main_inner(["each", "--run", "test ! -e flash_attn/part_4.py"])


@pytest.mark.usefixtures("view")
def test_each_at_one_place(command: Command) -> None:
    done = command(
        "each",
        "--run",
        "test -e flash_attn/part_3.py && test ! -e flash_attn/part_4.py",
        "--place",
        "3",
        "--json",
    )
    assert done.status == 0, done.err
    assert [run["patch"] for run in json.loads(done.out)] == [NAMES[3]]
    assert f"It passes after {NAMES[3]}." in done.err
    assert command("each", "--run", "false", "--place", "part-5").status == SeriesError.exit_code


def test_a_prefix_that_does_not_compile_is_named(
    make_series: Make, tree_of: TreeOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    """A shell script stands in for the compiler; ninja, keys and logs are real."""
    (kernel,) = kernel_set.parse_kernels("hdim64,fp16,fwd,causal")
    header, source = "csrc/flash_attn/src/flash.h", f"csrc/flash_attn/src/{kernel.source}"
    base = BASE | {header: "#include <torch.h>\n", source: "// good\n"}
    own = '#include "fork_runtime.h"\n'
    edits = [
        ("Change line 20", {"setup.py": EDITED_SETUP}),
        ("Keep torch out", {header: own}),
        ("Break it", {header: f"{own}// broken\n"}),
        ("Mend it", {header: f"{own}// mended\n"}),
    ]
    whole = model.read(make_series(*edits, base=base))
    tree_ = tree_of(whole, base)
    monkeypatch.setattr(layout, "BUILD", tmp_path / "build")
    monkeypatch.setattr(clone, "view", lambda *_: nullcontext((whole, tree_)))
    fail = f'grep -q broken {header} && {{ echo "an error" >&2; exit 1; }}'
    compiler = f'{fail}; echo "$*" | grep -c torch/include >> {tmp_path}/log; touch $last\n'
    tools = toolchain(tmp_path, compiler)
    monkeypatch.setattr("scripts.wheels.toolchain.compilers.assemble", lambda *_, **__: tools)
    options = ("each", "--compile", "--kernels", "hdim64,fp16,fwd,causal")
    done = command(*options)
    assert done.status == SeriesError.exit_code
    assert "an error" in done.err
    assert "it fails on 1 of 4:\n    Break-it.patch (status 1)" in done.err
    compiled = (tmp_path / "log").read_text()
    assert compiled.split() == ["1", "0", "0"], "with torch as long as kernel files include it"
    assert command(*options, "--place", "1").status == 0
    assert (tmp_path / "log").read_text() == compiled, "what was compiled is kept"
    assert not list((tmp_path / "build/tmp").iterdir())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--run", "true", "--kernels", "hdim64"], "--kernels and --jobs are for --compile"),
        (["--run", "true", "--compile"], "not allowed with"),
        (["--compile", "--upstream", "flash-attn-4"], "--compile: of flash-attn-4 nothing is compiled"),
        (["--place", "1"], "one of the arguments --run --compile is required"),
    ],
)
def test_arguments_of_each_that_do_not_go_together(
    command: Command, arguments: list[str], expected: str
) -> None:
    done = command("each", *arguments)
    assert (done.status, expected in done.err) == (2, True), done.err


@pytest.mark.parametrize(
    ("shell", "expected"),
    [
        ("exit 125", "could not be tested (125) on base, Add-part-1"),
        ("false", "    upstream itself, without any patch (status 1)"),
    ],
)
def test_each_does_not_call_passed_what_was_not(
    applied: Applied,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: Command,
    shell: str,
    expected: str,
) -> None:
    monkeypatch.setattr(layout, "BUILD", tmp_path / "build")
    monkeypatch.setattr(clone, "view", lambda loaded, source: nullcontext(applied))
    done = command("each", "--run", shell)
    assert done.status == SeriesError.exit_code
    assert expected in done.err
