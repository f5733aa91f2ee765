"""What is wrong between tables of wheel_matrix.toml; matrix_tables checks each on its own."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from scripts.source.matrix_tables import FIRST_CUDA, WHOLE_TOOLKIT_FROM

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from scripts.source.matrix_tables import MatrixFile, TargetTable, UpstreamTable


def upstream_mistake(
    name: str, table: UpstreamTable, upstreams: Mapping[str, UpstreamTable]
) -> tuple[str, str] | None:
    """The key of an upstream's table that is wrong, empty for its name, and what is wrong with it."""
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name):
        return "", "an upstream's name is an option's and a folder's, of small letters, digits and '-'"
    needed, foreign = ("cutlass", "package") if table.kind == "cuda" else ("package", "cutlass")
    if getattr(table, needed) is None:
        return needed, f"this key is missing; kind {table.kind} needs it"
    if getattr(table, foreign) is not None:
        return foreign, f"kind {table.kind} has none; delete the key, or write the other kind"
    shared = next((n for n, other in upstreams.items() if n != name and other.series == table.series), None)
    if shared is not None:
        return "series", f"{table.series} is the folder of {shared} already"
    return None


def compiled(parsed: MatrixFile) -> list[str]:
    """The upstreams that targets can belong to."""
    return [name for name, table in parsed.upstreams.items() if table.kind == "cuda"]


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


def target_mistake(name: str, table: TargetTable, parsed: MatrixFile) -> tuple[str, str] | None:
    """The key of a target's table that is wrong, empty for its name, and what is wrong with it."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        return "", "a target's name is a folder's, of letters, digits, '.', '_' and '-'"
    torch, key = table.reference_torch, "reference-torch"
    cuda = parsed.torch_cuda.get(torch)
    if cuda is None:
        return key, f"torch {torch} is not in [torch-cuda], which has {', '.join(parsed.torch_cuda)}"
    if cuda != table.cuda:
        fitting = [other for other, built_for in parsed.torch_cuda.items() if built_for == table.cuda]
        return key, (
            f"torch {torch} is built for CUDA {cuda}, not {table.cuda}; "
            f"for CUDA {table.cuda} there is {', '.join(fitting) or 'none in [torch-cuda]'}"
        )
    if torch not in SpecifierSet(table.torch):
        return key, f"torch {torch} is not in the range {table.torch} that wheels ask for"
    return _upstream_of(table, parsed) or _compiler_mistake(table, parsed)


def _upstream_of(table: TargetTable, parsed: MatrixFile) -> tuple[str, str] | None:
    names = compiled(parsed)
    if (table.upstream or next(iter(names), "")) in names:
        return None
    what = repr(table.upstream) if table.upstream else "the target's upstream"
    return "upstream", f"{what} must be of kind cuda; there is {', '.join(names) or 'none'}"


def _compiler_mistake(table: TargetTable, parsed: MatrixFile) -> tuple[str, str] | None:
    if mistake := _toolkit_mistake(table, parsed.toolkits):
        return "toolkit", mistake
    if mistake := too_early(table.cuda, table.arch):
        return "arch", mistake
    return None
