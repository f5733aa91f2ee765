"""Rebuilding a wheel from nothing, and telling what differs."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import shutil
import zipfile
from pathlib import Path

import pytest

from scripts import __main__
from scripts.base import layout
from scripts.base.errors import ToolchainError, UpstreamError, WheelError
from scripts.series import clone, tree
from scripts.source import matrix
from scripts.wheels.building import build, jobs
from scripts.wheels.compiling import kernels, ninja
from scripts.wheels.proof import machine_gpus
from scripts.wheels.toolchain import compilers
from tests.unit.conftest import ROOT, Command


def fake_wheel(path: Path, **files: str) -> build.Built:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(zipfile.ZipInfo(name, (2025, 1, 1, 0, 0, 0)), text)
    content = path.read_bytes()
    return build.Built(
        path, len(content), hashlib.sha256(content).hexdigest(), 3.0, ninja.Compiled((), 1, 1.0, 0, 1)
    )


@pytest.mark.parametrize("other", ["same", "different"])
def test_a_wheel_is_built_again_elsewhere_without_a_cache_and_compared(
    other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    places: list[build.Place] = []
    monkeypatch.setattr(layout, "BUILD", tmp_path / "build")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    zone = os.environ.get("TZ")

    def build_one(loaded: object, job: object, options: object, place: build.Place) -> build.Built:
        places.append(place)
        again = len(places) == 2
        assert (os.environ.get("TZ") != zone) == again
        return fake_wheel(place.out / "a.whl", shared="text", extension=other if again else "same")

    monkeypatch.setattr(build, "build_one", build_one)
    arguments = ["build", "--check-reproducible", "--out", str(tmp_path / "dist")]
    if other == "same":
        __main__.main_inner(arguments)
        assert "byte for byte the same" in capsys.readouterr().out
        assert not places[1].build.exists()
    else:
        with pytest.raises(
            WheelError,
            match=r"(?s)is not what a build from nothing gives.*    extension \(pip install diffoscope",
        ):
            __main__.main_inner(arguments)
        assert (places[1].out / "a.whl").exists(), "kept, to look into"
    assert os.environ.get("TZ") == zone
    assert places[0] == build.Place(tmp_path / "build", tmp_path / "dist", cache=True)
    assert places[1].cache is False
    assert places[1].build not in (places[0].build, *places[0].build.parents)


def test_a_difference_is_shown_by_diffoscope_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin/diffoscope"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\necho "$*: a byte"\nexit 1\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    ours, theirs = (fake_wheel(tmp_path / name, text=name).path for name in ("a.whl", "b.whl"))
    told = build._difference(ours, theirs)
    assert told.splitlines()[0] == "    text"
    assert f"--text=- --exclude-command=^zipdetails {ours} {theirs}: a byte" in told


def test_list_and_dry_run_do_nothing_but_tell(command: Command) -> None:
    listed = command("build", "--list")
    assert listed.status == 0
    assert "cu13 (default)" in listed.out
    dry = command("build", "--dry-run", "--kernels", "hdim64,fp16,split", "--arch", "80,90")
    assert re.search(r"cu13\s.*\b2\b.*80, 90", dry.out), dry.out
    assert re.search(r"split\W+64\W+full, causal\W+–", dry.out), dry.out
    assert not re.search(r"\b(fwd|bwd|128)\b", dry.out), "a kernel that was not chosen"


@pytest.mark.parametrize(
    ("names", "options", "told"),
    [
        (
            {"8.9": "RTX 4090"},
            (),
            r"RTX 4090 \(compute capability 8\.9\) runs nothing for 9\.0; --arch 89 is",
        ),
        ({"12.0": "RTX 5090"}, ("--target", "cu12"), r"runs nothing for 9\.0; CUDA 12\.4 has nothing for it"),
        ({"[N/A]": "a GPU"}, (), r"a GPU \(compute capability \[N/A\]\) runs nothing"),
        ({"8.9": "RTX 4090", "9.0": "H200"}, (), ""),
        ({"8.9": "RTX 4090"}, ("--arch", "90"), ""),
        ({"8.9": "RTX 4090"}, ("--target", "cu13*"), ""),  # one of them is for it
        ({}, (), ""),
    ],
)
def test_a_plan_tells_a_machine_whose_gpus_run_none_of_it(
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    names: dict[str, str],
    options: tuple[str, ...],
    told: str,
) -> None:
    there = tuple(machine_gpus.Gpu("GPU-1", name, capability, "580.1") for capability, name in names.items())
    monkeypatch.setattr(machine_gpus, "found", lambda: there)
    dry = command("build", "--dry-run", *options)
    assert dry.status == 0
    assert re.search(told, dry.err) if told else "runs nothing" not in dry.err


def test_several_builds_are_planned_first_and_share_their_kernels(command: Command) -> None:
    """For an architecture that nobody builds for, so that no object of it is there."""
    dry = command(
        "build",
        "--dry-run",
        "--target",
        "cu13*",
        "--kernels",
        "hdim64,fp16,fwd",
        "--arch",
        "121",
    )
    rows = [line for line in dry.out.splitlines() if re.search(r"^\W*cu13", line)]
    assert len(rows) == 2, dry.out
    assert re.search(r"2\W+0\W+2 and the binding\W+121\W+3m16s", rows[0])
    assert all(re.search(r"2\W+2\W+the binding\W+121\W+40s", row) for row in rows[1:])


def test_the_plan_counts_the_objects_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = matrix.load(layout.MATRIX)
    target = loaded.default()
    job = jobs.Job(target, target.kernels, ("90",))
    applied = tree.Tree(tmp_path, "b" * 40, "c" * 40, "d" * 64, "e" * 40, "f" * 64)
    tools = compilers.Toolchain(
        compilers.Toolkit(tmp_path, "13.0", "V13.0.88", (), "a test"),
        tmp_path,
        "g++ 12",
        tmp_path,
        None,
        None,
    )
    monkeypatch.setattr(layout, "BUILD", tmp_path)
    monkeypatch.setattr(clone, "standing", lambda loaded: applied)
    monkeypatch.setattr(compilers, "present", lambda target, folder: tools)
    assert build.made(loaded, job) == set()
    for unit in kernels.kernel_units(kernels.Plan(applied, tools, target.kernels[:3], ("90",), tmp_path)):
        unit.target.parent.mkdir(parents=True, exist_ok=True)
        unit.target.touch()
    assert build.made(loaded, job) == set(target.kernels[:3])
    assert build.made(loaded, dataclasses.replace(job, architectures=("80",))) == set()
    monkeypatch.setattr(compilers, "present", lambda target, folder: None)
    assert build.made(loaded, job) == set()


def test_a_failed_build_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def build_one(loaded: object, job: jobs.Job, options: object, place: object) -> build.Built:
        if job.target.name == "cu12":
            raise ToolchainError("no compiler for this one.")
        return build.Built(
            Path(f"{job.target.name}.whl"), 5_000_000, "f" * 64, 3.0, ninja.Compiled((), 4, 2.0, 3, 1)
        )

    monkeypatch.setattr(build, "build_one", build_one)
    with pytest.raises(SystemExit) as caught:
        __main__.main_inner(["build", "--all"])
    assert caught.value.code == ToolchainError.exit_code
    output = capsys.readouterr().out
    assert "cu13.whl" in output
    assert "failed: no compiler for this one." in output
    assert "cu13-full.whl" in output
    assert "4, 75 %" in output


def test_a_dry_run_from_git_fails_as_the_build_would(command: Command) -> None:
    if (ROOT / "upstream/.git").exists():
        pytest.skip("the submodule is initialised here")
    done = command("build", "--dry-run", "--source", "git")
    assert done.status == UpstreamError.exit_code
    assert "--source git: the submodule upstream is not initialised" in done.err
