"""Render the GitHub workflow that builds every target of the matrix in its container."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from scripts.base import files
from scripts.base.errors import MatrixError

if TYPE_CHECKING:
    from pathlib import Path

    from scripts.source.matrix import Matrix

PATH = ".github/workflows/wheels.yml"

# A hosted runner's disk is too small for an image, torch for each Python and the objects, unless what it
# brings and we do not use goes first. Wheels are proved elsewhere: these runners have no GPU.
_TEXT = """\
# Rendered from wheel_matrix.toml by "nox -s matrix -- --github"; edit that, or scripts/wheels/workflow.py.
name: wheels
on:
  workflow_dispatch:
  push:
    tags: ["v*"]
permissions:
  contents: read
jobs:
  build:
    runs-on: ubuntu-24.04
    timeout-minutes: 360
    strategy:
      fail-fast: false
      matrix:
        include:
{rows}
    name: ${{{{ matrix.target }}}}
    steps:
      - run: sudo rm -rf /usr/share/dotnet /usr/local/lib/android /opt/ghc /opt/hostedtoolcache/CodeQL
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with:
          python-version: "3.12"
      - uses: actions/cache@v4
        with:
          path: ~/.cache/flash-attention-deterministic/containers/sccache
          key: kernels-${{{{ matrix.cuda }}}}-\
${{{{ hashFiles('patches/**', 'wheel_matrix.toml') }}}}-${{{{ matrix.target }}}}
          restore-keys: kernels-${{{{ matrix.cuda }}}}-
      - run: mkdir -p ~/.cache/flash-attention-deterministic/containers
      - run: python -m pip install nox
      - run: nox -s build -- --containers --target ${{{{ matrix.target }}}} --out wheels
      - run: sudo chown -R "$(id -u)" ~/.cache/flash-attention-deterministic
        if: always()
      - uses: actions/upload-artifact@v4
        with:
          name: ${{{{ matrix.target }}}}
          path: |
            wheels/*.whl
            wheels/*.provenance.json
          if-no-files-found: error
"""

# Of python upstreams nothing is compiled: a wheel takes seconds, without a container.
_PYTHON = """\
  python:
    runs-on: ubuntu-24.04
    timeout-minutes: 20
    strategy:
      fail-fast: false
      matrix:
        upstream: {names}
    name: ${{{{ matrix.upstream }}}}
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with:
          python-version: "3.12"
      - run: python -m pip install nox
      - run: nox -s build -- --upstream ${{{{ matrix.upstream }}}} --check-reproducible --out wheels
      - uses: actions/upload-artifact@v4
        with:
          name: ${{{{ matrix.upstream }}}}
          path: |
            wheels/*.whl
            wheels/*.provenance.json
          if-no-files-found: error
"""


def render(matrix: Matrix) -> str:
    """The workflow: one job a target, in its container; one a python upstream.

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
    return _TEXT.format(rows="\n".join(rows)) + (_PYTHON.format(names=json.dumps(names)) if names else "")


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
