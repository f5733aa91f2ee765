"""Rules of a good patch and a good series, each told by file, line and fix."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING

from scripts.base import git
from scripts.base.errors import SeriesError
from scripts.series import guards, lint_features, listing, model
from scripts.series import own as own_files
from scripts.series.problem import Problem, as_problem

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

SUBJECT_LENGTH = 72
# Of upstream's text, what a patch may hold: our largest hook adds 40 lines, our largest patch quotes 150.
# Much more than that and the next release conflicts with it; own code goes into new files.
ADDED_TO_A_FILE = 40
QUOTED_IN_A_PATCH = 250
CONTEXT_LINES = 3
WORDS_OF_WHY = 8
_NO_FILES = own_files.OwnFiles()
LINES = 150  # of a patch's file; more and a reader loses the thread


# Verbs that end as other forms do. A tagger of English is a large dependency for a subject's first word.
_IMPERATIVES = frozenset(
    ("alias", "bring", "canvas", "embed", "feed", "focus", "need", "seed", "shed", "speed")
)


def is_imperative(subject: str) -> bool:
    """Whether a subject starts with a verb as in "Add a guard", as far as its form tells.

    >>> subjects = "Add a guard", "Added a guard", "Adds a guard", "Adding a guard", "Address rows flat"
    >>> [is_imperative(subject) for subject in (*subjects, "a guard")]
    [True, False, False, False, True, False]
    """
    word = re.match(r"[A-Za-z]+", subject)
    if not word or not word[0][0].isupper():
        return False
    verb = word[0].lower()
    return verb in _IMPERATIVES or re.search(r"(ed|ing|(?<!s)s)$", verb) is None


def _start_of_diff(lines: list[str]) -> int:
    return next(i for i, line in enumerate(lines) if line.startswith("diff --git "))


def _header(path: Path, patch: model.Patch, lines: list[str]) -> Iterator[Problem]:
    at = next((i for i, line in enumerate(lines, 1) if line.startswith("Subject:")), 1)
    if len(patch.subject) > SUBJECT_LENGTH:
        yield Problem(
            path,
            at,
            f"the subject has {len(patch.subject)} characters; say it in {SUBJECT_LENGTH} (reword the "
            "commit).",
        )
    if not is_imperative(patch.subject):
        yield Problem(
            path,
            at,
            f"the subject {patch.subject!r} is not in the imperative ('Add …', not 'Added …' or 'Adds …').",
        )
    if patch.subject.endswith("."):
        yield Problem(path, at, "the subject ends with a full stop; drop it.")
    if len(patch.body.split()) < WORDS_OF_WHY:
        yield Problem(
            path,
            at,
            f"the message does not say why (it has fewer than {WORDS_OF_WHY} words): "
            "what upstream does, why that is wrong for us, how it was proved.",
        )
    for place, text in enumerate(lines[: _start_of_diff(lines)], 1):
        if match := re.search(r"--(?:patch|through) \d+|\b[Pp]atch(?:es)? \d+\b", text):
            yield Problem(
                path,
                place,
                f"{match[0]!r}: numbers change when patches come and go; name a part of the subject.",
            )
    trailer = next((i for i, line in enumerate(lines, 1) if line.startswith("Upstream-Status:")), at)
    if not patch.guards:
        yield Problem(
            path,
            trailer,
            f"no trailer Guard; add one that only a tree with the patch passes: {guards.KINDS}.",
        )
    for text in patch.guards:
        try:
            guards.parse(text)
        except ValueError as e:
            line = next((i for i, candidate in enumerate(lines, 1) if candidate == f"Guard: {text}"), trailer)
            yield Problem(path, line, f"Guard {text!r}: {e}.")


def _status(path: Path, patch: model.Patch, lines: list[str], ours: re.Pattern[str]) -> Iterator[Problem]:
    """Only what is free of our code could be upstream's."""
    trailer = next(i for i, line in enumerate(lines, 1) if line.startswith("Upstream-Status:"))
    added = (line for line in lines[_start_of_diff(lines) :] if re.match(r"\+(?!\+\+ )", line))
    name = next((match[0] for line in added if (match := ours.search(line))), None)
    if name and not re.match(r"Inappropriate \[hook\b", patch.upstream_status):
        text = f"the patch names {name}, which upstream has not; write Inappropriate [hook], or [hook, …]."
        yield Problem(path, trailer, text)
    if (count := len(lines) - 1) > LINES and not patch.long:
        text = f"the file has {count} lines, above {LINES}; split it, or say why in a trailer 'Long: …'."
        yield Problem(path, trailer, text)


