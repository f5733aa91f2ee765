"""Gradients with attn_mask, attn_bias and learnable_sink."""

from typing import Any, Optional, Tuple

import torch
import flash_attn_2_cuda as flash_attn_gpu

from . import fork_sink
from .fork_bias_forward import forward as forward_operator
from .fork_layout import gradient_like, steppable


@torch.library.custom_op("flash_attn::_fork_backward", mutates_args=(), device_types="cuda")
def backward_operator(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    attn_mask: Optional[torch.Tensor],
    attn_bias: Optional[torch.Tensor],
    learnable_sink: Optional[torch.Tensor],
    cu_seqlens_q: Optional[torch.Tensor],
    cu_seqlens_k: Optional[torch.Tensor],
    max_seqlen_q: int,
    max_seqlen_k: int,
    alibi_slopes: Optional[torch.Tensor],
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    deterministic: bool,
    wants_bias: bool,
    wants_sink: bool,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of q, k, v, and of bias and sink where wanted, else empty ones."""
    dout, q, k, v, out = (steppable(t) for t in (dout, q, k, v, out))
    joined = softmax_lse if learnable_sink is None else fork_sink.joined(softmax_lse, learnable_sink)
    tensors = (dout, q, k, v, out, joined, None, None, None)
    options = (
        causal,
        window_size_left,
        window_size_right,
        softcap,
        deterministic,
        None,
        None,
        attn_mask,
        attn_bias,
        wants_bias,
    )
    if cu_seqlens_q is None:
        dq, dk, dv, softmax_d, dbias = flash_attn_gpu.fork_bwd(
            *tensors, alibi_slopes, 0.0, softmax_scale, *options
        )
    else:
        lengths = (cu_seqlens_q, cu_seqlens_k, alibi_slopes, max_seqlen_q, max_seqlen_k)
        dq, dk, dv, softmax_d, dbias = flash_attn_gpu.fork_varlen_bwd(
            *tensors, *lengths, 0.0, softmax_scale, False, *options
        )
    dsink = None
    if wants_sink:
        dsink = fork_sink.gradient(learnable_sink, softmax_lse, softmax_d, cu_seqlens_q)
    return dq, dk, dv, *(q.new_empty(0) if one is None else one for one in (dbias, dsink))


@backward_operator.register_fake
def _(
    dout: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: Any,
    softmax_lse: Any,
    attn_mask: Any,
    attn_bias: Any,
    learnable_sink: Any,
    *options: Any,
) -> Tuple[torch.Tensor, ...]:
    others = [
        torch.empty(one.shape, dtype=one.dtype, device=q.device) if wanted else q.new_empty(0)
        for one, wanted in zip((attn_bias, learnable_sink), options[-2:])
    ]
    return gradient_like(q), gradient_like(k), gradient_like(v), *others


class FlashAttnMaskBiasFunc(torch.autograd.Function):
    """Saves mask, bias and sink as they are given, views as views."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Any,
        k: Any,
        v: Any,
        attn_mask: Any,
        attn_bias: Any,
        learnable_sink: Any,
        dropout_p: float,
        deterministic: bool,
        options: Tuple[Any, ...],
        *lengths: Any,
    ) -> Any:
        *lengths, block_table = lengths
        alibi_slopes, *others = options
        terms = (attn_mask, attn_bias, learnable_sink)
        out, lse = forward_operator(
            q, k, v, *terms, *lengths, block_table, alibi_slopes, dropout_p, *others
        )
        ctx.save_for_backward(q, k, v, out, lse, *terms, alibi_slopes, *lengths[:2])
        ctx.longest, ctx.options, ctx.deterministic = lengths[2:], others, deterministic
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, *_: Any) -> Any:
        q, k, v, out, lse, *terms, alibi_slopes, cu_seqlens_q, cu_seqlens_k = ctx.saved_tensors
        wants_bias = ctx.needs_input_grad[4]
        wants_sink = ctx.needs_input_grad[5]
        lengths = (cu_seqlens_q, cu_seqlens_k, *ctx.longest, alibi_slopes)
        dq, dk, dv, *others = backward_operator(
            dout, q, k, v, out, lse, *terms, *lengths, *ctx.options, ctx.deterministic, wants_bias, wants_sink
        )
        dbias, dsink = (one if wanted else None for one, wanted in zip(others, (wants_bias, wants_sink)))
        return dq, dk, dv, None, dbias, dsink, *[None] * 8
