from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.base import pip
from scripts.base.errors import UpstreamError
from scripts.base.git import Repository
from scripts.source import matrix, releases, upstream
from scripts.source.releases import find
from scripts.source.upstream import Source
from tests.unit.conftest import HEADER, ROOT, PackageIndex, write_files

MATRIX = matrix.load(ROOT / "wheel_matrix.toml")
VERSIONS = {"2.8.2": "a" * 64, "9.8.10": "b" * 64, "9.8.9": "c" * 64, "9.9.0rc1": "d" * 64, "1.0": None}


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package index on loopback that lists releases."""
    names = [(f"flash_attn-{v}.tar.gz", f"#sha256={h}" if h else "") for v, h in VERSIONS.items()]
    served = PackageIndex("".join(f'<a href="/files/{name}{anchor}">{name}</a>' for name, anchor in names))
    monkeypatch.setattr(pip.PipConfig, "read", classmethod(lambda cls: served.config))
    # Fetching is test_upstream's matter.
    monkeypatch.setattr(
        upstream,
        "from_sdist",
        lambda pin, cache, why: upstream.Checkout(Source.SDIST, why, lambda target: None, lambda name: b""),
    )
    yield
    served.close()


def test_the_index_lists_releases_in_order_with_their_hashes(index: None) -> None:
    order = ("1.0", "2.8.2", "9.8.9", "9.8.10", "9.9.0rc1")
    assert list(releases.on_index("flash-attn").items()) == [
        (version, VERSIONS[version]) for version in order
    ]


def test_latest_is_the_newest_that_is_final(index: None, tmp_path: Path) -> None:
    found = find(MATRIX, "latest", tmp_path / "upstream", tmp_path)
    assert (found.pin.version, found.pin.tag, found.pin.sdist_sha256) == ("9.8.10", "v9.8.10", "b" * 64)
    assert found.pin.commit == found.pin.cutlass == "unknown"
    assert "package index" in found.how


def test_a_known_release_is_taken_by_the_hash_in_the_matrix_not_the_index_s(
    index: None, tmp_path: Path
) -> None:
    assert (
        find(MATRIX, "2.8.2", tmp_path / "upstream", tmp_path).pin.sdist_sha256
        == MATRIX.releases["2.8.2"]
        != VERSIONS["2.8.2"]
    )


def test_the_pin_itself_keeps_its_commit(tmp_path: Path, index: None) -> None:
    assert find(MATRIX, MATRIX.upstream.version, tmp_path / "upstream", tmp_path).pin == MATRIX.upstream


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("7.7.7", r"has no sdist of flash-attn 7\.7\.7; the newest of its 5 are 1\.0, 2\.8\.2"),
        (
            "1.0",
            r"gives no sha256 for flash-attn 1\.0; put its hash into \[upstreams\.flash-attn\.releases\]",
        ),
        ("main", "'main' is no version, and tags and commits need the submodule"),
    ],
)
def test_what_cannot_be_had_is_an_error(index: None, tmp_path: Path, name: str, expected: str) -> None:
    with pytest.raises(UpstreamError, match=expected):
        find(MATRIX, name, tmp_path / "upstream", tmp_path)
    with pytest.raises(UpstreamError, match="--source git"):
        find(MATRIX, name, tmp_path / "upstream", tmp_path, Source.GIT)


@pytest.fixture
def submodule(tmp_path: Path) -> tuple[Path, Path, str]:
    """A clone with cutlass, its remote, and a commit of the remote's that the clone lacks."""
    remote, cutlass = tmp_path / "remote", tmp_path / "cutlass"
    write_files(cutlass, {HEADER.removeprefix("csrc/cutlass/"): "// cutlass\n"})
    headers = Repository.create(cutlass, UpstreamError)
    headers.run("add", "--all")
    headers.run("commit", "--quiet", "-m", "cutlass")
    write_files(remote, {"setup.py": "x\n", "flash_attn/__init__.py": '__version__ = "9.8.9"\n'})
    (remote / "csrc/cutlass").mkdir(parents=True)  # as a submodule that is not initialised
    upstream_ = Repository.create(remote, UpstreamError)
    upstream_.run("add", "--all")
    upstream_.run("update-index", "--add", "--cacheinfo", f"160000,{headers.resolve('HEAD')},csrc/cutlass")
    upstream_.run("commit", "--quiet", "-m", "release")
    upstream_.run("clone", "--quiet", str(remote), str(tmp_path / "upstream"), writes=False)
    upstream_.run("clone", "--quiet", str(cutlass), str(tmp_path / "upstream/csrc/cutlass"), writes=False)
    write_files(remote, {"setup.py": "newer\n", "flash_attn/__init__.py": '__version__ = "9.8.10"\n'})
    upstream_.run("commit", "--quiet", "--all", "-m", "newer")
    upstream_.run("tag", "v9.8.10")
    return tmp_path / "upstream", remote, headers.resolve("HEAD")


