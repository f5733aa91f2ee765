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
from scripts.series import listing, model, tree
from scripts.source import upstream
from scripts.source.matrix_tables import Upstream, UpstreamTable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from scripts.wheels.verify import Facts


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
            if state.names != [patch.name for patch in told.patches]:
                continue
            if any(hashlib.sha256(state.read(name)).hexdigest() != expected[name] for name in state.names):
                continue
            folder = Path(temporary)
            for name in state.names:
                (folder / name).write_bytes(state.read(name))
            checkout = upstream.find(state.pin, root / "upstream", cache)
            made = tree.base_of(state.pin, checkout)
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


def _states(root: Path) -> Iterator[_State]:
    """Each pin and its series as they lie here, then of every commit that changed them, newest first."""
    for pin, series in _pins((root / "wheel_matrix.toml").read_bytes()):
        patches = {patch.name: patch.content for patch in model.read(root / series).patches}
        yield _State("this checkout", pin, [*patches], patches.__getitem__)
    repository = Repository(root, VerifyError)
    if not repository.is_top_level():
        return
    changed = ("log", "--format=%H", "--", "patches", "wheel_matrix.toml")
    pins = functools.cache(lambda text: [*_pins(text)])  # few commits change it
    for commit in repository.run(*changed, writes=False).split():
        for pin, series in pins(repository.find(f"{commit}:wheel_matrix.toml") or b""):
            listed = (repository.find(f"{commit}:{series}/{listing.LISTING}") or b"").decode("utf-8")
            if not (names := [name for line in listed.splitlines() if (name := listing.name_in(line))]):
                continue
            read = functools.partial(_read, repository, f"{commit}:{series}")
            yield _State(f"commit {commit[:12]}", pin, names, read)


def _read(repository: Repository, folder: str, name: str) -> bytes:
    """A patch of a commit; empty where its series names one that is not there."""
    return repository.find(f"{folder}/{name}") or b""


def _pins(text: bytes) -> Iterator[tuple[Upstream, str]]:
    """Each pin of a matrix and the folder of its series; of a matrix that cannot be read, none.

    Before there was a second upstream, a matrix had one table ``upstream``, and its series lay in
    ``patches``.
    """
    try:
        tables = tomlkit.parse(text).unwrap()
        if "upstream" in tables:
            yield Upstream.model_validate(tables["upstream"]), "patches"
        for table in tables.get("upstreams", {}).values():
            known = UpstreamTable.model_validate(table)
            yield known.pin, known.series
    except (TOMLKitError, UnicodeDecodeError, ValidationError):
        return
