from __future__ import annotations

import hashlib
import io
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.base import pip
from scripts.base.errors import UpstreamError
from scripts.base.git import Repository
from scripts.source import build_inputs, matrix_tables, sdist, upstream
from tests.unit.conftest import PIN, PackageIndex


def archive(files: dict[str, str]) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(f"flash_attn-2.8.3.post1/{name}")
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))
    return raw.getvalue()


GOOD = archive({"setup.py": "", "csrc/cutlass/include/cutlass/cutlass.h": "", "csrc/flash_attn/a.cu": "x"})


def pin(content: bytes) -> matrix_tables.Upstream:
    return PIN.model_copy(update={"sdist_sha256": hashlib.sha256(content).hexdigest()})


class Index(PackageIndex):
    """A package index that serves one sdist, whole or cut off."""

    def __init__(self) -> None:
        self.content = GOOD
        self.cut: int | None = None
        self.requests = 0
        super().__init__(
            '<a href="/files/flash_attn-2.8.3.post1.tar.gz">flash_attn-2.8.3.post1.tar.gz</a>', self.page
        )

    def page(self, path: str) -> tuple[bytes, int] | None:
        if not path.endswith(".tar.gz"):
            return None
        self.requests += 1
        return self.content[: self.cut], len(self.content)


@pytest.fixture
def index() -> Iterator[Index]:
    served = Index()
    yield served
    served.close()


def test_the_sdist_is_fetched_once_and_kept(tmp_path: Path, index: Index) -> None:
    first = sdist.fetched(pin(GOOD), tmp_path, index.config)
    assert first.read_bytes() == GOOD
    assert sdist.fetched(pin(GOOD), tmp_path, index.config) == first
    assert index.requests == 1


def test_another_hash_is_an_error_and_nothing_is_kept(tmp_path: Path, index: Index) -> None:
    index.content = archive({"setup.py": "evil"})
    with pytest.raises(UpstreamError, match=r"has sha256 [0-9a-f]{64}, the pin says"):
        sdist.fetched(pin(GOOD), tmp_path, index.config)
    assert list(tmp_path.iterdir()) == []


def test_a_download_that_is_cut_off_leaves_nothing(tmp_path: Path, index: Index) -> None:
    index.cut = 100
    with pytest.raises(UpstreamError, match=r"flash-attn 2\.8\.3\.post1"):
        sdist.fetched(pin(GOOD), tmp_path, index.config)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_file_in_the_cache_is_fetched_again(tmp_path: Path, index: Index) -> None:
    path = sdist.fetched(pin(GOOD), tmp_path, index.config)
    path.write_bytes(GOOD[:50])
    assert sdist.fetched(pin(GOOD), tmp_path, index.config).read_bytes() == GOOD
    assert index.requests == 2


def test_a_version_that_the_index_lacks_is_an_error_that_names_it(tmp_path: Path, index: Index) -> None:
    with pytest.raises(UpstreamError, match=r"no sdist of flash-attn 9\.9\.9"):
        sdist.fetched(PIN.model_copy(update={"version": "9.9.9"}), tmp_path, index.config)


def test_an_index_that_cannot_be_reached_is_an_error(tmp_path: Path) -> None:
    config = pip.PipConfig(False, "http://127.0.0.1:9/simple", (), (), ("127.0.0.1",), None, 2)
    with pytest.raises(UpstreamError, match=r"flash-attn 2\.8\.3\.post1"):
        sdist.fetched(PIN, tmp_path, config)


def test_pip_s_configuration_is_honoured_environment_over_files() -> None:
    listing = "\n".join(
        [
            ":env:.find-links='/wheels'",
            ":env:.default-timeout='180'",
            "global.index-url='http://localhost/one'",
            "global.find-links='/other'",
            "global.extra-index-url='http://localhost/two http://localhost/three'",
            "global.trusted-host='localhost'",
            "download.index-url='http://localhost/four'",
            "install.index-url='http://localhost/never'",
        ]
    )
    config = pip.PipConfig.read(listing)
    assert config == pip.PipConfig(
        False,
        "http://localhost/four",
        ("http://localhost/two", "http://localhost/three"),
        ("/wheels",),
        ("localhost",),
        None,
        180,
    )
    assert pip.PipConfig.read("").index_url is None


