"""Our own files beside upstream's: into a tree, carried into one that is there, back from it, and through a rebase."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scripts.base import files, layout
from scripts.base.errors import ActionNeeded, SeriesError
from scripts.base.git import Repository
from scripts.commands import rebase
from scripts.series import affected_kernels, changes, edit, export, ground, lint, model, own, tree
from scripts.series.rebase.steps import Rebase
from scripts.source import matrix
from scripts.source.releases import Release
from tests.unit.conftest import (
    BASE,
    EDITED_SETUP,
    GONE,
    PIN,
    Make,
    checkout_of,
    commit,
    message,
    user,
    write_files,
    write_guard_test,
)

HEADER, MODULE = "csrc/flash_attn/src/fork.h", "flash_attn/fork.py"
OWN = {HEADER: "#pragma once\n", MODULE: "a = 1\n"}
HOOK = ("Change line 20", {"setup.py": EDITED_SETUP}, "symbol twenty in setup.py")
LAST = (
    "Change line 30",
    {"setup.py": EDITED_SETUP.replace("line 30\n", "line thirty\n")},
    "symbol thirty in setup.py",
)


@pytest.fixture
def place(make_series: Make, tmp_path: Path) -> Path:
    """A repository with two hooks and two files of its own."""
    make_series(HOOK, LAST)
    write_files(tmp_path / "fork", OWN)
    return tmp_path


def series(place: Path) -> model.Series:
    return model.read(place / "patches", place / "fork")


def applied(place: Path, root: str = "source", **options: bool) -> tree.Tree:
    return tree.apply(series(place), PIN, checkout_of(BASE), place / root, **options)


def exported(place: Path, *, check: bool = False) -> export.Exported:
    return export.export(place / "source", place / "patches", place / "fork", check=check)


def held(folder: Path) -> dict[str, str]:
    paths = [path for path in folder.rglob("*") if path.is_file() and ".git" not in path.parts]
    return {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def commit_a_hook(root: Path, own: Mapping[str, str] = MappingProxyType({})) -> None:
    """In a tree, with files of ours in the same commit."""
    write_files(root, {"setup.py": (root / "setup.py").read_text() + "call\n", **own})
    commit(root, "-m", message("Call it", guard="symbol call in setup.py"))


def test_a_tree_is_upstream_then_our_files_then_the_patches(place: Path) -> None:
    made = applied(place)
    repository = Repository(made.root, SeriesError)
    subjects = user(made.root, "log", "--reverse", "--format=%s").splitlines()
    assert subjects == [f"{PIN.distribution} {PIN.version}", own.COMMIT, "Change line 20", "Change line 30"]
    assert repository.resolve("base") == made.base
    assert repository.resolve("upstream") == ground.upstream_of(repository, made.commit)
    assert sorted(repository.files("upstream")) == sorted(BASE)
    assert held(made.root) == {**BASE, **OWN, **LAST[1]}
    assert ground.base_of(PIN, checkout_of(BASE), series(place).own) == made.base


def test_the_digest_follows_our_files(place: Path) -> None:
    before = applied(place)
    write_files(place / "fork", {HEADER: "#pragma once\nint a;\n"})
    after = applied(place)
    assert before.digest != after.digest
    assert before.kernel_sources != after.kernel_sources


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"setup.py": ""}, r"fork/setup\.py: upstream has a file setup\.py too"),
        ({"notes.txt": ""}, r"fork/notes\.txt is no file that a build reads"),
        ({"csrc/cutlass/a.h": ""}, r"fork/csrc/cutlass/a\.h is no file that a build reads"),
        (
            {"flash_attn/__init__.py/x.py": ""},
            r"fork/flash_attn/__init__\.py/x\.py: of flash_attn/__init__\.py and .*, one is upstream's",
        ),
        ({"flash_attn/a\nb.py": ""}, r"fork/flash_attn/'a\\nb\.py': a name is of printable UTF-8"),
        ({"flash_attn/\udcff.py": ""}, r"fork/flash_attn/'\\udcff\.py': a name is of printable UTF-8"),
    ],
)
@pytest.mark.parametrize("before", [False, True])
def test_a_file_that_is_none_of_ours_is_named(
    place: Path, files: dict[str, str], said: str, before: bool
) -> None:
    if before:  # then it would be carried
        applied(place)
    write_files(place / "fork", files)
    with pytest.raises(SeriesError, match=said):
        applied(place)
    assert (place / "source").exists() == before


def test_git_changes_no_line_end_of_our_files(tmp_path: Path) -> None:
    root = tmp_path / "repository"
    write_files(root, {f"fork/flash-attn/{name}": text for name, text in OWN.items()})
    shutil.copyfile(layout.ROOT / ".gitattributes", root / ".gitattributes")
    user(root, "init", "--quiet")
    commit(root, "-m", "state")
    user(tmp_path, "clone", "--quiet", "--config=core.autocrlf=true", str(root), "clone")
    there, here = (own.read(folder / "fork/flash-attn") for folder in (tmp_path / "clone", root))
    assert there.digests == here.digests


def test_what_programs_leave_is_no_part_and_a_link_is_refused(place: Path) -> None:
    write_files(place / "fork", {"flash_attn/__pycache__/fork.pyc": "x", "flash_attn/.fork.py.swp": "x"})
    (place / "fork" / MODULE).chmod(0o755)  # some file systems give every file that mode
    assert held(applied(place).root).keys() == {*BASE, *OWN}
    assert not user(place / "source", "ls-files", "--stage").count("100755")
    (place / "fork/flash_attn/other.py").symlink_to(place / "fork" / MODULE)
    with pytest.raises(SeriesError, match=r"other\.py is no ordinary file"):
        applied(place)
    told = [str(p) for p in lint.check(place / "patches", own=place / "fork")]
    assert len(told) == 1, "lint goes on"
    assert "other.py is no ordinary file" in told[0]


def test_a_file_of_ours_where_upstream_has_a_folder_is_named() -> None:
    with pytest.raises(SeriesError, match=r"fork/flash_attn/a\.py: of flash_attn/a\.py and"):
        own.require_no_others(own.OwnFiles(None, {"flash_attn/a.py": b""}), ["flash_attn/a.py/b.py"], None)


# --- carried ---


def test_a_change_is_carried_to_the_commits_that_a_new_tree_has(place: Path, notes: list[str]) -> None:
    first = applied(place)
    inode = (first.root / "setup.py").stat().st_ino
    write_files(place / "fork", {HEADER: "#pragma once\nint a;\n", "flash_attn/fork_b.py": 'b = "ä"\n'})
    (place / "fork" / MODULE).unlink()
    carried = applied(place)
    assert notes == [f"carried into {carried.root}: {HEADER}, {MODULE}, flash_attn/fork_b.py"]
    assert (carried.root / "setup.py").stat().st_ino == inode, "what stays is not written"
    assert user(carried.root, "status", "--porcelain") == ""
    assert user(carried.root, "symbolic-ref", "HEAD") == "refs/heads/series\n"
    anew = applied(place, "other")
    assert (carried.base, carried.commit, carried.digest) == (anew.base, anew.commit, anew.digest)
    assert held(carried.root) == held(anew.root)
    assert applied(place).commit == carried.commit


NAMES = st.sampled_from([HEADER, MODULE, "flash_attn/fork b.py", 'flash_attn/fork"c.py', "flash_attn/ü/d.py"])
CONTENTS = st.dictionaries(NAMES, st.binary(max_size=8))


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(before=CONTENTS, after=CONTENTS)
def test_whatever_changes_a_carried_tree_is_a_new_one(
    make_series: Make,
    tmp_path_factory: pytest.TempPathFactory,
    before: dict[str, bytes],
    after: dict[str, bytes],
) -> None:
    place = tmp_path_factory.mktemp("place")
    patches = model.read(make_series(HOOK, LAST, folder=place))
    made = [
        tree.apply(replace(patches, own=own.OwnFiles(None, contents)), PIN, checkout_of(BASE), place / root)
        for root, contents in (("source", before), ("source", after), ("anew", after))
    ]
    assert (made[1].base, made[1].commit, made[1].digest) == (made[2].base, made[2].commit, made[2].digest)


def test_a_patch_that_changed_too_makes_the_tree_anew(
    place: Path, make_series: Make, notes: list[str]
) -> None:
    applied(place)
    write_files(place / "fork", {HEADER: "// other\n"})
    make_series(HOOK)
    assert user(applied(place).root, "rev-list", "--count", "base..HEAD") == "1\n"
    assert not [note for note in notes if note.startswith("carried")]


def test_what_somebody_did_in_the_tree_is_not_carried_over(place: Path) -> None:
    root = applied(place).root
    write_files(root, {MODULE: "mine = 1\n"})
    write_files(place / "fork", {HEADER: "// other\n"})
    with pytest.raises(SeriesError, match=r"has changes that are in no patch:\n M flash_attn/fork\.py"):
        applied(place)
    assert (root / MODULE).read_text() == "mine = 1\n"


# --- written back ---


def test_a_change_in_the_tree_goes_back_committed_or_not(place: Path) -> None:
    root = applied(place).root
    patches = held(place / "patches")
    write_files(root, {HEADER: "// committed\n", "flash_attn/fork_new.py": "new = 1\n"})
    commit(root, "-m", "any words")
    write_files(root, {MODULE: "loose = 1\n"})
    done = exported(place)
    assert (done.written, done.removed) == ((), ())
    assert done.own_written == (HEADER, MODULE, "flash_attn/fork_new.py")
    assert held(place / "fork") == {
        HEADER: "// committed\n",
        MODULE: "loose = 1\n",
        "flash_attn/fork_new.py": "new = 1\n",
    }
    assert held(place / "patches") == patches
    head = Repository(root, SeriesError).resolve("HEAD")
    assert user(root, "status", "--porcelain") == ""
    assert (applied(place).commit, applied(place, "anew").commit) == (head, head)
    assert exported(place, check=True) == export.Exported((), ())


def test_a_file_that_is_deleted_goes_with_its_empty_folder(place: Path) -> None:
    root = applied(place).root
    (root / HEADER).unlink()
    assert exported(place).own_removed == (HEADER,)
    assert held(place / "fork") == {MODULE: OWN[MODULE]}
    assert not (place / "fork/csrc").exists()


def test_a_commit_of_both_is_told_apart(place: Path) -> None:
    root = applied(place).root
    commit_a_hook(root, {HEADER: "// called\n"})
    done = exported(place)
    assert (done.written, done.own_written) == (("Call-it.patch", "series"), (HEADER,))
    (added,) = model.read(place / "patches").patches[2:]
    assert [change.path for change in added.files] == ["setup.py"]
    assert applied(place).commit == applied(place, "anew").commit


def test_a_file_that_changed_on_both_sides_is_named_and_nothing_is_written(place: Path) -> None:
    root = applied(place).root
    write_files(root, {HEADER: "// here\n", MODULE: "b = 2\n"})
    write_files(place / "fork", {HEADER: "// there\n"})
    before = held(place)
    with pytest.raises(SeriesError, match=rf"and not to the same: {place}/fork/{HEADER}\."):
        exported(place)
    assert held(place) == before
    write_files(root, {HEADER: "// there\n"})
    assert exported(place).own_written == (MODULE,)


def test_what_changed_in_fork_alone_stays_and_is_carried_next(place: Path) -> None:
    root = applied(place).root
    write_files(root, {MODULE: "b = 2\n"})
    write_files(place / "fork", {HEADER: "// there\n"})
    with pytest.raises(SeriesError, match=rf"fork/{HEADER} differs, .*fork/{MODULE} differs"):
        exported(place, check=True)
    exported(place)
    assert held(place / "fork") == {HEADER: "// there\n", MODULE: "b = 2\n"}
    assert (applied(place).root / HEADER).read_text() == "// there\n"


def test_loose_changes_of_upstream_s_files_and_strange_files_are_refused(place: Path) -> None:
    root = applied(place).root
    write_files(root, {"setup.py": "other\n", MODULE: "b = 2\n"})
    with pytest.raises(SeriesError, match=r"has uncommitted changes:\n M setup\.py\nCommit"):
        exported(place)
    user(root, "add", "setup.py")
    write_files(root, {"setup.py": LAST[1]["setup.py"]})
    with pytest.raises(SeriesError, match=r"has uncommitted changes:\nM  setup\.py \(in the index alone\)"):
        exported(place)
    assert "other" in user(root, "diff", "--cached")
    user(root, "reset", "--quiet")
    user(root, "mv", HEADER, "csrc/flash_attn/src/fork_moved.h")  # in the index as it is in the tree
    assert exported(place).own_removed == (HEADER,)


STRANGE = {  # and a link's target, or the mode
    "flash_attn/fork.py~": "",
    "notes.txt": "",
    "flash_attn/.fork.py": "",
    "flash_attn/__pycache__/fork.py": "",
    "flash_attn/a\nb.py": "",
    "flash_attn/\udcff.py": "",
    "flash_attn/link.py": "fork.py",
    "flash_attn/outside.py": "/etc/hostname",
    "flash_attn/nowhere.py": "nowhere",
    MODULE: "executable",
}


def put_strange(root: Path, name: str) -> str:
    """What is then said of it."""
    (root / name).parent.mkdir(exist_ok=True)
    what = STRANGE[name]
    if what == "executable":
        (root / name).chmod(0o755)
    elif what:
        (root / name).symlink_to(what)
    else:
        write_files(root, {name: "x = 1\n"})
        return r"no (file that a )?build reads"
    return "is a link or may be executed"


@pytest.mark.parametrize("committed", [False, True])
def test_what_fork_cannot_hold_is_refused_by_its_name(place: Path, committed: bool) -> None:
    root = applied(place).root
    for name in STRANGE:
        said = put_strange(root, name)
        if committed:
            user(root, "add", "--all", "--force")
            user(root, "commit", "--quiet", "-m", "any words")
        with pytest.raises(SeriesError, match=said) as told:
            exported(place)
        assert own.shown(name) in str(told.value)
        assert held(place / "fork") == OWN
        user(root, "reset", "--quiet", "--hard", "HEAD~1" if committed else "HEAD")
        user(root, "clean", "-fdxq")
    assert exported(place) == export.Exported((), ())


@pytest.mark.parametrize(
    "steps", [(None, "file", "folder"), (None, "folder", "file"), ("folder", "file", "folder")]
)
def test_a_file_becomes_a_folder_and_back(place: Path, steps: tuple[str | None, ...]) -> None:
    name = "csrc/flash_attn/src/fork_new.h"
    forms = {"file": {name: "1\n"}, "folder": {f"{name}/a/b.h": "2\n", f"{name}/c.h": "3\n"}}
    write_files(place / "fork", forms[steps[0]] if steps[0] else {})
    root = applied(place).root
    for step in filter(None, steps[1:]):
        if (root / name).is_dir():
            shutil.rmtree(root / name)
            (place / "fork" / name / "empty").mkdir()  # git does not tell of it
        (root / name).unlink(missing_ok=True)
        write_files(root, forms[step])
        exported(place)
        assert held(place / "fork") == OWN | forms[step]
        assert applied(place).commit == applied(place, "anew").commit
        shutil.rmtree(place / "anew")


def test_what_stands_in_the_way_of_a_file_is_named_and_nothing_is_written(place: Path) -> None:
    name = "csrc/flash_attn/src/fork_new.h"
    write_files(place / "fork", {f"{name}/a.h": "1\n"})
    root = applied(place).root
    write_files(place / "fork", {f"{name}/.a.h.swp": "an editor's\n"})
    shutil.rmtree(root / name)
    write_files(root, {name: "2\n", "setup.py": "call\n", MODULE: "b = 2\n"})
    commit(root, "-m", message("Call it", guard="symbol call in setup.py"))
    before = held(place / "fork"), held(place / "patches")
    with pytest.raises(SeriesError, match=r"fork_new\.h/\.a\.h\.swp is where .*fork_new\.h is to be written"):
        exported(place)
    assert (held(place / "fork"), held(place / "patches")) == before
    shutil.rmtree(place / "fork" / name)
    write_files(place / "fork", {f"{name}/a.h": "1\n"})
    assert exported(place).own_written == (name, MODULE)


@pytest.mark.parametrize("name", [HEADER, MODULE])
def test_what_is_saved_in_fork_while_an_export_runs_is_not_overwritten(
    place: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    root = applied(place).root
    write_files(root, {HEADER: "// tree\n", MODULE: GONE})
    require_room = own.require_room

    def save(folder: Path, merged: own.Merged) -> None:
        require_room(folder, merged)
        write_files(place / "fork", {name: "meanwhile\n"})

    with monkeypatch.context() as during:
        during.setattr(own, "require_room", save)
        with pytest.raises(SeriesError, match=rf"{name} was saved while"):
            exported(place)
    assert held(place / "fork")[name] == "meanwhile\n"
    write_files(place / "fork", {name: OWN[name]})
    exported(place)
    assert held(place / "fork") == {HEADER: "// tree\n"}


def test_an_export_that_was_killed_is_repeated(
    place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Before each write, and before each command that changes a ref of the tree."""
    root = applied(place).root
    commit_a_hook(root, {HEADER: "// called\n"})
    write_files(root, {MODULE: "loose = 1\n"})
    left: Iterator[int] = iter(())

    def killed(step: Callable[..., Any], *, of_git: bool = False) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            if of_git and (arguments[0].root != copy / "source" or arguments[1] not in ("update-ref", "tag")):
                return step(*arguments, **named)
            if next(left) == 0:
                raise KeyboardInterrupt
            return step(*arguments, **named)

        return run

    for last in range(100):
        copy = shutil.copytree(place, tmp_path_factory.mktemp("killed") / "place", symlinks=True)
        left = iter(range(last, -100, -1))
        with monkeypatch.context() as during:
            during.setattr(Repository, "run", killed(Repository.run, of_git=True))
            during.setattr(files, "write_bytes", killed(files.write_bytes))
            during.setattr(files, "exchange", killed(files.exchange))
            try:
                exported(copy)
                break
            except KeyboardInterrupt:
                pass
        exported(copy)
        assert held(copy / "fork") == {HEADER: "// called\n", MODULE: "loose = 1\n"}, last
        assert len(model.read(copy / "patches").patches) == 3
        assert applied(copy).commit == Repository(copy / "source", SeriesError).resolve("HEAD")
    assert 5 < last < 99
    assert exported(copy, check=True) == export.Exported((), ())
    assert applied(copy).commit == applied(copy, "anew").commit