def _names(own: own_files.OwnFiles) -> re.Pattern[str]:
    """What of ours a line may name: fork_…, a header, or a module of ours."""
    words = [r"(?i:\b_?fork_\w*|\b\w*_fork\b)"]
    return re.compile("|".join([*words, *(own_files.naming(path).pattern for path in own.contents)]))


def _whitespace(path: Path, number: int, line: str, file: str) -> Iterator[Problem]:
    if line.endswith("\r"):
        yield Problem(path, number, "a carriage return; write the file with line feeds.")
    elif line.startswith("+") and not line.startswith("+++"):
        if re.search(r"[ \t]+$", line[1:]):
            yield Problem(path, number, f"spaces at the end of a line of {file}; drop them.")
        if re.match(r"\+(<<<<<<<|\|\|\|\|\|\|\||>>>>>>>) ", line):
            yield Problem(path, number, f"a conflict marker in {file}; resolve the conflict.")
        if re.match(r"\+\t* +\t", line):
            yield Problem(path, number, f"a space before a tab in {file}; use spaces.")


def _diff(path: Path, lines: list[str], package: str | None) -> Iterator[Problem]:
    start = _start_of_diff(lines)
    file = ""
    for number, line in enumerate(lines[start:], start + 1):
        if match := re.match(r"diff --git a/(\S+) b/(\S+)", line):
            file = match[1]
            for name in sorted({match[1], match[2]}):
                if not own_files.is_ours_to_touch(name, package):
                    yield Problem(
                        path,
                        number,
                        f"{name} is none of upstream's files that a wheel is built from; patches touch "
                        f"{own_files.where_ours(package)}.",
                    )
        yield from _whitespace(path, number, line, file)
    for match in re.finditer(r"(?m)^@@ .*\n((?:[ +\\-].*\n)*)", "\n".join(lines) + "\n"):
        hunk = match[1].rstrip("\n").split("\n")
        changes = [i for i, line in enumerate(hunk) if not line.startswith((" ", "\\"))]
        around = (
            [
                changes[0],
                len(hunk) - 1 - changes[-1],
                *((after - before - 1) / 2 for before, after in pairwise(changes)),
            ]
            if changes
            else []
        )
        if any(count > CONTEXT_LINES for count in around):
            at = match.string[: match.start()].count("\n") + 1
            yield Problem(
                path,
                at,
                f"more than {CONTEXT_LINES} lines of context around a change; "
                f"nox -s export writes {CONTEXT_LINES}.",
            )


def _hooks(path: Path, patch: model.Patch, lines: list[str], added: Collection[str]) -> Iterator[Problem]:
    hooks = [change for change in patch.files if not change.is_new and change.path not in added]
    for change in hooks:
        if change.added > ADDED_TO_A_FILE:
            at = next(i for i, line in enumerate(lines, 1) if line.startswith(f"diff --git a/{change.path} "))
            fix = f"put code into a new file and leave a hook of at most {ADDED_TO_A_FILE} lines"
            yield Problem(path, at, f"adds {change.added} lines to upstream's {change.path}; {fix}.")
    if (quoted := sum(change.context + change.removed for change in hooks)) > QUOTED_IN_A_PATCH:
        yield Problem(
            path,
            1,
            f"quotes {quoted} lines of upstream's, which is too much context; "
            "split the patch, or touch fewer places.",
        )