def test_a_pip_that_cannot_tell_its_configuration_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Going on with the public index would pass by the index that somebody configured."""
    broken = tmp_path / "pip.conf"
    broken.write_text("[global\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(broken))
    with pytest.raises(UpstreamError, match="pip config list exited with"):
        pip.PipConfig.read()


def test_a_cache_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UpstreamError, match="cannot make the cache folder"):
        sdist.fetched(PIN, tmp_path / "file/cache")


def test_a_pin_without_a_commit_or_without_a_hash_says_so(tmp_path: Path) -> None:
    unknown = PIN.model_copy(update={"commit": "unknown", "sdist_sha256": "unknown"})
    assert "has no commit for 2.8.3.post1" in str(upstream.submodule_state(unknown, tmp_path))
    with pytest.raises(UpstreamError, match=r"has no sdist of 2\.8\.3\.post1"):
        sdist.fetched(unknown, tmp_path)


def test_a_certificate_of_pip_s_configuration_is_used_without_a_warning(tmp_path: Path) -> None:
    """A bundle serves, and a missing one is named (warnings are errors here)."""
    certificates = x509_of(tmp_path)
    with pip.PipConfig.read(f"global.cert='{certificates}'").client() as client:
        assert client is not None
    with pytest.raises(UpstreamError, match=r"absent\.pem"):
        sdist.fetched(PIN, tmp_path, pip.PipConfig.read(f"global.cert='{tmp_path / 'absent.pem'}'"))


def x509_of(folder: Path) -> Path:
    path = folder / "bundle.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-keyout",
        str(folder / "key"),
        "-out",
        str(path),
        "-subj",
        "/CN=localhost",
    ]
    subprocess.run(command, check=True, capture_output=True)
    return path


def test_no_index_without_links_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UpstreamError, match="no-index"):
        sdist.fetched(PIN, tmp_path, pip.PipConfig.read("global.no-index='true'"))


def test_no_index_takes_the_links(tmp_path: Path) -> None:
    (tmp_path / "links").mkdir()
    (tmp_path / "links/flash_attn-2.8.3.post1.tar.gz").write_bytes(GOOD)
    config = pip.PipConfig.read(f"global.no-index='true'\nglobal.find-links='{tmp_path / 'links'}'")
    assert sdist.fetched(pin(GOOD), tmp_path / "cache", config).read_bytes() == GOOD


def test_a_tree_without_cutlass_is_an_error_and_leaves_no_folder(tmp_path: Path) -> None:
    content = tmp_path / "sdist.tar.gz"
    content.write_bytes(archive({"setup.py": "", "csrc/flash_attn/a.cu": ""}))
    checkout = upstream.Checkout(
        upstream.Source.SDIST,
        "",
        lambda target: sdist.extract(content, target),
        lambda name: sdist.read(content, name),
    )
    with pytest.raises(UpstreamError, match="cutlass"):
        upstream.materialise(PIN, checkout, tmp_path / "tree")
    assert [p.name for p in tmp_path.iterdir()] == ["sdist.tar.gz"]


def test_a_file_that_no_build_needs_can_be_read(tmp_path: Path) -> None:
    content = tmp_path / "flash_attn-1.tar.gz"
    content.write_bytes(archive({"setup.py": "", "tests/test_flash_attn.py": "def test(): pass\n"}))
    assert sdist.read(content, "tests/test_flash_attn.py") == b"def test(): pass\n"
    with pytest.raises(UpstreamError, match=r"flash_attn-1.tar.gz has no tests/other.py."):
        sdist.read(content, "tests/other.py")


def test_only_what_a_build_needs_is_taken() -> None:
    packages = ["flash_attn/__init__.py", "flash_attn/ops/__init__.py"]
    wanted = [
        "csrc/flash_attn/src/x.cu",
        "csrc/cutlass/include/cute/a.hpp",
        "flash_attn/ops/b.py",
        "setup.py",
        "LICENSE",
    ]
    other = [
        "csrc/composable_kernel/a.h",
        "csrc/cutlass/test/a.cu",
        "flash_attn/loose/c.py",
        "flash_attn/ops/d.so",
        "hopper/e.py",
        "PKG-INFO",
    ]
    assert build_inputs.select([*packages, *wanted, *other]) == sorted([*packages, *wanted])


@given(st.lists(st.from_regex(r"[a-z]{1,4}(/[a-z_]{1,8}){0,3}\.(py|cu|h)", fullmatch=True)))
def test_the_choice_does_not_depend_on_the_order_of_the_files(paths: list[str]) -> None:
    assert build_inputs.select(paths) == build_inputs.select(reversed(paths))
    assert all(
        PurePosixPath(p).parts[0] in ("csrc", "flash_attn", "setup.py") for p in build_inputs.select(paths)
    )


def test_local_edits_of_the_submodule_are_told(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / build_inputs.CUTLASS):
        folder.mkdir(parents=True, exist_ok=True)
        repository = Repository.create(folder, UpstreamError)
        (folder / "a.h").write_text("int a;\n")
        repository.run("add", "a.h")
        repository.run("commit", "--quiet", "-m", "a")
    exclude = tmp_path / ".git/info/exclude"
    exclude.parent.mkdir(exist_ok=True)
    exclude.write_text("csrc\n")
    assert upstream._edited(tmp_path) == ""
    for name in ("a.h", f"{build_inputs.CUTLASS}/a.h"):
        (tmp_path / name).write_text("int b;\n")
    assert upstream._edited(tmp_path) == "a.h, csrc/cutlass/a.h"
