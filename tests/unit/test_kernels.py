from __future__ import annotations

import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.base import console
from scripts.base.errors import BuildError, CompileError, SeriesError, ToolchainError
from scripts.base.process import run
from scripts.wheels.compiling import flags, kernels, ninja
from scripts.wheels.packing import linking
from scripts.wheels.toolchain.compilers import Toolchain
from tests.unit.conftest import CORE, KERNELS, compile_all, plan, toolchain
from tests.unit.waiting import PATIENCE, WHEN_OPEN, both_in_turn, until


def test_kernel_files_are_told_for_which_gpus_they_are_compiled_and_upstream_s_own_are_not(
    tmp_path: Path,
) -> None:
    planned = plan(tmp_path, toolchain(tmp_path, ""))
    assert flags.for_gpus(("80", "90")) == "-DFORK_ARCHITECTURES=0x011"
    assert "-DFORK_ARCHITECTURES=0x010" in kernels.nvcc_flags(planned)
    assert not [
        flag
        for flag in kernels.nvcc_flags(dataclasses.replace(planned, flavour=kernels.STOCK))
        if "FORK_ARCHITECTURES" in flag
    ]


def test_a_second_run_compiles_nothing(tmp_path: Path) -> None:
    tools = toolchain(tmp_path, 'echo "$last" >> "$0.calls"; touch "$last"\n')
    assert compile_all(tmp_path, tools).built == len(KERNELS)
    assert compile_all(tmp_path, tools).built == 0
    assert len((tmp_path / "compiler.calls").read_text().splitlines()) == len(KERNELS)


def test_two_plans_are_compiled_side_by_side_each_from_its_own_tree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tools = toolchain(tmp_path, 'pwd >> "$0.calls"; touch "$last"\n')
    one = plan(tmp_path, tools)
    shutil.copytree(one.tree.root, tmp_path / "other")
    other = dataclasses.replace(
        one,
        tree=dataclasses.replace(
            one.tree, root=tmp_path / "other", kernel_sources="a" * 64, seen=time.time_ns()
        ),
    )
    units = kernels.kernel_units(one)
    longer = [dataclasses.replace(unit, seconds=2 * unit.seconds) for unit in kernels.kernel_units(other)]
    work = [(one, units), (other, longer)]
    done = ninja.compile_together(work, 1)
    left = re.findall(r"about (.*) left", capsys.readouterr().out)
    assert left[-1] == "0s", "two files of one name were counted as one of them twice"
    assert not [words for words in left if "-" in words]
    assert done.built == 2 * len(KERNELS) == len(set(done.objects))
    assert list(done.objects) == [unit.target for _, units in work for unit in units]
    assert all(path.exists() for path in done.objects)
    assert (tmp_path / "compiler.calls").read_text().split() == [
        str(one.tree.root),
        str(other.tree.root),
    ] * len(KERNELS)


def test_two_plans_of_the_same_kernels_are_compiled_once(tmp_path: Path) -> None:
    """As before and after a patch that touches the binding or Python alone."""
    tools = toolchain(tmp_path, 'echo >> "$0.calls"; touch "$last"\n')
    one = plan(tmp_path, tools)
    other = dataclasses.replace(
        one, tree=dataclasses.replace(one.tree, root=tmp_path / "other", commit="a" * 40)
    )
    shutil.copytree(one.tree.root, other.tree.root)
    done = ninja.compile_together([(planned, kernels.kernel_units(planned)) for planned in (one, other)], 2)
    assert done.built == len(KERNELS) == len(done.objects)
    assert (tmp_path / "compiler.calls").read_text().count("\n") == len(KERNELS)


