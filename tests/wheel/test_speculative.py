"""Drafts of tokens checked at once have the bits of tokens decoded one by one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from flash_attn import deterministic_mode
from harness import DEVICE, Config, Draw, Rows, Sequence, cache, in_pages, joined, paged, seed_of, varlen

pytestmark = pytest.mark.gpu

CONFIGS = [
    Config(heads=8, heads_k=2, causal=True),
    Config(heads=8, heads_k=1, causal=True, head_dim=128, dtype="bf16"),
    Config(heads=8, heads_k=2, causal=True, sink="fp32"),
    Config(heads=8, heads_k=8, window=(700, 0), head_dim=128),
    Config(heads=8, heads_k=1, window=(700, 0), head_dim=128),
    Config(heads=14, heads_k=2, causal=True, softcap=15.0),
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("drafts", [1, 3, 7, 15])
@pytest.mark.parametrize("held", [100, 2047, 9000])
def test_one_query_against_all_drafts(
    config: Config, drafts: int, held: int, control: Callable[..., None]
) -> None:
    """M = 1 against M = k + 1: the queries of k drafts and of the token before them."""
    config.need("split", "fwd")
    rows = drafts + 1
    draw = Draw(seed_of(config, drafts, held))
    sequence = draw.sequence(config, rows, held + rows)

    def at_once() -> Rows:
        return cache(config, [sequence], held + 100)

    def one_by_one() -> Rows:
        return joined(cache(config, [sequence.rows(n, n + 1)], held + 100) for n in range(rows))

    with deterministic_mode(split_size=512):
        expected = one_by_one()
        at_once().assert_same(expected, f"{drafts} drafts on {held} tokens")
        paged(config, [sequence], draw.generator, page=16).assert_same(expected, "in pages of 16")
    control(not at_once().same(one_by_one()))


@pytest.mark.parametrize("config", [c for c in CONFIGS if c.heads_k < c.heads], ids=str)
@pytest.mark.parametrize("page", [0, 16, 256])
def test_heads_that_share_keys_have_the_bits_of_heads_that_do_not(config: Config, page: int) -> None:
    """Packed sequences of other numbers of queries, none among them; heads that share keys share tiles."""
    config.need("split")
    draw = Draw(seed_of(config, page))
    lengths = ((4, 9000), (0, 700), (1, 5000), (16, 2050), (7, 30))
    sequences = [draw.sequence(config, *each) for each in lengths]
    group = config.heads // config.heads_k
    apart = [
        replace(s, k=s.k.repeat_interleave(group, 1), v=s.v.repeat_interleave(group, 1)) for s in sequences
    ]
    pages = in_pages(sequences, draw.generator, page) if page else None
    with deterministic_mode(split_size=512):
        for n in (0, 2, 3, 4):
            found = varlen(config, sequences, n, pages=pages)
            found.assert_same(varlen(replace(config, heads_k=config.heads), apart, n), f"{lengths[n]}")


def test_heads_that_share_keys_share_tiles() -> None:
    """The rows of a head are then four queries of four heads."""
    code = """
import torch, flash_attn
q, k = (torch.randn(1, *shape, 64, device="cuda", dtype=torch.float16) for shape in ((4, 8), (4096, 2)))
with flash_attn.deterministic_mode(split_size=512):
    flash_attn.flash_attn_with_kvcache(q, k, k, causal=True)
"""
    CONFIGS[0].need("split")
    env = {**os.environ, "FA2_DEBUG": "1"}
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, env=env)
    assert " S_q=16 " in done.stderr


def ancestors(parents: list[int]) -> torch.Tensor:
    """(drafts, drafts): whether the second is the first or stands on its way from the root; -1: the root."""
    sees = torch.eye(len(parents), dtype=torch.bool, device=DEVICE)
    for draft, parent in enumerate(parents):
        if parent >= 0:
            sees[draft] |= sees[parent]
    return sees


@pytest.mark.parametrize(
    "config", [Config(heads=8, heads_k=2), Config(heads=4, heads_k=4, head_dim=128, dtype="bf16")], ids=str
)
@pytest.mark.parametrize("held", [100, 2047, 9000])
def test_a_tree_of_drafts(config: Config, held: int, control: Callable[..., None]) -> None:
    """Each draft sees the held tokens and its own way from the root, which attn_mask says."""
    config.need("split", "fwd")
    parents = [-1, 0, 0, 1, 1, 2, 3, 5]
    drafts = len(parents)
    sequence = Draw(seed_of(config, held)).sequence(config, drafts, held + drafts)
    sees = torch.ones(config.heads, drafts, held + drafts, dtype=torch.bool, device=DEVICE)
    sees[..., held:] = ancestors(parents)

    def on_cache(first: int, end: int) -> Rows:
        """Drafts first to end, on a cache that holds those before the end and NaN behind."""
        keys = held + end
        part = Sequence(
            sequence.q[first:end], sequence.k[:keys], sequence.v[:keys], sees[:, first:end, :keys]
        )
        return cache(config, [part], held + drafts + 60)

    def one_by_one() -> Rows:
        return joined(on_cache(n, n + 1) for n in range(drafts))

    with deterministic_mode(split_size=512):
        on_cache(0, drafts).assert_same(one_by_one(), f"a tree on {held} tokens")
    control(not on_cache(0, drafts).same(one_by_one()))
