"""``inspect``: what a wheel is made of, with every hash checked; or build it again."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from scripts.base import console, layout
from scripts.base.errors import BuildError, ToolchainError, UsageError
from scripts.commands import arguments
from scripts.series import clone
from scripts.source import matrix
from scripts.wheels.building import rebuild
from scripts.wheels.building.build import BuildOptions
from scripts.wheels.index import static_index
from scripts.wheels.proof import verify
from scripts.wheels.trust import binaries, evidence

if TYPE_CHECKING:
    import argparse

    from scripts.lab.machine_code import Family
    from scripts.wheels.trust.contents import Contents
    from scripts.wheels.trust.evidence import Trusted


_FEW = 5  # names in a row


@dataclass(frozen=True)
class Inspected:
    """What is told of one wheel."""

    trusted: Trusted
    code: dict[str, list[Family]]  # by extension
    libraries: dict[str, tuple[str, ...]]  # that each asks the loader for


def add(commands: Any) -> None:
    """The sub-parser; it sets ``run``."""
    parser = arguments.sub_parser(
        commands,
        "inspect",
        "It reads the wheel, and the proof, statements and signatures beside it; or an index. A changed "
        "byte in any of them is an error that names the file. docs/trust.md says what each shows.",
    )
    parser.add_argument(
        "wheels",
        metavar="WHEEL",
        type=Path,
        nargs="*",
        help="or the folder of an index (default: every wheel in dist/)",
    )
    parser.add_argument(
        "--rebuild",
        action="store_true",
        help="build it again, from nothing, from what it says of itself, and compare byte for byte",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON document on stdout; what is read by people goes to stderr",
    )
    arguments.add_sign(parser, "how each was built, and of its proof, where that is not signed yet,")
    arguments.add_jobs(parser)
    arguments.add_source(parser)
    parser.set_defaults(run=_inspect, interrupted="interrupted; the wheel is as it was.")


def _inspect(options: argparse.Namespace) -> None:
    told, failed = [], None
    if options.rebuild and not options.wheels:
        raise UsageError("--rebuild: name the wheel to build again.")
    wheels = options.wheels or verify.wheels_in(layout.DIST)
    for path in wheels:
        try:
            if path.is_dir():
                told.append(_checked_index(path))
                continue
            trusted = evidence.check(path)
            if options.sign and evidence.sign_missing(trusted):
                trusted = evidence.check(path)
            found = _inspected(trusted)
            _show(found)
            if options.rebuild:
                rebuild.rebuild(found.trusted.wheel, BuildOptions(options.source, options.jobs))
            told.append(_document(found))
        except BuildError as e:
            if len(wheels) == 1:
                raise
            console.error(str(e))
            told.append({"wheel": str(path), "error": str(e), "exit_code": e.exit_code})
            failed = failed or e
    if options.json:
        console.result({"format": 1, "wheels": told})
    if failed is not None:
        raise SystemExit(failed.exit_code)


def _checked_index(folder: Path) -> dict[str, Any]:
    """Check an index: each wheel with what lies beside it, and every page by making it again."""
    wheels = static_index.checked(folder)
    console.done(f"{folder}: {len(wheels)} wheels and all that is said of them are whole, byte for byte")
    return {"index": str(folder), "wheels": {wheel.path.name: wheel.sha256 for wheel in wheels}}


def _inspected(trusted: Trusted) -> Inspected:
    extensions = trusted.wheel.extensions
    try:
        from scripts.lab import machine_code  # noqa: PLC0415 - of the dependency group "inspecting"
    except ImportError as e:
        raise ToolchainError(
            f"{e.name} is not installed: run this through nox, or pip install --group inspecting."
        ) from e
    return Inspected(
        trusted,
        {name: machine_code.families(content) for name, content in extensions.items()},
        {name: binaries.needed_by(content) for name, content in extensions.items()},
    )


def _document(found: Inspected) -> dict[str, Any]:
    """All of it, for programs."""
    wheel, proof = found.trusted.wheel, found.trusted.proof
    return {
        "wheel": str(wheel.path),
        "sha256": wheel.sha256,
        "distribution": wheel.distribution,
        "version": wheel.version,
        "tags": list(wheel.tags),
        "files": len(wheel.files),
        "provenance": wheel.facts,
        "extensions": {
            name: {"libraries": found.libraries[name], "code": [asdict(family) for family in code]}
            for name, code in found.code.items()
        },
        "sboms": {name: json.loads(content) for name, content in wheel.sboms.items()},
        "proof": proof and proof.model_dump(mode="json", exclude={"cases", "controls"}),
        "statements": [path.name for path in found.trusted.statements],
        "signed_by": found.trusted.signers,
    }


def _show(found: Inspected) -> None:
    """All of it, for people."""
    wheel = found.trusted.wheel
    console.step(f"{wheel.path}  {wheel.path.stat().st_size / 1e6:.1f} MB")
    console.note(f"sha256 {wheel.sha256}")
    facts, pin = wheel.facts, wheel.facts["upstream"]
    about = Table("what", "as the wheel says", show_header=False, box=None)
    about.add_row("distribution", f"{wheel.distribution} {wheel.version}, for {', '.join(wheel.tags)}")
    about.add_row("upstream", f"{pin['version']}, commit {pin['commit']}")
    about.add_row("sdist", f"sha256 {pin['sdist_sha256']}")
    series = facts["series"]
    about.add_row("series", f"{len(series['patches'])} patches, digest {series['digest']}")
    rows = {
        "own files": _own_files(wheel),
        "cutlass": pin.get("cutlass"),
        "target": facts.get("target"),
        "GPUs": ", ".join(f"sm_{a}" for a in facts.get("architectures", [])),
        "nvcc": _flags(facts.get("nvcc")),
        "C++": _flags(facts.get("cxx")),
        "static libraries": ", ".join(facts.get("static_libraries", [])),
    }
    for what, said in rows.items():
        if said:
            about.add_row(what, said)
    for name, libraries in found.libraries.items():
        label = "needs" if len(found.libraries) == 1 else f"{name} needs"
        about.add_row(label, ", ".join(libraries))
    console.out.print(about)
    _show_patches(wheel)
    _show_code(found)
    _show_trust(found.trusted)


def _own_files(wheel: Contents) -> str:
    """How many of our own files it has, and which of them this checkout has otherwise."""
    told = wheel.provenance.series.own_files
    loaded = matrix.load(layout.MATRIX).making(wheel.distribution)
    if loaded is None:
        return str(len(told))
    here = clone.series(loaded).own.digests
    other = sorted(name for name in {*told, *here} if told.get(name) != here.get(name))
    if not other:
        return f"{len(told)}, as in this checkout"
    rest = f" and {len(other) - _FEW} more" if len(other) > _FEW else ""
    return f"{len(told)}; otherwise in this checkout: {', '.join(other[:_FEW])}{rest}"


def _flags(compiler: dict[str, Any] | None) -> str:
    return f"{compiler['version']}: {' '.join(compiler['flags'])}" if compiler else ""


def _show_patches(wheel: Contents) -> None:
    table = Table("", "patch", "Upstream-Status", "sha256")
    for place, patch in enumerate(wheel.facts["series"]["patches"], 1):
        status = patch.get("upstream_status", "").replace("[", r"\[")
        table.add_row(str(place), patch["subject"], status, patch["sha256"][:16] + "…")
    console.out.print(table)


def _show_code(found: Inspected) -> None:
    """Machine code by GPU and family; sizes as they lie in the extension, and unpacked."""
    for name, families in found.code.items():
        table = Table(
            "GPU", "kernel family", "files", "kernels", "kB packed", "kB of instructions", title=name
        )
        for family in families:
            sizes = (f"{family.packed / 1e3:.0f}", f"{family.code / 1e3:.0f}")
            counts = (str(family.modules), str(family.kernels))
            table.add_row(family.architecture, family.name, *counts, *sizes)
        console.out.print(table)


def _show_trust(trusted: Trusted) -> None:
    """What was checked, and what there is nothing to check of."""
    wheel, proof = trusted.wheel, trusted.proof
    console.done(f"{len(wheel.files)} files agree with RECORD; _fork.json and the SBOM with their digests")
    if proof is None:
        console.warn(f"no proof lies beside {wheel.path.name}; nox -s verify makes one.")
    else:
        gpu = proof.gpu
        where = f"on {gpu.name} ({gpu.compute_capability}), driver {gpu.driver}" if gpu else "without a GPU"
        counts = ", ".join(f"{count} {outcome}" for outcome, count in proof.counts.items())
        tell = console.done if proof.verified else console.warn
        tell(
            f"{'proved' if proof.verified else 'NOT proved'} {where}, torch {proof.torch}, "
            f"Python {proof.python}: {counts}"
        )
    for path in trusted.statements:
        console.done(f"{path.name} is what this wheel gives")
    if not trusted.statements:
        console.warn(
            "no statement lies beside it: what is in the wheel agrees, and nothing outside vouches for it."
        )
    for name, signer in trusted.signers.items():
        console.done(f"{name}: signed by {signer}")
