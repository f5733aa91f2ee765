"""What machine code an extension holds: by compute capability and kernel family, packed and unpacked."""

from __future__ import annotations

import io
import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import zstandard
from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile

from scripts.lab import objects

if TYPE_CHECKING:
    from collections.abc import Iterator

_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_CORE = "core"
_OTHER = "not read"  # packed in another way than nvcc 13 does by --compress-mode=size
_HEAD_DIM = re.compile(r"kernel_traitsILi(\d+)E")
_DTYPES = {"bfloat16_t": "bf16", "half_t": "fp16"}
_PASSES = {"_bwd_": "bwd", "bias_gradient": "bwd", "splitkv": "split", "combine": "split"}


@dataclass(frozen=True)
class Family:
    """The kernels of one pass, head dim and dtype, for one compute capability."""

    architecture: str  # sm_90; compute_90 for PTX
    name: str  # fwd_hdim64_fp16, as kernel files are named
    modules: int  # kernel files
    kernels: int
    packed: int  # bytes in the wheel's extension
    code: int  # bytes of instructions


def pieces(extension: bytes) -> Iterator[objects.Entry]:
    """The pieces of an extension's code for GPUs; none where it has none."""
    section = ELFFile(io.BytesIO(extension)).get_section_by_name(".nv_fatbin")
    return iter(()) if section is None else objects.entries(section.data())


def families(extension: bytes) -> list[Family]:
    """The families in an extension; none where it holds no code for a GPU."""
    sums: dict[tuple[str, str], Counter[str]] = {}
    for entry in pieces(extension):
        kind = "sm" if entry.kind == objects.MACHINE_CODE else "compute"
        sizes = dict(_kernels(entry))
        count = sums.setdefault((f"{kind}_{entry.architecture}", family(list(sizes))), Counter())
        count.update(modules=1, kernels=len(sizes), packed=len(entry.content), code=sum(sizes.values()))
    return [
        Family(*key, count["modules"], count["kernels"], count["packed"], count["code"])
        for key, count in sorted(sums.items())
    ]


def cubin(entry: objects.Entry) -> ELFFile | None:
    """A piece's machine code; None where it is PTX, or packed in another way."""
    content = entry.content
    if entry.kind != objects.MACHINE_CODE:
        return None
    if content.startswith(_ZSTD_MAGIC):
        unpacker = zstandard.ZstdDecompressor().decompressobj()  # padding follows the frame
        content = unpacker.decompress(content)
    try:
        return ELFFile(io.BytesIO(content))
    except ELFError:
        return None


def _kernels(entry: objects.Entry) -> Iterator[tuple[str, int]]:
    """Name and size of each kernel of a piece; none of PTX, or where it cannot be unpacked."""
    elf = cubin(entry)
    for name, text in objects.texts(elf).items() if elf else ():
        yield name, len(text)


def family(kernels: list[str]) -> str:
    """What kernel files of these kernels are named, by their mangled names.

    >>> family(["_ZN5flash16flash_fwd_kernelI23Flash_fwd_kernel_traitsILi64ELi128EN7cutlass6half_tE"])
    'fwd_hdim64_fp16'
    >>> family(["_ZN5flash4core12_GLOBAL__N_118sum_groups_kernelI6__halfEEvPT_PKS4_NS1_4WalkEi"])
    'core'
    >>> family([])
    'not read'
    """
    if not kernels:
        return _OTHER
    names = " ".join(kernels)
    done = next((word for part, word in _PASSES.items() if part in names), "fwd")
    dims = sorted({int(number) for number in _HEAD_DIM.findall(names)})
    if not dims:
        return _CORE  # kernels around attention: sums, constants, checks
    dtypes = [word for part, word in _DTYPES.items() if part in names]
    return "_".join([done, *(f"hdim{dim}" for dim in dims), *dtypes])
