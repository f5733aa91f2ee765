"""The series over the real release, from both sources."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from scripts.base.errors import SeriesError, UpstreamError
from scripts.base.git import Repository
from scripts.base.layout import cache
from scripts.series import formatting, model, tree
from scripts.source import build_inputs, matrix, matrix_tables, upstream

pytestmark = pytest.mark.network

ROOT = Path(__file__).resolve().parents[2]
PIN = matrix.load(ROOT / "wheel_matrix.toml").upstream


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> upstream.Checkout:
    return upstream.find(
        PIN, tmp_path_factory.mktemp("none") / "upstream", cache("sdist"), upstream.Source.AUTO
    )


@pytest.fixture(scope="module")
def applied(checkout: upstream.Checkout, tmp_path_factory: pytest.TempPathFactory) -> tree.Tree:
    return tree.apply(
        model.read(ROOT / "patches/flash-attn", ROOT / "fork/flash-attn"),
        PIN,
        checkout,
        tmp_path_factory.mktemp("applied") / "source",
    )


@pytest.fixture(scope="module")
def submodule(
    checkout: upstream.Checkout, tmp_path_factory: pytest.TempPathFactory
) -> tuple[matrix_tables.Upstream, Path]:
    """A clone like the submodule, made of the sdist's files, and a pin to its commits."""
    folder = tmp_path_factory.mktemp("clone") / "upstream"
    upstream.materialise(PIN, checkout, folder)
    cutlass = folder / build_inputs.CUTLASS
    for root in (cutlass, folder):
        repository = Repository.create(root, UpstreamError)
        if root == cutlass:  # as in git: files that the sdist lacks, and modes that it does not have
            (cutlass / "include/cutlass/more.inl").write_text("")
            (cutlass / "include/cutlass/cutlass.h").chmod(0o755)
        if root == folder:
            (folder / "hopper").mkdir()
            (folder / "hopper/not_needed.py").write_text("")
        repository.run("add", "--all", "--force")
        repository.run("commit", "--quiet", "-m", "release")
    heads = [Repository(root, UpstreamError).run("rev-parse", "HEAD").strip() for root in (folder, cutlass)]
    return PIN.model_copy(update={"commit": heads[0], "cutlass": heads[1]}), folder


def test_the_gitlink_is_the_pin() -> None:
    entry = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "--stage", "upstream"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert entry.split()[0] == "160000"
    assert PIN.commit in (entry.split()[1], matrix_tables.UNKNOWN)
    modules = (ROOT / ".gitmodules").read_text()
    assert "path = upstream" in modules
    assert PIN.repository in modules


def test_auto_says_why_it_takes_the_sdist(checkout: upstream.Checkout) -> None:
    assert checkout.source is upstream.Source.SDIST
    assert "not initialised" in checkout.why


@pytest.mark.path
def test_the_series_applies_exactly_and_exports_byte_for_byte(applied: tree.Tree) -> None:
    assert formatting.exported_patches(Repository(applied.root, SeriesError), applied.base) == {
        p.name: p.content for p in model.read(ROOT / "patches/flash-attn", ROOT / "fork/flash-attn").patches
    }


def test_git_and_sdist_give_the_same_commit(
    submodule: tuple[matrix_tables.Upstream, Path], applied: tree.Tree, tmp_path: Path
) -> None:
    pin, folder = submodule
    checkout = upstream.find(pin, folder, tmp_path, upstream.Source.AUTO)
    assert checkout.source is upstream.Source.GIT
    from_git = tree.apply(
        model.read(ROOT / "patches/flash-attn", ROOT / "fork/flash-attn"), pin, checkout, tmp_path / "source"
    )
    assert (from_git.base, from_git.commit) == (applied.base, applied.commit)


def test_local_changes_in_the_submodule_do_not_reach_a_build(
    submodule: tuple[matrix_tables.Upstream, Path], applied: tree.Tree, tmp_path: Path
) -> None:
    pin, folder = submodule
    changed = folder / "setup.py"
    before = changed.read_text()
    changed.write_text("raise SystemExit\n")
    try:
        upstream.materialise(pin, upstream.find(pin, folder, tmp_path, upstream.Source.GIT), tmp_path / "out")
    finally:
        changed.write_text(before)
    assert (tmp_path / "out/setup.py").read_text() == before


@pytest.mark.parametrize("which", ["commit", "cutlass"])
def test_a_checkout_at_another_commit_is_an_error_with_git_and_a_reason_with_auto(
    submodule: tuple[matrix_tables.Upstream, Path], which: str, tmp_path: Path
) -> None:
    pin, folder = submodule
    other = pin.model_copy(update={which: "0" * 40})
    with pytest.raises(UpstreamError, match=r"--source git: .* is at [0-9a-f]{40}, the pin is 0{40}"):
        upstream.find(other, folder, tmp_path, upstream.Source.GIT)
    found = upstream.find(other, folder, cache("sdist"), upstream.Source.AUTO)
    assert found.source is upstream.Source.SDIST
    assert "the pin is 000" in found.why


def test_a_submodule_that_is_not_initialised_is_an_error_with_git(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    (tmp_path / "upstream").mkdir()
    with pytest.raises(UpstreamError, match=r"not initialised .*git submodule update --init upstream"):
        upstream.find(PIN, tmp_path / "upstream", tmp_path / "cache", upstream.Source.GIT)


def test_every_prefix_of_the_series_leaves_a_tree_whose_headers_are_found(applied: tree.Tree) -> None:
    """A header that a patch includes comes with it, not with a later one."""
    repository = Repository(applied.root, SeriesError)
    for commit in repository.run("rev-list", "--reverse", f"{applied.base}..HEAD").split():
        files = set(repository.run("ls-tree", "-r", "--name-only", commit, "csrc/flash_attn").splitlines())
        for path in (p for p in files if p.endswith((".h", ".cpp"))):
            for included in re.findall(
                r'#include "(fork_\w+\.h)"', repository.run("show", f"{commit}:{path}")
            ):
                assert f"csrc/flash_attn/src/{included}" in files, f"{commit}: {path} includes {included}"
