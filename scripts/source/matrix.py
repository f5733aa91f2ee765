"""Read and validate ``wheel_matrix.toml``; list the targets. What is wrong is named by file, line and key."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from packaging.version import Version
from pydantic import ValidationError

from scripts.base.errors import MatrixError, UsageError
from scripts.source.kernel_set import Kernel, parse_kernels
from scripts.source.matrix_tables import (
    FIRST_CUDA,
    WHOLE_TOOLKIT_FROM,
    Assembled,
    Fork,
    MatrixFile,
    Table,
    TargetTable,
    Upstream,
)
from scripts.source.mistakes import explain, mistake_at

# Not tomlkit, which pin.py edits with: of a key that is there twice it names no line.
if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path


@dataclass(frozen=True)
class Target:
    """One row of the matrix: what a wheel is built for, but for the Python that builds it."""

    name: str
    default: bool
    cuda: str
    torch: str
    pythons: tuple[str, ...]
    architectures: tuple[str, ...]
    kernels: tuple[Kernel, ...]
    toolkit: str | None  # None: no index has its compiler
    assembled: Assembled | None = None

    @property
    def label(self) -> str:
        """The local version's part that names CUDA and torch, such as ``cu130.torch2.11``."""
        return f"cu{self.cuda.replace('.', '')}.torch{'.'.join(self.torch.split('.')[:2])}"


@dataclass(frozen=True)
class Matrix:
    """The file's content, checked."""

    path: Path
    upstream: Upstream
    fork: Fork
    releases: dict[str, str]
    images: dict[str, str]
    shared_ptx: dict[str, tuple[str, ...]]  # machine code of these may be made from the PTX of the key
    targets: tuple[Target, ...]

    def default(self) -> Target:
        """The target that ``nox -s build`` builds."""
        return next(target for target in self.targets if target.default)

    def named(self, name: str) -> Target:
        """The target of this name; a UsageError lists those there are."""
        for target in self.targets:
            if target.name == name:
                return target
        raise UsageError(
            f"{self.path.name} has no target {name!r}; it has {', '.join(t.name for t in self.targets)}."
        )

    def version(self, target: Target) -> str:
        """The wheel's version, such as ``2.8.3.post1+det.1.cu130.torch2.11``."""
        return f"{self.upstream.version}+det.{self.fork.revision}.{target.label}"


def _keys_allowed(location: Sequence[str | int]) -> list[str]:
    names = [str(part) for part in location[:-1]]
    tables: dict[str, type[Table]] = {
        "": MatrixFile,
        "upstream": Upstream,
        "fork": Fork,
        "toolkits": Assembled,
        "targets": TargetTable,
    }
    model = tables.get(names[0] if names else "", MatrixFile)
    return [field.alias or name for name, field in model.model_fields.items()]


def _shared_ptx(path: Path, text: str, parsed: MatrixFile) -> dict[str, tuple[str, ...]]:
    shared: dict[str, tuple[str, ...]] = {}
    seen: dict[str, str] = {}
    for base, following in parsed.shared_ptx.items():
        for later in following:
            if int(later) <= int(base):
                raise mistake_at(
                    path,
                    text,
                    ("shared-ptx", base),
                    f"{later} is no later than {base}, whose PTX it would be made from",
                )
            if later in seen:
                raise mistake_at(
                    path, text, ("shared-ptx", base), f"{later} is made from the PTX of {seen[later]} already"
                )
            seen[later] = base
        shared[base] = tuple(following)
    return shared


def too_early(cuda: str, architectures: Iterable[str]) -> str | None:
    """What is wrong with asking a CUDA release for machine code of these compute capabilities, or None.

    >>> too_early("12.4", ("80", "90", "120"))
    'nvcc 12.4 knows no compute capability 120 (CUDA 12.8 and later)'
    >>> too_early("13.0", ("80", "120"))
    """
    for architecture in architectures:
        if Version(cuda) < Version(FIRST_CUDA[architecture]):
            since = f"CUDA {FIRST_CUDA[architecture]} and later"
            return f"nvcc {cuda} knows no compute capability {architecture} ({since})"
    return None


