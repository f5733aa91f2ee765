"""Gradients: under the mode and on the kernels of the forward call, of a log-sum-exp too, and once.

Autograd runs the backward pass on threads of its own, which a ``deterministic_mode(...)`` scope does not
reach. So the mode is noted with each forward call and opened again around its backward. It is read once: what
was noted holds for the forward call too, whatever other threads set meanwhile. Under ``torch.compile`` there
is nobody to note it: compiled gradients obey the process-wide mode.

Where a loss is of ``softmax_lse``, which functions return with ``return_attn_probs=True``, gradients are
those of both. Upstream's backward functions leave that one out, so such calls have one of their own here.

A gradient is no function that autograd can differentiate: a gradient of it is an error that says so.
"""

import functools
import inspect
from typing import Any

import torch
from flash_attn import flash_attn_interface, fork_kernels
from flash_attn.fork_bias_backward import FlashAttnMaskBiasFunc, backward_operator
from flash_attn.fork_straight import StraightFunc
from flash_attn_2_cuda import deterministic_scope, get_deterministic_mode


def _under(mode: Any, choice: Any, function: Any, ctx: Any, given: Any) -> Any:
    """Run one call under a mode and kernels: quicker than in scopes of the public kind."""
    before = deterministic_scope.set(mode)
    try:
        return fork_kernels.under(choice, function, ctx, *given)
    finally:
        deterministic_scope.reset(before)


_ONCE = (
    "flash_attn's gradients have no gradients of their own: a loss on them, such as a gradient penalty "
    "(create_graph=True), needs attention of another kind, such as scaled_dot_product_attention on torch's "
    "math backend"
)


def _keep_mode(function: Any) -> None:
    forward, backward = function.forward, function.backward

    @functools.wraps(forward)
    def noting_forward(ctx: Any, *args: Any) -> Any:
        if torch.compiler.is_compiling() or True not in ctx.needs_input_grad:
            return forward(ctx, *args)
        ctx.fork_mode, ctx.fork_kernels = get_deterministic_mode(), fork_kernels.get_kernels()
        return _under(ctx.fork_mode, ctx.fork_kernels, forward, ctx, args)

    @functools.wraps(backward)
    def scoped_backward(ctx: Any, *gradients: Any) -> Any:
        if torch.compiler.is_compiling():
            return backward(ctx, *gradients)
        # Where the forward call was traced and this one is not, nobody noted them.
        mode = getattr(ctx, "fork_mode", None) or get_deterministic_mode()
        family = getattr(ctx, "fork_kernels", None) or fork_kernels.get_kernels()
        if not torch.is_grad_enabled():
            return _under(mode, family, backward, ctx, gradients)
        read = _Read(ctx)
        with torch.no_grad():
            found = _under(mode, family, backward, read, gradients)
        return _undifferentiable(found, (*gradients, *read.saved_tensors))

    if function is not StraightFunc:  # which notes the mode itself
        function.forward = staticmethod(noting_forward)
    function.backward = staticmethod(scoped_backward)


class _Read:
    """A function's context. Its tensors are unpacked once: a checkpoint does that no second time."""

    def __init__(self, ctx: Any) -> None:
        self._ctx, self.saved_tensors = ctx, ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


class _Once(torch.autograd.Function):
    """Its first tensors, which depend on all of them, and no gradients."""

    @staticmethod
    def forward(_: Any, count: int, *tensors: torch.Tensor) -> Any:
        return tuple(tensor.view_as(tensor) for tensor in tensors[:count])

    @staticmethod
    def backward(_: Any, *__: Any) -> Any:
        raise RuntimeError(_ONCE)


def _undifferentiable(gradients: Any, of: Any) -> Any:
    """The same, and an error where somebody differentiates them.

    torch's once_differentiable asks for that whether the incoming gradients have a gradient. These depend on
    q, k and v as well, and so does the error: a search for gradients of those comes across it.
    """
    found = gradients if type(gradients) is tuple else (gradients,)
    own = [gradient.detach().requires_grad_() for gradient in found if gradient is not None]
    marked = iter(_Once.apply(len(own), *own, *[tensor for tensor in of if tensor is not None]))
    return tuple(None if gradient is None else next(marked) for gradient in found)


def _of_both(ctx: Any, dout: Any, dlse: Any) -> tuple[torch.Tensor, ...]:
    """dq, dk and dv of losses on out and on softmax_lse; head dims as kernels have them."""
    q, k, v, out, lse, *cu_seqlens, rng_state = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    elif dout.shape[-1] != out.shape[-1]:
        dout = torch.nn.functional.pad(dout, [0, out.shape[-1] - dout.shape[-1]])
    lengths: tuple[Any, ...] = (None, None, 0, 0)
    if len(cu_seqlens) == 1:
        lengths = (*cu_seqlens * 2, ctx.max_seqlen, ctx.max_seqlen)
    elif cu_seqlens:
        lengths = (*cu_seqlens, ctx.max_seqlen_q, ctx.max_seqlen_k)
    gradients: tuple[torch.Tensor, ...] = backward_operator(
        dout, q, k, v, out, lse, None, None, None, *lengths, ctx.alibi_slopes, ctx.softmax_scale, ctx.causal,
        *ctx.window_size, ctx.softcap, ctx.deterministic, False, False, dlse, ctx.dropout_p, rng_state,
    )  # fmt: skip
    return gradients[:3]


def _with_lse(function: Any) -> None:
    """Let one of upstream's functions take the gradient of the softmax_lse that it returns."""
    forward, backward = function.forward, function.backward
    packed, parameters = "Packed" in function.__name__, len(inspect.signature(forward).parameters) - 1

    @functools.wraps(forward)
    def telling_forward(ctx: Any, *args: Any) -> Any:
        result = forward(ctx, *args)
        if type(result) is tuple:
            ctx.fork_head_dim = result[0].shape[-1]
            if not torch.compiler.is_compiling():  # which cannot read this
                ctx.set_materialize_grads(False)
        return result

    @functools.wraps(backward)
    def whole_backward(ctx: Any, dout: Any, dlse: Any = None, dprobabilities: Any = None) -> Any:
        if dlse is None and dprobabilities is None:
            return (None,) * parameters if dout is None else backward(ctx, dout)
        if dprobabilities is not None and not torch.compiler.is_compiling():
            raise NotImplementedError(
                "S_dmask, the third result with return_attn_probs=True, has no gradient: it is for tests"
            )
        found = [gradient[..., : ctx.fork_head_dim] for gradient in _of_both(ctx, dout, dlse)]
        if packed:  # the last two, or all three, are of one tensor
            first = 0 if "QKV" in function.__name__ else 1
            found[first:] = [torch.stack(found[first:], dim=-3)]
        return (*found, *[None] * (parameters - len(found)))

    function.forward, function.backward = staticmethod(telling_forward), staticmethod(whole_backward)


for _name in ("QKVPacked", "VarlenQKVPacked", "KVPacked", "VarlenKVPacked", "", "Varlen"):
    _function = getattr(flash_attn_interface, f"FlashAttn{_name}Func")
    _with_lse(_function)
    _keep_mode(_function)
_keep_mode(FlashAttnMaskBiasFunc)
_keep_mode(StraightFunc)
