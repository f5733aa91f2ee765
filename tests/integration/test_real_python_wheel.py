"""The wheel of flash-attn-4, from the real sdist: what it holds, beside upstream's own wheel's, and its use."""

from __future__ import annotations

import configparser
import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections import Counter
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from scripts.base import layout
from scripts.base.errors import NotVerified
from scripts.base.layout import cache
from scripts.series import model
from scripts.source import sdist
from scripts.wheels.packing import python_wheel
from scripts.wheels.packing import wheel as packing
from scripts.wheels.trust import companions, contents
from tests.integration.turns import TURNS, parts
from tests.integration.wheels import MATRIX as UPSTREAMS
from tests.integration.wheels import ROOT, applied_apart, said, scripts

pytestmark = pytest.mark.network

MATRIX = UPSTREAMS.of("flash-attn-4")
PACKAGE = "flash_attn/cute"
# Of upstream's metadata, what ours says otherwise or has in another order.
OURS = {"Version", "License-File", "Dynamic", "Metadata-Version"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    return python_wheel.pack(MATRIX, *applied_apart("flash-attn-4", folder), folder / "dist")


def fields(told: Message) -> list[tuple[str, str]]:
    return sorted((name, value.replace(" ", "")) for name, value in told.items() if name not in OURS)


def test_its_metadata_is_upstream_s(wheel: Path) -> None:
    archive = sdist.fetched(MATRIX.upstream, cache("sdist"))
    theirs = Parser().parsestr(sdist.read(archive, "PKG-INFO").decode())
    with zipfile.ZipFile(wheel) as opened:
        (name,) = [name for name in opened.namelist() if name.endswith("/METADATA")]
        ours = Parser().parsestr(opened.read(name).decode())
    assert fields(ours) == fields(theirs)
    assert ours.get_payload() == theirs.get_payload()
    assert ours["Version"] == f"{theirs['Version']}+det.{MATRIX.table.revision}"
    settings = configparser.ConfigParser()
    settings.read(ROOT / "fork/mypy.ini")
    assert ours["Requires-Python"] == f">={settings['mypy']['python_version']}", (
        "which our types are checked at"
    )


def test_it_holds_every_module_of_upstream_s_and_nothing_above_its_package(wheel: Path) -> None:
    archive = sdist.fetched(MATRIX.upstream, cache("sdist"))
    listed = sdist.read(archive, "flash_attn_4.egg-info/SOURCES.txt").decode().split()
    modules = {f"{PACKAGE}/{name.removeprefix('./')}" for name in listed if name.endswith(".py")}
    with zipfile.ZipFile(wheel) as opened:
        names = {name for name in opened.namelist() if ".dist-info/" not in name}
    assert modules <= names
    assert {str(Path(name).parent) for name in names} == {PACKAGE}


def test_it_installs_beside_another_package_of_the_namespace_and_says_what_it_is(
    wheel: Path, tmp_path: Path
) -> None:
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    subprocess.run([*install, str(tmp_path), str(wheel)], check=True)
    assert not (tmp_path / "flash_attn/__init__.py").exists()
    # Its __init__ imports NVIDIA's compiler, which is not here; the module of the patch needs nothing.
    ask = "import json, runpy; print(json.dumps(runpy.run_path('flash_attn/cute/_fork.py')['fork_info']()))"
    done = subprocess.run(
        [sys.executable, "-c", ask], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    facts = json.loads(done.stdout)
    assert facts["upstream"]["sdist_sha256"] == MATRIX.upstream.sdist_sha256
    assert [p["subject"] for p in facts["series"]["patches"]] == [
        p.subject for p in model.read(ROOT / MATRIX.table.series, ROOT / str(MATRIX.table.own)).patches
    ]


def test_a_build_from_nothing_gives_the_same_bytes() -> None:
    told = said("build", "--upstream", "flash-attn-4", "--check-reproducible")
    assert "byte for byte the same" in told


def test_a_second_builder_gets_the_same_bytes_from_what_the_wheel_says(wheel: Path) -> None:
    told = said("inspect", "--rebuild", "--source", "sdist", wheel)
    assert "byte for byte the same, from nothing" in told


def test_a_second_builder_is_told_where_bytes_differ(wheel: Path, tmp_path: Path) -> None:
    """A wheel with a file more that agrees with itself: only building it again shows that."""
    whole = contents.read(wheel)
    (record,) = [name for name in whole.files if name.endswith("/RECORD")]
    files = {name: content for name, content in whole.files.items() if name != record}
    files |= {f"{PACKAGE}/extra.py": b"x = 1\n"}
    forged = packing.write(tmp_path / wheel.name, files)
    said("inspect", forged)
    done = scripts("inspect", "--rebuild", "--source", "sdist", forged)
    assert done.returncode == 9
    assert f"{forged} is not what a build from nothing gives" in done.stderr
    assert "extra.py" in done.stderr


PARTS = TURNS


def verify(wheel: Path, *chosen: str) -> subprocess.CompletedProcess[str]:
    """In the environment that nox -s verify makes."""
    if shutil.which("nvidia-smi"):
        pytest.skip("this machine has a GPU: nox -s verify proves wheels here")
    return scripts("verify", wheel, *(f"--pytest={word}" for word in chosen))


def noted() -> int:
    """How many kernels are known to compile, on this machine."""
    return sum(path.is_file() for path in layout.cache("flash-attn-4-compiles").glob("*/*"))


@parts([*range(PARTS)])
def test_the_static_half_passes_and_kernels_that_the_gpu_half_calls_compile(wheel: Path, part: str) -> None:
    """Of the GPU half, whose cases count as not run, each turn takes a part; of the static half all."""
    done = verify(wheel, "--part", part)
    assert done.returncode == NotVerified.exit_code, done.stdout + done.stderr  # nothing failed, all compile
    assert re.search(r"\b[1-9]\d+ passed", done.stdout), done.stdout
    (count,) = re.findall(
        r"NOT VERIFIED: (\d+) GPU cases not run, no CUDA device; their kernels compile", done.stdout
    )
    assert int(count) > 1200 // PARTS


@pytest.mark.release
def test_the_whole_suite_s_kernels_compile_and_are_noted(wheel: Path) -> None:
    """Behind the parts, which noted what they compiled."""
    done = verify(wheel)
    assert done.returncode == NotVerified.exit_code, done.stdout + done.stderr
    proof = json.loads(companions.proof(wheel).read_text())
    outcomes = Counter((case["outcome"], case.get("reason", "")) for case in proof["cases"].values())
    not_run = {reason: count for (outcome, reason), count in outcomes.items() if outcome == "not run"}
    assert not_run == {"not run: no CUDA device; their kernels compile": proof["counts"]["not run"]}
    assert proof["counts"]["not run"] > 1200, "cases of the GPU half"
    assert "failed" not in proof["counts"]
    kernels = proof["kernels"]
    assert kernels["compiled"] + kernels["remembered"] == kernels["asked_for"] > 600
    assert noted() >= kernels["asked_for"], "what compiled is noted for the next run"
