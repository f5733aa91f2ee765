"""What the deterministic mode asks of a forward call, on the host.

Two things to know of packed calls. Kernels load whole tiles of values, also past a sequence's end, and give
those a weight of 0: NaN or Inf there, be it a neighbour's or the unused end of a buffer, reaches the
sequence's rows, with the mode on or off. And a ``max_seqlen`` that is a tensor on the GPU is read on the host
with the mode on: the call waits for the GPU, and cannot be captured in a CUDA graph.
"""

import math
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from cutlass import Int32
from flash_attn.cute import fork_places, fork_tiles
from flash_attn.cute.cache_utils import get_jit_cache
from flash_attn.cute.cute_dsl_utils import to_cute_tensor
from flash_attn.cute.fork_chunks import KernelChunks
from flash_attn.cute.fork_combine import CombineChunks, Sight
from flash_attn.cute.fork_compile import cute
from flash_attn.cute.fork_mode import DeterministicMode

PATHS = (None, "walked", "spread", "walked in memory")
_MOST_BLOCKS = 65535  # in a grid's second and third direction
_test_path: str | None = None
_kernels: Any = get_jit_cache("fwd_combine_chunks")  # that combine, as they are compiled


def force_path(path: str | None) -> str | None:
    """For tests: walk or spread each call's chunks, whatever its shape (None: as ever); the one before."""
    global _test_path
    if path not in PATHS:
        raise ValueError(f"path={path!r} is none of {PATHS}")
    before, _test_path = _test_path, path
    return before


def forced() -> str | None:
    """What tests force at the moment."""
    return _test_path


class Call(NamedTuple):
    """A forward call, as far as its chunks follow from it."""

    head_dims: tuple[int, int]
    heads: int
    rows: int  # queries of all sequences
    seqlen_k: int  # of the longest sequence
    keys: int  # elements of k of one sequence of that length
    tiles: int  # of rows: thread blocks of one head without chunks
    grid_heads: int  # of those tiles
    num_sms: int
    can_walk: bool
    has_room: bool  # in shared memory, for a running result
    few_rows: bool  # whether a tile has the rows of one warpgroup, which reads keys and does little else


class Chunks(NamedTuple):
    """The chunks of a call's keys."""

    size: int
    number: int
    kernel: KernelChunks


def row_tiles(batch: int, longest: int, rows: int, tile_m: int) -> int:
    """At most so many tiles have the rows of all sequences, of which the longest has so many."""
    return min(batch * math.ceil(longest / tile_m), rows // tile_m + batch)


def covers(mode: DeterministicMode, arch: int, head_dims: tuple[int, int], is_sparse: bool) -> bool:
    """Whether a call's keys are cut into chunks with the mode on; others keep one split, as upstream.

    Raises:
        NotImplementedError: the mode is on, and the GPU is not of compute capability 9.x.
    """
    if not mode.enabled:
        return False
    if arch // 10 != 9:
        raise NotImplementedError(
            f"deterministic mode of flash_attn.cute covers compute capability 9.x; this GPU's is {arch / 10}"
        )
    return not is_sparse and fork_tiles.keys_of_block(head_dims) is not None


def num_splits_of_call(mode: DeterministicMode, num_splits: int) -> int:
    """1 with the mode on, whose chunks decide where keys are split; a caller's number earns a warning."""
    if not mode.enabled:
        return num_splits
    if num_splits > 1:
        _warn_of_splits()
    return 1


@cache
def _warn_of_splits() -> None:
    warnings.warn(
        "flash_attn.cute: in deterministic mode split_size decides where keys are split; "
        "num_splits was not used",
        stacklevel=4,
    )


def scratch(call: Call) -> int:
    """The bytes that partial results may take: half of q, out and the longest k and v; or 64 MiB."""
    queries = call.rows * call.heads * call.head_dims[1]
    return max(2 * (queries + call.keys), 64 << 20)


def chunks_of_call(mode: DeterministicMode, call: Call, tile_n: int) -> Chunks | None:
    """The chunks of a call that the mode covers; None where all keys fit one.

    They are spread where the call's tiles would not fill the GPU, if there is memory. The bits are the same.

    Raises:
        ValueError: a split_size that is no multiple of the keys in a block.
    """
    size = mode.split_size
    if size % tile_n:
        raise ValueError(
            f"deterministic mode: split_size={size} is not a multiple of {tile_n}, the keys in a block at "
            f"head_dim {call.head_dims[0]}; valid values are {tile_n}, {2 * tile_n}, {3 * tile_n}, …"
        )
    count = math.ceil(call.seqlen_k / size)
    if count <= 1 and _test_path is None:
        return None
    partial_results = 4 * count * call.rows * call.heads * call.head_dims[1]
    fits = partial_results <= scratch(call) and count * call.grid_heads <= _MOST_BLOCKS
    filled = (4 if call.few_rows else 0.8) * call.num_sms
    spread = not call.can_walk or (fits and call.tiles * call.grid_heads < filled)
    in_memory = not call.has_room
    if _test_path is not None:
        spread, in_memory = _test_path == "spread", in_memory or _test_path == "walked in memory"
    return Chunks(size, count, KernelChunks(size // tile_n, spread, in_memory and not spread))


def allocate(chunks: Chunks | None, out: torch.Tensor, tile_m: int) -> tuple[torch.Tensor | None, ...]:
    """Where partial results of a spread call go: accumulators, and each row's largest score and sum.

    For a walking one, the places of running results in memory, if it has any.
    """
    if chunks is not None and chunks.kernel.in_memory:
        return fork_places.allocate(tile_m, out.shape[-1], out)
    if chunks is None or not chunks.kernel.spread:
        return None, None
    accumulators = out.new_empty((chunks.number, *out.shape), dtype=torch.float32)
    return accumulators, out.new_empty((2, chunks.number, *out.shape[:-1]), dtype=torch.float32)


def combine(
    chunks: Chunks,
    partial: tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    lse: torch.Tensor | None,
    dtype: Any,  # of CuTe DSL
    sight: Sight,
    softmax_scale: float,
    scores_are_scaled: bool,
    seqlen_k: int,  # of each sequence, where no tensor of lengths says otherwise
    lengths: tuple[torch.Tensor | None, ...],  # cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k
    window: tuple[int | None, int | None],
    learnable_sink: torch.Tensor | None,
    launch: bool,
) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """Folds partial results into out and lse; only compiles for that where not to launch.

    Returns:
        The kernel, and its arguments after lse.
    """
    present = tuple(t is not None for t in (lse, *lengths, *window, learnable_sink))
    sink_type = None if learnable_sink is None else str(learnable_sink.dtype)
    key = (dtype, out.shape[-1], chunks.size, sight, scores_are_scaled, out.dim(), present, sink_type)
    if key not in _kernels:
        vectors = [
            None if t is None else to_cute_tensor(t, assumed_align=4, leading_dim=0)
            for t in (*lengths, learnable_sink)
        ]
        _kernels[key] = cute.compile(
            CombineChunks(dtype, out.shape[-1], chunks.size, sight, scores_are_scaled),
            to_cute_tensor(partial[0]),
            to_cute_tensor(partial[1], assumed_align=4),
            to_cute_tensor(out),
            None if lse is None else to_cute_tensor(lse, assumed_align=4),
            softmax_scale,
            Int32(seqlen_k),
            *vectors[:-1],
            *window,
            vectors[-1],
            cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
            options="--enable-tvm-ffi",
        )
    kernel, options = _kernels[key], (softmax_scale, seqlen_k, *lengths, *window, learnable_sink)
    if launch:
        kernel(*partial, out, lse, *options)
    return kernel, options
