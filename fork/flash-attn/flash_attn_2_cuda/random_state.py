"""Dropout's random state: seed and offset of torch's generator, as stock's extension takes them.

torch's own operators read a generator's offset and move it while they hold the generator's lock, which Python
cannot take. So where other threads may draw, an operator of torch's does both, and kernels read the numbers
on the GPU.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

State = tuple[int, int, torch.Tensor | None, torch.Tensor | None]
_drawing = threading.Lock()  # between reading an offset and moving it


def draw(generator: torch.Generator | None, device: torch.device, increment: int) -> State:
    """Take random numbers from a CUDA generator.

    Args:
        generator: None for the default one of the device.
        device: the queries'.
        increment: how many numbers each thread may take.

    Returns:
        seed and offset (int64); or, in a CUDA graph capture or beside other threads, tensors that have them.
    """
    if increment <= 0:  # a call without rows
        return 0, 0, None, None
    if generator is None:
        index = torch.cuda.current_device() if device.index is None else device.index
        generator = torch.cuda.default_generators[index]
    if torch.cuda.is_current_stream_capturing():
        return _reserved(_reserving(generator), generator, device, increment) or _drawn(generator, device)
    if threading.active_count() > 1:
        state = _reserved(_method(generator), generator, device, increment)
        if state is not None:
            return state
    with _drawing:
        offset = generator.get_offset()
        generator.set_offset(offset + (increment + 3) // 4 * 4)
        return _signed(generator.initial_seed()), offset, None, None


def _signed(word: int) -> int:
    """64 bits as a signed number."""
    return word - (1 << 64) if word >> 63 else word


def _reserved(
    reserve: Callable[[int], Any] | None, generator: torch.Generator, device: torch.device, increment: int
) -> State | None:
    """Numbers that an operator of torch's reserves: ``reserve``, or its own attention where there is none.

    None: neither does so, which before torch 2.14 is the case for generators of the caller's own.
    """
    if reserve is not None:
        return _told(*reserve(increment))
    if generator is torch.cuda.default_generators[device.index or 0]:
        return _reserved_by_attention(device, increment)
    return None


def _told(seed: torch.Tensor, offset: torch.Tensor, more: torch.Tensor) -> State:
    """What torch reserved: seed, offset, and what to add to it, each on the host or on the GPU."""
    if seed.device.type == "cpu":
        return int(seed), int(offset) + int(more), None, None
    if more.device.type == "cpu":
        return 0, int(more), seed, offset
    return 0, 0, seed, offset + more


def _method(generator: torch.Generator) -> Callable[[int], Any] | None:
    """What reserves numbers while it holds the generator's lock, from torch 2.14 on.

    It gives seed, offset and what to add to it, as tensors.
    """
    method: Callable[[int], Any] | None = getattr(generator, "philox_state", None)
    return method


def _reserving(generator: torch.Generator) -> Callable[[int], Any] | None:
    """The same for a capture, where an operator of the compiler's will do too: torch 2.13 has one."""
    method = _method(generator)
    if method is not None:
        return method
    operator = getattr(torch.ops.inductor_prims, "inductor_reserve_rng_state", None)
    return None if operator is None else functools.partial(operator, generator)


def _reserved_by_attention(device: torch.device, increment: int) -> State:
    """Where numbers will be that torch's own attention, on next to nothing, reserves: batch * heads * 32."""
    rows = increment // 32
    batch = -(-rows // 65535)
    while rows % batch:
        batch += 1
    q = torch.zeros((batch, 1, rows // batch, 8), dtype=torch.float16, device=device)
    _, _, first, second, _ = torch.ops.aten._flash_attention_forward(
        q, q, q, None, None, 1, 1, 0.5, False, False
    )
    # From torch 2.7 on both numbers are in one tensor.
    seed, offset = (first[0], first[1]) if first.numel() == 2 else (first, second)
    return 0, 0, seed, offset


def _drawn(generator: torch.Generator, device: torch.device) -> State:
    """New at each replay, but other numbers than stock's."""
    seed, offset = (
        torch.randint(0, 1 << 62, (), dtype=torch.int64, device=device, generator=generator) for _ in range(2)
    )
    return 0, 0, seed, offset
