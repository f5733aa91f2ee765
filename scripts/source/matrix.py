"""Read and validate ``wheel_matrix.toml``; list the targets. What is wrong is named by file, line and key."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from packaging.utils import canonicalize_name
from packaging.version import Version
from pydantic import ValidationError

from scripts.base.errors import MatrixError, UsageError
from scripts.source.kernel_set import Kernel, parse_kernels
from scripts.source.matrix_checks import compiled, target_mistake, upstream_mistake
from scripts.source.matrix_tables import (
    Assembled,
    MatrixFile,
    Table,
    TargetTable,
    UpstreamTable,
)
from scripts.source.mistakes import explain, mistake_at

# Not tomlkit, which pin.py edits with: of a key that is there twice it names no line.
if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from scripts.source.matrix_tables import Upstream


@dataclass(frozen=True)
class Target:
    """One row of the matrix: what a wheel is built for."""

    name: str
    default: bool
    cuda: str
    torch: str  # a range of releases
    reference_torch: str
    architectures: tuple[str, ...]
    kernels: tuple[Kernel, ...]
    toolkit: str | None  # None: no index has its compiler
    assembled: Assembled | None = None
    upstream: str = ""

    @property
    def label(self) -> str:
        """The local version's part that names CUDA's major release, such as ``cu13``."""
        return f"cu{self.cuda.partition('.')[0]}"


@dataclass(frozen=True)
class Matrix:
    """The file's content, checked, as one of its upstreams sees it."""

    path: Path
    upstreams: dict[str, UpstreamTable]
    name: str  # of the upstream whose pin, series and targets these are
    images: dict[str, str]
    shared_ptx: dict[str, tuple[str, ...]]  # machine code of these may be made from the PTX of the key
    all_targets: tuple[Target, ...]  # of every upstream
    torch_cuda: dict[str, str] = field(default_factory=dict)  # the CUDA of each torch on the package index
    base_version: str = ""  # that wheels pass for, with a label of what they are; else the pin's own

    @property
    def table(self) -> UpstreamTable:
        """What the file says of the upstream."""
        return self.upstreams[self.name]

    @cached_property
    def upstream(self) -> Upstream:
        """The upstream's pin."""
        return self.table.pin

    @property
    def releases(self) -> dict[str, str]:
        """Other releases of the upstream: the sdist's sha256 by version."""
        return self.table.releases

    @property
    def is_first(self) -> bool:
        """Whether it is the upstream that commands work on unasked."""
        return self.name == next(iter(self.upstreams))

    @property
    def targets(self) -> tuple[Target, ...]:
        """What is built of the upstream; a python upstream has none."""
        return tuple(target for target in self.all_targets if target.upstream == self.name)

    def of(self, name: str | None) -> Matrix:
        """The same as another upstream sees it (None: the first); a UsageError lists those there are."""
        if name is not None and name not in self.upstreams:
            raise UsageError(
                f"{self.path.name} has no upstream {name!r}; it has {', '.join(self.upstreams)}."
            )
        return replace(self, name=name or next(iter(self.upstreams)))

    def each(self) -> tuple[Matrix, ...]:
        """The same as every upstream sees it, in order."""
        return tuple(self.of(name) for name in self.upstreams)

    def making(self, distribution: str) -> Matrix | None:
        """The same as the upstream sees it whose wheels are of this distribution; None: there is none.

        Args:
            distribution: its normalised name, such as ``flash-attn``.
        """
        fitting = (m for m in self.each() if canonicalize_name(m.upstream.distribution) == distribution)
        return next(fitting, None)

    def passing_for(self, version: str) -> Matrix:
        """The same, whose wheels have another release's version.

        Raises:
            UsageError: it is no release that consumers may take the wheels for.
        """
        (own_major, own_minor), own = self._line(self.upstream.version), Version(self.upstream.version)
        fitting = [v for v in self.releases if self._line(v) == (own_major, own_minor) and Version(v) < own]
        if version not in fitting:
            raise UsageError(
                f"--base-version {version}: wheels of {self.name} {self.upstream.version} may pass for an "
                f"earlier release of {own_major}.{own_minor} that {self.path.name} lists: "
                f"{', '.join(fitting) or 'there is none'}."
            )
        return replace(self, base_version=version)

    @staticmethod
    def _line(version: str) -> tuple[int, int]:
        parsed = Version(version)
        return parsed.major, parsed.minor

    def default(self) -> Target:
        """The target that ``nox -s build`` builds."""
        for target in self.targets:
            if target.default:
                return target
        raise UsageError(
            f"{self.path.name} has no target for {self.name}, which is of kind {self.table.kind}."
        )

    def named(self, name: str) -> Target:
        """The target of this name; a UsageError lists those there are."""
        for target in self.targets:
            if target.name == name:
                return target
        raise UsageError(
            f"{self.path.name} has no target {name!r}; it has {', '.join(t.name for t in self.targets)}."
        )

    def version(self, target: Target | None = None) -> str:
        """The wheel's version, such as ``2.8.3.post1+det.2.cu13``, or ``4.0.0b36+det.1``."""
        # A version has one local part: a commit's goes after the series' own revision.
        public, _, commit = self.upstream.version.partition("+")
        source = f".of.{public}" if self.base_version else ""
        parts = [self.base_version or public, f"+det.{self.table.revision}", source, commit and f".{commit}"]
        return "".join([*parts, f".{target.label}" if target else ""])


def _keys_allowed(location: Sequence[str | int]) -> list[str]:
    names = [str(part) for part in location[:-1]]
    tables: dict[str, type[Table]] = {
        "": MatrixFile,
        "upstreams": UpstreamTable,
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
    for name, upstream in parsed.upstreams.items():
        if mistake := upstream_mistake(name, upstream, parsed.upstreams):
            key, message = mistake
            raise mistake_at(path, text, ("upstreams", name, key) if key else ("upstreams", name), message)
    for name, table in parsed.targets.items():
        if mistake := target_mistake(name, table, parsed):
            key, message = mistake
            raise mistake_at(path, text, ("targets", name, key) if key else ("targets", name), message)
    targets = tuple(_target(name, table, parsed) for name, table in parsed.targets.items())
    for name in compiled(parsed):
        _require_default(path, text, name, [target for target in targets if target.upstream == name])
    first = next(iter(parsed.upstreams))
    shared = _shared_ptx(path, text, parsed)
    return Matrix(path, parsed.upstreams, first, parsed.images, shared, targets, parsed.torch_cuda)


def _require_default(path: Path, text: str, upstream: str, targets: list[Target]) -> None:
    """Of a compiled upstream's targets one is the default."""
    defaults = [target.name for target in targets if target.default]
    if len(defaults) == 1:
        return
    where = (
        ("targets", defaults[1], "default") if defaults else ("targets", targets[0].name) if targets else ()
    )
    raise mistake_at(
        path,
        text,
        where or ("upstreams", upstream),
        f"one target of {upstream} must have default = true; {', '.join(defaults) or 'none'} has",
    )


def _target(name: str, table: TargetTable, parsed: MatrixFile) -> Target:
    return Target(
        name,
        table.default,
        table.cuda,
        table.torch,
        table.reference_torch,
        tuple(table.arch),
        parse_kernels(table.kernels),
        table.toolkit,
        parsed.toolkits.get(table.toolkit) if table.toolkit else None,
        table.upstream or compiled(parsed)[0],
    )
