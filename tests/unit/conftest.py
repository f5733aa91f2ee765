"""Fixtures for the unit tests."""

from __future__ import annotations

import dataclasses
import http.server
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from rich.console import Console

from scripts import __main__
from scripts.base import console, layout
from scripts.base.errors import BuildError, SeriesError
from scripts.base.git import Repository
from scripts.base.pip import PipConfig
from scripts.series import changes, export, formatting, model, places, tree
from scripts.series.tree import Tree
from scripts.source import kernel_set, matrix
from scripts.source.upstream import Checkout, Source
from scripts.wheels.compiling import kernels, ninja
from scripts.wheels.packing import wheel
from scripts.wheels.toolchain.compilers import Toolchain, Toolkit, tool
from scripts.wheels.toolchain.torch_environment import Environment
from scripts.wheels.toolchain.tvm_ffi import TvmFfi
from scripts.wheels.trust import sbom
from tests.emulator import steady  # noqa: F401 - loads the profile of hypothesis
from tests.unit.waiting import PATIENCE

ROOT = layout.ROOT
PIN = matrix.load(layout.MATRIX).upstream
KERNELS = kernel_set.parse_kernels("hdim64,fp16")
CORE = ("binding.cpp", "small.cu")
HEADER = "csrc/cutlass/include/cutlass/cutlass.h"
BASE = {
    HEADER: "// cutlass\n",
    "setup.py": "".join(f"line {i}\n" for i in range(1, 41)),
    "flash_attn/__init__.py": '__version__ = "2.8.3.post1"\n',
}
EDITED_SETUP = BASE["setup.py"].replace("line 20\n", "line twenty\n")
TWO = [
    ("Change line 20", {"setup.py": EDITED_SETUP}),
    ("Add a header", {"csrc/flash_attn/src/fork.h": "#pragma once\n"}),
]
Make = Callable[..., Path]  # make_series
Kept = Callable[[str, Callable[[Path], object]], Path]  # kept
TreeOf = Callable[..., Tree]  # tree_of
GONE = "\0"  # instead of a text: the file is deleted
Edit = tuple[str, dict[str, str]] | tuple[str, dict[str, str], str]


