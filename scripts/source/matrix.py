"""Read and validate ``wheel_matrix.toml``; list the targets. What is wrong is named by file, line and key."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from packaging.version import InvalidVersion, Version
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from scripts.base.errors import MatrixError, UsageError
from scripts.source.kernel_set import Kernel, parse_kernels
from scripts.source.mistakes import explain, mistake_at

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
# What upstream's kernels run on, and the first nvcc that makes machine code for it.
_FIRST_CUDA = {
    "80": "11.0",
    "86": "11.1",
    "87": "11.4",
    "89": "11.8",
    "90": "11.8",
    "100": "12.8",
    "103": "12.9",
    "110": "13.0",
    "120": "12.8",
    "121": "12.9",
}
ARCHITECTURES = tuple(_FIRST_CUDA)
_WHOLE_TOOLKIT_FROM = "13.0"  # the first CUDA whose compiler the package index has whole


def _pattern(regex: str, what: str) -> AfterValidator:
    def check(value: str) -> str:
        if not re.fullmatch(regex, value):
            raise ValueError(f"{value!r} is not {what}")
        return value

    return AfterValidator(check)


def _check_version(value: str) -> str:
    try:
        Version(value)
    except InvalidVersion as e:
        raise ValueError(f"{value!r} is not a PEP 440 version") from e
    return value


def _check_architectures(value: list[str]) -> list[str]:
    if repeated := sorted({a for a in value if value.count(a) > 1}):
        raise ValueError(f"{', '.join(repeated)} is named twice")
    return value


def _check_package(value: str) -> str:
    if not re.fullmatch(r"[\w.-]+==[\w.]+", value):
        raise ValueError(
            f"{value!r} is no package of one version, such as 'nvidia-cuda-runtime-cu12==12.4.127'"
        )
    return value


def _check_kernels(value: str) -> str:
    parse_kernels(value)
    return value


UNKNOWN = "unknown"  # of a pin that could be had from one source only

Commit = Annotated[
    str, _pattern(f"[0-9a-f]{{40}}|{UNKNOWN}", f"a full commit id (40 hex digits) or {UNKNOWN!r}")
]
Sha256 = Annotated[str, _pattern(f"[0-9a-f]{{64}}|{UNKNOWN}", f"a sha256 (64 hex digits) or {UNKNOWN!r}")]
Release = Annotated[str, _pattern(r"\d+\.\d+", 'a CUDA release such as "13.0"')]
PackageVersion = Annotated[str, AfterValidator(_check_version)]


class _Table(BaseModel):
    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, alias_generator=lambda name: name.replace("_", "-")
    )


class Upstream(_Table):
    """The pin: one release of flash-attention, as a git commit and as an sdist."""

    version: PackageVersion
    repository: str
    tag: str
    commit: Commit
    cutlass: Commit
    distribution: str
    sdist_sha256: Sha256


class Fork(_Table):
    """Our release of the series."""

    revision: Annotated[int, Field(ge=1)]


Architecture = Literal["80", "86", "87", "89", "90", "100", "103", "110", "120", "121"]


class _TargetTable(_Table):
    default: bool = False
    cuda: Release
    torch: PackageVersion
    python: Annotated[list[Literal["3.10", "3.11", "3.12", "3.13", "3.14"]], Field(min_length=1)]
    arch: Annotated[list[Architecture], Field(min_length=1), AfterValidator(_check_architectures)]
    kernels: Annotated[str, AfterValidator(_check_kernels)]
    toolkit: PackageVersion | None = None


class Assembled(_Table):
    """A toolkit put together: the compiler of a Debian package, headers of the package index."""

    package: Annotated[
        str,
        _pattern(
            r"pool/[\w./+~-]+_amd64\.deb", "the path of a package on a Debian mirror (pool/…_amd64.deb)"
        ),
    ]
    sha256: Annotated[str, _pattern("[0-9a-f]{64}", "a sha256 (64 hex digits)")]
    headers: Annotated[
        tuple[Annotated[str, AfterValidator(_check_package)], ...], Field(min_length=1, strict=False)
    ]


class _File(_Table):
    upstream: Upstream
    fork: Fork
    torch_cuda: dict[PackageVersion, Release]
    releases: dict[PackageVersion, Sha256] = Field(default_factory=dict)
    images: dict[Release, str] = Field(default_factory=dict)
    shared_ptx: dict[
        Architecture, Annotated[list[Architecture], Field(min_length=1), AfterValidator(_check_architectures)]
    ] = Field(default_factory=dict)
    toolkits: dict[PackageVersion, Assembled] = Field(default_factory=dict)
    targets: Annotated[dict[str, _TargetTable], Field(min_length=1)]


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
    tables: dict[str, type[_Table]] = {
        "": _File,
        "upstream": Upstream,
        "fork": Fork,
        "toolkits": Assembled,
        "targets": _TargetTable,
    }
    model = tables.get(names[0] if names else "", _File)
    return [field.alias or name for name, field in model.model_fields.items()]


def _shared_ptx(path: Path, text: str, parsed: _File) -> dict[str, tuple[str, ...]]:
    shared: dict[str, tuple[str, ...]] = {}
    seen: dict[str, str] = {}
    for base, others in parsed.shared_ptx.items():
        for other in others:
            if int(other) <= int(base):
                raise mistake_at(
                    path,
                    text,
                    ("shared-ptx", base),
                    f"{other} is no later than {base}, whose PTX it would be made from",
                )
            if other in seen:
                raise mistake_at(
                    path, text, ("shared-ptx", base), f"{other} is made from the PTX of {seen[other]} already"
                )
            seen[other] = base
        shared[base] = tuple(others)
    return shared


def too_early(cuda: str, architectures: Iterable[str]) -> str | None:
    """What is wrong with asking a CUDA release for machine code of these compute capabilities, or None.

    >>> too_early("12.4", ("80", "90", "120"))
    'nvcc 12.4 knows no compute capability 120 (CUDA 12.8 and later)'
    >>> too_early("13.0", ("80", "120"))
    """
    for architecture in architectures:
        if Version(cuda) < Version(_FIRST_CUDA[architecture]):
            return f"nvcc {cuda} knows no compute capability {architecture} (CUDA {_FIRST_CUDA[architecture]} and later)"
    return None


def _toolkit_mistake(table: _TargetTable, toolkits: Iterable[str]) -> str | None:
    """What is wrong with where a target's compiler comes from."""
    if table.toolkit is None:
        return None
    if not table.toolkit.startswith(table.cuda + "."):
        return f"{table.toolkit} is no full release of CUDA {table.cuda}, such as {table.cuda}.2"
    if Version(table.cuda) < Version(_WHOLE_TOOLKIT_FROM) and table.toolkit not in toolkits:
        return (
            f"the package index has no compiler of CUDA {table.cuda}; describe {table.toolkit} in [toolkits], "
            "or leave this key out where the machine or a container must bring it"
        )
    return None


