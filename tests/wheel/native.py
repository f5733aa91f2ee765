"""The C interface through ctypes, beside the Python functions: each case returns results of both, by name."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import flash_attn_2_cuda
import torch
from flash_attn import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    set_deterministic_mode,
)
from harness import DEVICE, DTYPES, Config, assert_same_bits, cu_seqlens
from torch import Tensor

_DTYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.int32: 3, torch.bool: 4}


class Array(ctypes.Structure):
    """flash_attention_v2_tensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("sizes", ctypes.c_int64 * 4),
        ("strides", ctypes.c_int64 * 4),
    )


def _tensors(*names: str) -> list[tuple[str, type]]:
    return [(name, Array) for name in names]


def _numbers(kind: type, *names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names]


class Options(ctypes.Structure):
    """flash_attention_v2_options."""

    _fields_ = (
        *_numbers(ctypes.c_float, "softmax_scale", "softcap", "dropout"),
        *_numbers(ctypes.c_int32, "causal", "window_left", "window_right"),
        ("split_size", ctypes.c_int64),
        *_numbers(ctypes.c_uint64, "seed", "offset"),
        *_numbers(ctypes.c_void_p, "seed_at", "offset_at"),
        *_tensors("alibi_slopes", "mask", "bias"),
        *_numbers(ctypes.c_void_p, "learnable_sink", "dsink"),
        ("learnable_sink_stride", ctypes.c_int64),
        *_numbers(ctypes.c_int32, "learnable_sink_dtype", "reserved_number"),
        ("reserved", ctypes.c_int64 * 4),
    )


_LENGTHS = _numbers(ctypes.c_int32, "max_seqlen_q", "max_seqlen_k")


class Forward(ctypes.Structure):
    """flash_attention_v2_forward_call."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("options", Options),
        *_tensors("q", "k", "v", "out", "lse", "cu_seqlens_q", "cu_seqlens_k"),
        *_LENGTHS,
        *_tensors("seqused_k"),
        ("zero_gaps", ctypes.c_int32),
        *_tensors("cache_seqlens", "k_new", "v_new", "rotary_cos", "rotary_sin"),
        *_numbers(ctypes.c_int32, "rotary_interleaved", "num_splits"),
        *_tensors("cache_batch_idx", "block_table", "leftpad_k"),
        ("workspace", ctypes.c_void_p),
        ("workspace_size", ctypes.c_size_t),
    )


class Backward(ctypes.Structure):
    """flash_attention_v2_backward_call."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("options", Options),
        *_tensors("q", "k", "v", "out", "lse", "dout", "dq", "dk", "dv", "dbias"),
        ("deterministic", ctypes.c_int32),
        *_tensors("cu_seqlens_q", "cu_seqlens_k"),
        *_LENGTHS,
        ("zero_gaps", ctypes.c_int32),
        ("workspace", ctypes.c_void_p),
        ("workspace_size", ctypes.c_size_t),
    )


_CALLS = {"forward": Forward, "backward": Backward}


def _array(tensor: Tensor) -> Array:
    four = ctypes.c_int64 * 4
    return Array(
        tensor.data_ptr(), _DTYPES[tensor.dtype], tensor.dim(), four(*tensor.shape), four(*tensor.stride())
    )


class Library:
    """The C interface of the wheel that is installed."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)
        self._library.flash_attention_v2_last_error.restype = ctypes.c_char_p

    def _filled(self, name: str, call: Any, given: dict[str, Any]) -> Any:
        options = {name for name, *_ in Options._fields_}
        defaults = getattr(self._library, f"flash_attention_v2_{name}_defaults")
        assert defaults(ctypes.byref(call), ctypes.c_size_t(ctypes.sizeof(call))) == 0, self.last_error()
        for field, value in given.items():
            place = call.options if field in options else call
            setattr(place, field, _array(value) if isinstance(value, Tensor) else value)
        return call

    def _run(self, name: str, call: Any, given: dict[str, Any]) -> None:
        self._filled(name, call, given)
        stream = torch.cuda.current_stream().cuda_stream if DEVICE == "cuda" else 0
        run = getattr(self._library, f"flash_attention_v2_run_{name}")
        status = run(ctypes.byref(call), ctypes.c_void_p(stream))
        assert status == 0, f"status {status}: {self.last_error()}"

    def forward(self, **given: Any) -> None:
        """Run a forward call of these fields, options among them; an assertion fails with the library's words."""
        self._run("forward", Forward(), given)

    def backward(self, **given: Any) -> None:
        """The same of a backward call."""
        self._run("backward", Backward(), given)

    def workspace(self, name: str = "forward", **given: Any) -> int:
        """The bytes of workspace of a forward or backward call."""
        call, taken = self._filled(name, _CALLS[name](), given), ctypes.c_size_t()
        measure = getattr(self._library, f"flash_attention_v2_{name}_workspace")
        status = measure(ctypes.byref(call), ctypes.byref(taken))
        assert status == 0, f"status {status}: {self.last_error()}"
        return taken.value

    def last_error(self) -> str:
        """What this thread's last call that failed was about."""
        return bytes(self._library.flash_attention_v2_last_error()).decode()


