"""Which state of this repository a wheel was built from."""

from __future__ import annotations

import functools
import hashlib
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tomlkit
from pydantic import ValidationError
from tomlkit.exceptions import TOMLKitError

from scripts.base.errors import VerifyError
from scripts.base.git import Repository
from scripts.series import ground, listing, model, own_tree
from scripts.series.own import OwnFiles
from scripts.source import upstream
from scripts.source.matrix_tables import Upstream, UpstreamTable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from scripts.wheels.proof.verify import Facts


@dataclass(frozen=True)
class Origin:
    """Which state of the repository a wheel was built from, and the release that it pinned."""

    where: str
    checkout: upstream.Checkout


def check_series(facts: Facts, root: Path, cache: Path) -> Origin:
    """Which state of this repository gives the series that a wheel says it was built from.

    States are the work tree and each of the commits.

    Args:
        facts: the wheel's.
        root: the repository.
        cache: where sdists are kept.

    Raises:
        VerifyError: none gives that digest.
    """
    told = facts.provenance.series
    expected = {patch.name: patch.sha256 for patch in told.patches}
    with tempfile.TemporaryDirectory(prefix="fa2-series-") as temporary:
        for state in _states(root):
            if state.names != [*expected]:
                continue
            contents = [state.read(name) for name in state.names]
            if [hashlib.sha256(content).hexdigest() for content in contents] != [*expected.values()]:
                continue
            own = state.own()
            if own.digests != told.own_files:
                continue
            folder = Path(temporary)
            for name, content in zip(state.names, contents, strict=True):
                (folder / name).write_bytes(content)
            checkout = upstream.find(state.pin, root / "upstream", cache)
            made = ground.base_of(state.pin, checkout, own)
            patches = tuple(model.parse_patch(folder / name) for name in state.names)
            if (made, model.Series(folder, patches).digest(made)) == (told.base, told.digest):
                return Origin(state.where, checkout)
    raise VerifyError(
        f"{facts.path.name}: no state of this repository gives its series (digest {told.digest[:16]}…): "
        "built from patches that were never committed here, or from another fork. Build it again from this "
        "repository."
    )


@dataclass(frozen=True)
class _State:
    """A pin and its series, as a commit or the work tree has them. Few are read: names tell most apart."""

    where: str
    pin: Upstream
    names: list[str]
    read: Callable[[str], bytes]  # a patch, by its name
    own: Callable[[], OwnFiles]


def _states(root: Path) -> Iterator[_State]:
    """Each pin and its series as they lie here, then of every commit that changed them, newest first."""
    for pin, series, own in _pins((root / "wheel_matrix.toml").read_bytes()):
        here = model.read(root / series, root / own if own else None)
        patches = {patch.name: patch.content for patch in here.patches}
        yield _State(
            "this checkout",
            pin,
            [*patches],
            patches.__getitem__,
            functools.partial(_kept, here.own),
        )
    repository = Repository(root, VerifyError)
    if not repository.is_top_level():
        return
    changed = ("log", "--format=%H", "--", "patches", "fork", "wheel_matrix.toml")
    pins = functools.cache(lambda text: [*_pins(text)])  # few commits change it
    for commit in repository.run(*changed, writes=False).split():
        for pin, series, own in pins(repository.find(f"{commit}:wheel_matrix.toml") or b""):
            listed = (repository.find(f"{commit}:{series}/{listing.LISTING}") or b"").decode("utf-8")
            if not (names := [name for line in listed.splitlines() if (name := listing.name_in(line))]):
                continue
            read = functools.partial(_read, repository, f"{commit}:{series}")
            committed = functools.partial(_own, repository, commit, own)
            yield _State(f"commit {commit[:12]}", pin, names, read, committed)


def _read(repository: Repository, folder: str, name: str) -> bytes:
    """A patch of a commit; empty where its series names one that is not there."""
    return repository.find(f"{folder}/{name}") or b""


def _kept(own: OwnFiles) -> OwnFiles:
    return own


def _own(repository: Repository, commit: str, folder: str | None) -> OwnFiles:
    """Our own files of a commit."""
    if folder is None:
        return OwnFiles()
    return own_tree.committed(repository, commit, folder)


def _pins(text: bytes) -> Iterator[tuple[Upstream, str, str | None]]:
    """Each pin of a matrix, and the folders of its series and of our own files; none if it is malformed.

    Before there was a second upstream, a matrix had one table ``upstream``, and its series lay in
    ``patches``. Before our own files lay in ``fork``, patches added them.
    """
    try:
        tables = tomlkit.parse(text).unwrap()
        if "upstream" in tables:
            yield Upstream.model_validate(tables["upstream"]), "patches", None
        for table in tables.get("upstreams", {}).values():
            known = UpstreamTable.model_validate(table)
            yield known.pin, known.series, known.own
    except (TOMLKitError, UnicodeDecodeError, ValidationError):
        return