def test_an_exported_edit_is_taken_back(place: Path) -> None:
    root = applied(place).root
    before = held(place / "fork"), held(place / "patches")
    user(root, "tag", "mine")
    commit_a_hook(root, {HEADER: "// edited\n"})
    exported(place)
    user(root, "reset", "--quiet", "--hard", "mine")
    with pytest.raises(SeriesError, match="commits that are in no patch"):
        applied(place)
    exported(place)
    assert (held(place / "fork"), held(place / "patches")) == before
    assert applied(place).commit == applied(place, "anew").commit


def test_an_export_tidies_the_tree(place: Path) -> None:
    root = applied(place).root
    repository = Repository(root, SeriesError)
    write_files(root, {HEADER: "// edited\n"})
    exported(place)
    applied_to = repository.resolve("HEAD")
    assert repository.resolve("base") == repository.resolve("HEAD~2")
    assert repository.run("show", "base:" + HEADER) == "// edited"
    assert user(root, "diff", "--cached", "--name-only") == ""
    assert "restacked" not in user(root, "for-each-ref")
    assert applied(place).commit == applied_to


def test_a_message_keeps_its_encoding(place: Path) -> None:
    root = applied(place).root
    write_files(root, {"setup.py": (root / "setup.py").read_text() + "call\n"})
    said = message("Call it", guard="symbol call in setup.py").replace("Because", "Bécause")
    (place / "message").write_bytes(said.encode("latin-1"))
    user(root, "add", "--all")
    user(root, "-c", "i18n.commitEncoding=latin1", "commit", "--quiet", "-F", str(place / "message"))
    exported(place)
    assert "Bécause" in (place / "patches/Call-it.patch").read_text(encoding="utf-8")
    assert applied(place).commit == applied(place, "anew").commit