def _toolkit_mistake(table: TargetTable, toolkits: Iterable[str]) -> str | None:
    """What is wrong with where a target's compiler comes from."""
    if table.toolkit is None:
        return None
    if not table.toolkit.startswith(table.cuda + "."):
        return f"{table.toolkit} is no full release of CUDA {table.cuda}, such as {table.cuda}.2"
    if Version(table.cuda) < Version(WHOLE_TOOLKIT_FROM) and table.toolkit not in toolkits:
        return (
            f"the package index has no compiler of CUDA {table.cuda}; describe {table.toolkit} in "
            "[toolkits], or leave this key out where the machine or a container must bring it"
        )
    return None


def _target_mistake(name: str, table: TargetTable, parsed: MatrixFile) -> tuple[str, str] | None:
    """The key of a target's table that is wrong, empty for its name, and what is wrong with it."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        return "", "a target's name is a folder's, of letters, digits, '.', '_' and '-'"
    cuda = parsed.torch_cuda.get(table.torch)
    if cuda is None:
        listed = ", ".join(parsed.torch_cuda)
        return "torch", f"torch {table.torch} is not in [torch-cuda], which has {listed}"
    if cuda != table.cuda:
        fitting = [torch for torch, built_for in parsed.torch_cuda.items() if built_for == table.cuda]
        return "torch", (
            f"torch {table.torch} is built for CUDA {cuda}, not {table.cuda}; "
            f"for CUDA {table.cuda} there is {', '.join(fitting) or 'none in [torch-cuda]'}"
        )
    if mistake := _toolkit_mistake(table, parsed.toolkits):
        return "toolkit", mistake
    if mistake := too_early(table.cuda, table.arch):
        return "arch", mistake
    return None


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as e:
        raise MatrixError(f"{path}: {e.strerror}.") from e
    except UnicodeDecodeError as e:
        raise MatrixError(f"{path}: not UTF-8: {e.reason} at byte {e.start}.") from e


def _parsed(path: Path, text: str) -> MatrixFile:
    """The file's tables, each checked on its own."""
    try:
        return MatrixFile.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as e:
        raise MatrixError(f"{path}: not TOML: {e}.") from e
    except ValidationError as e:
        mistakes = [mistake_at(path, text, d["loc"], explain(d, _keys_allowed(d["loc"]))) for d in e.errors()]
        raise MatrixError("\n".join(str(m) for m in mistakes)) from None


def load(path: Path) -> Matrix:
    """Read the matrix; a MatrixError names file, line and key of every mistake."""
    text = _text_of(path)
    parsed = _parsed(path, text)
    for name, table in parsed.targets.items():
        if mistake := _target_mistake(name, table, parsed):
            key, message = mistake
            raise mistake_at(path, text, ("targets", name, key) if key else ("targets", name), message)
    defaults = [name for name, table in parsed.targets.items() if table.default]
    if len(defaults) != 1:
        where = ("targets", defaults[1], "default") if defaults else ("targets", next(iter(parsed.targets)))
        raise mistake_at(
            path, text, where, f"one target must have default = true; {', '.join(defaults) or 'none'} has"
        )
    return Matrix(
        path,
        parsed.upstream,
        parsed.fork,
        parsed.releases,
        parsed.images,
        _shared_ptx(path, text, parsed),
        tuple(_target(name, table, parsed) for name, table in parsed.targets.items()),
    )


def _target(name: str, table: TargetTable, parsed: MatrixFile) -> Target:
    return Target(
        name,
        table.default,
        table.cuda,
        table.torch,
        tuple(table.python),
        tuple(table.arch),
        parse_kernels(table.kernels),
        table.toolkit,
        parsed.toolkits.get(table.toolkit) if table.toolkit else None,
    )
