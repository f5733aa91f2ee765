"""vLLM's FlashAttention backend with flash_attn's kernels, in deterministic mode whatever the process has.

Its cache, its metadata and its way to write new keys are vLLM's own. What the kernels do not serve is refused
while the engine starts: by vLLM, from what ``Backend`` says of itself, or by ``Attention`` and
``MetadataBuilder`` as they are made.

Environment, read when a layer is made:
    FA2_SPLIT_SIZE: tokens a chunk of keys has, part of the result's bits. Default 2048.
"""

from flash_attn.serving.vllm import check_version

check_version()  # before its classes are imported, which another release may not have

from typing import Any

import torch
from flash_attn.serving import kernels
from flash_attn.serving.kernels import DTYPES
from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)

logger = init_logger("vllm.flash_attn")  # of vLLM's own name, whose handlers it takes

_CACHE_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


class Attention(FlashAttentionImpl):
    """What a layer calls."""

    can_return_lse_for_decode = False  # so vLLM refuses decode context parallelism

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        # Not FlashAttentionImpl's, which chooses among vLLM's kernels and takes sinks on some GPUs alone.
        self.num_heads, self.num_kv_heads, self.head_size = num_heads, num_kv_heads, head_size
        self.num_queries_per_kv = num_heads // num_kv_heads
        self.scale, self.logits_soft_cap = float(scale), float(logits_soft_cap or 0.0)
        self.alibi_slopes = None
        if alibi_slopes is not None:
            self.alibi_slopes = torch.tensor(alibi_slopes, dtype=torch.float32)
        # The layer's own: vLLM may keep layers with and without windows in one group, whose metadata has one.
        self.sliding_window = (-1, -1) if sliding_window is None else (sliding_window - 1, 0)
        self.window_both = (self.sliding_window[0], self.sliding_window[0])
        self.kv_cache_dtype, self.attn_type = kv_cache_dtype, attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        if sinks is not None and tuple(sinks.shape) != (num_heads,):
            raise ValueError(f"sinks have shape {tuple(sinks.shape)}, not ({num_heads},), one for each head")
        _refuse_other_masks()
        self.scope = (True, kernels.split_size(head_size))
        logger.info_once("flash_attn in deterministic mode, keys in chunks of %d tokens", self.scope[1])

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: FlashAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write to output the attention of queries (tokens, heads, head dim) to the cache.

        It has this step's keys already.

        kv_cache: (pages, heads of keys, tokens of a page, 2 * head dim), keys before values.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("flash_attn's attention backend quantizes no output")
        if attn_metadata is None:  # vLLM looks how much memory a model takes
            return output.fill_(0)
        tokens = attn_metadata.num_actual_tokens
        keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        causal = attn_metadata.causal
        left, right = self.sliding_window if causal else self.window_both
        kernels.attend(
            self.scope, query[:tokens], keys, values, output[:tokens], attn_metadata.query_start_loc,
            attn_metadata.seq_lens, attn_metadata.block_table, self.alibi_slopes, attn_metadata.max_query_len,
            attn_metadata.max_seq_len, self.scale, causal, left, right, self.logits_soft_cap, self.sinks,
        )  # fmt: skip
        return output


def _refuse_other_masks() -> None:
    """Raise ValueError for models whose attention is neither causal, nor sliding, nor to all keys."""
    config = get_current_vllm_config_or_none()
    model = None if config is None else config.model_config
    if model is None:
        return
    if model.is_diffusion:
        raise ValueError(
            "flash_attn's attention backend does not serve diffusion models: causal for some sequences"
        )
    if model.rswa_window is not None:
        raise ValueError("flash_attn's attention backend does not serve reference sliding window attention")


class MetadataBuilder(FlashAttentionMetadataBuilder):
    """What layers are told of a batch."""

    # A graph of batches whose sequences have equally many queries; one of single queries takes other kernels.
    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, *others: Any, **named: Any) -> None:
        super().__init__(kv_cache_spec, *others, **named)
        self.aot_schedule = False  # FlashAttention-3's
        size, of_values = kv_cache_spec.head_size, getattr(kv_cache_spec, "head_size_v", None)
        if of_values not in (None, size):
            raise ValueError(
                "flash_attn's attention backend takes keys and values of one head size, "
                f"not {size} and {of_values}"
            )

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> FlashAttentionMetadata:
        """The graph serves whatever pages can hold: rows with keys past the longest told would be NaN."""
        metadata = super().build_for_cudagraph_capture(common_attn_metadata)
        metadata.max_seq_len = max(metadata.max_seq_len, metadata.block_table.shape[1] * self.block_size)
        return metadata

    def use_cascade_attention(self, *_: Any, **__: Any) -> bool:
        """No: a prefix that the batch shares would be reduced apart, and bits depend on the batch."""
        return False


class Backend(FlashAttentionBackend):
    """What vLLM asks before it takes the backend."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # a name of vLLM's list

    @staticmethod
    def get_impl_cls() -> type:
        return Attention

    @staticmethod
    def get_builder_cls() -> type:
        return MetadataBuilder

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return kernels.takes_head_dim(head_size)

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        return kv_cache_dtype in (None, "auto", *_CACHE_DTYPES)

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return bool(attn_type == AttentionType.DECODER)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return False

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return False

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return bool(capability.major >= 8)

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        """The reason against it, with what vLLM's own words leave out."""
        if dtype not in DTYPES:
            return f"flash_attn takes {' and '.join(map(str, DTYPES))}, not {dtype}"
        if not cls.supports_head_size(head_size):
            largest = kernels.LARGEST_HEAD_DIM
            return f"flash_attn takes head sizes that are multiples of 8 up to {largest}, not {head_size}"
        if not cls.supports_kv_cache_dtype(kv_cache_dtype):
            return f"flash_attn reads a KV cache of the model's dtype, not {kv_cache_dtype}"
        if _CACHE_DTYPES.get(kv_cache_dtype or "auto", dtype) != dtype:
            return f"flash_attn reads a KV cache of the model's dtype, {dtype}, not {kv_cache_dtype}"
        missing = kernels.missing(head_size, dtype)
        if missing:
            return f"this wheel of flash_attn has no kernels {', '.join(missing)}"
        return kernels.unfit_gpu((device_capability.major, device_capability.minor))
