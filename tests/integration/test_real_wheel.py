"""One real kernel file and the real core, by real compilers, into a real wheel that pip installs."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

from scripts.wheels.packing import wheel as packing
from scripts.wheels.trust import binaries, contents, sbom
from tests.integration.wheels import KERNELS, ROOT, build, said, scripts, tools
from tests.unit.waiting import PATIENCE, until

pytestmark = [pytest.mark.network, pytest.mark.nvcc]


@pytest.mark.path
def test_the_name_and_the_content_say_what_it_is(wheel: Path) -> None:
    assert (
        wheel.name
        == "flash_attn-2.8.3.post1+det.2.cu13-1_hdim32_fp16_fwd_causal_sm90-py3-none-manylinux_2_28_x86_64.whl"
    )
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        info = json.loads(archive.read("flash_attn/_fork.json"))
        assert str(ROOT).encode() not in b"".join(archive.read(n) for n in names if ".so" not in n)
    assert info["kernel_set"] == ["fwd_hdim32_fp16_causal"]
    assert info["architectures"] == ["90"]
    assert "flash_attn/determinism.py" in names
    assert not [n for n in names if n.startswith(("tests", "build", "csrc"))]
    assert [n for n in names if ".so" in n] == [
        "flash_attn/cpp/lib/libflash_attention_v2.so.1",
        "flash_attn_2_cuda/core.so",
    ]
    assert binaries.audit(wheel) == (
        *("ld-linux-x86-64.so.2", "libc.so.6", "libcudart.so.13", "libgcc_s.so.1", "libm.so.6"),
        *("libstdc++.so.6", "libtvm_ffi.so"),
    )


def test_no_launch_passes_the_library_by(wheel: Path, tmp_path: Path) -> None:
    """A compiler that made another call of <<<>>> would lose what core/launch.cpp does at a launch."""
    with zipfile.ZipFile(wheel) as archive:
        library = archive.extract("flash_attn/cpp/lib/libflash_attention_v2.so.1", tmp_path)
    with Path(library).open("rb") as file:
        table = ELFFile(file).get_section_by_name(".dynsym")
        assert isinstance(table, SymbolTableSection)
        asked = {symbol.name for symbol in table.iter_symbols() if symbol["st_shndx"] == "SHN_UNDEF"}
    assert {name for name in asked if "LaunchKernel" in name} == {"__cudaLaunchKernel"}
    assert {name for name in asked if "GetKernel" in name} == {"__cudaGetKernel"}


def test_a_compiler_that_links_libstdcxx_statically_is_refused_before_anything_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "static"
    compiler.write_text('#!/bin/sh\nexec g++ "$@" -static-libstdc++\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    done = scripts("build", "--kernels", KERNELS, "--source", "sdist", "--out", tmp_path / "out")
    assert done.returncode != 0
    assert "static linked libstdc++ into a library" in done.stderr
    assert "to compile" not in done.stdout
    assert not (tmp_path / "out").exists()


def test_a_second_build_compiles_nothing_and_gives_the_same_bytes(wheel: Path, tmp_path: Path) -> None:
    output = build(tmp_path)
    (again,) = tmp_path.glob("*.whl")
    assert "0 compiled" in output
    assert hashlib.sha256(again.read_bytes()).digest() == hashlib.sha256(wheel.read_bytes()).digest()


def test_the_compile_cache_answers_when_the_objects_are_gone(wheel: Path, tmp_path: Path) -> None:
    objects = [*(ROOT / "build/kernels").rglob("fwd_hdim32_fp16_causal.o")]
    assert objects
    for path in objects:
        path.unlink()
    output = build(tmp_path)
    assert re.search(r"\n\s*1 compiled in .*; compile cache: \d+ hits, 0 misses", output), output


@pytest.mark.path
def test_it_installs_imports_and_passes_the_static_half_and_is_not_called_verified(wheel: Path) -> None:
    if shutil.which("nvidia-smi"):
        pytest.skip("this machine has a GPU: nox -s verify proves wheels here")
    done = scripts("verify", wheel)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "NOT VERIFIED" in done.stderr
    assert "pip check" not in done.stderr
    proof = json.loads(wheel.with_suffix(".proof.json").read_text())
    assert proof["verified"] is False
    assert proof["wheel"]["sha256"] == hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert proof["counts"].get("failed", 0) == 0
    assert proof["counts"]["passed"] >= 30
    assert proof["counts"]["not run"] > 1000
    assert {case["outcome"] for case in proof["cases"].values()} == {"passed", "not run"}


def test_a_wheel_whose_provenance_lies_fails_verification(wheel: Path, tmp_path: Path) -> None:
    """Whoever seals a lie has a wheel that agrees with itself; the static half compares it with what is in it."""
    whole = contents.read(wheel)
    info = next(name for name in whole.files if name.endswith(".dist-info/RECORD")).partition("/")[0]
    files = {name: content for name, content in whole.files.items() if name != f"{info}/RECORD"}
    lie = {**whole.facts, "architectures": ["80"], "kernel_set": ["bwd_hdim64_fp16"]}
    forged = packing.write(tmp_path / wheel.name, sbom.describe(files, info, whole.provenance_name, lie))
    done = scripts("verify", forged, "--pytest=-k", "--pytest=inside or machine_code")
    assert done.returncode == 10, done.stdout + done.stderr
    assert "2 cases failed" in done.stderr


def test_it_says_what_it_is_made_of_by_every_hash(wheel: Path) -> None:
    (told,) = json.loads(said("inspect", "--json", wheel))["wheels"]
    library, binding = (told["extensions"][name] for name in sorted(told["extensions"]))
    assert binding["code"] == []
    assert [(f["architecture"], f["name"], f["modules"]) for f in library["code"]] == [
        ("sm_90", "core", 4),
        ("sm_90", "fwd_hdim32_fp16", 1),
    ]
    assert "libcudart.so.13" in library["libraries"]
    assert "libflash_attention_v2.so.1" in binding["libraries"]
    assert told["provenance"]["nvcc"]["version"].startswith("V13.0.")


@pytest.mark.in_turn(0, 5)
def test_a_second_builder_gets_the_same_bytes(wheel: Path) -> None:
    assert "byte for byte the same" in said("inspect", "--rebuild", wheel)


def test_an_interrupt_ends_the_compilers_too(tmp_path: Path) -> None:
    """The steps of nvcc run under the compile cache's server: no part of it may go on by itself."""
    chosen = ("--kernels", "hdim256,bf16,bwd,causal", "--source", "sdist", "--out", str(tmp_path))
    # Whatever was built or cached before, this compiles.
    command = [sys.executable, "-m", "scripts", "build", *chosen, "--arch", "87"]
    for path in (ROOT / "build/kernels").rglob("bwd_hdim256_bf16_causal.o"):
        path.unlink()
    env = {**os.environ, "SCCACHE_RECACHE": "1"}
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    )

    def descendants() -> dict[int, str]:
        found = {}
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                found[child.pid] = " ".join(child.cmdline())
        return found

    # Into the steps that nvcc takes, of which the optimiser takes minutes.
    until(
        lambda: any("cicc" in words and "hdim256_bf16" in words for words in descendants().values()), "cicc"
    )
    running = descendants()
    process.terminate()  # handled as Ctrl-C, which a job in the background may be deaf to
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert "the same command goes on from there" in err
    left = [pid for pid in running if Path(f"/proc/{pid}").exists()]
    assert not left, [running[pid] for pid in left]
    assert not list(tmp_path.iterdir())
    assert not list((ROOT / "build/kernels").rglob("bwd_hdim256_bf16_causal*"))


def test_a_hook_that_does_not_compile_fails_with_the_line_and_the_log(tmp_path: Path) -> None:
    """A compiler's own message reaches the user, through ninja and the compile cache."""
    from scripts.base.errors import CompileError
    from scripts.series.tree import Tree
    from scripts.source import kernel_set
    from scripts.wheels.compiling import kernels, ninja

    chosen = kernel_set.parse_kernels(KERNELS)
    source = tmp_path / "source/csrc/flash_attn/src" / chosen[0].source
    source.parent.mkdir(parents=True)
    source.write_text("__global__ void kernel() { undeclared = 1; }\n")
    tree = Tree(
        tmp_path / "source",
        "b" * 40,
        hashlib.sha1(os.urandom(8), usedforsecurity=False).hexdigest(),
        "d" * 64,
        "e" * 40,
        "f" * 64,
    )
    plan = kernels.Plan(tree, tools(), chosen, ("90",), tmp_path / "build")
    with pytest.raises(
        CompileError,
        match=r'(?s)error: identifier "undeclared" is undefined.*The full log is .*compile-\w+\.log',
    ):
        ninja.compile_units(plan, kernels.kernel_units(plan), 1)
