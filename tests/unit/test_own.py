"""Our own files beside upstream's: into a tree, carried into one that is there, back from it, and through a rebase."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scripts.base import layout
from scripts.base.errors import ActionNeeded, SeriesError
from scripts.base.git import Repository
from scripts.series import affected_kernels, changes, export, ground, lint, model, own, tree
from scripts.series.rebase import Rebase
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


def test_what_programs_leave_is_no_part_and_a_link_is_refused(place: Path) -> None:
    write_files(place / "fork", {"flash_attn/__pycache__/fork.pyc": "x", "flash_attn/.fork.py.swp": "x"})
    assert held(applied(place).root).keys() == {*BASE, *OWN}
    (place / "fork/flash_attn/other.py").symlink_to(place / "fork" / MODULE)
    with pytest.raises(SeriesError, match=r"other\.py is no ordinary file"):
        applied(place)


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
    write_files(root, {HEADER: "// called\n", "setup.py": (root / "setup.py").read_text() + "call\n"})
    commit(root, "-m", message("Call it", guard="symbol call in setup.py"))
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
    with pytest.raises(SeriesError, match=rf"and not to the same: {HEADER}\."):
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
    user(root, "checkout", "--", "setup.py")
    write_files(root, {"flash_attn/fork.py~": "an editor's copy\n"})
    with pytest.raises(SeriesError, match=r"files that no build reads .*: flash_attn/fork\.py~"):
        exported(place)
    assert held(place / "fork") == OWN


def test_an_export_that_was_killed_before_our_files_were_written_is_repeated(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = applied(place).root
    write_files(root, {HEADER: "// called\n", "setup.py": (root / "setup.py").read_text() + "call\n"})
    commit(root, "-m", message("Call it", guard="symbol call in setup.py"))

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as during:
        during.setattr(own, "write_back", killed)
        with pytest.raises(KeyboardInterrupt):
            exported(place)
    assert len(model.read(place / "patches").patches) == 3
    assert exported(place).own_written == (HEADER,)
    assert exported(place, check=True) == export.Exported((), ())


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
    release = Release(pin, checkout_of(BASE | files), "a fixture")
    ours = model.read(root / "patches/flash-attn", root / "fork/flash-attn")
    return Rebase(root, root / "build/rebase").start(loaded, ours, checkout_of(BASE), release)


def test_a_rebase_leaves_our_files_as_they_are(repository: Path) -> None:
    before = held(repository / "fork")
    start(repository, {"setup.py": "# new\n" + BASE["setup.py"]})
    assert matrix.load(repository / "wheel_matrix.toml").upstream.version == "9.9"
    assert held(repository / "fork") == before


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


def test_our_files_that_changed_meanwhile_are_not_overwritten_and_abort_puts_back(repository: Path) -> None:
    before = held(repository)
    with pytest.raises(ActionNeeded):
        start(repository, CONFLICT)
    source = repository / "build/rebase/source"
    write_files(
        source,
        {"setup.py": EDITED_SETUP.replace("line 30\n", "line thirty\n"), HEADER: "// mine\n"},
    )
    write_files(repository / "fork/flash-attn", {HEADER: "// meanwhile\n"})
    rebase = Rebase(repository, repository / "build/rebase")
    with pytest.raises(ActionNeeded, match=rf"fork/flash-attn changed since the rebase began: {HEADER}"):
        rebase.proceed()
    write_files(repository / "fork/flash-attn", {HEADER: OWN[HEADER]})
    rebase.abort()
    shutil.rmtree(repository / "build")
    assert held(repository) == before


def test_an_abort_takes_back_our_files_that_the_end_wrote(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = held(repository)
    with pytest.raises(ActionNeeded):
        start(repository, CONFLICT)
    source = repository / "build/rebase/source"
    write_files(
        source,
        {
            "setup.py": EDITED_SETUP.replace("line 30\n", "line thirty\n"),
            HEADER: "// mine\n",
            MODULE: GONE,
            "flash_attn/fork_new.py": "new = 1\n",
        },
    )
    user(source, "add", "flash_attn/fork_new.py")

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    rebase = Rebase(repository, repository / "build/rebase")
    with monkeypatch.context() as during:
        during.setattr(affected_kernels, "kernels", killed)
        with pytest.raises(KeyboardInterrupt):
            rebase.proceed()
    assert held(repository / "fork/flash-attn") == {
        HEADER: "// mine\n",
        "flash_attn/fork_new.py": "new = 1\n",
    }
    assert "are as they were" in rebase.abort()
    shutil.rmtree(repository / "build")
    assert held(repository) == before


def test_a_table_that_changed_after_a_kill_is_told_as_it_is(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a rebase writes from copies that it took before."""

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as during:
        during.setattr(affected_kernels, "kernels", killed)
        with pytest.raises(KeyboardInterrupt):
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
    with pytest.raises(ActionNeeded):
        start(repository, CONFLICT)
    source = repository / "build/rebase/source"
    resolved = {
        "setup.py": EDITED_SETUP.replace("line 30\n", "line thirty\n"),
        "flash_attn/fork_new.py": "new = 1\n",
    }
    write_files(source, resolved)
    user(source, "add", "flash_attn/fork_new.py")
    rebase = Rebase(repository, repository / "build/rebase")
    with pytest.raises(ActionNeeded, match=r"flash_attn/fork_new\.py:1: belongs to no feature; name it in"):
        rebase.proceed()
    table.write_text(table.read_text().replace(f"'{MODULE}'", "'flash_attn/fork*'"))
    assert rebase.proceed().own == ("flash_attn/fork_new.py",)
    assert "`flash_attn/fork*`" in (repository / "CHANGES.md").read_text()


def test_a_release_that_has_a_file_of_ours_is_refused_by_its_name(repository: Path) -> None:
    with pytest.raises(SeriesError, match=rf"{HEADER}: upstream has a file {HEADER} too"):
        start(repository, {HEADER: "theirs\n"})
    assert not (repository / "build/rebase").exists()
