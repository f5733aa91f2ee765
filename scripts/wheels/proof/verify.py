"""Prove a wheel: a fresh environment with it and its torch, then its suite in ``tests/``.

A suite itself needs torch, pytest and the installed wheel alone, so a GPU host without a network runs
it directly (docs/proving.md).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from packaging.utils import canonicalize_name

from scripts.base import console, files, layout, pip
from scripts.base.errors import NotVerified, ToolchainError, UsageError, VerifyError, WheelError
from scripts.base.fetch import sha256
from scripts.base.process import run
from scripts.wheels.proof import cpp_tests, machine_gpus, suites
from scripts.wheels.toolchain.compilers import find_python, running_python
from scripts.wheels.toolchain.torch_environment import torch_for_cuda
from scripts.wheels.trust import companions, evidence
from scripts.wheels.trust.models import Proof, Provenance, read_proof

if TYPE_CHECKING:
    from scripts.source import upstream

# tests/wheel/ledger.py exits with it when the GPU half did not run, or cases were chosen.
_NOT_VERIFIED = 30
_PYTEST, _PROCESSES = "pytest>=8.4", "pytest-xdist>=3.6"
UPSTREAM_TESTS = PurePosixPath("tests/test_flash_attn.py")


@dataclass(frozen=True)
class Facts:
    """What a wheel says of itself, by its name and its provenance."""

    path: Path
    provenance: Provenance
    sha256: str = ""  # as it was checked
    suite: suites.Suite = suites.SUITES[0]

    @property
    def torch(self) -> str:
        """The version that it is proved beside."""
        return self.provenance.torch or self.suite.torch


@dataclass(frozen=True)
class Beside:
    """What a wheel is tried beside: versions, or its own torch and the running Python.

    A proof of the latter is kept beside the wheel, unless that lies in an index, which would be changed.
    """

    torch: str | None = None
    python: str | None = None
    keeps: bool = True

    def in_words(self, facts: Facts) -> str:
        """Both, of a wheel."""
        return f"Python {self.python or running_python()}, torch {self.torch or facts.torch}"


def facts_of(path: Path) -> Facts:
    """Check a wheel and what lies beside it; what it says of itself.

    Raises:
        UsageError: it does not exist, or is no wheel of this project.
        VerifyError: its proof is damaged.
        WheelError: it, or a file beside it, was changed; the message names the file.
    """
    if not path.is_file():
        raise UsageError(f"{path} does not exist.")
    suite = suites.of(path)
    checked = evidence.check(path).wheel
    if checked.provenance_name != suite.provenance:
        raise WheelError(
            f"{path}: its provenance is {checked.provenance_name}, and tests/{suite.folder} proves wheels "
            f"that have {suite.provenance}."
        )
    return Facts(path, checked.provenance, checked.sha256, suite)


def wheels_in(dist: Path, distribution: str = "") -> list[Path]:
    """The wheels to verify when none is named; those of one distribution, where that is given."""
    wheels = sorted([*dist.glob("flash_attn-*.whl"), *dist.glob("flash_attn_4-*.whl")])
    wheels = [path for path in wheels if not distribution or is_of(path, distribution)]
    if not wheels:
        of = f" of {distribution}" if distribution else ""
        raise UsageError(
            f"{dist} has no wheels{of}; build one (nox -s build), or name one (nox -s verify -- WHEEL)."
        )
    return wheels


def is_of(path: Path, distribution: str) -> bool:
    """Whether a wheel is of this distribution, by its name."""
    return canonicalize_name(path.name.partition("-")[0]) == canonicalize_name(distribution)


def installed(facts: Facts, root: Path, logs: Path, beside: Beside = Beside()) -> Path:
    """A new environment with the wheel, a torch and pytest; its Python."""
    console.note(f"fresh environment: {beside.in_words(facts)}, the wheel")
    python, torch = root / "bin/python", beside.torch or facts.torch
    log = logs / f"verify-{facts.path.stem}.log"
    run(
        pip.making(find_python(beside.python), root),
        error=ToolchainError,
        what="could not make a virtual environment",
    )
    packages = (torch_for_cuda(torch), "numpy", _PYTEST, _PROCESSES, *facts.suite.requirements)
    run(
        pip.installing(python, *packages),
        error=ToolchainError,
        what=f"could not install torch {torch}",
        hint=pip.HINT,
        log=log,
    )
    run(
        pip.by_pip(python, facts.path.resolve(), *facts.suite.requirements),
        error=VerifyError,
        what="the wheel does not install",
        hint=pip.HINT,
        log=log,
    )
    run(
        pip.checking(python),
        error=VerifyError,
        what="pip check fails with the wheel installed",
        log=log,
    )
    return python


def write_upstream_tests(checkout: upstream.Checkout, path: Path) -> None:
    """A release's own tests, which ``tests/wheel`` runs a part of, as a file."""
    files.write(path, checkout.read(str(UPSTREAM_TESTS)).decode("utf-8"))


