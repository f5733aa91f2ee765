"""Write a new pin into ``wheel_matrix.toml``, keeping its comments, and into the submodule's gitlink."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import tomlkit

from scripts.base.errors import MatrixError
from scripts.base.git import Repository
from scripts.source import matrix as model
from scripts.source.matrix_tables import UNKNOWN

if TYPE_CHECKING:
    from pathlib import Path

    from scripts.source.matrix import Matrix
    from scripts.source.matrix_tables import Upstream


def write(matrix: Matrix, pin: Upstream) -> bool:
    """Replace the pin; whether anything changed.

    The old release joins the upstream's releases, and the revision starts again at 1.
    """
    if pin == matrix.upstream:
        return False
    document = tomlkit.parse(matrix.path.read_text(encoding="utf-8"))
    table = document["upstreams"][matrix.name]
    for key, value in pin.model_dump(by_alias=True, exclude_none=True).items():
        if table.get(key) != value:
            table[key] = value
    if pin.tag is None and "tag" in table:  # of the release that it was
        table.remove("tag")
    table["revision"] = 1
    text = _with_release(tomlkit.dumps(document), matrix, pin)
    part = matrix.path.with_name(matrix.path.name + ".part")
    part.write_text(text, encoding="utf-8")
    try:
        if model.load(part).of(matrix.name).upstream != pin:
            raise MatrixError(f"{matrix.path}: the new pin could not be written.")
        part.replace(matrix.path)
    finally:
        part.unlink(missing_ok=True)
    return True


def _with_release(text: str, matrix: Matrix, new: Upstream) -> str:
    """The old release in the place of the new one in the upstream's releases, or after their last line.

    tomlkit would put it after what follows.
    """
    lines, old = text.split("\n"), matrix.upstream
    header = rf"\s*\[\s*upstreams\s*\.\s*[\"']?{re.escape(matrix.name)}[\"']?\s*\.\s*releases\s*\]"
    start = next((i + 1 for i, line in enumerate(lines) if re.match(header, line)), 0)
    if not start:
        lines[-1:] = ["", f"[upstreams.{matrix.name}.releases]", ""]
        start = len(lines) - 1
    end = next((i for i in range(start, len(lines)) if lines[i].startswith("[")), len(lines))
    keys = [i for i in range(start, end) if re.match(r"\s*[\"'\w]", lines[i])]
    there = next((i for i in keys if re.match(rf"\s*[\"']{re.escape(new.version)}[\"']\s*=", lines[i])), None)
    listed = old.sdist_sha256 == UNKNOWN or old.version in matrix.releases
    entry = [] if listed else [f'"{old.version}" = "{old.sdist_sha256}"']
    if there is not None:
        lines[there : there + 1] = entry
    else:
        after = (keys[-1] if keys else start - 1) + 1
        lines[after:after] = entry
    return "\n".join(lines)


def write_gitlink(root: Path, matrix: Matrix) -> str:
    """Stage the submodule's commit in this repository's index; what was done or is left to do, in words."""
    pin = matrix.upstream
    if not matrix.is_first:
        unknown = f" The commit of {pin.version} is unknown." if pin.commit == UNKNOWN else ""
        return (
            f"The submodule stays as it is: its commit is the pin of {next(iter(matrix.upstreams))}.{unknown}"
        )
    later = (
        f"git -C upstream fetch --tags, git -C upstream checkout {pin.tag or pin.commit}, git add upstream"
    )
    if pin.commit == UNKNOWN:
        return (
            f"The commit of {pin.version} is unknown, because it came from the package index alone. Where "
            f"git reaches upstream: {later}, and write commit and cutlass (git -C upstream submodule "
            "status) into wheel_matrix.toml."
        )
    repository = Repository(root, MatrixError)
    if not repository.is_top_level():
        return f"This is no git repository; the submodule was left alone ({later})."
    stage_gitlink(root, pin.commit)
    return f"The submodule's commit {pin.commit[:12]} is staged (git diff --cached upstream)."


def gitlink(root: Path) -> str:
    """The submodule's commit in this repository's index; empty where there is none."""
    repository = Repository(root, MatrixError)
    listed = (
        repository.run("ls-files", "--stage", "upstream", writes=False).split()
        if repository.is_top_level()
        else []
    )
    return listed[1] if listed[:1] == ["160000"] else ""


def stage_gitlink(root: Path, commit: str) -> None:
    """Put the submodule's commit into this repository's index; with an empty one, take the submodule out."""
    entry = (
        ("--add", "--cacheinfo", f"160000,{commit},upstream") if commit else ("--force-remove", "upstream")
    )
    Repository(root, MatrixError).run("update-index", *entry)
