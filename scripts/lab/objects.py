"""Read the objects that nvcc makes: PTX and machine code by compute capability and kernel."""

from __future__ import annotations

import io
import re
import struct
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from elftools.elf.elffile import ELFFile
from elftools.elf.relocation import RelocationSection
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
_PARAMETERS = 0x0A  # of .nv.info.KERNEL: where its parameters lie
# Bank 0 has the parameters, which hold nothing before a launch.
_OF_KERNEL = re.compile(r"\.(text|rela?\.text|nv\.info|nv\.shared|nv\.constant[1-9]\d*)\.(.+)")

# What variables of the module hold at first, __constant__ and __device__; any kernel of it may read them.
_OF_ALL = re.compile(r"\.nv\.(global\.init|constant[1-9]\d*)")


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


def _attributes(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Of a section .nv.info: each attribute that has two words, and these."""
    at = 0
    while at < len(data):
        kind, attribute, size = struct.unpack_from("<BBH", data, at)
        if kind == _WITH_SIZE and size >= 8:
            yield attribute, *struct.unpack_from("<II", data, at + 4)
        at += 4 + (size if kind == _WITH_SIZE else 0)


def _info(elf: ELFFile) -> dict[str, dict[int, int]]:
    """By kernel: the attributes of .nv.info that have a value for it."""
    section, symbols = elf.get_section_by_name(".nv.info"), elf.get_section_by_name(".symtab")
    attributes: dict[str, dict[int, int]] = {}
    if section is None or not isinstance(symbols, SymbolTableSection):
        return attributes
    for attribute, symbol, value in _attributes(section.data()):
        attributes.setdefault(symbols.get_symbol(symbol).name, {})[attribute] = value
    return attributes


def codes(cubin: ELFFile) -> dict[str, Code]:
    """The kernels of a piece of machine code, by their mangled names."""
    info = _info(cubin)
    found: dict[str, Code] = {}
    for name, text in texts(cubin).items():
        local = {_LOAD: 0, _STORE: 0}
        for low, high in struct.iter_unpack("<QQ", text):
            if low & _OPCODE in local:
                local[low & _OPCODE] += _WIDTHS[min(high >> 9 & 7, len(_WIDTHS) - 1)]
        own = info.get(name, {})
        found[name] = Code(
            len(text) // 16, own.get(_REGISTERS, 0), own.get(_FRAME, 0), local[_STORE], local[_LOAD], text
        )
    return found


@dataclass(frozen=True)
class Executed:
    """All of a kernel that a GPU runs."""

    text: bytes
    beside: str  # registers, stack, shared memory, constants, tables, what is filled in when it is loaded
    parameters: range  # where its parameters lie in constant bank 0, in bytes


def executed(cubin: ELFFile) -> dict[str, Executed]:
    """The kernels of a piece of machine code, by their mangled names; whatever their names say elsewhere."""
    info = _info(cubin)
    code: dict[str, bytes] = {}
    parameters: dict[str, range] = {}
    beside: dict[str, list[object]] = {}
    of_all: list[object] = []
    for section in cubin.iter_sections():
        found = _OF_KERNEL.fullmatch(section.name)
        if not found:
            if _OF_ALL.fullmatch(section.name):
                of_all.append((section.name, section.data()))
            continue
        kind, name = found.groups()
        told = beside.setdefault(name, [])
        if kind == "text":
            code[name] = section.data()
        elif kind == "nv.info":
            parameters[name] = _parameters(section.data())
        elif isinstance(section, RelocationSection):
            told += [(kind, *fields) for fields in _filled_in(cubin, section, name)]
        else:
            told.append((kind, section["sh_size"], None if kind == "nv.shared" else section.data()))
    return {
        name: Executed(
            text,
            repr(
                (
                    sorted([*beside[name], *of_all], key=repr),
                    [info.get(name, {}).get(a) for a in (_REGISTERS, _FRAME)],
                )
            ),
            parameters.get(name, range(0)),
        )
        for name, text in code.items()
    }


def _filled_in(cubin: ELFFile, section: RelocationSection, kernel: str) -> Iterator[tuple[object, ...]]:
    symbols = cubin.get_section(section["sh_link"])
    if isinstance(symbols, SymbolTableSection):
        for one in section.iter_relocations():
            symbol = symbols.get_symbol(one["r_info_sym"]).name.replace(kernel, "*")
            yield one["r_offset"], one["r_info_type"], one.entry.get("r_addend"), symbol


def _parameters(data: bytes) -> range:
    for attribute, _, place in _attributes(data):
        if attribute == _PARAMETERS:
            start, size = place & 0xFFFF, place >> 16
            return range(start, start + size)
    return range(0)


def read_kernels(item: Path, architecture: str) -> dict[str, Code]:
    """The kernels of an object that is not packed, by their mangled names."""
    return {
        name: code
        for capability, cubin in cubins(item)
        if capability == architecture
        for name, code in codes(cubin).items()
    }