def _no_new_files(path: Path, patch: model.Patch, lines: list[str], own: Path) -> Iterator[Problem]:
    for change in patch.files:
        if change.is_new:
            at = next(i for i, line in enumerate(lines, 1) if line.startswith(f"diff --git a/{change.path} "))
            yield Problem(path, at, f"adds {change.path}; our own files lie in {own.parent.name}/{own.name}.")


def check_patch(
    path: Path, added: set[str], package: str | None = None, own: own_files.OwnFiles = _NO_FILES
) -> list[Problem]:
    """Every problem of one patch; of one that cannot be read, the first.

    Args:
        path: the patch.
        package: of a python upstream, its folder.
        added: files that earlier patches of the series add; those that this one adds are put into it.
        own: our own files; where they have a folder, no patch adds a file.
    """
    try:
        patch = model.parse_patch(path)
    except SeriesError as e:
        return [as_problem(path, e)]
    if flaw := git.flaw(path):
        return [as_problem(path, SeriesError(model.damaged(path, flaw)))]
    lines = patch.content.decode().split("\n")
    problems = [
        *_header(path, patch, lines),
        *_status(path, patch, lines, _names(own)),
        *_diff(path, lines, package),
        *_hooks(path, patch, lines, added),
        *(_no_new_files(path, patch, lines, own.folder) if own.folder else []),
    ]
    added.update(change.path for change in patch.files if change.is_new)
    return problems


def _own(own: Path | None, package: str | None) -> tuple[own_files.OwnFiles, list[Problem]]:
    """Our own files; those that no build reads, or one that is none at all."""
    if own is None:
        return _NO_FILES, []
    try:
        ours = own_files.read(own)
    except SeriesError as e:
        return _NO_FILES, [Problem(own, 1, str(e))]
    read_by_none = f"is read by no build ({own_files.where_ours(package)}); move or delete it."
    return ours, [Problem(ours.place(name), 1, read_by_none) for name in own_files.misplaced(ours, package)]


def check(folder: Path, package: str | None = None, own: Path | None = None) -> list[Problem]:
    """Every problem of a series: of its listing, its files, each patch, and our own files.

    Args:
        folder: the series'.
        package: of a python upstream, its folder; None: patches are of a compiled one.
        own: the folder of our own files; None: patches add them.
    """
    series_file = folder / listing.LISTING
    try:
        entries, _ = listing.read(folder)
    except SeriesError as e:
        return [as_problem(series_file, e)]
    ours, problems = _own(own, package)
    added: set[str] = set()
    names = [entry.name for entry in entries]
    for path in sorted(folder.iterdir()):
        if path.name in names or path.name == listing.LISTING:
            continue
        if path.suffix == ".patch":
            problems.append(
                Problem(
                    series_file, len(names) + 1, f"does not name {path.name}; add a line, or delete the file."
                )
            )
        elif not path.name.startswith("."):
            problems.append(
                Problem(path, 1, f"is no patch; {folder.name}/ holds patches and {listing.LISTING}.")
            )
    if not names:
        problems.append(Problem(series_file, 1, "names no patch."))
    for entry in entries:
        if number := re.match(r"\d+-", entry.name):
            problems.append(
                Problem(
                    series_file,
                    entry.line,
                    f"{entry.name} has a number; the order is that of this file, so name it "
                    f"{entry.name[number.end() :]}.",
                )
            )
        problems += check_patch(folder / entry.name, added, package, ours)
    return problems + _features(folder, ours)


def _features(folder: Path, own: own_files.OwnFiles) -> list[Problem]:
    """What is wrong with the table of features, where the patches can be read."""
    try:
        series = model.read(folder)
    except SeriesError:
        return []  # told already
    return lint_features.check(own, series)
