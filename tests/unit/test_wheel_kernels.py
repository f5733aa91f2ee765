"""``compare -- --wheels``: what is the same, what differs, and what may be left out."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Collection
from pathlib import Path

import pytest

from scripts.lab import moved_parameters, wheel_kernels
from scripts.lab.objects import Executed
from scripts.lab.wheel_kernels import LeftOut
from scripts.wheels.trust import contents
from tests.unit.conftest import WHEEL_NAME, Command, whole_wheel
from tests.unit.test_inspection import compiled, entry, fatbin

BASE = 0x160
PARAMETERS = range(BASE, BASE + 0x40)
Wheel = Callable[..., Path]


def instruction(kind: int, offset: int = 0) -> bytes:
    return (kind | offset << 38).to_bytes(16, "little")


def load(offset: int, kind: int = 1) -> bytes:
    """An instruction of a made-up kind, which reads 4 bytes of constant bank 0 there; kind 8: 8 bytes."""
    return instruction(kind, offset)


def say(architecture: str, words: Collection[bytes]) -> dict[bytes, str]:
    """What stands in for nvdisasm here: kinds 1 and 8 read constant bank 0, the others do not."""
    said = {}
    for word in words:
        number = int.from_bytes(word, "little")
        kind, offset = number & 0xFF, number >> 38 & 0xFFFF
        said[word] = f"LDC{'.64' if kind == 8 else ''} R1, c[0x0][0x{offset:x}]" if kind in (1, 8) else "NOP"
    return said


def kernel(*words: bytes, parameters: range = PARAMETERS, beside: str = "") -> Executed:
    return Executed(b"".join(words), beside, parameters)


NOP = instruction(2)
CASES = [
    ("the same", [load(0x160), NOP], [load(0x160), NOP], True),
    ("moved", [load(0x160), load(0x168)], [load(0x170), load(0x178)], True),
    ("swapped", [load(0x160), load(0x168)], [load(0x168), load(0x160)], True),
    ("moved in one place of two", [load(0x160), load(0x160)], [load(0x160), load(0x168)], False),
    ("moved, and read as it was", [load(0x160), NOP, load(0x160)], [load(0x170), NOP, load(0x160)], False),
    ("two fields become one", [load(0x160), load(0x168)], [load(0x160), load(0x160)], False),
    ("an upper half follows", [load(0x160, 8), load(0x164)], [load(0x170, 8), load(0x174)], True),
    ("an upper half does not follow", [load(0x160, 8), load(0x164)], [load(0x170, 8), load(0x180)], False),
    ("another instruction", [load(0x160), NOP], [load(0x160), instruction(3)], False),
    ("another width", [load(0x160)], [load(0x160, 8)], False),
    ("fewer instructions", [load(0x160), NOP], [load(0x160)], False),
    ("another register", [load(0x160)], [(1 | 0x160 << 38 | 1 << 37).to_bytes(16, "little")], False),
    ("no parameter", [load(0x28)], [load(0x30)], False),
    ("a parameter for what is none", [load(0x160)], [load(0x28)], False),
    ("the same bits of no offset", [instruction(2, 0x160)], [instruction(2, 0x168)], False),
]


@pytest.mark.parametrize(
    ("old", "new", "same"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_fields_may_move_but_each_in_one_way(old: list[bytes], new: list[bytes], same: bool) -> None:
    uses = moved_parameters.alike(kernel(*old), kernel(*new))
    words = {word for pair in uses.pairs for word in pair} if uses else set()
    assert (uses is not None and moved_parameters.consistent(uses, say("90", words))) == same


def test_what_lies_beside_the_code_is_of_the_kernel() -> None:
    assert (
        moved_parameters.alike(kernel(NOP, beside="32 registers"), kernel(NOP, beside="40 registers")) is None
    )


def info(start: int, size: int) -> bytes:
    """A section .nv.info of a kernel that says where its parameters lie."""
    return struct.pack("<BBHIHH", 4, 0x0A, 8, 0, start, size)


@pytest.fixture
def wheel(tmp_path: Path) -> Wheel:
    """Make a wheel that holds kernels for compute capability 90, by name."""

    def make(
        folder: str,
        code: dict[str, list[bytes]],
        architecture: int = 90,
        name: str = WHEEL_NAME,
        more: dict[str, bytes] | None = None,
        tables: dict[str, bytes] | None = None,
    ) -> Path:
        sections = {}
        for kernel_name, words in code.items():
            sections[f".text.{kernel_name}"] = b"".join(words)
            sections[f".nv.info.{kernel_name}"] = info(BASE, 0x40)
        cubin = compiled(tmp_path, {**sections, **(tables or {})})
        content = fatbin(entry(cubin, architecture, packed=True))
        library = compiled(tmp_path, {".nv_fatbin": content}, "-shared", "-nostdlib")
        return whole_wheel(tmp_path / folder, name, more={"flash_attn_2_cuda.so": library, **(more or {})})

    return make


OLD = {
    "flash_same": [NOP],
    "flash_code": [NOP, NOP],
    "flash_gone": [instruction(3)],
    "flash_first": [instruction(4)],
    "flash_moved": [load(0x160), NOP],
    "flash_both": [load(0x168), instruction(5)],
}
NEW = {
    "flash_same": [NOP],
    "flash_code": [NOP, NOP, NOP],
    "flash_new": [instruction(6)],
    "flash_renamed": [instruction(4)],
    "flash_moved": [load(0x170), NOP],
    "flash_both_renamed": [load(0x160), instruction(5)],
}


@pytest.mark.parametrize(
    ("left_out", "renamed", "moved", "changed", "gone"),
    [
        (LeftOut(), [], [], ["code", "moved"], ["gone", "first", "both"]),
        (LeftOut(names=True), ["first"], [], ["code", "moved"], ["gone", "both"]),
        (LeftOut(offsets=True), [], ["moved"], ["code"], ["gone", "first", "both"]),
        (LeftOut(names=True, offsets=True), ["first"], ["moved", "both"], ["code"], ["gone"]),
    ],
)
def test_what_is_left_out_makes_no_difference(
    wheel: Wheel, left_out: LeftOut, renamed: list[str], moved: list[str], changed: list[str], gone: list[str]
) -> None:
    old, new = (contents.read(wheel(folder, code)) for folder, code in (("old", OLD), ("new", NEW)))
    before, after = (wheel_kernels.kernels(one, wheel_kernels.pieces(one)) for one in (old, new))
    found = wheel_kernels.compare(before, after, left_out, say)
    pairs = (found.same, found.renamed, found.moved, found.changed)
    told = [[pair.old.name.removeprefix("flash_") for pair in group] for group in pairs]
    assert told == [["same"], renamed, moved, changed]
    assert [k.name.removeprefix("flash_") for k in found.gone] == gone
    assert len(found.new) == len(found.gone)
    assert found.differs
    itself = wheel_kernels.compare(before, before, LeftOut())
    assert len(itself.same) == len(OLD)
    assert not itself.differs


def test_provenance_and_version_are_left_out_of_files(tmp_path: Path, wheel: Wheel, command: Command) -> None:
    old = wheel(
        "old", OLD, more={"flash_attn/a.py": b"old\n", "flash_attn/gone.py": b"", "flash_attn/v.h": b""}
    )
    other = WHEEL_NAME.replace("det.2", "det.3")
    assert other != WHEEL_NAME
    new = wheel("new", OLD, name=other, more={"flash_attn/a.py": b"new\n", "flash_attn/v.h": b""})
    done = command("compare", "--wheels", str(old), str(new), "--json")
    assert done.status == 1
    told = json.loads(done.out)
    assert told["files"] == {"changed": ["flash_attn/a.py"], "gone": ["flash_attn/gone.py"], "new": []}
    assert told["kernels"]["same"] == len(OLD)
    assert "2 files differ" in done.err
    same = wheel("same", OLD, name=other, more={"flash_attn/a.py": b"new\n", "flash_attn/v.h": b""})
    done = command("compare", "--wheels", str(new), str(same))
    assert (done.status, "No kernel and no file differs" in done.out) == (0, True), done.err


@pytest.mark.parametrize("section", [".nv.constant3", ".nv.global.init"])
def test_tables_of_all_kernels_are_part_of_each(wheel: Wheel, section: str) -> None:
    """Of __constant__ and __device__ variables: no section that has a kernel's name."""
    old, new = (contents.read(wheel(f"table {n}", OLD, tables={section: bytes([n])})) for n in (1, 2))
    before, after = (wheel_kernels.kernels(one, wheel_kernels.pieces(one)) for one in (old, new))
    found = wheel_kernels.compare(before, after, LeftOut(names=True, offsets=True), say)
    assert (len(found.changed), found.gone) == (len(OLD), ())


