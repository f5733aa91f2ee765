from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from scripts import __main__
from scripts.base import files, layout
from scripts.base.errors import NotVerified, ToolchainError, UsageError, WheelError
from scripts.commands import rebase
from scripts.commands.table import COMMANDS
from scripts.series import clone, tree
from scripts.source import matrix, upstream
from scripts.wheels import build, choice, compiling, kernels, toolchain, torch_environment, verify

ROOT = Path(__file__).resolve().parents[2]
NAME = "flash_attn-2.8.3.post1+det.1.cu130.torch2.11-cp312-cp312-linux_x86_64.whl"


def scripts(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "scripts", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


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


@pytest.mark.parametrize("command", [[], *([command.name] for command in COMMANDS)])
def test_help_explains_each_command(command: list[str]) -> None:
    done = scripts(*command, "--help")
    assert done.returncode == 0
    assert f"usage: nox -s {' '.join([*command, '--' if command else '[-h]'])} " in done.stdout


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["build", "--target", "cu999"], "no target 'cu999'; it has cu130-torch2.11"),
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
        (["build", "--kernels-only", "--check-reproducible"], "--kernels-only makes no wheel"),
        (["emulate", "--kernels", "hdim65"], "'hdim65' names no kernels; choose 'all', or some of hdim32"),
        (["emulate", "--jobs", "0"], "'0' is not a positive number"),
        (["emulate", "--arch", "70"], "invalid choice: '70' (choose from"),
        (["emulate", "--python", "3.9"], "has no Python 3.9; it has 3.10"),
        (["archs"], "[shared-ptx] of wheel_matrix.toml is empty"),
        (["archs", "--arch", "80"], "80: no later than the PTX that they would be made from"),
        (["apply", "--source", "svn"], "'svn' is none of git, sdist, auto"),
        (["rebase"], "say one of: VERSION"),
        (["rebase", "--continue"], "no rebase is under way"),
        (["rebase", "--abort"], "no rebase is under way"),
        (["rebase", "2.8.2", "--abort"], "say one of"),
        (["rebase", "--abort", "--reason", "x"], "--reason belongs to --skip"),
        (["each"], "--run"),
        (["each", "--run", " "], "is empty"),
        (["forecast", "--markdown", "--json"], "choose one"),
        (["build", "--jobs", "0"], "'0' is not a positive number"),
        (["build", "--python", "2.7"], "'2.7': choose from 3.10, 3.11, 3.12, 3.13, 3.14, or 'all'"),
        (
            ["build", "--target", "cu124-torch2.6", "--arch", "90,120"],
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
        (["bench", "build", "--kernels", "hdim65"], "'hdim65' names no kernels"),
        (["bench", "build", "--python", "3.9"], "has no Python 3.9"),
        (["compare", "--arch", "70"], "invalid choice: '70'"),
        (
            ["compare", "--patch", "0003", "--through", "0002"],
            "--through 0002: that patch comes before 0003-",
        ),
        (["build", "--targets", "x"], "usage: nox -s build -- [-h]"),
        (["build", "--targets", "x"], "unrecognized arguments: --targets x"),
        (["bild"], "invalid choice: 'bild'"),
    ],
)
def test_bad_arguments_end_with_status_2_and_say_what_is_allowed(arguments: list[str], expected: str) -> None:
    done = scripts(*arguments)
    assert done.returncode == 2
    assert expected in done.stderr
    assert "Traceback" not in done.stderr


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


def test_list_and_dry_run_do_nothing_but_tell() -> None:
    listed = scripts("build", "--list")
    assert listed.returncode == 0
    assert "cu130-torch2.11 (default)" in listed.stdout
    dry = scripts(
        "build", "--dry-run", "--kernels", "hdim64,fp16,split", "--arch", "80,90", "--python", "3.12"
    )
    assert re.search(r"cu130-torch2\.11\s.*3\.12.*\b2\b.*80, 90", dry.stdout), dry.stdout
    assert "flash_fwd_split_hdim64_fp16_causal_sm80.cu" in dry.stdout


