"""Which kernels a call needs, as ``flash_attn.fork_info()["kernels"]`` names them."""

from __future__ import annotations

from collections.abc import Iterable

DIMS = (32, 64, 96, 128, 192, 256)
PASSES = ("fwd", "split", "bwd")
SUFFIXES = ("", "_causal")


def needed(
    head_dim: int, dtype: str, passes: Iterable[str] = PASSES, suffixes: Iterable[str] = SUFFIXES
) -> set[str]:
    """Kernels of some passes, full and causal, for a head dim, which is rounded up to the next that there are kernels of."""
    dim = next(dim for dim in DIMS if head_dim <= dim)
    return {f"{p}_hdim{dim}_{dtype}{suffix}" for p in passes for suffix in suffixes}
