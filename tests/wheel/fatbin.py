"""Which GPU architectures an ELF file holds machine code for, read from its fat binaries.

Layout of the section ``.nv_fatbin``: containers, each a header (magic, version, header size, content
size) and entries; an entry header holds its kind (1 PTX, 2 machine code), its own size, the content's
size and, 28 bytes in, the number of the architecture. ``cuobjdump --list-elf`` shows the same.
"""

from __future__ import annotations

import struct
from pathlib import Path

_MAGIC = 0xBA55ED50
_KINDS = {1: "compute", 2: "sm"}


def _section(data: bytes, wanted: bytes) -> bytes:
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    (table,) = struct.unpack_from("<Q", data, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", data, table + i * entry_size) for i in range(count)]
    names_at = headers[names_index][4]
    for name, _, _, _, offset, size, *_ in headers:
        end = data.index(b"\0", names_at + name)
        if data[names_at + name : end] == wanted:
            return data[offset : offset + size]
    return b""


def architectures(path: Path) -> set[str]:
    """Names such as ``sm_90`` (machine code) and ``compute_90`` (PTX) found in the file."""
    section = _section(path.read_bytes(), b".nv_fatbin")
    found: set[str] = set()
    at = 0
    while at + 16 <= len(section):
        magic, _, header_size, content = struct.unpack_from("<IHHQ", section, at)
        if magic != _MAGIC:
            at += 8  # padding between containers
            continue
        entry, end = at + header_size, at + header_size + content
        while entry < end:
            kind, _, entry_header, size = struct.unpack_from("<HHIQ", section, entry)
            (number,) = struct.unpack_from("<I", section, entry + 28)
            found.add(f"{_KINDS.get(kind, f'kind{kind}')}_{number}")
            entry += entry_header + size
        at = end
    return found