def test_our_files_alone_are_exported_where_there_is_no_patch(tmp_path: Path) -> None:
    write_files(tmp_path, {"patches/series": "", **{f"fork/{name}": text for name, text in OWN.items()}})
    root = applied(tmp_path).root
    write_files(root, {MODULE: "b = 2\n"})
    assert exported(tmp_path).own_written == (MODULE,)
    assert applied(tmp_path).commit == applied(tmp_path, "anew").commit


def test_a_check_tells_the_folder_and_the_next_command(place: Path) -> None:
    root = applied(place).root
    write_files(place / "fork", {MODULE: "b = 2\n"})
    assert exported(place).own_behind == (MODULE,)
    said = rf"^{place}/fork is not what .*: {place}/fork/{MODULE} differs\. Run nox -s apply\.$"
    with pytest.raises(SeriesError, match=said):
        exported(place, check=True)
    write_files(root, {MODULE: "c = 3\n"})
    with pytest.raises(SeriesError, match=r"differs\. Give both the same content, then nox -s export\.$"):
        exported(place, check=True)
    write_files(place / "fork", OWN)
    commit_a_hook(root)
    said = rf"^{place}/patches and {place}/fork are not what .* Run nox -s export, or nox -s apply\.$"
    with pytest.raises(SeriesError, match=said):
        exported(place, check=True)


