from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from scripts import __main__
from scripts.base import layout
from scripts.base.errors import NotVerified, UsageError, VerifyError, WheelError
from scripts.series import model, tree
from scripts.source import matrix, upstream
from scripts.wheels.proof import machine_gpus, origin, suites, verify
from scripts.wheels.trust.models import Provenance, read_proof
from tests.unit.conftest import (
    BASE,
    FACTS,
    ROOT,
    WHEEL_NAME,
    Command,
    Make,
    checkout_of,
    commit,
    user,
    whole_wheel,
    write_files,
)

EDIT = ("Change line 20", {"setup.py": BASE["setup.py"].replace("line 20\n", "line twenty\n")})
OWN = {"flash_attn/fork.py": "a = 1\n", "flash_attn/fork_b.py": "b = 2\n"}
MORE = ("Add a header", {"csrc/flash_attn/src/fork.h": "#pragma once\n"})


@pytest.fixture
def repository(make_series: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository like this one, of one patch, on an upstream of a few files."""
    root = tmp_path / "repository"
    root.mkdir()
    make_series(EDIT, folder=root, to="patches/flash-attn")
    make_series(MORE, folder=root, to="patches/flash-attn-4")
    write_files(root / "fork/flash-attn", OWN)
    (root / "wheel_matrix.toml").write_bytes((ROOT / "wheel_matrix.toml").read_bytes())
    monkeypatch.setattr(upstream, "find", lambda pin, folder, cache: checkout_of(BASE))
    user(root, "init", "--quiet")
    commit_state(root)
    return root


def commit_state(root: Path) -> str:
    commit(root, "-m", "state")
    return user(root, "rev-parse", "HEAD").strip()


def facts(root: Path, tmp_path: Path) -> verify.Facts:
    """What a wheel built from the repository as it is says of itself."""
    patches = model.read(root / "patches/flash-attn", root / "fork/flash-attn")
    applied = tree.apply(
        patches, matrix.load(root / "wheel_matrix.toml").upstream, checkout_of(BASE), tmp_path / "source"
    )
    told = {
        "digest": applied.digest,
        "base": applied.base,
        "patches": [{"name": p.name, "sha256": p.sha256} for p in patches.patches],
        "own_files": patches.own.digests,
    }
    provenance = Provenance.model_validate_json(json.dumps({"format": 1, "torch": "2.11.0", "series": told}))
    return verify.Facts(tmp_path / "some.whl", provenance)


def test_a_wheel_of_the_series_here_is_known(repository: Path, tmp_path: Path) -> None:
    assert origin.check_series(facts(repository, tmp_path), repository, tmp_path).where == "this checkout"


def test_a_wheel_of_an_earlier_commit_is_known_by_it(
    repository: Path, tmp_path: Path, make_series: Make
) -> None:
    old, first = facts(repository, tmp_path), user(repository, "rev-parse", "HEAD").strip()
    make_series(EDIT, MORE, folder=repository, to="patches/flash-attn")
    commit_state(repository)
    assert origin.check_series(old, repository, tmp_path).where == f"commit {first[:12]}"


def test_a_wheel_of_other_own_files_is_known_by_its_commit(repository: Path, tmp_path: Path) -> None:
    write_files(repository, {"fork/flash-attn/.clang-format": "x\n"})  # which is read by no build
    old, first = facts(repository, tmp_path), commit_state(repository)
    write_files(repository / "fork/flash-attn", {"flash_attn/fork.py": "a = 2\n"})
    newer = facts(repository, tmp_path)
    second = commit_state(repository)
    write_files(repository / "fork/flash-attn", {"flash_attn/fork.py": "a = 3\n"})
    commit_state(repository)
    for told, where in ((old, first), (newer, second)):
        assert origin.check_series(told, repository, tmp_path).where == f"commit {where[:12]}"


def test_a_wheel_from_before_there_were_several_upstreams_is_known(
    repository: Path, tmp_path: Path, make_series: Make
) -> None:
    """A matrix had one table upstream then, and the series lay in patches/, which added our files."""
    shutil.rmtree(repository / "fork")
    old = facts(repository, tmp_path)
    shutil.move(repository / "patches/flash-attn", repository / "moved")
    shutil.rmtree(repository / "patches")
    (repository / "moved").rename(repository / "patches")
    pin = matrix.load(repository / "wheel_matrix.toml").upstream.model_dump(
        by_alias=True, exclude={"kind", "package"}
    )
    lines = ["[upstream]", *(f'{key} = "{value}"' for key, value in pin.items()), "[fork]", "revision = 1"]
    (repository / "wheel_matrix.toml").write_text("\n".join(lines) + "\n")
    first = commit_state(repository)
    shutil.rmtree(repository / "patches")
    make_series(MORE, folder=repository, to="patches/flash-attn")
    make_series(MORE, folder=repository, to="patches/flash-attn-4")
    (repository / "wheel_matrix.toml").write_bytes((ROOT / "wheel_matrix.toml").read_bytes())
    commit_state(repository)
    assert origin.check_series(old, repository, tmp_path).where == f"commit {first[:12]}"


@pytest.mark.parametrize("lie", ["digest", "base", "patch", "own file", "one own file less"])
def test_a_wheel_that_no_state_of_the_repository_gives_is_refused(
    repository: Path, tmp_path: Path, lie: str
) -> None:
    told = facts(repository, tmp_path)
    series = told.provenance.series
    if lie == "patch":
        patches = (series.patches[0].model_copy(update={"sha256": "0" * 64}), *series.patches[1:])
        series = series.model_copy(update={"patches": patches})
    elif lie.endswith(("file", "less")):
        own = dict(series.own_files)
        own["flash_attn/fork.py"] = "0" * 64
        if lie.endswith("less"):
            del own["flash_attn/fork.py"]
        series = series.model_copy(update={"own_files": own})
    else:
        series = series.model_copy(update={lie: "0" * len(getattr(series, lie))})
    told = replace(told, provenance=told.provenance.model_copy(update={"series": series}))
    with pytest.raises(VerifyError, match="no state of this repository gives its series"):
        origin.check_series(told, repository, tmp_path)


def passing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, body: str = "pass"
) -> tuple[Path, Path, upstream.Checkout]:
    """A wheel, a suite that writes a proof of it and passes, and no release's own tests. Pytest is real."""
    wheel, suite = whole_wheel(folder), folder / "suite"
    suite.mkdir()
    proof: dict[str, object] = {
        "format": 1,
        "verified": True,
        "gpu": None,
        "torch": "2.11.0",
        "python": "3.12",
        "counts": {"passed": 1},
        "controls": [],
        "cases": {},
    }
    options = "".join(f"    parser.addoption('--{name}')\n" for name in ("proof", "wheel", "upstream"))
    finish = f"""
import hashlib, json
def pytest_sessionfinish(session):
    tried = hashlib.sha256(open(session.config.getoption("--wheel"), "rb").read()).hexdigest()
    proof = {proof!r} | {{"wheel": {{"sha256": tried}}}}
    said = json.dumps(proof, sort_keys=True, separators=(",", ":"))
    proof["digest"] = hashlib.sha256(said.encode()).hexdigest()
    with open(session.config.getoption("--proof"), "w") as file:
        file.write(json.dumps(proof, indent=1) + "\\n")
"""
    (suite / "conftest.py").write_text(f"def pytest_addoption(parser):\n{options}{finish}")
    (suite / "test_it.py").write_text(f"def test_passes(): {body}\n")
    monkeypatch.setattr(verify, "installed", lambda *_: sys.executable)
    monkeypatch.setattr("os.cpu_count", lambda: 1)  # each of several processes would write a proof
    return wheel, suite, upstream.Checkout(upstream.Source.SDIST, "", lambda _: None, lambda _: b"")


def test_a_wheel_that_is_replaced_while_it_is_verified_has_no_proof(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / WHEEL_NAME
    wheel, suite, checkout = passing(tmp_path, monkeypatch, f"open({str(place)!r}, 'ab').write(b'another')")
    with pytest.raises(VerifyError, match="was replaced while it was verified"):
        verify.verify(wheel, checkout, suite, tmp_path / "build", [])
    assert not wheel.with_suffix(".proof.json").exists()


def test_a_whole_suite_that_says_not_verified_is_not_taken_for_a_proof(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel, suite, checkout = passing(tmp_path, monkeypatch)
    (suite / "conftest.py").write_text((suite / "conftest.py").read_text() + "    session.exitstatus = 30\n")
    with pytest.raises(VerifyError, match="failed its suite"):
        verify.verify(wheel, checkout, suite, tmp_path / "build", [])


@pytest.mark.parametrize("extra", [[], ["-k", "passes"]])
def test_cases_that_somebody_chose_verify_no_wheel_and_leave_no_proof(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], extra: list[str]
) -> None:
    wheel, suite, checkout = passing(tmp_path, monkeypatch)
    verify.verify(wheel, checkout, suite, tmp_path / "build", extra)
    assert ("which proves no wheel" in capsys.readouterr().out) == bool(extra)
    assert wheel.with_suffix(".proof.json").exists() == (not extra)
    assert wheel.with_suffix(".proof.statement.json").exists() == (not extra)


@pytest.mark.parametrize("beside", [verify.Beside(torch="2.12.1"), verify.Beside(python="3.13")])
def test_what_a_wheel_does_beside_other_versions_is_not_its_proof(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], beside: verify.Beside
) -> None:
    """The proof that is there, of its own torch, stays as it is."""
    wheel, suite, checkout = passing(tmp_path, monkeypatch)
    verify.verify(wheel, checkout, suite, tmp_path / "build", [])
    kept = wheel.with_suffix(".proof.json")
    before = kept.stat()
    verify.verify(wheel, checkout, suite, tmp_path / "build", [], beside)
    assert "No proof was kept" in capsys.readouterr().out
    assert kept.stat().st_mtime_ns == before.st_mtime_ns


@pytest.mark.parametrize("versions", ["--torch=2.12.1", "--python=3.13"])
@pytest.mark.parametrize("proof", ["--sign", "--attest"])
def test_a_proof_that_is_not_kept_is_not_attested(command: Command, versions: str, proof: str) -> None:
    done = command("verify", versions, proof)
    assert done.status == UsageError.exit_code
    assert "none is kept" in done.err


def test_a_damaged_proof_is_refused_by_file_and_key(tmp_path: Path) -> None:
    path = tmp_path / "proof.json"
    path.write_text('{"format": 1, "verified": "yes"}')
    with pytest.raises(VerifyError, match=rf"{path} is damaged: verified: .*; run nox -s verify again"):
        read_proof(path)


def test_a_file_that_is_no_wheel_of_ours_is_refused(tmp_path: Path) -> None:
    foreign = tmp_path / "numpy-2.0-cp312-cp312-linux_x86_64.whl"
    foreign.touch()
    with pytest.raises(UsageError, match="no wheel of this project"):
        verify.facts_of(foreign)
    cut = tmp_path / WHEEL_NAME
    cut.write_bytes(b"PK")
    with pytest.raises(WheelError, match="cut off"):
        verify.facts_of(cut)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_wheel_that_fails_outweighs_one_that_cannot_be_proved_here(
    monkeypatch: pytest.MonkeyPatch, order: tuple[int, int]
) -> None:
    wheels = [
        ("absent.whl", UsageError("absent.whl does not exist")),
        ("good.whl", NotVerified("good.whl is NOT VERIFIED")),
    ]
    told = dict(wheels)

    def facts_of(path: Path) -> verify.Facts:
        raise told[path.name]

    monkeypatch.setattr(verify, "facts_of", facts_of)
    with pytest.raises(SystemExit) as ended:
        __main__.main_inner(["verify", *(wheels[place][0] for place in order)])
    assert ended.value.code == UsageError.exit_code


def test_an_empty_dist_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nox -s build"):
        verify.wheels_in(tmp_path)


def test_a_wheel_of_flash_attn_4_has_its_own_suite_torch_and_this_python(tmp_path: Path) -> None:
    told = {name: value for name, value in FACTS.items() if name != "torch"}
    name = "flash_attn_4-4.0.0b36+det.1-py3-none-any.whl"
    path = whole_wheel(tmp_path, name, "flash_attn/cute/_fork.json", told)
    facts = verify.facts_of(path)
    assert (facts.suite.folder, facts.torch) == ("wheel4", "2.11.0")
    assert verify.wheels_in(tmp_path) == [path]


def test_the_wheels_of_an_upstream_are_proved_when_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    four = tmp_path / "flash_attn_4-4.0.0b36+det.1-py3-none-any.whl"
    for path in (four, tmp_path / WHEEL_NAME):
        path.touch()
    tried: list[Path] = []

    def facts_of(path: Path) -> verify.Facts:
        tried.append(path)
        raise NotVerified(f"{path.name} is NOT VERIFIED")

    monkeypatch.setattr(verify, "facts_of", facts_of)
    monkeypatch.setattr(layout, "DIST", tmp_path)
    assert command("verify", "--upstream", "flash-attn-4").status == NotVerified.exit_code
    assert tried == [four]
    command("verify", "--upstream", "flash-attn")
    assert tried == [four, tmp_path / WHEEL_NAME]
    said = command("verify", "--upstream", "flash-attn", str(four))
    assert said.status == UsageError.exit_code
    assert "is no wheel of flash-attn; leave out --upstream" in said.err
    four.unlink()
    assert "has no wheels of flash-attn-4; build one" in command("verify", "--upstream", "flash-attn-4").err
    said = command(
        "verify", "--upstream", "flash-attn-4", "--write-upstream-tests", str(tmp_path / "tests.py")
    )
    assert "the suite of its wheels runs none of upstream's own tests" in said.err


def test_a_wheel_whose_provenance_lies_elsewhere_is_no_wheel_of_the_suite(tmp_path: Path) -> None:
    path = whole_wheel(tmp_path, place="flash_attn/cute/_fork.json")
    with pytest.raises(WheelError, match=r"its provenance is flash_attn/cute/_fork\.json"):
        verify.facts_of(path)


def test_a_suite_has_processes_as_cores_and_the_gpu_s_memory_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    one, four = suites.SUITES
    large, small, silent = (
        machine_gpus.Gpu("GPU-1", "a GPU", "9.0", "580.1", mib) for mib in ("81559", "24564", "")
    )
    told = []
    for cores in (1, 2, 64):
        monkeypatch.setattr("os.cpu_count", lambda cores=cores: cores)
        told.append(four.parallel(())[1:2])
    assert told == [(), ("2",), ("8",)]
    assert one.parallel(()) == ("--numprocesses", "8", "--dist", "worksteal")
    assert one.parallel((silent,)) == one.parallel((), untold=True) == ()
    assert one.parallel((large, small)) == ("--numprocesses", "8", "--dist", "loadfile")
    assert one.parallel((small, large)) == ()