def test_a_failure_names_command_output_log_and_what_was_finished_stays(tmp_path: Path) -> None:
    tools = toolchain(
        tmp_path,
        'case "$last" in *bwd_hdim64_fp16.o.part) echo "a.h(3): error: oh no"; exit 1;; esac; touch "$last"\n',
    )
    with pytest.raises(CompileError) as caught:
        compile_all(tmp_path, tools, jobs=1)
    text = str(caught.value)
    assert "error: oh no" in text
    assert "bwd_hdim64_fp16.o failed:" in text
    assert "The full log is" in text
    assert "flash_bwd_hdim64_fp16_sm80.cu" in text
    assert list((tmp_path / "build/kernels").rglob("*.o"))
    fixed = toolchain(tmp_path, 'touch "$last"\n')
    assert 0 < compile_all(tmp_path, fixed).built < len(KERNELS)


@pytest.mark.parametrize(
    ("says", "hint"),
    [
        ("nvcc error: 'cicc' died due to signal 9 (Kill signal)", "--jobs 1"),
        ("fatal: No space left on device", "disk is full"),
    ],
)
def test_a_known_cause_comes_with_what_to_try(tmp_path: Path, says: str, hint: str) -> None:
    with pytest.raises(CompileError, match=hint):
        compile_all(tmp_path, toolchain(tmp_path, f'echo "{says}"; exit 1\n'))


def test_an_interrupt_stops_the_compilers_keeps_what_is_done_and_leaves_nothing_half_written(
    tmp_path: Path,
) -> None:
    tools = toolchain(
        tmp_path, 'case "$last" in *split*) echo half > "$last"; sleep 6000;; esac; touch "$last"\n'
    )
    code = f"""
import signal, sys
signal.signal(signal.SIGTERM, signal.default_int_handler)  # as scripts.__main__ does
sys.path.insert(0, {str(Path(__file__).resolve().parents[2])!r})
from pathlib import Path
from tests.unit import conftest as t
tools = t.toolchain(Path({str(tmp_path)!r}), {Path(tools.cxx).read_text().partition("done" + chr(10))[2]!r})
try:
    t.compile_all(Path({str(tmp_path)!r}), tools)
except KeyboardInterrupt:
    sys.exit(130)
"""
    process = subprocess.Popen([sys.executable, "-c", code])
    until(lambda: list((tmp_path / "build").rglob("split*.o.part")), "a file half written", process)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(PATIENCE) == 130
    left = sorted(p.name for p in (tmp_path / "build/kernels").rglob("*.o*"))
    assert not [name for name in left if "split" in name or "part" in name]
    running = subprocess.run(
        ["pgrep", "-f", str(tmp_path / "compiler")], capture_output=True, text=True, check=False
    ).stdout
    assert not running
    assert compile_all(tmp_path, toolchain(tmp_path, 'touch "$last"\n')).built == len(KERNELS) - len(left)


def test_longest_files_come_first(tmp_path: Path) -> None:
    units = kernels.kernel_units(plan(tmp_path, toolchain(tmp_path, "")))
    assert [u.seconds for u in units] == sorted((u.seconds for u in units), reverse=True)


def test_the_binding_s_folder_follows_the_kernel_choice_and_the_kernels_do_not(tmp_path: Path) -> None:
    tools = toolchain(tmp_path, "")
    whole, fewer, other = (
        plan(tmp_path, tools),
        plan(tmp_path, tools, KERNELS[:2]),
        plan(tmp_path, tools, arch="80"),
    )
    stock = dataclasses.replace(whole, flavour=kernels.STOCK)
    bindings = {kernels.binding_units(p)[0].target for p in (whole, fewer, stock)}
    assert len(bindings) == 3
    targets = {u.source: u.target for u in kernels.kernel_units(whole)}
    assert all(targets[u.source] == u.target for u in kernels.kernel_units(fewer))
    for different in (other, stock):
        assert not {u.target for u in kernels.kernel_units(different)} & set(targets.values())


