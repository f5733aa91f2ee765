"""Programs that are traced once, for all lengths: their results are eager's."""

from __future__ import annotations

import pytest
import torch
import tracing
from conftest import DIM, HALF, built, problems
from flash_attn import flash_attn_func, flash_attn_interface, fork_cache
from harness import assert_same_bits
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize("named", tracing.PROGRAMS)
def test_a_program_is_traced_once_and_gives_eager_s_bits(named: str) -> None:
    with torch.enable_grad():
        tracing.assert_traced_once(
            built(), named, "aot_eager", gradients=tracing.PROGRAMS[named].has_gradients
        )


def test_a_tensor_that_is_given_twice_has_all_of_its_gradients() -> None:
    """Dynamo keeps one of them."""
    torch._dynamo.reset()
    with torch.enable_grad():
        x = torch.randn(2, 9, 2, DIM, generator=torch.Generator().manual_seed(0)).to(HALF).requires_grad_()
        call = torch.compile(lambda x: flash_attn_func(x, x, x), backend="aot_eager", fullgraph=True)
        found, expected = (
            torch.autograd.grad(one(x).float().square().sum(), x)[0]
            for one in (call, lambda x: flash_attn_func(x, x, x))
        )
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=0)


def test_sizes_that_only_a_run_tells_may_be_any() -> None:
    """Of batch, tokens and heads."""
    torch._dynamo.reset()
    counter = tracing.CompileCounterWithBackend("aot_eager")
    call = torch.compile(
        lambda q, k, left: flash_attn_func(q, k, k, window_size=(left, 2)), backend=counter, fullgraph=True
    )
    sizes = st.integers(1, 40)

    @problems(8)
    @given(st.integers(1, 3), sizes, sizes, st.integers(1, 3), st.integers(3, 50))
    def agree(batch: int, tokens: int, keys: int, heads: int, left: int) -> None:
        generator = torch.Generator().manual_seed(tokens)
        shapes = ((batch, tokens, 2 * heads, DIM), (batch, keys, heads, DIM))
        q, k = (torch.randn(shape, generator=generator).to(HALF) for shape in shapes)
        for tensor in (q, k):
            for dim in range(3):
                torch._dynamo.decorators.mark_unbacked(tensor, dim)
        assert_same_bits(call(q, k, left), flash_attn_func(q, k, k, window_size=(left, 2)), "unbacked")

    agree()
    assert counter.frame_count <= tracing.FRAMES


def test_operators_pass_torch_s_own_check() -> None:
    q, k = (torch.randn(2, tokens, 2, DIM).to(HALF) for tokens in (5, 9))
    scalars = (0.5, True, 3, 4, 0.0)
    out, lse, _, _ = flash_attn_interface._flash_attn_forward(q, k, k, 0.0, *scalars, None, False)
    lengths = torch.tensor([4, 2], dtype=torch.int32)
    grads = (torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(k))
    for operator, arguments in (
        (
            flash_attn_interface._flash_attn_backward,
            (q, q, k, k, out, lse, *grads, 0.0, *scalars, None, True),
        ),
        (fork_cache.reading, (q, k, k, *[None] * 12, *scalars, True, 0, True)),
        (
            fork_cache.appending,
            (q, k, k.clone(), q, q, None, None, lengths, *[None] * 7, *scalars, True, 0, True),
        ),
    ):
        torch.library.opcheck(operator, arguments)