def test_no_patch_is_edited_on_a_commit_of_our_files_alone(place: Path) -> None:
    root = applied(place).root
    write_files(root, {MODULE: "b = 2\n"})
    commit(root, "-m", "any words")
    editing = edit.Editing(root, place / "resolutions")
    with pytest.raises(SeriesError, match=r"any words changes our own files alone, .*nox -s export takes it"):
        editing.begin("1")
    exported(place)
    commit_a_hook(root)
    assert edit.usable(root, place / "patches"), "a patch that is in no file yet"
    assert editing.begin("Call").place == 2


# --- form ---


def test_a_patch_that_adds_a_file_and_a_file_in_a_wrong_place_are_told(
    place: Path, make_series: Make
) -> None:
    make_series(HOOK, ("Add a header", {"csrc/flash_attn/src/fork_b.h": "#pragma once\n"}))
    write_files(place / "fork", {"notes.txt": ""})
    (place / "fork.toml").write_text("[build]\ntitle = 'All'\nfiles = ['*']\n")
    told = [str(p).removeprefix(f"{place}/") for p in lint.check(place / "patches", own=place / "fork")]
    assert told == [
        f"fork/notes.txt:1: is read by no build ({own.where_ours(None)}); move or delete it.",
        f"patches/Add-a-header.patch:16: adds csrc/flash_attn/src/fork_b.h; our own files lie in {place.name}/fork.",
    ]


