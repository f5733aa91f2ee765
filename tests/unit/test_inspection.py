"""``inspect``: what it tells of a wheel, and building one again."""

from __future__ import annotations

import dataclasses
import json
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
import zstandard

from scripts.base import layout
from scripts.base.errors import UsageError, WheelError
from scripts.lab import machine_code
from scripts.series import clone, ground
from scripts.source import matrix, upstream
from scripts.wheels.building import build, rebuild
from scripts.wheels.building.build import BuildOptions
from scripts.wheels.trust import companions, evidence, signing
from tests.unit.conftest import BASE, FACTS, WHEEL_NAME, Command, checkout_of, whole_wheel
from tests.unit.test_trust import prove

KERNEL = (
    "_ZN5flash16flash_fwd_kernelI23Flash_fwd_kernel_traitsILi{0}ELi128ELi128ELi4ELb0ELb0EN7cutlass{1}EE"
    "EvNS_16Flash_fwd_paramsE"
)


def compiled(tmp_path: Path, sections: dict[str, bytes], *link: str) -> bytes:
    """A real object, or library, with sections of these names and contents."""
    lines: list[str] = []
    for name, content in sections.items():
        (tmp_path / "content").mkdir(exist_ok=True)
        place = tmp_path / "content" / str(len(lines))
        place.write_bytes(content)
        lines.append(f'.section "{name}","a"\n.incbin "{place}"')
    source = tmp_path / "sections.s"
    source.write_text("\n".join(lines) + "\n")
    out = tmp_path / "out.o"
    subprocess.run(["gcc", *(link or ("-c",)), str(source), "-o", str(out)], check=True)
    return out.read_bytes()


def entry(cubin: bytes, architecture: int, *, packed: bool) -> bytes:
    """A piece of a fat binary as nvcc writes it."""
    content = zstandard.compress(cubin) if packed else cubin
    content += b"\0" * (-len(content) % 8)
    head = struct.pack(
        "<HHIQIIHHIIIQQQ",
        2,
        0x101,
        64,
        len(content),
        len(content),
        0,
        8,
        1,
        architecture,
        0,
        0,
        0x8011,
        0,
        len(cubin),
    )
    return head + content


def fatbin(*entries: bytes) -> bytes:
    content = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(content)) + content + b"\0" * 8


@pytest.fixture
def extension(tmp_path: Path) -> bytes:
    """A library that holds machine code of three kernels for two GPUs."""
    names = [KERNEL.format(64, "6half_t"), KERNEL.format(128, "10bfloat16_t")]
    cubins = [compiled(tmp_path, {f".text.{name}": b"\1" * 160}) for name in names]
    pieces = [
        entry(cubins[0], 90, packed=True),
        entry(cubins[0], 80, packed=False),
        entry(cubins[1], 90, packed=True),
    ]
    return compiled(tmp_path, {".nv_fatbin": fatbin(*pieces)}, "-shared", "-nostdlib")


def test_machine_code_is_told_by_gpu_and_kernel_family(extension: bytes) -> None:
    told = {
        (f.architecture, f.name): (f.modules, f.kernels, f.code) for f in machine_code.families(extension)
    }
    assert told == {
        ("sm_80", "fwd_hdim64_fp16"): (1, 1, 160),
        ("sm_90", "fwd_hdim64_fp16"): (1, 1, 160),
        ("sm_90", "fwd_hdim128_bf16"): (1, 1, 160),
    }


def test_machine_code_packed_in_another_way_is_told_by_size_alone(tmp_path: Path) -> None:
    content = fatbin(entry(b"another way to pack", 90, packed=False))
    (told,) = machine_code.families(compiled(tmp_path, {".nv_fatbin": content}, "-shared", "-nostdlib"))
    assert dataclasses.astuple(told) == ("sm_90", "not read", 1, 0, 24, 0)


