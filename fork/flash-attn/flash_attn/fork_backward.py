"""Gradients under the deterministic mode, and on the kernels, that the forward call ran under.

Autograd runs the backward pass on threads of its own, which a ``deterministic_mode(...)`` scope does not
reach. So the mode is noted with each forward call and opened again around its backward. Under
``torch.compile`` there is nobody to note it: compiled gradients obey the process-wide mode.
"""

import functools
from typing import Any

import torch
from flash_attn import flash_attn_interface, fork_kernels
from flash_attn.determinism import deterministic_mode, get_deterministic_mode
from flash_attn.fork_bias_backward import FlashAttnMaskBiasFunc
from flash_attn.fork_straight import StraightFunc


def _keep_mode(function: Any) -> None:
    forward, backward = function.forward, function.backward

    @functools.wraps(forward)
    def noting_forward(ctx: Any, *args: Any) -> Any:
        if not torch.compiler.is_compiling():
            ctx.fork_mode = get_deterministic_mode()
            fork_kernels.note(ctx)
        return forward(ctx, *args)

    @functools.wraps(backward)
    def scoped_backward(ctx: Any, *gradients: Any) -> Any:
        if torch.compiler.is_compiling():
            return backward(ctx, *gradients)
        # Where the forward call was traced and this one is not, nobody noted the mode.
        mode = deterministic_mode(*getattr(ctx, "fork_mode", None) or get_deterministic_mode())
        with mode, fork_kernels.noted(ctx):
            return backward(ctx, *gradients)

    if function is not StraightFunc:  # which notes the mode itself
        function.forward = staticmethod(noting_forward)
    function.backward = staticmethod(scoped_backward)


for _name in ("QKVPacked", "VarlenQKVPacked", "KVPacked", "VarlenKVPacked", "", "Varlen"):
    _keep_mode(getattr(flash_attn_interface, f"FlashAttn{_name}Func"))
_keep_mode(FlashAttnMaskBiasFunc)
_keep_mode(StraightFunc)
