"""The examples of docs/masks.md and docs/sinks.md run, at a head dim and on a device that are here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import DIM, HALF_NAME, built

DOCS = Path(__file__).parents[2] / "docs"


def run(page: str, examples: int) -> dict[str, object]:
    """The names that a page's examples leave."""
    config = built(causal=True)
    if config.lacks("fwd", "split", "bwd"):
        pytest.skip("built without some of the kernels (--kernels)")
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == examples
    names: dict[str, object] = {}
    for block in blocks:
        code = block.replace('device="cuda"', 'device="cpu"').replace(
            "D = 2, 4, 512, 64", f"D = 2, 4, 512, {DIM}"
        )
        code = code if HALF_NAME == "fp16" else code.replace("torch.float16", "torch.bfloat16")
        exec(compile(code, page, "exec"), names)  # noqa: S102 - our own documentation
    return names


def test_the_examples_of_masks() -> None:
    names = run("masks.md", 8)
    assert names["out"].shape == (2, 1, 4, DIM)  # type: ignore[attr-defined]


def test_the_example_of_sinks() -> None:
    names = run("sinks.md", 1)
    assert names["sink"].grad.isfinite().all()  # type: ignore[attr-defined]
    assert names["sink"].grad.abs().min() > 0  # type: ignore[attr-defined]
