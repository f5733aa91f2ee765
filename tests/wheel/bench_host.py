"""Microseconds that a warm call at batch 1 keeps the caller's thread, through the public functions.

    PYTHONPATH=SITE python tests/wheel/bench_host.py --against OTHER_SITE --json host.json

SITE and OTHER_SITE are folders that wheels were installed to. Each round measures both in a process of its own, by turns.
A host may be half again as slow for seconds, so of all rounds the least counts, and the ratio is that of these. A GPU is
needed: launches are part of the time, and waiting for the GPU is not.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROUNDS = 4


def calls() -> dict[str, Callable[[], Any]]:
    import torch
    from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.float16)

    new = normal(1, 1, 32, 64)
    cache, longer = ([normal(1, tokens, 8, 64) for _ in range(2)] for tokens in (128, 2048))
    inputs = [normal(1, 64, 8, 64) for _ in range(3)]
    learned = [tensor.clone().requires_grad_() for tensor in inputs]
    packed = [tensor[0] for tensor in inputs]
    length, more = (torch.tensor([tokens], dtype=torch.int32, device="cuda") for tokens in (128, 2048))
    offsets = torch.tensor([0, 64], dtype=torch.int32, device="cuda")
    heads_first = [tensor.transpose(1, 2) for tensor in inputs]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return {
        "flash_attn_with_kvcache": lambda: flash_attn_with_kvcache(
            new, *cache, cache_seqlens=length, causal=True
        ),
        # With the mode off in several splits, for which a call has scratch and a second kernel
        "flash_attn_with_kvcache, 2048 keys": lambda: flash_attn_with_kvcache(
            new, *longer, cache_seqlens=more, causal=True
        ),
        "flash_attn_func": lambda: flash_attn_func(*inputs, causal=True),
        "flash_attn_func, with gradients": lambda: flash_attn_func(*learned, causal=True),
        "flash_attn_varlen_func": lambda: flash_attn_varlen_func(
            *packed, offsets, offsets, 64, 64, causal=True
        ),
        "two torch.empty": lambda: (torch.empty_like(inputs[0]), torch.empty(8, 64, device="cuda")),
        "PyTorch's SDPA": lambda: sdpa(*heads_first, is_causal=True),
    }


def measured() -> dict[str, float]:
    """Microseconds by call and mode, and seconds that importing flash_attn takes beyond torch."""
    from timing import CALLS, host_microseconds  # with torch

    began = time.perf_counter()
    from flash_attn import set_deterministic_mode

    found = {"import of flash_attn, s": time.perf_counter() - began}
    for enabled in (False, True):
        set_deterministic_mode(enabled)
        for name, call in calls().items():
            for _ in range(CALLS):
                call()
            found[f"{name}, {'on' if enabled else 'off'}"] = host_microseconds(call)
    return found


def _in_a_process(site: str | None) -> dict[str, float]:
    path = os.pathsep.join(filter(None, [site, os.environ.get("PYTHONPATH")]))
    command = [sys.executable, __file__, "--here"]
    told = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, check=True, stdout=subprocess.PIPE)
    return dict(json.loads(told.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", metavar="SITE", help="the other wheel's folder")
    parser.add_argument("--json", type=Path, help="write every figure here")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        print(json.dumps(measured()))
        return
    rounds = []
    for _ in range(ROUNDS):
        both = {"this": _in_a_process(None)}
        if arguments.against:
            both["other"] = _in_a_process(arguments.against)
        rounds.append(both)
    rows = {
        name: {side: min(one[side][name] for one in rounds) for side in rounds[0]}
        for name in rounds[0]["this"]
    }
    for name, row in rows.items():
        ratio = f"  {row['this'] / row['other']:.2f} x {row['other']:8.2f}" if "other" in row else ""
        print(f"{name:40} {row['this']:8.2f}{ratio}")
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"format": 1, "rows": rows, "rounds": rounds}, indent=1) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
