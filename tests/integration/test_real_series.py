"""The series on real releases of upstream: what the forecast says, and what a rebase gives."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import tomlkit

from scripts.base import pip
from scripts.base.errors import ActionNeeded
from scripts.base.layout import cache
from scripts.series import changes, export, guards, lint, model, tree
from scripts.series.rebase.state import Report
from scripts.series.rebase.steps import Rebase
from scripts.series.upstream import forecast, public_functions
from scripts.source import kernel_set, matrix, releases, upstream
from scripts.wheels.building import build
from scripts.wheels.compiling import kernels, ninja
from scripts.wheels.toolchain import compilers
from tests.integration.turns import TURNS, turn

pytestmark = pytest.mark.network

ROOT = Path(__file__).resolve().parents[2]
MATRIX = matrix.load(ROOT / "wheel_matrix.toml")
KNOWN: dict[str, dict[str, dict[str, str]]] = json.loads(
    (Path(__file__).parent / "forecast.json").read_text()
)
EXPECTED = KNOWN["flash-attn"]
NO_SUBMODULE = ROOT / "build/no-submodule"


def release(name: str) -> releases.Release:
    return releases.find(MATRIX, name, NO_SUBMODULE, cache("sdist"), upstream.Source.SDIST)


@pytest.fixture(scope="module")
def checkout() -> upstream.Checkout:
    return upstream.find(MATRIX.upstream, NO_SUBMODULE, cache("sdist"), upstream.Source.SDIST)


def test_the_patches_are_told_as_one_json_document() -> None:
    command = [sys.executable, "-m", "scripts", "patches", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert [p["name"] for p in json.loads(done.stdout)["patches"]] == [
        p.name for p in model.read(ROOT / "patches/flash-attn", ROOT / "fork/flash-attn").patches
    ]


def without_filters() -> Path | None:
    """The system's own Python, where it is one whose archives know no filter: Debian 12's is."""
    path = Path("/usr/bin/python3")
    code = "import sys, tarfile; sys.exit(hasattr(tarfile, 'data_filter') or sys.version_info < (3, 10))"
    told = subprocess.run([path, "-c", code], check=False) if path.exists() else None
    return path if told and told.returncode == 0 else None


def test_the_series_is_applied_by_debian_s_own_python(tmp_path: Path) -> None:
    python = without_filters()
    if python is None:
        pytest.skip("/usr/bin/python3 is not there, or newer than Debian 12's")
    clone, names = tmp_path / "clone", ("scripts", "patches", "fork", "wheel_matrix.toml", "pyproject.toml")
    clone.mkdir()
    subprocess.run(["cp", "-r", *(ROOT / name for name in names), clone], check=True)
    dependencies = tomlkit.parse((ROOT / "pyproject.toml").read_text())["project"]["dependencies"].unwrap()
    # What installs for it may be this Python's: Debian's lacks ensurepip where python3-venv is not installed.
    subprocess.run([python, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    own = tmp_path / "env/bin/python"
    subprocess.run([*pip.installing(own, "--quiet"), *dependencies], check=True)
    applied = []
    for one, root in ((own, clone), (sys.executable, ROOT)):
        command = [one, "-m", "scripts", "apply", "--source", "sdist", "--json"]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        applied.append(json.loads(done.stdout)["commit"])
    assert applied[0] == applied[1]


def test_the_table_has_every_release_of_the_matrix() -> None:
    assert list(KNOWN) == list(MATRIX.upstreams)
    for loaded in MATRIX.each():
        assert set(KNOWN[loaded.name]) == {loaded.upstream.version, *loaded.releases}
        assert all("unknown" not in sha256 for sha256 in loaded.releases.values())


FORECASTS = [(name, version) for name in KNOWN for version in KNOWN[name]]


@pytest.mark.parametrize(
    ("name", "version"),
    [pytest.param(*case, marks=pytest.mark.in_turn(at % TURNS)) for at, case in enumerate(FORECASTS)],
)
def test_the_forecast_is_the_one_that_is_known(name: str, version: str, tmp_path: Path) -> None:
    loaded = MATRIX.of(name)
    places = (NO_SUBMODULE, cache("sdist"), upstream.Source.SDIST)
    moves = forecast.run_forecast(
        tmp_path,
        model.read(ROOT / loaded.table.series, ROOT / str(loaded.table.own)),
        loaded.upstream,
        upstream.find(loaded.upstream, *places),
        releases.find(loaded, version, *places),
    ).moves
    assert {m.patch.removesuffix(".patch"): m.outcome.value for m in moves} == KNOWN[name][version], (
        "\n".join(f"{m}" for m in moves)
    )


def test_stock_has_the_patch_alone_that_chooses_kernels(checkout: upstream.Checkout, tmp_path: Path) -> None:
    """Without it an extension of some kernel files does not load, for it lacks those of the others."""
    whole = model.read(ROOT / "patches/flash-attn", ROOT / "fork/flash-attn")
    stock = whole.only(build.CHOOSES_KERNELS)
    root = tree.apply(stock, MATRIX.upstream, checkout, tmp_path / "source", of=len(whole.patches)).root
    launches = (root / "csrc/flash_attn/flash_api.cpp").read_text().count("FORK_LAUNCH(")
    assert launches == 3  # forward, split and backward
    assert len(stock.patches) == 1


def test_public_functions_of_a_python_upstream_are_found_in_every_release() -> None:
    """From 4.0.0b33 to b36 none has other parameters, but for a private one, which is told where a patch names it."""
    loaded = MATRIX.of("flash-attn-4")
    assert loaded.upstream.package is not None
    seen = []
    for version in (*reversed(loaded.releases), loaded.upstream.version):
        read = releases.find(
            loaded, version, NO_SUBMODULE, cache("sdist"), upstream.Source.SDIST
        ).checkout.read
        seen.append(public_functions.of_package(loaded.upstream.package, read, {"_bwd_postprocess_convert"}))
    users = ("flash_attn.cute.flash_attn_func", "flash_attn.cute.flash_attn_varlen_func")
    private = "flash_attn.cute.interface._bwd_postprocess_convert"
    assert {tuple(found) for found in seen} == {(*users, private)}
    assert [len({found[name].parameters for found in seen}) for name in users] == [1, 1]
    before, after = (set(found[private].parameters) for found in seen[-2:])
    assert after - before == {"accum_order"}


# Releases, and the turns that move the series there.
REBASED = {
    "2.8.3.post2": range(0, TURNS, 2),
    "2.8.3.post1": range(0, TURNS, 2),
    "2.8.2": range(1, TURNS, 2),
}


PLACES = len(model.read(ROOT / "patches/flash-attn", ROOT / "fork/flash-attn").patches)


def compile_after(place: int) -> None:
    command = [
        sys.executable,
        "-m",
        "scripts",
        "each",
        "--compile",
        "--place",
        str(place),
        "--source",
        "sdist",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@pytest.mark.nvcc
@pytest.mark.in_turn(8)
def test_a_kernel_file_of_each_pass_compiles_after_the_patch_whose_turn_it_is() -> None:
    """Another patch each tenth commit: three files take five minutes on two cores, and none where they are cached."""
    compile_after(turn(TURNS * PLACES) // TURNS + 1)


@pytest.mark.nvcc
@pytest.mark.release
@pytest.mark.parametrize("place", range(1, PLACES + 1))
def test_a_kernel_file_of_each_pass_compiles_after_every_patch(place: int) -> None:
    compile_after(place)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(version, marks=pytest.mark.in_turn(*turns))
        for version, turns in REBASED.items()
        if version != MATRIX.upstream.version
    ],
)
def rebased(
    request: pytest.FixtureRequest, checkout: upstream.Checkout, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Report]:
    """A copy of this repository's series, moved."""
    root = tmp_path_factory.mktemp("repository")
    for name in ("patches", "fork"):
        shutil.copytree(ROOT / name, root / name)
    shutil.copyfile(ROOT / "wheel_matrix.toml", root / "wheel_matrix.toml")
    rebase = Rebase(root, root / "build/rebase")
    begin = partial(
        rebase.start,
        MATRIX,
        model.read(root / "patches/flash-attn", root / "fork/flash-attn"),
        checkout,
        release(request.param),
    )
    for name, outcome in EXPECTED[request.param].items():
        if outcome == "landed-identical":
            with pytest.raises(ActionNeeded, match=f"{name}.*landed-identical"):
                begin()
            begin = partial(rebase.skip, f"{request.param} has it")
    return root, begin()


