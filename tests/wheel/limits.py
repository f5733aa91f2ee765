"""Calls at the edge of what tensors hold: far rows, full caches, lengths that a call names too short, little scratch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import flash_attn_2_cuda
import harness
import pytest
import torch
from flash_attn import (
    deterministic_mode,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    fork_layout,
)
from gradients import Gradients, leaves, upstream_of
from harness import DTYPES, Config, Draw, Rows, Sequence, assert_same_bits, cu_seqlens, route
from torch import Tensor

FAR_KEYS = 2**24 + 64  # elements between tokens: 128 of them, a block of keys, pass 2**31
FAR_QUERIES = 2**25 + 64  # 64 of them, the fewest rows of a block in the backward pass, pass it too


@contextmanager
def scratch(budget: int) -> Iterator[None]:
    """Cut calls whose chunks spread into slices whose scratch takes so many bytes; 0: as ever."""
    before = flash_attn_2_cuda._test_scratch(budget)
    try:
        yield
    finally:
        flash_attn_2_cuda._test_scratch(before)


def far_apart(tensor: Tensor, stride: int) -> Tensor:
    """The same values (1, length, heads, dim), tokens so many elements apart: as in a view of a larger tensor."""
    _, length, heads, dim = tensor.shape
    storage = torch.empty((length - 1) * stride + heads * dim, dtype=tensor.dtype, device=tensor.device)
    tokens = storage.as_strided(tensor.shape, (storage.numel(), stride, dim, 1))
    tokens.copy_(tensor)
    return tokens


def assert_that_a_cache_s_tokens_may_lie_far_apart(config: Config, where: str, mode: bool) -> None:
    """Of a cache of two chunks of two blocks, the second of which ends within one."""
    sequence = Draw(9).sequence(config, 3, 390)
    lengths = torch.tensor([len(sequence.k)], dtype=torch.int32, device=harness.DEVICE)
    near = [t[None] for t in (sequence.k, sequence.v)]
    results = []
    for keys in (near, [far_apart(t, FAR_KEYS) for t in near]):
        with deterministic_mode(mode, split_size=256), route(where):
            out, lse = flash_attn_with_kvcache(
                sequence.q[None],
                *keys,
                cache_seqlens=lengths,
                num_splits=0 if mode else 2,
                return_softmax_lse=True,
                **config.kwargs(),
            )
        results.append(Rows(out[0], lse[0]))
    results[1].assert_same(results[0], "far apart")


def assert_that_gradients_of_far_tokens_are_the_same(config: Config) -> None:
    """Of queries and upstream gradients of several blocks, which the backward kernel walks."""
    sequence = Draw(9).sequence(config, 140, 200)
    near = (sequence.q[None], upstream_of(sequence, 1)[None])
    results = []
    for q, upstream in (near, [far_apart(t, FAR_QUERIES) for t in near]):
        inputs = [q.detach().requires_grad_(), *leaves((sequence.k[None], sequence.v[None]))]
        with deterministic_mode(split_size=256):
            out = flash_attn_func(*inputs, **config.kwargs())
        results.append(Gradients(*torch.autograd.grad(out, inputs, upstream)))
    results[1].assert_same(results[0], "far apart")


def assert_that_the_extension_refuses_far_tokens(config: Config) -> None:
    """What the backward kernel steps through; flash_attn copies it, a direct caller of the extension must."""
    tensors = {name: torch.zeros(1, 2, 1, config.head_dim, dtype=DTYPES[config.dtype], device=harness.DEVICE)
               for name in ("dout", "q", "k", "v", "out", "dq", "dk", "dv")}  # fmt: skip
    lse = torch.zeros(1, 1, 2, dtype=torch.float32, device=harness.DEVICE)
    for far in ("q", "out", "dout", "dq"):
        given = [far_apart(t, fork_layout.FAR) if name == far else t for name, t in tensors.items()]
        with pytest.raises(ValueError, match=rf"^{far}'s tokens lie {fork_layout.FAR} elements apart"):
            flash_attn_2_cuda.bwd(
                *given[:5], lse, *given[5:], None, 0.0, 1.0, config.causal, -1, -1, 0.0, False, None, None
            )


def assert_that_a_cache_ends_where_it_ends(
    config: Config,
    capacity: int,
    length: int,
    where: str,
    mode: bool,
    in_larger: bool = False,
    leftpad: int = 0,
    num_splits: int = 0,
    page: int = 0,
) -> None:
    """Of two sequences one has a length past the cache. Its rows that would need more are NaN; the other's are as ever."""
    draw = Draw(11)
    sequences = [draw.sequence(config, 4, capacity) for _ in range(2)]
    q, k, v = (torch.stack([getattr(s, name) for s in sequences]) for name in "qkv")
    own: dict[str, Tensor] = {}
    if in_larger:  # what lies behind each sequence's cache must reach no row
        wide = [
            torch.full((2, length + 100, *t.shape[2:]), math.nan, dtype=t.dtype, device=t.device)
            for t in (k, v)
        ]
        for buffer, known in zip(wide, (k, v), strict=True):
            buffer[:, :capacity] = known
        k, v = (buffer[:, :capacity] for buffer in wide)
    if leftpad:
        own["cache_leftpad"] = torch.tensor([0, leftpad], dtype=torch.int32, device=harness.DEVICE)
    if page:
        table = torch.arange(2 * capacity // page, dtype=torch.int32, device=harness.DEVICE)
        own["block_table"] = table.view(2, -1)
        k, v = (t.reshape(-1, page, *t.shape[2:]) for t in (k, v))
    results = []
    for lengths in ([90, capacity], [90, length]):
        told = torch.tensor(lengths, dtype=torch.int32, device=harness.DEVICE)
        with deterministic_mode(mode, split_size=256), route(where or "as the GPU is filled"):
            options = {**config.kwargs(), **own, "num_splits": num_splits}
            results.append(flash_attn_with_kvcache(q, k, v, cache_seqlens=told, **options))
    assert_same_bits(results[1][0], results[0][0], "the other sequence")
    # The last row sees the last key, each before it one less.
    seen = max(0, 4 - (length - capacity)) if config.causal else 0
    assert results[1][1, :seen].isfinite().all()
    assert results[1][1, seen:].isnan().all()


MOST_TOKENS, MOST_TOKENS_OF_WINDOW = 2**31 - 1024, 2**30 - 1024  # that kernels count; core/params.h has them


def assert_that_rows_of_no_sequence_are_zeros(
    config: Config, sequences: list[Sequence], past: int, slack: int, page: int = 0
) -> None:
    """Behind the last sequence's, so many; the others have the bits of a call without. Named lengths are longer by `slack`."""
    len_q, len_k = [len(s.q) for s in sequences], [len(s.k) for s in sequences]
    q, k, v = (torch.cat([getattr(s, name) for s in sequences]) for name in "qkv")
    longest_q, longest_k = max(2, *len_q) + slack, max(1, *len_k) + slack
    own = harness.extras(sequences, longest_k, packed=True)
    if page:
        k, v, own["block_table"] = harness.in_pages(sequences, Draw(1).generator, page)
    behind = [q, *(t.transpose(0, 1) for t in own.values() if t.dim() == 3)]
    wide = [torch.cat([t, t.new_ones(past, *t.shape[1:])]) for t in behind]
    names = [name for name, t in own.items() if t.dim() == 3]
    more = {**own, **{name: t.transpose(0, 1) for name, t in zip(names, wide[1:], strict=True)}}
    found = []
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # which has torch fill what it allocates with NaN
    try:
        for queries, extra in ((q, own), (wide[0], more)):
            out, lse, _ = flash_attn_varlen_func(
                queries, k, v, cu_seqlens(len_q), cu_seqlens(len_k), longest_q, longest_k,
                return_attn_probs=True, **config.kwargs(), **extra,
            )  # fmt: skip
            found.append(Rows(out, lse))
    finally:
        torch.use_deterministic_algorithms(before)
    end = sum(len_q)
    Rows(found[1].out[:end], found[1].lse[:, :end]).assert_same(found[0], "with rows of no sequence behind")
    assert not found[1].out[end:].any()
    assert not found[1].lse[:, end:].any()


def assert_that_rotary_tables_end_where_they_end(config: Config, filled: int, new: int, queries: int) -> None:
    """Queries that stand past the tables, or before them, are NaN, and no other; new keys are appended."""
    capacity, dtype = 128, DTYPES[config.dtype]
    draw = Draw(13)
    sequence = draw.sequence(config, queries, new)
    caches = [
        torch.zeros(1, capacity, config.heads_k, config.head_dim, dtype=dtype, device=harness.DEVICE)
        for _ in range(2)
    ]
    angles = torch.rand(capacity, config.head_dim // 2, generator=draw.generator, device=harness.DEVICE)
    length = torch.tensor([filled], dtype=torch.int32, device=harness.DEVICE)
    with deterministic_mode(split_size=256):
        out = flash_attn_with_kvcache(
            sequence.q[None],
            *caches,
            sequence.k[None],
            sequence.v[None],
            angles.cos().to(dtype),
            angles.sin().to(dtype),
            length,
            causal=True,
        )
    rows = torch.arange(queries, device=harness.DEVICE)
    sees, place = rows + filled + new - queries >= 0, rows + filled
    stands = (place >= 0) & (place < capacity)
    assert out[0, sees & ~stands].isnan().all()
    assert out[0, ~sees | stands].isfinite().all()
    first = max(filled, 0)
    assert_same_bits(caches[1][0, first : filled + new], sequence.v[first - filled :], "the values appended")


def assert_that_all_new_keys_are_appended(
    config: Config,
    before: int,
    new: int,
    where: str,
    split_size: int,
    queries: int = 1,
    mode: bool = True,
    page: int = 0,
) -> None:
    """Also those that no query's window reaches; page: the tokens of one, or 0."""
    sequence, paged, page = Draw(17).sequence(config, queries, before + new), page > 0, page or 256
    capacity = -(-(before + new + 9) // page) * page
    buffers = [
        torch.full((1, capacity, *t.shape[1:]), math.nan, dtype=t.dtype, device=t.device)
        for t in (sequence.k, sequence.v)
    ]
    for buffer, known in zip(buffers, (sequence.k, sequence.v), strict=True):
        buffer[0, :before] = known[:before]
    own = harness.extras([sequence], capacity)
    own["cache_seqlens"] = torch.tensor([before], dtype=torch.int32, device=harness.DEVICE)
    if paged:  # the last page first
        own["block_table"] = (
            torch.arange(capacity // page, device=harness.DEVICE).flip(0).to(torch.int32)[None]
        )
        buffers = [t.view(-1, page, *t.shape[2:]).flip(0).contiguous() for t in buffers]
    with deterministic_mode(mode, split_size=split_size), route(where):
        added = (t[None, before:].contiguous() for t in (sequence.k, sequence.v))
        out, lse = flash_attn_with_kvcache(
            sequence.q[None], *buffers, *added, return_softmax_lse=True, **config.kwargs(), **own
        )
        if mode:
            harness.dense(config, [sequence]).assert_same(Rows(out[0], lse[0]), "appended")
    for buffer, known in zip(buffers, (sequence.k, sequence.v), strict=True):
        cached = buffer.flip(0).flatten(0, 1) if paged else buffer[0]
        assert_same_bits(cached[: before + new], known, "the cache")
        assert cached[before + new :].isnan().all()


def assert_that_gradients_past_named_lengths_are_nan(config: Config, mode: bool) -> None:
    """Of two packed sequences, of which the first is longer than the call says; the other's are finite."""
    draw = Draw(19)
    sequences = [draw.sequence(config, 300, 300), draw.sequence(config, 70, 120)]
    q, k, v = (torch.cat([getattr(s, name) for s in sequences]) for name in "qkv")
    cu_q, cu_k = cu_seqlens((300, 70)), cu_seqlens((300, 120))
    dout = torch.cat([upstream_of(s, 1) for s in sequences])
    scale = config.head_dim**-0.5
    for named_q, named_k in ((300, 200), (200, 300), (200, 200)):
        with deterministic_mode(mode, split_size=256):
            lengths = (cu_q, cu_k, None)
            options = (named_q, named_k, 0.0, scale, False, config.causal, -1, -1, 0.0, False, None)
            out, lse, *_ = flash_attn_2_cuda.varlen_fwd(q, k, v, None, *lengths, None, None, None, *options)
            dq, dk, dv = (torch.full_like(t, 7.0) for t in (q, k, v))
            flash_attn_2_cuda.varlen_bwd(dout, q, k, v, out, lse, dq, dk, dv, *lengths, *options, None)
        for gradient, named in ((dq, named_q), (dk, named_k), (dv, named_k)):
            assert gradient[named:300].isnan().all()
            assert gradient[300:].isfinite().all()
            assert not (gradient == 7.0).all(-1).any()


def assert_that_gradients_of_rows_of_no_sequence_are_zeros(config: Config, mode: bool) -> None:
    """Rows past cu_seqlens[-1], of q and of k, of which there may be more than a thread block has rows."""
    draw = Draw(29)
    for lengths, past in (((70, 130), (3, 500)), ((200, 40), (900, 0)), ((64, 0), (1, 1))):
        sequences = [draw.sequence(config, length, length + 20) for length in lengths if length]
        tokens = [sum(len(getattr(s, name)) for s in sequences) for name in "qk"]
        starts = [
            harness.cu_seqlens([len(getattr(s, name)) for s in sequences] + [0] * lengths.count(0))
            for name in "qk"
        ]
        q, k, v = (
            torch.cat([*own, own[0].new_full((rows, *own[0].shape[1:]), math.nan)])
            for own, rows in (([getattr(s, name) for s in sequences], past[name != "q"]) for name in "qkv")
        )
        dout = torch.full_like(q, math.nan)
        dout[: tokens[0]] = 1.0
        options = (max(lengths), max(lengths) + 20, 0.0, config.head_dim**-0.5, False, config.causal)
        options += (-1, -1, 0.0, False, None)
        with deterministic_mode(mode, split_size=256):
            out, lse, *_ = flash_attn_2_cuda.varlen_fwd(
                q, k, v, None, *starts, None, None, None, None, *options
            )
            dq, dk, dv = (torch.full_like(t, math.nan) for t in (q, k, v))
            flash_attn_2_cuda.varlen_bwd(dout, q, k, v, out, lse, dq, dk, dv, *starts, None, *options, None)
        for gradient, end in ((dq, tokens[0]), (dk, tokens[1]), (dv, tokens[1])):
            assert gradient[:end].isfinite().all()
            assert (gradient[end:] == 0).all(), f"{lengths}, {past}"


def overlapping_sequences(config: Config) -> tuple[Tensor, ...]:
    """Gradients of a call whose cu_seqlens are not sorted: garbage, but the call returns."""
    sequence = Draw(23).sequence(config, 500, 500)
    inputs = leaves((sequence.q, sequence.k, sequence.v))
    wrong = torch.tensor([0, 500, 100, 300], dtype=torch.int32, device=harness.DEVICE)
    with deterministic_mode(split_size=256):
        out = flash_attn_varlen_func(*inputs, wrong, wrong, 500, 500, **config.kwargs())
        return torch.autograd.grad(out, inputs, upstream_of(sequence, 1))
