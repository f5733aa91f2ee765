"""Attention for Transformers' models, with their masks, biases and sinks read in place.

    from flash_attn.serving import transformers
    transformers.register()
    model = AutoModel.from_pretrained(…, attn_implementation=transformers.NAME)

``attn_implementation="flash_attention_2"`` runs on flash_attn as well. It cuts padding out of packed copies,
has no place for a bias such as T5's, and knows causal and sliding attention alone. Here a call that is
causal, with a window or without, takes the kernels for that; whatever else the model asks for goes as
``attn_mask`` and ``attn_bias``, and a model's sinks as ``learnable_sink``.

The name has no "flash" in it: Transformers takes such names for one of its own, and then refuses models that
it has not marked for them, T5 among them, or puts other kernels in their place, as for gpt-oss.

The deterministic mode is the caller's: ``flash_attn.set_deterministic_mode(True)``. With padding on the left,
a row's keys stand at other places than without, and its bits may differ.
"""

from collections.abc import Callable
from typing import Any

import torch
from flash_attn.flash_attn_interface import flash_attn_func

NAME = "deterministic_attention"


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    position_bias: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """What Transformers calls.

    Tensors are (batch, heads, tokens, head dim); the result is (batch, tokens, heads, head dim).

    attention_mask: None where the call is all that is_causal and sliding_window say; else of every pair, bool
    (True: attend) or added to the scores. One that ``mask`` marked as no more than that window is not read.

    Raises:
        NotImplementedError: dropout with a mask, a bias or a sink.
        RuntimeError: a dtype other than float16 and bfloat16.
    """
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    bias = position_bias
    options = {}
    if sliding_window is not None and sliding_window == getattr(attention_mask, "window", None):
        attention_mask = None
    if attention_mask is None:
        options["causal"] = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if sliding_window is not None and sliding_window < k.shape[1]:
            options["window_size"] = (sliding_window - 1, sliding_window - 1)
    elif attention_mask.dtype == torch.bool:
        options["attn_mask"] = attention_mask
    else:
        bias = attention_mask if bias is None else bias + attention_mask
    if bias is not None:
        options["attn_bias"] = bias if bias.dtype in (q.dtype, torch.float32) else bias.to(q.dtype)
    if s_aux is not None:
        options["learnable_sink"] = s_aux.contiguous()
    out = flash_attn_func(q, k, v, dropout, softmax_scale=scaling, softcap=softcap or 0.0, **options)
    return out, None


def _is_window(mask_function: Callable[..., torch.Tensor], size: int) -> bool:
    """Whether a query attends to the last ``size`` keys, its own among them: no chunks or other pattern."""

    def sees(query: int, key: int) -> bool:
        return bool(mask_function(*(torch.tensor(index) for index in (0, 0, query, key))))

    ends = (size - 1, size, 2 * size - 1, 2 * size)

    def is_edge(end: int) -> bool:
        """Whether the query sees its own key and the window's first one, and none of the keys beside them."""
        beside = sees(end, end + 1) or (end >= size and sees(end, end - size))
        return sees(end, end) and sees(end, end - size + 1) and not beside

    return all(map(is_edge, ends))


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **others: Any,
) -> torch.Tensor | None:
    """None where the model asks for the kernels' own causal attention, else Transformers' mask of every pair.

    Transformers says by ``allow_is_causal_skip`` whether there is more to it, but for attention in chunks.
    A mask that is a window is marked: a model whose layers tell their window takes the kernels' own.
    attention_mask: (batch, keys), False where a token is padding.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    mask_function = mask_function or causal_mask_function
    ends_together = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    plain = allow_is_causal_skip and ends_together and not _pads(attention_mask, kv_offset, kv_length)
    if plain and (local_size is None or kv_length < local_size):
        return None
    own = {"q_offset": q_offset, "kv_offset": kv_offset, "mask_function": mask_function}
    own |= {"attention_mask": attention_mask, "local_size": local_size, "allow_is_causal_skip": False}
    found = sdpa_mask(batch_size, q_length, kv_length, **own, **others)
    if plain and found is not None and local_size is not None and _is_window(mask_function, local_size):
        found.window = local_size  # which some models tell their attention, and some do not
    return found


def _pads(attention_mask: torch.Tensor | None, kv_offset: int, kv_length: int) -> bool:
    """Whether some of the keys are padding; those past the mask's end are."""
    if attention_mask is None:
        return False
    own = attention_mask[:, kv_offset : kv_offset + kv_length]
    return own.shape[1] < kv_length or not bool(own.all())


def register() -> None:
    """Make the attention known to Transformers, as ``NAME``. Again, it does nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)
