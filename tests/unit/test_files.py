"""What is said when a file cannot be written."""

from __future__ import annotations

import errno
import sys
from pathlib import Path

import pytest

from scripts import __main__
from scripts.base import files


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_an_error_of_writing_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left") as caught, files.writing(tmp_path / "a"):
        full_disk()
    assert caught.value.filename == str(tmp_path / "a")


@pytest.mark.parametrize(
    ("named", "said"),
    [
        (True, "✗ /x: No space left on device.\n"),
        (False, "✗ while a file was written: No space left on device.\n"),
    ],
)
def test_a_full_disk_is_one_line_and_fails(
    named: bool, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", *(["/x"] if named else []))

    monkeypatch.setattr(sys, "argv", ["scripts"])
    monkeypatch.setattr(__main__, "main_inner", command)
    with pytest.raises(SystemExit) as ended:
        __main__.main()
    assert ended.value.code == 1
    assert capsys.readouterr().err == said


def test_a_read_only_folder_is_not_to_be_removed_and_copied() -> None:
    said = files._refusal(errno.EROFS, Path("/r/patches"))
    assert said.startswith("/r/patches could not be replaced: Read-only file system. Nothing was changed.")
    assert "writable" in said
    assert "rm -r" not in said
    assert "rm -r /r/patches" in files._refusal(errno.EINVAL, Path("/r/patches"))