def test_several_builds_are_planned_first_and_share_their_kernels() -> None:
    """For an architecture that nobody builds for, so that no object of it is there."""
    dry = scripts(
        "build",
        "--dry-run",
        "--target",
        "cu130-torch2.11*",
        "--python",
        "3.11,3.12",
        "--kernels",
        "hdim64,fp16,fwd",
        "--arch",
        "121",
    )
    rows = [line for line in dry.stdout.splitlines() if "cu130-torch2.11" in line]
    assert len(rows) == 4, dry.stdout
    assert re.search(r"2\W+0\W+2 and the binding\W+121\W+3m16s", rows[0])
    assert all(re.search(r"2\W+2\W+the binding\W+121\W+40s", row) for row in rows[1:])


def test_the_plan_counts_the_objects_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = matrix.load(layout.MATRIX)
    target = loaded.default()
    job = choice.Job(target, "3.12", target.kernels, ("90",))
    applied = tree.Tree(tmp_path, "b" * 40, "c" * 40, "d" * 64, "e" * 40, "f" * 64)
    tools = toolchain.Toolchain(
        toolchain.Toolkit(tmp_path, "13.0", "V13.0.88", (), "a test"),
        tmp_path,
        "g++ 12",
        tmp_path,
        None,
        None,
    )
    monkeypatch.setattr(layout, "BUILD", tmp_path)
    monkeypatch.setattr(clone, "standing", lambda loaded: applied)
    monkeypatch.setattr(toolchain, "present", lambda target, folder: tools)
    assert build.made(loaded, job) == set()
    for unit in kernels.kernel_units(kernels.Plan(applied, tools, target.kernels[:3], ("90",), tmp_path)):
        unit.target.parent.mkdir(parents=True, exist_ok=True)
        unit.target.touch()
    assert build.made(loaded, job) == set(target.kernels[:3])
    assert build.made(loaded, dataclasses.replace(job, architectures=("80",))) == set()
    monkeypatch.setattr(toolchain, "present", lambda target, folder: None)
    assert build.made(loaded, job) == set()


def test_a_failed_build_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def build_one(loaded: object, job: choice.Job, options: object, place: object) -> build.Built:
        if job.python == "3.11":
            raise ToolchainError("no compiler for this one.")
        return build.Built(
            Path(f"{job.python}.whl"), 5_000_000, "f" * 64, 3.0, compiling.Compiled((), 4, 2.0, 3, 1)
        )

    monkeypatch.setattr(build, "build_one", build_one)
    with pytest.raises(SystemExit) as caught:
        __main__.main_inner(["build", "--python", "3.10,3.11,3.12"])
    assert caught.value.code == ToolchainError.exit_code
    output = capsys.readouterr().out
    assert "3.10.whl" in output
    assert "failed: no compiler for this one." in output
    assert "3.12.whl" in output
    assert "4, 75 %" in output


def test_a_file_that_is_no_wheel_of_ours_is_refused(tmp_path: Path) -> None:
    foreign = tmp_path / "numpy-2.0-cp312-cp312-linux_x86_64.whl"
    foreign.touch()
    with pytest.raises(UsageError, match="no wheel of this project"):
        verify.facts_of(foreign)
    cut = tmp_path / NAME
    cut.write_bytes(b"PK")
    with pytest.raises(WheelError, match="cut off"):
        verify.facts_of(cut)
    with zipfile.ZipFile(cut, "w") as archive:
        archive.writestr("flash_attn/__init__.py", "")
    with pytest.raises(WheelError, match=r"_fork\.json"):
        verify.facts_of(cut)
    for broken in ("{}", "[]", "not json", '{"torch": null', '{"format": 1, "torch": "2.11.0"}'):
        with zipfile.ZipFile(cut, "w") as archive:
            archive.writestr("flash_attn/_fork.json", broken)
        with pytest.raises(WheelError, match=r"_fork\.json is damaged: .*; build the wheel again"):
            verify.facts_of(cut)


