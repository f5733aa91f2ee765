"""Files that are written whole or not at all, what is said when they cannot be, and runs that keep apart."""

from __future__ import annotations

import errno
import io
import os
import re
import shutil
import sys
import tarfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from scripts import __main__
from scripts.base import archives, files, layout
from scripts.base.errors import BuildError, UsageError
from scripts.series import clone, tree
from scripts.source import matrix, upstream
from tests.unit.waiting import PATIENCE, until


def test_a_second_run_on_the_series_waits_for_nobody(tmp_path: Path) -> None:
    with (
        files.alone(tmp_path),
        pytest.raises(UsageError, match="another run is working on the series"),
        files.alone(tmp_path),
    ):
        pass
    with files.alone(tmp_path):
        pass


def test_applying_waits_for_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notes: list[str]
) -> None:
    """A build applies first: two of them side by side are no mistake."""
    applied = tree.Tree(tmp_path, "b" * 40, "c" * 40, "d" * 64, "e" * 40, "f" * 64)
    monkeypatch.setattr(layout, "BUILD", tmp_path / "build")
    monkeypatch.setattr(upstream, "pinned", lambda *_: None)
    monkeypatch.setattr(tree, "apply", lambda *_, **__: applied)

    loaded = matrix.load(layout.MATRIX)
    with ThreadPoolExecutor() as threads:
        with files.alone(tmp_path / "build"):
            second = threads.submit(clone.apply, loaded, upstream.Source.AUTO)
            until(lambda: notes, "the second to wait")
            assert notes == ["another run is working on the series; waiting for it"]
            assert not second.done()
        assert second.result(PATIENCE)[1] is applied


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("old")
    with pytest.raises(UnicodeEncodeError):  # once a file is open
        files.write(tmp_path / "text", "half a pair: \ud800")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("text", "old")]


def test_a_file_that_cannot_be_written_is_told_by_its_own_name(tmp_path: Path) -> None:
    for path, kind in ((tmp_path, IsADirectoryError), (tmp_path / "none" / "text", FileNotFoundError)):
        with pytest.raises(kind) as caught:
            files.write(path, "text")
        assert caught.value.filename == str(path)
    assert list(tmp_path.iterdir()) == []
    assert not tmp_path.with_name(tmp_path.name + ".part").exists()


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_an_error_of_writing_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left") as caught, files.writing(tmp_path / "a"):
        full_disk()
    assert caught.value.filename == str(tmp_path / "a")


def full_disk_while_a_folder_is_copied(folder: Path) -> None:
    (folder / "a").mkdir()
    (folder / "a/x").touch()
    shutil.copytree(folder / "a", folder / "b", copy_function=full_disk)


def full_disk_of(_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device", "/x")


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (full_disk_of, "✗ /x: No space left on device.\n"),
        (full_disk, "✗ while a file was written: No space left on device.\n"),
        (full_disk_while_a_folder_is_copied, "✗ {folder}/b/x: No space left on device.\n"),
    ],
)
def test_a_full_disk_is_one_line_and_fails(
    act: Callable[[Path], None],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    def command(_: object) -> None:
        act(tmp_path)

    monkeypatch.setattr(sys, "argv", ["scripts"])
    monkeypatch.setattr(__main__, "main_inner", command)
    with pytest.raises(SystemExit) as ended:
        __main__.main()
    assert ended.value.code == 1
    assert capsys.readouterr().err == said.format(folder=tmp_path)


def test_a_read_only_folder_is_not_to_be_removed_and_copied() -> None:
    said = files._refusal(errno.EROFS, Path("/r/patches"))
    assert said.startswith("/r/patches could not be replaced: Read-only file system. Nothing was changed.")
    assert "writable" in said
    assert "rm -r" not in said
    assert "rm -r /r/patches" in files._refusal(errno.EINVAL, Path("/r/patches"))


def test_a_pipe_is_written_to_and_stays_one(tmp_path: Path) -> None:
    """So is /dev/null, which a user who may rename there would replace by a file."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        files.write(pipe, "said\n")
        assert os.read(reader, 100) == b"said\n"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_the_file_that_a_shell_redirects_to_is_written_to_by_its_name_in_dev(tmp_path: Path) -> None:
    """The name is a link to it: to rename over it would replace the link, and the shell's file stay empty."""
    opened = os.open(tmp_path / "out", os.O_WRONLY | os.O_CREAT)
    link = Path(f"/dev/fd/{opened}")
    try:
        files.write(link, "said\n")
        assert link.is_symlink()
    finally:
        os.close(opened)
    assert (tmp_path / "out").read_text() == "said\n"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_copy_has_the_mode_and_an_error_names_where_it_was_to_lie(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("said")
    program.chmod(0o755)
    files.copy(program, tmp_path / "copy")
    assert (tmp_path / "copy").read_text() == "said"
    assert (tmp_path / "copy").stat().st_mode & 0o777 == 0o755
    with pytest.raises(FileNotFoundError) as raised:
        files.copy(program, tmp_path / "none/copy")
    assert raised.value.filename == str(tmp_path / "none/copy")
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        files.copy(program, tmp_path / "folder")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "folder", "program"]


@pytest.mark.parametrize(
    ("name", "kind", "written"),
    [
        ("a/b.h", tarfile.REGTYPE, True),
        ("../b.h", tarfile.REGTYPE, False),
        ("/tmp/b.h", tarfile.REGTYPE, False),  # noqa: S108 - a name
        ("b.h", tarfile.SYMTYPE, False),
        ("b.h", tarfile.FIFOTYPE, False),
    ],
)
def test_an_archive_s_files_and_nothing_else_are_written_below_a_folder(
    tmp_path: Path, name: str, kind: bytes, written: bool
) -> None:
    packed, content = io.BytesIO(), b"content"
    with tarfile.open(fileobj=packed, mode="w") as tar:
        entry = tarfile.TarInfo(name)
        entry.type, entry.mode, entry.uid, entry.size = kind, 0o6777, 12345, len(content)
        entry.linkname = "/etc/passwd"
        tar.addfile(entry, io.BytesIO(content))
    packed.seek(0)
    with tarfile.open(fileobj=packed) as tar:
        if written:
            archives.write_all(tar, tmp_path / "folder")
            told = (tmp_path / "folder" / name).stat()
            assert (told.st_mode, told.st_uid, told.st_size) == (0o100644, os.getuid(), len(content))
            return
        with pytest.raises(BuildError, match=f"{name} of an archive is no ordinary file"):
            archives.write_all(tar, tmp_path / "folder")
    assert not list(tmp_path.iterdir())


def test_no_archive_is_unpacked_by_what_older_releases_of_python_lack() -> None:
    """README's first Python is 3.10; Debian 12 has 3.11.2, whose ``TarFile.extract`` takes no filter."""
    sources = [path for folder in ("scripts", "tests") for path in (layout.ROOT / folder).rglob("*.py")]
    unpack = re.compile(r"\.extract(all)?\([^)]*filter=|unpack_archive\([^)]*filter=")
    assert [str(path) for path in sources if unpack.search(path.read_text(encoding="utf-8"))] == []
