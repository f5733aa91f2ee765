"""The mutations, as ``mutations.toml`` has them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from scripts.base.errors import UsageError

# Not tomlkit: of a key that is there twice it names no line.
if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TABLE = Path(__file__).with_name("mutations.toml")


class Mutation(BaseModel):
    """One mistake, and what should notice it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    keeps: str  # what it breaks, as a fact that holds without it
    kind: Literal["program", "python", "kernel"]  # of scripts/, of the fork's Python, of its C++ and CUDA
    ring: Literal["unit", "path", "emulated"]
    file: str  # of this repository
    old: str
    new: str
    tests: tuple[str, ...]  # for the ring unit files or cases of pytest, for the others words of its -k
    kernels: str = "hdim32,fp16,fwd,causal"  # for the ring path: one file, of the path that most calls take


def read(path: Path = TABLE) -> dict[str, Mutation]:
    """The mutations of a table, by name.

    Raises:
        UsageError: it is malformed.
    """
    try:
        return TypeAdapter(dict[str, Mutation]).validate_python(tomllib.loads(path.read_text("utf-8")))
    except (tomllib.TOMLDecodeError, ValidationError) as e:
        raise UsageError(f"{path}: {e}") from None
