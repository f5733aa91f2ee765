"""What a call on a cache asks of its arguments. The first that does not fit is one error that names it."""

from typing import NamedTuple

import torch
from flash_attn.cute.cute_dsl_utils import _is_aligned_layout
from flash_attn.cute.fork_mode import get_deterministic_mode
from torch import Tensor

_ONE_SPLIT = (8, 9, 12)  # the major parts of compute capabilities whose kernels have one, as released
_SINK_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class Cache(NamedTuple):
    """The tensors of a call; ``flash_attn_with_kvcache`` has their shapes."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    k: Tensor | None
    v: Tensor | None
    rotary_cos: Tensor | None
    rotary_sin: Tensor | None
    cache_seqlens: int | Tensor | None
    cache_batch_idx: Tensor | None
    cache_leftpad: Tensor | None
    table: Tensor | None
    learnable_sink: Tensor | None = None
    out: Tensor | None = None

    @property
    def capacity(self) -> int:
        """Tokens that a sequence may have."""
        tokens: int = self.k_cache.shape[1]
        return tokens if self.table is None else tokens * self.table.shape[1]


def _expect(holds: bool, error: str) -> None:
    if not holds:
        raise ValueError(error)


def _has_shape(name: str, tensor: Tensor, shape: tuple[int, ...], words: str) -> None:
    _expect(
        tuple(tensor.shape) == shape,
        f"{name} must have shape ({words}), which is {list(shape)} here; it has {list(tensor.shape)}",
    )


def _is_int32(name: str, tensor: Tensor) -> None:
    _expect(tensor.dtype == torch.int32, f"{name} must have dtype int32; it has {tensor.dtype}")


def check(cache: Cache) -> None:
    """Before anything is appended.

    Raises:
        ValueError: an argument does not fit the others.
        NotImplementedError: cache_leftpad, which these kernels do not take.
    """
    if cache.cache_leftpad is not None:
        raise NotImplementedError("flash_attn.cute.flash_attn_with_kvcache does not support cache_leftpad")
    for name in ("q", "k_cache", "v_cache", "k", "v"):
        tensor = getattr(cache, name)
        _expect(
            tensor is None or tensor.dim() == 4,
            f"{name} must have 4 dimensions; it has shape {None if tensor is None else list(tensor.shape)}",
        )
    _check_tensors(cache)
    _check_caches(cache)
    _check_tables(cache)
    if cache.k is not None or cache.v is not None:
        if cache.k is None or cache.v is None:
            raise ValueError("k and v go together: new keys and their values")
        _check_new(cache, cache.k, cache.v)
    if cache.rotary_cos is not None or cache.rotary_sin is not None:
        if cache.rotary_cos is None or cache.rotary_sin is None:
            raise ValueError("rotary_cos and rotary_sin go together")
        _check_rotary(cache, cache.rotary_cos, cache.rotary_sin)
    if cache.learnable_sink is not None:
        _check_sink(cache, cache.learnable_sink)
    if cache.out is not None:
        _check_out(cache, cache.out)


def check_splits(num_splits: int, arch: int) -> None:
    """Raise for splits that kernels of this GPU do not have.

    Args:
        num_splits: what the caller asks for; with the mode on it is warned about, and not refused.
        arch: ten times the compute capability.

    Raises:
        NotImplementedError: more than one where kernels have one.
    """
    if num_splits > 1 and arch // 10 in _ONE_SPLIT and not get_deterministic_mode().enabled:
        raise NotImplementedError(
            f"num_splits={num_splits}: kernels of compute capability {arch / 10} have one split; give 0 "
            "or 1, or switch the deterministic mode on, which cuts keys at multiples of split_size"
        )


def _check_tensors(cache: Cache) -> None:
    q = cache.q
    _expect(
        q.dtype in (torch.float16, torch.bfloat16),
        f"FlashAttention only supports fp16 and bf16; q has {q.dtype}",
    )
    for name, tensor in cache._asdict().items():
        if not isinstance(tensor, Tensor):
            continue
        _expect(tensor.device == q.device, f"{name} is on {tensor.device}, q on {q.device}")
        floats = name not in ("cache_seqlens", "cache_batch_idx", "table", "learnable_sink")
        _expect(
            not floats or tensor.dtype == q.dtype,
            f"query and {name} must have the same dtype; they have {q.dtype} and {tensor.dtype}",
        )
    _expect(q.device.type == "cuda", f"q must be on CUDA; it is on {q.device}")


def _check_caches(cache: Cache) -> None:
    q, k_cache, v_cache = cache.q, cache.k_cache, cache.v_cache
    head_dims = (q.shape[3], v_cache.shape[3])
    _expect(
        all(size % 16 == 0 for size in head_dims),  # what upstream's loader of pages takes
        f"head dims must be multiples of 16; q and v_cache have {head_dims[0]} and {head_dims[1]}",
    )
    first, second, heads_k = k_cache.shape[:3]
    words = "pages, page size" if cache.table is not None else "sequences, capacity"
    _has_shape("k_cache", k_cache, (first, second, heads_k, head_dims[0]), f"{words}, heads_k, head_dim")
    _has_shape("v_cache", v_cache, (first, second, heads_k, head_dims[1]), f"{words}, heads_k, head_dim")
    _expect(
        heads_k > 0 and q.shape[2] % heads_k == 0,
        "Number of heads in key/value must divide number of heads in query; "
        f"they are {heads_k} and {q.shape[2]}",
    )
    for name, tensor in (("k_cache", k_cache), ("v_cache", v_cache)):
        _expect(
            tensor.numel() == 0 or (_is_aligned_layout(tensor, 16) and 0 not in tensor.stride()),
            f"{name} (strides {tensor.stride()}) must have a contiguous last dimension, and rows that begin "
            "at multiples of 16 bytes: a cache is used in place",
        )
    _expect(
        cache.table is not None or cache.cache_batch_idx is not None or first >= q.shape[0],
        f"k_cache has {first} sequences, fewer than q, which has {q.shape[0]}; "
        "cache_batch_idx says which are whose",
    )


def _check_tables(cache: Cache) -> None:
    batch = cache.q.shape[0]
    if isinstance(cache.cache_seqlens, Tensor):
        _is_int32("cache_seqlens", cache.cache_seqlens)
        _has_shape("cache_seqlens", cache.cache_seqlens, (batch,), "batch")
    if cache.cache_batch_idx is not None:
        _expect(
            cache.table is None, "cache_batch_idx does not go with pages, whose table says whose they are"
        )
        _is_int32("cache_batch_idx", cache.cache_batch_idx)
        _has_shape("cache_batch_idx", cache.cache_batch_idx, (batch,), "batch")
    if cache.table is not None:
        _is_int32("page_table", cache.table)
        shape = list(cache.table.shape)
        _expect(cache.table.dim() == 2, f"page_table must have 2 dimensions; it has shape {shape}")
        _has_shape("page_table", cache.table, (batch, cache.table.shape[1]), "batch, pages of a sequence")


def _check_new(cache: Cache, k: Tensor, v: Tensor) -> None:
    _expect(cache.cache_seqlens is not None, "cache_seqlens must be given with k and v: where to append")
    batch, new = cache.q.shape[0], k.shape[1]
    heads_k = cache.k_cache.shape[2]
    words = "batch, seqlen_new, heads_k, head_dim"
    _has_shape("k", k, (batch, new, heads_k, cache.q.shape[3]), words)
    _has_shape("v", v, (batch, new, heads_k, cache.v_cache.shape[3]), words)
    _expect(new <= cache.capacity, f"k has {new} tokens, more than the {cache.capacity} of the cache")


def _check_rotary(cache: Cache, cos: Tensor, sin: Tensor) -> None:
    _expect(cache.k is not None, "rotary_cos and rotary_sin go with k and v, which they turn")
    _expect(cos.dim() == 2, f"rotary_cos must have 2 dimensions; it has shape {list(cos.shape)}")
    _has_shape("rotary_sin", sin, tuple(cos.shape), "positions, rotary_dim / 2")
    rotary_dim = 2 * cos.shape[1]
    _expect(
        rotary_dim % 16 == 0 and rotary_dim <= cache.q.shape[3],
        "rotary_dim must be a multiple of 16 and at most head_dim; "
        f"they are {rotary_dim} and {cache.q.shape[3]}",
    )
    _expect(
        cos.shape[0] >= cache.capacity,
        f"rotary_cos has {cos.shape[0]} positions, fewer than the {cache.capacity} tokens of the cache",
    )


def _check_sink(cache: Cache, sink: Tensor) -> None:
    _has_shape("learnable_sink", sink, (cache.q.shape[2],), "heads")
    _expect(
        sink.dtype in _SINK_DTYPES,
        f"learnable_sink must have dtype float16, bfloat16 or float32; it has {sink.dtype}",
    )


def _check_out(cache: Cache, out: Tensor) -> None:
    """Rows that do not fit the cache are made NaN in it, by the sizes of q."""
    shape = (*cache.q.shape[:3], cache.v_cache.shape[3])
    _has_shape("out", out, shape, "batch, seqlen_q, heads, head_dim of v")
    _expect(
        out.numel() == 0 or (_is_aligned_layout(out, 16) and 0 not in out.stride()),
        f"out (strides {out.stride()}) must have a contiguous last dimension, rows that begin at multiples "
        "of 16 bytes, and no dimension that is one element many times",
    )
