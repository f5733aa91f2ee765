"""Calls on FlashAttention-4's kernels, by the names and arguments of flash_attn_2_cuda and with its results.

What differs between the packages is mapped here:

- windows that are open (-1 here, None there), and a softcap of 0 or less
- head dims that are no multiple of 8
- lengths of sequences in pages
- the log-sum-exp of a row that sees no key (+inf here, -inf there)
- errors, which are first looked for in this package's words

What stays different, in packed calls:

- NaN or Inf in values past a sequence's end reaches its rows; in the backward pass also such queries and
  gradients of the output. Past the end lie the next sequence, the unused rest of a buffer, and what
  ``seqused_k`` leaves out.
- Gradients in one order ask for a ``max_seqlen`` that holds: one that is too short may wait for ever or write
  out of bounds. FA2_CHECK=1 makes it a ValueError.
- A ``max_seqlen`` that is a tensor is read on the host: the call waits for the GPU, and no CUDA graph can
  hold it.
"""

import contextlib
import functools
import importlib.util
import inspect
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import flash_attn_2_cuda
import torch

own: Any = flash_attn_2_cuda  # tests put upstream's extension in its place
_Result = TypeVar("_Result")
Tensors = list[torch.Tensor]
_TARGET = os.environ.get("FLASH_ATTENTION_ARCH")  # what flash_attn.cute compiles for, whatever the GPU
_CHECK = os.environ.get("FA2_CHECK") == "1"
_LONGEST_WINDOW = 2**30  # as good as open, and a position plus it stays in 32 bits
_INSTALL = (
    "install the flash_attn_4 wheel of this project, with what it requires: "
    "nox -s build -- --upstream flash-attn-4; pip install dist/flash_attn_4-….whl"
)

# Whether they are there -------------------------------------------------------------------------------------


def check_installed() -> None:
    """Raise RuntimeError unless the wheel's files are there; imports none of them."""
    spec = importlib.util.find_spec("flash_attn.cute")
    if spec is None or spec.origin is None:
        raise RuntimeError(f"kernels 'fa4' need flash_attn.cute, which is not installed: {_INSTALL}")
    if not Path(spec.origin).with_name("fork_kvcache.py").exists():
        raise RuntimeError(
            "kernels 'fa4' need a flash_attn.cute with flash_attn_with_kvcache; "
            f"{Path(spec.origin).parent} is upstream's or an older one: {_INSTALL}"
        )


@functools.cache
def cute() -> Any:
    """flash_attn.cute's interface."""
    check_installed()
    try:
        from flash_attn.cute import interface
    except ImportError as error:
        raise RuntimeError(f"kernels 'fa4': flash_attn.cute does not import ({error}): {_INSTALL}") from error
    return interface


def check_usable(major: int) -> None:
    """Raise RuntimeError unless flash_attn.cute imports and serves the current GPU, if there is one."""
    cute()
    if _TARGET is None and not torch.cuda.is_available():
        return
    found = capability(torch.device("cuda"))
    if found[0] != major:
        raise RuntimeError(
            f"kernels 'fa4' serve compute capability {major}.x; this GPU has {found[0]}.{found[1]}: "
            "keep 'fa2', which serves it"
        )


def capability(device: torch.device) -> tuple[int, int]:
    """A GPU's compute capability; where FLASH_ATTENTION_ARCH names one, that."""
    if _TARGET is not None:
        found = int(cute()._get_device_arch())
        return found // 10, found % 10
    return _capability(device.index) if device.type == "cuda" else (0, 0)


@functools.cache
def _capability(index: int | None) -> tuple[int, int]:
    found: tuple[int, int] = torch.cuda.get_device_capability(index)
    return found


def provenance() -> dict[str, Any] | None:
    """What the flash_attn_4 wheel says of itself, where it is loaded."""
    module = sys.modules.get("flash_attn.cute")
    try:
        return None if module is None else module.fork_info()
    except (AttributeError, FileNotFoundError):  # not from a wheel, or not this project's
        return None


# Arguments --------------------------------------------------------------------------------------------------

