"""What this build of flash_attn is made of."""

import json
from pathlib import Path
from typing import Any

import flash_attn_2_cuda as flash_attn_gpu

from . import fork_kernels

__all__ = ["fork_info"]


def fork_info() -> dict[str, Any]:
    """Describe this build: what it was made from and which kernels it holds.

    Returns:
        ``kernels``: list of str, one name a kernel file compiled into the extension, such as
        ``"split_hdim64_fp16_causal"``, and ``attn_bias``: bool, whether they take attn_mask and attn_bias;
        read from the extension itself. ``runs_on``: the kernels that are chosen
        (:mod:`flash_attn.fork_kernels`), how many calls each ran, and the provenance of ``flash_attn_4``. The
        other keys are those of ``flash_attn/_fork.json``, which the wheel build writes: the upstream version
        and commit, the patches and the commit they end in, architectures, compiler, flags. They are absent
        from an extension that was compiled by hand.
    """
    provenance = Path(__file__).with_name("_fork.json")
    info: dict[str, Any] = json.loads(provenance.read_text(encoding="utf-8")) if provenance.exists() else {}
    info["kernels"] = list(flash_attn_gpu.kernel_set())
    info["attn_bias"] = flash_attn_gpu.has_attn_bias
    info["runs_on"] = fork_kernels.told()
    return info
