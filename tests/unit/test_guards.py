from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.base import layout
from scripts.base.errors import GuardError
from scripts.series import guards, model, tree
from tests.unit.conftest import BASE, PIN, Make, checkout_of, write_guard_test

HEADER = "csrc/flash_attn/src/fork.h"
CODE = "#pragma once\n#define FORK 1  // FORK_OLD\n/* gone */\ninline int fork( int  a ) { return a; }\ninline int fork(int a, int b);\n"


def outcomes(
    make_series: Make, tmp_path: Path, *edits: tuple[str, dict[str, str], str]
) -> list[guards.Outcome]:
    whole = model.read(make_series(*edits))
    return guards.run(whole, tree.apply(whole, PIN, checkout_of(BASE), tmp_path / "source"))


@pytest.mark.parametrize(
    "guard",
    [
        f"symbol fork in {HEADER}",
        f"macro FORK in {HEADER}",
        f"signature int fork(int a) in {HEADER}",
        f"signature 2 x inline int fork(int a in {HEADER}",
        "symbol twenty in setup.py",
    ],
)
def test_a_guard_fails_without_its_patch_and_passes_with_it(
    make_series: Make, tmp_path: Path, guard: str
) -> None:
    edit = (
        "Add a header",
        {HEADER: CODE, "setup.py": BASE["setup.py"].replace("line 20", "twenty = 20")},
        guard,
    )
    (found,) = outcomes(make_series, tmp_path, edit)
    assert found.discriminates
    guards.require([found])


@pytest.mark.parametrize(
    "guard",
    [
        f"symbol gone in {HEADER}",
        f"macro FORK_OLD in {HEADER}",
        f"signature 3 x fork(int a in {HEADER}",
        "symbol x in absent.h",
    ],
)
def test_what_stands_in_a_comment_or_too_few_times_is_not_there(
    make_series: Make, tmp_path: Path, guard: str
) -> None:
    found = outcomes(make_series, tmp_path, ("Add a header", {HEADER: CODE}, guard))
    with pytest.raises(GuardError, match=r"Add-a-header\.patch: guard .* fails on the tree with the patch"):
        guards.require(found)


def test_a_guard_on_a_file_that_is_not_there_says_so(make_series: Make, tmp_path: Path) -> None:
    found = outcomes(
        make_series, tmp_path, ("Add a header", {HEADER: CODE}, "symbol fork in csrc/flash_attn/src/fork.hp")
    )
    with pytest.raises(GuardError, match=r"that has no file csrc/flash_attn/src/fork\.hp"):
        guards.require(found)


def test_a_guard_that_upstream_passes_guards_nothing(make_series: Make, tmp_path: Path) -> None:
    found = outcomes(make_series, tmp_path, ("Add a header", {HEADER: CODE}, "symbol line in setup.py"))
    with pytest.raises(GuardError, match="passes on the tree without the patch"):
        guards.require(found)


def test_a_later_patch_that_undoes_an_earlier_one_is_told(make_series: Make, tmp_path: Path) -> None:
    first = ("Add a header", {HEADER: CODE}, f"macro FORK in {HEADER}")
    second = (
        "Drop the macro",
        {HEADER: CODE.replace("#define FORK 1", "#define OTHER 1")},
        f"macro OTHER in {HEADER}",
    )
    with pytest.raises(
        GuardError, match=r"Add-a-header.* fails on the whole series: a later patch undoes it"
    ):
        guards.require(outcomes(make_series, tmp_path, first, second))


def test_a_named_test_sees_the_tree(
    make_series: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "repository"
    write_guard_test(repository, f"def test_header(tree):\n    assert (tree / '{HEADER}').is_file()\n")
    monkeypatch.setattr(layout, "ROOT", repository)
    (found,) = outcomes(
        make_series, tmp_path, ("Add a header", {HEADER: CODE}, "test tests/guards/test_it.py::test_header")
    )
    assert found.discriminates
    with pytest.raises(GuardError, match="pytest exited with"):
        outcomes(
            make_series,
            tmp_path,
            ("Add a header", {HEADER: CODE}, "test tests/guards/test_it.py::test_absent"),
        )
    bare = tmp_path / "python"  # one without packages
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')
    bare.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(bare))
    with pytest.raises(GuardError, match=r"pytest exited with 1\.\n.*No module named pytest"):
        outcomes(
            make_series,
            tmp_path,
            ("Add a header", {HEADER: CODE}, "test tests/guards/test_it.py::test_header"),
        )