def test_it_tells_what_the_wheel_is_made_of_and_where_it_was_proved(
    tmp_path: Path, extension: bytes, command: Command
) -> None:
    wheel = whole_wheel(tmp_path / "dist", more={"flash_attn_2_cuda.so": extension})
    prove(wheel)
    evidence.attest_proof(wheel)
    done = command("inspect", str(wheel))
    assert done.status == 0, done.err
    for words in (
        evidence.whole(wheel).sha256,
        "2.8.3.post1, commit aaaa",
        "2 patches, digest dddd",
        "cu13",
        "V13.0.88: -O3",
        "g++ (Debian 12.2.0-14+deb12u1) 12.2.0: -O3",
        "libgcc.a",
        "Backport [abc]",
        "fwd_hdim64_fp16",
        "proved on NVIDIA H100 (9.0), driver 580.1, torch 2.11.0, Python 3.12.1: 2 passed",
        "files agree with RECORD",
        ".provenance.json is what this wheel gives",
        ".proof.statement.json is what this wheel gives",
    ):
        assert words in done.out, words


def test_it_tells_which_of_our_own_files_this_checkout_has_otherwise(
    tmp_path: Path, command: Command
) -> None:
    own = clone.series(matrix.load(layout.MATRIX)).own.digests
    first, second, *_ = sorted(own)

    def told(files: dict[str, str], folder: str) -> str:
        series = {**FACTS["series"], "own_files": files}
        done = command("inspect", str(whole_wheel(tmp_path / folder, facts={**FACTS, "series": series})))
        return " ".join(done.out.split())  # a narrow table has several lines of it

    assert f"own files {len(own)}, as in this checkout" in told(own, "same")
    changed = {**own, first: "1" * 64, "gone.h": "2" * 64}
    del changed[second]
    others = ", ".join(sorted([first, second, "gone.h"]))
    assert f"own files {len(own)}; otherwise in this checkout: {others}" in told(changed, "changed")
    assert f" and {len(own) - 5} more" in told({}, "none")


def test_json_has_all_of_it(tmp_path: Path, extension: bytes, command: Command) -> None:
    wheel = whole_wheel(tmp_path / "dist", more={"flash_attn_2_cuda.so": extension})
    done = command("inspect", "--json", str(wheel))
    (told,) = json.loads(done.out)["wheels"]
    assert told["sha256"] == evidence.whole(wheel).sha256
    assert told["provenance"]["series"] == FACTS["series"]
    assert {f["architecture"] for f in told["extensions"]["flash_attn_2_cuda.so"]["code"]} == {
        "sm_80",
        "sm_90",
    }
    assert (told["proof"], told["signed_by"], len(told["statements"])) == (None, {}, 1)
    assert [bom["bomFormat"] for bom in told["sboms"].values()] == ["CycloneDX"]


def test_a_wheel_that_is_refused_stops_no_other(tmp_path: Path, command: Command) -> None:
    wheel = whole_wheel(tmp_path / "dist")
    absent = tmp_path / WHEEL_NAME
    done = command("inspect", "--json", str(absent), str(wheel))
    assert done.status == UsageError.exit_code
    told = json.loads(done.out)["wheels"]
    assert ["error" in entry for entry in told] == [True, False]


def test_sign_signs_what_lies_beside_a_whole_wheel_and_is_not_signed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    wheel = whole_wheel(tmp_path)
    prove(wheel)
    attested: list[Path] = []

    def sign(statement: Path, attestation: Path) -> None:  # which needs a network and an identity
        attested.append(statement)
        attestation.touch()

    monkeypatch.setattr(signing, "sign", sign)
    monkeypatch.setattr(signing, "check", lambda *_: "a signer")
    done = command("inspect", "--sign", str(wheel))
    assert done.status == 0, done.err
    assert attested == [companions.provenance(wheel)], "the proof has no statement yet"
    assert f"{companions.provenance_attestation(wheel).name}: signed by a signer" in done.out
    evidence.attest_proof(wheel)
    for _ in range(2):
        command("inspect", "--sign", str(wheel))
    assert attested == [companions.provenance(wheel), companions.proof_statement(wheel)]
    companions.proof_statement(wheel).write_text("{}")
    companions.proof_attestation(wheel).unlink()
    assert command("inspect", "--sign", str(wheel)).status == WheelError.exit_code
    assert len(attested) == 2, "nothing that was changed is signed"


def test_what_nothing_vouches_for_is_told(tmp_path: Path, command: Command) -> None:
    wheel = whole_wheel(tmp_path / "dist")
    wheel.with_suffix(".provenance.json").unlink()
    done = command("inspect", str(wheel))
    assert done.status == 0
    assert "nothing outside vouches for it" in done.err
    assert "no proof lies beside" in done.err


