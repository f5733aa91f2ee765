"""The patch series as a model: its files, read and checked.

Git is asked one thing: why a diff cannot be read.

A patch is a mail file of ``git format-patch``: prose, trailers, diff.
"""

from __future__ import annotations

import difflib
import email.policy
import hashlib
import re
from dataclasses import dataclass, field, replace
from email.parser import BytesParser
from typing import TYPE_CHECKING

from unidiff.errors import UnidiffParseError
from unidiff.patch import PatchSet

from scripts.base import git
from scripts.base.errors import SeriesError
from scripts.series import listing, mail
from scripts.series import own as own_files
from scripts.series.own import OwnFiles

if TYPE_CHECKING:
    from pathlib import Path

STATUSES = "Pending, Submitted [where], Backport [commit] or Inappropriate [why]"
_STATUS = re.compile(r"Pending|(Submitted|Backport|Inappropriate) \[[^\]\s][^\]]*\]")
TRAILERS = ("Upstream-Status", "Feature", "Long", "Guard")
_TRAILER = re.compile(rf"({'|'.join(TRAILERS)}): *(.*)")


@dataclass(frozen=True)
class FileChange:
    """What a patch does to one file."""

    path: str
    added: int
    removed: int
    context: int
    is_new: bool


@dataclass(frozen=True)
class Patch:
    """One patch."""

    name: str
    content: bytes
    subject: str
    body: str  # the message without its trailers
    upstream_status: str
    feature: str
    guards: tuple[str, ...]
    long: str  # why its file has many lines; empty where nothing says so
    files: tuple[FileChange, ...]
    number: int = 0  # its place in the series, from 1; 0 for a patch that was read alone

    @property
    def sha256(self) -> str:
        """Of the file's bytes."""
        return hashlib.sha256(self.content).hexdigest()

    def calls(self, path: str) -> bool:
        """Whether lines that it adds to files of the same language name a file of ours."""
        _, *rest = re.split(r"(?m)^\+\+\+ b/(.*)$", self.content.decode())
        is_python = path.endswith(".py")
        files = zip(rest[::2], rest[1::2], strict=True)
        added = [
            line
            for name, diff in files
            if name.endswith(".py") == is_python
            for line in re.findall(r"(?m)^\+(.*)", diff)
        ]
        return own_files.naming(path).search("\n".join(added)) is not None

    @property
    def short(self) -> str:
        """Its name without ``.patch``, which names it on a command line."""
        return self.name.removesuffix(".patch")


@dataclass(frozen=True)
class Series:
    """Our own files, and the patches in order."""

    folder: Path
    patches: tuple[Patch, ...]
    own: OwnFiles = field(default_factory=OwnFiles)

    def digest(self, base: str) -> str:
        """SHA-256 over the base's commit id, and the order and the bytes of every patch.

        The commit id stands for upstream's files and our own.
        """
        sha = hashlib.sha256()
        for part in (base.encode(), *(x for p in self.patches for x in (p.name.encode(), p.content))):
            sha.update(len(part).to_bytes(8, "big") + part)
        return sha.hexdigest()

    def named(self, text: str) -> int:
        """The place of the patch that a user means.

        Args:
            text: a place (``3``), a file name, or words of a name or subject that no other has.

        Raises:
            SeriesError: none or several fit.
        """
        if text.isdecimal():
            places = [i for i, _ in enumerate(self.patches) if i + 1 == int(text)]
        else:
            name = text.removesuffix(".patch").rsplit("/", 1)[-1]
            places = [i for i, p in enumerate(self.patches) if p.name == f"{name}.patch"]
            words = [f"{p.name} {p.subject}".lower() for p in self.patches] if name else []
            places = places or [i for i, about in enumerate(words) if name.lower() in about]
        if len(places) != 1:
            names = "\n".join(
                "    " + p.name for i, p in enumerate(self.patches) if i in places or not places
            )
            files = {path.rsplit("/", 1)[-1] for path in self.own.contents}
            near = [] if places else difflib.get_close_matches(text, sorted(files))
            raise SeriesError(
                f"{text!r} names "
                f"{'no patch of the series, which has' if not places else 'several patches'}:\n{names}"
                + (f"\n  Files of ours with such a name: {', '.join(near)}." if near else "")
            )
        return places[0]

    def upto(self, count: int) -> Series:
        """The first patches alone."""
        return replace(self, patches=self.patches[:count])

    def only(self, name: str) -> Series:
        """One patch alone, as ``named`` takes it."""
        return replace(self, patches=(self.patches[self.named(name)],))


def damaged(path: Path, flaw: str) -> str:
    """What to say of a patch whose diff cannot be read, and where."""
    at = re.search(r"line (\d+)", flaw)
    place = f"{path}:{at[1]}" if at else path
    remedy = "or, if no commit has it, write it again with nox -s export"
    return f"{place}: the diff is damaged: {flaw}. Take the file back (git checkout -- {path}), {remedy}."


def _files(path: Path, text: str, start: int) -> tuple[FileChange, ...]:
    try:
        parsed = PatchSet(text[start:])
    except UnidiffParseError as e:
        raise SeriesError(damaged(path, git.flaw(path) or str(e))) from e
    return tuple(
        FileChange(
            f.path,
            f.added,
            f.removed,
            sum(line.is_context for hunk in f for line in hunk),
            bool(f.is_added_file),
        )
        for f in parsed
    )