Pairs = dict[str, tuple[Tensor, Tensor]]  # what Python's function gave, and the library's


def _normal(config: Config, *shape: int) -> Tensor:
    return torch.randn(*shape, config.head_dim, device=DEVICE).to(DTYPES[config.dtype])


def _options(config: Config) -> dict[str, Any]:
    """A config's, as the library's options."""
    asked = config.kwargs()
    slopes = asked["alibi_slopes"]
    return {
        "causal": int(config.causal),
        "window_left": config.window[0],
        "window_right": config.window[1],
        "softcap": config.softcap,
        **({} if slopes is None else {"alibi_slopes": slopes}),
    }


def _both(
    library: Library,
    inputs: tuple[Tensor, Tensor, Tensor],
    theirs: tuple[Tensor, ...],
    dout: Tensor,
    options: dict[str, Any],
) -> Pairs:
    """The library's results beside Python's: out, lse, and the gradients of q, k, v and of a bias."""
    out, lse, *_ = theirs
    tensors = {
        **dict(zip("qkv", inputs, strict=True)),
        "out": torch.empty_like(out),
        "lse": torch.empty_like(lse),
    }
    results = {f"d{name}": torch.empty_like(tensors[name]) for name in "qkv"}
    if "bias" in options:
        results["dbias"] = torch.empty_like(options["bias"])
    library.forward(**tensors, **options)
    library.backward(**tensors, **options, **results, dout=dout, deterministic=1)
    ours = {"out": tensors["out"], "lse": tensors["lse"], **results}
    return dict(zip(ours, zip(theirs, ours.values(), strict=True), strict=True))


def dense(library: Library, config: Config, queries: int = 33, keys: int = 70) -> Pairs:
    """Sequences of one length, with their gradients; grouped heads' are of the mode, where the core sums them."""
    q, k, v = (
        _normal(config, 2, length, heads).requires_grad_()
        for length, heads in ((queries, config.heads), (keys, config.heads_k), (keys, config.heads_k))
    )
    dout = _normal(config, 2, queries, config.heads)
    scores: dict[str, Tensor] = {}
    if config.mask:
        scores["mask"] = torch.rand(2, config.heads, queries, keys, device=DEVICE) < 0.7
    if config.bias:
        bias = torch.rand(config.heads, queries, keys, device=DEVICE) - 0.5
        scores["bias"] = bias.to(DTYPES[config.bias]).requires_grad_()
    theirs = {f"attn_{name}": tensor for name, tensor in scores.items()}
    out, lse, _ = flash_attn_func(
        q, k, v, return_attn_probs=True, deterministic=True, **config.kwargs(), **theirs
    )
    wanted = [q, k, v, *([scores["bias"]] if config.bias else [])]
    gradients = torch.autograd.grad(out, wanted, dout)
    return _both(library, (q, k, v), (out, lse, *gradients), dout, {**_options(config), **scores})


def with_sink(library: Library, config: Config) -> Pairs:
    """A sink, forward: backward the library joins it to the log-sum-exp by another sum than torch's."""
    q, k, v = (_normal(config, 2, 33, heads) for heads in (config.heads, config.heads_k, config.heads_k))
    sink = torch.linspace(-1, 2, config.heads, device=DEVICE)
    out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True, learnable_sink=sink, **config.kwargs())
    mine, my_lse = torch.empty_like(out), torch.empty_like(lse)
    library.forward(
        q=q, k=k, v=v, out=mine, lse=my_lse, learnable_sink=sink.data_ptr(),
        learnable_sink_dtype=_DTYPES[sink.dtype], **_options(config),
    )  # fmt: skip
    return {"out": (out, mine), "lse": (lse, my_lse)}


