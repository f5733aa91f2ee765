"""Prove a wheel: a fresh environment with it and its torch, then the suite in ``tests/wheel``.

The suite itself needs torch, pytest and the installed wheel alone, so a GPU host without a network runs
it directly (docs in README.md).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from scripts.base import console, files, pip
from scripts.base.errors import NotVerified, ToolchainError, UsageError, VerifyError, WheelError
from scripts.base.fetch import sha256
from scripts.base.process import run
from scripts.wheels import wheel
from scripts.wheels.toolchain import find_python
from scripts.wheels.torch_environment import torch_for_cuda

if TYPE_CHECKING:
    from scripts.source import upstream

_NOT_VERIFIED = (
    30  # tests/wheel/conftest.py exits with it when the GPU half did not run, or cases were chosen
)
_PYTEST = "pytest>=8.4"
UPSTREAM_TESTS = PurePosixPath("tests/test_flash_attn.py")


@dataclass(frozen=True)
class Facts:
    """What a wheel says of itself."""

    path: Path
    python: str
    torch: str
    info: dict[str, Any]


def facts_of(path: Path) -> Facts:
    """Read a wheel's name and provenance."""
    name = re.fullmatch(
        r"flash_attn-[^-]+(?:-\d[^-]*)?-cp(\d)(\d+)-cp\d+-(?:many)?linux\w*_x86_64\.whl", path.name
    )
    if not path.is_file():
        raise UsageError(f"{path} does not exist.")
    if name is None:
        raise UsageError(
            f"{path.name} is no wheel of this project (flash_attn-VERSION-KERNELS-cpXY-cpXY-linux_x86_64.whl)."
        )
    try:
        with zipfile.ZipFile(path) as archive:
            if damaged := archive.testzip():
                raise WheelError(f"{path}: {damaged} is damaged; build the wheel again.")
            info = json.loads(archive.read("flash_attn/_fork.json"))
    except (zipfile.BadZipFile, KeyError) as e:
        raise WheelError(f"{path}: not a wheel of this project, or cut off: {e}.") from e
    except ValueError as e:
        raise WheelError(f"{path}: flash_attn/_fork.json is damaged: {e}; build the wheel again.") from e
    try:
        return Facts(path, f"{name[1]}.{name[2]}", str(info["torch"]), info)
    except (KeyError, TypeError) as e:
        raise WheelError(
            f"{path}: flash_attn/_fork.json says nothing of torch; build the wheel again."
        ) from e


def wheels_in(dist: Path) -> list[Path]:
    """The wheels to verify when none is named."""
    found = sorted(dist.glob("flash_attn-*.whl"))
    if not found:
        raise UsageError(
            f"{dist} has no wheels; build one (nox -s build), or name one (nox -s verify -- WHEEL)."
        )
    return found


def installed(facts: Facts, root: Path, logs: Path) -> Path:
    """A new environment with the wheel, its torch and pytest; its Python."""
    python = root / "bin/python"
    log = logs / f"verify-{facts.path.stem}.log"
    run(
        [find_python(facts.python), "-m", "venv", root],
        error=ToolchainError,
        what="could not make a virtual environment",
    )
    run(
        pip.installing(python, torch_for_cuda(facts.torch), "numpy", _PYTEST),
        error=ToolchainError,
        what=f"could not install torch {facts.torch}",
        hint=pip.HINT,
        log=log,
    )
    run(
        pip.installing(python, facts.path.resolve()),
        error=VerifyError,
        what="the wheel does not install",
        hint=pip.HINT,
        log=log,
    )
    run(
        [python, "-m", "pip", "check"],
        error=VerifyError,
        what="pip check fails with the wheel installed",
        log=log,
    )
    return python


def write_upstream_tests(checkout: upstream.Checkout, path: Path) -> None:
    """A release's own tests, which ``tests/wheel`` runs a part of, as a file."""
    files.write(path, checkout.read(str(UPSTREAM_TESTS)).decode("utf-8"))