# What their kernels do not serve: arguments of flash_attn_2_cuda, and their names in public functions.
_UNSERVED = {
    "alibi_slopes": "alibi_slopes",
    "p_dropout": "dropout_p",
    "leftpad_k": "cache_leftpad",
    "attn_mask": "attn_mask",
    "attn_bias": "attn_bias",
    "learnable_sink": "learnable_sink",
}


@functools.cache
def _places(name: str) -> dict[str, int]:
    """Where a call has what is not served."""
    parameters = inspect.signature(globals()[name]).parameters
    return {_UNSERVED[option]: place for place, option in enumerate(parameters) if option in _UNSERVED}


def options_of(name: str, given: tuple[Any, ...]) -> dict[str, Any]:
    """What a call has of the options that are not served: None or False where it has not."""
    places = _places(name).items()
    found: dict[str, Any] = {option: given[place] if place < len(given) else None for option, place in places}
    if "dropout_p" in found:
        found["dropout_p"] = float(found["dropout_p"]) != 0.0
    return found


def _side(window: int) -> int | None:
    return window if 0 <= window < _LONGEST_WINDOW else None


def _options(scale: float, causal: bool, left: int, right: int, softcap: float) -> dict[str, Any]:
    return {
        "softmax_scale": float(scale),
        "causal": bool(causal),
        "window_size_left": _side(left),
        "window_size_right": _side(right),
        "softcap": max(float(softcap), 0.0),
    }


def _on(device: torch.device) -> Any:
    """Kernels are launched on the current GPU."""
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def _in_our_words(call: Callable[[], _Result], *checked: Any) -> _Result:
    """The call's result; of one that fails, this package's own error if it has one.

    Args:
        checked: arguments of ``check_traced``.
    """
    try:
        return call()
    except Exception:
        from .fork_front import check_traced

        check_traced(*checked)
        raise


def _check_longest(lengths: dict[str, Any], used: Any = None) -> None:
    """With FA2_CHECK=1: wait for the GPU, and look for a sequence that is longer than the call says.

    Args:
        lengths: cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k.
        used: int32 (batch), the keys of each sequence where cu_seqlens_k does not tell them.

    Raises:
        ValueError: there is one.
    """
    if not _CHECK or lengths["cu_seqlens_q"].numel() < 2:
        return
    if torch.cuda.is_current_stream_capturing():
        flash_attn_2_cuda._warn(
            "FA2_CHECK=1 does not look at the lengths of calls that a CUDA graph captures: nobody may wait "
            "for the GPU there"
        )
        return
    for letter in "qk":
        tokens, longest = lengths[f"cu_seqlens_{letter}"].diff(), lengths[f"max_seqlen_{letter}"]
        if letter == "k" and used is not None:
            tokens = used
        most, place = (int(found) for found in tokens.max(dim=0))
        if most > longest:
            raise ValueError(
                f"FA2_CHECK: max_seqlen_{letter} is {longest}; sequence {place} has {most} tokens of {letter}"
            )


def _check_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Their kernels take values of another head dim than the keys'; results here have no room for those."""
    if k.shape != v.shape or q.shape[-1] != k.shape[-1]:
        raise ValueError(
            "q, k and v must have one head_dim, and k and v one shape; they have "
            f"{list(q.shape)}, {list(k.shape)} and {list(v.shape)}"
        )


def _own_lse(lse: torch.Tensor) -> torch.Tensor:
    """In place: +inf where a row sees no key. Gradients take it as well."""
    return torch.nan_to_num_(lse, nan=math.nan, posinf=math.inf, neginf=math.inf)


# Calls, with the arguments of flash_attn_2_cuda's functions, by their names ------------------------------


