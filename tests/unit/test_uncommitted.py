from __future__ import annotations

from collections.abc import Callable

import pytest

from scripts.base.errors import SeriesError
from scripts.base.git import Repository
from scripts.series import export, model, tree, uncommitted
from tests.unit.conftest import EDITED_SETUP, PIN, apply, write_files


def flagged(flag: str) -> Callable[[Repository], None]:
    """A change of a file that git was told not to look at."""

    def act(repository: Repository) -> None:
        repository.run("update-index", flag, "setup.py")
        write_files(repository.root, {"setup.py": "mine\n"})

    return act


def excluded(repository: Repository) -> None:
    write_files(repository.root, {".git/info/exclude": "*.h\n", "csrc/flash_attn/src/mine.h": "mine\n"})


HIDDEN = [
    (flagged("--assume-unchanged"), " M setup.py"),
    (flagged("--skip-worktree"), " M setup.py"),
    (excluded, "?? csrc/flash_attn/src/mine.h"),
]


@pytest.mark.parametrize(("hide", "line"), HIDDEN)
def test_what_git_status_does_not_show_is_no_clean_tree(
    series: model.Series, applied: tree.Tree, hide: Callable[[Repository], None], line: str
) -> None:
    repository = Repository(applied.root, SeriesError)
    hide(repository)
    assert repository.run("status", "--porcelain") == "", "or the case is none"
    assert uncommitted.differences(repository) == [line]
    assert tree.reusable(series, PIN, applied.root) is None
    with pytest.raises(SeriesError, match=r"in no patch:\n.*(setup\.py|mine\.h)\ngit status does not show"):
        apply(series, applied.root)
    with pytest.raises(SeriesError, match=r"uncommitted changes:\n.*(setup\.py|mine\.h)"):
        export.export(applied.root, series.folder)


@pytest.mark.parametrize(("hide", "line"), HIDDEN)
def test_what_git_status_does_not_show_outlives_a_reset(
    series: model.Series, applied: tree.Tree, hide: Callable[[Repository], None], line: str
) -> None:
    hide(Repository(applied.root, SeriesError))
    name = line[3:]
    mine = (applied.root / name).read_bytes()
    apply(series, applied.root, reset=True)
    repository = Repository(applied.root, SeriesError)
    kept = repository.run("for-each-ref", "--format=%(refname)", "refs/replaced", writes=False).split()
    assert repository.read(f"{next(ref for ref in kept if 'uncommitted' in ref)}:{name}") == mine
    assert uncommitted.differences(repository) == []


def test_a_name_that_is_no_text_is_told_all_the_same(applied: tree.Tree) -> None:
    excluded(Repository(applied.root, SeriesError))
    write_files(applied.root, {"csrc/flash_attn/src/\udcff.h": "mine\n"})
    told = uncommitted.changes(Repository(applied.root, SeriesError)).encode().decode()
    assert "?? csrc/flash_attn/src/\\udcff.h\n" in told


def test_files_are_compared_by_name_mode_and_bytes(applied: tree.Tree) -> None:
    root, repository = applied.root, Repository(applied.root, SeriesError)
    write_files(root, {"a link's target": "x\n", "é/ü.py": "x\n"})
    (root / "link").symlink_to("a link's target")
    (root / "to a folder").symlink_to("é")
    repository.run("add", "--all")
    repository.run("commit", "--quiet", "-m", "more")
    assert (root / "setup.py").read_text() == EDITED_SETUP
    assert uncommitted.changes(repository) == ""
    (root / "setup.py").chmod(0o755)
    (root / "link").unlink()
    (root / "link").symlink_to("elsewhere")
    (root / "é/ü.py").unlink()
    (root / "flash_attn/empty").mkdir()
    assert uncommitted.differences(repository) == [" M link", " M setup.py", " D é/ü.py"]
