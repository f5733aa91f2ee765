"""The forward pass with attn_mask, attn_bias and learnable_sink, as an operator."""

from typing import Any

import flash_attn_2_cuda as flash_attn_gpu
import torch

from .fork_front import check_traced
from .fork_layout import has_gaps, loadable, result_like


@torch.library.custom_op("flash_attn::_fork_forward", mutates_args=(), device_types="cuda")
def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None,
    attn_bias: torch.Tensor | None,
    learnable_sink: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    block_table: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of dense sequences, or with cu_seqlens_q of packed ones: out and lse."""
    q, k, v = (loadable(t) for t in (q, k, v))
    if cu_seqlens_q is None:
        out, lse, _, _ = flash_attn_gpu.fork_fwd(
            q, k, v, None, alibi_slopes, dropout_p, softmax_scale, causal, window_size_left,
            window_size_right, softcap, False, None, attn_mask, attn_bias, learnable_sink,
        )  # fmt: skip
    else:
        out, lse, _, _ = flash_attn_gpu.fork_varlen_fwd(
            q, k, v, None, cu_seqlens_q, cu_seqlens_k, None, None, block_table, alibi_slopes, max_seqlen_q,
            max_seqlen_k, dropout_p, softmax_scale, False, causal, window_size_left, window_size_right,
            softcap, False, None, attn_mask, attn_bias, learnable_sink,
        )  # fmt: skip
    return out, lse


@forward.register_fake
def _(
    q: torch.Tensor, k: Any, v: Any, attn_mask: Any, attn_bias: Any, learnable_sink: Any, cu_seqlens_q: Any,
    cu_seqlens_k: Any, max_seqlen_q: Any, max_seqlen_k: Any, block_table: Any, alibi_slopes: Any,
    *scalars: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    scores = (attn_mask, attn_bias, learnable_sink)
    if cu_seqlens_q is None:
        check_traced((q, k, v, alibi_slopes), scalars, scores=scores)
        of_rows = (q.shape[0], q.shape[2], q.shape[1])
    else:
        lengths, longest = (cu_seqlens_q, cu_seqlens_k, None, None, block_table), (max_seqlen_q, max_seqlen_k)
        check_traced((q, k, v, alibi_slopes), scalars, lengths, longest, scores)
        of_rows = q.shape[1::-1]
    return result_like(q), q.new_empty(of_rows, dtype=torch.float32)


def padded(tensor: torch.Tensor) -> torch.Tensor:
    """Head dims are multiples of 8 in the kernels."""
    missing = -tensor.shape[-1] % 8
    if missing:
        return torch.nn.functional.pad(tensor, [0, missing])
    return tensor.contiguous() if has_gaps(tensor) else tensor  # here, where autograd sees it
