"""The workflow is YAML, has a job for each target, and is the one in the repository."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml

from scripts.base.errors import MatrixError
from scripts.source import matrix
from scripts.wheels import workflow

ROOT = Path(__file__).resolve().parents[2]
MATRIX = matrix.load(ROOT / "wheel_matrix.toml")


def test_every_target_has_a_job() -> None:
    parsed = yaml.safe_load(workflow.render(MATRIX))
    rows = parsed["jobs"]["build"]["strategy"]["matrix"]["include"]
    assert [(r["target"], r["cuda"]) for r in rows] == [(t.name, t.cuda) for t in MATRIX.targets]
    (command,) = [s["run"] for s in parsed["jobs"]["build"]["steps"] if "nox -s build" in s.get("run", "")]
    assert command == "nox -s build -- --containers --target ${{ matrix.target }} --out wheels"


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
    assert "--upstream ${{ matrix.upstream }}" in command
    compiled = dataclasses.replace(MATRIX, upstreams={"flash-attn": MATRIX.upstreams["flash-attn"]})
    assert list(yaml.safe_load(workflow.render(compiled))["jobs"]) == ["build"]


@pytest.mark.parametrize("job", ["build", "python"])
def test_a_job_keeps_the_wheels_with_the_statements_of_how_they_were_built(job: str) -> None:
    steps = yaml.safe_load(workflow.render(MATRIX))["jobs"][job]["steps"]
    (kept,) = [s["with"]["path"] for s in steps if "upload-artifact" in s.get("uses", "")]
    assert kept.split() == ["wheels/*.whl", "wheels/*.provenance.json"]
