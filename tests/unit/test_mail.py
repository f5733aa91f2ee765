"""Messages of commits, as patches keep them: what an export accepts comes back the same."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from scripts.base.errors import SeriesError
from scripts.base.git import Repository
from scripts.series import formatting, model, tree
from tests.unit.conftest import WHY, Kept, Make, commit_each

SUBJECT = "Add a line"
TRAILERS = "Upstream-Status: Pending\nFeature: build\nGuard: symbol fork in setup.py"


def whole(subject: str = SUBJECT, why: str = WHY, trailers: str = TRAILERS) -> str:
    return f"{subject}\n\n{why}\n\n{trailers}\n"


@pytest.fixture(scope="module")
def repository(kept: Kept) -> Repository:
    """Two commits: a base, and one more line."""
    steps = [("base", {"f": "1\n"}), ("line", {"f": "2\n"})]
    return Repository(kept("messages", lambda root: commit_each(root, steps)), SeriesError)


def commit_of(repository: Repository, text: str) -> str:
    """The second commit with this message, to the byte, on the first."""
    with tempfile.NamedTemporaryFile() as told:
        Path(told.name).write_bytes(text.encode())
        return repository.run("commit-tree", "-p", "series~1", "-F", told.name, "series^{tree}").strip()


def raw(repository: Repository, commit: str) -> str:
    return repository.raw("log", "-1", "--format=%an %ae%n%B", commit).decode().rstrip("\n")


STRANGE = (
    *("[x] ", "[PATCH] ", "[PATCH v2] ", "Re: ", "[", "] ", ": ", "=?utf-8?q?a?=", "  ", "\t", "#", "é", "…"),
    *(
        "\n",
        "\n\n",
        "\n---\n",
        "\n--- a\n",
        "\ndiff --git a/x b/x\n",
        "\nIndex: a\n",
        "\n-- \n",
        "\n-- >8 --\n",
    ),
    *(
        "\nFrom 0 Mon Sep 17 00:00:00 2001\n",
        "\nFrom: A <a@b.c>\n",
        "\nSubject: x\n",
        "\nDate: 1\n",
        "\r\n",
        "\r",
    ),
    *(
        "\nFeature: build\n",
        "\nGuard: none\n",
        "\nSigned-off-by: A <a@b.c>\n",
        "\n@@ -1 +1 @@\n",
        "\x0c",
        " \n",
    ),
    *(
        "\nLong: a\n\n",
        ">From ",
        "Content-Type: text/plain; charset=latin1\n",
        "\n>8\n",
        ".",
        "-",
        "\x0b",
        "\u2028",
    ),
)
texts = st.lists(
    st.one_of(
        st.sampled_from(STRANGE), st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=6)
    ),
    max_size=3,
).map("".join)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(before=texts, within=texts, why=texts, trailers=texts, end=texts)
@example(before="[x] ", within="", why="", trailers="", end="")
@example(before="", within="", why="\ndiff --git a/x b/x\n", trailers="", end="")
@example(before="", within="\n", why="", trailers="", end="")
def test_a_message_that_export_accepts_comes_back_the_same(
    repository: Repository, before: str, within: str, why: str, trailers: str, end: str
) -> None:
    text = whole(f"{before}Add{within} a line", f"Because{why} it is so.", f"{TRAILERS}{trailers}{end}")
    made = commit_of(repository, text)
    base = repository.resolve("series~1")
    try:
        patches = formatting.exported_patches(repository, base, made)
    except SeriesError as e:
        assert re.search(r"\.patch: |no name for a file", str(e))  # noqa: PT017 - others are accepted
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Repository(Path(folder) / "copy", SeriesError)
        options = ("--quiet", "--shared", "--no-checkout")
        repository.run("clone", *options, str(repository.root), str(copy.root), writes=False)
        copy.run("checkout", "--quiet", "--detach", base)
        ((name, content),) = patches.items()
        path = Path(folder) / name
        path.write_bytes(content)
        assert model.parse_patch(path).feature == "build"
        copy.run(*tree.AM, str(path))
        assert raw(copy, "HEAD") == raw(repository, made)
        assert formatting.exported_patches(copy, base) == patches


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (whole("[x] " + SUBJECT), ""),
        (whole(f"{SUBJECT}\nof two lines"), "its subject is of several lines"),
        (whole(f"Re: {SUBJECT}"), "line 1 of its message, 'Re: Add a line', would come back as 'Add a line'"),
        (
            whole(why=f"{WHY}\ndiff --git a/x b/x"),
            "line 4 of its message, 'diff --git a/x b/x', would come back",
        ),
        (whole(why=f"{WHY}\n---\nMore."), "line 4 of its message, '---', would come back as ''"),
        (
            whole(why="From 0 Mon Sep 17 00:00:00 2001\n"),
            "takes a line of its message, 'From 0 .*', for the beginning",
        ),
        (whole(trailers=TRAILERS.replace("\n", "\n\n", 1)), "trailers in two paragraphs"),
        (whole(why=f"{WHY}\n\nLong: many"), "trailers in two paragraphs"),
        (whole(trailers=f"{TRAILERS}\n\nAcked-by: A <a@b.c>"), "trailers in two paragraphs"),
        (whole(trailers=f"And so on.\n{TRAILERS}"), "text beside the trailers"),
        (whole(why=f"{WHY}\nLong: many"), "trailers in two paragraphs"),
        (whole(why=WHY + "  "), "line 3 of its message, .*  ', would come back as"),
        (whole("…"), "no name for a file"),
    ],
)
def test_a_message_that_a_patch_cannot_keep_is_named(
    repository: Repository, text: str, expected: str
) -> None:
    made = commit_of(repository, text)
    if not expected:
        assert formatting.exported_patches(repository, "series~1", made)
        return
    with pytest.raises(SeriesError, match=expected):
        formatting.exported_patches(repository, "series~1", made)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (WHY, f"{WHY}\ndiff --git a/x b/x\nmore", r"\.patch:8: .*'diff --git a/x b/x'"),
        (WHY, f"{WHY}\n--- a.c\nmore", r"\.patch:8: .*'--- a\.c'"),
        (WHY, f"{WHY}\n---\nMore.", r"\.patch:8: .*'---'.* hides"),
        ("Pending\nFeature", "Pending\n\nFeature", r"\.patch:\d+: trailers in two paragraphs"),
    ],
)
def test_a_patch_whose_message_hides_something_is_named(
    make_series: Make, old: str, new: str, expected: str
) -> None:
    folder = make_series(("Change line 20", {"setup.py": "x\n"}))
    path = folder / "Change-line-20.patch"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(SeriesError, match=expected):
        model.read(folder)
