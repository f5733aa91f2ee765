"""What git makes of a patch as a mail, against the commit that it is of.

``git am`` splits a file at lines that begin a mail, ends a message at lines that begin a diff, and tidies
subjects. A message that it would give back otherwise is refused when it is written.
"""

from __future__ import annotations

import re
import tempfile
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.base.errors import SeriesError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from scripts.base.git import Repository

KEEP = "--keep-non-patch"  # of git am: [x] at the beginning of a subject stays, [PATCH] goes
# Where git ends a message (patchbreak of its mailinfo.c).
BREAK = re.compile(r"(?m)^(?:diff -|Index: |---(?: (?=\S)|[ \t]*$)).*$")


def require_same(repository: Repository, base: str, tip: str, patches: Sequence[Path]) -> None:
    """Refuse a commit whose author or message its patch would give back otherwise.

    Args:
        repository: in which the commits are.
        base: the commit before the first.
        tip: the last.
        patches: a file for each, in order.

    Raises:
        SeriesError: it names the patch, and the line.
    """
    form = "--format=%an%x00%ae%x00%B%x00"
    told = repository.raw("log", "--reverse", "--topo-order", form, f"{base}..{tip}")
    words = told.decode("utf-8", "backslashreplace").split("\0")[:-1]
    wanted = [(words[i].lstrip("\n"), words[i + 1], words[i + 2]) for i in range(0, len(words), 3)]
    with tempfile.TemporaryDirectory(prefix="fa2-mail-") as folder:
        mails = _split(repository, patches, Path(folder))
        for path, mail, (name, address, message) in zip(patches, mails, wanted, strict=True):
            author, read = _read(repository, mail)
            if fault := _difference(message, read):
                raise SeriesError(f"{path}:1: {fault}")
            if author != (name, address):
                raise SeriesError(
                    f"{path}:1: its author, {name} <{address}>, would come back as {author[0]} "
                    f"<{author[1]}>; give it another (--author)."
                )


def _split(repository: Repository, patches: Sequence[Path], folder: Path) -> list[Path]:
    """The mails that git finds in patches, one in each.

    Raises:
        SeriesError: several in one.
    """
    mails = []
    for number, path in enumerate(patches):
        (folder / str(number)).mkdir()
        repository.run("mailsplit", "--keep-cr", f"-o{folder / str(number)}", "--", str(path), writes=False)
        found = sorted((folder / str(number)).iterdir())
        if len(found) != 1:
            start = found[1].read_bytes().partition(b"\n")[0].decode("utf-8", "replace")
            raise SeriesError(
                f"{path}:1: git takes a line of its message, {start!r}, for the beginning of a mail."
            )
        mails += found
    return mails


def _read(repository: Repository, mail: Path) -> tuple[tuple[str, str], str]:
    """Author (name, address) and message that ``git am`` takes from a mail."""
    body, diff = mail.with_suffix(".body"), mail.with_suffix(".diff")
    told = repository.raw("mailinfo", "-b", str(body), str(diff), stdin=mail).decode("utf-8", "replace")
    fields = dict(line.split(": ", 1) for line in told.split("\n") if ": " in line)
    text = body.read_bytes().decode("utf-8", "backslashreplace")
    author = (fields.get("Author", ""), fields.get("Email", ""))
    return author, _tidied(f"{fields.get('Subject', '')}\n\n{text}")


def _tidied(text: str) -> str:
    """What ``git stripspace`` makes of a message, but for its last line end."""
    lines = "\n".join(line.rstrip(" \t\r\v\f") for line in text.split("\n"))
    return re.sub(r"\n{3,}", "\n\n", lines).strip("\n")


def _difference(message: str, read: str) -> str | None:
    """Where a message would come back otherwise, in words."""
    before, after = message.rstrip("\n").split("\n"), read.split("\n")
    if len(before) > 1 and before[1]:
        return "its subject is of several lines; put an empty line after the first."
    for number, (wanted, given) in enumerate(zip_longest(before, after, fillvalue=""), 1):
        if wanted != given:
            return (
                f"line {number} of its message, {wanted!r}, would come back as {given!r}; write it otherwise."
            )
    return None
