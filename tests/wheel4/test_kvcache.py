"""flash_attn_with_kvcache: a token that was appended gives the row that it has in a prefill, wherever the cache lies."""

from __future__ import annotations

import warnings
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
from flash_attn.cute import (
    deterministic_mode,
    flash_attn_with_kvcache,
    fork_kvcache,
    fork_split,
    fork_tiles,
    interface,
)
from flash_attn.cute.fork_mode import DeterministicMode
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
def test_lengths_past_the_cache_give_nan_and_leave_others_alone() -> None:
    """Nothing else makes them NaN: what the cache holds past the sequences' ends is finite here."""
    sequences = appending(CAUSAL, 1).sequences
    call = Appending(CAUSAL, sequences, 0, CAPACITY, page=16)
    places, caches = call.buffers()
    for cache in caches:
        cache.nan_to_num_(nan=7.0)
    q = torch.stack([s.q[-1:] for s in sequences])
    lengths = _int32([2**31 - 1, len(sequences[1].k), len(sequences[2].k), CAPACITY + 1])
    with deterministic_mode(split_size=SPLIT):
        out, lse = flash_attn_with_kvcache(
            q, *caches, cache_seqlens=lengths, causal=True, return_softmax_lse=True, **places
        )
        for which in (0, 3):
            assert out[which].isnan().all()
            assert lse[which].isnan().all()
        for which in (1, 2):
            alone, end = dense(CAUSAL, [sequences[which]]), len(sequences[which].q)
            assert_same(row(alone, end - 1, end), Rows(out[which], lse[which]), f"sequence {which}")


@gpu
def test_a_table_may_be_one_row_for_all_sequences() -> None:
    """Before and after a table that has a row for each: kernels are compiled for tables that are one row."""
    mine = own(CAUSAL)
    places, caches = Appending(CAUSAL, [mine], 0, CAPACITY, page=16).buffers()
    one = places["page_table"]
    q, lengths = mine.q[-1:].expand(3, 1, -1, -1).contiguous(), _int32([LENGTH, 300, LENGTH])
    with deterministic_mode(split_size=SPLIT):
        expected = row(dense(CAUSAL, [mine]), LENGTH - 1, LENGTH)
        for each in (one.expand(3, -1), one.repeat(3, 1), one.expand(3, -1)):
            out, lse = flash_attn_with_kvcache(
                q, *caches, cache_seqlens=lengths, page_table=each, causal=True, return_softmax_lse=True
            )
            for which in (0, 2):
                assert_same(expected, Rows(out[which], lse[which]), f"table of strides {each.stride()}")


@gpu
@pytest.mark.parametrize("page", [None, 16])
def test_caches_may_have_the_heads_before_the_tokens(page: int | None) -> None:
    """As views: (sequences or pages, heads_k, tokens, head_dim) in memory."""
    call = appending(CAUSAL, 3, page=page)
    places, caches = call.buffers()
    caches = [cache.transpose(1, 2).contiguous().transpose(1, 2) for cache in caches]
    with deterministic_mode(split_size=SPLIT):
        assert_same(in_prefill(call), call.call(places, caches), "heads before tokens")
    for cache, tokens in zip(caches, (call.sequences[0].k, call.sequences[0].v), strict=True):
        assert_same_bits(call.rows_of(cache)[:LENGTH], tokens, "the cache")


@gpu
def test_results_go_where_the_caller_wants_them() -> None:
    """And nowhere else: out is a part of a larger buffer. The rows of a sequence that does not fit are NaN there."""
    call = appending(CAUSAL, 3, page=16)
    long = draw(CAUSAL, CAPACITY + 1, CAPACITY + 1, "long")
    call = replace(call, sequences=[*call.sequences, long])
    places, caches = call.buffers()
    buffer = torch.full((len(call.sequences), 5, 8, 256), 7.0, dtype=torch.bfloat16, device=DEVICE)
    out = buffer[:, 1:4, :, :128]
    with deterministic_mode(split_size=SPLIT):
        rows = call.call({**places, "out": out}, caches)
        assert_same(in_prefill(call), rows, "out")
    assert_same_bits(rows.out, out[0], "the result is out")
    assert out[-1, 2].isnan().all()
    out.fill_(7.0)
    assert (buffer == 7.0).all()