def write_files(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        if text == GONE:
            (folder / name).unlink()
            continue
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


class PackageIndex:
    """A package index on loopback: ``pages`` gives what a path is answered with, or None for the page that lists ``links``."""

    def __init__(
        self, links: str, pages: Callable[[str], tuple[bytes, int] | None] = lambda path: None
    ) -> None:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body, length = pages(self.path) or (links.encode(), len(links.encode()))
                self.send_response(200)
                self.send_header("Content-Type", "text/html")
                self.send_header("Content-Length", str(length))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def config(self) -> PipConfig:
        return PipConfig(
            False,
            f"http://127.0.0.1:{self.server.server_port}/simple",
            (),
            (),
            ("127.0.0.1",),
            None,
            PATIENCE,
        )

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that a test makes lands in the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user-cache"))


@pytest.fixture(autouse=True)
def quick_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pytest in a process of its own starts without hypothesis and the like, which take most of its start."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is noted for the user, also by another thread."""
    noted: list[str] = []
    monkeypatch.setattr(console, "note", noted.append)
    return noted


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a command ended, and what it said."""

    status: int
    out: str
    err: str


Command = Callable[..., Ended]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Command]:
    """Run a command as ``python -m scripts`` does, but in this process: a new interpreter takes half a second."""

    def run(*arguments: str) -> Ended:
        monkeypatch.chdir(ROOT)
        monkeypatch.setattr(sys, "argv", ["scripts", *arguments])
        monkeypatch.setattr(console, "_answered", False)
        monkeypatch.setattr(console, "out", Console(highlight=False, soft_wrap=True, width=160))
        capfd.readouterr()
        try:
            __main__.main()
            status = 0
        except SystemExit as e:
            status = int(e.code or 0)
        said = capfd.readouterr()
        return Ended(status, said.out, said.err)

    before = signal.getsignal(signal.SIGTERM)
    yield run
    signal.signal(signal.SIGTERM, before)


def checkout_of(files: dict[str, str]) -> Checkout:
    """An upstream of these files."""
    return Checkout(
        Source.SDIST,
        "a fixture",
        lambda target: write_files(target, files),
        lambda name: files[name].encode(),
    )


def user(root: Path, *arguments: str, **env: str) -> str:
    """Git as a user runs it; what it prints."""
    identity = ["-c", "user.name=A User", "-c", "user.email=user@example.invalid"]
    command = ["git", "-C", str(root), *identity, *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, **env})
    return done.stdout


def commit(root: Path, *arguments: str) -> None:
    """Commit all that lies in a work tree."""
    user(root, "add", "--all")
    user(root, "commit", "--quiet", *arguments)


WHY = "Because a test needs a patch of this kind and nothing else does."


def message(
    subject: str, feature: str = "build", guard: str = "symbol fork in csrc/flash_attn/src/fork.h"
) -> str:
    return f"{subject}\n\n{WHY}\n\nUpstream-Status: Pending\nFeature: {feature}\nGuard: {guard}\n"


@pytest.fixture(scope="session")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Kept:
    """The folder that a maker filled when its name was first asked for: tests take copies of it."""
    folders: dict[str, Path] = {}

    def folder_of(name: str, make: Callable[[Path], object]) -> Path:
        if name not in folders:
            folder = tmp_path_factory.mktemp("kept")
            make(folder)
            folders[name] = folder
        return folders[name]

    return folder_of


def commit_each(
    folder: Path, steps: Iterable[tuple[str, dict[str, str]]], error: type[BuildError] = SeriesError
) -> Repository:
    """A repository with a commit for each message and the files that it sets."""
    folder.mkdir(exist_ok=True)
    repository = Repository.create(folder, error)
    for text, files in steps:
        write_files(folder, files)
        repository.run("add", "--all")
        repository.run("commit", "--quiet", "-m", text)
    return repository


@pytest.fixture
def make_series(tmp_path: Path, kept: Kept) -> Callable[..., Path]:
    """Make ``patches/`` from edits over the base: each is a subject, the files it sets, and maybe a guard."""

    def make(*edits: Edit, base: dict[str, str] = BASE, folder: Path = tmp_path, to: str = "patches") -> Path:
        def export_to(target: Path) -> None:
            told = [(message(s, guard=g[0]) if g else message(s), files) for s, files, *g in edits]
            with tempfile.TemporaryDirectory() as work:
                repository = commit_each(Path(work), [("base", base), *told])
                first = repository.resolve(f"HEAD~{len(edits)}")
                export.write_folder(target / "patches", formatting.exported_patches(repository, first))

        shutil.rmtree(folder / to, ignore_errors=True)
        made = kept(
            repr((edits, base, os.environ.get("HOME"))), export_to
        )  # HOME: git may be configured there
        return shutil.copytree(made / "patches", folder / to)

    return make


def fill_repository(root: Path, make_series: Make, edits: Iterable[Edit], base: dict[str, str]) -> None:
    """Files of a repository like this one, whose patches add what files it has of its own: no fork/."""
    root.mkdir(exist_ok=True)
    make_series(*edits, base=base, folder=root, to="patches/flash-attn")
    make_series(TWO[1], base=base, folder=root, to="patches/flash-attn-4")
    text = layout.MATRIX.read_text(encoding="utf-8")
    (root / "wheel_matrix.toml").write_text(re.sub(r"(?m)^own = .*\n", "", text), encoding="utf-8")
    loaded = matrix.load(root / "wheel_matrix.toml")
    changes.write(root / "CHANGES.md", changes.render(loaded, root))


def write_guard_test(root: Path, test: str) -> None:
    """tests/guards/test_it.py of a repository, which nox -s guards runs with ``tree``."""
    plugin = (
        "import pathlib, pytest\ndef pytest_addoption(parser):\n    parser.addoption('--tree')\n"
        "@pytest.fixture\ndef tree(request):\n    return pathlib.Path(request.config.getoption('--tree'))\n"
    )
    write_files(root / "tests/guards", {"conftest.py": plugin, "test_it.py": test})


def stand_on(root: Path, base: dict[str, str], own: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands work on a repository that has patches/flash-attn, with own files, and apply its series."""
    write_files(root / "fork/flash-attn", own)
    shutil.copyfile(layout.MATRIX, root / "wheel_matrix.toml")
    moved = {"ROOT": "", "MATRIX": "wheel_matrix.toml", "BUILD": "build", "SOURCE": "build/source"}
    for name, path in moved.items():
        monkeypatch.setattr(layout, name, root / path)
    loaded = matrix.load(root / "wheel_matrix.toml")
    place = places.of(loaded)
    place.source.parent.mkdir()
    tree.apply(model.read(place.patches, place.own), loaded.upstream, checkout_of(base), place.source)


@pytest.fixture
def patches(make_series: Make) -> Path:
    """A folder with the series of TWO."""
    return make_series(*TWO)


@pytest.fixture
def series(patches: Path) -> model.Series:
    """What lies in it."""
    return model.read(patches)


def apply(series: model.Series, root: Path, **options: Any) -> Tree:
    """Apply a series on BASE."""
    return tree.apply(series, PIN, checkout_of(BASE), root, **options)


@pytest.fixture
def tree_of(tmp_path: Path, kept: Kept) -> TreeOf:
    """The tree of a series, as it was just made: a copy, for making it takes forty processes of git."""

    def copy(series: model.Series, base: dict[str, str] = BASE) -> Tree:
        def make(folder: Path) -> None:
            tree.apply(series, PIN, checkout_of(base), folder / "source")

        name = repr(([patch.content for patch in series.patches], base))
        root = shutil.copytree(kept(name, make) / "source", tmp_path / "source", symlinks=True)
        found = tree.reusable(series, PIN, root)
        assert found is not None
        return found

    return copy


@pytest.fixture
def applied(series: model.Series, tree_of: TreeOf) -> Tree:
    """The tree of TWO."""
    return tree_of(series)


@pytest.fixture
def hostile_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's configuration that would change nearly every step of applying and exporting."""
    home = tmp_path / "hostile"
    hooks = home / "hooks"
    hooks.mkdir(parents=True)
    for name in ("applypatch-msg", "pre-applypatch", "commit-msg", "pre-commit", "post-checkout"):
        hook = hooks / name
        hook.write_text("#!/bin/sh\nexit 1\n")
        hook.chmod(0o755)
    (home / "attributes").write_text("* text eol=crlf diff=broken\n*.py -diff\n")
    (home / "excludes").write_text("*\n")
    (home / ".gitconfig").write_text(
        f"""[user]\n name = Somebody Else\n email = else@example.invalid\n useConfigOnly = true
[am]\n threeWay = true\n keepcr = false\n[apply]\n whitespace = fix\n ignoreWhitespace = change
[core]\n autocrlf = true\n hooksPath = {hooks}\n attributesFile = {home / "attributes"}\n excludesFile = {home / "excludes"}\n abbrev = 40
[commit]\n gpgSign = true\n template = /nonexistent\n[gpg]\n program = /bin/false
[diff]\n noprefix = true\n mnemonicPrefix = true\n algorithm = patience\n context = 1\n renames = copies\n external = /bin/false\n orderFile = /nonexistent
[diff "broken"]\n command = /bin/false
[format]\n signature = hostile\n attach = true\n numbered = true\n subjectPrefix = HOSTILE\n coverLetter = true\n thread = true\n signOff = true\n useAutoBase = true\n suffix = .txt\n to = somebody@example.invalid\n headers = "X-Hostile: 1"
[i18n]\n commitEncoding = latin1\n logOutputEncoding = latin1\n[rerere]\n enabled = true\n[init]\n templateDir = {hooks}\n defaultBranch = other
[color]\n ui = always\n[log]\n date = relative\n[status]\n short = true\n branch = true\n[mailinfo]\n scissors = true
"""
    )
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home))
    for name in [n for n in os.environ if n.startswith("GIT_CONFIG")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    monkeypatch.setenv("TZ", "Asia/Tokyo")


def toolchain(tmp_path: Path, compiler: str, *, cache: bool = False) -> Toolchain:
    """A toolchain whose compilers are a shell script: ninja, the logs and interrupts are real."""
    script = tmp_path / "compiler"
    script.write_text("#!/bin/sh\nfor last; do :; done\n" + compiler)
    script.chmod(0o755)
    env = Environment(Path(sys.executable), tmp_path, "cp312", tmp_path, "2.11.0+cu130", "13.0", True)
    return Toolchain(
        Toolkit(script, "13.0", "V13.0.88", (), "a test"),
        script,
        "g++ 12",
        tool("ninja"),
        tool("sccache") if cache else None,
        env,
        TvmFfi(tmp_path / "tvm-ffi"),
    )


def source_tree(tmp_path: Path) -> Tree:
    for kernel in KERNELS:
        path = tmp_path / "source/csrc/flash_attn/src" / kernel.source
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"// {kernel.name}\n")
    core = tmp_path / "source" / kernels.CORE
    core.mkdir(parents=True, exist_ok=True)
    for name in CORE:
        (core / name).write_text(f"// {name}\n")
    return Tree(tmp_path / "source", "b" * 40, "c" * 40, "d" * 64, "e" * 40, "f" * 64)


