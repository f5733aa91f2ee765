"""What this wheel's kernels serve, as a serving engine has to know it before it starts."""

import flash_attn_2_cuda
import torch
from flash_attn.fork import fork_info

DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16"}
_HEAD_DIMS = (32, 64, 96, 128, 192, 256)  # of kernels; a head dim takes those of the next
LARGEST_HEAD_DIM = _HEAD_DIMS[-1]


def takes_head_dim(head_dim: int) -> bool:
    """Whether some wheel has kernels for it."""
    return head_dim % 8 == 0 and 0 < head_dim <= LARGEST_HEAD_DIM


def missing(head_dim: int, dtype: torch.dtype) -> list[str]:
    """Kernels that this wheel lacks for a cache in pages: that of single queries, and that of more."""
    dim = next(dim for dim in _HEAD_DIMS if head_dim <= dim)
    names = [f"split_hdim{dim}_{DTYPES[dtype]}{suffix}" for suffix in ("", "_causal")]
    return [name for name in names if name not in flash_attn_2_cuda.kernel_set()]


def unfit_gpu(capability: tuple[int, int]) -> str | None:
    """Why a GPU of that compute capability cannot run what was compiled; None: it can, or nobody knows."""
    built = fork_info()
    names, flags = built.get("architectures", []), built.get("nvcc", {}).get("flags", [])
    if not names or any("code=compute_" in flag for flag in flags):  # PTX, for whatever GPU comes
        return None
    for name in names:  # such as 90 or 90a, whose machine code runs on that GPU alone
        digits = name.rstrip("af")
        major, minor = int(digits[:-1]), int(digits[-1])
        serves_later = not name.endswith("a") and major == capability[0] and minor <= capability[1]
        if (major, minor) == capability or serves_later:
            return None
    has = ".".join(map(str, capability))
    built_for = ", ".join(f"sm_{name}" for name in names)
    return f"this wheel of flash_attn is for {built_for}, and the GPU has compute capability {has}"


def split_size(head_dim: int) -> int:
    """FA2_SPLIT_SIZE or its default; ValueError for one that is no multiple of a tile of keys."""
    chosen, tile = flash_attn_2_cuda.check_split_size(None), 128 if head_dim <= 128 else 64
    if chosen % tile:
        raise ValueError(f"FA2_SPLIT_SIZE={chosen} is no multiple of {tile}, as head_dim {head_dim} needs")
    return chosen


def attend(
    scope: tuple[bool, int],
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    pages: torch.Tensor,
    alibi_slopes: torch.Tensor | None,
    most_queries: int,
    most_keys: int,
    scale: float,
    causal: bool,
    left: int,
    right: int,
    softcap: float,
    sink: torch.Tensor | None,
) -> None:
    """Write to out the attention of queries (tokens, heads, head dim) to a cache that has their keys.

    scope: the mode and its chunks, of this call alone; the process-wide mode belongs to the program.
    keys, values: (pages, tokens of a page, heads of keys, head dim).
    starts: of each sequence among the queries (sequences + 1,); lengths: keys of each (sequences,).
    pages: of each sequence (sequences, longest).
    """
    before = flash_attn_2_cuda.deterministic_scope.set(scope)
    try:
        flash_attn_2_cuda.varlen_forward(
            q, keys, values, out,
            starts, starts,  # where keys begin follows from the pages
            lengths, None, pages, alibi_slopes, most_queries, most_keys,
            0.0, scale, False, causal, left, right, softcap, False, None, learnable_sink=sink,
        )  # fmt: skip
    finally:
        flash_attn_2_cuda.deterministic_scope.reset(before)
