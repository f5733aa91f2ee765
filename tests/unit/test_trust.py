"""A wheel, proof or statement that was changed fails ``inspect`` and ``verify``, by the file's name."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts.base import sealed
from scripts.base.errors import UsageError, WheelError
from scripts.wheels.proof import verify
from scripts.wheels.trust import companions, contents, evidence
from tests.unit.conftest import FACTS, VERSION, WHEEL_NAME, Command, whole_wheel

INFO = f"flash_attn-{VERSION}.dist-info"
RECORD, PROVENANCE, SBOM = f"{INFO}/RECORD", "flash_attn/_fork.json", f"{INFO}/sboms/flash_attn.cdx.json"
EXTENSION = "flash_attn_2_cuda.so"
Files = dict[str, bytes]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel with an extension and its statement beside it."""
    return whole_wheel(tmp_path_factory.mktemp("dist"), more={EXTENSION: extension()})


def extension() -> bytes:
    """A small real ELF file."""
    return min((p.read_bytes() for p in Path("/usr/bin").glob("*") if is_elf(p)), key=len)


def is_elf(path: Path) -> bool:
    if not path.is_file() or path.stat().st_size > 100_000:
        return False
    with path.open("rb") as stream:
        return stream.read(4) == b"\x7fELF"


@pytest.fixture
def wheel(original: Path, tmp_path: Path) -> Path:
    shutil.copytree(original.parent, tmp_path / "dist")
    return tmp_path / "dist" / original.name


def rewrite(path: Path, change: Callable[[Files], None], *, mend: bool = False) -> None:
    """Change a wheel's files; the checksums of the archive are right, and with ``mend`` RECORD is too."""
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    change(files)
    if mend:
        files[RECORD] = record(files)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)


def record(files: Files) -> bytes:
    out = io.StringIO()
    rows = csv.writer(out, lineterminator="\n")
    for name, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        rows.writerow([name, "", ""] if name == RECORD else [name, f"sha256={digest}", len(content)])
    return out.getvalue().encode()


def flip(content: bytes) -> bytes:
    """One byte is another."""
    return content[:-1] + bytes([content[-1] ^ 1])


def say(**more: Any) -> Callable[[Files], None]:
    """Edit what the wheel says of itself."""

    def change(files: Files) -> None:
        said = json.loads(files[PROVENANCE])
        files[PROVENANCE] = (json.dumps({**said, **more}, indent=1) + "\n").encode()

    return change


def set_to(name: str, edit: Callable[[bytes], bytes]) -> Callable[[Files], None]:
    return lambda files: files.update({name: edit(files[name])})


SERIES = {**FACTS["series"], "commit": "0" * 40}
TAMPERED = {
    "a byte of the extension": (set_to(EXTENSION, flip), False, rf"{EXTENSION} was changed"),
    "the torch in _fork.json": (say(torch="2.12.0"), False, r"_fork\.json was changed"),
    "the commit in _fork.json": (say(series=SERIES), False, r"_fork\.json was changed"),
    "_fork.json, with RECORD mended": (say(torch="2.12.0"), True, r"_fork\.json was changed: its digest"),
    "white space in _fork.json, RECORD mended": (
        set_to(PROVENANCE, lambda text: text + b"\n"),
        True,
        r"_fork\.json was changed: it is not written as",
    ),
    "the SBOM, with RECORD mended": (
        set_to(SBOM, lambda text: text.replace(b"12.2.0", b"12.3.0")),
        True,
        r"flash_attn\.cdx\.json was changed",
    ),
    "no SBOM, with RECORD mended": (lambda f: f.pop(SBOM), True, r"flash_attn\.cdx\.json is missing"),
    "a file added": (lambda f: f.update({"flash_attn/evil.py": b""}), False, r"evil\.py was added"),
    "a file removed": (lambda f: f.pop("flash_attn/determinism.py"), False, r"determinism\.py was removed"),
    "a hash in RECORD": (
        set_to(RECORD, lambda text: text.replace(b"sha256=", b"sha256=A", 1)),
        False,
        r"was changed, or .*RECORD was",
    ),
    "a row of RECORD twice": (
        set_to(RECORD, lambda text: text + text.splitlines()[0] + b"\n"),
        False,
        r"RECORD:\d+ has .* a second time",
    ),
    "RECORD's row of itself": (
        set_to(RECORD, lambda text: text.replace(b"RECORD,,", b"RECORD,x,")),
        False,
        r"RECORD was changed: its row of itself",
    ),
    "no RECORD": (lambda f: f.pop(RECORD), False, r"RECORD is missing"),
}


@pytest.mark.parametrize("what", TAMPERED)
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "beside its statement"])
def test_a_wheel_that_was_changed_is_refused_by_name(wheel: Path, what: str, alone: bool) -> None:
    change, mend, said = TAMPERED[what]
    rewrite(wheel, change, mend=mend)
    if alone:
        companions.provenance(wheel).unlink()
    with pytest.raises(WheelError, match=rf"{re.escape(wheel.name)}.*{said}"):
        evidence.check(wheel)


