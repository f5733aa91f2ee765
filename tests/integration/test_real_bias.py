"""attn_mask and attn_bias cost calls without them nothing: their kernels are those of a build that leaves both out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scripts import kernels, maintain, matrix, toolchain
from scripts.architectures import machine_code
from scripts.upstream import Source

pytestmark = [pytest.mark.network, pytest.mark.nvcc]

FILES = ["fwd_split", "bwd"]
Code = dict[str, dict[str, bytes]]  # by file and kernel


def compiled(words: str) -> Code:
    loaded = maintain.load()
    _, applied = maintain.apply(loaded, Source.SDIST)
    tools = toolchain.assemble(loaded.default(), None, maintain.BUILD, cache=True)
    flavour = replace(kernels.FORK, code=tuple(kernels.gencode(("90",), {})))  # not packed
    plan = kernels.Plan(applied, tools, matrix.parse_kernels(words), ("90",), maintain.BUILD, flavour)
    objects = {path.stem: path for path in kernels.compile_units(plan, kernels.kernel_units(plan), None).objects}
    return {k.source.split("_hdim")[0].removeprefix("flash_"): machine_code(objects[k.name])["90"] for k in plan.kernels}


@pytest.fixture(scope="module")
def code() -> tuple[Code, Code]:
    """With mask and bias, and without."""
    words = "hdim32,fp16,split,bwd,causal"
    return compiled(words), compiled(f"{words},no-bias")


@pytest.mark.parametrize("file", FILES)
def test_kernels_of_calls_without_are_byte_for_byte_those_of_a_build_without(code: tuple[Code, Code], file: str) -> None:
    ours, without = (half[file] for half in code)
    assert len(without) > 15
    assert [name for name, text in without.items() if ours.get(name) != text] == []


@pytest.mark.parametrize("file", FILES)
def test_only_kernels_of_their_own_are_added(code: tuple[Code, Code], file: str) -> None:
    ours, without = (half[file] for half in code)
    added = set(ours) - set(without)
    assert {"WithScores" in name for name in added} == {True}
    assert len(added) == 4  # one and several splits, or without and with softcap; a head dim as large as the kernel's, or less
