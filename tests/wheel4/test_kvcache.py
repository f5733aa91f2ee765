"""flash_attn_with_kvcache: a token that was appended gives the row that it has in a prefill, wherever the cache lies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import machine
import pytest
import torch
from bits import Rows, assert_same_bits, same_bits
from caches import Appending
from calls import _int32, dense
from cases import CONFIGS, LENGTH, neighbour, own, row
from flash_attn.cute import deterministic_mode, flash_attn_with_kvcache
from problems import DEVICE, Config, Sequence, draw
from test_chunks import path
from without_values import compiling

SPLIT = 256
CAPACITY = 1536
PAGES = (16, 48, 64, 128, 256)
CAUSAL = Config(128, causal=True, heads=8, heads_k=2)
SOME = [
    CAUSAL,
    Config(64),
    Config(96),
    Config(128, window=(300, 50)),
    Config(192, causal=True),
    Config(256, softcap=15.0),
]
configs = pytest.mark.parametrize("config", CONFIGS, ids=str)
some = pytest.mark.parametrize("config", SOME, ids=str)
gpu = pytest.mark.gpu


def appending(config: Config, new: int, **options: Any) -> Appending:
    """A sequence among others of other lengths."""
    sequences = [own(config), neighbour(config, 300), neighbour(config, new), neighbour(config, SPLIT + new)]
    return Appending(config, sequences, new, CAPACITY, **options)


def in_prefill(call: Appending, which: int = 0) -> Rows:
    """The rows that the new tokens of a sequence have in a prefill of the whole sequence."""
    sequence = call.turned(which)
    return row(dense(call.config, [sequence]), len(sequence.q) - call.new, len(sequence.q))


def assert_same(one: Rows, other: Rows, what: str) -> None:
    assert_same_bits(one.lse, other.lse, f"{what}, lse (head, row)")
    assert_same_bits(one.out, other.out, f"{what}, out (row, head, dim)")


@gpu
@pytest.mark.parametrize("new", [1, 5])
@configs
def test_appended_tokens_have_their_rows_of_a_prefill(config: Config, new: int) -> None:
    with deterministic_mode(split_size=SPLIT):
        call = appending(config, new)
        assert_same(in_prefill(call), call.rows(), f"{new} appended")


@gpu
@pytest.mark.parametrize("page", PAGES)
@some
def test_pages_of_any_size_give_the_same_rows(config: Config, page: int) -> None:
    """Also 128, the keys of a tile: such pages are loaded by rows too, for what is unused of them is NaN."""
    with deterministic_mode(split_size=SPLIT):
        call = appending(config, 3, page=page)
        for which in range(3):
            assert_same(in_prefill(call, which), call.rows(which), f"pages of {page}, sequence {which}")


@gpu
@pytest.mark.parametrize("name", ["walked", "spread"])
@pytest.mark.parametrize("config", SOME[:2], ids=str)
def test_both_ways_to_fold_give_the_same_rows(config: Config, name: str) -> None:
    with deterministic_mode(split_size=SPLIT):
        call = appending(config, 3, page=16)
        expected = in_prefill(call)
        with path(name):
            assert_same(expected, call.rows(), name)


@gpu
@some
def test_with_the_mode_off_rows_are_those_of_a_prefill(config: Config) -> None:
    """But for head dim 96, full, whose prefill has other tiles than pages."""
    if config != Config(96):
        call = appending(config, 5)
        assert_same(in_prefill(call), call.rows(), "mode off")


@gpu
@pytest.mark.parametrize("page", [None, 16, 128])
@pytest.mark.parametrize("rotary", ["interleaved", "halves"])
@pytest.mark.parametrize("config", [CAUSAL, Config(64), Config(96, window=(300, 0))], ids=str)
def test_embeddings_turn_keys_and_queries(config: Config, rotary: str, page: int | None) -> None:
    with deterministic_mode(split_size=SPLIT):
        call = appending(config, 5, rotary=rotary, page=page)
        places, caches = call.buffers()
        rows = call.call(places, caches)
        begin = LENGTH - call.new
        for cache, expected in zip(caches, (call.turned().k, call.sequences[0].v), strict=True):
            assert_same_bits(call.rows_of(cache)[begin:LENGTH], expected[begin:], "new rows of the cache")
        assert_same(in_prefill(call), rows, rotary)


@gpu
@pytest.mark.parametrize("rotary", [None, "interleaved", "halves"])
@pytest.mark.parametrize("config", [CAUSAL, Config(96, window=(300, 0))], ids=str)
def test_tokens_one_by_one_or_at_once(config: Config, rotary: str | None) -> None:
    with deterministic_mode(split_size=SPLIT):
        call = appending(config, 5, rotary=rotary, page=16)
        places, caches = call.buffers()
        parts = [step.call(places, caches) for step in call.one_by_one()]
        one_by_one = Rows(torch.cat([p.out for p in parts]), torch.cat([p.lse for p in parts], dim=1))
        assert_same(call.rows(), one_by_one, "one by one")


@gpu
@pytest.mark.parametrize("page", [None, 16])
@pytest.mark.parametrize("order", [[], [3, 0, 5, 1]], ids=["as they come", "by an index"])
def test_nothing_but_the_new_rows_is_written(order: list[int], page: int | None) -> None:
    if order and page:
        return  # the table of pages says whose they are
    call = appending(CAUSAL, 5, order=order, page=page)
    places, caches = call.buffers()
    before = [cache.clone() for cache in caches]
    call.call(places, caches)
    for cache, old, name in zip(caches, before, "kv", strict=True):
        for which, sequence in enumerate(call.sequences):
            begin, end = len(sequence.k) - call.new, len(sequence.k)
            own_rows = call.rows_of(old, which)
            own_rows[begin:end] = getattr(sequence, name)[begin:]
            assert_same_bits(call.rows_of(cache, which), own_rows, f"{name} of sequence {which}")


@gpu
@some
def test_a_cache_by_an_index_and_one_with_more_sequences(config: Config) -> None:
    with deterministic_mode(split_size=SPLIT):
        call = appending(config, 3, order=[3, 0, 5, 1])
        for which in range(4):
            assert_same(in_prefill(call, which), call.rows(which), f"sequence {which}")


@gpu
@pytest.mark.parametrize("seqlens", [LENGTH, None], ids=["an int", "a full cache"])
@some
def test_a_cache_that_is_read_alone(config: Config, seqlens: int | None) -> None:
    mine = own(config)
    filled = [
        torch.nn.functional.pad(t, [0, 0, 0, 0, 0, 100], value=torch.nan)[None] for t in (mine.k, mine.v)
    ]
    caches = filled if seqlens else [t[:, :LENGTH].contiguous() for t in filled]
    with deterministic_mode(split_size=SPLIT):
        out, lse = flash_attn_with_kvcache(
            mine.q[None, -7:], *caches, cache_seqlens=seqlens, return_softmax_lse=True,
            learnable_sink=config.sinks(), **config.options(),
        )  # fmt: skip
        assert_same(row(dense(config, [mine]), LENGTH - 7, LENGTH), Rows(out[0], lse[0]), "read")


@gpu
@pytest.mark.parametrize("page", [None, 16])
def test_what_does_not_fit_the_cache_is_nan(page: int | None) -> None:
    """Six tokens for a cache that has room for four: the rows of the last two, and what a full call has of them."""
    call = replace(appending(CAUSAL, 6, page=page), capacity=CAPACITY)
    mine = draw(CAUSAL, CAPACITY + 2, CAPACITY + 2, "own")
    call = replace(call, sequences=[mine, *call.sequences[1:]])
    places, caches = call.buffers()
    kept = [cache.clone() for cache in caches]
    with deterministic_mode(split_size=SPLIT):
        rows = call.call(places, caches)
        whole = dense(CAUSAL, [mine])
        beside = call.rows(1)
        full = replace(call, config=replace(CAUSAL, causal=False)).call(places, [c.clone() for c in kept])
        expected = in_prefill(call, 1)
    assert_same(row(whole, CAPACITY - 4, CAPACITY), row(rows, 0, 4), "the rows that fit")
    assert rows.out[4:].isnan().all()
    assert rows.lse[:, 4:].isnan().all()
    assert full.out.isnan().all()
    assert full.lse.isnan().all()
    assert_same(expected, beside, "a sequence beside it")
    assert_same_bits(call.rows_of(caches[0]), mine.k[:CAPACITY], "the cache")


@gpu
def test_lengths_past_the_cache_read_nothing_of_it() -> None:
    call = appending(CAUSAL, 1, page=16)
    places, caches = call.buffers()
    q = torch.stack([s.q[-1:] for s in call.sequences])
    lengths = _int32([2**31 - 1, 300, 1, CAPACITY + 1])
    out = flash_attn_with_kvcache(q, *caches, cache_seqlens=lengths, causal=True, **places)
    assert out[0].isnan().all()
    assert out[3].isnan().all()


@gpu
def test_a_cuda_graph_reads_the_lengths_of_its_replay() -> None:
    """Decode steps by one graph: the lengths, the token and the cache change between replays."""
    call = appending(CAUSAL, 4, page=16, rotary="halves")
    places, caches = call.buffers()
    with deterministic_mode(split_size=SPLIT):
        expected, tables = call.rows(), call.tables()
        q, k, v = (torch.stack([getattr(s, n)[-4:-3] for s in call.sequences]) for n in "qkv")
        lengths = _int32([len(s.k) - 4 for s in call.sequences])

        def step() -> tuple[torch.Tensor, torch.Tensor]:
            found: tuple[torch.Tensor, torch.Tensor] = flash_attn_with_kvcache(
                q, *caches, k, v, cache_seqlens=lengths, return_softmax_lse=True, **places, **tables,
                **CAUSAL.options(),
            )  # fmt: skip
            return found

        step()
        if not machine.GPU:
            return
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, lse = step()
        for n in range(4):
            for tensor, name in ((q, "q"), (k, "k"), (v, "v")):
                tensor.copy_(
                    torch.stack(
                        [getattr(s, name)[len(getattr(s, name)) - 4 + n][None] for s in call.sequences]
                    )
                )
            lengths.copy_(_int32([len(s.k) - 4 + n for s in call.sequences]))
            graph.replay()
            assert_same(row(expected, n, n + 1), Rows(out[0], lse[0]), f"step {n}")


@gpu
def test_control_another_position_turns_otherwise(control: Any) -> None:
    call = appending(CAUSAL, 1, rotary="halves")
    plain = appending(CAUSAL, 1)
    with deterministic_mode(split_size=SPLIT):
        control(not same_bits(call.rows().out, plain.rows().out))


Wrong = Callable[[dict[str, Any]], dict[str, Any]]


def table(batch: int = 2) -> torch.Tensor:
    return torch.zeros((batch, 4), dtype=torch.int32, device=DEVICE)


WRONG: dict[str, tuple[Wrong, type[Exception], str]] = {
    "leftpad": (lambda a: {"cache_leftpad": a["cache_seqlens"]}, NotImplementedError, "does not support cache_leftpad"),
    "no lengths": (lambda a: {"cache_seqlens": None}, ValueError, "cache_seqlens must be given with k and v"),
    "v alone": (lambda a: {"k": None}, ValueError, "k and v go together"),
    "int64 lengths": (lambda a: {"cache_seqlens": a["cache_seqlens"].long()}, ValueError, "cache_seqlens must have dtype int32"),
    "lengths of others": (lambda a: {"cache_seqlens": a["cache_seqlens"][:1]}, ValueError, "cache_seqlens must have shape"),
    "two tables": (lambda a: {"page_table": table(), "block_table": table()}, ValueError, "two names of one argument"),
    "a table of others": (lambda a: {"page_table": table(3)}, ValueError, "page_table must have shape"),
    "an index and pages": (
        lambda a: {"page_table": table(), "cache_batch_idx": a["cache_seqlens"]},
        ValueError,
        "cache_batch_idx does not go with pages",
    ),
    "a dtype": (lambda a: {"v_cache": a["v_cache"].float()}, ValueError, "query and v_cache must have the same dtype"),
    "float32": (lambda a: {"q": a["q"].float()}, ValueError, "only supports fp16 and bf16"),
    "dimensions": (lambda a: {"q": a["q"][0]}, ValueError, "q must have 4 dimensions"),
    "a head dim": (lambda a: {"q": a["q"][..., :60]}, ValueError, "head dims must be multiples of 16"),
    "heads": (lambda a: {"q": a["q"][:, :, :3]}, ValueError, "Number of heads in key/value must divide"),
    "few sequences": (lambda a: {"k_cache": a["k_cache"][:1], "v_cache": a["v_cache"][:1]}, ValueError, "fewer than q"),
    "odd rows": (
        lambda a: {"k_cache": torch.empty_like(a["k_cache"]).repeat(1, 1, 1, 2)[..., 1:65]},
        ValueError,
        "k_cache .* must have a contiguous last dimension, and rows that begin at multiples of 16 bytes",
    ),
    "too many": (lambda a: {n: a[n].repeat(1, 300, 1, 1) for n in "kv"}, ValueError, "more than the 256 of the cache"),
    "rotary alone": (lambda a: {"rotary_cos": a["q"][0, 0, :, :16]}, ValueError, "rotary_cos and rotary_sin go together"),
    "few positions": (
        lambda a: dict.fromkeys(("rotary_cos", "rotary_sin"), a["q"].new_empty(255, 16)),
        ValueError,
        "rotary_cos has 255 positions",
    ),
    "rotary dim": (
        lambda a: dict.fromkeys(("rotary_cos", "rotary_sin"), a["q"].new_empty(256, 12)),
        ValueError,
        "rotary_dim must be a multiple of 16",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_one_error_that_names_it(name: str) -> None:
    wrong, kind, text = WRONG[name]
    with compiling():
        config = Config(64, heads=4, heads_k=2)
        tokens: Sequence = draw(config, 2, 2)
        q, k, v = (t[:, None] for t in (tokens.q, tokens.k, tokens.v))
        given: dict[str, Any] = {"q": q, "k": k, "v": v, "cache_seqlens": _int32([3, 4])}
        given |= {f"{n}_cache": k.new_empty(2, 256, 2, 64) for n in "kv"}
        with pytest.raises(kind, match=text):
            flash_attn_with_kvcache(**{**given, **wrong(given)})