@pytest.mark.parametrize(("version", "taken"), [("2.13.0", "2.13.0+cu130"), ("2.13.0+cu130", "2.13.0+cu130")])
def test_pip_is_asked_for_no_torch_for_the_cpu(version: str, taken: str) -> None:
    """Which counts as newer than "2.13.0", and lies in some machines' folders."""
    wanted = Requirement(torch_environment.torch_for_cuda(version)).specifier
    assert list(wanted.filter(["2.13.0+cpu", "2.13.0+cu130", "2.12.0"])) == [taken]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_wheel_that_fails_outweighs_one_that_cannot_be_proved_here(
    monkeypatch: pytest.MonkeyPatch, order: tuple[int, int]
) -> None:
    wheels = [
        ("absent.whl", UsageError("absent.whl does not exist")),
        ("good.whl", NotVerified("good.whl is NOT VERIFIED")),
    ]
    told = dict(wheels)

    def facts_of(path: Path) -> verify.Facts:
        raise told[path.name]

    monkeypatch.setattr(verify, "facts_of", facts_of)
    with pytest.raises(SystemExit) as ended:
        __main__.main_inner(["verify", *(wheels[place][0] for place in order)])
    assert ended.value.code == UsageError.exit_code


def test_a_dry_run_from_git_fails_as_the_build_would(tmp_path: Path) -> None:
    if (ROOT / "upstream/.git").exists():
        pytest.skip("the submodule is initialised here")
    done = scripts("build", "--dry-run", "--source", "git")
    assert done.returncode == 5
    assert "--source git: the submodule upstream is not initialised" in done.stderr


