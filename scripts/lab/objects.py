"""Read the objects that nvcc makes: PTX and machine code by compute capability and kernel."""

from __future__ import annotations

import io
import struct
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

from scripts.base.errors import CompileError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_FATBIN_MAGIC = 0xBA55ED50
PTX, MACHINE_CODE = 1, 2
# nvdisasm's LDL and STL, and the field of either that gives its width.
_LOAD, _STORE, _OPCODE = 0x983, 0x387, 0xFFF
_WIDTHS = (1, 1, 2, 2, 4, 8, 16)
# Of .nv.info: the attributes that give a kernel's registers and the size of its stack frame.
_REGISTERS, _FRAME, _WITH_SIZE = 0x2F, 0x11, 4


@dataclass(frozen=True)
class Entry:
    """One piece of a fat binary: PTX or machine code for one compute capability."""

    kind: int
    architecture: str
    flags: int  # how it is packed, by nvcc's own numbers
    content: bytes  # as it lies there
    unpacked: int  # bytes; 0 where it is not packed


def entries(data: bytes) -> Iterator[Entry]:
    """The pieces in a section ``.nv_fatbin``."""
    at = 0
    while at + 16 <= len(data):
        magic, _, header, content = struct.unpack_from("<IHHQ", data, at)
        if magic != _FATBIN_MAGIC:
            at += 8  # padding between containers
            continue
        entry, end = at + header, at + header + content
        while entry < end:
            kind, _, entry_header, size = struct.unpack_from("<HHIQ", data, entry)
            (number,) = struct.unpack_from("<I", data, entry + 28)
            flags, _, unpacked = struct.unpack_from("<QQQ", data, entry + 40)
            start = entry + entry_header
            yield Entry(kind, str(number), flags, data[start : start + size], unpacked)
            entry += entry_header + size
        at = end


def _pieces(item: Path, wanted_kind: int) -> Iterator[tuple[str, bytes]]:
    """Compute capability and content of each piece of this kind in an object."""
    with item.open("rb") as stream:
        section = ELFFile(stream).get_section_by_name(".nv_fatbin")
        if section is None:
            raise CompileError(f"{item} has no machine code for a GPU.")
        data = section.data()
    for entry in entries(data):
        if entry.kind == wanted_kind:
            yield entry.architecture, entry.content


def cubins(item: Path) -> Iterator[tuple[str, ELFFile]]:
    """Compute capability and ELF file of each piece of machine code in an object.

    Raises:
        CompileError: the object has none, or it is compressed.
    """
    for architecture, cubin in _pieces(item, MACHINE_CODE):
        if cubin[:4] != b"\x7fELF":
            raise CompileError(f"the machine code for sm_{architecture} in {item} is compressed.")
        yield architecture, ELFFile(io.BytesIO(cubin))


def ptx(item: Path) -> Iterator[tuple[str, str]]:
    """Compute capability and text of each PTX module in an object that is not compressed."""
    for architecture, text in _pieces(item, PTX):
        yield architecture, text.rstrip(b"\0").decode()


def texts(cubin: ELFFile) -> dict[str, bytes]:
    """The section ``.text`` of each kernel."""
    return {
        s.name.removeprefix(".text."): s.data() for s in cubin.iter_sections() if s.name.startswith(".text.")
    }


def machine_code(item: Path) -> dict[str, dict[str, bytes]]:
    """By compute capability and kernel: the section ``.text`` of each in an object."""
    sections: dict[str, dict[str, bytes]] = {}
    for architecture, cubin in cubins(item):
        sections.setdefault(architecture, {}).update(texts(cubin))
    return sections


@dataclass(frozen=True)
class Code:
    """One kernel's machine code: its size, and what it takes.

    Stack, stores and loads are bytes of local memory (spills, arrays), as its instructions name it.
    """

    instructions: int
    registers: int
    stack: int
    stores: int
    loads: int
    text: bytes

    def figures(self) -> dict[str, int]:
        """All but the code itself."""
        return {name: value for name, value in asdict(self).items() if name != "text"}

    def __str__(self) -> str:
        memory = f"{self.stack} bytes of stack, {self.stores}/{self.loads} stored/loaded"
        return f"{self.instructions} ({self.registers} registers, {memory})"


def _info(elf: ELFFile) -> dict[str, dict[int, int]]:
    """By kernel: the attributes of .nv.info that have a value for it."""
    section, symbols = elf.get_section_by_name(".nv.info"), elf.get_section_by_name(".symtab")
    attributes: dict[str, dict[int, int]] = {}
    if section is None or not isinstance(symbols, SymbolTableSection):
        return attributes
    data = section.data()
    at = 0
    while at < len(data):
        kind, attribute, size = struct.unpack_from("<BBH", data, at)
        if kind == _WITH_SIZE and size >= 8:
            symbol, value = struct.unpack_from("<II", data, at + 4)
            attributes.setdefault(symbols.get_symbol(symbol).name, {})[attribute] = value
        at += 4 + (size if kind == _WITH_SIZE else 0)
    return attributes


def read_kernels(item: Path, architecture: str) -> dict[str, Code]:
    """The kernels of an object that is not packed, by their mangled names."""
    codes: dict[str, Code] = {}
    for capability, cubin in cubins(item):
        if capability != architecture:
            continue
        info = _info(cubin)
        for name, text in texts(cubin).items():
            local = {_LOAD: 0, _STORE: 0}
            for low, high in struct.iter_unpack("<QQ", text):
                if low & _OPCODE in local:
                    local[low & _OPCODE] += _WIDTHS[min(high >> 9 & 7, len(_WIDTHS) - 1)]
            own = info.get(name, {})
            codes[name] = Code(
                len(text) // 16, own.get(_REGISTERS, 0), own.get(_FRAME, 0), local[_STORE], local[_LOAD], text
            )
    return codes