# --- a rebase ---


@pytest.fixture
def repository(place: Path) -> Path:
    """With a matrix and CHANGES.md, as this one has them."""
    root = place / "repository"
    root.mkdir()
    shutil.copytree(place / "patches", root / "patches/flash-attn")
    shutil.copytree(place / "patches", root / "patches/flash-attn-4")
    shutil.copytree(place / "fork", root / "fork/flash-attn")
    (root / "fork/flash-attn.toml").write_text("[build]\ntitle = 'All'\nfiles = ['*']\n")
    shutil.copyfile(layout.MATRIX, root / "wheel_matrix.toml")
    loaded = matrix.load(root / "wheel_matrix.toml")
    changes.write(root / "CHANGES.md", changes.render(loaded, root))
    (root / ".gitignore").write_text("/build/\n")
    user(root, "init", "--quiet")
    commit(root, "-m", "state")
    return root


CONFLICT = {"setup.py": BASE["setup.py"].replace("line 30\n", "line 30 of theirs\n")}


def start(root: Path, files: dict[str, str]) -> object:
    loaded = matrix.load(root / "wheel_matrix.toml")
    pin = loaded.upstream.model_copy(update={"version": "9.9", "sdist_sha256": "9" * 64})
    held_files = {name: text for name, text in (BASE | files).items() if text != GONE}
    release = Release(pin, checkout_of(held_files), "a fixture")
    ours = model.read(root / "patches/flash-attn", root / "fork/flash-attn")
    return Rebase(root, root / "build/rebase").start(loaded, ours, checkout_of(BASE), release)