def verify(
    path: Path, checkout: upstream.Checkout, suite: Path, build: Path, extra: list[str]
) -> dict[str, Any]:
    """Prove one wheel and leave the proof beside it.

    Args:
        path: the wheel.
        checkout: its release, for upstream's own tests.
        suite: ``tests/wheel``.
        build: for environments and logs.
        extra: more arguments for pytest; with any, no proof is kept, for it is not of the whole suite.

    Returns:
        The proof.

    Raises:
        VerifyError: a case failed.
        NotVerified: there is no GPU here; what could be run passed.
    """
    console.step(f"Verifying {path.name}")
    environments = build / "env"
    environments.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=environments, prefix="verify-") as folder:
        root = Path(folder)
        # A copy: a build may put another wheel in its place meanwhile.
        tried = Path(shutil.copyfile(path, root / path.name))
        facts = facts_of(tried)
        console.note(f"fresh environment: Python {facts.python}, torch {facts.torch}, the wheel")
        python = installed(facts, root / "venv", build / "logs")
        # A copy, so that neither this repository's configuration nor its modules reach the suite.
        shutil.copytree(suite, root / "suite", ignore=shutil.ignore_patterns("__pycache__"))
        own = root / "upstream" / UPSTREAM_TESTS.name
        own.parent.mkdir()
        write_upstream_tests(checkout, own)
        proof = root / "proof.json"
        command = [
            python,
            "-m",
            "pytest",
            root / "suite",
            "-c",
            os.devnull,
            f"--rootdir={root / 'suite'}",
            "-q",
            "-p",
            "no:cacheprovider",
        ]
        command += [f"--proof={proof}", f"--wheel={tried}", f"--upstream={own}", *extra]
        status = subprocess.run(
            [str(c) for c in command], cwd=root, env={**os.environ, "PYTHONPATH": ""}, check=False
        ).returncode
        if not proof.is_file():
            raise VerifyError(
                f"{path.name}: the suite did not come to its end: pytest exited with {status}; its output is above."
            )
        result: dict[str, Any] = json.loads(proof.read_text(encoding="utf-8"))
        if not extra:
            if sha256(path) != result["wheel"]["sha256"]:
                raise VerifyError(f"{path} was replaced while it was verified; run this again.")
            aside = wheel.proof_path(path).with_suffix(".part")
            shutil.copyfile(proof, aside)
            aside.replace(wheel.proof_path(path))
    _report(result)
    kept = f" The proof is {wheel.proof_path(path)}." if not extra else ""
    if status == _NOT_VERIFIED and result["counts"].get("not run"):
        raise NotVerified(
            f"{path.name} is NOT VERIFIED: {result['counts']['not run']} GPU cases were not run, because there is no CUDA device here; "
            f"the {result['counts'].get('passed', 0)} static cases passed. Run this on a GPU host, or there without a network as the README says.{kept}"
        )
    if status != 0 and not (extra and status == _NOT_VERIFIED):
        raise VerifyError(
            f"{path.name} failed its suite: {result['counts'].get('failed', 0)} cases failed.{kept}"
        )
    console.done(
        f"{path.name}: the cases that --pytest chose passed, which proves no wheel."
        if extra
        else f"{path.name} is verified.{kept}"
    )
    return result


def _report(proof: dict[str, Any]) -> None:
    """The readable summary."""
    sha = proof["wheel"]["sha256"] if proof["wheel"] else "unknown"
    gpu = proof["gpu"]
    console.note(f"wheel sha256 {sha}")
    console.note(
        f"GPU {gpu['name']} (sm_{gpu['compute_capability'].replace('.', '')}), driver {gpu['driver']}"
        if gpu
        else "no GPU"
    )
    console.note(f"torch {proof['torch']}, Python {proof['python']}")
    console.note(", ".join(f"{count} {outcome}" for outcome, count in proof["counts"].items()))
    for mode, counts in proof.get("upstream", {}).get("counts", {}).items():
        console.note(
            f"upstream's own cases, mode {mode}: "
            + ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
        )
    must = [c for c in proof["controls"] if c["must_differ"]]
    if must:
        console.note(
            f"negative controls: {sum(c['differs'] for c in must)} of {len(must)} differ with the mode off"
        )
    for name, case in proof["cases"].items():
        if case["outcome"] == "failed":
            mismatch = case.get("mismatch")
            text = (
                f"first mismatch at {mismatch['index']}: {' and '.join(mismatch['bits'])} ({mismatch['what']})"
                if mismatch
                else case.get("error", "")
            )
            console.error(f"{name}: {text}")
