"""The example that shows how far the batch moves logits, on the figures of the docs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.base import layout

DOCS = layout.ROOT / "docs"


def run(*arguments: str | Path) -> str:
    command = [sys.executable, DOCS / "examples/batches.py", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_the_figures_of_the_docs_move_with_the_mode_off_alone(tmp_path: Path) -> None:
    told = run("--from", DOCS / "batches.json", "--json", tmp_path / "again.json").splitlines()
    found = json.loads((tmp_path / "again.json").read_text(encoding="utf-8"))
    assert found == json.loads((DOCS / "batches.json").read_text(encoding="utf-8"))
    assert len(told) == len(found["rows"])
    moved = {mode: [row["largest"] for row in found["rows"] if row["mode"] == mode] for mode in ("off", "on")}
    assert max(moved["off"]) > 0
    assert set(moved["on"]) == {0}
    assert f"{max(moved['off']):.4f}" in "".join(told)


@pytest.mark.parametrize("content", [None, "no JSON"])
def test_figures_that_cannot_be_read_are_one_line(tmp_path: Path, content: str | None) -> None:
    given = tmp_path / "given.json"
    if content:
        given.write_text(content, encoding="utf-8")
    with pytest.raises(subprocess.CalledProcessError) as failed:
        run("--from", given, "--json", tmp_path / "again.json")
    assert f"--from {given}: " in failed.value.stderr
    assert "Traceback" not in failed.value.stderr
    assert not (tmp_path / "again.json").exists()


def test_the_picture_has_both_modes(tmp_path: Path) -> None:
    for name in ("one.svg", "two.svg"):
        run("--from", DOCS / "batches.json", "--picture", tmp_path / name)
    content = (tmp_path / "one.svg").read_bytes()
    assert content == (tmp_path / "two.svg").read_bytes()
    assert b"<!-- mode on -->" in content
    assert b"<!-- mode off: stock" in content
