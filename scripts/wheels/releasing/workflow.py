"""Render the GitHub workflow: it builds every target in its container, drafts a release, publishes an index.

The text is ``workflow.yml`` beside this module; only the rows of its matrices come from wheel_matrix.toml.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import TYPE_CHECKING

from scripts.base import files
from scripts.base.errors import MatrixError

if TYPE_CHECKING:
    from pathlib import Path

    from scripts.source.matrix import Matrix

PATH = ".github/workflows/wheels.yml"
_TEXT = "workflow.yml"
_PYTHON = ("  # python upstreams {\n", "  # } python upstreams\n")  # around what a matrix without any has not


def render(matrix: Matrix) -> str:
    """The workflow: one job a target, in its container; one a python upstream; then a release and an index.

    Raises:
        MatrixError: a target whose CUDA has no image.
    """
    rows = []
    for target in matrix.all_targets:
        if target.cuda not in matrix.images:
            raise MatrixError(
                f"{matrix.path}: [images] has none for CUDA {target.cuda} of target {target.name}; add one."
            )
        rows.append(f"          - {json.dumps({'target': target.name, 'cuda': target.cuda})}")
    names = [name for name, table in matrix.upstreams.items() if table.kind == "python"]
    text = resources.files("scripts.wheels.releasing").joinpath(_TEXT).read_text(encoding="utf-8")
    before, rest = text.split(_PYTHON[0])
    of_python, after = rest.split(_PYTHON[1])
    text = before + (of_python if names else "") + after
    needs = ["build", *(["python"] if names else [])]
    for word, value in (
        ("          - TARGETS", "\n".join(rows)),
        ("[UPSTREAMS]", json.dumps(names)),
        ("[NEEDS]", f"[{', '.join(needs)}]"),
    ):
        text = text.replace(word, value)
    return text


def write(root: Path, text: str) -> bool:
    """Replace the workflow when its text differs; whether it did."""
    path = root / PATH
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path, text)
    return True


def check(root: Path, text: str) -> None:
    """Raise a MatrixError when the workflow is not what would be written."""
    path = root / PATH
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        raise MatrixError(
            f"{PATH} is stale: it is not what wheel_matrix.toml says. Run nox -s matrix -- --github and "
            "commit the result."
        )
