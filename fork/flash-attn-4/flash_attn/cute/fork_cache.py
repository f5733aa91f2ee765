"""What a compiled kernel is made of besides flash_attn.cute's sources and the call's options."""

import os
from functools import lru_cache

import cutlass
import quack
from cutlass.base_dsl import BaseDSL
from flash_attn.cute import fa_logging

# Variables that choose or steer the compiler.
_VARIABLES = ("CUTE_DSL_PTXAS_PATH", "CUTE_DSL_COMPILER_OPT")


def toolchain() -> bytes:
    """What the versions of Python, CUTLASS and TVM FFI do not tell: the same for all kernels of a process."""
    facts = {
        "quack": quack.__version__,
        "cuda": str(cutlass.CUDA_VERSION),
        **{name: os.environ.get(name, "") for name in _VARIABLES},
    }
    return "".join(f"{name}={value}\n" for name, value in facts.items()).encode()


@lru_cache(maxsize=1)
def _architecture() -> str:
    return str(BaseDSL._get_dsl().get_arch_enum())


def target() -> bytes:
    """The GPU that kernels are compiled for, and whether they print. Not for import time: CUDA is asked."""
    return f"arch={_architecture()}\nlog={fa_logging.get_fa_log_level()}\n".encode()
