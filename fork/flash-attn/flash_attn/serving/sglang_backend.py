"""SGLang's FlashAttention backend with flash_attn's kernels, in deterministic mode whatever the process has.

Its cache, its metadata and its way to write new keys are SGLang's own. What the kernels do not serve is
refused while the engine starts, as ``Backend`` is made.

Environment, read then:
    FA2_SPLIT_SIZE: tokens a chunk of keys has, part of the result's bits. Default 2048.
"""

from collections.abc import Iterator
from typing import Any

import torch
from flash_attn.serving import kernels
from flash_attn.serving.sglang import NAME
from sglang.srt.environ import envs
from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc


def _head_dims(model: Any) -> set[tuple[int, int]]:
    """Of keys and values, in layers without a window and with one."""
    of_keys, of_values = model.head_dim, model.v_head_dim
    windowed = (getattr(model, "swa_head_dim", None), getattr(model, "swa_v_head_dim", None))
    return {(of_keys, of_values), (windowed[0] or of_keys, windowed[1] or of_values)}


def _unfit(runner: Any) -> Iterator[str]:
    """What of an engine's model and options the kernels do not serve, each in words."""
    model, options = runner.model_config, runner.server_args
    if runner.use_mla_backend:
        yield "it does not serve multi-head latent attention (MLA)"
        return
    if runner.page_size % 16:
        yield f"it reads pages of a multiple of 16 tokens, not {runner.page_size}: pass --page-size 16"
    if runner.dtype not in kernels.DTYPES:
        yield f"it takes {' and '.join(map(str, kernels.DTYPES))}, not {runner.dtype}"
    elif runner.kv_cache_dtype != runner.dtype:
        yield f"it reads a KV cache of the model's dtype, {runner.dtype}, not {runner.kv_cache_dtype}"
    for of_keys, of_values in _head_dims(model):
        if not kernels.takes_head_dim(of_keys):
            largest = kernels.LARGEST_HEAD_DIM
            yield f"it takes head dims that are multiples of 8 up to {largest}, not {of_keys}"
        elif runner.dtype in kernels.DTYPES:
            missing = kernels.missing(of_keys, runner.dtype)
            if missing:
                yield f"this wheel has no kernels {', '.join(missing)}"
        if of_values != of_keys:
            yield f"it takes keys and values of one head dim, not {of_keys} and {of_values}"
    if model.is_encoder_decoder:
        yield "it does not serve encoder-decoder models"
    if model.is_local_attention_model:
        yield "it does not serve attention to chunks of a sequence"
    if getattr(runner, "prefill_aware_swa", False):
        yield "it does not serve windows that know of the prefill"
    if options.speculative_algorithm is not None:  # trees, whose mask it does not read
        yield f"it does not check drafts: leave out --speculative-algorithm {options.speculative_algorithm}"
    if envs.SGLANG_USE_HND_KVCACHE.get():
        yield "it reads a cache of tokens before heads: unset SGLANG_USE_HND_KVCACHE"
    if runner.ps.attn_cp_size > 1:
        yield "it does not serve context parallelism"
    if torch.device(runner.device).type == "cuda":
        reason = kernels.unfit_gpu(torch.cuda.get_device_capability(runner.gpu_id))
        if reason is not None:
            yield reason


class Backend(FlashAttentionBackend):
    """What each layer of a model calls."""

    def __init__(self, runner: Any, **options: Any) -> None:
        reasons = list(_unfit(runner))
        if reasons:
            raise ValueError(f"--attention-backend {NAME}: {'; '.join(reasons)}")
        super().__init__(runner, **options)
        if self.fa_skip_kv_cache:
            raise ValueError(f"--attention-backend {NAME}: it does not serve embeddings without a cache")
        self._get_scheduler_metadata = None  # FlashAttention-3's
        # The smallest head dim has the largest tile, of which those of the others are parts.
        self.scope = (True, kernels.split_size(min(dim for dim, _ in _head_dims(runner.model_config))))

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
        **others: Any,
    ) -> torch.Tensor:
        """Attention of queries (tokens, heads * head dim) to the cache, into which their keys go first."""
        wanted = [name for name, value in others.items() if value is not None]
        if wanted:
            raise NotImplementedError(f"{NAME} does not serve layers that pass {', '.join(wanted)}")
        served = (AttentionType.DECODER, AttentionType.ENCODER_ONLY)
        if layer.is_cross_attention or layer.attn_type not in served:
            raise NotImplementedError(
                f"{NAME} serves no layers that attend across, or in both directions in part"
            )
        if not len(q):
            return q.new_empty(0, layer.tp_q_head_num * layer.head_dim)
        metadata, pool = self.forward_metadata, self.token_to_kv_pool
        if k is not None and save_kv_cache:
            place = KVWriteLoc(forward_batch.out_cache_loc, metadata.swa_out_cache_loc)
            pool.set_kv_buffer(layer, place, k, v, layer.k_scale, layer.v_scale)
        windowed = layer.sliding_window_size is not None and layer.sliding_window_size > -1
        left, right = (layer.sliding_window_size, 0) if windowed else (-1, -1)
        pages = metadata.page_table
        if windowed and self.use_sliding_window_kv_pool:  # which has pages of its own
            pages = metadata.swa_page_table
            if pages is None:
                pages = pool.translate_loc_from_full_to_swa(metadata.page_table).to(torch.int32)
        shape = (-1, self.page_size, layer.tp_k_head_num, layer.head_dim)
        keys, values = (buffer.view(shape) for buffer in pool.get_kv_buffer(layer.layer_id))
        query = q.reshape(-1, layer.tp_q_head_num, layer.head_dim)
        out = getattr(forward_batch, "_attn_output", None)
        if out is None:
            out = torch.empty(query.shape, dtype=q.dtype, device=q.device)
        else:
            out = out.view(query.shape)
        kernels.attend(
            self.scope, query, keys, values, out, metadata.cu_seqlens_q, metadata.cache_seqlens_int32, pages,
            None, metadata.max_seq_len_q,
            pages.shape[1] * self.page_size,  # a graph serves whatever the pages hold
            layer.scaling, layer.attn_type != AttentionType.ENCODER_ONLY, left, right, layer.logit_cap, sinks,
        )  # fmt: skip
        return out.view(-1, layer.tp_q_head_num * layer.head_dim)

    forward_decode = forward_extend