def test_kernels_and_binding_serve_every_torch_and_python(tmp_path: Path) -> None:
    """Stock's include torch, so they follow it."""
    tools = toolchain(tmp_path, "")
    other = dataclasses.replace(
        tools,
        for_python=dataclasses.replace(
            tools.environment,
            torch="2.12.1+cu130",
            tag="cp313",
            site=tmp_path / "other",
            include=tmp_path / "python",
        ),
    )
    ours, theirs = plan(tmp_path, tools), plan(tmp_path, other)
    assert kernels.kernel_units(ours) == kernels.kernel_units(theirs)
    assert kernels.binding_units(ours) == kernels.binding_units(theirs)
    stock = [dataclasses.replace(p, flavour=kernels.STOCK) for p in (ours, theirs)]
    assert kernels.kernel_units(stock[0]) != kernels.kernel_units(stock[1])
    assert kernels.binding_units(stock[0]) != kernels.binding_units(stock[1])


def test_objects_of_other_compilers_have_other_folders(tmp_path: Path) -> None:
    tools = toolchain(tmp_path, "")
    nvcc = dataclasses.replace(tools.toolkit, version="V13.0.99")
    others = [dataclasses.replace(tools, toolkit=nvcc), dataclasses.replace(tools, cxx_version="g++ 13")]
    for units in (kernels.kernel_units, kernels.binding_units):
        folders = [{u.target.parent for u in units(plan(tmp_path, each))} for each in (tools, *others)]
        assert len(set.union(*folders)) == sum(map(len, folders))


def commands_of(tmp_path: Path, tools: Toolchain, flavour: kernels.Flavour = kernels.FORK) -> list[str]:
    """What compiles the binding and the kernels, with a compiler that notes its arguments."""
    planned = dataclasses.replace(plan(tmp_path, tools), flavour=flavour)
    ninja.compile_units(planned, [*kernels.binding_units(planned), *kernels.kernel_units(planned)], 1)
    return (tmp_path / "compiler.args").read_text().splitlines()


NOTES = 'echo "$@" >> "$0.args"; touch "$last"\n'


def test_no_command_of_ours_names_torch_or_python(tmp_path: Path) -> None:
    tools = toolchain(tmp_path, NOTES)
    environment = dataclasses.replace(
        tools.environment, site=tmp_path / "site", include=tmp_path / "python-headers"
    )
    commands = commands_of(tmp_path, dataclasses.replace(tools, for_python=environment))
    assert len(commands) == len(KERNELS) + len(CORE)
    assert not [c for c in commands if "torch" in c or "python" in c or "CXX11_ABI" in c]
    assert [str(tmp_path / "tvm-ffi/include") in c for c in commands].count(True) == 1


def test_jobs_are_limited_by_memory() -> None:
    assert ninja.job_limit(None, 1e15)[0] == 1
    assert ninja.job_limit(None, 1.0)[0] == len(os.sched_getaffinity(0))
    assert ninja.job_limit(7, 1e15)[0] == 7


def test_a_program_that_cannot_run_is_an_error_that_says_what_was_tried(tmp_path: Path) -> None:
    with pytest.raises(ToolchainError, match=r"no step: cannot run /absent/program -x: No such file"):
        run(["/absent/program", "-x"], error=ToolchainError, what="no step")
    with pytest.raises(
        BuildError, match=r"(?s)step: .*exited with 3\..*  said.*The full log is .*log\.txt\.\nTry it"
    ):
        run(
            ["sh", "-c", "echo said; exit 3"],
            error=BuildError,
            what="step",
            hint="Try it",
            log=tmp_path / "log.txt",
        )
    assert "said" in (tmp_path / "log.txt").read_text()


@given(st.integers(0, 10**7))
def test_durations_read_back_to_the_second(seconds: int) -> None:
    total = 0
    for number, unit in [
        (part[:-1], part[-1])
        for part in console.duration(seconds).replace("h", "h ").replace("m", "m ").split()
    ]:
        total += int(number) * {"h": 3600, "m": 60, "s": 1}[unit]
    assert total == seconds


