"""``learnable_sink``: a score without a key that joins each row's softmax, one for each head of queries.

Models such as gpt-oss learn it: a row may attend to nothing. A row's weights are then
``exp(score) / (sum of exp(scores) + exp(sink))``, and add up to less than one. The sink joins once, at the
end of a row's fold, so with the deterministic mode on the row contract holds. It is no key: softmax_scale,
softcap, masks, biases and windows leave it as it is. A row that sees no key gives zeros.

``learnable_sink`` is (nheads,), float32, float16 or bfloat16, contiguous, on the device of q; -inf is no
sink. It does not go with dropout, nor with alibi_slopes where attention is causal or window_size ends in 0.

The log-sum-exp that functions return is that of the keys alone. With the sink it is
``torch.logaddexp(lse, learnable_sink[:, None])``.

The gradient of a sink is a sum over all rows of its head in float32, in one order: the same from run to run.
"""

import torch

_PADDING = 128  # of a packed sequence's sums, in rows: see core/call.h


def _of_heads(sink: torch.Tensor) -> torch.Tensor:
    """(h, 1), beside a log-sum-exp of (b, h, seqlen) or (h, total)."""
    return sink.float()[:, None]


def joined(lse: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    """The log-sum-exp with the sink, of which the backward pass makes a row's weights; +inf stays: no key."""
    return torch.logaddexp(lse, _of_heads(sink))


def gradient(
    sink: torch.Tensor, lse: torch.Tensor, softmax_d: torch.Tensor, cu_seqlens_q: torch.Tensor | None
) -> torch.Tensor:
    """Of the sink: minus its weight in a row times the row's sum of dout * out, over all rows.

    Args:
        lse: of the keys alone, (b, h, seqlen) or packed (h, total).
        softmax_d: the rows' sums, as the backward pass leaves them.
        cu_seqlens_q: of packed sequences, else None.
    """
    counts = lse < float("inf")  # a row without keys has no part; its weight may be NaN
    if cu_seqlens_q is None:
        sums = softmax_d[:, :, : lse.shape[-1]]
    else:
        rows = torch.arange(lse.shape[-1], device=lse.device)
        sequence = torch.searchsorted(cu_seqlens_q, rows, right=True) - 1
        counts = counts & (sequence >= 0) & (rows < cu_seqlens_q[-1])  # others nobody wrote
        sums = softmax_d[:, (rows + _PADDING * sequence).clamp(0, softmax_d.shape[-1] - 1)]
    shares = torch.where(counts, torch.sigmoid(_of_heads(sink) - lse) * sums, 0.0)
    return -shares.sum(dim=-1).reshape(-1, len(sink)).sum(dim=0).to(sink.dtype)
