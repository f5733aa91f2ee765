"""Which of upstream's files a build needs: one rule, so that the submodule and the sdist give the same."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

CUTLASS = "csrc/cutlass"
# Of csrc, what upstream's MANIFEST.in names; git has more (.inl).
_IN_SDIST = (".cu", ".h", ".cuh", ".cpp", ".hpp", ".py")

# Of a python upstream, what its package's folder has beside modules.
_BESIDE_A_PACKAGE = ("pyproject.toml", "README.md", "LICENSE", "AUTHORS", "MANIFEST.in")


def is_build_input(path: PurePosixPath, packages: frozenset[PurePosixPath] | None = None) -> bool:
    """Whether a build needs this file.

    ``packages`` are the folders that are Python packages; None: any may be one.
    """
    if path.parts[:2] == ("csrc", "flash_attn") or path.parts[:3] == ("csrc", "cutlass", "include"):
        return path.suffix in _IN_SDIST
    if path.parts[0] in ("flash_attn", "flash_attn_2_cuda"):  # the second is the fork's own
        return path.suffix == ".py" and (packages is None or path.parent in packages)
    return str(path) in ("setup.py", "README.md", "LICENSE", "AUTHORS", "MANIFEST.in")


def is_package_input(path: PurePosixPath, package: str) -> bool:
    """Whether a wheel of a python upstream is made of this file of its package, and of nothing below it.

    >>> names = "a/b/x.py", "a/b/LICENSE", "a/b/PKG-INFO", "a/b/c/x.py", "a/x.py"
    >>> [is_package_input(PurePosixPath(name), "a/b") for name in names]
    [True, True, False, False, False]
    """
    return str(path.parent) == package and (path.suffix == ".py" or path.name in _BESIDE_A_PACKAGE)


def select(paths: Iterable[str], package: str | None = None) -> list[str]:
    """The files that a build needs, of all that a release has; ``package``: a python upstream's."""
    if package is not None:
        return sorted(path for path in paths if is_package_input(PurePosixPath(path), package))
    pure = [PurePosixPath(p) for p in paths]
    packages = frozenset(p.parent for p in pure if p.name == "__init__.py")
    return sorted(str(p) for p in pure if is_build_input(p, packages))
