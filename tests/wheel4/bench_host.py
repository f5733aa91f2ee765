"""What calls of the installed flash_attn.cute take on the host: the first of a kind, and one like an earlier one.

    PYTHONPATH=…/tests/wheel python tests/wheel4/bench_host.py

A GPU is needed: launches are part of the time, and waiting for the GPU is not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from flash_attn.cute import flash_attn_func, flash_attn_with_kvcache, set_deterministic_mode
from timing import host_microseconds


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float16, device="cuda")


def calls() -> dict[str, Callable[[], Any]]:
    q, cache = normal(1, 1, 32, 64), [normal(1, 8192, 8, 64) for _ in range(2)]
    short = [normal(1, 256, 8, 64) for _ in range(2)]
    prompt, long = [normal(1, 128, 8, 64) for _ in range(3)], [normal(1, 8192, 8, 64) for _ in range(3)]
    filled = torch.tensor([8000], dtype=torch.int32, device="cuda")
    return {
        "decode on 256 keys": lambda: flash_attn_func(q, *short),
        "decode on 8192 keys": lambda: flash_attn_func(q, *cache),
        "prefill of 128": lambda: flash_attn_func(*prompt, causal=True),
        "prefill of 8192": lambda: flash_attn_func(*long, causal=True),
        "flash_attn_with_kvcache": lambda: flash_attn_with_kvcache(q, *cache, cache_seqlens=filled),
    }


REPEATS = 300  # of calls in a row, of which the least counts


def main() -> None:
    for enabled in (False, True):
        set_deterministic_mode(enabled, 2048)
        for name, call in calls().items():
            torch.cuda.synchronize()
            began = time.perf_counter()
            call()
            torch.cuda.synchronize()
            first = time.perf_counter() - began
            mode = "on" if enabled else "off"
            print(
                f"{name}, mode {mode}: {host_microseconds(call, REPEATS):.1f} microseconds; the first {first:.3f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
