from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import __main__
from scripts.base import layout
from scripts.base.errors import NotVerified, UsageError
from scripts.commands import rebase, table
from scripts.commands.parser import parse
from scripts.commands.table import COMMANDS
from scripts.source import matrix
from tests.unit.conftest import ROOT, Command


def test_a_shell_gets_the_status_and_both_streams() -> None:
    """As nox calls it. The other cases run in this process."""
    line = [sys.executable, "-m", "scripts", "rebase", "--continue", "--json"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == UsageError.exit_code
    assert json.loads(done.stdout)["exit_code"] == done.returncode
    assert done.stderr.startswith("✗ no rebase is under way")


def test_a_reader_who_has_had_enough_gets_no_stack() -> None:
    command = [sys.executable, "-m", "scripts", "lint", "--json"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 128 + signal.SIGPIPE


@pytest.mark.parametrize("words", [[], *([entry.name] for entry in COMMANDS)])
def test_help_explains_each_command(command: Command, words: list[str]) -> None:
    done = command(*words, "--help")
    assert done.status == 0
    assert f"usage: nox -s {' '.join([*words, '--' if words else '[-h]'])} " in done.out


@pytest.mark.parametrize("entry", COMMANDS, ids=lambda entry: entry.name)
def test_each_command_runs_what_its_own_module_has(entry: table.Command) -> None:
    needed = {"each": ["--run", "true"], "bisect": ["--run", "true"], "audit": ["a.whl"]}
    run = parse([entry.name, *needed.get(entry.name, [])]).run
    assert run.__module__ == entry.module_name
    if entry.module:  # two commands of one module
        assert entry.name in run.__name__


def test_matrix_lists_the_targets(command: Command) -> None:
    listed = command("matrix")
    assert listed.status == 0
    assert all(target.name in listed.out for target in matrix.load(layout.MATRIX).targets)


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (UsageError("no such thing."), 2, "✗ no such thing.\n"),
        (NotVerified("no GPU."), 3, "✗ no GPU.\n"),
        (
            OSError(errno.ENOSPC, "No space left on device", "dist/a.whl"),
            1,
            "✗ dist/a.whl: No space left on device.\n",
        ),
        (KeyboardInterrupt(), 130, "✗ interrupted; nothing was changed.\n"),
    ],
)
def test_what_goes_wrong_is_one_line_and_a_status(
    command: Command, monkeypatch: pytest.MonkeyPatch, error: BaseException, status: int, said: str
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(matrix, "load", fail)
    done = command("matrix")
    assert (done.status, done.out, done.err) == (status, "", said)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["build", "--target", "cu999"], "no target 'cu999'; it has cu13"),
        (["build", "--kernels", "hdim65"], "'hdim65' names no kernels; choose 'all', or some of hdim32"),
        (["build", "--arch", "70"], "'70': choose from 80"),
        (["build", "--arch", "90,"], "'': choose from 80"),
        (["build", "--kernels", "hdim64,,fwd"], "'hdim64,,fwd' has an empty word"),
        (["build", "--kernels", "all,hdim64"], "'all' stands alone"),
        (["build", "--kernels", "hdim64", "--kernels", "fwd"], "--kernels is given twice"),
        (["build", "--target", ""], "no target ''"),
        (["build", "--out", __file__], "is a file, not a folder"),
        (["build", "--stock", "--all"], "--stock makes one file"),
        (["build", "--containers", "--stock"], "--containers makes wheels from the sdist"),
        (["build", "--image", "x"], "--image is for --containers"),
        (["build", "--cpp", "--stock"], "--cpp makes an archive, no wheel; leave out --stock."),
        (
            ["build", "--cpp", "--sign", "--kernels-only"],
            "--cpp makes an archive, no wheel; leave out --kernels-only and --sign.",
        ),
        (["build", "--cpp", "--base-version", "2.8.3"], "leave out --base-version."),
        (["build", "--cpp", "--containers"], "leave out --containers."),
        (["build", "--kernels-only", "--check-reproducible"], "--kernels-only makes no wheel"),
        (["emulate", "--kernels", "hdim65"], "'hdim65' names no kernels; choose 'all', or some of hdim32"),
        (["emulate", "--jobs", "0"], "'0' is not a positive number"),
        (["emulate", "--arch", "70"], "invalid choice: '70' (choose from"),
        (["emulate", "--python", "3.9"], "'3.9': choose from 3.10, 3.11"),
        (["emulate", "--cpp", "--pytest=-x"], "--cpp runs neither Python nor pytest"),
        (["emulate", "--client", "tgi"], "invalid choice: 'tgi' (choose from"),
        (["emulate", "--cpp", "--client", "sglang"], "--cpp runs neither Python nor pytest"),
        (["archs"], "[shared-ptx] of wheel_matrix.toml is empty"),
        (["archs", "--arch", "80"], "80: no later than the PTX that they would be made from"),
        (["apply", "--source", "svn"], "'svn' is none of git, sdist, auto"),
        (["rebase", "--use-remembered"], "no rebase is under way"),
        (["rebase", "--continue"], "no rebase is under way"),
        (["rebase", "--abort"], "no rebase is under way"),
        (["rebase", "2.8.2", "--abort"], "say one of"),
        (["rebase", "--abort", "--reason", "x"], "--reason belongs to --skip"),
        (["edit", "1", "--abort"], "say one of: PATCH, --abort"),
        (["refresh", "--skip", "--use-remembered"], "say one of: --skip, --use-remembered"),
        (["each"], "--run"),
        (["each", "--run", " "], "is empty"),
        (["forecast", "--markdown", "--json"], "choose one"),
        (["build", "--jobs", "0"], "'0' is not a positive number"),
        (["build", "--stock", "--python", "2.7"], "'2.7': choose from 3.10, 3.11, 3.12, 3.13, 3.14"),
        (["build", "--python", "3.12"], "--python is for --stock: a wheel serves every Python"),
        (
            ["build", "--target", "cu12", "--arch", "90,120"],
            "--arch: nvcc 12.4 knows no compute capability 120 (CUDA 12.8 and later)",
        ),
        (["build", "--target", "nothing-*"], "no target 'nothing-*'; it has"),
        (["build", "--source", "svn"], "'svn' is none of git, sdist, auto"),
        (["build", "--target", "x", "--all"], "not allowed with"),
        (["verify", "absent.whl"], "absent.whl does not exist"),
        (["bench", "wheel"], "invalid choice: 'wheel'"),
        (
            ["bench", "--picture", "absent/time.svg"],
            "'absent/time.svg' is no name for a picture in a folder that exists",
        ),
        (["bench", "--from", "absent.json"], "absent.json: No such file or directory"),
        (["bench", "build", "--from", "absent.json"], "--from and --picture are for bench -- kernels"),
        (["bench", "fa4"], "bench -- fa4 takes figures: on a machine with a GPU and both wheels, run "),
        (["bench", "build", "--kernels", "hdim65"], "'hdim65' names no kernels"),
        (["bench", "build", "--python", "3.9"], "'3.9': choose from 3.10"),
        (["export", "--branch", "b", "--check"], "--branch writes nothing to patches/; leave --check out"),
        (["export", "--patch", "2"], "--patch and --force are for --branch"),
        (["compare", "--arch", "70"], "invalid choice: '70'"),
        (
            ["compare", "--patch", "3", "--through", "2"],
            "--through 2: that patch comes before Stay-inside-tensors",
        ),
        (["compare", "--wheels", "a.whl"], "expected 2 arguments"),
        (["compare", "--wheels", "a.whl", "b.whl"], "a.whl does not exist"),
        (
            ["compare", "--wheels", "a.whl", "b.whl", "--arch", "90"],
            "--arch is for patches: --wheels compares",
        ),
        (["compare", "--ignore-names"], "--ignore-names and --ignore-offsets are for --wheels"),
        (["build", "--targets", "x"], "usage: nox -s build -- [-h]"),
        (["build", "--targets", "x"], "unrecognized arguments: --targets x"),
        (["bild"], "invalid choice: 'bild'"),
    ],
)
def test_bad_arguments_end_with_status_2_and_say_what_is_allowed(
    command: Command, arguments: list[str], expected: str
) -> None:
    done = command(*arguments)
    assert done.status == 2
    assert expected in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("begun", "expected"),
    [(False, "nothing was changed, and no rebase is under way"), (True, "--continue goes on")],
)
def test_an_interrupted_rebase_tells_whether_one_is_under_way(
    begun: bool, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "BUILD", tmp_path)

    def interrupted(*_: object) -> None:
        if begun:
            (tmp_path / "rebase").mkdir()
            (tmp_path / "rebase/state.json").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(rebase, "_run_rebase", interrupted)
    with pytest.raises(KeyboardInterrupt, match=expected):
        __main__.main_inner(["rebase", "2.8.2"])


def test_patches_are_not_exported_into_a_rebase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "BUILD", tmp_path)
    (tmp_path / "rebase").mkdir()
    (tmp_path / "rebase/state.json").touch()
    with pytest.raises(UsageError, match="a rebase is under way and will write patches/ itself"):
        __main__.main_inner(["export"])


def test_no_git_on_path_is_an_error_in_our_words(tmp_path: Path) -> None:
    env = {**os.environ, "PATH": str(tmp_path)}
    command = [sys.executable, "-m", "scripts", "apply", "--source", "git"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert "git is not installed, or not on PATH" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_error_is_the_document_of_json(command: Command) -> None:
    done = command("rebase", "--continue", "--json")
    assert done.status == 2
    assert json.loads(done.out)["exit_code"] == 2
    assert "no rebase is under way" in json.loads(done.out)["error"]


def test_json_is_one_document_on_stdout_and_the_rest_goes_to_stderr(command: Command) -> None:
    done = command("lint", "--json")
    assert json.loads(done.out) == []
    assert "well-formed" in done.err
