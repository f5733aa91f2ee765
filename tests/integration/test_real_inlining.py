"""A large split kernel gets its parameters from constant memory: its body is no function that takes a pointer to them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

from scripts.wheels.compiling import kernels
from tests.integration.wheels import applied, nvcc

if TYPE_CHECKING:
    from pathlib import Path

# Which nvcc would not inline by itself: causal, of head dim 128, with several loops over keys, new keys and pages.
KERNEL = """
#include "namespace_config.h"
#include "flash_fwd_launch_template.h"
namespace FLASH_NAMESPACE {
using Traits = Flash_fwd_kernel_traits<128, 64, fork_keys::tile(128), 4, false, false, cutlass::half_t>;
template __global__ void flash_fwd_splitkv_kernel<Traits, /*causal*/ true, false, false, false, /*even_K*/ true,
    false, /*split*/ false, /*append*/ true>(KERNEL_PARAM_MODIFIER const Flash_fwd_params);
}
"""


@pytest.mark.network
@pytest.mark.nvcc
@pytest.mark.in_turn(2)
def test_the_body_of_a_large_kernel_is_inlined(tmp_path: Path) -> None:
    root, cubin = applied().root, tmp_path / "large.cubin"
    (tmp_path / "large.cu").write_text(KERNEL, encoding="utf-8")
    includes = (f"-I{root / folder}" for folder in kernels.INCLUDES)
    done = nvcc("90", "sm", *includes, "-cubin", "-o", cubin, tmp_path / "large.cu")
    assert done.returncode == 0, done.stdout + done.stderr
    with cubin.open("rb") as stream:
        table = ELFFile(stream).get_section_by_name(".symtab")
        assert isinstance(table, SymbolTableSection)
        symbols = [symbol.name for symbol in table.iter_symbols()]
    assert any("flash_fwd_splitkv_kernel" in name for name in symbols)
    assert [name for name in symbols if re.search(r"\d+compute_attn", name)] == []
