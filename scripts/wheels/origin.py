"""Which state of this repository a wheel was built from."""

from __future__ import annotations

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
    from collections.abc import Iterator

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
    expected = [(patch.name, patch.sha256) for patch in told.patches]
    with tempfile.TemporaryDirectory(prefix="fa2-series-") as temporary:
        for where, pin, files in _states(root):
            if [(name, hashlib.sha256(content).hexdigest()) for name, content in files] != expected:
                continue
            folder = Path(temporary)
            for name, content in files:
                (folder / name).write_bytes(content)
            checkout = upstream.find(pin, root / "upstream", cache)
            made = tree.base_of(pin, checkout)
            patches = tuple(model.parse_patch(folder / name) for name, _ in files)
            if (made, model.Series(folder, patches).digest(made)) == (told.base, told.digest):
                return Origin(where, checkout)
    raise VerifyError(
        f"{facts.path.name}: no state of this repository gives its series (digest {told.digest[:16]}…): "
        "built from patches that were never committed here, or from another fork. Build it again from this "
        "repository."
    )


def _states(root: Path) -> Iterator[tuple[str, Upstream, list[tuple[str, bytes]]]]:
    """Each pin and its series as they lie here, then of every commit that changed them, newest first."""
    for pin, series in _pins((root / "wheel_matrix.toml").read_bytes()):
        yield "this checkout", pin, [(p.name, p.content) for p in model.read(root / series).patches]
    repository = Repository(root, VerifyError)
    if not repository.is_top_level():
        return
    for commit in repository.run(
        "log", "--format=%H", "--", "patches", "wheel_matrix.toml", writes=False
    ).split():
        if "wheel_matrix.toml" not in repository.files(commit, "wheel_matrix.toml"):
            continue
        for pin, series in _pins(repository.read(f"{commit}:wheel_matrix.toml")):
            names = {name.removeprefix(f"{series}/") for name in repository.files(commit, series)}
            if listing.LISTING in names:
                listed = repository.read(f"{commit}:{series}/{listing.LISTING}").decode("utf-8").splitlines()
                order = [name for line in listed if (name := listing.name_in(line)) in names]
                content = [(name, repository.read(f"{commit}:{series}/{name}")) for name in order]
                yield f"commit {commit[:12]}", pin, content


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