@pytest.mark.parametrize("what", TAMPERED)
def test_nothing_of_such_a_wheel_is_installed(
    wheel: Path, what: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, mend, _ = TAMPERED[what]
    rewrite(wheel, change, mend=mend)
    monkeypatch.setattr(verify, "installed", lambda *_: pytest.fail("it was installed"))
    for name in ("verify", "inspect"):
        done = command(name, str(wheel))
        assert done.status == WheelError.exit_code
        assert wheel.name in done.err


def test_a_wheel_that_is_whole_passes_alone_and_beside_its_statement(wheel: Path) -> None:
    assert [path.name for path in evidence.check(wheel).statements] == [companions.provenance(wheel).name]
    companions.provenance(wheel).unlink()
    assert evidence.check(wheel).wheel.facts["torch"] == "2.11.0"


def test_other_bytes_of_the_archive_alone_are_told_by_the_statement_beside_it(wheel: Path) -> None:
    rewrite(wheel, lambda files: None)  # the same files, packed in another way
    with pytest.raises(WheelError, match=r"provenance\.json was changed, or is of another wheel"):
        evidence.check(wheel)


def test_a_file_that_is_in_the_archive_twice_is_refused(wheel: Path) -> None:
    with pytest.warns(UserWarning, match="Duplicate name"), zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("flash_attn/determinism.py", "evil = 1\n")
    with pytest.raises(WheelError, match=r"determinism\.py is in it twice"):
        contents.read(wheel)


def test_a_wheel_that_was_cut_off_or_is_not_there_is_refused(wheel: Path) -> None:
    whole = wheel.read_bytes()
    wheel.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(WheelError, match="cut off"):
        contents.read(wheel)
    with pytest.raises(UsageError, match="does not exist"):
        contents.read(wheel.with_name("absent.whl"))


@pytest.mark.parametrize(
    ("name", "what"),
    [
        (WHEEL_NAME.replace("cu13", "cu12"), "version"),
        (WHEEL_NAME.replace("py3-none", "cp313-cp313"), "tags"),
        (WHEEL_NAME.replace("-py3-none", "-9_all-py3-none"), "build tag"),
        (WHEEL_NAME.replace("flash_attn-", "flash_attn_4-"), "name"),
    ],
)
def test_a_wheel_that_was_renamed_is_refused(wheel: Path, name: str, what: str) -> None:
    renamed = wheel.rename(wheel.with_name(name))
    with pytest.raises(WheelError, match=f"the {what} by its file name is .*renamed or changed"):
        contents.read(renamed)


def changed(content: bytes, step: int) -> Iterator[bytes]:
    """The same with one other byte, here and there."""
    for place in range(0, len(content), step):
        yield content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


def test_a_statement_with_any_other_byte_is_refused(wheel: Path) -> None:
    statement = companions.provenance(wheel)
    for content in changed(statement.read_bytes(), 97):
        statement.write_bytes(content)
        with pytest.raises(WheelError, match=rf"{re.escape(statement.name)} was changed"):
            evidence.check(wheel)


# --- proofs ---


def prove(wheel: Path, /, **more: Any) -> Path:
    """A proof as the suite leaves it, with its statement."""
    proof: dict[str, Any] = {
        "format": 1,
        "verified": True,
        "counts": {"passed": 2},
        "wheel": {"name": wheel.name, "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest()},
        "gpu": {"name": "NVIDIA H100", "compute_capability": "9.0", "driver": "580.1"},
        "torch": "2.11.0",
        "python": "3.12.1",
        "controls": [],
        "cases": {"test_a": {"outcome": "passed", "seconds": 0.1}},
        **more,
    }
    companions.proof(wheel).write_bytes(sealed.render(sealed.seal(proof)))
    return companions.proof(wheel)


def test_a_proof_and_its_statement_pass(wheel: Path) -> None:
    prove(wheel)
    evidence.attest_proof(wheel)
    checked = evidence.check(wheel)
    assert checked.proof is not None
    assert checked.proof.verified
    assert companions.proof_statement(wheel) in checked.statements


@pytest.mark.parametrize("attested", [True, False])
def test_a_proof_with_any_other_byte_is_refused(wheel: Path, attested: bool) -> None:
    proof = prove(wheel)
    if attested:
        evidence.attest_proof(wheel)
    for content in changed(proof.read_bytes(), 23):
        proof.write_bytes(content)
        with pytest.raises(WheelError, match=rf"{re.escape(proof.name)} "):
            evidence.check(wheel)


@pytest.mark.parametrize("name", ["verify", "inspect"])
def test_a_proof_of_another_wheel_is_refused(
    wheel: Path, name: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    prove(wheel, wheel={"sha256": "0" * 64})
    monkeypatch.setattr(verify, "installed", lambda *_: pytest.fail("it was installed"))
    done = command(name, str(wheel))
    assert done.status == WheelError.exit_code
    assert f"{companions.proof(wheel)} is of another wheel (sha256 0000000000000000…)" in done.err
    assert "delete it, and run nox -s verify" in done.err


def test_a_proof_without_a_seal_is_refused(wheel: Path) -> None:
    proof = prove(wheel)
    proof.write_bytes(proof.read_bytes().replace(b'"digest"', b'"other"'))
    with pytest.raises(WheelError, match=rf"{re.escape(proof.name)} has no digest of its own"):
        evidence.check(wheel)


def test_a_statement_of_a_proof_that_is_not_there_or_is_another_is_refused(wheel: Path) -> None:
    prove(wheel)
    evidence.attest_proof(wheel)
    prove(wheel, counts={"passed": 3})
    with pytest.raises(WheelError, match=r"proof\.statement\.json was changed, or is of another"):
        evidence.check(wheel)
    companions.proof(wheel).unlink()
    with pytest.raises(WheelError, match=r"proof\.statement\.json tells of a proof"):
        evidence.check(wheel)
    with pytest.raises(WheelError, match=r"proof\.json is missing; run nox -s verify"):
        evidence.attest_proof(wheel)


def test_the_proof_of_another_host_gets_its_statement_here(wheel: Path, command: Command) -> None:
    prove(wheel)
    done = command("verify", "--attest", str(wheel))
    assert done.status == 0, done.err
    assert companions.proof_statement(wheel) in evidence.check(wheel).statements
