"""``release``: do what comes before a tag, in order, and go on where it stopped."""

from __future__ import annotations

import fnmatch
import shutil
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.utils import parse_wheel_filename

from scripts.base import console, files, layout
from scripts.base.errors import NotVerified, UsageError
from scripts.base.git import Repository
from scripts.commands import arguments, parser
from scripts.source import matrix
from scripts.wheels.index import yanked_list
from scripts.wheels.packing import cpp_archive
from scripts.wheels.proof import machine_gpus
from scripts.wheels.releasing import release_notes, release_steps
from scripts.wheels.releasing.release_steps import ReleaseError, Step
from scripts.wheels.trust import companions, evidence, sbom

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable

FOLDER = layout.BUILD / "release"


def add(commands: Any) -> None:
    """The sub-parser; it sets ``run``."""
    own = arguments.sub_parser(
        commands,
        "release",
        "The steps of docs/releasing.md, each once for a commit. It tags, pushes and uploads nothing, and "
        "ends with the commands that do.",
    )
    own.add_argument(
        "--dry-run",
        action="store_true",
        help="a rehearsal: go on where a wheel has no proof, and end with status 3 then",
    )
    own.add_argument("--list", action="store_true", help="list the steps and stop")
    own.add_argument(
        "--write-notes", metavar="FILE", type=Path, help="write this commit's release notes there and stop"
    )
    own.add_argument(
        "--wheels",
        metavar="FOLDER",
        type=arguments.folder,
        default=layout.DIST,
        help="where wheels and proofs lie (default: dist)",
    )
    own.add_argument(
        "--target",
        action=arguments.Once,
        metavar="NAME",
        help="the compiled wheels of this target alone, or of a glob (default: every target)",
    )
    own.add_argument("--url", action=arguments.Once, help="where the index will be served")
    own.set_defaults(
        run=_run, interrupted="interrupted. What is done is kept: the same command goes on from there."
    )


@dataclass(frozen=True)
class _Release:
    """What is released, and from where."""

    loaded: matrix.Matrix
    wheels: Path
    target: str | None
    url: str | None

    @property
    def python_upstreams(self) -> list[str]:
        return [one.name for one in self.loaded.each() if one.table.kind == "python"]

    def files(self) -> list[Path]:
        """The wheels.

        Raises:
            UsageError: there is one of another release, or none.
        """
        every = [self.loaded.version(target) for target in self.loaded.all_targets]
        versions = {*every, *(self.loaded.of(name).version() for name in self.python_upstreams)}
        found = sorted(self.wheels.glob("*.whl"))
        others = [path.name for path in found if str(parse_wheel_filename(path.name)[1]) not in versions]
        if others or not found:
            flaw = f"{others[0]} is of another release" if others else "there is no wheel"
            raise UsageError(f"{self.wheels}: {flaw}. Name another folder with --wheels.")
        return found

    def beside(self) -> list[Path]:
        """The wheels and all that lies beside them."""
        every = [path for wheel in self.files() for path in (wheel, *companions.of_bytes(wheel))]
        return [path for path in every if path.is_file()]


def _run(options: argparse.Namespace) -> None:
    loaded = matrix.load(layout.MATRIX)
    repository = Repository(layout.ROOT, UsageError)
    if options.write_notes is not None:
        files.write(options.write_notes, release_notes.notes(repository, loaded))
        console.done(f"{options.write_notes} written.")
        return
    steps = _steps(_Release(loaded, options.wheels, options.target, options.url), repository)
    if options.list:
        for place, step in enumerate(steps, 1):
            console.note(f"{place} {step.name}: {step.line}")
        return
    tag = release_notes.tag_of(loaded)
    commit = release_steps.commit_of(layout.ROOT)
    waiting = release_steps.run(steps, commit, FOLDER, rehearsal=options.dry_run)
    if waiting:
        raise NotVerified(f"{tag} cannot be released yet: {waiting[0]}")
    console.done(f"{tag} can be released from commit {commit[:12]}. A person does the rest:")
    first = loaded.of(None)
    said = f"FlashAttention {first.upstream.version}, series release {first.table.revision}"
    console.note(f"git tag -a '{tag}' -m '{said}' {commit[:12]}")
    console.note(f"git push origin '{tag}'")