def packed(library: Library, config: Config, lengths: tuple[int, ...] = (5, 40, 1)) -> Pairs:
    """Packed sequences, with their gradients."""
    total, longest, sums = sum(lengths), max(lengths), cu_seqlens(list(lengths))
    q, k, v = (
        _normal(config, total, heads).requires_grad_()
        for heads in (config.heads, config.heads_k, config.heads_k)
    )
    dout = _normal(config, total, config.heads)
    out, lse, _ = flash_attn_varlen_func(
        q, k, v, sums, sums, longest, longest,
        return_attn_probs=True, deterministic=True, **config.kwargs(),
    )  # fmt: skip
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    options = {
        **_options(config),
        "cu_seqlens_q": sums,
        "cu_seqlens_k": sums,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
    }
    return _both(library, (q, k, v), (out, lse, *gradients), dout, options)


def cached(library: Library, config: Config, paged: bool) -> Pairs:
    """Two new tokens, turned and appended to caches, which both calls write."""
    pages, size = (4, 256) if paged else (2, 300)
    caches = [_normal(config, pages, size, config.heads_k) for _ in range(2)]
    own = [cache.clone() for cache in caches]
    q, k, v = (_normal(config, 2, 2, heads) for heads in (config.heads, config.heads_k, config.heads_k))
    used = torch.tensor([7, 260], dtype=torch.int32, device=DEVICE)
    cos, sin = (torch.rand(512, 8, device=DEVICE).to(q.dtype) for _ in range(2))
    table = torch.tensor([[2, 0], [3, 1]], dtype=torch.int32, device=DEVICE) if paged else None
    out, lse = flash_attn_with_kvcache(
        q, *caches, k, v, cos, sin, cache_seqlens=used, block_table=table, rotary_interleaved=False,
        return_softmax_lse=True, **config.kwargs(),
    )  # fmt: skip
    mine, my_lse = torch.empty_like(out), torch.empty_like(lse)
    library.forward(
        q=q, k=own[0], v=own[1], k_new=k, v_new=v, rotary_cos=cos, rotary_sin=sin, cache_seqlens=used,
        out=mine, lse=my_lse, **_options(config), **({} if table is None else {"block_table": table}),
    )  # fmt: skip
    return {
        "out": (out, mine),
        "lse": (lse, my_lse),
        "k cache": (caches[0], own[0]),
        "v cache": (caches[1], own[1]),
    }


def dropped(library: Library, config: Config) -> Pairs:
    """Dropout, from the seed and offset that Python's call drew."""
    q, k, v = (_normal(config, 2, 40, config.heads) for _ in range(3))
    dout, scale = torch.randn_like(q), config.head_dim**-0.5
    out, lse, _, state = flash_attn_2_cuda.fwd(
        q, k, v, None, None, 0.3, scale, config.causal, -1, -1, 0.0, False, None
    )
    gradients = flash_attn_2_cuda.bwd(
        dout, q, k, v, out, lse, None, None, None, None, 0.3, scale, config.causal, -1, -1, 0.0, True, None,
        state,
    )  # fmt: skip
    seed, offset = (int(number) for number in state)
    options = {"causal": int(config.causal), "dropout": 0.3, "seed": seed % 2**64, "offset": offset}
    return _both(library, (q, k, v), (out, lse, *gradients[:3]), dout, options)


CASES: dict[str, tuple[dict[str, Any], Callable[[Library, Config], Pairs]]] = {
    "plain": ({}, dense),
    "one-query": ({"heads_k": 2}, lambda library, config: dense(library, config, 1, 70)),
    "causal": ({"causal": True}, dense),
    "window": ({"window": (9, 3)}, dense),
    "softcap": ({"softcap": 5.0}, dense),
    "alibi": ({"alibi": True, "causal": True}, dense),
    "mask": ({"mask": True}, dense),
    "bias": ({"bias": "fp32"}, dense),
    "sink": ({"heads_k": 2}, with_sink),
    "packed": ({"causal": True}, packed),
    "cache": ({"causal": True, "heads_k": 2}, lambda library, config: cached(library, config, False)),
    "pages": ({"causal": True}, lambda library, config: cached(library, config, True)),
    "dropout": ({}, dropped),
}
MODES = {"off": (False, None), "on": (True, 128)}
# The mode does not cover dropout, of which it warns.
CHOSEN = [(named, mode) for named in CASES for mode in MODES if (named, mode) != ("dropout", "on")]


def assert_agree(library: Library, named: str, mode: str, config: Config) -> None:
    """Run a case both ways in a mode, with what of ``config`` the case leaves open."""
    changed, case = CASES[named]
    config = replace(config, **{"heads": 4, "heads_k": 4, **changed})
    config.need("fwd", "split", "bwd")
    torch.manual_seed(3)
    set_deterministic_mode(*MODES[mode])  # for the process: scopes are Python's
    try:
        for what, (theirs, ours) in case(library, config).items():
            assert_same_bits(theirs, ours, f"{named}, {what}")
    finally:
        set_deterministic_mode(False)
