"""Training bits are decoding bits: log-probabilities of a small Llama, teacher-forced and token by token.

    python tests/wheel/training_bits.py

A trainer computes the log-probabilities of a sampled text anew, in one pass over all its tokens, with
gradients. The sampler computed them token by token, on a cache in pages. Reinforcement learning takes the two
for the same numbers. They are the same bits here: with the deterministic mode on, attention gives a row the
same bits in both, and all else runs in tiles of one shape, in which a token has one place. So matrix products
and norms are the same calls in both passes. That is slow, and no library: it shows that attention is no
reason for a difference. The script prints how many log-probabilities differ with the mode on and off.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
from flash_attn import deterministic_mode, flash_attn_func, flash_attn_with_kvcache
from torch import Tensor
from torch.nn import functional

TILE = 64  # tokens
PAGE = 16


@dataclass(frozen=True)
class Shape:
    """Of the model."""

    layers: int = 2
    heads: int = 8
    heads_k: int = 2
    head_dim: int = 64
    hidden: int = 512
    inner: int = 1024
    vocabulary: int = 1000


class Model:
    """A Llama of random weights."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: str) -> None:
        generator = torch.Generator(device).manual_seed(0)

        def weight(out: int, into: int) -> Tensor:
            values = torch.randn(out, into, generator=generator, device=device) * into**-0.5
            return values.to(dtype).requires_grad_()

        self.shape, self.dtype, self.device = shape, dtype, device
        of_q, of_kv = (count * shape.head_dim for count in (shape.heads, shape.heads_k))
        self.embedding = weight(shape.vocabulary, shape.hidden)
        self.layers = [
            {
                "qkv": weight(of_q + 2 * of_kv, shape.hidden),
                "out": weight(shape.hidden, of_q),
                "up": weight(2 * shape.inner, shape.hidden),
                "down": weight(shape.hidden, shape.inner),
            }
            for _ in range(shape.layers)
        ]

    def log_probabilities(
        self, tokens: Tensor, first: int, attend: Callable[[int, Tensor, Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Of each token's successor, (tokens, vocabulary); the tokens stand from ``first`` on.

        attend: the attention of a layer for q, k and v of (tokens, heads, head dim).
        """
        shape = self.shape
        sizes = [count * shape.head_dim for count in (shape.heads, shape.heads_k, shape.heads_k)]
        x = functional.embedding(tokens, self.embedding)
        for number, layer in enumerate(self.layers):
            qkv = in_tiles(lambda rows, w=layer["qkv"]: functional.linear(norm(rows), w), x, first)
            q, k, v = (part.unflatten(-1, (-1, shape.head_dim)) for part in qkv.split(sizes, dim=-1))
            out = attend(number, rotated(q, first), rotated(k, first), v).flatten(-2)
            x = x + in_tiles(lambda rows, w=layer["out"]: functional.linear(rows, w), out, first)
            x = x + in_tiles(lambda rows, of=layer: feed_forward(rows, of["up"], of["down"]), x, first)
        return in_tiles(
            lambda rows: functional.linear(norm(rows), self.embedding).float().log_softmax(-1), x, first
        )


def norm(rows: Tensor) -> Tensor:
    return functional.rms_norm(rows, rows.shape[-1:])


def feed_forward(rows: Tensor, up: Tensor, down: Tensor) -> Tensor:
    gate, value = functional.linear(norm(rows), up).chunk(2, dim=-1)
    return functional.linear(functional.silu(gate) * value, down)


def rotated(rows: Tensor, first: int) -> Tensor:
    """Rotary embedding, element by element."""
    half = rows.shape[-1] // 2
    positions = torch.arange(first, first + len(rows), device=rows.device, dtype=torch.float32)
    frequencies = 10000 ** -(torch.arange(half, device=rows.device, dtype=torch.float32) / half)
    angle = (positions[:, None] * frequencies)[:, None]
    one, two = rows.float().chunk(2, dim=-1)
    turned = (one * angle.cos() - two * angle.sin(), two * angle.cos() + one * angle.sin())
    return torch.cat(turned, dim=-1).to(rows.dtype)


def in_tiles(function: Callable[[Tensor], Tensor], x: Tensor, first: int) -> Tensor:
    """The function on tiles of TILE tokens, each at its own place of its tile; places without one hold zeros."""
    before = first % TILE
    padded = functional.pad(x, [0, 0, before, -(before + len(x)) % TILE])
    return torch.cat([function(tile) for tile in padded.split(TILE)])[before : before + len(x)]


def teacher_forced(model: Model, tokens: Tensor) -> Tensor:
    """All tokens in one pass, with gradients; (tokens, vocabulary)."""

    def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_func(q[None], k[None], v[None], causal=True)[0]

    return model.log_probabilities(tokens, 0, attend)


@torch.no_grad()
def decoded(model: Model, tokens: Tensor, strangers: int = 0) -> Tensor:
    """Token by token on a cache in pages, in a batch with so many other sequences."""
    shape, batch = model.shape, 1 + strangers
    pages = -(-len(tokens) // PAGE)
    generator = torch.Generator(model.device).manual_seed(1)
    table = torch.randperm(batch * pages, generator=generator, device=model.device).int().view(batch, pages)
    size = (shape.layers, 2, batch * pages, PAGE, shape.heads_k, shape.head_dim)
    cache = torch.randn(size, generator=generator, device=model.device).to(model.dtype)

    def one(first: int) -> Tensor:
        def attend(number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            # The others have tokens of their own: the first one's, turned around.
            q, k, v = (torch.cat([t[None], -t[None].expand(strangers, -1, -1, -1)]) for t in (q, k, v))
            held = torch.full((batch,), first, dtype=torch.int32, device=model.device)
            caches = cache[number]
            out = flash_attn_with_kvcache(
                q, caches[0], caches[1], k, v, cache_seqlens=held, block_table=table, causal=True
            )
            return out[0]

        return model.log_probabilities(tokens[first : first + 1], first, attend)

    return torch.cat([one(first) for first in range(len(tokens))])


def compare(model: Model, tokens: Tensor, strangers: int) -> tuple[int, Tensor]:
    """How many log-probabilities differ in a bit, and those of the teacher-forced pass, with their gradients."""
    forced = teacher_forced(model, tokens)
    differing = forced.detach().view(torch.int32) != decoded(model, tokens, strangers).view(torch.int32)
    return int(differing.sum()), forced


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=700)
    parser.add_argument("--split-size", type=int, default=256)
    arguments = parser.parse_args()
    model = Model(Shape(), torch.bfloat16, "cuda")
    tokens = torch.randint(model.shape.vocabulary, (arguments.tokens,), device="cuda")
    for enabled in (False, True):
        with deterministic_mode(enabled, arguments.split_size):
            differing, forced = compare(model, tokens, strangers=3)
        print(f"mode {'on' if enabled else 'off'}: {differing} of {forced.numel()} log-probabilities differ")


if __name__ == "__main__":
    main()