@pytest.mark.parametrize(
    ("torch", "standard"),
    [("2.11.0+cu130", "c++17"), ("2.13.0", "c++17"), ("2.14.1+cu130", "c++20"), ("2.15.0", "c++20")],
)
def test_stock_s_binding_is_compiled_for_the_standard_that_its_torch_asks_for(
    tmp_path: Path, torch: str, standard: str
) -> None:
    tools = toolchain(tmp_path, NOTES)
    other = dataclasses.replace(tools, for_python=dataclasses.replace(tools.environment, torch=torch))
    (tmp_path / "source/csrc/flash_attn").mkdir(parents=True)
    for command in commands_of(tmp_path, other, kernels.STOCK):
        assert f"-std={standard if '.cu ' not in command else 'c++17'}" in command


def test_one_choice_of_objects_is_one_extension(tmp_path: Path) -> None:
    """Linked once; another kernel, the same one from other sources, or another option of the linker is another."""
    tools = toolchain(tmp_path, "")
    units = [u.target for u in kernels.kernel_units(plan(tmp_path, tools))]
    elsewhere = [Path("/other") / p.parent.name / p.name for p in units]
    options = linking.link_options(tools, linking.Product.LIBRARY)
    assert kernels.extension_key(units, options) == kernels.extension_key(elsewhere, options)
    others = [u.target for u in kernels.kernel_units(plan(tmp_path, tools, arch="80"))]
    keys = [kernels.extension_key(u, options) for u in (units, units[1:], others)]
    assert len({*keys, kernels.extension_key(units, [*options, "-Wl,-O1"])}) == 4


@pytest.mark.parametrize("edit", ["echo edited >", "mv $0.mine"], ids=["written", "moved there, older"])
def test_an_object_of_sources_that_were_edited_meanwhile_is_not_kept(tmp_path: Path, edit: str) -> None:
    """It would answer for the sources as they were, in every later build."""
    header = "csrc/flash_attn/src/fork.h"
    tools = toolchain(
        tmp_path,
        f'[ -e "$0.edited" ] || {{ sleep 0.1; touch "$0.edited"; {edit} {header}; }}; cat {header} > "$last"\n',
    )
    (tmp_path / "compiler.mine").write_text("edited\n")
    (tmp_path / "source" / header).parent.mkdir(parents=True)
    (tmp_path / "source" / header).write_text("committed\n")
    planned = plan(tmp_path, tools)
    units = kernels.kernel_units(planned)
    with pytest.raises(SeriesError, match=r"fork\.h changed while it was being built from"):
        ninja.compile_units(planned, units, 1)
    (tmp_path / "source" / header).write_text("committed\n")
    done = ninja.compile_units(plan(tmp_path, tools), units, 1)
    assert {path.read_text() for path in done.objects} == {"committed\n"}


def test_two_builds_in_one_clone_take_turns(tmp_path: Path, notes: list[str]) -> None:
    tools = toolchain(tmp_path, f'echo begun >> "$0.calls"; echo whole > "$last"\n{WHEN_OPEN}')
    planned = plan(tmp_path, tools)
    units = kernels.kernel_units(planned)
    built = both_in_turn(lambda: ninja.compile_units(planned, units, 2), tools.cxx, notes)
    assert sorted(done.built for done in built) == [0, len(units)]
    assert len((tmp_path / "compiler.calls").read_text().split()) == len(units)


def test_options_from_the_environment_reach_no_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NVCC_APPEND_FLAGS", "NVCC_PREPEND_FLAGS", "CPATH", "CPLUS_INCLUDE_PATH", "PTXAS_FLAGS"):
        monkeypatch.setenv(name, "-G")
    monkeypatch.setenv("KEPT", "kept")
    done = compile_all(
        tmp_path,
        toolchain(
            tmp_path,
            'echo "$KEPT$NVCC_APPEND_FLAGS$NVCC_PREPEND_FLAGS$CPATH$CPLUS_INCLUDE_PATH$PTXAS_FLAGS" > "$last"\n',
        ),
    )
    assert {path.read_text() for path in done.objects} == {"kept\n"}
