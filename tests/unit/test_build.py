"""Rebuilding a wheel from nothing, and telling what differs."""

from __future__ import annotations

import hashlib
import os
import shutil
import zipfile
from pathlib import Path

import pytest

from scripts import __main__
from scripts.base import layout
from scripts.base.errors import WheelError
from scripts.wheels import build, compiling


def fake_wheel(path: Path, **files: str) -> build.Built:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(zipfile.ZipInfo(name, (2025, 1, 1, 0, 0, 0)), text)
    content = path.read_bytes()
    return build.Built(
        path, len(content), hashlib.sha256(content).hexdigest(), 3.0, compiling.Compiled((), 1, 1.0, 0, 1)
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
    program.write_text('#!/bin/sh\necho "$1 of $2 and $3: a byte"\nexit 1\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    ours, theirs = (fake_wheel(tmp_path / name, text=name).path for name in ("a.whl", "b.whl"))
    assert f"--text=- of {ours} and {theirs}: a byte" in build._difference(ours, theirs)
