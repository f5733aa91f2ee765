"""What calls are made of, and attention by its definition."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import machine
import torch
from bits import Rows, seed_of
from torch import Tensor

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
DEVICE = "cuda"  # also where its tensors have no values


@dataclass(frozen=True)
class Config:
    """Everything about a call but its sequences. A window has -1 where it is open; values have 0: queries' head dim."""

    head_dim: int = 128
    dtype: str = "bf16"
    heads: int = 4
    heads_k: int = 4
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    sink: bool = False
    head_dim_v: int = 0

    def __str__(self) -> str:
        parts = [f"d{self.head_dim}" + f"v{self.head_dim_v}" * (self.head_dim_v > 0), self.dtype]
        parts += [f"h{self.heads}k{self.heads_k}"] * (self.heads != self.heads_k)
        parts += ["causal"] * self.causal
        parts += [f"window{self.window[0]}.{self.window[1]}"] * (self.window != (-1, -1))
        parts += ["softcap"] * (self.softcap > 0) + ["sink"] * self.sink
        return "-".join(parts)

    @property
    def head_dims(self) -> tuple[int, int]:
        """Of queries and keys, and of values."""
        return self.head_dim, self.head_dim_v or self.head_dim

    @property
    def feature(self) -> str:
        """All but the head dims."""
        return str(self).partition("-")[2]

    def sinks(self) -> Tensor | None:
        """One logit for each head, in bfloat16 as models have them."""
        if not self.sink:
            return None
        # Made there, because a CUDA graph may be capturing, which no copy from the host may enter.
        return torch.linspace(-1.0, 2.0, self.heads, device=DEVICE).to(torch.bfloat16)

    def options(self) -> dict[str, object]:
        """Of a call, but for gradients of the sink."""
        left, right = (None if side < 0 else side for side in self.window)
        return {"causal": self.causal, "window_size": (left, right), "softcap": self.softcap}


@dataclass(frozen=True)
class Sequence:
    """One sequence: ``q`` (Lq, H, D), ``k`` (Lk, H_k, D), ``v`` (Lk, H_k, D_v), and the gradient of its output."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    def piece(self, start: int, stop: int) -> Sequence:
        """Some of the queries, with the keys that lie before the last one's end; queries stand at the end of the keys."""
        end = len(self.k) - (len(self.q) - stop)
        return Sequence(self.q[start:stop], self.k[:end], self.v[:end], self.dout[start:stop])


def draw(config: Config, len_q: int, len_k: int, *name: object) -> Sequence:
    """A random sequence, which follows from its name and the call."""
    return _draw(config, len_q, len_k, *name) if machine.GPU else _drawn(config, len_q, len_k)


@functools.cache
def _drawn(config: Config, len_q: int, len_k: int) -> Sequence:
    """One for all names: without values, they are alike."""
    return _draw(config, len_q, len_k)


def _draw(config: Config, len_q: int, len_k: int, *name: object) -> Sequence:
    generator = torch.Generator("cpu").manual_seed(seed_of(config, len_q, len_k, *name))

    def normal(length: int, heads: int, head_dim: int) -> Tensor:
        values = torch.randn((length, heads, head_dim), generator=generator)
        return values.to(DTYPES[config.dtype]).to(DEVICE)

    d, d_v = config.head_dims
    q, dout = normal(len_q, config.heads, d), normal(len_q, config.heads, d_v)
    return Sequence(q, normal(len_k, config.heads_k, d), normal(len_k, config.heads_k, d_v), dout)


def hidden(config: Config, len_q: int, len_k: int) -> Tensor:
    """Which keys a query does not see (Lq, Lk)."""
    diagonal = (torch.arange(len_q, device=DEVICE) + len_k - len_q)[:, None]
    column = torch.arange(len_k, device=DEVICE)[None]
    left, right = config.window
    right = 0 if config.causal else right
    found = torch.zeros((len_q, len_k), dtype=torch.bool, device=DEVICE)
    if left >= 0:
        found |= column < diagonal - left
    if right >= 0:
        found |= column > diagonal + right
    return found


@dataclass(frozen=True)
class Exact:
    """Results of one sequence, and the gradients of its inputs."""

    rows: Rows
    gradients: dict[str, Tensor]


def reference(config: Config, sequence: Sequence, dtype: torch.dtype = torch.float64) -> Exact:
    """Attention by its definition, in ``dtype`` throughout, with its gradients."""
    inputs = {name: getattr(sequence, name).detach().to(dtype).requires_grad_() for name in "qkv"}
    sink = config.sinks()
    if sink is not None:
        inputs["sink"] = sink = sink.to(dtype).requires_grad_()
    groups = config.heads // config.heads_k
    q = inputs["q"].transpose(0, 1)
    k, v = (inputs[name].repeat_interleave(groups, 1).transpose(0, 1) for name in "kv")
    scores = q @ k.transpose(1, 2) / math.sqrt(config.head_dim)
    if config.softcap:
        scores = config.softcap * torch.tanh(scores / config.softcap)
    masked = hidden(config, len(sequence.q), len(sequence.k))
    scores = scores.masked_fill(masked, -math.inf)
    if sink is not None:  # one more key, whose value is 0
        scores = torch.cat([scores, sink[:, None, None].expand(-1, len(sequence.q), 1)], dim=-1)
    lse = scores.double().logsumexp(-1)
    probabilities = scores.softmax(-1)[..., : len(sequence.k)]
    out = (probabilities.masked_fill(masked.all(-1)[:, None], 0.0) @ v).transpose(0, 1)
    gradients = torch.autograd.grad(out, list(inputs.values()), sequence.dout.to(dtype))
    return Exact(Rows(out.detach(), lse.detach()), dict(zip(inputs, gradients, strict=True)))
