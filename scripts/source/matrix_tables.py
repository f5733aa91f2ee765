"""The tables of wheel_matrix.toml, each checked on its own."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from scripts.source.kernel_set import parse_kernels

PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")


# What upstream's kernels run on, and the first nvcc that makes machine code for it.
FIRST_CUDA = {
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


ARCHITECTURES = tuple(FIRST_CUDA)


WHOLE_TOOLKIT_FROM = "13.0"  # the first CUDA whose compiler the package index has whole


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


def _check_range(text: str) -> str:
    try:
        SpecifierSet(text)
    except InvalidSpecifier:
        raise ValueError(f'{text!r} is no range of versions, such as ">=2.11"') from None
    return text


PackageVersion = Annotated[str, AfterValidator(_check_version)]


Kind = Literal["cuda", "python"]


class Table(BaseModel):
    """A table of the file: no other keys, and no values of another type."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, alias_generator=lambda name: name.replace("_", "-")
    )


class Upstream(Table):
    """A pin: one release of an upstream, as a git commit and as an sdist; or a commit alone."""

    kind: Kind = "cuda"
    version: PackageVersion
    repository: str
    tag: str | None = None  # of a release
    commit: Commit
    cutlass: Commit | None = None  # None: it has none
    distribution: str
    sdist_sha256: Sha256
    # Of a python upstream, where its package lies in the repository; in the sdist it lies at the top.
    package: Annotated[str, _pattern(r"\w+(/\w+)*", "a folder such as flash_attn/cute")] | None = None


class UpstreamTable(Upstream):
    """What an upstream says; the table's name is the upstream's. The pin, and the series on it."""

    kind: Kind  # here it must be said
    series: Annotated[str, _pattern(r"patches/[\w.-]+", "a folder such as patches/flash-attn")]
    own: Annotated[str, _pattern(r"fork/[\w.-]+", "a folder such as fork/flash-attn")] | None = None
    revision: Annotated[int, Field(ge=1)]
    releases: dict[PackageVersion, Sha256] = Field(default_factory=dict)

    @property
    def pin(self) -> Upstream:
        """The pin alone."""
        return Upstream.model_validate(self.model_dump(by_alias=True, include=set(Upstream.model_fields)))


Architecture = Literal["80", "86", "87", "89", "90", "100", "103", "110", "120", "121"]


class TargetTable(Table):
    """What a target says; the table's name is the target's."""

    default: bool = False
    cuda: Release
    torch: Annotated[str, AfterValidator(_check_range)]  # that its wheels ask for
    reference_torch: PackageVersion  # that stock is compiled against, and wheels are tried beside
    arch: Annotated[list[Architecture], Field(min_length=1), AfterValidator(_check_architectures)]
    kernels: Annotated[str, AfterValidator(_check_kernels)]
    toolkit: PackageVersion | None = None
    upstream: str | None = None  # None: the first of kind cuda


class Assembled(Table):
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


class MatrixFile(Table):
    """The whole file."""

    upstreams: Annotated[dict[str, UpstreamTable], Field(min_length=1)]
    torch_cuda: dict[PackageVersion, Release] = Field(default_factory=dict)
    images: dict[Release, str] = Field(default_factory=dict)
    shared_ptx: dict[
        Architecture, Annotated[list[Architecture], Field(min_length=1), AfterValidator(_check_architectures)]
    ] = Field(default_factory=dict)
    toolkits: dict[PackageVersion, Assembled] = Field(default_factory=dict)
    targets: dict[str, TargetTable] = Field(default_factory=dict)