FACTS: dict[str, Any] = {
    "format": 1,
    "upstream": {"version": "2.8.3.post1", "commit": "a" * 40, "cutlass": "b" * 40, "sdist_sha256": "c" * 64},
    "fork_revision": 1,
    "series": {
        "digest": "d" * 64,
        "base": "e" * 40,
        "commit": "f" * 40,
        "patches": [
            {"name": "One.patch", "subject": "One", "sha256": "1" * 64, "upstream_status": "Pending"},
            {"name": "Two.patch", "subject": "Two", "sha256": "2" * 64, "upstream_status": "Backport [abc]"},
        ],
    },
    "target": "cu13",
    "kernel_set": ["fwd_hdim64_fp16"],
    "architectures": ["90"],
    "cuda": "13.0",
    "torch": "2.11.0",
    "requires_torch": ">=2.10",
    "tvm_ffi": "0.1.15.post2",
    "nvcc": {"version": "V13.0.88", "flags": ["-O3"]},
    "cxx": {"version": "g++ (Debian 12.2.0-14+deb12u1) 12.2.0", "flags": ["-O3"]},
    "static_libraries": ["libgcc.a"],
}
VERSION = "2.8.3.post1+det.2.cu13"
WHEEL_NAME = f"flash_attn-{VERSION}-py3-none-manylinux_2_28_x86_64.whl"


