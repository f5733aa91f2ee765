"""Gradients with attn_mask, attn_bias and learnable_sink, and of a loss on softmax_lse."""

from typing import Any

import flash_attn_2_cuda as flash_attn_gpu
import torch

from . import fork_kernels, fork_sink
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
    attn_mask: torch.Tensor | None,
    attn_bias: torch.Tensor | None,
    learnable_sink: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    alibi_slopes: torch.Tensor | None,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    deterministic: bool,
    wants_bias: bool,
    wants_sink: bool,
    dlse: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    rng_state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of q, k, v, and of bias and sink where wanted, else empty ones.

    dlse is the gradient of softmax_lse, which is that of the keys alone.
    """
    dout, q, k, v, out = (steppable(t) for t in (dout, q, k, v, out))
    dlse = dlse if dlse is None else dlse.contiguous()  # that of a sum is one number, expanded

    # Only calls without any of these may be those of other kernels.
    plain = attn_mask is attn_bias is learnable_sink is None
    window = (window_size_left, window_size_right)
    run: Any
    call: tuple[Any, ...]
    if cu_seqlens_q is None:
        run = fork_kernels.bwd if plain else flash_attn_gpu.fork_bwd
        call = (alibi_slopes, dropout_p, softmax_scale, causal, *window, softcap)
    else:
        run = fork_kernels.varlen_bwd if plain else flash_attn_gpu.fork_varlen_bwd
        lengths = (cu_seqlens_q, cu_seqlens_k, alibi_slopes, max_seqlen_q, max_seqlen_k)
        call = (*lengths, dropout_p, softmax_scale, False, causal, *window, softcap)

    def gradients(dout: torch.Tensor, lse: torch.Tensor, dlse: torch.Tensor | None) -> Any:
        found = run(
            dout, q, k, v, out, lse, None, None, None, *call, deterministic, None, rng_state, attn_mask,
            attn_bias, wants_bias, dlse,
        )  # fmt: skip
        return [*found, None] if plain else found

    if learnable_sink is None:
        dq, dk, dv, softmax_d, dbias = gradients(dout, softmax_lse, dlse)
    else:
        dq, dk, dv, softmax_d, dbias = gradients(dout, fork_sink.joined(softmax_lse, learnable_sink), None)
        if dlse is not None:  # a row's weights are others there: without the sink
            of_lse = gradients(torch.zeros_like(dout), softmax_lse, dlse)
            for total, more in zip((dq, dk, dv, dbias), (*of_lse[:3], of_lse[4]), strict=True):
                if total is not None:
                    total.add_(more)
    dsink = None
    if wants_sink:
        dsink = fork_sink.gradient(learnable_sink, softmax_lse, softmax_d, cu_seqlens_q)
    return dq, dk, dv, _or_empty(dbias, q), _or_empty(dsink, q)


def _or_empty(gradient: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """An operator's results are tensors: an empty one where nobody wants a gradient."""
    return like.new_empty(0) if gradient is None else gradient


@backward_operator.register_fake
def _(
    dout: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: Any, softmax_lse: Any, attn_mask: Any,
    attn_bias: Any, learnable_sink: Any, *options: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    wants_bias, wants_sink = options[11:13]

    def of(given: torch.Tensor, wanted: bool) -> torch.Tensor:
        return torch.empty(given.shape, dtype=given.dtype, device=q.device) if wanted else q.new_empty(0)

    gradients = (gradient_like(q), gradient_like(k), gradient_like(v))
    return *gradients, of(attn_bias, wants_bias), of(learnable_sink, wants_sink)


class FlashAttnMaskBiasFunc(torch.autograd.Function):
    """Saves mask, bias and sink as they are given, views as views."""

    @staticmethod
    def forward(
        ctx: Any, q: Any, k: Any, v: Any, attn_mask: Any, attn_bias: Any, learnable_sink: Any,
        dropout_p: float, deterministic: bool, wants_lse: bool, alibi_slopes: Any, scalars: tuple[Any, ...],
        cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any, max_seqlen_k: Any, block_table: Any,
    ) -> Any:  # fmt: skip
        """Return out and lse.

        Args:
            wants_lse: whether the caller gets lse, and may have a loss on it.
            scalars: softmax_scale, causal, window_size_left, window_size_right and softcap.
        """
        out, lse = forward_operator(
            q, k, v, attn_mask, attn_bias, learnable_sink, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
            max_seqlen_k, block_table, alibi_slopes, dropout_p, *scalars,
        )  # fmt: skip
        ctx.save_for_backward(
            q, k, v, out, lse, attn_mask, attn_bias, learnable_sink, alibi_slopes, cu_seqlens_q, cu_seqlens_k
        )
        ctx.longest, ctx.scalars, ctx.deterministic = (max_seqlen_q, max_seqlen_k), scalars, deterministic
        ctx.wants_lse = wants_lse
        if not wants_lse:
            ctx.mark_non_differentiable(lse)
        if not torch.compiler.is_compiling():  # which cannot read this
            ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> Any:
        """Gradients of q, k, v, the bias and the sink."""
        (
            q, k, v, out, lse, attn_mask, attn_bias, learnable_sink, alibi_slopes, cu_seqlens_q, cu_seqlens_k,
        ) = ctx.saved_tensors  # fmt: skip
        wants_bias, wants_sink = ctx.needs_input_grad[4:6]
        if dout is None:
            dout = torch.zeros_like(out)
        dq, dk, dv, dbias, dsink = backward_operator(
            dout, q, k, v, out, lse, attn_mask, attn_bias, learnable_sink, cu_seqlens_q, cu_seqlens_k,
            *ctx.longest, alibi_slopes, *ctx.scalars, ctx.deterministic, wants_bias, wants_sink,
            dlse if ctx.wants_lse else None,
        )  # fmt: skip
        of_scores = (None, dbias if wants_bias else None, dsink if wants_sink else None)
        return dq, dk, dv, *of_scores, *[None] * 10