def load(path: Path) -> Matrix:
    """Read the matrix; a MatrixError names file, line and key of every mistake."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as e:
        raise MatrixError(f"{path}: {e.strerror}.") from e
    except UnicodeDecodeError as e:
        raise MatrixError(f"{path}: not UTF-8: {e.reason} at byte {e.start}.") from e
    try:
        parsed = _File.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as e:
        raise MatrixError(f"{path}: not TOML: {e}.") from e
    except ValidationError as e:
        mistakes = [mistake_at(path, text, d["loc"], explain(d, _keys_allowed(d["loc"]))) for d in e.errors()]
        raise MatrixError("\n".join(str(m) for m in mistakes)) from None
    for name, table in parsed.targets.items():
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise mistake_at(
                path,
                text,
                ("targets", name),
                "a target's name is a folder's, of letters, digits, '.', '_' and '-'",
            )
        known = parsed.torch_cuda.get(table.torch)
        if known is None:
            listed = ", ".join(parsed.torch_cuda)
            raise mistake_at(
                path,
                text,
                ("targets", name, "torch"),
                f"torch {table.torch} is not in [torch-cuda], which has {listed}",
            )
        if known != table.cuda:
            fits = (
                ", ".join(t for t, c in parsed.torch_cuda.items() if c == table.cuda)
                or "none in [torch-cuda]"
            )
            message = f"torch {table.torch} is built for CUDA {known}, not {table.cuda}; for CUDA {table.cuda} there is {fits}"
            raise mistake_at(path, text, ("targets", name, "torch"), message)
        if mistake := _toolkit_mistake(table, parsed.toolkits):
            raise mistake_at(path, text, ("targets", name, "toolkit"), mistake)
        if mistake := too_early(table.cuda, table.arch):
            raise mistake_at(path, text, ("targets", name, "arch"), mistake)
    defaults = [name for name, table in parsed.targets.items() if table.default]
    if len(defaults) != 1:
        where = ("targets", defaults[1], "default") if defaults else ("targets", next(iter(parsed.targets)))
        raise mistake_at(
            path, text, where, f"one target must have default = true; {', '.join(defaults) or 'none'} has"
        )
    targets = tuple(
        Target(
            name,
            t.default,
            t.cuda,
            t.torch,
            tuple(t.python),
            tuple(t.arch),
            parse_kernels(t.kernels),
            t.toolkit,
            parsed.toolkits.get(t.toolkit) if t.toolkit else None,
        )
        for name, t in parsed.targets.items()
    )
    return Matrix(
        path,
        parsed.upstream,
        parsed.fork,
        parsed.releases,
        parsed.images,
        _shared_ptx(path, text, parsed),
        targets,
    )