def _steps(asked: _Release, repository: Repository) -> list[Step]:
    """The steps, in order."""
    yanked, notes = layout.ROOT / yanked_list.FILE, FOLDER / "notes.md"
    listed = (yanked,) if yanked.is_file() else ()

    def write_notes() -> Iterable[Path]:
        files.write(notes, release_notes.notes(repository, asked.loaded))
        return (notes,)

    before = (release_notes.previous(repository, release_notes.tag_of(asked.loaded)) or "",)
    today = (datetime.now(timezone.utc).date().isoformat(),)
    which = (asked.target or "", str(asked.wheels))
    return [
        Step(
            "revision",
            "det.N is new where the series is",
            lambda: _revision(repository, asked.loaded),
            options=before,
        ),
        Step(
            "forecast",
            "what becomes of the series on upstream's newest release",
            lambda: _forecast(asked),
            options=today,
        ),
        Step(
            "gates", ".ci/run: style, guards, rendered files, tests", lambda: release_steps.gates(layout.ROOT)
        ),
        Step("matrix", "build the wheel of every target", lambda: _build(asked), options=which),
        Step("archives", "the C++ API's archive of each", lambda: _archives(asked), asked.files, which),
        Step(
            "reproducibility",
            "build again from nothing, and compare byte for byte",
            lambda: _reproduce(asked),
            takes=asked.files,
            options=which,
        ),
        Step("proofs", "a proof of each wheel, from a GPU", lambda: _prove(asked), takes=asked.files),
        Step(
            "sboms", "check every hash, and take the SBOMs out", lambda: _inspect(asked), takes=asked.beside
        ),
        Step(
            "index",
            "write the index, and compare it",
            lambda: _index(asked),
            takes=lambda: (*asked.beside(), *listed),
            options=(asked.url or "",),
        ),
        Step("notes", "what is new since the tag before, from CHANGES.md", write_notes, options=before),
    ]


def _call(*words: str) -> None:
    """Run another command in this process.

    Raises:
        ReleaseError: it failed; it has said why.
    """
    options = parser.parse(words)
    try:
        options.run(options)
    except SystemExit as e:
        if e.code == NotVerified.exit_code:
            raise NotVerified("a wheel has no proof; why is told above.") from None
        raise ReleaseError(f"nox -s {words[0]} failed with status {e.code}; why is told above.") from None


def _revision(repository: Repository, loaded: matrix.Matrix) -> Iterable[Path]:
    release_notes.check_revision(repository, loaded)
    return ()


def _forecast(asked: _Release) -> Iterable[Path]:
    for name in asked.loaded.upstreams:
        _call("forecast", "--upstream", name, "latest")
    return ()


def _build(asked: _Release) -> Iterable[Path]:
    chosen = ["--target", asked.target] if asked.target else ["--all"]
    _call("build", *chosen, "--out", str(asked.wheels))
    for name in asked.python_upstreams:
        _call("build", "--upstream", name, "--out", str(asked.wheels))
    made = [path for wheel in asked.files() for path in (wheel, companions.provenance(wheel))]
    return [path for path in made if path.is_file()]


def _archives(asked: _Release) -> Iterable[Path]:
    """From the objects of the wheels. The put-together toolkits of CUDA 12 have no static runtime for it."""
    for target in asked.loaded.all_targets:
        if fnmatch.fnmatch(target.name, asked.target or "*") and not target.cuda.startswith("12."):
            _call("build", "--cpp", "--target", target.name, "--out", str(asked.wheels))
    return sorted(asked.wheels.glob(f"{cpp_archive.NAME}-*.tar.gz"))


def _reproduce(asked: _Release) -> Iterable[Path]:
    """One compiled wheel stands for all: each takes as long as a build without a cache."""
    target = asked.target or asked.loaded.default().name
    _call("build", "--target", target, "--check-reproducible", "--out", str(asked.wheels))
    for name in asked.python_upstreams:
        _call("build", "--upstream", name, "--check-reproducible", "--out", str(asked.wheels))
    return asked.files()


def _prove(asked: _Release) -> Iterable[Path]:
    """Take the proofs that lie beside the wheels; prove the others where there is a GPU."""
    missing = [wheel for wheel in asked.files() if not _is_proved(wheel)]
    if missing and not machine_gpus.found():
        names = ", ".join(wheel.name for wheel in missing)
        raise NotVerified(
            f"without a proof: {names}. Prove them on a GPU (docs/proving.md), put the proofs beside them in "
            f"{asked.wheels}, and run this again."
        )
    if missing:
        _call("verify", *map(str, missing))
    return [companions.proof(wheel) for wheel in asked.files()]


def _is_proved(wheel: Path) -> bool:
    trusted = evidence.check(wheel)
    if trusted.proof is None or not trusted.proof.verified:
        return False
    named = trusted.wheel.provenance.architectures
    gpu = trusted.proof.gpu
    if gpu and len(named) > 1:
        console.warn(
            f"{wheel.name} is for {', '.join(named)}, and was proved on {gpu.compute_capability} alone"
        )
    return True


def _inspect(asked: _Release) -> Iterable[Path]:
    wheels = asked.files()
    _call("inspect", *map(str, wheels))
    folder = FOLDER / "sboms"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for wheel in wheels:
        whole = evidence.whole(wheel)
        (folder / f"{wheel.stem}.cdx.json").write_bytes(whole.sboms[sbom.name_in(whole)])
    return sorted(folder.iterdir())


def _index(asked: _Release) -> Iterable[Path]:
    out = FOLDER / "index"
    words = [
        "index",
        "--wheels",
        str(asked.wheels),
        "--out",
        str(out),
        *(["--url", asked.url] if asked.url else []),
    ]
    _call(*words)
    _call(*words, "--check")
    return [path for path in sorted(out.rglob("*")) if path.is_file()]
