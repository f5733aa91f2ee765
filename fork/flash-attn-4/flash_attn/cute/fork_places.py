"""Places in memory where warps keep running results, for tiles that leave no room in shared memory.

There is one for each warp that a GPU runs at once, so that memory does not grow with the call and stays in
L2. A warp takes one that is free, and gives it back when its tile is done.
"""

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32
from flash_attn.cute import utils
from flash_attn.cute.cute_dsl_utils import assume_tensor_aligned

_MULTIPROCESSORS = 144  # of a whole GH100; no GPU of compute capability 9.x has more
_WARP_ROWS = 16  # of a tile


def allocate(tile_m: int, head_dim_v: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The places of a call, and for each whether it is taken."""
    # On a multiprocessor at once, at most: registers have room for no more. Tiles of 64 rows have room in
    # shared memory: they come here only from fork_split.force_path, or where a caller chose the tile.
    blocks = 2 if tile_m == 64 else 1
    count = _MULTIPROCESSORS * blocks * tile_m // _WARP_ROWS
    size = _WARP_ROWS * -(-head_dim_v // 16) * 16
    return (
        like.new_empty((count, size), dtype=torch.float32),
        torch.zeros(count, dtype=torch.int32, device=like.device),
    )


@cute.jit
def take(taken: cute.Tensor, warps: cutlass.Constexpr[int], tidx: Int32):
    """Takes a free place for this warp. The search starts at SM id x warps, where collisions are rare."""
    count = cute.size(taken)
    place = (utils.smid() * warps + tidx // 32) % count
    if tidx % 32 == 0:
        before = cute.arch.atomic_cas(
            taken.iterator + place, cmp=Int32(0), val=Int32(1), sem="acquire", scope="gpu"
        )
        while before != 0:
            place = (place + 1) % count
            before = cute.arch.atomic_cas(
                taken.iterator + place, cmp=Int32(0), val=Int32(1), sem="acquire", scope="gpu"
            )
    return cute.arch.shuffle_sync(place, 0)


@cute.jit
def give_back(taken: cute.Tensor, place: Int32, tidx: Int32):
    """After all that the warp's threads did there."""
    cute.arch.fence_acq_rel_gpu()
    cute.arch.sync_warp()
    if tidx % 32 == 0:
        cute.arch.atomic_exch(taken.iterator + place, Int32(0), sem="relaxed", scope="gpu")


def of_thread(places: cute.Tensor, place: Int32, size: int, tidx: Int32):
    """A thread's elements, four at once, beside those of its warp's other threads."""
    own = assume_tensor_aligned(places)[place, None]
    return cute.make_tensor(own.iterator, cute.make_layout((4, 32, size // 4)))[None, tidx % 32, None]
