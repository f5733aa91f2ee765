"""Long sequences: accumulators past 2**31 elements, and more than 128 splits."""

from __future__ import annotations

import gc

import pytest
import torch
from flash_attn import deterministic_mode, flash_attn_func
from gradients import dense, far_along, leaves, upstream_of
from harness import Config, Draw, Rows, Sequence, assert_accurate, assert_same_bits, route

pytestmark = pytest.mark.gpu


def need_memory(wanted: int) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    if free < wanted:
        pytest.skip(f"needs {wanted / 2**30:.0f} GiB of GPU memory, {free / 2**30:.0f} GiB are free")


@pytest.mark.parametrize("where", ["in one thread block", "apart", "in the standard kernel"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("batch", "len_q", "len_k", "heads", "split_size"),
    [
        (8, 8192, 8192, 32, 512),
        (16, 8192, 8192, 32, 512),
        (200, 2048, 2048, 32, 512),
        (2, 40000, 40000, 8, 256),
        (1, 100, 131072, 8, 512),
        (2, 1, 131072, 8, 256),
        (1, 512, 2**20, 8, 2048),
    ],
)
def test_long_sequences(
    batch: int, len_q: int, len_k: int, heads: int, split_size: int, causal: bool, where: str
) -> None:
    config = Config(heads=heads, heads_k=heads, causal=causal)
    config.need("split")
    splits = 0 if where != "apart" else -(-len_k // split_size)
    elements = batch * heads * config.head_dim
    need_memory(4 * splits * elements * len_q + 2 * 2 * elements * (2 * len_q + 2 * len_k) + 2**31)
    generator = Draw(batch * len_k + causal).generator

    def normal(length: int) -> torch.Tensor:
        return torch.randn(
            (batch, length, heads, 64), generator=generator, device="cuda", dtype=torch.float16
        )

    q, k, v = normal(len_q), normal(len_k), normal(len_k)
    with deterministic_mode(split_size=split_size), route(where):
        out, lse, _ = flash_attn_func(q, k, v, causal=causal, return_attn_probs=True)
        for which in {0, batch // 2, batch - 1}:
            alone = flash_attn_func(
                *(t[which : which + 1] for t in (q, k, v)), causal=causal, return_attn_probs=True
            )
            Rows(out[which], lse[which]).assert_same(
                Rows(alone[0][0], alone[1][0]), f"sequence {which} of {batch} against alone"
            )
    sampled = torch.unique(
        torch.tensor([0, len_q // 3, len_q // 2, len_q - 2, len_q - 1], device="cuda").clamp(min=0)
    )
    for which in {0, batch // 2, batch - 1}:
        sequence = Sequence(q[which], k[which], v[which])
        assert_accurate(config, Rows(out[which], lse[which]), sequence, sampled)


def test_gradients_of_a_sequence_past_2_to_the_31_elements() -> None:
    """Its sums for dQ, in float32 (rows, heads, head_dim), begin past what 32 bits count."""
    config = Config(causal=True)
    config.need("split", "bwd")
    rows = 2**31 // (config.heads * config.head_dim) + 300
    need_memory((4 * 2 + 4) * 2**31 + 2**32)
    sequence = Draw(7).sequence(config, 300, 500)
    upstream = upstream_of(sequence, 1)
    with deterministic_mode(split_size=512):
        far_along(config, sequence, upstream, rows).assert_same(
            dense(config, [sequence], [upstream], 0), "far along against alone"
        )


def test_a_bias_past_2_to_the_31_elements() -> None:
    """Of the last head, whose bias and gradient begin there, against that head alone."""
    config = Config(heads=16, heads_k=16, bias="fp16")
    config.need("split", "bwd")
    length = 16384
    need_memory(2 * 2 * 16 * length**2 + 2**32)
    generator = Draw(3).generator
    q, k, v, upstream = (
        torch.randn((1, length, 16, 64), generator=generator, device="cuda", dtype=torch.float16)
        for _ in range(4)
    )
    bias = torch.rand((1, 16, length, length), generator=generator, device="cuda", dtype=torch.float16)
    results = []
    with deterministic_mode(split_size=512):
        for heads in (slice(None), slice(15, None)):
            q_, k_, v_ = leaves(tuple(t[:, :, heads] for t in (q, k, v)))
            own = bias[:, heads].detach().requires_grad_()
            out = flash_attn_func(q_, k_, v_, attn_bias=own)
            found = torch.autograd.grad(out, (q_, k_, v_, own), upstream[:, :, heads])
            results.append(
                (out[:, :, -1].clone(), *(g[:, :, -1].clone() for g in found[:3]), found[3][:, -1].clone())
            )
            del out, found
    for name, one, alone in zip(("out", "dq", "dk", "dv", "dbias"), *results, strict=True):
        assert_same_bits(one, alone, f"{name}, the last of 16 heads against alone")


def test_more_batch_and_heads_than_a_grid_dimension_holds() -> None:
    """Batch * heads = 65536 and one query: upstream's split launch ends at 65535."""
    config = Config(heads=16, heads_k=16)
    config.need("split")
    generator = Draw(1).generator
    q, k, v = (
        torch.randn((4096, n, 16, 64), generator=generator, device="cuda", dtype=torch.float16)
        for n in (1, 600, 600)
    )
    with deterministic_mode(split_size=512):
        out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True)
        alone = flash_attn_func(q[-1:], k[-1:], v[-1:], return_attn_probs=True)
    Rows(out[-1], lse[-1]).assert_same(Rows(alone[0][0], alone[1][0]), "last of 4096 against alone")
    assert_accurate(config, Rows(out[-1], lse[-1]), Sequence(q[-1], k[-1], v[-1]))
