from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.base import sealed

SUITE = Path(__file__).resolve().parents[1] / "wheel"
OWN = {p.stem for p in SUITE.glob("*.py")}
ALLOWED = {"flash_attn", "flash_attn_2_cuda", "pytest", "torch", "tvm_ffi"}  # the last one the wheel requires
# Programs that kernels run in, and what comes with them: only what is for them imports them.
CLIENTS = {"safetensors", "sglang", "tokenizers", "transformers", "vllm"}


def imported_by(node: ast.AST) -> set[str]:
    """The top-level modules that an import names; none, if it is no import."""
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    if isinstance(node, ast.ImportFrom) and node.module:
        return {node.module.partition(".")[0]}
    return set()


def imports(path: Path) -> set[str]:
    """The top-level modules that a file names."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return {name for node in nodes for name in imported_by(node)}


FOUR = SUITE.parent / "wheel4"


@pytest.mark.parametrize("path", sorted(FOUR.glob("*.py")), ids=lambda p: p.name)
def test_the_suite_of_flash_attn_4_needs_what_that_wheel_requires_and_the_other_suite_alone(
    path: Path,
) -> None:
    allowed = (
        {"cutlass", "flash_attn", "pytest", "quack", "torch"} | OWN | {p.stem for p in FOUR.glob("*.py")}
    )
    assert imports(path) - set(sys.stdlib_module_names) <= allowed


@pytest.mark.parametrize("path", sorted(SUITE.glob("*.py")), ids=lambda p: p.name)
def test_the_wheel_suite_needs_torch_pytest_and_the_wheel_alone(path: Path) -> None:
    """Clients are imported inside of functions: where there are none, the suite still starts."""
    assert imports(path) - set(sys.stdlib_module_names) <= ALLOWED | OWN | CLIENTS
    outside = [node for node in ast.parse(path.read_text(encoding="utf-8")).body if not hasattr(node, "body")]
    named = {name for node in outside for name in imported_by(node)}
    assert not named & CLIENTS


def test_no_conftest_above_the_suite_is_loaded_with_it() -> None:
    """Pytest loads conftest.py of every folder above; one that needs the build system would break a GPU host."""
    assert [p for p in (SUITE.parent, SUITE.parent.parent) if (p / "conftest.py").exists()] == []


FAKE = """
__version__ = "0"
def fork_info(): return {"kernels": []}
def set_deterministic_mode(*a): pass
def deterministic_mode(*a, **k): pass
flash_attn_func = flash_attn_varlen_func = flash_attn_with_kvcache = None
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """The suite's own conftest around tests of our making, with a torch that sees a GPU and a wheel that does nothing."""
    for name in ("bits.py", "conftest.py", "harness.py", "kernel_names.py", "ledger.py"):
        (tmp_path / name).write_text((SUITE / name).read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "flash_attn.py").write_text(FAKE)
    (tmp_path / "flash_attn_2_cuda.py").write_text("")
    torch = "class Tensor: pass\nfloat16 = bfloat16 = float32 = float64 = dtype = Generator = int16 = int32 = None\n__version__ = '0'\n"
    torch += "class version: cuda = '0'\nclass cuda:\n  is_available = staticmethod(lambda: GPU)\n  get_device_properties = staticmethod(lambda i: P)\n"
    torch += "class P: name, major, minor, multi_processor_count, total_memory = 'test', 9, 0, 1, 1\nimport os\nGPU = os.environ['GPU'] == '1'\n"
    (tmp_path / "torch.py").write_text(torch)
    return tmp_path


def run(suite: Path, body: str, gpu: bool = True, *chosen: str) -> tuple[int, dict[str, object], str]:
    (suite / "test_it.py").write_text("import pytest, harness\n" + body)
    own = [] if any(word.endswith(".py") and "=" not in word for word in chosen) else [str(suite)]
    command = [
        sys.executable,
        "-m",
        "pytest",
        *own,
        *chosen,
        "-c",
        os.devnull,
        f"--rootdir={suite}",
        "-q",
        "--proof",
        str(suite / "proof.json"),
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "GPU": str(int(gpu)), "PYTHONPATH": str(suite)},
        cwd=suite,
    )
    return done.returncode, json.loads((suite / "proof.json").read_text()), done.stdout


CONTROL = "@pytest.mark.gpu\ndef test_a(control): control({0})\n@pytest.mark.gpu\ndef test_b(control): control({1}, must_differ={2})\n"


def test_a_control_that_differs_verifies(suite: Path) -> None:
    status, proof, _ = run(suite, CONTROL.format(True, False, True))
    assert status == 0
    assert proof["verified"] is True


