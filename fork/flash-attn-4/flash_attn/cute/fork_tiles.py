"""How many keys a tile has.

A paged call has as many as its loader can load. With the mode on, all calls of a head dim have one number.
"""

import math
from dataclasses import replace
from typing import Any

from flash_attn.cute.fork_mode import DeterministicMode

_LOADERS = 128  # threads that load pages on SM 9.0, eight elements each at once


def keys_of_block(head_dims: tuple[int, int]) -> int | None:
    """The keys of a tile of calls in chunks, which have a whole number of tiles; None: they keep one split.

    As many as shared memory has room for, of those that divide usual sizes of chunks and that every loader
    can load. Upstream has 144 or 128 at head dims from 72 to 96, and fewer with a window above 128.
    """
    d, d_v = head_dims
    if d_v > d:
        return None
    return 128 if d <= 192 and d + d_v <= 320 else 64


def loadable(
    cfg: Any, mode: DeterministicMode, arch: int, head_dims: tuple[int, int], has_pages: bool
) -> Any:
    """The configuration of a call, with tiles of whole steps of the loader of pages.

    With the mode on calls without pages get them too, for a row's bits follow from the keys of a tile.
    """
    if arch // 10 != 9 or not (has_pages or mode.enabled):
        return cfg
    keys = keys_of_block(head_dims) if mode.enabled else None
    if keys is not None:
        return cfg if keys == cfg.n_block_size else replace(cfg, n_block_size=keys)
    padded = [-(-size // 16) * 16 for size in head_dims]
    keys_at_once = _LOADERS // (math.gcd(*padded, 64) // 8)
    return replace(cfg, n_block_size=cfg.n_block_size // keys_at_once * keys_at_once)