def parse_patch(path: Path) -> Patch:
    """Read one patch; a SeriesError names line and fix of the first thing its header lacks."""
    text = listing.text_of(path)
    if "\r\n" in text.partition("\n\n")[0]:
        raise SeriesError(
            f"{path}:1: lines end with carriage returns; write the file with line feeds "
            "(an editor, or core.autocrlf, changed them)."
        )
    message = BytesParser(policy=email.policy.default).parsebytes(text.encode())
    subject = re.sub(r"^\[PATCH[^\]]*\] *", "", str(message["Subject"] or "").replace("\n", ""))
    if not subject:
        raise SeriesError(
            f"{path}:1: no Subject; patches are mail files written by git format-patch (nox -s export writes "
            "them)."
        )
    head = text.partition("\n\n")[0]
    body, start = _message(path, text, len(head) + 2)
    first = head.count("\n") + 3  # the line that the message's body starts in
    prose, trailers = _prose_and_trailers(path, body, first)
    return Patch(
        path.name,
        text.encode(),
        subject,
        prose,
        _trailer(path, body, first, trailers, "Upstream-Status"),
        _trailer(path, body, first, trailers, "Feature"),
        tuple(value for _, value in trailers["Guard"]),
        " ".join(value for _, value in trailers["Long"]),
        _files(path, text, start),
    )


def _message(path: Path, text: str, begin: int) -> tuple[str, int]:
    """The message's body, which begins at a place of a patch's text, and the place of the diff.

    Raises:
        SeriesError: there is no diff, or git would end the message before it.
    """
    start = text.find("\ndiff --git ", begin - 1) + 1
    end = mail.BREAK.search(text, begin)
    rest = text.find("\n---\n", begin - 1)
    if not start or rest < 0 or end is None:
        raise SeriesError(f"{path}:{text.count(chr(10)) + 1}: no diff after the message.")
    line = text.count("\n", 0, end.start()) + 1
    if end[0] != "---":
        raise SeriesError(f"{path}:{line}: git ends the message at the line {end[0]!r}; write it otherwise.")
    between = text[end.end() : text.index("\ndiff --git ", end.start()) + 1]
    if any(not one.startswith(" ") for one in between.split("\n") if one):  # git's own are of its table
        raise SeriesError(f"{path}:{line}: the line '---' hides what follows it in the message; take it out.")
    return text[begin : end.start()].removesuffix("\n"), start


def _prose_and_trailers(path: Path, body: str, first: int) -> tuple[str, dict[str, list[tuple[int, str]]]]:
    """A message's text, and the lines and values of its trailers by name.

    ``first`` is the line that it starts in.
    """
    trailers: dict[str, list[tuple[int, str]]] = {name: [] for name in TRAILERS}
    lines = body.rstrip().split("\n")
    last = max((number for number, line in enumerate(lines, 1) if not line.strip()), default=0)  # before them
    found = [number for number, line in enumerate(lines) if _TRAILER.fullmatch(line)]
    others = [n for n, line in enumerate(lines) if not re.match(r"[\w-]+: ?|\s*$", line)]
    if found and (after := [n for n in others if n > found[0]]):
        raise SeriesError(
            f"{path}:{first + after[0]}: text after the trailers; they are the message's last paragraph."
        )
    if found and found[0] < last:
        raise SeriesError(
            f"{path}:{first + found[0]}: trailers in two paragraphs; put them all into the last one."
        )
    if found and (before := [n for n in others if n >= last]):
        raise SeriesError(
            f"{path}:{first + before[0]}: text beside the trailers; put an empty line before these."
        )
    for number in found:
        if match := _TRAILER.fullmatch(lines[number]):
            trailers[match[1]].append((first + number, match[2].strip()))
    prose = (line for number, line in enumerate(lines) if number not in found)
    return "\n".join(prose).strip(), trailers


def _trailer(path: Path, body: str, first: int, trailers: dict[str, list[tuple[int, str]]], name: str) -> str:
    """The value of a trailer that a message must have once."""
    if not trailers[name]:
        spelt = (
            i for i, line in enumerate(body.split("\n"), first) if line.lower().startswith(f"{name.lower()}:")
        )
        near = next(spelt, None)
        spelling = f" (line {near} spells it otherwise)" if near else ""
        choices = STATUSES if name == "Upstream-Status" else "one of fork/NAME.toml"
        raise SeriesError(
            f"{path}:{first + body.count(chr(10))}: the message has no trailer {name}{spelling}; "
            f"add a line '{name}: …' at its end: {choices}."
        )
    if len(trailers[name]) > 1:
        raise SeriesError(f"{path}:{trailers[name][1][0]}: a second trailer {name}; one is enough.")
    line, value = trailers[name][0]
    if name == "Upstream-Status" and not _STATUS.fullmatch(value):
        raise SeriesError(f"{path}:{line}: Upstream-Status {value!r} is not {STATUSES}.")
    if name == "Feature" and not re.fullmatch(r"[\w-]+", value):
        raise SeriesError(f"{path}:{line}: Feature {value!r} is no name of letters, digits and hyphens.")
    return value


def digests(folder: Path) -> dict[str, str]:
    """The sha256 of every patch that lies in a folder, whatever ``series`` names, by file name."""
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.glob("*.patch")}


def read(folder: Path, own: Path | None = None) -> Series:
    """Read ``series`` and the patches it names; every patch in the folder must be named once.

    A series may be empty: that of an upstream which has no patch yet.

    Args:
        folder: of the patches.
        own: of our own files; None or a folder that is not there: there are none.
    """
    entries, _ = listing.read(folder)
    named = {entry.name for entry in entries}
    if stray := sorted(p.name for p in folder.glob("*.patch") if p.name not in named):
        raise SeriesError(
            f"{folder / listing.LISTING}: does not name {', '.join(stray)}; "
            f"add a line, or delete the file (git clean -f {folder.name}, after a git checkout of other "
            "patches)."
        )
    patches = (parse_patch(folder / entry.name) for entry in entries)
    numbered = tuple(replace(patch, number=place) for place, patch in enumerate(patches, 1))
    return Series(folder, numbered, own_files.read(own))
