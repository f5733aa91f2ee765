"""vLLM's engine on the CPU, around kernels that run there: its scheduler, caches and sampler as they are.

vLLM's wheel for CUDA has no code for the CPU. What a model needs of it is written here in torch, one row at a
time where sums are: a row's bits depend on nothing else, as in vLLM's invariant mode on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

PLACEHOLDER = -1  # vLLM's, for tokens that a check of drafts did not reach


def _rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer, in float32, row by row."""
    wide = weight.float().t().contiguous()
    flat = x.reshape(-1, x.shape[-1]).float()
    out = torch.stack([row @ wide for row in flat]) if len(flat) else flat.new_empty(0, weight.shape[0])
    out = out if bias is None else out + bias.float()
    return out.to(x.dtype).reshape(*x.shape[:-1], weight.shape[0])


def _slots(starts: Tensor, positions: Tensor, table: Tensor, slots: Tensor, page: int) -> None:
    for n, (start, stop) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
        own = positions[start:stop]
        slots[start:stop] = table[n][own // page].long() * page + own % page
    slots[int(starts[-1]) :] = -1


def _check_greedily(
    out: Tensor, ends: Tensor, drafts: Tensor, likeliest: Tensor, bonus: Tensor, greedy: Any, longest: int
) -> None:
    start = 0
    for n, end in enumerate(ends.tolist()):
        taken = 0
        while start + taken < end:
            out[n, taken] = likeliest[start + taken]
            if drafts[start + taken] != likeliest[start + taken]:
                break
            taken += 1
        else:
            out[n, taken] = bonus.flatten()[n]
        start = end


def _store(
    keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor, *_: Any
) -> None:
    page = key_cache.shape[1]
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            key_cache[slot // page, slot % page] = keys[row]
            value_cache[slot // page, slot % page] = values[row]


def install() -> None:
    """Before vLLM's engine is imported."""
    from vllm import platforms
    from vllm.platforms.cpu import CpuPlatform
    from vllm.platforms.interface import DeviceCapability

    class Platform(CpuPlatform):
        """The CPU's, which asks the backend that somebody chose, as CUDA's does."""

        @classmethod
        def get_attn_backend_cls(cls, selected_backend: Any, attn_selector_config: Any, **_: Any) -> str:
            backend = selected_backend.get_class()
            asked = attn_selector_config._asdict()
            reasons = backend.validate_configuration(device_capability=DeviceCapability(9, 0), **asked)
            if reasons:
                raise ValueError(f"Reason: {reasons}")
            return str(selected_backend.get_path())

        @classmethod
        def is_pin_memory_available(cls) -> bool:
            return False

    platforms._current_platform = Platform()
    import vllm.utils.cpu_triton_utils as kernels
    import vllm.utils.torch_utils
    import vllm.v1.attention.backends.flash_attn as theirs
    from vllm.model_executor.layers import utils

    vllm.utils.torch_utils.PIN_MEMORY = False  # asked of the platform before
    library = torch.library.Library("_C", "FRAGMENT")
    for name, arguments in (
        ("init_cpu_memory_env", "int[] nodes"),
        ("silu_and_mul", "Tensor(a!) out, Tensor given"),
    ):
        library.define(f"{name}({arguments}) -> ()")  # looked for, and not called
        library.impl(name, lambda *_: None, "CompositeExplicitAutograd")
    Platform._kept = library
    kernels.compute_slot_mapping_kernel.func = _slots_kernel
    kernels.rejection_greedy_sample_kernel.func = lambda *a, **_: _check_greedily(*a[:7])
    kernels.expand_kernel.func = _expand
    # Of answers that are drawn at random, which a warm-up asks for and nobody reads.
    for drawn in (kernels.sample_recovered_tokens_kernel, kernels.rejection_random_sample_kernel):
        drawn.func = lambda out, *_, **__: out.zero_()
    theirs.reshape_and_cache_flash = _store
    utils.cpu_unquantized_gemm = lambda layer, x, weight, bias=None: _rows(x, weight, bias)
    utils.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: None


def _slots_kernel(
    num_tokens: int, most: int, starts: Tensor, positions: Tensor, table: Tensor, stride: int, page: int,
    slots: Tensor, *_: Any, **__: Any,
) -> None:  # fmt: skip
    _slots(starts, positions, table, slots, page)


def _expand(out: Tensor, given: Tensor, ends: Tensor, old: Any, new: Any, **_: Any) -> None:
    start = 0
    for n, end in enumerate(ends.tolist()):
        out[start:end] = new if given[n] == old else given[n]
        start = end