# --- building again ---


def test_a_wheel_of_another_series_names_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = matrix.load(layout.MATRIX)
    monkeypatch.setattr(upstream, "pinned", lambda *_: checkout_of(BASE))
    monkeypatch.setattr(upstream, "find", lambda *_: checkout_of(BASE))
    facts = {**FACTS, "fork_revision": loaded.table.revision}
    wheel = evidence.whole(whole_wheel(tmp_path, facts=facts))
    here = clone.series(loaded)
    counts = rf"of {len(here.patches)} and {len(here.own.contents)}"
    said = rf"its series is d{{16}}… of 2 patches and 0 own files, and .* has [0-9a-f]{{16}}… {counts}; check out"
    with pytest.raises(UsageError, match=said):
        rebuild.rebuild(wheel, BuildOptions(upstream.Source.SDIST))


def test_a_wheel_of_the_same_patches_on_other_own_files_is_of_another_series(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = matrix.load(layout.MATRIX)
    monkeypatch.setattr(upstream, "pinned", lambda *_: checkout_of(BASE))
    monkeypatch.setattr(ground, "base_of", lambda *_: "e" * 40)
    monkeypatch.setattr(upstream, "find", lambda *_: checkout_of(BASE))
    here = clone.series(loaded)
    patches = [{**FACTS["series"]["patches"][0], "name": p.name, "sha256": p.sha256} for p in here.patches]
    own = here.own.digests
    for name, told in (("same", own), ("other", {**own, next(iter(own)): "0" * 64})):
        facts = {**FACTS, "series": {**FACTS["series"], "patches": patches, "own_files": told}}
        wheel = evidence.whole(whole_wheel(tmp_path / name, facts=facts))
        if name == "same":
            rebuild._require_series(wheel, loaded)
        else:
            with pytest.raises(UsageError, match=rf"its series is .* and {len(own)} own files"):
                rebuild._require_series(wheel, loaded)


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"fork_revision": 99}, "its revision is 99"),
        ({"upstream": {**FACTS["upstream"], "version": "2.8.2"}}, "its upstream is 2.8.2"),
    ],
)
def test_a_wheel_of_another_pin_names_both(tmp_path: Path, facts: dict[str, object], said: str) -> None:
    wheel = evidence.whole(whole_wheel(tmp_path, facts={**FACTS, **facts}))
    with pytest.raises(UsageError, match=f"{said}, and wheel_matrix.toml of this checkout has"):
        rebuild.rebuild(wheel, BuildOptions(upstream.Source.SDIST))


def test_a_wheel_of_an_upstream_that_is_not_here_is_refused(tmp_path: Path) -> None:
    wheel = evidence.whole(whole_wheel(tmp_path, "other-1-py3-none-any.whl"))
    with pytest.raises(UsageError, match="has no upstream whose distribution is other; it has flash-attn, "):
        rebuild.rebuild(wheel, BuildOptions(upstream.Source.SDIST))


def test_what_is_built_again_is_what_the_wheel_says(tmp_path: Path) -> None:
    facts = {**FACTS, "attn_bias": False, "architectures": ["80", "90"]}
    wheel = evidence.whole(whole_wheel(tmp_path, facts=facts))
    job = rebuild.job_of(wheel, matrix.load(layout.MATRIX))
    assert (job.target.name, job.architectures) == ("cu13", ("80", "90"))
    assert [(kernel.name, kernel.bias) for kernel in job.kernels] == [("fwd_hdim64_fp16", False)]


def test_a_target_that_has_another_torch_now_is_refused(tmp_path: Path) -> None:
    wheel = evidence.whole(whole_wheel(tmp_path, facts={**FACTS, "attn_bias": True, "torch": "2.11.9"}))
    with pytest.raises(UsageError, match=r"its torch is 2\.11\.9, and .* has 2\.11\.0"):
        rebuild.job_of(wheel, matrix.load(layout.MATRIX))


def test_bytes_that_differ_are_told_by_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = whole_wheel(tmp_path / "one")
    other = whole_wheel(tmp_path / "two", more={"flash_attn/more.py": b""})
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(layout, "BUILD", tmp_path / "build")
    with pytest.raises(Exception, match=r"flash_attn/more\.py"):
        build.again_same(wheel, lambda folder: other)