def whole_wheel(
    folder: Path,
    name: str = WHEEL_NAME,
    place: str = "flash_attn/_fork.json",
    facts: Mapping[str, Any] = FACTS,
    more: Mapping[str, bytes] = MappingProxyType({}),
) -> Path:
    """A wheel as a build packs it, of few files: RECORD, seal and SBOM are real."""
    distribution, version, *build, python, abi, platform = name.removesuffix(".whl").split("-")
    info = f"{distribution}-{version}.dist-info"
    about = f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {python}-{abi}-{platform}\n"
    about += f"Build: {build[0]}\n" if build else ""
    described = f"Metadata-Version: 2.4\nName: {distribution}\nVersion: {version}\n"
    entries = {"flash_attn/determinism.py": b"x = 1\n", **more}
    entries |= {f"{info}/METADATA": described.encode(), f"{info}/WHEEL": about.encode()}
    return wheel.write(folder / name, sbom.describe(entries, info, place, dict(facts)))


@pytest.fixture
def dist(tmp_path: Path) -> Path:
    """A folder with a wheel of each kind, for an index."""
    from tests.unit import index_wheels  # which needs this module

    folder = tmp_path / "dist"
    index_wheels.make(folder)
    index_wheels.make(folder, index_wheels.PYTHON)
    return folder


def plan(
    tmp_path: Path, tools: Toolchain, chosen: tuple[kernel_set.Kernel, ...] = KERNELS, arch: str = "90"
) -> kernels.Plan:
    return kernels.Plan(source_tree(tmp_path), tools, chosen, (arch,), tmp_path / "build")


def compile_all(tmp_path: Path, tools: Toolchain, jobs: int = 2) -> ninja.Compiled:
    planned = plan(tmp_path, tools)
    return ninja.compile_units(planned, kernels.kernel_units(planned), jobs)
