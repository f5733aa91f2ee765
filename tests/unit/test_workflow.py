"""The workflow is YAML, has a job for each target, and is the one in the repository."""

from __future__ import annotations

import dataclasses
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from scripts.base.errors import MatrixError
from scripts.commands import parser
from scripts.source import matrix
from scripts.wheels.releasing import workflow

ROOT = Path(__file__).resolve().parents[2]
MATRIX = matrix.load(ROOT / "wheel_matrix.toml")


def test_every_target_has_a_job() -> None:
    parsed = yaml.safe_load(workflow.render(MATRIX))
    rows = parsed["jobs"]["build"]["strategy"]["matrix"]["include"]
    assert [(r["target"], r["cuda"]) for r in rows] == [(t.name, t.cuda) for t in MATRIX.targets]
    (command,) = [s["run"] for s in parsed["jobs"]["build"]["steps"] if "nox -s build" in s.get("run", "")]
    assert command == 'nox -s build -- --containers --target "$TARGET" --out wheels'


def test_a_stale_workflow_is_an_error_and_writing_mends_it(tmp_path: Path) -> None:
    text = workflow.render(MATRIX)
    with pytest.raises(MatrixError, match="is stale"):
        workflow.check(tmp_path, text)
    assert workflow.write(tmp_path, text)
    assert not workflow.write(tmp_path, text)
    workflow.check(tmp_path, text)
    with pytest.raises(MatrixError, match="nox -s matrix -- --github"):
        workflow.check(tmp_path, text + "\n")


def test_a_target_without_an_image_is_an_error() -> None:
    with pytest.raises(MatrixError, match=r"\[images\] has none for CUDA 13.0 of target cu13"):
        workflow.render(dataclasses.replace(MATRIX, images={}))


def test_a_python_upstream_has_a_job_without_a_container() -> None:
    job = yaml.safe_load(workflow.render(MATRIX))["jobs"]["python"]
    assert job["strategy"]["matrix"]["upstream"] == ["flash-attn-4"]
    (command,) = [s["run"] for s in job["steps"] if "nox -s build" in s.get("run", "")]
    assert '--upstream "$UPSTREAM"' in command
    compiled = dataclasses.replace(MATRIX, upstreams={"flash-attn": MATRIX.upstreams["flash-attn"]})
    jobs = yaml.safe_load(workflow.render(compiled))["jobs"]
    assert list(jobs) == ["build", "draft", "index", "deploy"]
    assert jobs["draft"]["needs"] == ["build"]


@pytest.mark.parametrize("job", ["build", "python"])
def test_a_job_keeps_the_wheels_with_the_statements_of_how_they_were_built(job: str) -> None:
    steps = yaml.safe_load(workflow.render(MATRIX))["jobs"][job]["steps"]
    (kept,) = [s["with"]["path"] for s in steps if "upload-artifact" in s.get("uses", "")]
    assert kept.split() == ["wheels/*.whl", "wheels/*.provenance.json"]


def test_what_is_released_is_checked_signed_and_compiled_without_a_cache() -> None:
    jobs = yaml.safe_load(workflow.render(MATRIX))["jobs"]
    assert jobs["draft"]["needs"] == ["build", "python"]
    (cache,) = [step for step in jobs["build"]["steps"] if "actions/cache@" in step.get("uses", "")]
    assert cache["if"] == "github.ref_type != 'tag'"
    for job, last in (("draft", "gh release create"), ("index", "nox -s index")):
        runs = [step["run"] for step in jobs[job]["steps"] if "run" in step]
        signing = runs.index("nox -s inspect -- --sign wheels/*.whl")
        assert signing < next(place for place, run in enumerate(runs) if run.startswith(last))
        assert jobs[job]["permissions"]["id-token"] == "write"


@pytest.mark.parametrize("program", ["actionlint", "zizmor"])
def test_a_mistake_in_a_workflow_is_found_by_lint(tmp_path: Path, program: str) -> None:
    """A control of ``nox -s lint``: what the two find there, and nothing in ours."""
    before = {
        "actionlint": ("runs-on: ubuntu-24.04", "runs-on: ${{ matrix.none }}"),
        "zizmor": ("3d3c42e5aac5ba805825da76410c181273ba90b1", "v7"),
    }
    noxfile = (ROOT / "noxfile.py").read_text()
    assert f'"{program}"' in noxfile
    options = {
        "actionlint": ["-shellcheck=", "-pyflakes="],
        "zizmor": ["--offline", "--quiet", "--persona=pedantic"],
    }[program]
    path = tmp_path / ".github/workflows/wheels.yml"
    path.parent.mkdir(parents=True)
    found = []
    for change in (("", ""), before[program]):
        path.write_text(workflow.render(MATRIX).replace(*change))
        command = [Path(sys.executable).parent / program, *options, path]
        found.append(subprocess.run(list(map(str, command)), capture_output=True, check=False).returncode)
    assert found[0] == 0
    assert found[1] != 0


def test_every_command_in_a_workflow_is_one_of_ours() -> None:
    jobs = yaml.safe_load(workflow.render(MATRIX))["jobs"].values()
    runs = [step["run"] for job in jobs for step in job["steps"] if step.get("run", "").startswith("nox -s ")]
    assert len(runs) == 6
    for run in runs:
        words = shlex.split(re.sub(r"\$\(.*\)", "https://a.example/", run))
        assert words[3] == "--"
        parser.parse([words[2], *words[4:]])
