"""Sharing one sequence's keys among programs, and merging what they found."""

from typing import no_type_check

from ._triton import tl, triton


@triton.jit
@no_type_check
def shares(seq_len, WINDOW: tl.constexpr, FUSED: tl.constexpr, BLOCK_N: tl.constexpr, MIN_TILES: tl.constexpr,
            MAX_SPLITS: tl.constexpr):  # fmt: skip
    """(first key, last key + 1, tiles of a split, splits in use) of the cached keys that one query sees."""
    stop = tl.maximum(seq_len - 1, 0) if FUSED else seq_len
    start = tl.maximum(seq_len - WINDOW, 0) if WINDOW else 0
    tiles = (stop - start + BLOCK_N - 1) // BLOCK_N
    share = tl.maximum((tiles + MAX_SPLITS - 1) // MAX_SPLITS, MIN_TILES)
    return start, stop, share, tl.maximum((tiles + share - 1) // share, 1)


@triton.jit
@no_type_check
def attention_merge_kernel(
    partial_ptr, stats_ptr, seq_lens_ptr, out_ptr, out_stride, out_head_stride,
    D: tl.constexpr, WINDOW: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, MAX_SPLITS: tl.constexpr,
    MIN_TILES: tl.constexpr, FUSED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program merges the shares of one head of one sequence, in index order, unless there was only one."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    head = tl.program_id(0)
    seq = tl.program_id(1).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + seq)
    # Asked for before the length is known: what lies past the shares in use is anything, and dropped.
    split = tl.arange(0, MAX_SPLITS)
    d = tl.arange(0, BLOCK_D)
    entry = (seq * tl.num_programs(0) + head) * MAX_SPLITS + split
    maxima = tl.load(stats_ptr + 2 * entry)
    sums = tl.load(stats_ptr + 2 * entry + 1)
    acc = tl.load(partial_ptr + entry[:, None] * D + d[None, :], mask=(d < D)[None, :], other=0.0)
    _, _, _, num_splits = shares(seq_len, WINDOW, FUSED, BLOCK_N, MIN_TILES, MAX_SPLITS)
    used = split < num_splits
    maxima = tl.where(used, maxima, float("-inf"))
    sums = tl.where(used, sums, 0.0)
    acc = tl.where(used[:, None], acc, 0.0)
    if num_splits > 1:
        shrink = tl.exp2(maxima - tl.max(maxima, 0))
        result = tl.sum(acc * shrink[:, None], 0) / tl.sum(sums * shrink, 0)
        pointers = out_ptr + seq * out_stride + head * out_head_stride + d
        tl.store(pointers, result.to(out_ptr.dtype.element_ty), mask=d < D)