def test_no_git_on_path_is_an_error_in_our_words(tmp_path: Path) -> None:
    env = {**os.environ, "PATH": str(tmp_path)}
    command = [sys.executable, "-m", "scripts", "apply", "--source", "git"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert "git is not installed, or not on PATH" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_error_is_the_document_of_json() -> None:
    done = scripts("rebase", "--continue", "--json")
    assert done.returncode == 2
    assert json.loads(done.stdout)["exit_code"] == 2
    assert "no rebase is under way" in json.loads(done.stdout)["error"]


def test_a_second_run_on_the_series_waits_for_nobody(tmp_path: Path) -> None:
    with (
        files.alone(tmp_path),
        pytest.raises(UsageError, match="another run is working on the series"),
        files.alone(tmp_path),
    ):
        pass
    with files.alone(tmp_path):
        pass


def test_applying_waits_for_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build applies first: two of them side by side are no mistake."""
    applied = tree.Tree(tmp_path, "b" * 40, "c" * 40, "d" * 64, "e" * 40, "f" * 64)
    monkeypatch.setattr(layout, "BUILD", tmp_path / "build")
    monkeypatch.setattr(upstream, "pinned", lambda *_: None)
    monkeypatch.setattr(tree, "apply", lambda *_, **__: applied)
    loaded = matrix.load(layout.MATRIX)
    with ThreadPoolExecutor() as threads:
        with files.alone(tmp_path / "build"):
            second = threads.submit(clone.apply, loaded, upstream.Source.AUTO)
            time.sleep(0.3)
            assert not second.done()
        assert second.result(timeout=10)[1] is applied


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("old")
    with pytest.raises(TypeError):
        files.write(tmp_path / "text", b"bytes")  # type: ignore[arg-type]
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("text", "old")]


def test_a_file_that_cannot_be_written_is_told_by_its_own_name(tmp_path: Path) -> None:
    for path, kind in ((tmp_path, IsADirectoryError), (tmp_path / "none" / "text", FileNotFoundError)):
        with pytest.raises(kind) as caught:
            files.write(path, "text")
        assert caught.value.filename == str(path)
    assert list(tmp_path.iterdir()) == []
    assert not tmp_path.with_name(tmp_path.name + ".part").exists()


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("each --run 'exit 125'", "could not be tested (125) on base, 0001"),
        ("each --run false", "    upstream itself, without any patch (status 1)"),
    ],
)
def test_each_does_not_call_passed_what_was_not(command: str, expected: str) -> None:
    done = scripts(*shlex.split(command))
    assert done.returncode == 6
    assert expected in done.stderr


def test_json_is_one_document_on_stdout_and_the_rest_goes_to_stderr() -> None:
    done = scripts("lint", "--json")
    assert json.loads(done.stdout) == []
    assert "well-formed" in done.stderr


def test_an_empty_dist_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nox -s build"):
        verify.wheels_in(tmp_path)


def test_toolkits_of_another_release_or_without_headers_are_passed_over_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, release, headers in [("old", "12.4", True), ("bare", "13.0", False), ("good", "13.0", True)]:
        nvcc = tmp_path / name / "bin/nvcc"
        nvcc.parent.mkdir(parents=True)
        nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.99'\n")
        nvcc.chmod(0o755)
        if headers:
            (tmp_path / name / "include/cuda/std").mkdir(parents=True)
            (tmp_path / name / "include/cuda_runtime.h").touch()
    monkeypatch.setattr(
        toolchain, "_candidates", lambda: iter([(tmp_path / name, name) for name in ("old", "bare", "good")])
    )
    found, passed = toolchain.installed_toolkit("13.0")
    assert found is not None
    assert found.nvcc == tmp_path / "good/bin/nvcc"
    assert found.version == "V13.0.99"
    assert "is CUDA 12.4" in passed[0]
    assert "lacks cuda_runtime.h" in passed[1]


def test_a_cuda_that_neither_the_machine_nor_an_index_has_is_an_error_before_anything_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = matrix.load(ROOT / "wheel_matrix.toml").named("cu128-torch2.10")
    monkeypatch.setattr(toolchain, "_candidates", lambda: iter([]))
    with pytest.raises(
        ToolchainError,
        match=r"cu128-torch2\.10 needs CUDA 12\.8, whose compiler no index has \(the machine has none\).*--containers",
    ):
        toolchain.assemble(
            target, f"{sys.version_info.major}.{sys.version_info.minor}", tmp_path, cache=False
        )
    assert not [*tmp_path.iterdir()]
    assert toolchain.out_of_reach(target)
    assert toolchain.present(target, tmp_path) is None


@pytest.mark.parametrize(("release", "folders"), [("13.0", ["cu13"]), ("12.4", ["cublas", "cuda_runtime"])])
def test_cuda_s_libraries_lie_in_one_folder_or_before_13_in_many(
    tmp_path: Path, release: str, folders: list[str]
) -> None:
    for name in folders:
        (tmp_path / "nvidia" / name / "include").mkdir(parents=True)
    env = torch_environment.Environment(
        Path(sys.executable), tmp_path, "cp312", tmp_path, "2.6.0", release, cxx11_abi=False
    )
    assert [path.relative_to(tmp_path / "nvidia").as_posix() for path in env.cuda] == folders


def test_missing_python_headers_are_an_error_that_names_the_package(tmp_path: Path) -> None:
    env = torch_environment.Environment(
        Path(sys.executable), tmp_path, "cp312", tmp_path, "2.11.0", "13.0", cxx11_abi=True
    )
    with pytest.raises(ToolchainError, match=r"no Python\.h .*python3\.12-dev"):
        torch_environment.check_headers(env)
    (tmp_path / "Python.h").touch()
    torch_environment.check_headers(env)


def test_a_missing_compiler_and_a_missing_python_are_errors_that_say_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CXX", "absent-compiler")
    with pytest.raises(ToolchainError, match="absent-compiler is not on PATH"):
        toolchain.host_compiler()
    with pytest.raises(ToolchainError, match=r"no python3\.99"):
        toolchain.find_python("3.99")
