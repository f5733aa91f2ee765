"""What the GPU half calls. The static half makes the same calls on tensors without values, to compile their kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import machine
import torch
from bits import Rows
from calls import Gradients, dense, dense_gradients, paged, varlen, varlen_gradients
from flash_attn.cute import interface
from problems import Config, Sequence, draw

DIMS = (64, 96, 128, 192, 256)
FULL_DIMS = (64, 128, 256)  # those of most models, with every feature; a compile of a kernel takes seconds


def few_configs_of(d: int, d_v: int = 0) -> list[Config]:
    """What changes the loops of a head dim's kernel. Upstream's gradients of grouped heads ask for one head dim."""
    return [
        Config(d, head_dim_v=d_v),
        Config(d, causal=True, heads=4 if d_v else 8, heads_k=4 if d_v else 2, head_dim_v=d_v),
        Config(d, window=(300, 50), head_dim_v=d_v),
    ]


def configs_of(d: int) -> list[Config]:
    """What changes the kernel of a head dim, and what changes its loops."""
    some = few_configs_of(d)
    rest = [
        Config(d, causal=True, dtype="fp16"),
        Config(d, window=(300, 0)),
        Config(d, softcap=15.0, causal=True),
        Config(d, sink=True, causal=True),
    ]
    return some + rest if d in FULL_DIMS else some


CONFIGS = [config for d in DIMS for config in configs_of(d)] + few_configs_of(192, 128)
LENGTH = 1100  # of a sequence of the contract's: neither a multiple of a tile's rows nor of its keys
EDGES = (1, 63, 64, 65, 79, 80, 81, 127, 128, 129, 143, 144, 145, 191, 192, 193, 1024)
PAGES = (64, 128)

Forward = Callable[[Config], Iterator[tuple[Rows, Rows]]]  # the rows alone, and in another layout
Backward = Callable[[Config], tuple[Gradients, Gradients]]


def own(config: Config, length: int = LENGTH) -> Sequence:
    """The sequence whose bits are asked for."""
    return draw(config, length, length, "own")


def neighbour(config: Config, length: int, *name: object) -> Sequence:
    """Another one, of other values."""
    return draw(config, length, length, "neighbour", *name)


def row(rows: Rows, start: int, stop: int) -> Rows:
    """Some queries' results."""
    return Rows(rows.out[start:stop], rows.lse[:, start:stop])


def last(config: Config, sequence: Sequence) -> Sequence:
    """The last query, on all keys: the call of a decode step."""
    length = len(sequence.q)
    return sequence.piece(length - 1, length)


def in_a_batch(config: Config) -> Iterator[tuple[Rows, Rows]]:
    mine = own(config)
    batch = [neighbour(config, LENGTH, i) for i in range(33)]
    batch[17] = mine
    yield dense(config, [mine]), dense(config, batch, 17)


def beside(lengths: tuple[int, int], config: Config) -> Iterator[tuple[Rows, Rows]]:
    mine = own(config)
    before, after = (neighbour(config, length, length) for length in lengths)
    yield dense(config, [mine]), varlen(config, [before, mine, after], 1)


def in_chunks(config: Config) -> Iterator[tuple[Rows, Rows]]:
    """A prefill in pieces of 256 queries, each on the keys so far; of a window that looks ahead, its last piece."""
    mine = own(config)
    whole = dense(config, [mine])
    ahead = config.window[1] > 0
    everything = not config.causal and config.window == (-1, -1)
    for start in range(0, LENGTH, 256):
        stop = min(start + 256, LENGTH)
        if ahead and stop < LENGTH:
            continue
        piece = mine.piece(start, stop)
        if everything:
            piece = Sequence(piece.q, mine.k, mine.v, piece.dout)
        yield row(whole, start, stop), dense(config, [piece])


def decoded(config: Config) -> Iterator[tuple[Rows, Rows]]:
    mine = own(config)
    yield row(dense(config, [mine]), LENGTH - 1, LENGTH), dense(config, [last(config, mine)])


def decoded_beside(length: int, config: Config) -> Iterator[tuple[Rows, Rows]]:
    mine = own(config)
    calls = [last(config, mine), neighbour(config, length)]
    yield row(dense(config, [mine]), LENGTH - 1, LENGTH), varlen(config, calls)


def in_pages(page: int, config: Config) -> Iterator[tuple[Rows, Rows]]:
    mine = own(config)
    yield dense(config, [mine]), paged(config, [neighbour(config, 300), mine], page, 1)


def at_edges(config: Config) -> Iterator[tuple[Rows, Rows]]:
    """Lengths around those of tiles, all in one call, and each alone."""
    sequences = [own(config, length) for length in EDGES]
    for which, sequence in enumerate(sequences):
        yield dense(config, [sequence]), varlen(config, sequences, which)


def captured(config: Config) -> Iterator[tuple[Rows, Rows]]:
    """A replay of a CUDA graph, on values that came after its capture."""
    mine, held = own(config), neighbour(config, LENGTH)
    alone = dense(config, [mine])
    if not machine.GPU:
        yield alone, alone
        return
    dense(config, [held])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows = dense(config, [held])
    for name in "qkv":
        getattr(held, name).copy_(getattr(mine, name))
    graph.replay()
    yield alone, rows


FORWARD: dict[str, Forward] = {
    "in a batch of 33": in_a_batch,
    "packed beside 9 and 10": partial(beside, (9, 10)),
    "packed beside 3000 and 1": partial(beside, (3000, 1)),
    "prefill in chunks of 256": in_chunks,
    "decode": decoded,
    "decode beside a prefill of 9": partial(decoded_beside, 9),
    "decode beside a prefill of 10": partial(decoded_beside, 10),
    **{f"in pages of {page}": partial(in_pages, page) for page in PAGES},
    "packed, lengths at tiles' edges": at_edges,
    "CUDA graph": captured,
}


def gradients_in_a_batch(config: Config) -> tuple[Gradients, Gradients]:
    mine = own(config)
    batch = [neighbour(config, LENGTH, i) for i in range(5)]
    batch[3] = mine
    return dense_gradients(config, [mine]), dense_gradients(config, batch, 3)


def gradients_beside(lengths: tuple[int, int], config: Config) -> tuple[Gradients, Gradients]:
    mine = own(config)
    before, after = (neighbour(config, length, length) for length in lengths)
    return dense_gradients(config, [mine]), varlen_gradients(config, [before, mine, after], 1)


def gradients_again(config: Config) -> tuple[Gradients, Gradients]:
    mine = own(config)
    return dense_gradients(config, [mine]), dense_gradients(config, [mine])


BACKWARD: dict[str, Backward] = {
    "gradients, again": gradients_again,
    "gradients in a batch of 5": gradients_in_a_batch,
    "gradients packed beside 9 and 10": partial(gradients_beside, (9, 10)),
    "gradients packed beside 3000 and 1": partial(gradients_beside, (3000, 1)),
}


def other_tiles(config: Config, sequence: Sequence) -> Rows:
    """The same rows from tiles of another number of keys: the comparison must see that."""
    q, k, v = (getattr(sequence, name)[None] for name in "qkv")
    with torch.no_grad():
        out, lse, *_ = interface._flash_attn_fwd(
            q, k, v, causal=config.causal, tile_mn=(128, 64), return_lse=True
        )
    return Rows(out[0], lse[0])