def _results(q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> Tensors:
    """With the empty tensors that a call without dropout has."""
    return [out, lse, q.new_empty(0), q.new_empty(2, dtype=torch.int64)]


def fwd(
    q: Any, k: Any, v: Any, out: Any, alibi_slopes: Any, p_dropout: float, softmax_scale: float, causal: bool,
    window_left: int, window_right: int, softcap: float, return_softmax: bool, generator: Any,
) -> Tensors:  # fmt: skip
    """As flash_attn_2_cuda.fwd: out, lse, and what dropout would have."""
    options = _options(softmax_scale, causal, window_left, window_right, softcap)

    def call() -> Tensors:
        _check_heads(q, k, v)
        result = torch.empty_like(q) if out is None else out
        with _on(q.device):
            _, lse, *_ = cute()._flash_attn_fwd(q, k, v, return_lse=True, out=result, **options)
        limited = options["causal"] or window_left >= 0 or window_right >= 0
        hides = k.shape[1] == 0 or (limited and q.shape[1] > k.shape[1])
        return _results(q, result, _own_lse(lse) if hides else lse)

    scalars = (0.0, softmax_scale, causal, window_left, window_right, softcap)
    return _in_our_words(call, (q, k, v, None), scalars)


def varlen_fwd(
    q: Any, k: Any, v: Any, out: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, seqused_k: Any, leftpad_k: Any,
    block_table: Any, alibi_slopes: Any, max_seqlen_q: int, max_seqlen_k: int, p_dropout: float,
    softmax_scale: float, zero_tensors: bool, causal: bool, window_left: int, window_right: int,
    softcap: float, return_softmax: bool, generator: Any,
) -> Tensors:  # fmt: skip
    """As flash_attn_2_cuda.varlen_fwd, but for values past a sequence's end: they must be finite."""
    lengths = {
        "cu_seqlens_q": cu_seqlens_q,
        "max_seqlen_q": int(max_seqlen_q),
        "max_seqlen_k": int(max_seqlen_k),
    }

    def call() -> Tensors:
        _check_heads(q, k, v)
        result = torch.empty_like(q) if out is None else out
        if zero_tensors:  # rows of no sequence
            result.zero_()
        if max_seqlen_k == 0:
            return _results(
                q, result.zero_(), q.new_full((q.shape[1], q.shape[0]), math.inf, dtype=torch.float32)
            )
        with _on(q.device):
            _check_longest({**lengths, "cu_seqlens_k": cu_seqlens_k}, seqused_k)
            keys = _keys(k, cu_seqlens_k, seqused_k, block_table)
            options = _options(softmax_scale, causal, window_left, window_right, softcap)
            _, lse, *_ = cute()._flash_attn_fwd(
                q, k, v, return_lse=True, out=result, **lengths, **keys, **options
            )
        return _results(q, result, _own_lse(lse))

    if block_table is not None:  # whose pages may be of other sizes than this package's
        return call()
    tables = (cu_seqlens_q, cu_seqlens_k, seqused_k, None, None)
    scalars = (0.0, softmax_scale, causal, window_left, window_right, softcap)
    return _in_our_words(call, (q, k, v, None), scalars, tables, (max_seqlen_q, max_seqlen_k))


def _keys(k: torch.Tensor, cu_seqlens_k: Any, seqused_k: Any, block_table: Any) -> dict[str, Any]:
    """Where the keys of packed sequences lie. In pages cu_seqlens_k tells their lengths."""
    if block_table is None:
        return {"cu_seqlens_k": cu_seqlens_k, "seqused_k": seqused_k}
    used = torch.diff(cu_seqlens_k) if seqused_k is None else seqused_k
    used = used.clamp(0, block_table.shape[1] * k.shape[1])  # nothing past the table is read
    return {"seqused_k": used, "page_table": block_table, "pages_by_row": True}


def _gradients(
    tensors: tuple[Any, ...],
    given: Tensors,
    options: dict[str, Any],
    deterministic: bool,
    lengths: dict[str, Any],
) -> Tensors:
    """dq, dk and dv, into what is given of them."""
    dout, q, k, v, out, lse = tensors
    ordered = bool(deterministic) or own.get_deterministic_mode()[0]
    dq, dk, dv = given
    with _on(q.device):
        found = cute()._flash_attn_bwd(
            q, k, v, out, dout, lse, deterministic=ordered, dq=dq, dk=dk, dv=dv, **options, **lengths
        )
    return list(found)


def bwd(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dq: Any, dk: Any, dv: Any, alibi_slopes: Any,
    p_dropout: float, softmax_scale: float, causal: bool, window_left: int, window_right: int, softcap: float,
    deterministic: bool, generator: Any = None, rng_state: Any = None, attn_mask: Any = None,
    attn_bias: Any = None, wants_bias: bool = False, dlse: Any = None,
) -> Tensors:  # fmt: skip
    """dq, dk, dv, and room of the size of flash_attn_2_cuda.bwd's fourth result. dlse is lse's gradient."""
    options = {**_options(softmax_scale, causal, window_left, window_right, softcap), "dlse": dlse}
    found = _gradients((dout, q, k, v, out, lse), [dq, dk, dv], options, deterministic, {})
    rows = -(-q.shape[1] // 128) * 128
    return [*found, q.new_empty((q.shape[0], q.shape[2], rows), dtype=torch.float32)]


def varlen_bwd(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dq: Any, dk: Any, dv: Any, cu_seqlens_q: Any,
    cu_seqlens_k: Any, alibi_slopes: Any, max_seqlen_q: int, max_seqlen_k: int, p_dropout: float,
    softmax_scale: float, zero_tensors: bool, causal: bool, window_left: int, window_right: int,
    softcap: float, deterministic: bool, generator: Any = None, rng_state: Any = None, attn_mask: Any = None,
    attn_bias: Any = None, wants_bias: bool = False, dlse: Any = None,
) -> Tensors:  # fmt: skip
    """As bwd, of packed sequences.

    What lies past their ends must be finite, and max_seqlen_q and max_seqlen_k hold.
    """
    pairs = zip((q, k, v), (dq, dk, dv), strict=True)
    grads = [torch.empty_like(tensor) if given is None else given for tensor, given in pairs]
    if zero_tensors or max_seqlen_k == 0:
        for grad in grads:
            grad.zero_()
    if max_seqlen_k > 0:
        options = {**_options(softmax_scale, causal, window_left, window_right, softcap), "dlse": dlse}
        lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
        longest = {"max_seqlen_q": int(max_seqlen_q), "max_seqlen_k": int(max_seqlen_k)}
        _check_longest({**lengths, **longest})
        grads = _gradients((dout, q, k, v, out, lse), grads, options, deterministic, {**lengths, **longest})
    rows = q.shape[0] + 128 * (cu_seqlens_q.numel() - 1)
    return [*grads, q.new_empty((q.shape[1], rows), dtype=torch.float32)]


def fork_fwd_kvcache(
    q: Any, kcache: Any, vcache: Any, k: Any, v: Any, seqlens_k: Any, rotary_cos: Any, rotary_sin: Any,
    cache_batch_idx: Any, leftpad_k: Any, block_table: Any, alibi_slopes: Any, out: Any, softmax_scale: float,
    causal: bool, window_left: int, window_right: int, softcap: float, rotary_interleaved: bool,
    num_splits: int, attn_mask: Any, attn_bias: Any, learnable_sink: Any, wants_lse: bool,
) -> Tensors:  # fmt: skip
    """As flash_attn_2_cuda.fork_fwd_kvcache, which has no wants_lse: out, and lse where it is wanted.

    Head dims that are no multiple of 8 are padded in copies of the caches, as there.
    """
    cute()
    from flash_attn.cute import flash_attn_with_kvcache

    flash_attn_2_cuda.check_signs(k_cache=kcache, v_cache=vcache, out=out)
    q, k, v, rotary_cos, rotary_sin = flash_attn_2_cuda._signed(q, k, v, rotary_cos, rotary_sin)
    tensors = [q, kcache, vcache, k, v]
    padded = [own._padded(t) for t in tensors] if q.shape[-1] % 8 else tensors
    with _on(q.device):
        found = flash_attn_with_kvcache(
            *padded, rotary_cos, rotary_sin, seqlens_k, cache_batch_idx, page_table=block_table,
            softmax_scale=float(softmax_scale), causal=bool(causal),
            window_size=(_side(window_left), _side(window_right)), softcap=max(float(softcap), 0.0),
            rotary_interleaved=bool(rotary_interleaved), return_softmax_lse=wants_lse,
            out=out if padded is tensors else None,
        )  # fmt: skip
    result, lse = found if wants_lse else (found, None)
    if padded is not tensors:
        result = own._cut(result, out, (kcache, vcache), padded[1:3] if k is not None else None)
    return [result, _own_lse(lse) if wants_lse else None]
