"""Steps of a serving engine on vLLM's own classes, with flash_attn's backend for it, and no engine around them."""

from __future__ import annotations

import math
from collections.abc import Sequence as Several
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import flash_attn_2_cuda
import torch
from flash_attn import deterministic_mode, flash_attn_func
from harness import DTYPES, Config, Draw, Sequence, assert_same_bits
from torch import Tensor

SPLIT_SIZE = (
    256  # where a test sets FA2_SPLIT_SIZE itself, small, so that short sequences have several chunks
)

# What both engines' cases on a GPU ask for: tokens of requests, and attention of decoders.
LENGTHS = (2100, 70, 1300)
DECODERS = [
    Config(heads=8, heads_k=2, causal=True),
    Config(heads=8, heads_k=1, causal=True, head_dim=128, dtype="bf16"),
    Config(heads=8, heads_k=8, causal=True, head_dim=96, dtype="bf16", softcap=30.0),
    Config(heads=8, heads_k=2, causal=True, dtype="bf16", window=(127, 0), sink="bf16"),
    Config(heads=8, heads_k=2, causal=True, dtype="bf16", sink="bf16"),
    Config(heads=4, heads_k=2, causal=True, head_dim=256, dtype="bf16"),
]


@dataclass(frozen=True)
class Part:
    """Tokens of a request that a step computes; those before them are in the cache."""

    request: int
    start: int
    stop: int


def requests(config: Config, lengths: Several[int], seed: int) -> list[Sequence]:
    """Of so many tokens each, all of them their own keys."""
    draw = Draw(seed)
    return [draw.sequence(config, length, length) for length in lengths]


def use_small_splits(monkeypatch: Any) -> None:
    """SPLIT_SIZE in place of FA2_SPLIT_SIZE, which is read once a process."""
    check = flash_attn_2_cuda.check_split_size
    small = lambda split_size: SPLIT_SIZE if split_size is None else check(split_size)  # noqa: E731
    monkeypatch.setattr(flash_attn_2_cuda, "check_split_size", small)


def chosen_backend(monkeypatch: Any) -> Any:
    """The backend as vLLM resolves it once the plugin is loaded, with small splits."""
    from flash_attn.serving import vllm as plugin
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    plugin.register()
    chosen = AttentionBackendEnum["CUSTOM"].get_class()
    use_small_splits(monkeypatch)
    return chosen


def vllm_config(config: Config, max_num_seqs: int = 64) -> Any:
    """What the backend's classes read of vLLM's configuration."""
    model = SimpleNamespace(
        get_num_attention_heads=lambda _: config.heads,
        get_num_kv_heads=lambda _: config.heads_k,
        get_head_size=lambda: config.head_dim,
        rswa_window=None,
        is_diffusion=False,
    )
    graphs = SimpleNamespace(has_full_cudagraphs=lambda: False)
    return SimpleNamespace(
        model_config=model,
        parallel_config=SimpleNamespace(cp_kv_cache_interleave_size=1, decode_context_parallel_size=1),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        compilation_config=SimpleNamespace(cudagraph_mode=graphs, max_cudagraph_capture_size=max_num_seqs),
        attention_config=SimpleNamespace(flash_attn_max_num_splits_for_cuda_graph=32),
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs),
        speculative_config=None,
    )


