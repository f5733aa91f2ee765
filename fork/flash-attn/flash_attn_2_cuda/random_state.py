"""Dropout's random state: seed and offset of torch's generator, as stock's extension takes them."""

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
        seed and offset (int64); and in a CUDA graph capture, tensors that a replay finds them in.
    """
    if generator is None:
        index = torch.cuda.current_device() if device.index is None else device.index
        generator = torch.cuda.default_generators[index]
    if torch.cuda.is_current_stream_capturing():
        return _captured(generator, device, increment)
    with _drawing:
        offset = generator.get_offset()
        generator.set_offset(offset + (increment + 3) // 4 * 4)
        return _signed(generator.initial_seed()), offset, None, None


def _signed(word: int) -> int:
    """64 bits as a signed number."""
    return word - (1 << 64) if word >> 63 else word


def _captured(generator: torch.Generator, device: torch.device, increment: int) -> State:
    reserve = _reserving(generator)
    if reserve is not None:
        seed, offset, intragraph = reserve(increment)
        if intragraph.device.type == "cpu":
            return 0, int(intragraph), seed, offset
        return 0, 0, seed, offset + intragraph
    if generator is torch.cuda.default_generators[device.index or 0]:
        return _reserved_by_attention(device, increment)
    return _drawn(generator, device)


def _reserving(generator: torch.Generator) -> Callable[[int], Any] | None:
    """What reserves numbers and gives seed, offset and what to add to it, as tensors.

    A method from torch 2.14 on, and in 2.13 an operator of the compiler's.
    """
    method: Callable[[int], Any] | None = getattr(generator, "philox_state", None)
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
