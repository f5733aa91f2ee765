"""The GPU that calls run on; or, where there is none, the one that they are compiled for.

flash_attn.cute and CUTLASS read the environment when they are imported, so ``prepare`` comes before that.
"""

from __future__ import annotations

import json
import os
from importlib import metadata
from pathlib import Path
from typing import Any

import compiled
import torch

CONTRACT_FORMAT = 1
GPU = torch.cuda.is_available()
# Of the first GPU of each: its number of multiprocessors chooses a schedule, and none of the bits.
_MULTIPROCESSORS = {"sm_80": 108, "sm_90": 132, "sm_100": 148, "sm_120": 188}
_ACCELERATED = ("sm_90", "sm_100", "sm_120")  # CUTLASS wants sm_90a there


def prepare(kernels: Path, architecture: str, remembered: Path | None = None) -> None:
    """Set the environment that flash_attn.cute reads, also for processes that this one starts.

    Args:
        kernels: where compiled kernels are kept; without a GPU, where is noted what this run has compiled.
        architecture: what to compile for where there is no GPU.
        remembered: where is noted, there, what any run has compiled.
    """
    os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] = str(int(GPU))
    os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"] = str(kernels)
    if not GPU:
        os.environ.update(environment_for(architecture))
        os.environ[compiled.FOLDER] = str(kernels)
        os.environ[compiled.REMEMBERED] = str(remembered or "")


def environment_for(architecture: str) -> dict[str, str]:
    """The environment that compiles for an architecture without a GPU.

    Raises:
        KeyError: it is none that this suite knows.
    """
    return {
        "CUTE_DSL_ARCH": architecture + "a" * (architecture in _ACCELERATED),
        "FLASH_ATTENTION_ARCH": architecture,
        "FLASH_ATTENTION_NUM_SMS": str(_MULTIPROCESSORS[architecture]),
    }


def architecture() -> str:
    """The one that calls are compiled for, such as sm_90."""
    if GPU:
        major, minor = torch.cuda.get_device_capability()
        return f"sm_{major}{minor}"
    return os.environ["FLASH_ATTENTION_ARCH"]


def multiprocessors() -> int:
    """Those of the GPU that calls are compiled for, where there is none."""
    return int(os.environ["FLASH_ATTENTION_NUM_SMS"])


def toolchain() -> dict[str, str]:
    """The versions that kernels are compiled with; a distribution that was only unpacked has none."""
    import cutlass
    import quack

    found = {"nvidia-cutlass-dsl": cutlass.__version__, "quack-kernels": quack.__version__}
    for name in ("apache-tvm-ffi", "torch-c-dlpack-ext"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "unknown"
    return {**found, "cuda": ".".join(map(str, (cutlass.CUDA_VERSION.major, cutlass.CUDA_VERSION.minor)))}


def write_contract(path: Path, cells: list[dict[str, Any]]) -> None:
    """Write the contract's table, with what it was seen on."""
    document = {
        "format": CONTRACT_FORMAT,
        "gpu": torch.cuda.get_device_name(0) if GPU else None,
        "architecture": architecture(),
        "torch": torch.__version__,
        "toolchain": toolchain(),
        "cells": cells,
    }
    aside = path.with_name(path.name + ".part")
    aside.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    aside.replace(path)
