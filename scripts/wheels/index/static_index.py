"""Write a static index of wheels: what installers read, what people read, and the files.

It is written aside and then swapped, so that whoever reads it sees the old one or the new one whole. No
source distribution is ever in it: what fits no wheel fails, and is not built.
"""

from __future__ import annotations

import filecmp
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tomlkit
from pydantic import Field

from scripts.base import documents, files
from scripts.base.documents import Document
from scripts.base.errors import UsageError, WheelError
from scripts.wheels.index import installers, page, wheel_entries, wheel_variants
from scripts.wheels.index.installers import FILES, SIMPLE, VARIANTS
from scripts.wheels.trust import evidence

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from scripts.wheels.index.wheel_entries import Entry
    from scripts.wheels.trust.contents import Contents

MARKER = "about.json"


class About(Document):
    """What an index says of itself: ``about.json``. A folder with it may be replaced."""

    format: Literal[1]
    url: str
    variants: bool
    wheels: dict[str, str]  # sha256 by file name
    yanked: dict[str, str] = Field(default_factory=dict)  # why, by file name
    torch_cuda: dict[str, str] = Field(default_factory=dict)  # the CUDA of each torch, when it was written


@dataclass(frozen=True)
class Request:
    """What to make an index of."""

    wheels: Path  # the folder
    url: str = ""  # where it will be served, with a slash at its end; empty: unknown
    yanked: Path | None = None  # the list
    variants: bool = False
    torch_cuda: Mapping[str, str] | None = None  # the CUDA of each torch on the package index


def write(request: Request, out: Path) -> tuple[Entry, ...]:
    """Write the index in the place of the one that was there; its entries."""
    _refuse_others(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as folder:
        new = Path(folder) / "index"
        entries = make(request, new)
        if out.exists():
            files.exchange(new, out)
        else:
            new.rename(out)
    return entries


def check(request: Request, out: Path) -> tuple[Entry, ...]:
    """Make the index again, and compare.

    Raises:
        WheelError: files are changed, missing or too many; they are named.
    """
    told = documents.read(About, out / MARKER, error=WheelError, remedy="write the index again")
    if (told.url, told.variants) != (request.url, request.variants):
        raise UsageError(
            f"{out} was written with --url {told.url or '(none)'} and "
            f"{'' if told.variants else 'no '}--variants; give the same options to --check."
        )
    return _compare(request, out)


def check_itself(out: Path) -> tuple[Entry, ...]:
    """Make an index again of the wheels in it, by what it says of itself, and compare.

    Raises:
        WheelError: files are changed, missing or too many; they are named.
    """
    told = documents.read(About, out / MARKER, error=WheelError, remedy="fetch or write the index again")
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder) / "yanked.toml"
        files.write(listed, tomlkit.dumps({"format": 1, "wheels": told.yanked}))
        return _compare(Request(out / FILES, told.url, listed, told.variants, told.torch_cuda), out)


def checked(out: Path) -> list[Contents]:
    """The wheels of an index, once each is whole with what lies beside it, and every page is right.

    Raises:
        WheelError: a file was changed, is missing or too many; it is named.
    """
    wheels = [evidence.check(path).wheel for path in sorted((out / FILES).glob("*.whl"))]
    check_itself(out)
    return wheels


def _compare(request: Request, out: Path) -> tuple[Entry, ...]:
    with tempfile.TemporaryDirectory() as folder:
        again = Path(folder) / "index"
        entries = make(request, again)
        flaws = sorted(_differences(again, out))
    if flaws:
        raise WheelError(f"{out} is not the index of {request.wheels}: {'; '.join(flaws)}. Write it again.")
    return entries


def make(request: Request, out: Path) -> tuple[Entry, ...]:
    """Write the index into a folder that is not there yet."""
    entries = wheel_entries.read(request.wheels, request.yanked)
    (out / FILES).mkdir(parents=True)
    for entry in entries:
        for path in (entry.wheel.path, *entry.beside.files):
            shutil.copyfile(path, out / FILES / path.name)
        (out / FILES / f"{entry.file}.metadata").write_bytes(entry.wheel.metadata)
        if provenance := entry.beside.provenance():
            files.write(out / FILES / installers.provenance_name(entry), provenance)
    listings: dict[str, list[Path]] = {}
    if request.variants:
        (out / VARIANTS).mkdir()
        entries = wheel_entries.with_variants(entries, out / VARIANTS)
        variants = [entry.variant for entry in entries if entry.variant]
        for each in variants:
            (out / VARIANTS / f"{each.path.name}.metadata").write_bytes(each.wheel.metadata)
        listings = wheel_variants.write_listings(variants, out / VARIANTS)
    groups = wheel_entries.by_distribution(entries)
    for name, text in _pages(request, groups, listings):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        files.write(out / name, text)
    return entries


def _pages(
    request: Request, groups: Mapping[str, tuple[Entry, ...]], listings: Mapping[str, list[Path]]
) -> Iterator[tuple[str, str]]:
    """Each page, by its path."""
    template = page.templates().get_template("simple.html")
    root = [installers.Link(name, f"{name}/", "", 0) for name in groups]
    version = installers.API_VERSION
    yield f"{SIMPLE}/index.html", template.render(title="Wheels", links=root, version=version)
    yield f"{SIMPLE}/index.json", installers.root_json(list(groups))
    for name, group in groups.items():
        links = [link for entry in group for link in installers.of_entry(entry, request.url)]
        links += [installers.of_listing(path) for path in listings.get(name, [])]
        html = template.render(title=f"Wheels of {name}", links=links, version=version)
        versions = list(dict.fromkeys(str(entry.wheel.version) for entry in group))
        yield f"{SIMPLE}/{name}/index.html", html
        yield f"{SIMPLE}/{name}/index.json", installers.project_json(name, versions, links)
    yield "index.html", page.render(groups, request.torch_cuda or {}, request.url)
    every = [entry for group in groups.values() for entry in group]
    about = About(
        format=1,
        url=request.url,
        variants=request.variants,
        wheels={entry.file: entry.wheel.sha256 for entry in every},
        yanked={entry.file: entry.yanked for entry in every if entry.yanked is not None},
        torch_cuda=dict(request.torch_cuda or {}),
    )
    yield MARKER, about.model_dump_json(indent=1) + "\n"


def _refuse_others(out: Path) -> None:
    """A folder of something else is not replaced."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not (out / MARKER).is_file():
        raise UsageError(
            f"{out} is no index of this command (it has no {MARKER}), so it is not replaced. Name another "
            "folder with --out, or move it away."
        )
    documents.read(About, out / MARKER, error=UsageError, remedy="move it away, or name another --out")


def _differences(expected: Path, found: Path) -> Iterator[str]:
    """The files that two folders do not share byte for byte."""

    def listed(folder: Path) -> set[str]:
        return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}

    here, there = listed(expected), listed(found)
    yield from (f"{name} is missing" for name in here - there)
    yield from (f"{name} is too many" for name in there - here)
    for name in here & there:
        if not filecmp.cmp(expected / name, found / name, shallow=False):
            yield f"{name} is changed"
