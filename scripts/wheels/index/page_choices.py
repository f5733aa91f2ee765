"""What the index's page offers: a GPU, a CUDA, a torch and a package; and the lines that install a wheel."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import quote

from packaging.version import Version

from scripts.base.errors import WheelError
from scripts.source.gpus import GPUS, Gpu, serving
from scripts.source.matrix_tables import PYTHONS
from scripts.wheels.index.installers import FILES, SIMPLE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from scripts.wheels.index.wheel_entries import Entry

PLACE = "INDEX_URL/"  # for the index's address, where nobody told it; the page's script puts its own there
ANY = "any"  # where neither the matrix nor a wheel names a CUDA or a torch
# A wheel of Python alone names no GPU. Where the mode runs, and where kernels of upstream's do.
_HAS_MODE, _COMPILES = ("9.0",), {"flash-attn-4": ("9.0", "10.0", "10.3", "12.0")}
NO_MODE = "With the deterministic mode on, calls on this GPU are a NotImplementedError."


@dataclass(frozen=True)
class Lines:
    """What a person types."""

    pip: str
    uv: str
    uv_variants: str = ""  # with uv's preview of wheel variants


@dataclass(frozen=True)
class Offer:
    """The answer to one choice: lines, and the wheels that they install."""

    lines: Lines
    files: tuple[str, ...]
    note: str = ""


@dataclass(frozen=True)
class Choices:
    """What can be picked."""

    gpus: tuple[Gpu, ...]
    cudas: tuple[str, ...]  # major versions, newest first
    torches: tuple[str, ...]  # such as 2.11, newest first
    packages: tuple[str, ...]


def gpus_of(entry: Entry) -> tuple[Gpu, ...]:
    """The GPUs that a wheel serves."""
    if entry.wheel.facts.architectures:
        return serving(entry.wheel.facts.architectures)
    known = _COMPILES.get(entry.wheel.name)
    if known is None:
        raise WheelError(
            f"{entry.file}: nothing says which GPUs it serves; write them into _COMPILES of "
            "scripts/wheels/index/page_choices.py."
        )
    return tuple(gpu for gpu in GPUS if gpu.capability in known)


def choices(entries: Iterable[Entry], torch_cuda: Mapping[str, str]) -> Choices:
    """Every GPU and every torch that the matrix knows, whether a wheel serves it or not."""
    wheels = [entry.wheel for entry in entries]
    releases = {*torch_cuda, *(wheel.facts.torch for wheel in wheels if wheel.facts.torch)}
    majors = {cuda.partition(".")[0] for cuda in torch_cuda.values()}
    majors |= {wheel.facts.cuda_major for wheel in wheels if wheel.facts.cuda}
    return Choices(
        GPUS,
        tuple(sorted(majors, key=int, reverse=True)) or (ANY,),
        tuple(dict.fromkeys(map(_minor, sorted(releases, key=Version, reverse=True)))) or (ANY,),
        tuple(dict.fromkeys(wheel.name for wheel in wheels)),
    )


def _minor(release: str) -> str:
    return ".".join(release.split(".")[:2])


def fits(entry: Entry, gpu: Gpu, cuda: str, releases: Iterable[str]) -> bool:
    """Whether a wheel serves a GPU, a CUDA of this major version, and one of these releases of torch."""
    wheel = entry.wheel
    return (
        entry.yanked is None
        and gpu in gpus_of(entry)
        and wheel.facts.cuda_major in ("", cuda)
        and any(release == ANY or wheel.torch.contains(release, prereleases=True) for release in releases)
    )


def offers(entries: tuple[Entry, ...], gpu: Gpu, cuda: str, releases: list[str], url: str) -> list[Offer]:
    """The offers of one distribution for a choice: of its newest version that fits, most kernels first."""
    fitting = [entry for entry in entries if fits(entry, gpu, cuda, releases)]
    newest = [entry for entry in fitting if entry.wheel.version == fitting[0].wheel.version]
    found: dict[Lines, list[Entry]] = {}
    for entry in sorted(newest, key=lambda e: -len(e.wheel.facts.kernel_set)):
        found.setdefault(lines(entry, entries, cuda, url), []).append(entry)
    note = NO_MODE if newest and _lacks_mode(newest[0], gpu) else ""
    return [Offer(told, tuple(entry.file for entry in group), note) for told, group in found.items()]


def _lacks_mode(entry: Entry, gpu: Gpu) -> bool:
    return entry.wheel.name in _COMPILES and gpu.capability not in _HAS_MODE


def lines(entry: Entry, entries: tuple[Entry, ...], cuda: str, url: str) -> Lines:
    """What installs a wheel and nothing else: its exact version, or its address where that is not enough.

    The version's label is of no other index, so no other package can take its place; --only-binary keeps
    an installer from building anything in its place.
    """
    wheel = entry.wheel
    extra = f"[cu{cuda}]" if f"cu{cuda}" in wheel.extras else ""
    base = url or PLACE
    simple, only = f"{base}{SIMPLE}/", f"--only-binary {wheel.name}"
    exact = shlex.quote(f"{wheel.name}{extra}=={wheel.version}")
    variants = f"uv pip install --preview-features wheel-variants {only} --index {simple} {exact}"
    told = variants if entry.variant else ""
    if _is_alone(entry, entries):
        return Lines(
            f"pip install {only} --extra-index-url {simple} {exact}",
            f"uv pip install {only} --index {simple} {exact}",
            told,
        )
    place = shlex.quote(f"{wheel.name}{extra} @ {base}{FILES}/{quote(entry.file)}#sha256={wheel.sha256}")
    return Lines(f"pip install {place}", f"uv pip install {place}", told)


def _is_alone(entry: Entry, entries: tuple[Entry, ...]) -> bool:
    """Whether no other wheel of its version installs on the same Python: then its version names it."""
    return not any(
        other is not entry
        and other.yanked is None
        and other.wheel.version == entry.wheel.version
        and _interpreters(other) & _interpreters(entry)
        for other in entries
    )


def _interpreters(entry: Entry) -> set[str]:
    """The Pythons of its tags; all, for one that serves each."""
    named = {tag.interpreter for tag in entry.wheel.tags}
    return {f"cp{python.replace('.', '')}" for python in PYTHONS} if "py3" in named else named
