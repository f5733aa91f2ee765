"""Steps of a serving engine on SGLang's own classes, with flash_attn's backend for it, and no engine around them."""

from __future__ import annotations

import math
from collections.abc import Sequence as Several
from types import SimpleNamespace
from typing import Any

import torch
from harness import DTYPES, Config, Sequence
from serving import Part
from torch import Tensor

LAYER = 0


def arguments(**other: Any) -> Any:
    """A context with SGLang's arguments as its classes read them, of which a process has one."""
    from sglang.srt.runtime_context import get_context

    return get_context().override_server_args(
        attention_backend="flash_attn_deterministic", enable_deterministic_inference=True, **other
    )


def runner(config: Config, page: int, length: int, requests: int, device: torch.device, **other: Any) -> Any:
    """As SGLang's ModelRunner, with pools of its own classes. Within arguments()."""
    from sglang.srt.configs.model_config import AttentionArch
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
    from sglang.srt.runtime_context import get_server_args

    dtype = DTYPES[config.dtype]
    pages = math.ceil(length / page)
    model = {
        "attention_arch": AttentionArch.MHA,
        "context_len": pages * page,
        "get_num_kv_heads": lambda _: config.heads_k,
        "head_dim": config.head_dim,
        "hf_text_config": SimpleNamespace(num_attention_heads=config.heads),
        "is_encoder_decoder": False,
        "is_local_attention_model": False,
        "v_head_dim": config.head_dim,
    }
    made = {
        "attention_chunk_size": None,
        "device": str(device),
        "dtype": dtype,
        "gpu_id": 0,
        "is_draft_worker": False,
        "kv_cache_dtype": dtype,
        "model_config": SimpleNamespace(**(model | other.pop("model", {}))),
        "page_size": page,
        "ps": SimpleNamespace(attn_cp_size=1, tp_size=1),
        "server_args": get_server_args(),
        "sliding_window_size": None if config.window[0] < 0 else config.window[0],
        "use_mla_backend": False,
        "req_to_token_pool": ReqToTokenPool(requests, pages * page, str(device), enable_memory_saver=False),
        "token_to_kv_pool": MHATokenToKVPool(
            requests * pages * page,
            page,
            dtype,
            config.heads_k,
            config.head_dim,
            layer_num=1,
            device=str(device),
            enable_memory_saver=False,
            enable_alt_stream=False,
        ),
    }
    return SimpleNamespace(**(made | other))


class Engine:
    """A layer, the pools, and the pages that each request has. Within arguments()."""

    def __init__(self, config: Config, requests: Several[Sequence], page: int) -> None:
        from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
        from sglang.srt.layers.radix_attention import RadixAttention

        self.config, self.requests, self.page = config, requests, page
        self.device = requests[0].q.device
        longest = max(len(request.k) for request in requests)
        self.runner = runner(config, page, longest, len(requests), self.device)
        self.backend = ATTENTION_BACKENDS["flash_attn_deterministic"](self.runner)
        self.layer = RadixAttention(
            config.heads,
            config.head_dim,
            config.head_dim**-0.5,
            config.heads_k,
            LAYER,
            logit_cap=config.softcap,
            sliding_window_size=config.window[0],
        )
        self.sink = config.kwargs().get("learnable_sink")
        table = self.runner.req_to_token_pool.req_to_token
        pages = table.shape[1] // page
        # The first page is SGLang's for padding. The others are anybody's, in no order.
        mixed = torch.randperm(pages * len(requests), generator=torch.Generator().manual_seed(5)) + 1
        for n, own in enumerate(mixed.split(pages)):
            table[n + 1] = (own[:, None] * page + torch.arange(page)).flatten().to(table)
        for cache, name in zip(self._caches(), "kv", strict=True):
            cache.fill_(math.nan)
            for n, request in enumerate(requests):
                known_rows = getattr(request, name)
                cache[table[n + 1, : len(known_rows)].long()] = known_rows

    def _caches(self) -> tuple[Tensor, Tensor]:
        keys, values = self.runner.token_to_kv_pool.get_kv_buffer(LAYER)
        return keys, values

    def batch(self, parts: Several[Part]) -> Any:
        """As SGLang's scheduler gives it: of single tokens, a step of decoding."""
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

        decode = all(part.stop - part.start == 1 for part in parts)
        before, after = ([getattr(part, end) for part in parts] for end in ("start", "stop"))
        counts = [stop - start for start, stop in zip(before, after, strict=True)]
        slots = torch.tensor([part.request + 1 for part in parts], device=self.device)
        lengths = torch.tensor(after, device=self.device)
        table = self.runner.req_to_token_pool.req_to_token
        rows = [table[part.request + 1, part.start : part.stop] for part in parts]
        own = {} if decode else {
            "extend_num_tokens": sum(counts),
            "extend_prefix_lens": torch.tensor(before, device=self.device),
            "extend_prefix_lens_cpu": before,
            "extend_seq_lens": torch.tensor(counts, dtype=torch.int32, device=self.device),
            "extend_seq_lens_cpu": counts,
        }  # fmt: skip
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE if decode else ForwardMode.MIXED,
            batch_size=len(parts),
            input_ids=torch.zeros(sum(counts), dtype=torch.int64, device=self.device),
            req_pool_indices=slots,
            seq_lens=lengths,
            out_cache_loc=torch.cat(rows).long(),
            seq_lens_sum=sum(after),
            seq_lens_cpu=torch.tensor(after),
            positions=torch.cat([torch.arange(part.start, part.stop) for part in parts]).to(self.device),
            **own,
        )

    def step(self, parts: Several[Part], padding: int = 0, captured: bool = False) -> list[Tensor]:
        """Output rows of each part, whose keys are written first."""
        assert not padding and not captured
        batch, rows = self.batch(parts), self.rows(parts)
        self.backend.init_forward_metadata(batch)
        out = self.attend(rows, batch)
        return list(out.split([part.stop - part.start for part in parts]))

    def rows(self, parts: Several[Part]) -> list[Tensor]:
        """Queries, keys and values of a step, as a model gives them: queries between rows of other layers."""
        q, k, v = (
            torch.cat([getattr(self.requests[p.request], name)[p.start : p.stop] for p in parts])
            for name in "qkv"
        )
        wide = torch.full((len(q), 3 * q[0].numel()), math.nan).to(q)
        wide[:, : q[0].numel()] = q.flatten(1)
        return [wide[:, : q[0].numel()], k, v]

    def attend(self, rows: Several[Tensor], batch: Any) -> Tensor:
        """What a layer of the model does, whose metadata the backend has: (tokens, heads, head dim)."""
        more = {} if self.sink is None else {"sinks": self.sink}
        out = self.backend.forward(*rows, self.layer, batch, **more)
        assert out.shape == (len(rows[1]), self.config.heads * self.config.head_dim)
        view: Tensor = out.view(-1, self.config.heads, self.config.head_dim)
        return view