@gpu
def test_more_sequences_than_a_scheduler_walks() -> None:
    """Above 256 upstream finds a tile's sequence by a table."""
    sequences = [neighbour(CAUSAL, 5 + i % 40, i) for i in range(299)] + [own(CAUSAL, 300)]
    call = Appending(CAUSAL, sequences, 1, 512)
    places, caches = call.buffers()
    with deterministic_mode(split_size=SPLIT):
        for which in (0, 255, 256, 299):
            fresh = [cache.clone() for cache in caches]
            assert_same(in_prefill(call, which), call.call(places, fresh, which), f"sequence {which}")


@gpu
def test_num_splits_is_warned_about_once() -> None:
    call = appending(CAUSAL, 1)
    places, caches = call.buffers()
    fork_split._warn_of_splits.cache_clear()
    with deterministic_mode(split_size=SPLIT), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for splits in (4, 4, 1, 0):
            assert_same(
                in_prefill(call), call.call({**places, "num_splits": splits}, caches), f"{splits} splits"
            )
    assert len([w for w in caught if "num_splits" in str(w.message)]) == 1


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
@pytest.mark.parametrize("rotary", ["interleaved", "halves"])
def test_control_another_position_turns_otherwise(rotary: str, control: Any) -> None:
    """The same token as the key at two positions, the first of which has a token less before it."""
    keys = []
    for first in (1, 0):
        mine = own(CAUSAL)
        mine = replace(mine, q=mine.q[first:], k=mine.k[first:], v=mine.v[first:])
        call = Appending(CAUSAL, [mine], 1, CAPACITY, rotary=rotary)
        places, caches = call.buffers()
        call.call(places, caches)
        keys.append(call.rows_of(caches[0])[len(mine.k) - 1])
        assert_same_bits(call.rows_of(caches[1])[len(mine.k) - 1], mine.v[-1], "its value")
    control(not same_bits(*keys))


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
    "splits": (lambda a: {"num_splits": 4}, NotImplementedError, "num_splits=4: kernels of compute capability 9.0 have one"),
    "a small out": (lambda a: {"out": a["q"].new_empty(2, 1, 3, 64)}, ValueError, "out must have shape"),
    "out of fewer sequences": (lambda a: {"out": a["q"].new_empty(1, 1, 4, 64)}, ValueError, "out must have shape"),
    "out of a dtype": (lambda a: {"out": a["q"].half()}, ValueError, "query and out must have the same dtype"),
    "out elsewhere": (lambda a: {"out": torch.empty(a["q"].shape, dtype=a["q"].dtype, device="cpu")}, ValueError, "out is on cpu"),
    "out of one row": (lambda a: {"out": a["q"][:1].expand(2, -1, -1, -1)}, ValueError, r"out \(strides .* one element many times"),
    "odd rows of out": (lambda a: {"out": a["q"].repeat(1, 1, 1, 2)[..., 1:65]}, ValueError, r"out \(strides .* multiples of 16 bytes"),
    "sinks": (lambda a: {"learnable_sink": a["q"][0, 0, :3, 0]}, ValueError, "learnable_sink must have shape"),
    "sinks of a dtype": (lambda a: {"learnable_sink": a["cache_seqlens"].repeat(2)}, ValueError, "learnable_sink must have dtype"),
    "rotary dim": (
        lambda a: dict.fromkeys(("rotary_cos", "rotary_sin"), a["q"].new_empty(256, 12)),
        ValueError,
        "rotary_dim must be a multiple of 16",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_one_error_that_names_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is appended."""
    monkeypatch.setattr(
        fork_kvcache, "_launch", lambda *_: pytest.fail("the kernel that appends was launched")
    )
    wrong, kind, text = WRONG[name]
    with compiling():
        config = Config(64, heads=4, heads_k=2)
        tokens: Sequence = draw(config, 2, 2)
        q, k, v = (t[:, None] for t in (tokens.q, tokens.k, tokens.v))
        given: dict[str, Any] = {"q": q, "k": k, "v": v, "cache_seqlens": _int32([3, 4])}
        given |= {f"{n}_cache": k.new_empty(2, 256, 2, 64) for n in "kv"}
        with pytest.raises(kind, match=text):
            flash_attn_with_kvcache(**{**given, **wrong(given)})


STRIDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "every second": lambda t: t.repeat_interleave(2, dim=0)[::2],
    "one for all": lambda t: t[:1].expand(len(t)),
    "one of one": lambda t: t[:1].expand(len(t))[:1],
}


@pytest.mark.parametrize("name", STRIDED)
def test_kernels_get_tables_that_lie_dense(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever strides the caller's have; of floats they may have what a kernel is compiled for."""
    launched: list[tuple[torch.Tensor | None, ...]] = []
    attended: list[dict[str, Any]] = []

    def attend(*_: Any, **given: Any) -> tuple[torch.Tensor, None]:
        attended.append(given)
        return given["out"], None

    monkeypatch.setattr(fork_kvcache, "_launch", lambda *given: launched.append(given[-1]))
    monkeypatch.setattr(fork_kvcache, "_flash_attn_fwd", attend)
    with compiling():
        tables = [STRIDED[name](_int32([3, 4, 5])) for _ in range(2)]
        q = torch.zeros(len(tables[0]), 1, 4, 64, dtype=torch.bfloat16, device=DEVICE)
        cache = torch.zeros(6, 16, 4, 64, dtype=torch.bfloat16, device=DEVICE)
        sink = torch.zeros(8, device=DEVICE)[::2]
        new = {"k": q, "v": q, "cache_seqlens": tables[0]}
        flash_attn_with_kvcache(q, cache, cache, **new, cache_batch_idx=tables[1], learnable_sink=sink)
        flash_attn_with_kvcache(q, cache, cache, **new, page_table=tables[1][:, None])
    for lengths, indices, table, *_ in (tensors[6:] for tensors in launched):
        for tensor in (lengths, indices, table):
            assert tensor is None or tensor.stride(-1) == 1
    assert attended[0]["learnable_sink"].stride() == (1,)
    assert all(given["page_table"].stride(-1) == 1 for given in attended)


WHOLE_PAGES = {  # head dims: with the mode on, and off; off with a window
    **{(d, d): (128, 128, 128) for d in (16, 32, 48, 64, 80, 96, 112, 128)},
    (144, 144): (128, 64, 64),
    (160, 160): (128, 96, 96),
    (176, 176): (64, 64, 64),
    (192, 192): (64, 112, 96),
    (192, 128): (128, 128, 96),
    **{(d, d): (64, 64, 64) for d in (208, 224, 240)},
    (256, 256): (64, 80, 64),
}


def test_pages_that_are_loaded_whole() -> None:
    """Those of as many tokens as a tile has keys, in flash_attn_varlen_func: docs/flash-attention-4.md has the table."""
    modes = (DeterministicMode(True, 2048), DeterministicMode(False, 2048))
    for head_dims, (on, off, off_with_a_window) in WHOLE_PAGES.items():
        for causal, local in ((False, False), (True, False), (False, True)):
            usual = interface._tile_size_fwd_sm90(*head_dims, causal, local)
            found = [fork_tiles.loadable(usual, mode, 90, head_dims, True).n_block_size for mode in modes]
            assert found == [on, off_with_a_window if local else off], (head_dims, causal, local)
