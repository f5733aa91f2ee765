"""What calls make of their arguments: bounds of windows, and errors that name what does not fit."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import machine
import pytest
import torch
from bits import assert_same_bits
from calls import dense, dense_gradients, varlen, varlen_gradients
from cases import neighbour, own
from flash_attn.cute import deterministic_mode, flash_attn_func, flash_attn_varlen_func, interface
from problems import DEVICE, Config, Sequence
from torch import Tensor
from ways import SPLIT, assert_same
from without_values import compiling

# Windows ----------------------------------------------------------------------------------------------------

SIDES = (None, -(2**31), -7, -1, 0, 1, 30, 2**31 - 1)


def test_a_negative_bound_is_no_limit() -> None:
    """The one place that every function, forward and backward, takes bounds from."""
    resolve = interface._resolve_causal_local_window
    for left, right, causal, mask in product(SIDES, SIDES, (False, True), (None, lambda *_: True)):
        found = resolve(causal, left, right, mask)
        plain = [None if side is None or side < 0 else side for side in (left, right)]
        assert found == resolve(causal, *plain, mask), (left, right)
        assert all(side is None or side >= 0 for side in found[2:]), (left, right)


class Given(Config):
    """A window goes to the function as it is written here."""

    def options(self) -> dict[str, object]:
        return {**super().options(), "window_size": self.window}


WINDOWS = [(-1, 30), (30, -1), (-1, 0), (-7, 300), (-1, -1)]


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [False, True], ids=["off", "on"])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("heads_k", [4, 2])
def test_keys_that_a_window_with_one_bound_shows(window: tuple[int, int], heads_k: int, mode: bool) -> None:
    """Dense and packed, forward and backward: the bits of the same window with None."""
    plain = Config(64, heads_k=heads_k, window=window)
    raw = Given(64, heads_k=heads_k, window=window)
    alone, packed = [own(plain)], [neighbour(plain, 9), own(plain), neighbour(plain, 300)]
    calls: tuple[tuple[Callable[..., Any], Callable[..., Any], list[Sequence], int], ...] = (
        (dense, dense_gradients, alone, 0),
        (varlen, varlen_gradients, packed, 1),
    )
    with deterministic_mode(mode, SPLIT):
        for forward, backward, sequences, which in calls:
            assert_same(forward(plain, sequences, which), forward(raw, sequences, which), str(window))
            expected, found = (backward(config, sequences, which) for config in (plain, raw))
            for name in "qkv":
                assert_same_bits(expected[name], found[name], f"d{name}")


# Errors -----------------------------------------------------------------------------------------------------


def _tensor(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=DEVICE)


def _ints(*shape: int) -> Tensor:
    return _tensor(*shape, dtype=torch.int32)


def _batch(**changes: Any) -> dict[str, Any]:
    return {"q": _tensor(2, 30, 4, 64), "k": _tensor(2, 30, 4, 64), "v": _tensor(2, 30, 4, 64), **changes}


def _packed(**changes: Any) -> dict[str, Any]:
    given = {"q": _tensor(60, 4, 64), "k": _tensor(60, 4, 64), "v": _tensor(60, 4, 64)}
    ends = {"cu_seqlens_q": _ints(3), "cu_seqlens_k": _ints(3), "max_seqlen_q": 40, "max_seqlen_k": 40}
    return {**given, **ends, **changes}


MISTAKES: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "batch of k": (
        lambda: _batch(k=_tensor(3, 30, 4, 64), v=_tensor(3, 30, 4, 64)),
        r"k must have a batch of 2, as q; it has shape \[3, 30, 4, 64\]",
    ),
    "three dimensions": (
        lambda: _batch(q=_tensor(30, 4, 64)),
        r"q must have shape \(batch, seqlen, heads, head_dim\) without cu_seqlens_q; it has \[30, 4, 64\]",
    ),
    "three of k": (
        lambda: _batch(k=_tensor(30, 4, 64)),
        r"k must have shape \(batch, seqlen, heads_k, head_dim\)",
    ),
    "a shorter v": (
        lambda: _batch(v=_tensor(2, 20, 4, 64)),
        r"v must have k's shape, \[2, 30, 4, 64\], but for head_dim; it has \[2, 20, 4, 64\]",
    ),
    "head dims": (lambda: _batch(k=_tensor(2, 30, 4, 32)), r"k must have q's head_dim, 64; it has shape"),
    "heads": (
        lambda: _batch(k=_tensor(2, 30, 3, 64), v=_tensor(2, 30, 3, 64)),
        r"heads of k \(3\) must divide heads of q \(4\)",
    ),
    "no tensor": (lambda: _batch(v=[1.0]), r"v must be a torch.Tensor on the GPU; it is a list"),
    "dtypes": (
        lambda: _batch(k=_tensor(2, 30, 4, 64, dtype=torch.bfloat16)),
        r"k must have q's dtype, torch.float16",
    ),
    "float32": (
        lambda: {name: _tensor(2, 30, 4, 64, dtype=torch.float32) for name in "qkv"},
        r"q must have dtype float16 or bfloat16; it has torch.float32",
    ),
    "sink": (
        lambda: _batch(learnable_sink=_tensor(3)),
        r"learnable_sink must have shape \(heads\), which is \[4\] here; it has \[3\]",
    ),
    "window": (
        lambda: _batch(window_size=3),
        r"window_size must be \(left, right\), of ints or None; it is 3",
    ),
    "packed q of four": (
        lambda: _packed(q=_tensor(2, 30, 4, 64)),
        r"q must have shape \(total, heads, head_dim\) with cu_seqlens_q; it has \[2, 30, 4, 64\]",
    ),
    "ends of keys": (
        lambda: _packed(cu_seqlens_k=_ints(4)),
        r"cu_seqlens_k must have shape \(batch \+ 1\), which is \[3\] here; it has \[4\]",
    ),
    "long ends": (
        lambda: _packed(cu_seqlens_q=_tensor(3, dtype=torch.int64)),
        r"cu_seqlens_q must have dtype int32; it has torch.int64",
    ),
    "used": (
        lambda: _packed(seqused_k=_ints(3)),
        r"seqused_k must have shape \(batch\), which is \[2\] here",
    ),
    "pages": (lambda: _packed(page_table=_ints(2, 3)), r"page_table does not go with cu_seqlens_k"),
    "rows of pages": (
        lambda: _packed(
            k=_tensor(9, 64, 4, 64), v=_tensor(9, 64, 4, 64), cu_seqlens_k=None, page_table=_ints(3, 3)
        ),
        r"page_table must have shape \(batch, pages of a sequence\), with a batch of 2; it has \[3, 3\]",
    ),
}


@pytest.mark.skipif(machine.GPU, reason="the GPU half makes these calls")
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_an_error_that_names_the_argument(name: str) -> None:
    _assert_named(name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MISTAKES)
def test_the_same_on_a_gpu(name: str) -> None:
    _assert_named(name)


def _assert_named(name: str) -> None:
    make, words = MISTAKES[name]
    with compiling():
        arguments = make()
        functions = [flash_attn_varlen_func]
        if not any(key.startswith(("cu_", "max_", "page", "seqused")) for key in arguments):
            functions.append(flash_attn_func)
        for function in functions:
            with pytest.raises((TypeError, ValueError), match=words):
                function(**arguments)


def test_an_error_of_a_call_that_has_no_mistake_of_ours_stays() -> None:
    with (
        compiling(),
        pytest.raises(AssertionError, match=r"head_dim and head_dim_v must be between 8 and 256"),
    ):
        flash_attn_func(**{name: _tensor(2, 30, 4, 264) for name in "qkv"})
    with pytest.raises(TypeError, match=r"missing 1 required positional argument: 'v'"):
        flash_attn_func(None, None)
