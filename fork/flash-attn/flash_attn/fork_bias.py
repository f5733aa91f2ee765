"""``attn_mask`` and ``attn_bias``: the calls behind the public functions that take them.

For a query i, a key j and a head h, ``softmax(softcap(q·k * scale) + alibi + attn_bias)`` over the keys that
causal, window and ``attn_mask`` (True: attend) leave. Both are read in place, whatever their strides: an
expanded view takes no memory. A query with no key left gives zeros, and lse +inf. Of a hidden key and its
value only finite numbers change nothing: NaN or Inf there may reach the result.

-inf in ``attn_bias`` hides a key. A finite bias beyond ±65504, the largest float16, counts as that (a
bfloat16 as ±65280): as good at hiding, and a query all of whose keys have it attends to all of them. With a
float16 bias a softmax_scale, or a softcap, below 1.6e-5, or above 512 unless 1 divided by it is a sum of two
float16, is an error; a float32 bias goes with all.

The gradient of ``attn_bias`` has its shape: sums over the dimensions that it has once are taken in float32
and in one order, the same from run to run whatever the mode. An expanded view gets a gradient of the view's
whole size, so give the bias unexpanded.

Shapes; dimensions may be left out from the first on, H_k is the number of heads of k and v:

- ``flash_attn_func`` and its packed forms: (B or 1, H or H_k or 1, seqlen_q or 1, seqlen_k or 1).
- ``flash_attn_varlen_func`` and its packed forms: (H or H_k or 1, total_q or 1, max_seqlen_k or 1), where row
  ``cu_seqlens_q[b] + i`` belongs to query i of sequence b and column j to the j-th key of that sequence; or
  (B or 1, H or H_k or 1, 1, max_seqlen_k or 1), the same for all queries of a sequence.
- ``flash_attn_with_kvcache``: (B or 1, H or H_k or 1, seqlen_q or 1, capacity or 1), where column j belongs
  to position j of the cache, and capacity is that of the cache: ``k_cache.shape[1]``, or pages of
  ``block_table`` times page size.

``attn_mask`` is of dtype bool, ``attn_bias`` of that of q or float32. Neither goes with dropout or left
padding.
"""

import re
from collections.abc import Callable
from typing import Any

import torch

from . import fork_kernels
from .fork_bias_backward import FlashAttnMaskBiasFunc
from .fork_bias_forward import padded


def any_given(*terms: torch.Tensor | None) -> bool:
    """Whether a call has a mask, a bias or a sink."""
    return any(term is not None for term in terms)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None,
    attn_bias: torch.Tensor | None,
    learnable_sink: torch.Tensor | None,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    return_attn_probs: bool,
    lengths: tuple[Any, ...] = (None, None, 0, 0, None),
) -> Any:
    """Calls with a mask, a bias or a sink; returns what the public functions do.

    Args:
        lengths: of ``flash_attn_func`` nothing; of ``flash_attn_varlen_func`` cu_seqlens_q, cu_seqlens_k,
            max_seqlen_q, max_seqlen_k and block_table. The other arguments are theirs.

    Raises:
        TypeError, ValueError: dtype, shape or device of mask, bias or sink do not fit.
        NotImplementedError: with dropout.
    """
    if fork_kernels.ON:  # it raises where such calls are not to go elsewhere
        fork_kernels.takes_fa4(
            "attention", q, attn_mask=attn_mask, attn_bias=attn_bias, learnable_sink=learnable_sink
        )
    if softmax_scale is None:
        softmax_scale = q.shape[-1] ** -0.5
    scalars = (softmax_scale, causal, *window_size, softcap)
    out, lse = FlashAttnMaskBiasFunc.apply(
        padded(q), padded(k), padded(v), attn_mask, attn_bias, learnable_sink, dropout_p, deterministic,
        return_attn_probs, alibi_slopes, scalars, *lengths,
    )  # fmt: skip
    out = out[..., : v.shape[-1]]
    return (out, lse, q.new_empty(0)) if return_attn_probs else out


_ARGUMENTS = """\
attn_mask: bool, or None. True: the query attends to the key. Read in place, like attn_bias.
attn_bias: dtype of q or float32, or None. Added to the scaled scores.
    Both broadcast; flash_attn.fork_bias has their shapes and what they do not go with.
learnable_sink: (nheads,), float32, float16 or bfloat16, or None. A score without a key that joins each
    row's softmax; flash_attn.fork_sink tells what that means for the log-sum-exp.
"""


def document(*functions: Callable[..., Any]) -> None:
    """Tell of mask, bias and sink in upstream's docstrings, where a patch would conflict at each release."""

    def arguments(found: "re.Match[str]") -> str:
        return re.sub("(?m)^", found[1] + "    ", _ARGUMENTS.rstrip("\n")) + "\n" + found[0]

    for function in functions:
        if function.__doc__:  # none under python -OO
            function.__doc__ = re.sub(r"(?m)^( *)Return:", arguments, function.__doc__, count=1)
