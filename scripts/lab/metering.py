"""Compile files one after the other on several sides, and take the CPU seconds of each.

What was metered is kept.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ninja import ninja_syntax

from scripts.base import console
from scripts.base.errors import CompileError
from scripts.base.process import last_lines, quoted, run
from scripts.lab import metered
from scripts.wheels.compiling import flags, kernels, ninja

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True)
class Compile:
    """One file to compile on one side."""

    side: str  # ours, without-bias (ours too) or upstream
    file: str  # its name, without the suffix
    command: str  # for sh
    target: Path
    seconds: float  # expected


def commands_of(
    plan: kernels.Plan, file: Path, targets: Sequence[Path], settings: Mapping[str, str] | None = None
) -> list[str]:
    """How a ninja file makes each of its targets, with environment variables of its own."""
    ask: list[str | Path] = [plan.toolchain.ninja, "-C", file.parent, "-f", file.name, "-t", "commands"]
    told = [
        run([*ask, target], error=CompileError, what=f"{file} does not make {target}").splitlines()
        for target in targets
    ]
    exported = "".join(f"export {name}={quoted([value])} && " for name, value in (settings or {}).items())
    return [f"cd {quoted([file.parent])} && {exported}{commands[-1]}" for commands in told]


def compiles_of(plan: kernels.Plan, side: str, units: Sequence[kernels.Unit]) -> list[Compile]:
    """Our own compiles, as a build has them."""
    file = plan.build / "ninja" / f"{side}.ninja"
    ninja.write_ninja(file, [(plan, units)])
    commands = commands_of(plan, file, [unit.target for unit in units])
    return [
        Compile(side, Path(u.source).stem, command, u.target, u.seconds)
        for u, command in zip(units, commands, strict=True)
    ]


def side_by_side(sides: Sequence[Sequence[Compile]]) -> list[Compile]:
    """Each file on all sides before the next, beginning with another side each time."""
    return [
        compiles[(i + shift) % len(compiles)]
        for i, compiles in enumerate(zip(*sides, strict=True))
        for shift in range(len(compiles))
    ]


def _record(folder: Path, compile_: Compile) -> Path:
    """Where its figures are.

    The folder and the command name all that they depend on: so do the places of our objects.
    """
    return (
        folder
        / "metered"
        / f"{compile_.side}-{compile_.file}-{hashlib.sha256(compile_.command.encode()).hexdigest()[:16]}.json"
    )


def meter(plan: kernels.Plan, compiles: Sequence[Compile], jobs: int, folder: Path) -> None:
    """Compile, in this order, the files that have not been metered on all sides yet, with a bar.

    Raises:
        CompileError: with the end of the failed compiler's output, and where the whole log is.
        KeyboardInterrupt: after the compilers were stopped; what was metered stays for the next run.
    """
    lacking = {
        compile_.file
        for compile_ in compiles
        if not (_record(folder, compile_).exists() and compile_.target.exists())
    }
    left = [compile_ for compile_ in compiles if compile_.file in lacking]
    if not left:
        return
    file, log = folder / "ninja" / "metered.ninja", folder / "logs" / "metered.log"
    for path in (file, log, _record(folder, left[0])):
        path.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", encoding="utf-8") as text:
        writer = ninja_syntax.Writer(cast("Any", text), width=10**6)  # annotated as str, used as a file
        writer.rule("meter", command="$metered", description="$name")
        for compile_ in left:  # ninja starts what is ready in the order of the file
            compile_.target.parent.mkdir(parents=True, exist_ok=True)
            record = _record(folder, compile_)
            record.unlink(missing_ok=True)
            words: list[str | Path] = [sys.executable, metered.__file__, record, "sh", "-c", compile_.command]
            name = f"{compile_.file}, {compile_.side}"
            writer.build(
                [str(record)], "meter", variables={"metered": quoted(words).replace("$", "$$"), "name": name}
            )
    settings = {**flags.environment(), "NINJA_STATUS": "[%f/%t] "}
    command = [str(plan.toolchain.ninja), "-C", str(file.parent), "-f", file.name, f"-j{jobs}"]
    started, said, done = time.monotonic(), "", 0.0
    expected = {f"{compile_.file}, {compile_.side}": compile_.seconds for compile_ in left}
    total = sum(expected.values())
    with (
        console.progress("compiling on both sides", len(compiles), len(compiles) - len(left)) as advance,
        ninja.running_ninja(command, settings, log) as process,
        log.open("a", encoding="utf-8") as record_file,
    ):
        for line in process.stdout or ():
            record_file.write(line)
            said = (said + line)[-4000:]
            if (counted := re.match(r"\[\d+/\d+\] (.+)$", line)) and counted[1] in expected:
                done += expected[counted[1]]
                advance(counted[1], (time.monotonic() - started) / done * (total - done))
        status = process.wait()
    if status != 0:
        raise CompileError(f"a compile failed:\n{last_lines(said)}\nThe full log is {log}.")


def metered_seconds(folder: Path, compiles: Sequence[Compile]) -> dict[str, float]:
    """CPU seconds of each file."""
    return {
        compile_.file: float(json.loads(_record(folder, compile_).read_text(encoding="utf-8"))["cpu_seconds"])
        for compile_ in compiles
    }