def verify(
    path: Path,
    checkout: upstream.Checkout,
    suite: Path,
    build: Path,
    extra: list[str],
    beside: Beside = Beside(),
) -> Proof:
    """Prove one wheel and leave the proof beside it.

    Args:
        path: the wheel.
        checkout: its release, for upstream's own tests.
        suite: ``tests/wheel``.
        build: for environments and logs.
        extra: more arguments for pytest; with any, no proof is kept, for it is not of the whole suite.
        beside: the torch and the Python to try it beside; with either, no proof is kept, for a wheel's proof
            is of its own.

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
        facts = _copied(facts_of(path), root)
        python = installed(facts, root / "venv", build / "logs", beside)
        proof = root / "proof.json"
        status = _run_suite(python, suite, facts, proof, checkout, extra)
        if not proof.is_file():
            raise VerifyError(
                f"{path.name}: the suite did not come to its end: pytest exited with {status}; "
                "its output is above."
            )
        result = read_proof(proof)
        is_kept = not extra and beside == Beside()
        if is_kept:
            keep_proof(path, proof, result)
    _report(result)
    kept = f" The proof is {companions.proof(path)}." if is_kept else " No proof was kept."
    _judge(path, status, result, kept, chosen=bool(extra))
    return result


def _copied(facts: Facts, folder: Path) -> Facts:
    """The wheel to try: a build may put another one in its place meanwhile."""
    tried = Path(shutil.copyfile(facts.path, folder / facts.path.name))
    if sha256(tried) != facts.sha256:
        raise VerifyError(f"{facts.path} was replaced while it was verified; run this again.")
    return replace(facts, path=tried)


def _run_suite(
    python: Path, suite: Path, facts: Facts, proof: Path, checkout: upstream.Checkout, extra: list[str]
) -> int:
    """Run the suite on an installed wheel; pytest's exit status."""
    tried, kind = facts.path, facts.suite
    root = tried.parent
    # A copy, so that neither this repository's configuration nor its modules reach the suite.
    folder = root / "suite" / suite.name
    for name in (suite.name, *kind.beside):
        shutil.copytree(
            suite.parent / name, folder.parent / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    options: list[str | Path] = [f"--proof={proof}", f"--wheel={tried}"]
    if kind.remembered:
        options.append(f"--remember={layout.cache(kind.remembered)}")
    if kind.upstream:
        own = root / "upstream" / UPSTREAM_TESTS.name
        own.parent.mkdir()
        write_upstream_tests(checkout, own)
        options.append(f"--upstream={own}")
    there = machine_gpus.found()
    if kind.cpp and there:
        options += cpp_tests.option(tried, facts.provenance.cuda, root / "cpp")
    parallel = kind.parallel(there, untold=bool(kind.roomy) and not there and _has_gpu(python))
    command = [
        *(python, "-m", "pytest", folder, "-c", os.devnull, f"--rootdir={folder}"),
        *("-q", "-p", "no:cacheprovider", *parallel, *options, *extra),
    ]
    words, environment = [str(word) for word in command], {**os.environ, "PYTHONPATH": ""}
    return subprocess.run(words, cwd=root, env=environment, check=False).returncode


def _has_gpu(python: Path) -> bool:
    """Whether torch has a GPU, told by nvidia-smi or not: part of one, say."""
    asked: list[str | Path] = [python, "-c", "import torch; raise SystemExit(not torch.cuda.is_available())"]
    return subprocess.run(asked, capture_output=True, check=False).returncode == 0


def keep_proof(path: Path, proof: Path, result: Proof) -> None:
    """Put a proof beside its wheel."""
    if result.wheel is None or sha256(path) != result.wheel.sha256:
        raise VerifyError(f"{path} was replaced while it was verified; run this again.")
    for stale in companions.of_proof(path):
        stale.unlink(missing_ok=True)
    files.copy(proof, companions.proof(path))
    evidence.attest_proof(path)


def _judge(path: Path, status: int, result: Proof, kept: str, *, chosen: bool) -> None:
    """Tell what pytest's status means, or raise it; ``chosen``: ``--pytest`` chose cases."""
    counts = result.counts
    if status == _NOT_VERIFIED and counts.get("not run"):
        raise NotVerified(
            f"{path.name} is NOT VERIFIED: {counts['not run']} GPU cases were not run, because there is no "
            f"CUDA device here; the {counts.get('passed', 0)} static cases passed. Run this on a GPU host, "
            f"or there without a network as docs/proving.md says.{kept}"
        )
    if status != 0 and not (chosen and status == _NOT_VERIFIED):
        raise VerifyError(f"{path.name} failed its suite: {counts.get('failed', 0)} cases failed.{kept}")
    console.done(
        f"{path.name}: the cases that --pytest chose passed, which proves no wheel."
        if chosen
        else f"{path.name} is verified.{kept}"
    )


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {outcome}" for outcome, count in counts.items())


def _report(proof: Proof) -> None:
    """The readable summary."""
    gpu, must = proof.gpu, [control for control in proof.controls if control.must_differ]
    console.note(f"wheel sha256 {proof.wheel.sha256 if proof.wheel else 'unknown'}")
    console.note(
        f"GPU {gpu.name} (sm_{gpu.compute_capability.replace('.', '')}), driver {gpu.driver}"
        if gpu
        else "no GPU"
    )
    console.note(f"torch {proof.torch}, Python {proof.python}")
    console.note(_counted(proof.counts))
    for mode, counts in (proof.upstream.counts if proof.upstream else {}).items():
        console.note(f"upstream's own cases, mode {mode}: {_counted(counts)}")
    if must:
        differing = sum(control.differs for control in must)
        console.note(f"negative controls: {differing} of {len(must)} differ with the mode off")
    for name, case in proof.cases.items():
        if case.outcome == "failed":
            console.error(f"{name}: {case.what_failed}")
