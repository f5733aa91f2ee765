"""What ptxas makes of products and sums that name no rounding: it fuses all of them, so that no kernel rounds otherwise than another.

A row gets its bits from one kernel or another: with chunks spread over thread blocks or not, with keys appended or not. Which
products a compiler fuses with sums is its own choice; here it is counted, in kernels assembled with and without that choice.
``tests/emulator`` fuses alike.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

from scripts.base import layout
from scripts.base.errors import CompileError
from scripts.base.process import run
from scripts.lab import compare, emulator, objects
from scripts.source import kernel_set
from scripts.wheels.compiling import kernels, ninja
from tests.integration.wheels import applied, tools

pytestmark = [pytest.mark.network, pytest.mark.nvcc]

_FADD, _OPCODE = 0x21, 0x1FF  # whatever the kinds of operands


def fused_by_the_rule(ptx: str) -> Iterator[tuple[str, int]]:
    """By kernel: sums that name no rounding of a product that names none and is all that its register ever holds."""
    # A function after the kernel has its own registers, with the same names.
    for kernel in re.findall(r"\.entry (.*?)(?=\.entry |\.func |\Z)", ptx, re.DOTALL):
        instructions = re.findall(r"^\s*(?:@!?%p\d+ )?([a-z0-9_.:]+)\s+([^;]*);", kernel, re.MULTILINE)
        writes = Counter(
            register
            for _, operands in instructions
            for register in re.findall(r"%f\d+", re.split(r"\}|, (?![^{]*\})", operands)[0])
        )
        products = {
            operands.partition(",")[0]
            for name, operands in instructions
            if re.fullmatch(r"mul(\.ftz)?\.f32", name)
        }
        sums = [
            operands.split(", ")[1:]
            for name, operands in instructions
            if re.fullmatch(r"(add|sub)(\.ftz)?\.f32", name)
        ]
        yield (
            kernel.partition("(")[0].strip(),
            sum(any(term in products and writes[term] == 1 for term in terms) for terms in sums),
        )


def sums(cubin: Path) -> dict[str, int]:
    """By kernel: additions that are no part of another instruction."""
    with cubin.open("rb") as stream:
        found = objects.texts(ELFFile(stream))
    return {
        name: sum(low & _OPCODE == _FADD for low, _ in struct.iter_unpack("<QQ", text))
        for name, text in found.items()
    }


def test_every_product_that_may_be_fused_is(tmp_path: Path) -> None:
    chosen, found = kernel_set.parse_kernels("hdim32,fp16,split,causal"), tools()
    # The object that nox -s emulate compiles.
    plan = kernels.Plan(applied(), found, chosen, ("90",), layout.BUILD, emulator.FLAVOUR)
    (item,) = ninja.compile_units(plan, kernels.kernel_units(plan), None).objects
    ((_, ptx),) = objects.ptx(item)
    source = tmp_path / "split.ptx"
    source.write_text(ptx, encoding="utf-8")

    def assembled(fuses: str) -> dict[str, int]:
        target = source.with_suffix(f".{fuses}")
        ptxas = found.toolkit.nvcc.resolve().parent / "ptxas"
        command: list[str | Path] = [ptxas, "-arch=sm_90", "-O3", f"--fmad={fuses}", source, "-o", target]
        run(command, error=CompileError, what="could not assemble")
        return sums(target)

    with ThreadPoolExecutor(2) as pool:
        with_choice, without = pool.map(assembled, ("true", "false"))
    expected = dict(fused_by_the_rule(ptx))
    assert {compare.spell(name): without[name] - with_choice[name] for name in expected} == {
        compare.spell(n): count for n, count in expected.items()
    }
    assert sum(count > 0 for count in expected.values()) > 10
    assert [
        compare.spell(name) for name, count in expected.items() if not count and "splitkv_kernel" in name
    ] == []