def resolving(root: Path, resolved: dict[str, str], release: dict[str, str] = CONFLICT) -> Path:
    """The tree of a rebase that stopped, with a resolution that is staged."""
    with pytest.raises(ActionNeeded):
        start(root, release)
    source = root / "build/rebase/source"
    write_files(source, {"setup.py": EDITED_SETUP.replace("line 30\n", "line thirty\n"), **resolved})
    user(source, "add", "--all", "--force")
    return source


@contextmanager
def killed_at_its_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A rebase, after it has written our files and patches."""

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as during:
        during.setattr(affected_kernels, "kernels", killed)
        with pytest.raises(KeyboardInterrupt):
            yield


def test_a_rebase_leaves_our_files_as_they_are(repository: Path) -> None:
    before = held(repository / "fork")
    start(repository, {"setup.py": "# new\n" + BASE["setup.py"]})
    assert matrix.load(repository / "wheel_matrix.toml").upstream.version == "9.9"
    assert held(repository / "fork") == before


def test_our_files_that_are_not_committed_are_not_rebased_over(repository: Path) -> None:
    write_files(repository / "fork/flash-attn", {HEADER: "// mine\n"})
    with pytest.raises(SeriesError, match=rf"not committed:\n M fork/flash-attn/{HEADER}"):
        start(repository, {})


def test_what_a_resolution_changes_in_our_files_is_written_at_the_end(repository: Path) -> None:
    with pytest.raises(ActionNeeded):
        start(repository, CONFLICT)
    source = repository / "build/rebase/source"
    write_files(
        source,
        {
            "setup.py": EDITED_SETUP.replace("line 30\n", "line thirty of theirs\n"),
            HEADER: "// fits the new release\n",
            MODULE: GONE,
        },
    )
    report = Rebase(repository, repository / "build/rebase").proceed()
    assert report.own == (HEADER, MODULE)
    assert held(repository / "fork/flash-attn") == {HEADER: "// fits the new release\n"}
    moved = model.read(repository / "patches/flash-attn")
    assert [change.path for patch in moved.patches for change in patch.files] == ["setup.py", "setup.py"]


def test_what_a_rebase_tells_takes_all_of_it_back(repository: Path, notes: list[str]) -> None:
    before = held(repository)
    resolving(repository, {HEADER: "// mine\n", MODULE: GONE, "flash_attn/new/fork_new.py": "new = 1\n"})
    report = Rebase(repository, repository / "build/rebase").proceed()
    rebase._tell(report, matrix.load(repository / "wheel_matrix.toml"))
    own_lines = [note for note in notes if note.startswith("fork/flash-attn/")]
    assert [line.partition(":")[0] for line in own_lines] == [
        f"fork/flash-attn/{name}" for name in report.own
    ]
    (told,) = (note.removeprefix("to take it back: ") for note in notes if "to take it back" in note)
    (commit_it,) = (note for note in notes if "git commit" in note)
    assert "git add patches/flash-attn fork/flash-attn " in commit_it
    for line in told.replace(" upstream", "").split("; "):  # a submodule, which this repository has not
        user(repository, *line.split(" ")[1:])
    shutil.rmtree(repository / "build")
    assert held(repository) == before


def test_our_files_that_changed_meanwhile_are_not_overwritten_and_abort_puts_back(repository: Path) -> None:
    before = held(repository)
    resolving(repository, {HEADER: "// mine\n"})
    write_files(repository / "fork/flash-attn", {HEADER: "// meanwhile\n"})
    moving = Rebase(repository, repository / "build/rebase")
    with pytest.raises(ActionNeeded, match=rf"fork/flash-attn changed since the rebase began: {HEADER}"):
        moving.proceed()
    write_files(repository / "fork/flash-attn", {HEADER: OWN[HEADER]})
    moving.abort()
    shutil.rmtree(repository / "build")
    assert held(repository) == before


def test_an_abort_takes_back_our_files_that_the_end_wrote(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = held(repository)
    resolving(repository, {HEADER: "// mine\n", MODULE: GONE, "flash_attn/fork_new.py": "new = 1\n"})
    moving = Rebase(repository, repository / "build/rebase")
    with killed_at_its_end(monkeypatch):
        moving.proceed()
    assert held(repository / "fork/flash-attn") == {
        HEADER: "// mine\n",
        "flash_attn/fork_new.py": "new = 1\n",
    }
    assert "are as they were" in moving.abort()
    shutil.rmtree(repository / "build")
    assert held(repository) == before


def test_a_table_that_changed_after_a_kill_is_told_as_it_is(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a rebase writes from copies that it took before."""
    with killed_at_its_end(monkeypatch):
        start(repository, {"setup.py": "# new\n" + BASE["setup.py"]})
    table = repository / "fork/flash-attn.toml"
    table.write_text(table.read_text().replace("'All'", "'All of it'"))
    Rebase(repository, repository / "build/rebase").proceed()
    loaded = matrix.load(repository / "wheel_matrix.toml")
    changes.check(repository / "CHANGES.md", changes.render(loaded, repository))


