"""Decoding in kernels whose warps have roles, for up to 16 rows: tiles of 64 rows give the same bits."""

from __future__ import annotations

import pytest
from flash_attn import deterministic_mode
from harness import Config, Draw, Sequence, assert_accurate, cache, of_other_head_dims, paged, route, seed_of

pytestmark = pytest.mark.gpu

WIDE, CHOSEN = "in one thread block, in tiles of 64 rows", "as the GPU is filled"
CONFIGS = [
    Config(heads=8, heads_k=2),
    Config(heads=8, heads_k=8, dtype="bf16", causal=True),
    Config(head_dim=40, heads=4, heads_k=4, window=(300, 20)),
    Config(head_dim=128, heads=8, heads_k=2, causal=True, softcap=15.0),
    *of_other_head_dims(heads=4, heads_k=2),
]
configs = pytest.mark.parametrize("config", CONFIGS, ids=str)


def sequences_of(config: Config, queries: int, longest: int) -> list[Sequence]:
    draw = Draw(seed_of(config, queries, "decoding"))
    return [draw.sequence(config, queries, length) for length in (longest, 129, 16, 0)]


@pytest.mark.parametrize("config", [config for config in CONFIGS if config.head_dim <= 64], ids=str)
@pytest.mark.parametrize("queries", [1, 4, 16])
@pytest.mark.parametrize("longest", [200, 2500])
def test_with_the_mode_off_pages_are_read_to_the_same_bits(
    config: Config, queries: int, longest: int
) -> None:
    """Some splits have no key, and one sequence has none."""
    config.need("split")
    sequences = sequences_of(config, queries, longest)
    generator, every = Draw(1).generator, slice(None)
    for page in (16, 256):
        for num_splits in (0, 1, 3, 7):
            with route(WIDE):
                expected = paged(config, sequences, generator, every, page, num_splits)
            with route(CHOSEN):
                found = paged(config, sequences, generator, every, page, num_splits)
            found.assert_same(expected, f"pages of {page}, {num_splits} splits")


@pytest.mark.sanitizer
@configs
@pytest.mark.parametrize("queries", [1, 4])
def test_small_shapes_for_compute_sanitizer(config: Config, queries: int) -> None:
    config.need("split")
    sequences = sequences_of(config, queries, 1300)[:2]
    generator = Draw(1).generator
    for mode in (True, False):
        for where in ("in one thread block", "apart"):
            with deterministic_mode(mode, split_size=256), route(where):
                assert_accurate(config, cache(config, sequences, 1400, 0), sequences[0])
                assert_accurate(config, paged(config, sequences, generator, 0, page=16), sequences[0])
