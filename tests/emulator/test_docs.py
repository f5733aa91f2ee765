"""The examples of docs/masks.md run, at a head dim and on a device that are here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import DIM, HALF_NAME, built

DOCS = Path(__file__).parents[2] / "docs/masks.md"


def test_the_examples_of_masks() -> None:
    config = built(causal=True)
    if config.lacks("fwd", "split", "bwd"):
        pytest.skip("built without some of the kernels (--kernels)")
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 8
    names: dict[str, object] = {}
    for block in blocks:
        code = block.replace('device="cuda"', 'device="cpu"').replace(
            "D = 2, 4, 512, 64", f"D = 2, 4, 512, {DIM}"
        )
        code = code if HALF_NAME == "fp16" else code.replace("torch.float16", "torch.bfloat16")
        exec(compile(code, str(DOCS), "exec"), names)  # noqa: S102 - our own documentation
    assert names["out"].shape == (2, 1, 4, DIM)  # type: ignore[attr-defined]
