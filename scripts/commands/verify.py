"""``verify``: prove wheels on this machine's GPU."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.base import console, layout
from scripts.base.errors import BuildError, NotVerified, UsageError
from scripts.commands import arguments
from scripts.source import upstream
from scripts.wheels.cluster import schedulers
from scripts.wheels.index import static_index
from scripts.wheels.proof import cpp_tests, origin, verify
from scripts.wheels.trust import companions, evidence

if TYPE_CHECKING:
    import argparse

    from scripts.source.matrix import Matrix


def add(commands: Any) -> None:
    """The sub-parser; it sets ``run``."""
    parser = arguments.sub_parser(
        commands,
        "verify",
        "The proof is written beside each wheel. Without a GPU it ends with 'not verified' (status 3; "
        "nox makes 1 of every failure).",
    )
    parser.add_argument(
        "wheels",
        metavar="WHEEL",
        type=Path,
        nargs="*",
        help="or the folder of an index, which is checked first and stays as it is (default: every wheel in "
        "dist/)",
    )
    parser.add_argument(
        "--pytest",
        metavar="ARGUMENT",
        action="append",
        default=[],
        help="pass an argument to pytest; no proof is kept then",
    )
    parser.add_argument(
        "--torch",
        metavar="VERSION",
        help="the torch to install beside each wheel; no proof is kept then (default: its target's)",
    )
    parser.add_argument(
        "--python",
        metavar="VERSION",
        help="the Python to install it for, such as 3.13; no proof is kept then (default: this one)",
    )
    _add_for_other_hosts(parser)
    parser.add_argument(
        "--attest",
        action="store_true",
        help="prove nothing: write the statement of the proof beside each wheel, which another host made",
    )
    arguments.add_sign(parser, "each proof")
    arguments.add_scheduler(parser, "prove each wheel on a GPU that fits,")
    arguments.add_upstream(parser, "the wheels of all")
    parser.set_defaults(run=_run, interrupted="interrupted; no proof was written.")


def _add_for_other_hosts(parser: argparse.ArgumentParser) -> None:
    """What is written here for a GPU host without a network."""
    parser.add_argument(
        "--write-upstream-tests",
        metavar="FILE",
        type=Path,
        help="write upstream's own tests there, for a GPU host without a network, and stop",
    )
    parser.add_argument(
        "--write-cpp-tests",
        metavar="FILE",
        type=Path,
        help="write the program that tests the C++ API of the wheel that is named, for such a host, and stop",
    )


def _run(options: argparse.Namespace) -> None:
    loaded = arguments.chosen(options)
    if options.write_upstream_tests is not None:
        _write_upstream_tests(loaded, options.write_upstream_tests)
        return
    if options.write_cpp_tests is not None:
        _write_cpp_tests(_wheels(options, loaded), options.write_cpp_tests)
        return
    _check_attested(options)
    of_indexes = _of_indexes(options)
    wheels = [*of_indexes, *_wheels(options, loaded)]
    beside = verify.Beside(options.torch, options.python)
    if options.scheduler:
        _on_workers(options, wheels)
        return
    waiting: BuildError | None = None
    for path in wheels:
        try:
            if options.attest:
                evidence.attest_proof(path, sign=options.sign)
                console.done(f"{companions.proof_statement(path)} written.")
                continue
            facts = verify.facts_of(path)
            built_from = origin.check_series(facts, layout.ROOT, layout.cache("sdist"))
            console.note(f"{path.name}: its series is that of {built_from.where}")
            suite = layout.ROOT / "tests" / facts.suite.folder
            how = replace(beside, keeps=path not in of_indexes)
            verify.verify(path, built_from.checkout, suite, layout.BUILD, options.pytest, how)
            if options.sign:
                evidence.attest_proof(path, sign=True)
        except BuildError as e:
            console.error(str(e))
            waiting = _worse(waiting, e)
    if waiting is not None:
        raise SystemExit(waiting.exit_code)


def _write_upstream_tests(loaded: Matrix, path: Path) -> None:
    if loaded.table.kind == "python":
        raise UsageError(f"{loaded.name}: the suite of its wheels runs none of upstream's own tests.")
    verify.write_upstream_tests(upstream.pinned(loaded.upstream, upstream.Source.AUTO), path)
    console.done(f"{path} written.")


def _write_cpp_tests(wheels: list[Path], path: Path) -> None:
    if len(wheels) != 1:
        raise UsageError(
            f"--write-cpp-tests is against one wheel; name one of {', '.join(map(str, wheels))}."
        )
    cpp_tests.write(wheels[0], verify.facts_of(wheels[0]).provenance.cuda, path)
    console.done(f"{path} written.")


def _check_attested(options: argparse.Namespace) -> None:
    """No statement can be made of a proof that is not kept."""
    without = [f"--{name}" for name in ("pytest", "torch", "python") if getattr(options, name)]
    if without and (options.sign or options.attest):
        raise UsageError(
            f"--sign and --attest are for proofs; with {' and '.join(without)} none is kept. Leave one out."
        )


def _of_indexes(options: argparse.Namespace) -> list[Path]:
    """The wheels of the indexes that were named, which are whole."""
    folders = [path for path in options.wheels if path.is_dir()]
    if folders and (options.sign or options.attest or options.scheduler):
        raise UsageError(
            f"{folders[0]} is an index, in which nothing is written: --sign, --attest and --scheduler are "
            "for the wheels that it was made of."
        )
    return [wheel.path for folder in folders for wheel in static_index.checked(folder)]


def _wheels(options: argparse.Namespace, loaded: Matrix) -> list[Path]:
    """The wheels that were named, or those in dist/; with ``--upstream``, of that one alone."""
    distribution = loaded.upstream.distribution if options.upstream else ""
    if not options.wheels:
        return verify.wheels_in(layout.DIST, distribution)
    named = [path for path in options.wheels if not path.is_dir()]
    for path in named:
        if distribution and not verify.is_of(path, distribution):
            raise UsageError(f"{path} is no wheel of {loaded.name}; leave out --upstream.")
    return named


def _worse(one: BuildError | None, other: BuildError) -> BuildError:
    """Of two errors the one to exit with: a failure outweighs a wheel that could not be proved."""
    if one is None or (isinstance(one, NotVerified) and not isinstance(other, NotVerified)):
        return other
    return one


def _on_workers(options: argparse.Namespace, wheels: list[Path]) -> None:
    """Prove the wheels on the workers of a scheduler."""
    if options.pytest:
        raise UsageError("--pytest chooses cases on this machine; leave out --scheduler.")
    if options.torch or options.python:
        raise UsageError("--torch and --python are for this machine; leave out --scheduler.")
    with schedulers.connected(options.scheduler) as client:
        from scripts.wheels.cluster import proving  # noqa: PLC0415 - imports Dask

        failed = proving.prove_on(client, wheels)
    if failed:
        raise SystemExit(functools.reduce(_worse, failed.values()).exit_code)
