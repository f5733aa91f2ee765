"""What the documents name is there: linked files and headings, commands and their options, paths, tests, patches."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote

import nox.registry
import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

from scripts import __main__
from scripts.base import layout
from scripts.series import model
from scripts.source import matrix

ROOT = Path(__file__).resolve().parents[2]
SERIES = [ROOT / one.table.series for one in matrix.load(layout.MATRIX).each()]
WRITTEN = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
DOCUMENTS = [path for path in WRITTEN if path.name != "CHANGES.md"]  # that one is rendered from the patches
# Sessions of the noxfile that run pytest and linters: their arguments are those programs'.
NOT_COMMANDS = {"tests", "check"}
OWN_PATH = re.compile(r"(?:\.ci|\.github|docs|patches|scripts|tests)/[\w./-]*")
PLACEHOLDER = re.compile(r"/[A-Z]+(\.|$)")  # tests/guards/FILE.py


@cache
def tokens(path: Path) -> tuple[Token, ...]:
    """A document's blocks, and what is inside of paragraphs, headings and cells, in one row."""
    blocks = MarkdownIt("commonmark").enable("table").parse(path.read_text(encoding="utf-8"))
    return tuple(token for block in blocks for token in (block, *(block.children or ())))


def inline_code(path: Path) -> list[str]:
    return [token.content for token in tokens(path) if token.type == "code_inline"]


@cache
def anchors(path: Path) -> frozenset[str]:
    """The anchors that GitHub gives a document's headings."""
    slugs: list[str] = []
    blocks = MarkdownIt("commonmark").parse(path.read_text(encoding="utf-8"))
    for opening, heading in pairwise(blocks):
        if opening.type == "heading_open":
            text = "".join(t.content for t in heading.children or () if t.type in ("text", "code_inline"))
            slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            earlier = slugs.count(slug)
            slugs.append(slug)
            if earlier:
                slugs.append(f"{slug}-{earlier}")
    return frozenset(slugs)


def links(path: Path) -> Iterator[str]:
    for token in tokens(path):
        target = token.attrGet("href") if token.type == "link_open" else token.attrGet("src")
        if target and not re.match(r"[a-z]+:", str(target)):
            yield unquote(str(target))


def named(paths: list[Path]) -> list[object]:
    return [pytest.param(path, id=path.relative_to(ROOT).as_posix()) for path in paths]


@pytest.mark.parametrize("path", named(WRITTEN))
def test_links_and_anchors_resolve(path: Path) -> None:
    for link in links(path):
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.exists(), f"{link}: no such file"
        if anchor:
            assert anchor in anchors(target), (
                f"{link}: {target.name} has {', '.join(sorted(anchors(target)))}"
            )


def test_every_page_of_docs_is_linked_from_the_readme() -> None:
    linked = {(ROOT / link.partition("#")[0]).resolve() for link in links(ROOT / "README.md")}
    assert set(WRITTEN) - linked == {ROOT / "README.md"}


@cache
def sessions() -> frozenset[str]:
    spec = importlib.util.spec_from_file_location("noxfile_of_docs", ROOT / "noxfile.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    return frozenset(nox.registry.get())


def command_lines(path: Path) -> Iterator[list[str]]:
    """Each ``nox -s NAME …`` of the blocks and the text: its words from NAME on."""
    blocks = [token.content for token in tokens(path) if token.type == "fence" and token.info == ""]
    for text in [*blocks, *inline_code(path)]:
        for line in text.splitlines():
            for part in re.split(r" && | \| ", line):
                words = shlex.split(part.strip(), comments=True) if "nox -s" in part else []
                if words[:2] == ["nox", "-s"] and len(words) > 2:
                    yield words[2:]


def options_of(command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> set[str]:
    monkeypatch.setenv("COLUMNS", "1000")  # an option is not broken at its hyphen
    with pytest.raises(SystemExit):
        __main__.main_inner([command, "--help"])
    return set(re.findall(r"--[a-z][a-z-]*", capsys.readouterr().out))


@pytest.mark.parametrize("path", named(DOCUMENTS))
def test_commands_and_their_options_exist(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for session, *arguments in command_lines(path):
        if session == "NAME":
            continue
        assert session in sessions(), f"nox -s {session}"
        if not arguments or session in NOT_COMMANDS:
            continue
        assert arguments[0] == "--", f"nox -s {session} {arguments[0]}: nox would take that for itself"
        known = options_of(session, capsys, monkeypatch)
        asked = {word.partition("=")[0] for word in arguments[1:] if word.startswith("--")}
        assert asked <= known, f"nox -s {session} has no {', '.join(sorted(asked - known))}"


def test_commands_are_found_in_blocks_and_in_text() -> None:
    assert ["build", "--", "--arch", "89"] in [*command_lines(ROOT / "README.md")]  # a cell of a table
    assert ["export"] in [*command_lines(ROOT / "CONTRIBUTING.md")]  # the first of several in a line


@pytest.mark.parametrize("path", named(DOCUMENTS))
def test_paths_of_this_repository_exist(path: Path) -> None:
    for code in inline_code(path):
        if OWN_PATH.fullmatch(code) and not PLACEHOLDER.search(code):
            assert (ROOT / code).exists(), code


@pytest.mark.parametrize("path", named(DOCUMENTS))
def test_constants_and_variables_are_read_by_something(path: Path) -> None:
    folders = (ROOT / "scripts", ROOT / "tests/wheel4")  # which sets what flash_attn.cute reads
    own = [p for p in (ROOT / "fork").rglob("*") if p.is_file() and p.suffix != ".pyc"]
    sources = [*(p for f in folders for p in f.rglob("*.py")), *own, *layout.PATCHES.rglob("*.patch")]
    text = "".join(p.read_text(encoding="utf-8") for p in sources)
    for code in inline_code(path):
        if re.fullmatch(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+", code):
            assert code in text, code


@pytest.mark.parametrize("path", named(DOCUMENTS))
def test_tests_that_prove_something_exist(path: Path) -> None:
    suites = "".join(p.read_text(encoding="utf-8") for p in (ROOT / "tests").rglob("test_*.py"))
    for code in inline_code(path):
        # test_flash_attn… are upstream's
        if re.fullmatch(r"test_\w+", code) and not code.startswith("test_flash_attn"):
            assert f"def {code}(" in suites, code


@pytest.mark.parametrize("path", named(DOCUMENTS))
def test_patches_are_named_by_their_subjects(path: Path) -> None:
    subjects = [p.subject for folder in SERIES for p in model.read(folder).patches]
    text = "".join(
        {"text": token.content, "softbreak": " ", "code_inline": "`", "inline": "\n"}.get(token.type, "")
        for token in tokens(path)
    )
    for quoted in re.findall(r'"([A-Z][^"`\n]*)"', text):
        assert any(s == quoted or s.startswith(quoted.removesuffix(" …") + " ") for s in subjects), quoted


@pytest.mark.parametrize("path", named(DOCUMENTS))
def test_examples_in_python_can_be_read(path: Path) -> None:
    for token in tokens(path):
        if token.type == "fence" and token.info == "python":
            ast.parse(token.content)
