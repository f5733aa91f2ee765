"""What the patches of a tree stand on: upstream's files, and our own on them."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.base.errors import SeriesError
from scripts.base.git import Repository
from scripts.series import own as own_files
from scripts.source import upstream

if TYPE_CHECKING:
    from scripts.series.own import OwnFiles
    from scripts.source.matrix_tables import Upstream


def upstream_of(repository: Repository, commit: str) -> str:
    """The commit of upstream's files alone that a tree's other commits stand on."""
    return repository.run("rev-list", "--max-parents=0", commit, writes=False).strip()


def make_base(root: Path, pin: Upstream, checkout: upstream.Checkout, own: OwnFiles) -> str:
    """Make a repository of upstream's files as they are, and of ours on them; the id of its last commit.

    The id follows from the files and the release's name.

    Raises:
        SeriesError: upstream has a file that we have, or one of ours is none that a build reads.
    """
    upstream.materialise(pin, checkout, root)
    repository = Repository.create(root, SeriesError)
    repository.run("add", "--all", "--force")
    repository.run("commit", "--quiet", "-m", f"{pin.distribution} {pin.version}")
    if own.contents:
        own_files.require_no_others(own, repository.files("HEAD"), pin.package)
        own_files.lay(own, root)
        repository.run("add", "--all", "--force")
        repository.run("commit", "--quiet", "-m", own_files.COMMIT)
    return repository.resolve("HEAD")


def base_of(pin: Upstream, checkout: upstream.Checkout, own: OwnFiles) -> str:
    """The id of the commit that :func:`make_base` makes."""
    with tempfile.TemporaryDirectory(prefix="fa2-base-") as folder:
        return make_base(Path(folder) / "source", pin, checkout, own)
