"""The straight way from the public functions to the library: who takes it, and that its results are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flash_attn_2_cuda
import pytest
import torch
from conftest import DIM, HALF
from flash_attn import (
    flash_attn_func,
    flash_attn_interface,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from harness import assert_same_bits, cu_seqlens
from torch.utils._python_dispatch import TorchDispatchMode


@pytest.fixture
def long_way(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what calls on the long way reached, in order."""
    reached: list[str] = []

    def spy(owner: Any, name: str, said: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            reached.append(said)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    spy(flash_attn_interface.FlashAttnFunc, "apply", "dense")
    spy(flash_attn_interface.FlashAttnVarlenFunc, "apply", "varlen")
    spy(flash_attn_2_cuda, "fork_fwd_kvcache", "cache")
    return reached


def drawn(*shape: int, seed: int = 0, gradient: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(HALF).requires_grad_(gradient)


def off_by_one(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, in rows that begin at no multiple of 16 bytes."""
    room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    room[1:] = tensor.flatten()
    return room[1:].view(tensor.shape)


def test_plain_calls_take_it(long_way: list[str]) -> None:
    q, k = drawn(2, 5, 4, DIM), drawn(2, 9, 2, DIM, seed=1)
    lengths = cu_seqlens([5, 5]), cu_seqlens([9, 9])
    flash_attn_func(q, k, k, causal=True)
    flash_attn_func(q, k, k, attn_mask=torch.ones(5, 9, dtype=torch.bool))
    flash_attn_varlen_func(q.flatten(0, 1), *[k.flatten(0, 1)] * 2, *lengths, 5, 9)
    flash_attn_with_kvcache(q, k, k, cache_seqlens=torch.tensor([9, 4], dtype=torch.int32))
    flash_attn_with_kvcache(q, k, k, cache_seqlens=7)
    with torch.enable_grad():
        flash_attn_func(q.requires_grad_(), k, k)
    assert long_way == []


class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def test_calls_that_something_sees_take_the_long_way(long_way: list[str]) -> None:
    q, k = drawn(2, 5, 4, DIM), drawn(2, 9, 2, DIM, seed=1)
    with Seen():
        flash_attn_func(q, k, k)
    flash_attn_func(q, k, k, return_attn_probs=True)
    flash_attn_func(torch.nn.Parameter(q), k, k)
    flash_attn_func(q[..., :12], k[..., :12], k[..., :12])
    assert long_way == ["dense"] * 4


def test_tensors_that_kernels_cannot_load_take_the_long_way_to_the_same_bits(long_way: list[str]) -> None:
    q, k = drawn(2, 5, 4, DIM), drawn(2, 9, 2, DIM, seed=1)
    expected = flash_attn_func(q, k, k, causal=True)
    assert long_way == []
    gaps = drawn(2, 9, 2, 2 * DIM)[..., ::2]
    gaps.copy_(k)
    for which, changed in {"q": (off_by_one(q), k), "k": (q, off_by_one(k)), "gaps": (q, gaps)}.items():
        assert torch.equal(flash_attn_func(changed[0], changed[1], k, causal=True), expected), which
    assert long_way == ["dense"] * 3
    with pytest.raises(ValueError, match=r"k_cache .* a cache is used in place"):
        flash_attn_with_kvcache(q, off_by_one(k), k)


@pytest.mark.parametrize(
    "options", [{"causal": True}, {"window_size": (3, 1)}, {"deterministic": True}], ids=str
)
def test_its_results_and_gradients_are_those_of_the_long_way(
    long_way: list[str], options: dict[str, Any]
) -> None:
    def results(packed: bool, **more: Any) -> list[torch.Tensor]:
        q, k, v = (drawn(2, 9, heads, DIM, seed=seed, gradient=True) for seed, heads in enumerate((4, 2, 2)))
        if packed:
            lengths = (cu_seqlens([9, 9]),) * 2
            flat = [t.flatten(0, 1) for t in (q, k, v)]
            out = flash_attn_varlen_func(*flat, *lengths, 9, 9, **options, **more)
        else:
            out = flash_attn_func(q, k, v, **options, **more)
        out = out[0] if more else out
        out.backward(drawn(*out.shape, seed=9))
        return [out, q.grad, k.grad, v.grad]

    for packed in (False, True):
        straight = results(packed)
        assert long_way == []
        for mine, other in zip(straight, results(packed, return_attn_probs=True), strict=True):
            assert_same_bits(mine, other, f"{packed=}")
        assert long_way == ["varlen" if packed else "dense"]
        long_way.clear()


def test_what_goes_wrong_on_it_is_said_as_on_the_long_way(long_way: list[str]) -> None:
    q = drawn(2, 5, 4, DIM)
    with pytest.raises(RuntimeError, match="query and key must have the same dtype"):
        flash_attn_func(q, q.float(), q)
    assert long_way == ["dense"]
