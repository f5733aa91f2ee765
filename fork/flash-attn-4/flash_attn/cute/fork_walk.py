"""Chunks that a thread block walks one after another, from the last to the first, and folds.

The running result lies in shared memory, or, where that has no room, in memory (fork_places.py). Rows' maxima
and sums lie in registers. Within a chunk the loop is upstream's. Where a chunk begins, its scores are
multiplied while the chunk before is still being accumulated, as within a chunk; then that one is folded.
"""

from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from flash_attn.cute import fork_places, utils
from flash_attn.cute.fork_fold import folded, weights
from quack import layout_utils


def walks(kernel) -> bool:
    return kernel.chunks is not None and not kernel.chunks.spread


def keeps_in_shared_memory(kernel) -> bool:
    return walks(kernel) and not kernel.chunks.in_memory


def stash_layout(kernel):
    """Four elements at once, so that a thread's loads are of 16 bytes and a warp's meet no bank twice."""
    threads = kernel.num_mma_threads
    return cute.make_layout((4, threads, kernel.tile_m * kernel.tile_hdimv // threads // 4))


def stash_size(kernel) -> int:
    return kernel.tile_m * kernel.tile_hdimv if keeps_in_shared_memory(kernel) else 0


class SharedStash:
    """A thread's part of the running result in shared memory."""

    def __init__(self, stash, tidx):
        self.part = stash[None, tidx, None]

    def take(self):
        pass

    def give_back(self):
        pass

    def elements(self):
        return self.part


class Place:
    """A thread's part of the running result in memory, in the place that its warp has taken."""

    def __init__(self, kernel, places, taken, tidx):
        self.places, self.taken, self.tidx = places, taken, tidx
        self.warps = kernel.num_mma_threads // 32
        self.size = kernel.tile_m * kernel.tile_hdimv // kernel.num_mma_threads
        self.place = cute.make_rmem_tensor(1, Int32)

    def take(self):
        self.place[0] = fork_places.take(self.taken, self.warps, self.tidx)

    def give_back(self):
        fork_places.give_back(self.taken, self.place[0], self.tidx)

    def elements(self):
        return fork_places.of_thread(self.places, self.place[0], self.size, self.tidx)


def stash_of(kernel, sStash, places, taken, tidx):
    if sStash is not None:
        return SharedStash(sStash, tidx)
    return Place(kernel, places, taken, tidx)


class Running:
    """The result of the chunks that were folded."""

    def __init__(self, softmax, stash, tidx):
        self.stash, self.tidx, self.scale_log2 = stash, tidx, softmax.scale_log2
        self.max, self.sum, self.chunk_max, self.chunk_sum = (
            cute.make_rmem_tensor_like(softmax.row_max, Float32) for _ in range(4)
        )
        self.count = cute.make_rmem_tensor(1, Int32)  # 0: no chunk was folded

    def reset(self):
        self.stash.take()
        self.count[0] = 0

    def begin_chunk(self, softmax):
        """Sets aside the rows of the chunk that ends, for the softmax begins anew."""
        self.chunk_max.store(softmax.row_max.load())
        self.chunk_sum.store(softmax.row_sum.load())

    def fold_chunk(self, acc_O):
        """Folds the chunk that ends. What is in acc_O afterwards is of no use."""
        part = self.stash.elements()
        _fold(acc_O, self.chunk_max, self.chunk_sum, self.max, self.sum, part, self.count, self.scale_log2)
        self.max.store(self.chunk_max.load())
        self.sum.store(self.chunk_sum.load())
        _store(acc_O, self.stash.elements())
        self.count[0] = 1

    def finish(self, acc_O, softmax):
        """Folds the last chunk that was walked. What divides by the sums adds up those of four threads."""
        row_sum, part = softmax.row_sum, self.stash.elements()
        _fold(acc_O, softmax.row_max, row_sum, self.max, self.sum, part, self.count, self.scale_log2)
        _keep_one_of_four(row_sum, self.tidx)
        self.stash.give_back()


@cute.jit
def _fold(acc_O, row_max, row_sum, run_max, run_sum, part, count, scale_log2: Float32):
    row_sum.store(utils.warp_reduce(row_sum.load(), lambda a, b: a + b, width=4))
    acc_mn = layout_utils.reshape_acc_to_mn(acc_O)
    fours = cute.size(acc_mn, mode=[1]) // 4
    four = cute.make_rmem_tensor(4, Float32)
    if count[0] > 0:
        for r in cutlass.range(cute.size(row_max), unroll_full=True):
            both, of_run, of_chunk = weights(run_max[r], row_max[r], scale_log2)
            row_sum[r] = folded(run_sum[r], of_run, row_sum[r], of_chunk)
            row_max[r] = both
            for f in cutlass.range_constexpr(fours):
                cute.autovec_copy(part[None, r * fours + f], four)
                for i in cutlass.range(4, unroll_full=True):
                    acc_mn[r, f * 4 + i] = folded(four[i], of_run, acc_mn[r, f * 4 + i], of_chunk)


@cute.jit
def _keep_one_of_four(row_sum, tidx: Int32):
    if tidx % 4 != 0:
        row_sum.fill(0.0)


@cute.jit
def _store(acc_O, part):
    acc_mn = layout_utils.reshape_acc_to_mn(acc_O)
    fours = cute.size(acc_mn, mode=[1]) // 4
    four = cute.make_rmem_tensor(4, Float32)
    for r in cutlass.range_constexpr(cute.size(acc_mn, mode=[0])):
        for f in cutlass.range_constexpr(fours):
            for i in cutlass.range(4, unroll_full=True):
                four[i] = acc_mn[r, f * 4 + i]
            cute.autovec_copy(four, part[None, r * fours + f])


@cute.jit
def walk(
    kernel: cutlass.Constexpr, state, n_block_min, n_block_max, right_min, left_min, first_half, step,
    last_half, running, mma_pv_fn, mask_fn, has_left_edge: cutlass.Constexpr,
):  # fmt: skip
    """All blocks of a tile, chunk by chunk.

    Blocks from right_min on are cut by the causal or the window's right edge, those below left_min by its
    left edge. The other arguments are upstream's parts of a tile's loop.
    """
    masked = partial(mask_fn, mask_mod=kernel.mask_mod, mask_seqlen=False)
    plain = masked if const_expr(kernel.mask_mod is not None) else None
    has_right_edge = kernel.is_causal or kernel.is_local
    state = first_half(
        n_block=n_block_max - 1,
        kv_consumer_state=state,
        mask_fn=partial(mask_fn, mask_mod=kernel.mask_mod),
        is_first_block=True,
    )
    blocks = kernel.chunks.blocks
    end = n_block_max - 1
    first_chunk = n_block_min // blocks
    chunks = cutlass.max(end, 0) // blocks - first_chunk + 1
    accumulates = Boolean(False)
    for c in cutlass.range(chunks, unroll=1):
        begin = cutlass.max(n_block_min, (first_chunk + chunks - 1 - c) * blocks)
        if c > 0:
            end = end - 1
            state = step(
                state,
                n_block=end,
                mma_pv_fn=partial(mma_pv_fn, zero_init=not accumulates),
                mask_fn=masked if const_expr(has_right_edge) else plain,
                running=running,
            )
            accumulates = Boolean(False)
        if const_expr(has_right_edge):
            stop = cutlass.max(begin, right_min)
            for n in cutlass.range(end - stop, unroll=1):
                state = step(
                    state,
                    n_block=end - 1 - n,
                    mma_pv_fn=partial(mma_pv_fn, zero_init=not accumulates),
                    mask_fn=masked,
                )
                accumulates = Boolean(True)
            end = cutlass.min(end, stop)
        stop = cutlass.max(begin, left_min)
        for n in cutlass.range(end - stop, unroll=1):
            state = step(
                state,
                n_block=end - 1 - n,
                mma_pv_fn=partial(mma_pv_fn, zero_init=not accumulates),
                mask_fn=plain,
            )
            accumulates = Boolean(True)
        if const_expr(has_left_edge):
            end = cutlass.min(end, stop)
            for n in cutlass.range(end - begin, unroll=1):
                state = step(
                    state,
                    n_block=end - 1 - n,
                    mma_pv_fn=partial(mma_pv_fn, zero_init=not accumulates),
                    mask_fn=masked,
                )
                accumulates = Boolean(True)
        end = begin
    return last_half(kv_consumer_state=state, zero_init=not accumulates)