def test_a_rebase_stops_where_the_whole_tree_lacks_what_a_feature_holds(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No patch's guard fails there; mended, in this repository or in the tree, the rebase ends."""
    monkeypatch.setattr(layout, "ROOT", repository)
    with (repository / "fork/flash-attn.toml").open("a") as table:
        table.write("[build.holds]\n'tests/guards/test_it.py::test_ours' = 'Read setup.py.'\n")
    write_guard_test(
        repository,
        "def test_ours(tree):\n"
        "    said = 'two' if 'line 2 of theirs' in (tree / 'setup.py').read_text() else 'pragma'\n"
        f"    assert said in (tree / '{HEADER}').read_text()\n",
    )
    commit(repository, "-m", "hold it")
    new = {"setup.py": BASE["setup.py"].replace("line 2\n", "line 2 of theirs\n")}
    with pytest.raises(
        ActionNeeded, match=r"fork/flash-attn\.toml:5: test .*test_ours fails .*Read setup\.py"
    ) as told:
        start(repository, new)
    assert "what 9.9 changed: git -C" in str(told.value)
    rebase = Rebase(repository, repository / "build/rebase")
    with pytest.raises(ActionNeeded, match="test_ours fails on the whole series"):
        rebase.proceed()
    source = repository / "build/rebase/source"
    write_files(source, {HEADER: "// two\n"})
    commit(source, "-m", "follow")
    assert rebase.proceed().own == (HEADER,)
    assert matrix.load(repository / "wheel_matrix.toml").upstream.version == "9.9"


def test_a_rebase_stops_where_a_file_of_ours_belongs_to_no_feature(repository: Path) -> None:
    """Lint would find it afterwards."""
    table = repository / "fork/flash-attn.toml"
    table.write_text(table.read_text().replace("'*'", f"'{HEADER}', '{MODULE}'"))
    commit(repository, "-m", "name them")
    resolving(repository, {"flash_attn/fork_new.py": "new = 1\n"})
    rebase = Rebase(repository, repository / "build/rebase")
    with pytest.raises(ActionNeeded, match=r"flash_attn/fork_new\.py:1: belongs to no feature; name it in"):
        rebase.proceed()
    table.write_text(table.read_text().replace(f"'{MODULE}'", "'flash_attn/fork*'"))
    assert rebase.proceed().own == ("flash_attn/fork_new.py",)
    assert "`flash_attn/fork*`" in (repository / "CHANGES.md").read_text()


def test_a_rebase_refuses_what_fork_cannot_hold_and_then_goes_on(repository: Path) -> None:
    source = resolving(repository, {})
    moving = Rebase(repository, repository / "build/rebase")
    for name in STRANGE:
        said = put_strange(source, name)
        user(source, "add", "--all", "--force")
        if (source / ".git/CHERRY_PICK_HEAD").exists():
            user(source, "-c", "core.editor=true", "cherry-pick", "--continue")
        else:
            user(source, "commit", "--quiet", "--amend", "--no-edit")
        with pytest.raises(ActionNeeded, match=said) as told:
            moving.proceed()
        assert own.shown(name) in str(told.value)
        user(source, "checkout", "--quiet", "HEAD~1", "--", MODULE)
        if name != MODULE:
            user(source, "rm", "--quiet", name)
        user(source, "commit", "--quiet", "--amend", "--no-edit")
    assert moving.proceed().own == ()


@pytest.mark.parametrize("end", ["goes on", "goes on after a kill", "abort"])
@pytest.mark.parametrize("way", ["file to folder", "folder to file"])
def test_a_file_becomes_a_folder_in_a_rebase(
    repository: Path, monkeypatch: pytest.MonkeyPatch, way: str, end: str
) -> None:
    name = "csrc/flash_attn/src/fork_new.h"
    forms = {name: "1\n"}, {f"{name}/a.h": "2\n", f"{name}/b.h": "3\n"}
    old, new = forms if way == "file to folder" else forms[::-1]
    write_files(repository / "fork/flash-attn", old)
    commit(repository, "-m", "one more")
    before = held(repository)
    source = resolving(repository, dict.fromkeys(old, GONE))
    if (source / name).is_dir():
        (source / name).rmdir()
    write_files(source, new)
    user(source, "add", "--all")
    moving = Rebase(repository, repository / "build/rebase")
    if end == "goes on":
        moving.proceed()
        assert held(repository / "fork/flash-attn") == OWN | new
        return
    with killed_at_its_end(monkeypatch):
        moving.proceed()
    aside = repository / "patches/.flash-attn.fa2-aside-1/flash-attn"  # of writes that were killed
    aside.mkdir(parents=True)
    write_files(repository / "fork/flash-attn", {f"{next(iter(new))}.part": "half\n"})
    if end == "goes on after a kill":
        assert set(moving.proceed().own) == {*old, *new}
        assert held(repository / "fork/flash-attn") == OWN | new
        return
    assert "are as they were" in moving.abort()
    assert not aside.exists()
    shutil.rmtree(repository / "build")
    assert held(repository) == before


def test_a_file_that_upstream_deleted_becomes_none_of_ours(repository: Path) -> None:
    with pytest.raises(ActionNeeded):
        start(repository, {"setup.py": GONE})
    moving = Rebase(repository, repository / "build/rebase")
    source = repository / "build/rebase/source"
    for _ in range(2):
        with pytest.raises(ActionNeeded, match=r"9\.9 has no setup\.py, which .* had; .*--skip --reason"):
            moving.proceed()
        if (source / ".git/CHERRY_PICK_HEAD").exists():
            user(source, "add", "--all")
            user(source, "-c", "core.editor=true", "cherry-pick", "--continue")
    write_files(source, {"flash_attn/__init__.py": "new place\n", "setup.py": GONE})
    commit(source, "--amend", "--no-edit")
    with pytest.raises(ActionNeeded, match=r"Change-line-30\.patch"):
        moving.proceed()
    user(source, "checkout", "--quiet", "CHERRY_PICK_HEAD", "--", "setup.py")
    user(source, "-c", "core.editor=true", "cherry-pick", "--continue")
    with pytest.raises(ActionNeeded, match=r"symbol twenty in setup\.py"):
        moving.skip("it has no place")
    assert user(source, "rev-list", "--count", "HEAD", "^HEAD~1") == "1\n"
    assert "setup.py" not in user(source, "ls-files"), "a commit of what was skipped is gone"
    assert held(repository / "fork/flash-attn") == OWN


def test_a_release_that_has_a_file_of_ours_is_refused_by_its_name(repository: Path) -> None:
    with pytest.raises(SeriesError, match=rf"{HEADER}: upstream has a file {HEADER} too"):
        start(repository, {HEADER: "theirs\n"})
    assert not (repository / "build/rebase").exists()
