"""Files that are written whole or not at all, and runs that keep apart."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from scripts.base import files, layout
from scripts.base.errors import UsageError
from scripts.series import clone, tree
from scripts.source import matrix, upstream


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