def test_a_cutlass_that_the_clone_lacks_is_fetched_or_missed(
    index: None, tmp_path: Path, submodule: tuple[Path, Path, str]
) -> None:
    folder, remote, _ = submodule
    headers = Repository(tmp_path / "cutlass", UpstreamError)
    headers.run("commit", "--quiet", "--allow-empty", "-m", "newer")
    new = headers.resolve("HEAD")
    release = Repository(remote, UpstreamError)
    for commit, tag in ((new, "v9.9.1"), ("1" * 40, "v9.9.2")):
        release.run("update-index", "--cacheinfo", f"160000,{commit},csrc/cutlass")
        release.run("commit", "--quiet", "-m", tag)
        release.run("tag", tag)
    assert find(MATRIX, "v9.9.1", folder, tmp_path, Source.GIT).pin.cutlass == new
    assert Repository(folder / "csrc/cutlass", UpstreamError).resolve(new) == new
    with pytest.raises(
        UpstreamError, match=r"v9\.9\.2 needs cutlass 1{40}, which the remote of .* does not give"
    ):
        find(MATRIX, "v9.9.2", folder, tmp_path, Source.GIT)


@pytest.mark.parametrize("name", ["v9.8.10", "9.8.10", "commit"])
def test_a_tag_or_commit_is_fetched_from_the_submodule_s_remote(
    index: None, tmp_path: Path, submodule: tuple[Path, Path, str], name: str
) -> None:
    folder, remote, cutlass = submodule
    commit = Repository(remote, UpstreamError).resolve("HEAD")
    found = find(MATRIX, commit if name == "commit" else name, folder, tmp_path, Source.AUTO)
    assert (found.pin.commit, found.pin.cutlass, found.pin.version) == (commit, cutlass, "9.8.10")
    assert (found.pin.tag, found.pin.sdist_sha256) == ("v9.8.10", "b" * 64)
    assert found.checkout.source is Source.GIT
    upstream.materialise(found.pin, found.checkout, tmp_path / "out")
    assert (tmp_path / "out/setup.py").read_text() == "newer\n"


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("9.9.0", "9.9.0.dev0+g"),  # leads to a release that is not there yet
        ("9.8.10", "9.8.10.post1.dev0+g"),  # comes after one
    ],
)
def test_a_commit_that_is_no_release_is_not_called_one(
    index: None, tmp_path: Path, submodule: tuple[Path, Path, str], version: str, expected: str
) -> None:
    folder, remote, _ = submodule
    write_files(remote, {"flash_attn/__init__.py": f'__version__ = "{version}"\n'})
    repository = Repository(remote, UpstreamError)
    repository.run("commit", "--quiet", "--allow-empty", "--all", "-m", "work")
    repository.run("tag", "fa4-v4.0")
    commit = repository.resolve("HEAD")
    found = find(MATRIX, commit, folder, tmp_path)
    assert (found.pin.version, found.pin.tag) == (expected + commit[:8], None)
    assert (found.pin.commit, found.pin.sdist_sha256) == (commit, "unknown")
    assert (
        found.pin
        == find(MATRIX, "fa4-v4.0", folder, tmp_path).pin
        == find(MATRIX, found.name, folder, tmp_path).pin
    )
