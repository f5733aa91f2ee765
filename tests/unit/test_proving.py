"""Proofs on workers of Dask, with a program in the place of ``verify`` and GPUs that are only told of."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from distributed import Client

from scripts.base.errors import NotVerified, ToolchainError, VerifyError
from scripts.wheels.cluster import proving, schedulers
from scripts.wheels.proof import machine_gpus
from scripts.wheels.proof.machine_gpus import Gpu
from scripts.wheels.trust import companions
from tests.unit.conftest import FACTS, VERSION, Command, whole_wheel
from tests.unit.test_cluster import processes

pytestmark = pytest.mark.filterwarnings("ignore:Creating scratch directories:UserWarning")
H100, OTHER_H100 = (Gpu(f"GPU-{n}", "NVIDIA H100", "9.0", "580.82.07") for n in (1, 2))
RTX = Gpu("GPU-3", "NVIDIA RTX 4090", "8.9", "580.82.07")

# It notes the GPU that it was given, as the suite does, and when it began and ended.
# In company, one of four ends only beside another, or when all have begun.
VERIFY = """
import hashlib, json, os, pathlib, sys, time
from scripts.base import sealed
path, gpu, log = pathlib.Path(sys.argv[-1]), os.environ["CUDA_VISIBLE_DEVICES"], pathlib.Path(sys.argv[1])
def note(word):
    with log.open("a") as file:
        print(word, gpu, file=file)
def company():
    begun, ended = (log.read_text().count(word) for word in ("begin", "end"))
    return begun == 4 or begun - ended >= 2
note("begin")
waited = 0
while log.with_suffix(".company").exists() and not company() and waited < 30000:
    waited += 1
    time.sleep(0.02)
note("end")
print("the suite ran")
if "bf16" in path.name:
    sys.exit(10)
sha = "0" * 64 if "fp16" in path.name else hashlib.sha256(path.read_bytes()).hexdigest()
proof = {"format": 1, "verified": True, "counts": {"passed": 1}, "wheel": {"sha256": sha}, "torch": "2.11.0",
         "gpu": {"name": gpu, "compute_capability": "9.0", "driver": "580"}, "python": "3.12", "controls": [], "cases": {}}