class Engine:
    """A layer, its cache in pages, and the pages that each request has.

    The layer's own window is config's left one; a request's keys may be read by steps of any cut.
    """

    def __init__(
        self, backend: Any, config: Config, requests: Several[Sequence], page: int, layout: str = "NHD"
    ) -> None:
        from vllm.v1.attention.backends.utils import set_kv_cache_layout
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        self.config, self.requests, self.page = config, requests, page
        device = requests[0].q.device
        self._pages = [math.ceil(len(request.k) / page) for request in requests]
        options = config.kwargs()
        slopes = options["alibi_slopes"].tolist() if config.alibi else None
        self.layer = backend.get_impl_cls()(
            config.heads, config.head_dim, config.head_dim**-0.5, config.heads_k,
            slopes, None if config.window[0] < 0 else config.window[0] + 1, "auto", config.softcap or None,
            sinks=options.get("learnable_sink"),
        )  # fmt: skip
        if config.alibi:  # vLLM makes layers where the device is the default
            self.layer.alibi_slopes = self.layer.alibi_slopes.to(device)
        spec = FullAttentionSpec(
            block_size=page,
            num_kv_heads=config.heads_k,
            head_size=config.head_dim,
            dtype=DTYPES[config.dtype],
        )
        self.builder = backend.get_builder_cls()(spec, ["layer"], vllm_config(config), device)
        set_kv_cache_layout(layout)
        try:
            shape = backend.get_kv_cache_shape(sum(self._pages) + 1, page, config.heads_k, config.head_dim)
            order = backend.get_kv_cache_stride_order()
        finally:
            set_kv_cache_layout(None)
        inverse = [order.index(n) for n in range(len(order))]
        memory = torch.full([shape[n] for n in order], math.nan, dtype=DTYPES[config.dtype], device=device)
        self.cache = memory.permute(inverse)
        # The first page is vLLM's for padding. The others are anybody's, in no order.
        mixed = torch.randperm(sum(self._pages), generator=torch.Generator().manual_seed(5)) + 1
        self.table = torch.zeros(len(requests), max(self._pages) + 2, dtype=torch.int32, device=device)
        for n, own in enumerate(mixed.split(self._pages)):
            self.table[n, : len(own)] = own.to(device, torch.int32)
            for slot in range(len(requests[n].k)):
                place = self.cache[int(own[slot // page]), :, slot % page]
                place[:, : config.head_dim] = requests[n].k[slot]
                place[:, config.head_dim :] = requests[n].v[slot]

    def metadata(self, parts: Several[Part], padding: int = 0, captured: bool = False) -> Any:
        """vLLM's, of its own builder. padding: requests without tokens, behind the others, as in a graph."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        device, counts = self.table.device, [part.stop - part.start for part in parts]
        starts = torch.tensor([0, *counts, *[0] * padding]).cumsum(0).to(torch.int32)
        lengths = torch.tensor([*(part.stop for part in parts), *[0] * padding], dtype=torch.int32)
        rows = torch.tensor([*(part.request for part in parts), *[0] * padding], device=device)
        table = self.table[rows]
        table[len(parts) :] = 0
        common = CommonAttentionMetadata(
            query_start_loc=starts.to(device),
            query_start_loc_cpu=starts,
            seq_lens=lengths.to(device),
            num_reqs=len(parts) + padding,
            num_actual_tokens=sum(counts) + padding,
            max_query_len=max(counts),
            max_seq_len=max(part.stop for part in parts),
            block_table_tensor=table,
            slot_mapping=torch.zeros(sum(counts) + padding, dtype=torch.int64, device=device),
        )
        if captured:
            return self.builder.build_for_cudagraph_capture(common)
        return self.builder.build(0, common)

    def queries(self, parts: Several[Part], padding: int = 0) -> Tensor:
        """Of a step, as a model gives them: with those keys and values of other layers between its rows."""
        own = torch.cat([self.requests[part.request].q[part.start : part.stop] for part in parts])
        wide = torch.full((len(own) + padding, 3 * self.config.heads, self.config.head_dim), math.nan)
        wide = wide.to(own)
        wide[: len(own), : self.config.heads] = own
        return wide[:, : self.config.heads]

    def step(self, parts: Several[Part], padding: int = 0, captured: bool = False) -> list[Tensor]:
        """Output rows of each part."""
        query = self.queries(parts, padding)
        output = torch.full(query.shape, math.nan, dtype=query.dtype, device=query.device)
        metadata = self.metadata(parts, padding, captured)
        result = self.layer.forward(None, query, query, query, self.cache, metadata, output)
        assert result is output
        counts = [part.stop - part.start for part in parts]
        return list(output[: sum(counts)].split(counts))


def alone(config: Config, request: Sequence) -> Tensor:
    """Rows of a request that is computed at once, without a cache."""
    with deterministic_mode(split_size=SPLIT_SIZE):
        q, k, v = (getattr(request, name)[None] for name in "qkv")
        return flash_attn_func(q, k, v, **config.kwargs())[0]


def assert_steps(
    engine: Engine, steps: Several[Several[Part]], padding: int = 0, captured: bool = False
) -> None:
    """Every row of every step has the bits of its request alone."""
    expected = [alone(engine.config, request) for request in engine.requests]
    for number, parts in enumerate(steps):
        for part, rows in zip(parts, engine.step(parts, padding, captured), strict=True):
            assert_same_bits(rows, expected[part.request][part.start : part.stop], f"step {number}, {part}")


def mixed_steps(lengths: Several[int]) -> list[list[Part]]:
    """Chunked prefill beside decode, drafts checked at once, a prefix from the cache, and requests among strangers."""
    first, second, third = lengths
    return [
        [Part(0, 0, 100)],
        [Part(0, 100, 163), Part(1, 0, 9)],  # a prompt of 9 tokens, then of 10, beside others
        [Part(0, 100, 163), Part(1, 0, 10)],
        [Part(0, 163, first - 5), Part(2, third - 1, third)],
        [Part(1, second - 1, second), Part(0, first - 1, first), Part(2, third - 2, third - 1)],
        [Part(2, third - 4, third), Part(0, first - 4, first)],  # three drafts each
        [Part(2, 40, third)],  # 40 tokens from the cache
        [Part(2, 0, third), Part(0, first - 1, first)],
        [Part(0, first - 1, first)],
    ]