def test_a_compiled_symbol_is_looked_for_in_the_object(make_series: Make, tmp_path: Path) -> None:
    source = "csrc/flash_attn/api.cpp"

    def compiler(tree: Path, path: str) -> Path:
        subprocess.run(["g++", "-c", str(tree / path), "-o", str(tree / "out.o")], check=True)
        return tree / "out.o"

    base = BASE | {source: "int api() { return 0; }\n"}
    edit = ("Add a function", {source: base[source] + "int fork_answer() { return 42; } // fork_comment\n"})
    for name, holds in (("fork_answer", True), ("fork_comment", False), ("api", False)):
        whole = model.read(make_series((*edit, f"compiled {name} in {source}"), base=base))
        applied = tree.apply(whole, PIN, checkout_of(base), tmp_path / "source")
        (found,) = guards.run(whole, applied, compiler)
        assert found.discriminates == holds
    with pytest.raises(GuardError, match="needs a compiler"):
        guards.run(whole, applied)


def test_a_patch_without_a_guard_is_refused(make_series: Make, tmp_path: Path) -> None:
    folder = make_series(("Add a header", {HEADER: CODE}))
    path = folder / "Add-a-header.patch"
    path.write_text(path.read_text().replace(f"Guard: symbol fork in {HEADER}\n", ""))
    whole = model.read(folder)
    applied = tree.apply(whole, PIN, checkout_of(BASE), tmp_path / "source")
    with pytest.raises(GuardError, match=r"Add-a-header\.patch declares no guard"):
        guards.run(whole, applied)


@pytest.mark.parametrize(
    "text",
    [
        "symbol root in ../../etc/passwd",
        "symbol root in /etc/passwd",
        "signature 0 x fork in a.h",
        "test tests/guards/test_absent.py::test_x",
    ],
)
def test_a_guard_that_can_guard_nothing_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"no path within|always there|there is no"):
        guards.parse(text)


@given(
    st.sampled_from(["symbol", "macro"]),
    st.from_regex(r"[A-Za-z_]\w{0,9}", fullmatch=True),
    st.from_regex(r"\w{1,9}(/\w{1,9}){0,3}\.h", fullmatch=True),
)
def test_a_guard_reads_back_as_it_is_written(kind: str, name: str, path: str) -> None:
    assert str(guards.parse(f"{kind} {name} in {path}")) == f"{kind} {name} in {path}"


@given(st.integers(2, 9), st.from_regex(r"[\w(){};]+( [\w(){};]+){0,3}", fullmatch=True))
def test_a_signature_reads_back_as_it_is_written(times: int, code: str) -> None:
    text = f"signature {times} x {code} in a.h"
    assert str(guards.parse(text)) == text


def test_a_failing_guard_tells_how_to_run_it_alone_and_what_its_test_said() -> None:
    guard = guards.parse("symbol fork in setup.py")
    told = guards.Outcome("A.patch", guard, False, False, False, output="    assert 1 == 2")
    with pytest.raises(
        GuardError, match=r"(?s)lost what it guards\. Alone: nox -s guards -- A\n    assert 1 == 2"
    ):
        guards.require([told])
    with pytest.raises(GuardError, match="nox -s guards -- --upstream flash-attn-4 A"):
        guards.require([told], "flash-attn-4")


def test_the_guards_of_one_patch_can_be_run_alone(make_series: Make, tmp_path: Path) -> None:
    one, two = (
        (f"Add {name}", {f"{name}.py": f"{name} = 1\n"}, f"symbol {name} in {name}.py")
        for name in ("first", "second")
    )
    whole = model.read(make_series(one, two))
    applied = tree.apply(whole, PIN, checkout_of(BASE), tmp_path / "source")
    (found,) = guards.run(whole, applied, only=1)
    assert found.patch == whole.patches[1].name
    assert found.discriminates
