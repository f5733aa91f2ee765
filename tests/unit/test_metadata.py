"""What a wheel says of itself: METADATA and ``flash_attn/_fork.json``."""

from __future__ import annotations

import configparser
import dataclasses
import hashlib
import json
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from scripts.base import layout
from scripts.base.errors import WheelError
from scripts.series import model
from scripts.source import kernel_set, matrix
from scripts.wheels.compiling import kernels
from scripts.wheels.packing import metadata
from scripts.wheels.toolchain import tvm_ffi
from tests.unit.conftest import TWO, Make, plan, toolchain, write_files

MATRIX = matrix.load(layout.MATRIX)
TARGET = MATRIX.named("cu13")
SETUP = """
setup(
    name="flash_attn",
    packages=find_packages(exclude=("tests", "flash_attn.cute", "flash_attn.cute.*")),
    install_requires=["torch", "einops"],
)
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A tree with packages, one of them excluded, one without __init__.py."""
    files = {"setup.py": SETUP}
    for folder in (
        "flash_attn",
        "flash_attn/ops",
        "flash_attn/cute",
        "flash_attn/cute/deep",
        "flash_attn_2_cuda",
    ):
        files |= {f"{folder}/__init__.py": "", f"{folder}/code.py": "", f"{folder}/notes.txt": ""}
    write_files(tmp_path / "tree", {**files, "flash_attn/scripts/code.py": "", "tests/__init__.py": ""})
    return tmp_path / "tree"


def test_metadata_is_the_fork_s_with_upstream_s_requirements_and_notice(root: Path) -> None:
    text = metadata.fork_metadata(root, MATRIX, TARGET)
    assert text.splitlines()[0] == "Metadata-Version: 2.4"
    made = Parser().parsestr(text)
    assert [made.get_all(name) for name in ("Name", "Version")] == [["flash_attn"], [MATRIX.version(TARGET)]]
    assert MATRIX.version(TARGET) == "2.8.3.post1+det.2.cu13"
    assert "deterministic mode" in made["Summary"]
    required = [Requirement(line) for line in made.get_all("Requires-Dist", [])]
    assert [r.name for r in required] == ["torch", "einops", "apache-tvm-ffi"]
    assert required[0].specifier == SpecifierSet(TARGET.torch)
    assert tvm_ffi.VERSION in required[2].specifier
    assert made["Requires-Python"] == ">=3.10"
    assert set(made.get_all("License-File", [])) == {"LICENSE", "AUTHORS", "NOTICE"}
    assert made.get_payload() == (layout.ROOT / metadata.DESCRIPTION).read_text(encoding="utf-8")


def test_a_torch_without_an_exchange_of_its_own_gets_the_package_that_has_it(root: Path) -> None:
    made = Parser().parsestr(metadata.fork_metadata(root, MATRIX, MATRIX.named("cu12")))
    assert "torch-c-dlpack-ext>=0.1.5" in made.get_all("Requires-Dist", [])
    # Of torch 2.6 and earlier apache-tvm-ffi compiles it, which takes setuptools; Python 3.10 need not have that.
    assert "setuptools>=65" in made.get_all("Requires-Dist", [])


@pytest.mark.parametrize("required", ["torch>=2.2", "einops"])
def test_a_setup_py_that_does_not_require_torch_alone_is_an_error(root: Path, required: str) -> None:
    (root / "setup.py").write_text(SETUP.replace('"torch"', f'"{required}"'))
    with pytest.raises(WheelError, match="does not require torch as expected"):
        metadata.fork_metadata(root, MATRIX, TARGET)


def test_the_files_are_those_of_the_packages_that_setup_py_finds(root: Path) -> None:
    assert metadata.python_files(root, ("flash_attn_2_cuda",)) == [
        "flash_attn/__init__.py",
        "flash_attn/code.py",
        "flash_attn/ops/__init__.py",
        "flash_attn/ops/code.py",
        "flash_attn_2_cuda/__init__.py",
        "flash_attn_2_cuda/code.py",
    ]
    (root / "setup.py").write_text("setup(packages=['flash_attn'])\n")
    with pytest.raises(WheelError, match="calls find_packages no more"):
        metadata.python_files(root)


def test_the_entry_points_are_those_whose_module_the_tree_has(root: Path) -> None:
    assert metadata.entry_points(root) == ""
    write_files(root, {"flash_attn/serving/vllm.py": ""})
    read = configparser.ConfigParser()
    read.read_string(metadata.entry_points(root))
    vllm = {"vllm.general_plugins": {"flash_attn_deterministic": "flash_attn.serving.vllm:register"}}
    assert {group: dict(read[group]) for group in read.sections()} == vllm
    write_files(root, {"flash_attn/serving/sglang.py": ""})
    read.read_string(metadata.entry_points(root))
    sglang = {"sglang.srt.plugins": {"flash_attn_deterministic": "flash_attn.serving.sglang:register"}}
    assert {group: dict(read[group]) for group in read.sections()} == vllm | sglang


def test_provenance_has_all_that_a_wheel_is_made_of(tmp_path: Path, make_series: Make) -> None:
    write_files(tmp_path / "fork", {"flash_attn/fork.py": "a = 1\n"})
    series = model.read(make_series(*TWO), tmp_path / "fork")
    planned = plan(tmp_path, toolchain(tmp_path, ""))
    told = metadata.provenance(MATRIX, TARGET, series, planned)
    pin = MATRIX.upstream
    assert told["upstream"] == {
        "version": pin.version,
        "commit": pin.commit,
        "cutlass": pin.cutlass,
        "sdist_sha256": pin.sdist_sha256,
    }
    assert told["series"] == {
        "digest": "d" * 64,
        "base": "b" * 40,
        "commit": "c" * 40,
        "patches": [
            {"name": p.name, "subject": subject, "sha256": p.sha256, "upstream_status": "Pending"}
            for p, (subject, _) in zip(series.patches, TWO, strict=True)
        ],
        "own_files": {"flash_attn/fork.py": hashlib.sha256(b"a = 1\n").hexdigest()},
    }
    assert told["fork_revision"] == MATRIX.table.revision
    assert told["target"] == "cu13"
    assert (told["cuda"], told["torch"], told["requires_torch"]) == ("13.0", "2.11.0", TARGET.torch)
    assert told["tvm_ffi"] == tvm_ffi.VERSION
    assert told["kernel_set"] == [k.name for k in planned.kernels]
    assert told["architectures"] == ["90"]
    assert told["nvcc"] == {"version": "V13.0.88", "flags": kernels.nvcc_flags(planned)}
    assert (told["cxx"]["version"], "-O2" in told["cxx"]["flags"]) == ("g++ 12", True)
    assert told["format"] == metadata.PROVENANCE_FORMAT
    assert json.loads(json.dumps(told)) == told


@pytest.mark.parametrize(
    ("words", "bias"),
    [(["hdim64,fp16"], True), (["hdim64,fp16,no-bias"], False), (["hdim64,fp16", "hdim32,no-bias"], False)],
)
def test_provenance_promises_masks_and_biases_if_all_kernels_have_them(
    tmp_path: Path, make_series: Make, words: list[str], bias: bool
) -> None:
    chosen = tuple(k for choice in words for k in kernel_set.parse_kernels(choice))
    planned = dataclasses.replace(plan(tmp_path, toolchain(tmp_path, "")), kernels=chosen)
    told = metadata.provenance(MATRIX, TARGET, model.read(make_series(*TWO)), planned)
    assert told["attn_bias"] is bias
