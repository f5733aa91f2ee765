"""A python upstream beside a compiled one: its files, its wheel, its pin, its rebase."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from scripts.base import layout
from scripts.base.errors import SeriesError, UpstreamError, UsageError, WheelError
from scripts.base.git import Repository
from scripts.commands import forecast as forecast_command
from scripts.series import changes, ground, lint, model, tree
from scripts.series.own import OwnFiles
from scripts.series.rebase.steps import Rebase
from scripts.series.upstream import forecast, landed
from scripts.source import matrix, pin, releases, sdist, upstream
from scripts.source.releases import Release
from scripts.wheels.packing import python_wheel
from tests.unit.conftest import Command, Make, checkout_of, write_files

ROOT = layout.ROOT
MATRIX = matrix.load(ROOT / "wheel_matrix.toml").of("flash-attn-4")
PACKAGE = "flash_attn/cute"
DESCRIBED = """[project]
name = "flash-attn-4"
dynamic = ["version"]
readme = "README.md"
requires-python = ">=3.10"
dependencies = ["torch", "tool>=1,<2"]
[project.optional-dependencies]
more = ["tool[all]>=1"]
[tool.setuptools_scm]
tag_regex = "^fa4-v(?P<version>.+)$"
"""
FLAT = {
    "__init__.py": "from .interface import f\n",
    "interface.py": "".join(f"value_{i} = {i}\n" for i in range(30)),
    "pyproject.toml": DESCRIBED,
    "README.md": "# Cute\n\nWords: more\n",
    "LICENSE": "a licence\n",
    "AUTHORS": "somebody\n",
}
GENERATED = {"PKG-INFO": "x\n", "setup.cfg": "x\n", "flash_attn_4.egg-info/SOURCES.txt": "x\n"}
FILES = {f"{PACKAGE}/{name}": text for name, text in FLAT.items()}
EDIT = (
    "Change the tenth value",
    {f"{PACKAGE}/interface.py": FLAT["interface.py"].replace("value_10 = 10", "value_10 = ten()")},
    f"symbol ten in {PACKAGE}/interface.py",
)
HOOK = (
    "Say which fork this is",
    {
        f"{PACKAGE}/_fork.py": "info = 1\n",
        f"{PACKAGE}/__init__.py": "from ._fork import info\n" + FLAT["__init__.py"],
    },
    f"symbol _fork in {PACKAGE}/__init__.py",
)
USING = (
    "Use what the fork says",
    {f"{PACKAGE}/interface.py": EDIT[1][f"{PACKAGE}/interface.py"] + "from ._fork import info\n"},
    f"symbol info in {PACKAGE}/interface.py",
)
SERIES = "patches/flash-attn-4"


def archive(folder: Path) -> Path:
    """An sdist as setuptools makes it of a package in the root."""
    path = folder / "flash_attn_4-4.0.0b36.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for name, text in (FLAT | GENERATED).items():
            member = tarfile.TarInfo(f"flash_attn_4-4.0.0b36/{name}")
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    return path


def clone(folder: Path) -> tuple[Path, str]:
    """A clone of a repository that holds the package among others; its commit."""
    root = folder / "upstream"
    others = {
        "flash_attn/__init__.py": "",
        f"{PACKAGE}/sub/x.py": "",
        "setup.py": "",
        f"{PACKAGE}/.flake8": "",
    }
    write_files(root, FILES | others)
    repository = Repository.create(root, UpstreamError)
    repository.run("add", "--all", "--force")
    repository.run("commit", "--quiet", "-m", "release")
    repository.run("tag", "fa4-v4.0.0.beta36")
    return root, repository.resolve("HEAD")


def made(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}


def test_a_flat_sdist_and_the_repository_give_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, commit = clone(tmp_path)
    path = archive(tmp_path)
    monkeypatch.setattr(sdist, "fetched", lambda pin, cache: path)
    from_sdist = upstream.find(MATRIX.upstream, root, tmp_path)
    known = MATRIX.upstream.model_copy(update={"commit": commit})
    from_git = upstream.find(known, root, tmp_path)
    assert [from_sdist.source, from_git.source] == [upstream.Source.SDIST, upstream.Source.GIT]
    for checkout in (from_sdist, from_git):
        upstream.materialise(known, checkout, tmp_path / checkout.source.value)
        assert made(tmp_path / checkout.source.value) == FILES
        assert checkout.read(f"{PACKAGE}/LICENSE") == b"a licence\n"
    assert ground.base_of(known, from_sdist, OwnFiles()) == ground.base_of(known, from_git, OwnFiles())


def test_a_clone_that_lacks_the_commit_or_a_release_without_the_package_is_told(tmp_path: Path) -> None:
    root, _ = clone(tmp_path)
    absent = MATRIX.upstream.model_copy(update={"commit": "a" * 40})
    with pytest.raises(UpstreamError, match="lacks commit aaaa"):
        upstream.find(absent, root, tmp_path, upstream.Source.GIT)
    with pytest.raises(UpstreamError, match=f"no {PACKAGE}/__init__.py"):
        upstream.materialise(MATRIX.upstream, checkout_of({"setup.py": ""}), tmp_path / "out")


def test_a_tag_gives_the_version_that_setuptools_scm_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, commit = clone(tmp_path)
    monkeypatch.setattr(releases, "on_index", lambda distribution: {"4.0.0b36": "b" * 64})
    found = releases.find(MATRIX, "fa4-v4.0.0.beta36", root, tmp_path, upstream.Source.GIT)
    assert (found.pin.version, found.pin.commit, found.pin.sdist_sha256) == ("4.0.0b36", commit, "b" * 64)
    assert (found.pin.tag, found.pin.cutlass) == ("fa4-v4.0.0.beta36", None)
    Repository(root, UpstreamError).run("tag", "--delete", "fa4-v4.0.0.beta36")
    with pytest.raises(UpstreamError, match=r"no tag of commit .* gives a version"):
        releases.find(MATRIX, commit, root, tmp_path, upstream.Source.GIT)


def test_latest_after_a_beta_may_be_a_beta(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = {"4.0.0b36": "a" * 64, "4.0.0b37": "b" * 64}
    monkeypatch.setattr(releases, "on_index", lambda distribution: listed)
    monkeypatch.setattr(upstream, "from_sdist", lambda pin, cache, why: checkout_of(FILES))
    found = releases.find(MATRIX, "latest", tmp_path / "none", tmp_path)
    assert (found.pin.version, found.pin.tag, found.pin.package) == ("4.0.0b37", "unknown", PACKAGE)


def test_the_wheel_holds_the_package_its_metadata_and_where_it_came_from(
    make_series: Make, tmp_path: Path
) -> None:
    patches = model.read(make_series(EDIT, HOOK, base=FILES))
    applied = tree.apply(patches, MATRIX.upstream, checkout_of(FILES), tmp_path / "source")
    path = python_wheel.pack(MATRIX, patches, applied, tmp_path / "dist")
    assert path.name == f"flash_attn_4-{MATRIX.version()}-py3-none-any.whl"
    with zipfile.ZipFile(path) as wheel:
        names = set(wheel.namelist())
        info = f"flash_attn_4-{MATRIX.version()}.dist-info"
        told = Parser().parsestr(wheel.read(f"{info}/METADATA").decode())
        facts = json.loads(wheel.read(f"{PACKAGE}/_fork.json"))
    assert {name for name in names if ".dist-info" not in name} == {
        f"{PACKAGE}/{name}" for name in ("__init__.py", "interface.py", "_fork.py", "_fork.json")
    }
    assert {f"{info}/licenses/{name}" for name in ("LICENSE", "AUTHORS", "NOTICE")} <= names
    assert (told["Name"], told["Version"], told["Requires-Python"]) == (
        "flash-attn-4",
        MATRIX.version(),
        ">=3.10",
    )
    assert told.get_all("Requires-Dist") == ["torch", "tool<2,>=1", 'tool[all]>=1; extra == "more"']
    assert told.get_all("Provides-Extra") == ["more"]
    assert told.get_all("License-File") == ["LICENSE", "AUTHORS", "NOTICE"]
    assert (told["Metadata-Version"], told["Dynamic"]) == ("2.4", None)
    assert told.get_payload() == FLAT["README.md"]
    assert facts["series"]["digest"] == applied.digest
    assert [p["name"] for p in facts["series"]["patches"]] == [p.name for p in patches.patches]


def test_a_description_that_cannot_be_read_is_named(make_series: Make, tmp_path: Path) -> None:
    broken = ("Break it", {f"{PACKAGE}/pyproject.toml": "[project\n"})
    other = ("Name another", {f"{PACKAGE}/pyproject.toml": DESCRIBED.replace("flash-attn-4", "another")})
    for place, edit in enumerate((broken, other)):
        patches = model.read(make_series(edit, base=FILES, to=f"patches{place}"))
        applied = tree.apply(patches, MATRIX.upstream, checkout_of(FILES), tmp_path / f"source{place}")
        with pytest.raises(WheelError, match=r"pyproject\.toml: "):
            python_wheel.pack(MATRIX, patches, applied, tmp_path / "dist")
    assert not (tmp_path / "dist").exists()


def test_patches_stay_within_the_package(make_series: Make) -> None:
    stray = (
        "Change another package",
        {"flash_attn/__init__.py": "x = 1\n", f"{PACKAGE}/sub/y.py": "y = 1\n"},
    )
    problems = [p.text for p in lint.check(make_series(EDIT, stray, base=FILES), PACKAGE)]
    assert [text.partition(" is none")[0] for text in problems if "is none of" in text] == [
        "flash_attn/__init__.py",
        f"{PACKAGE}/sub/y.py",
    ]
    assert any(f"patches touch {PACKAGE}/*.py" in text for text in problems)


def test_a_patch_needs_the_one_whose_module_it_imports(make_series: Make, tmp_path: Path) -> None:
    patches = model.read(make_series(EDIT, HOOK, USING, base=FILES))
    applied = tree.apply(patches, MATRIX.upstream, checkout_of(FILES), tmp_path / "source")
    repository = Repository(applied.root, UpstreamError)
    commits = repository.commits(applied.base, applied.commit)
    assert commits[1] in landed.needs(repository, commits)[commits[2]]


@pytest.fixture
def repository(make_series: Make, tmp_path: Path) -> Path:
    """A repository like this one, whose second series has one patch on FILES."""
    root = tmp_path / "repository"
    root.mkdir()
    shutil.copytree(ROOT / "patches/flash-attn", root / "patches/flash-attn")
    make_series(EDIT, base=FILES, folder=root, to=SERIES)
    shutil.copyfile(ROOT / "wheel_matrix.toml", root / "wheel_matrix.toml")
    changes.write(root / "CHANGES.md", changes.render(matrix.load(root / "wheel_matrix.toml"), root))
    return root


def test_a_forecast_tells_what_changed_in_the_package_and_nothing_of_compiled_upstreams(
    make_series: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    public = {f"{PACKAGE}/interface.py": FLAT["interface.py"] + "def f(q):\n    return q\n"}
    grown = {f"{PACKAGE}/interface.py": FLAT["interface.py"] + "def f(q, k):\n    return q\n"}
    old, new = FILES | public, FILES | grown | {f"{PACKAGE}/more.py": "x = 1\n"}
    series = model.read(make_series(HOOK, base=old))
    release = Release(MATRIX.upstream.model_copy(update={"version": "9.9.9"}), checkout_of(new), "a fixture")
    found = forecast.run_forecast(tmp_path / "build", series, MATRIX.upstream, checkout_of(old), release)
    told_of = forecast_command._Forecast(MATRIX, series, {"9.9.9": found}, {"9.9.9": "9.9.9"})
    rows = told_of.rows()
    assert list(rows)[1:] == [
        f"files of {PACKAGE}",
        "parameters of public functions",
        "functions that patches rely on",
    ]
    assert [rows[name] for name in list(rows)[1:3]] == [["+1 ~1"], ["1"]]
    forecast_command._show(told_of)
    told = capsys.readouterr().out
    assert f"{PACKAGE}: 1 added: more.py" in told
    assert "flash_attn.cute.f grew at its end: k" in told
    assert told.splitlines()[-1].strip() == "next: nox -s rebase -- --upstream flash-attn-4 9.9.9"
    assert "csrc" not in told
    assert "setup.py" not in told


@pytest.mark.parametrize("has_folder", [False, True])
def test_an_upstream_without_a_series_is_told_how_to_make_it(tmp_path: Path, has_folder: bool) -> None:
    folder = tmp_path / "patches/new"
    if has_folder:
        folder.mkdir(parents=True)
    with pytest.raises(SeriesError, match="For a new upstream") as told:
        model.read(folder)
    made = str(told.value).partition("(mkdir")[2].partition(";")[0]
    subprocess.run(["sh", "-c", f"mkdir{made}"], check=True)
    assert model.read(folder).patches == ()


def test_a_series_that_lost_its_listing_is_to_be_taken_back(make_series: Make) -> None:
    folder = make_series(EDIT, base=FILES)
    (folder / "series").unlink()
    with pytest.raises(SeriesError, match=r"no such file. Take it back \(git checkout"):
        model.read(folder)


def test_a_rebase_writes_the_pin_and_series_of_its_upstream_alone(repository: Path) -> None:
    loaded = matrix.load(repository / "wheel_matrix.toml").of("flash-attn-4")
    new = {"version": "9.9.9", "sdist_sha256": "9" * 64}
    moved = {f"{PACKAGE}/interface.py": "# new\n" + FLAT["interface.py"]}
    release = Release(loaded.upstream.model_copy(update=new), checkout_of(FILES | moved), "a fixture")
    others = {p.name: p.read_bytes() for p in (repository / "patches/flash-attn").iterdir()}
    rebase = Rebase(repository, repository / "build/rebase-flash-attn-4")
    report = rebase.start(loaded, model.read(repository / SERIES), checkout_of(FILES), release)
    after = matrix.load(repository / "wheel_matrix.toml")
    assert after.upstream == loaded.of("flash-attn").upstream
    assert after.releases == loaded.of("flash-attn").releases
    assert after.of("flash-attn-4").upstream == release.pin
    assert after.of("flash-attn-4").releases[loaded.upstream.version] == loaded.upstream.sdist_sha256
    assert {p.name: p.read_bytes() for p in (repository / "patches/flash-attn").iterdir()} == others
    assert "moved" not in "".join(report.kernels)
    assert "stays as it is" in report.submodule
    changes.check(repository / "CHANGES.md", changes.render(after, repository))


def test_a_pin_that_its_releases_list_already_is_not_listed_twice(repository: Path) -> None:
    path = repository / "wheel_matrix.toml"
    known = MATRIX.upstream
    header = "[upstreams.flash-attn-4.releases]\n"
    path.write_text(path.read_text().replace(header, f'{header}"{known.version}" = "{known.sdist_sha256}"\n'))
    loaded = matrix.load(path).of("flash-attn-4")
    assert pin.write(loaded, known.model_copy(update={"version": "9.9.9"}))
    assert list(matrix.load(path).of("flash-attn-4").releases) == list(loaded.releases)


def test_a_matrix_without_a_table_of_releases_gets_one(repository: Path) -> None:
    path = repository / "wheel_matrix.toml"
    before, _, rest = path.read_text().partition("[upstreams.flash-attn-4.releases]\n")
    path.write_text(before + rest[rest.index("\n\n") :])
    loaded = matrix.load(path).of("flash-attn-4")
    assert pin.write(loaded, loaded.upstream.model_copy(update={"version": "9.9.9"}))
    assert matrix.load(path).of("flash-attn-4").releases == {
        loaded.upstream.version: loaded.upstream.sdist_sha256
    }


@pytest.mark.parametrize(
    "name", ["apply", "export", "patches", "guards", "forecast", "lint", "build", "verify"]
)
def test_a_wrong_upstream_is_told_with_those_there_are(command: Command, name: str) -> None:
    done = command(name, "--upstream", "flash")
    assert done.status == UsageError.exit_code
    assert "no upstream 'flash'; it has flash-attn, flash-attn-4." in done.err


@pytest.mark.parametrize(
    "options",
    [["--kernels", "all"], ["--arch", "80", "--stock"], ["--target", "x"], ["--no-cache"], ["--cpp"]],
)
def test_options_of_compiled_wheels_are_refused(command: Command, options: list[str]) -> None:
    done = command("build", "--upstream", "flash-attn-4", *options)
    assert done.status == UsageError.exit_code
    assert f"{options[0]}" in done.err
    assert "flash-attn-4 is Python alone" in done.err


def test_what_would_be_built_is_told(command: Command) -> None:
    for option in ("--list", "--dry-run"):
        assert (
            f"flash_attn_4-{MATRIX.version()}-py3-none-any.whl"
            in command("build", "--upstream", "flash-attn-4", option).out
        )


def test_one_rebase_at_a_time(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "BUILD", tmp_path)
    (tmp_path / "rebase-flash-attn-4").mkdir()
    (tmp_path / "rebase-flash-attn-4/state.json").write_text("{}")
    done = command("rebase", "2.8.3.post2")
    assert done.status == UsageError.exit_code
    assert "a rebase of flash-attn-4 is under way" in done.err
    assert "rebase-flash-attn-4/state.json is damaged" in command("rebase", "--continue").err