def test_a_run_in_which_no_control_differs_fails_though_every_case_passed(suite: Path) -> None:
    status, proof, out = run(suite, CONTROL.format(False, True, False))
    assert status == 1
    assert proof["verified"] is False
    assert "NO NEGATIVE CONTROL DIFFERED" in out


@pytest.mark.parametrize("chosen", [["-k", "test_a"], ["test_it.py"], ["--ignore=test_other.py"]], ids=str)
def test_cases_that_somebody_chose_verify_nothing(suite: Path, chosen: list[str]) -> None:
    (suite / "test_other.py").write_text("def test_c(): pass\n")
    status, proof, out = run(suite, CONTROL.format(True, True, True), True, *chosen)
    assert status == 30
    assert proof["verified"] is False
    assert "NOT VERIFIED: only chosen cases ran" in out


PARALLEL = ["-p", "xdist", "-n", "2", "--dist", "loadfile"]


def test_processes_of_xdist_leave_the_proof_of_one(suite: Path) -> None:
    """Cases, controls and what a case adds to the proof, whichever process they ran in."""
    other = "import pytest\ndef test_c(entry): entry.update(upstream={'passed': 3}, sizes={10: 1, 9: 1})\ndef test_d(): pytest.skip('no kernel')\n"
    (suite / "test_other.py").write_text(other)
    proofs = []
    for options in ([], PARALLEL):
        status, proof, out = run(suite, CONTROL.format(True, False, False), True, *options)
        assert status == 0
        assert "negative controls: 1 of 1 differ" in out
        assert sealed.flaw((suite / "proof.json").read_bytes()) == ""
        proof.pop("digest")
        for case in proof["cases"].values():  # type: ignore[attr-defined]
            case.pop("seconds")
        proofs.append({**proof, "controls": sorted(map(str, proof["controls"]))})  # type: ignore[call-overload]
    assert proofs[0] == proofs[1]
    assert proofs[0]["counts"] == {"passed": 3, "skipped": 1}
    assert proofs[0]["upstream"] == {"passed": 3}


@pytest.mark.parametrize(("chosen", "status"), [(["-k", "test_a"], 30), ([], 1)], ids=str)
def test_processes_of_xdist_verify_no_more_than_one(suite: Path, chosen: list[str], status: int) -> None:
    found, proof, _ = run(suite, CONTROL.format(bool(chosen), True, False), True, *PARALLEL, *chosen)
    assert found == status
    assert proof["verified"] is False


def test_a_process_of_xdist_that_dies_fails_the_proof(suite: Path) -> None:
    status, proof, _ = run(
        suite, "import os\ndef test_dies(): os._exit(9)\n" + CONTROL.format(True, True, True), True, *PARALLEL
    )
    assert status == 1
    assert proof["verified"] is False


def test_without_a_gpu_the_status_is_not_verified(suite: Path) -> None:
    status, proof, out = run(suite, CONTROL.format(True, True, True) + "def test_static(): pass\n", gpu=False)
    assert status == 30
    assert proof["verified"] is False
    assert proof["counts"] == {"not run": 2, "passed": 1}
    assert "NOT VERIFIED: 2 GPU cases not run" in out


def test_a_failure_outweighs_a_missing_gpu(suite: Path) -> None:
    status, proof, _ = run(
        suite, "def test_static(): assert 0\n" + CONTROL.format(True, True, True), gpu=False
    )
    assert status == 1
    assert proof["verified"] is False


def test_a_mismatch_is_in_the_proof_with_index_and_bits(suite: Path) -> None:
    details = "{'index': [1, 2], 'bits': ['0x3c00', '0x3c01'], 'what': 'out'}"
    status, proof, _ = run(suite, f"def test_a(): raise harness.Mismatch('differ', {details})\n")
    assert status == 1
    (case,) = proof["cases"].values()  # type: ignore[attr-defined]
    assert case["mismatch"]["bits"] == ["0x3c00", "0x3c01"]


def test_a_suite_that_breaks_off_leaves_no_proof_and_is_not_taken_for_one_without_a_gpu(suite: Path) -> None:
    (suite / "plugin.py").write_text(
        "def pytest_runtest_protocol(item): raise RuntimeError('a fault of pytest')\n"
    )
    with pytest.raises(FileNotFoundError):
        run(suite, "pytest_plugins = ['plugin']\ndef test_static(): pass\n", gpu=False)


def test_a_suite_that_runs_nothing_is_not_verified(suite: Path) -> None:
    status, proof, _ = run(suite, "")
    assert status != 0
    assert proof["verified"] is False
