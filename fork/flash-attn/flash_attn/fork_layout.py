"""Where the rows of a tensor lie: kernels load 16 bytes at once."""

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

BYTES = 16
FAR = 2**31 // 128  # the backward pass steps over 128 tokens at most, in 32 bits
_is_read_by_dynamo = torch.compiler.is_dynamo_compiling


def _holds(condition: Any) -> bool:
    """Whether it is true; of a traced program, as far as anybody knows: not if only a run tells the sizes."""
    if type(condition) is bool and not _is_read_by_dynamo():  # to Dynamo all conditions are of that type
        return condition
    from torch.fx.experimental import symbolic_shapes  # which takes long to import

    if hasattr(symbolic_shapes, "guard_or_false"):  # not in older torches
        return bool(symbolic_shapes.guard_or_false(condition))
    return bool(symbolic_shapes.guard_size_oblivious(condition))


def has_gaps(tensor: torch.Tensor) -> bool:
    """Whether the elements of a row do not follow each other."""
    return not _holds(tensor.stride(-1) == 1)


def is_aligned(tensor: torch.Tensor) -> bool:
    """Whether all rows, of the last dimension, begin at multiples of 16 bytes."""
    if type(tensor) is FakeTensor:  # lies nowhere; but rows an element apart are never all aligned
        return not any(
            _holds(stride == 1) and _holds(length > 1)
            for length, stride in zip(tensor.shape[:-1], tensor.stride(), strict=False)
        )
    rows = 0
    for stride in tensor.stride()[:-1]:
        rows |= stride
    size = tensor.element_size()
    if not (tensor.data_ptr() | rows * size) % BYTES:  # nearly all: what each call takes is up to here
        return True
    rows_apart = zip(tensor.shape[:-1], tensor.stride(), strict=False)
    used = [stride for length, stride in rows_apart if length > 1]
    return tensor.numel() == 0 or not (
        tensor.data_ptr() % BYTES or any(stride * size % BYTES for stride in used)
    )


def loadable(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The tensor, or a copy of a floating-point one whose rows are not aligned or have gaps.

    A copy for alignment's sake has its dimensions in the order of the tensor's, so that ``result_like`` gives
    both the same strides.
    """
    if tensor is None:
        return None
    if has_gaps(tensor):
        return tensor.contiguous()
    if is_aligned(tensor) or not tensor.is_floating_point():
        return tensor
    copy = tensor.clone()
    # Of rows that overlap, the order of dimensions may begin with theirs.
    return tensor.contiguous() if has_gaps(copy) else copy


def result_like(tensor: torch.Tensor) -> torch.Tensor:
    """``empty_like``, but for rows whose elements would not follow each other: kernels write whole rows."""
    result = torch.empty_like(tensor)
    if has_gaps(result):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return result


def is_far(tensor: torch.Tensor) -> bool:
    """Whether tokens, of the dimension before those of heads and elements, lie too far apart for backward."""
    return _holds(tensor.stride(-3) >= FAR) and _holds(tensor.shape[-3] > 1)


def steppable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as ``loadable`` gives it, or a contiguous copy of one that ``is_far``."""
    return tensor.contiguous() if is_far(tensor) else loadable(tensor)


def gradient_like(tensor: torch.Tensor) -> torch.Tensor:
    """``result_like``, but contiguous where the tensor ``is_far``."""
    if is_far(tensor):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return result_like(tensor)


def check(**caches: torch.Tensor) -> None:
    """Raises ValueError for a tensor that must be used in place and whose rows are not aligned.

    One whose head dim is no multiple of 8 is not used in place: it is padded, in a copy.
    """
    for name, cache in caches.items():
        if cache.shape[-1] % 8 == 0 and not is_aligned(cache):
            raise ValueError(
                f"{name} (strides {cache.stride()}, begun {cache.data_ptr() % BYTES} bytes past a "
                f"multiple of {BYTES}) has rows that begin at no multiple of {BYTES} bytes: a cache "
                "is used in place, so allocate one whose rows do"
            )