def test_a_rebase_ends_in_a_series_that_applies_exactly_and_keeps_its_guards(
    rebased: tuple[Path, Report],
) -> None:
    root, report = rebased
    loaded = matrix.load(root / "wheel_matrix.toml")
    moved = model.read(root / "patches/flash-attn", root / "fork/flash-attn")
    assert loaded.upstream.version == report.new
    assert loaded.upstream.sdist_sha256 == MATRIX.releases[report.new]
    landed = {name for name, outcome in EXPECTED[report.new].items() if outcome == "landed-identical"}
    assert {
        d.patch.removesuffix(".patch") for d in report.done if d.outcome not in ("clean", "offset")
    } == landed
    assert len(moved.patches) == len(report.done) - len(landed)
    applied = tree.apply(
        moved,
        loaded.upstream,
        upstream.find(loaded.upstream, NO_SUBMODULE, cache("sdist"), upstream.Source.SDIST),
        root / "build/source",
    )
    assert f'__version__ = "{report.new}"' in (applied.root / "flash_attn/__init__.py").read_text()
    folders = (root / "patches/flash-attn", root / "fork/flash-attn")
    assert export.export(applied.root, *folders, check=True) == export.Exported((), ())
    guards.require(guards.run(moved, applied))
    assert lint.check(root / "patches/flash-attn", None, root / "fork/flash-attn") == []
    changes.check(root / "CHANGES.md", changes.render(loaded, root))


@pytest.mark.nvcc
@pytest.mark.in_turn(0)
def test_a_changed_kernel_file_of_each_pass_compiles(rebased: tuple[Path, Report]) -> None:
    """Of each pass the smallest file; the rest are the same templates for other head dims and dtypes."""
    root, report = rebased
    loaded = matrix.load(root / "wheel_matrix.toml")
    applied = tree.apply(
        model.read(root / "patches/flash-attn", root / "fork/flash-attn"),
        loaded.upstream,
        upstream.find(loaded.upstream, NO_SUBMODULE, cache("sdist"), upstream.Source.SDIST),
        root / "build/source",
    )
    changed = [k for k in kernel_set.parse_kernels("hdim32,fp16,causal") if k.name in report.kernels]
    if not changed:
        assert not report.kernels
        return
    target = MATRIX.default()
    tools = compilers.assemble(target, compilers.running_python(), ROOT / "build", cache=True)
    plan = kernels.Plan(applied, tools, tuple(changed), ("90",), root / "build")
    compiled = ninja.compile_units(plan, [*kernels.binding_units(plan), *kernels.kernel_units(plan)], None)
    assert all(path.stat().st_size > 100_000 for path in compiled.objects if path.stem in report.kernels)