def test_a_compiled_file_that_one_wheel_lacks_is_told(tmp_path: Path, wheel: Wheel) -> None:
    library = {"flash_attn/other.so": compiled(tmp_path, {".more": b"1"}, "-shared", "-nostdlib")}
    old, new = (contents.read(wheel(name, OLD, more=more)) for name, more in (("old", library), ("new", {})))
    assert wheel_kernels.files(old, new).gone == ("flash_attn/other.so",)


def test_kernels_that_differ_are_told_with_their_figures(wheel: Wheel, command: Command) -> None:
    done = command(
        "compare", "--wheels", str(wheel("old", OLD)), str(wheel("new", NEW)), "--ignore-names", "--json"
    )
    assert done.status == 1
    told = json.loads(done.out)["kernels"]
    (first,) = told["renamed"]
    assert (first["name"], first["new_name"], first["architecture"]) == ("flash_first", "flash_renamed", "90")
    code = next(one for one in told["changed"] if one["name"] == "flash_code")
    assert (code["before"]["instructions"], code["after"]["instructions"]) == (2, 3)
    assert "2 kernels have other code, 2 kernels are in the old wheel alone" in done.err


@pytest.mark.parametrize(
    ("code", "architecture", "expected"),
    [
        ({"other": [NOP]}, 90, "new/{name} holds no kernels of FlashAttention; there is nothing to compare"),
        (OLD, 80, "for other compute capabilities, and cannot be compared: old: 90; new: 80"),
    ],
)
def test_wheels_that_cannot_be_compared(
    wheel: Wheel, command: Command, code: dict[str, list[bytes]], architecture: int, expected: str
) -> None:
    old, new = wheel("old", OLD), wheel("new", code, architecture)
    done = command("compare", "--wheels", str(old), str(new))
    assert done.status not in (0, 1)
    assert expected.format(name=new.name) in done.err


def test_code_that_cannot_be_unpacked_is_refused(tmp_path: Path, wheel: Wheel, command: Command) -> None:
    content = fatbin(entry(b"another way to pack", 90, packed=False))
    library = compiled(tmp_path, {".nv_fatbin": content}, "-shared", "-nostdlib")
    odd = whole_wheel(tmp_path / "odd", more={"flash_attn_2_cuda.so": library})
    done = command("compare", "--wheels", str(wheel("old", OLD)), str(odd))
    assert done.status == 9
    assert f"{odd}: a piece of the code for compute capability 90 is PTX, or is packed" in done.err