path.with_suffix(".proof.json").write_bytes(sealed.render(sealed.seal(proof)))
"""


@dataclasses.dataclass(frozen=True)
class Has:
    gpus: tuple[Gpu, ...]

    def __call__(self) -> tuple[Gpu, ...]:
        return self.gpus


def by_its_variable() -> tuple[Gpu, ...]:
    return {"h100": (H100,), "rtx": (RTX,)}.get(os.environ.get("ITS_GPU", ""), ())


def made(folder: Path, kernels: str = "1_hdim64", arch: str = "90") -> Path:
    """A wheel that says of itself what decides where it is proved."""
    name = f"flash_attn-{VERSION}-{kernels}_sm{arch}-py3-none-manylinux_2_28_x86_64.whl"
    return whole_wheel(folder, name, facts={**FACTS, "architectures": [arch]})


@pytest.fixture
def program(tmp_path: Path) -> tuple[str, ...]:
    script = tmp_path / "verify.py"
    script.write_text(VERIFY)
    return (sys.executable, str(script), str(tmp_path / "log"))


@pytest.fixture
def client() -> Iterator[Client]:
    with schedulers.connected(schedulers.parse("local"), 4) as connected:
        yield connected


def test_each_wheel_is_proved_on_a_worker_that_fits_and_its_proof_lies_beside_it(
    tmp_path: Path, program: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    hopper, ada, blackwell = made(tmp_path, arch="90"), made(tmp_path, arch="89"), made(tmp_path, arch="120")
    with processes(hopper={"ITS_GPU": "h100"}, ada={"ITS_GPU": "rtx"}, bare={}) as (client, _):
        failed = proving.prove_on(client, [hopper, ada, blackwell], program, by_its_variable)
    proved = {path: json.loads(companions.proof(path).read_text()) for path in (hopper, ada)}
    assert [proof["gpu"]["name"] for proof in proved.values()] == ["GPU-1", "GPU-3"]
    assert [proof["wheel"]["sha256"] for proof in proved.values()] == [
        hashlib.sha256(path.read_bytes()).hexdigest() for path in proved
    ]
    (error,) = failed.values()
    assert isinstance(error, NotVerified)
    assert "worker hopper: its NVIDIA H100 has compute capability 9.0 and driver 580.82.07, " in str(error)
    assert "is for compute capability 12.0, and a driver from 580" in str(error)
    assert "worker bare: it has no GPU that nvidia-smi tells of" in str(error)
    assert not companions.proof(blackwell).exists()
    said = capsys.readouterr().out
    assert f"{hopper.name} is verified on worker hopper, NVIDIA H100." in said


def test_a_gpu_has_one_suite_at_a_time_and_two_gpus_two(
    client: Client, tmp_path: Path, program: tuple[str, ...]
) -> None:
    wheels = [made(tmp_path, f"{n}_hdim64") for n in range(4)]
    assert not proving.prove_on(client, wheels, program, Has((H100,)))
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines == ["begin GPU-1", "end GPU-1"] * 4
    (tmp_path / "log").unlink()
    (tmp_path / "log.company").touch()
    with schedulers.connected(schedulers.parse("local"), 4) as other:
        assert not proving.prove_on(other, wheels, program, Has((H100, OTHER_H100)))
    lines = (tmp_path / "log").read_text().splitlines()
    assert sorted(lines[:2]) == ["begin GPU-1", "begin GPU-2"], lines
    assert len(lines) == 2 * len(wheels)
    for gpu in ("GPU-1", "GPU-2"):
        own = [line for line in lines if gpu in line]
        assert own == [f"begin {gpu}", f"end {gpu}"] * (len(own) // 2), "one at a time"


@pytest.mark.parametrize(
    ("kernels", "why"), [("1_bf16", r"status 10\):\n    the suite ran"), ("1_fp16", "was replaced while")]
)
def test_a_suite_that_fails_or_a_proof_of_another_wheel_proves_nothing(
    client: Client, tmp_path: Path, program: tuple[str, ...], kernels: str, why: str
) -> None:
    bad, good = made(tmp_path, kernels), made(tmp_path)
    failed = proving.prove_on(client, [bad, good], program, Has((H100,)))
    with pytest.raises(VerifyError, match=why):
        raise failed[bad]
    assert failed.keys() == {bad}
    assert companions.proof(good).exists()
    assert not companions.proof(bad).exists()


def test_what_is_no_wheel_is_told_and_the_others_are_proved(
    client: Client, tmp_path: Path, program: tuple[str, ...]
) -> None:
    good, damaged = made(tmp_path), made(tmp_path, "2_hdim64")
    damaged.write_bytes(b"PK")
    failed = proving.prove_on(client, [damaged, good], program, Has((H100,)))
    assert failed.keys() == {damaged}
    assert companions.proof(good).exists()


def smi(folder: Path, monkeypatch: pytest.MonkeyPatch, says: str) -> None:
    program = folder / "bin/nvidia-smi"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f"#!/bin/sh\n{says}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")


def test_gpus_are_what_the_driver_tells_and_the_variable_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    smi(
        tmp_path,
        monkeypatch,
        "echo 'GPU-aa, NVIDIA H100 80GB HBM3, 9.0, 580.82.07, 81559'; "
        "echo 'GPU-bb, NVIDIA L4, 8.9, 580.82.07, [N/A]'",
    )
    both = machine_gpus.found()
    assert both == (
        Gpu("GPU-aa", "NVIDIA H100 80GB HBM3", "9.0", "580.82.07", "81559"),
        Gpu("GPU-bb", "NVIDIA L4", "8.9", "580.82.07", "[N/A]"),
    )
    for words, left in (("1", both[1:]), ("GPU-a", both[:1]), ("", ()), ("1,0", both[::-1])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", words)
        assert machine_gpus.found() == left
    smi(tmp_path, monkeypatch, "exit 9")
    assert machine_gpus.found() == ()


@pytest.mark.parametrize(
    "ask",
    [
        lambda: machine_gpus.runs(Gpu("GPU-1", "H100", "9.0", "450.1"), ("90",), "14.0"),
        lambda: machine_gpus.wanted(("90",), "14.0"),
    ],
)
def test_no_driver_is_taken_for_one_of_a_cuda_that_is_not_known(ask: Callable[[], object]) -> None:
    with pytest.raises(ToolchainError, match=r"which driver serves CUDA 14 is not known .* _DRIVERS of"):
        ask()


def test_verify_says_which_worker_lacks_what(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi(tmp_path, monkeypatch, "exit 9")
    ended = command("verify", "--scheduler", "local", str(made(tmp_path)))
    assert ended.status == NotVerified.exit_code
    assert "NOT VERIFIED: no worker can prove it:" in ended.err
    assert command("verify", "--scheduler", "local", "--pytest=-k x", str(made(tmp_path))).status == 2
