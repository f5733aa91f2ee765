"""``compare -- --wheels``: say in which kernels and Python files two wheels differ."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.table import Table

from scripts.base import console
from scripts.base.errors import BuildError, ToolchainError, UsageError
from scripts.lab import compare
from scripts.wheels.trust import contents

if TYPE_CHECKING:
    import argparse

    from scripts.lab.wheel_kernels import Compared, Files, Kernel, Pair

_OF_PATCHES = ("patch", "through", "kernels", "arch", "jobs")  # options that --wheels does not go with


def run(options: argparse.Namespace) -> None:
    """Compare the two wheels; status 1 where they differ in more than was left out."""
    if given := [name for name in _OF_PATCHES if getattr(options, name) is not None]:
        raise UsageError(f"--{given[0]} is for patches: --wheels compares what the wheels hold.")
    try:
        from scripts.lab import wheel_kernels  # noqa: PLC0415 - of the dependency group "comparing"
    except ImportError as e:
        raise ToolchainError(
            f"{e.name} is not installed: run this through nox, or pip install --group comparing."
        ) from e
    old, new = (contents.read(path) for path in options.wheels)
    held = [wheel_kernels.pieces(wheel) for wheel in (old, new)]
    with console.steps("reading", sum(map(len, held))) as count:
        before, after = (
            wheel_kernels.kernels(wheel, own, count) for wheel, own in zip((old, new), held, strict=True)
        )
    left_out = wheel_kernels.LeftOut(options.ignore_names, options.ignore_offsets)
    console.step(f"{len(before)} kernels beside {len(after)}")
    found = wheel_kernels.compare(before, after, left_out)
    files = wheel_kernels.files(old, new)
    if options.json:
        console.result(
            {"wheels": [str(path) for path in options.wheels], "differs": found.differs or files.differs}
            | {"kernels": _kernels_json(found), "files": asdict(files)}
        )
    _show_wheels(found, files)
    if found.differs or files.differs:
        raise BuildError(f"{new.path} differs from {old.path}: {_counted(found, files)}.")
    console.done(
        f"No kernel and no file differs{' but as was asked' if found.moved or found.renamed else ''}."
    )


def _kernels_json(found: Compared) -> dict[str, Any]:
    pairs = {"renamed": found.renamed, "moved": found.moved, "changed": found.changed}
    return {
        "same": len(found.same),
        **{
            kind: [_pair_json(pair, figures=kind == "changed") for pair in all_]
            for kind, all_ in pairs.items()
        },
        "gone": [_named_json(kernel) for kernel in found.gone],
        "new": [_named_json(kernel) for kernel in found.new],
    }


def _named_json(kernel: Kernel) -> dict[str, Any]:
    return {
        "architecture": kernel.architecture,
        "name": kernel.name,
        "spelled": compare.spell(kernel.name),
    }


def _pair_json(pair: Pair, *, figures: bool) -> dict[str, Any]:
    told = _named_json(pair.old)
    if pair.new.name != pair.old.name:
        told["new_name"] = pair.new.name
    if figures:
        told |= {"before": pair.old.code.figures(), "after": pair.new.code.figures()}
    return told


def _counted(found: Compared, files: Files) -> str:
    counts = {
        "kernels have other code": len(found.changed),
        "kernels are in the old wheel alone": len(found.gone),
        "kernels are in the new one alone": len(found.new),
        "files differ": len(files.changed) + len(files.gone) + len(files.new),
    }
    return ", ".join(f"{count} {what}" for what, count in counts.items() if count)


def _show_wheels(found: Compared, files: Files) -> None:
    for pair in found.changed:
        _note(pair.old, f"other code: {pair.old.code} → {pair.new.code}")
    for kernel in found.gone:
        _note(kernel, "in the old wheel alone")
    for kernel in found.new:
        _note(kernel, "in the new wheel alone")
    for what, names in (("differs", files.changed), ("is gone", files.gone), ("is new", files.new)):
        for name in names:
            console.note(f"{name} {what}")
    table = Table("GPU", "same", "other name", "other offsets", "other code", "gone", "new")
    kinds = (found.same, found.renamed, found.moved, found.changed)
    for architecture in sorted({k.architecture for k in _every(found)}, key=int):
        counts = [sum(pair.old.architecture == architecture for pair in pairs) for pairs in kinds]
        counts += [sum(k.architecture == architecture for k in alone) for alone in (found.gone, found.new)]
        table.add_row(f"sm_{architecture}", *map(str, counts))
    console.out.print(table)


def _every(found: Compared) -> list[Kernel]:
    pairs = (*found.same, *found.renamed, *found.moved, *found.changed)
    return [*(pair.old for pair in pairs), *found.gone, *found.new]


def _note(kernel: Kernel, what: str) -> None:
    console.note(f"sm_{kernel.architecture} {compare.spell(kernel.name)}: {what}")
