"""A large split kernel gets its parameters from constant memory: its body is no function that takes a pointer to them."""

from __future__ import annotations

import re
import subprocess
from typing import TYPE_CHECKING

import pytest
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

from scripts.base import layout
from scripts.series import clone
from scripts.source import matrix
from scripts.source.upstream import Source
from scripts.wheels.compiling import flags, kernels
from scripts.wheels.toolchain import compilers

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
    loaded = matrix.load(layout.MATRIX)
    _, applied = clone.apply(loaded, Source.SDIST)
    tools = compilers.assemble(loaded.default(), None, layout.BUILD, cache=True)
    source, cubin = tmp_path / "large.cu", tmp_path / "large.cubin"
    source.write_text(KERNEL, encoding="utf-8")
    subprocess.run(
        [
            str(tools.toolkit.nvcc),
            *flags.NVCC_FLAGS,
            flags.for_gpus(["90"]),
            "-gencode=arch=compute_90,code=sm_90",
            *(
                f"-I{folder}"
                for folder in (*(applied.root / i for i in kernels.INCLUDES), *tools.toolkit.include)
            ),
            "-cubin",
            "-o",
            str(cubin),
            str(source),
        ],
        check=True,
    )
    with cubin.open("rb") as stream:
        table = ELFFile(stream).get_section_by_name(".symtab")
        assert isinstance(table, SymbolTableSection)
        symbols = [symbol.name for symbol in table.iter_symbols()]
    assert any("flash_fwd_splitkv_kernel" in name for name in symbols)
    assert [name for name in symbols if re.search(r"\d+compute_attn", name)] == []
