"""The forward pass with attn_mask, attn_bias and learnable_sink, as an operator."""

from typing import Any, Optional, Tuple

import torch
import flash_attn_2_cuda as flash_attn_gpu

from .fork_front import check_traced
from .fork_layout import loadable, result_like


@torch.library.custom_op("flash_attn::_fork_forward", mutates_args=(), device_types="cuda")
def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: Optional[torch.Tensor],
    attn_bias: Optional[torch.Tensor],
    learnable_sink: Optional[torch.Tensor],
    cu_seqlens_q: Optional[torch.Tensor],
    cu_seqlens_k: Optional[torch.Tensor],
    max_seqlen_q: int,
    max_seqlen_k: int,
    block_table: Optional[torch.Tensor],
    alibi_slopes: Optional[torch.Tensor],
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
) -> Tuple[torch.Tensor, torch.Tensor]:
    q, k, v = (loadable(t) for t in (q, k, v))
    options = (causal, window_size_left, window_size_right, softcap, False, None)
    options += (attn_mask, attn_bias, learnable_sink)
    if cu_seqlens_q is None:
        out, lse, _, _ = flash_attn_gpu.fork_fwd(
            q, k, v, None, alibi_slopes, dropout_p, softmax_scale, *options
        )
    else:
        lengths = (
            cu_seqlens_q,
            cu_seqlens_k,
            None,
            None,
            block_table,
            alibi_slopes,
            max_seqlen_q,
            max_seqlen_k,
        )
        out, lse, _, _ = flash_attn_gpu.fork_varlen_fwd(
            q, k, v, None, *lengths, dropout_p, softmax_scale, False, *options
        )
    return out, lse


@forward.register_fake
def _(
    q: torch.Tensor, k: Any, v: Any, attn_mask: Any, attn_bias: Any, learnable_sink: Any, *options: Any
) -> Tuple[torch.Tensor, torch.Tensor]:
    cu_seqlens_q, cu_seqlens_k, *longest, block_table, alibi_slopes = options[:6]
    packed = cu_seqlens_q is not None
    lengths = (cu_seqlens_q, cu_seqlens_k, None, None, block_table) if packed else None
    check_traced((q, k, v, alibi_slopes), options[6:], lengths, longest, (attn_mask, attn_bias, learnable_sink))
    shape = (q.shape[1], q.shape[0]) if packed else (q.shape[0], q.shape[2], q.shape[1])
    return result_like(q), q.new_empty(shape, dtype=torch.float32)


def padded(tensor: torch.Tensor) -> torch.Tensor:
    """Head dims are multiples of 8 in the kernels."""
    missing = -tensor.shape[-1] % 8
    if missing:
        return torch.nn.functional.pad(tensor, [0, missing])
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()  # here, where autograd sees it
