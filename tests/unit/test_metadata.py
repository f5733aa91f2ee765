"""What a wheel says of itself: METADATA and ``flash_attn/_fork.json``."""

from __future__ import annotations

import dataclasses
import json
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from scripts.base import layout
from scripts.base.errors import WheelError
from scripts.series import model
from scripts.source import kernel_set, matrix
from scripts.wheels import kernels, metadata
from tests.unit.conftest import TWO, Make, plan, toolchain

MATRIX = matrix.load(layout.MATRIX)
TARGET = MATRIX.named("cu130-torch2.11")
UPSTREAM = """Metadata-Version: 2.2
Name: flash_attn
Version: 2.8.3.post1
Summary: Flash Attention: Fast and Memory-Efficient Exact Attention
Requires-Python: >=3.9
License-File: LICENSE
License-File: AUTHORS
Requires-Dist: torch
Requires-Dist: einops
Dynamic: author

# FlashAttention
"""


def upstream(text: str = UPSTREAM) -> Message:
    return Parser().parsestr(text)


def test_metadata_is_upstream_s_with_our_version_torch_python_and_notice() -> None:
    text = metadata.fork_metadata(upstream(), MATRIX, TARGET, "3.12")
    assert text.splitlines()[:3] == [
        "Metadata-Version: 2.4",
        "Name: flash_attn",
        "Version: 2.8.3.post1+det.1.cu130.torch2.11",
    ]
    made = Parser().parsestr(text)
    assert made["Summary"] == upstream()["Summary"]
    assert made.get_all("Requires-Dist") == ["torch==2.11.*", "einops"]
    assert made.get_all("Requires-Python") == ["==3.12.*"]
    assert made.get_all("License-File") == ["LICENSE", "AUTHORS", "NOTICE"]
    assert "Dynamic" not in made
    assert [made.get_all(name) for name in ("Metadata-Version", "Name", "Version")] == [
        ["2.4"],
        ["flash_attn"],
        [MATRIX.version(TARGET)],
    ]
    assert made.get_payload() == "# FlashAttention\n"


@pytest.mark.parametrize("required", ["torch>=2.2", "einops"])
def test_metadata_that_does_not_require_torch_alone_is_an_error(required: str) -> None:
    with pytest.raises(WheelError, match="does not require torch as expected"):
        metadata.fork_metadata(
            upstream(UPSTREAM.replace("Dist: torch", f"Dist: {required}")), MATRIX, TARGET, "3.12"
        )


def test_provenance_has_all_that_a_wheel_is_made_of(tmp_path: Path, make_series: Make) -> None:
    series = model.read(make_series(*TWO))
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
    }
    assert told["fork_revision"] == MATRIX.table.revision
    assert told["target"] == "cu130-torch2.11"
    assert (told["cuda"], told["torch"]) == ("13.0", "2.11.0")
    assert told["kernel_set"] == [k.name for k in planned.kernels]
    assert told["architectures"] == ["90"]
    assert told["nvcc"] == {"version": "V13.0.88", "flags": kernels.nvcc_flags(planned)}
    assert (told["cxx"]["version"], "-O3" in told["cxx"]["flags"]) == ("g++ 12", True)
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
