"""Which state of this repository a wheel was built from."""

from __future__ import annotations

import hashlib
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.base.errors import VerifyError
from scripts.base.git import Repository
from scripts.series import listing, model, tree
from scripts.source import matrix, upstream

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
        for where, files, matrix_text in _states(root):
            if [(name, hashlib.sha256(content).hexdigest()) for name, content in files] != expected:
                continue
            folder = Path(temporary)
            for name, content in files:
                (folder / name).write_bytes(content)
            (folder / "wheel_matrix.toml").write_bytes(matrix_text)
            pin = matrix.load(folder / "wheel_matrix.toml").upstream
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


def _states(root: Path) -> Iterator[tuple[str, list[tuple[str, bytes]], bytes]]:
    """The series and the matrix as they lie here, then of every commit that changed them, newest first."""
    here = model.read(root / "patches")
    yield (
        "this checkout",
        [(p.name, p.content) for p in here.patches],
        (root / "wheel_matrix.toml").read_bytes(),
    )
    repository = Repository(root, VerifyError)
    if not repository.is_top_level():
        return
    for commit in repository.run(
        "log", "--format=%H", "--", "patches", "wheel_matrix.toml", writes=False
    ).split():
        names = [name.removeprefix("patches/") for name in repository.files(commit, "patches")]
        if listing.LISTING not in names or "wheel_matrix.toml" not in repository.files(
            commit, "wheel_matrix.toml"
        ):
            continue
        listed = repository.read(f"{commit}:patches/{listing.LISTING}").decode("utf-8").splitlines()
        order = [name for line in listed if (name := listing.name_in(line)) in names]
        content = [(name, repository.read(f"{commit}:patches/{name}")) for name in order]
        yield f"commit {commit[:12]}", content, repository.read(f"{commit}:wheel_matrix.toml")
