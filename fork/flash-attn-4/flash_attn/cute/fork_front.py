"""The public functions' front door: operators where a call is traced, errors in our words where one failed.

A call that failed is looked at again, argument by argument. One that works pays for none of it.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from flash_attn.cute import fork_traced

__all__ = ["door"]

_is_compiling = torch.compiler.is_compiling
_PACKED_DIMS = 3
_DTYPES = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
_SINK_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def door(function: Callable[..., Any]) -> Callable[..., Any]:
    """The public function, behind the front door."""
    traced = fork_traced.traced(function)
    names = list(inspect.signature(function).parameters)
    at = names.index("cu_seqlens_q") if "cu_seqlens_q" in names else None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _is_compiling():
            return traced(*args, **kwargs)
        try:
            if at is not None:
                table = args[at] if len(args) > at else kwargs.get("cu_seqlens_q")
                q = args[0] if args else kwargs.get("q")
                if table is not None and q is not None and q.dim() != _PACKED_DIMS:
                    explain(function, args, kwargs)  # upstream reads a batch as packed sequences
            return function(*args, **kwargs)
        except Exception:
            explain(function, args, kwargs)
            raise

    return call


def explain(function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Raise an error that names the argument, if a failed call has one that no call takes.

    Raises:
        TypeError: an argument that is no tensor.
        ValueError: an argument that does not fit the others.
    """
    try:
        given = inspect.signature(function).bind(*args, **kwargs).arguments
    except TypeError:
        return  # Python's error names it
    if given.get("qv") is not None or given.get("gather_kv_indices") is not None:
        return  # another attention, whose errors have words
    for name in ("q", "k", "v", *_LENGTHS, "page_table", "learnable_sink"):
        value = given.get(name)
        if not isinstance(value, torch.Tensor) and (value is not None or name in ("q", "k", "v")):
            raise TypeError(f"{name} must be a torch.Tensor on the GPU; it is a {type(value).__name__}")
    _check_tensors(given)
    _check_tables(given)
    _check_rest(given)


def _expect(holds: bool, error: str) -> None:
    if not holds:
        raise ValueError(error) from None


_LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")


def _batch(given: Any) -> int:
    table = given.get("cu_seqlens_q")
    return int(given["q"].shape[0] if table is None else table.numel() - 1)


def _check_tensors(given: Any) -> None:
    q, k, v = (given[name] for name in "qkv")
    in_pages = given.get("page_table") is not None
    _expect(
        not in_pages or given.get("cu_seqlens_k") is None,
        "page_table does not go with cu_seqlens_k: seqused_k tells how long sequences in pages are",
    )
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        table = "cu_seqlens_q" if name == "q" else "cu_seqlens_k"
        is_packed = given.get(table) is not None
        first = ("total",) if is_packed else ("pages", "page size") if in_pages and name != "q" else _DENSE
        words = ", ".join((*first, "heads" if name == "q" else "heads_k", "head_dim"))
        why = f"with {table}" if is_packed else "in pages" if first[0] == "pages" else f"without {table}"
        _expect(
            tensor.dim() == len(first) + 2,
            f"{name} must have shape ({words}) {why}; it has {list(tensor.shape)}",
        )
        _expect(tensor.dtype in _DTYPES, f"{name} must have dtype float16 or bfloat16; it has {tensor.dtype}")
        _expect(tensor.dtype == q.dtype, f"{name} must have q's dtype, {q.dtype}; it has {tensor.dtype}")
        _expect(tensor.device.type == "cuda", f"{name} must be on CUDA; it is on {tensor.device}")
        _expect(
            tensor.device == q.device, f"{name} must be on q's device, {q.device}; it is on {tensor.device}"
        )
    if given.get("cu_seqlens_k") is None and not in_pages:
        batch = _batch(given)
        _expect(k.shape[0] == batch, f"k must have a batch of {batch}, as q; it has shape {list(k.shape)}")
    _expect(
        v.shape[:-1] == k.shape[:-1],
        f"v must have k's shape, {list(k.shape)}, but for head_dim; it has {list(v.shape)}",
    )
    _expect(
        k.shape[-1] == q.shape[-1],
        f"k must have q's head_dim, {q.shape[-1]}; it has shape {list(k.shape)}",
    )
    heads, heads_k = q.shape[-2], k.shape[-2]
    _expect(
        heads_k > 0 and heads % heads_k == 0,
        f"heads of k ({heads_k}) must divide heads of q ({heads})",
    )


_DENSE = ("batch", "seqlen")


def _check_tables(given: Any) -> None:
    batch, device = _batch(given), given["q"].device
    for name in (*_LENGTHS, "page_table"):
        table = given.get(name)
        if table is None:
            continue
        _expect(table.dtype == torch.int32, f"{name} must have dtype int32; it has {table.dtype}")
        _expect(table.device == device, f"{name} must be on q's device, {device}; it is on {table.device}")
        if name == "page_table":
            _expect(
                table.dim() == 2 and table.shape[0] == batch,
                f"page_table must have shape (batch, pages of a sequence), with a batch of {batch}; "
                f"it has {list(table.shape)}",
            )
            _expect(table.stride(-1) == 1, "page_table must be contiguous in its last dimension")
            continue
        entries = batch + name.startswith("cu_")
        words = "batch + 1" if name.startswith("cu_") else "batch"
        _expect(
            tuple(table.shape) == (entries,),
            f"{name} must have shape ({words}), which is [{entries}] here; it has {list(table.shape)}",
        )
        _expect(table.stride(0) == 1, f"{name} must be contiguous")


def _check_rest(given: Any) -> None:
    sink, heads = given.get("learnable_sink"), given["q"].shape[-2]
    if sink is not None:
        _expect(
            tuple(sink.shape) == (heads,),
            f"learnable_sink must have shape (heads), which is [{heads}] here; it has {list(sink.shape)}",
        )
        _expect(
            sink.dtype in _SINK_DTYPES,
            f"learnable_sink must have dtype float16, bfloat16 or float32; it has {sink.dtype}",
        )
    window = given.get("window_size", (None, None))
    _expect(
        isinstance(window, (tuple, list)) and len(window) == 2,
        f"window_size must be (left, right), of ints or None; it is {window!r}",
    )
