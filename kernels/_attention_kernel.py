"""The Triton kernels of decode attention: one over a share of a sequence's keys, one that merges the shares."""

# ruff: noqa: RUF005 -- Triton adds tuples and cannot unpack them.

from typing import no_type_check

from ._triton import tl, triton
from .rotary_kv_write import rotated_heads


@triton.jit
@no_type_check
def block_numbers(table_row, key, stop, KV_BLOCK: tl.constexpr, BLOCK_N: tl.constexpr):
    """The KV block of each of BLOCK_N keys from `key` on, those before `stop`; `key` is a multiple of BLOCK_N.

    Where all of them lie in one block, it is a single number.
    """
    if KV_BLOCK % BLOCK_N == 0:
        blocks = tl.load(table_row + key // KV_BLOCK, mask=key < stop, other=0)
    else:
        in_tile = tl.arange(0, BLOCK_N)
        column = (key + in_tile) // KV_BLOCK
        if BLOCK_N % KV_BLOCK == 0:
            column = key // KV_BLOCK + in_tile // KV_BLOCK
        blocks = tl.load(table_row + column, mask=key + in_tile < stop, other=0)
    return blocks


@triton.jit
@no_type_check
def cached_tile(cache_ptr, blocks, key, rows_per_block, start, stop, D: tl.constexpr, KV_BLOCK: tl.constexpr,
                BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr,
                MASKED: tl.constexpr = True):  # fmt: skip
    """Keys (or values) `[BLOCK_N, BLOCK_D]` of one KV head from `key` on; zero outside `start .. stop - 1`.

    Without MASKED all of them lie inside.
    Counted in rows of D elements, places in a cache fit 32 bits: one multiplication a row, and a wide one.
    """
    in_tile = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    if BLOCK_N % KV_BLOCK == 0:
        row = blocks * rows_per_block + in_tile % KV_BLOCK
    else:
        row = blocks * rows_per_block + (key + in_tile) % KV_BLOCK
    inside = key + in_tile < stop
    if WINDOW:
        inside = inside & (key + in_tile >= start)
    pointers = cache_ptr + row.to(tl.int64)[:, None] * D + d[None, :]
    if not MASKED:
        if D == BLOCK_D:
            return tl.load(pointers)
        return tl.load(pointers, mask=(d < D)[None, :], other=0.0)
    if D == BLOCK_D:
        return tl.load(pointers, mask=inside[:, None], other=0.0)
    return tl.load(pointers, mask=inside[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
@no_type_check
def _words(cache_ptr, blocks, key, rows_per_block, start, stop, D: tl.constexpr, KV_BLOCK: tl.constexpr,
           BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr):  # fmt: skip
    """What `cached_tile` loads of two-byte elements, two in a word: `[BLOCK_N, BLOCK_D / 2]` int32."""
    words_ptr = cache_ptr.to(tl.pointer_type(tl.int32))
    return cached_tile(
        words_ptr, blocks, key, rows_per_block, start, stop, D // 2, KV_BLOCK, BLOCK_D // 2, BLOCK_N, WINDOW
    )


@triton.jit
@no_type_check
def _halves(words, dtype: tl.constexpr):
    """`[n, 2 m]` elements of `dtype` out of `[n, m]` words."""
    low = words.to(tl.int16).to(dtype, bitcast=True)
    high = (words >> 16).to(tl.int16).to(dtype, bitcast=True)
    return tl.reshape(tl.join(low, high), (words.shape[0], 2 * words.shape[1]))


@triton.jit
@no_type_check
def _attend(q, k, v, key, start, stop, exponent_scale, running_max, running_sum, acc, BLOCK_N: tl.constexpr,
            WINDOW: tl.constexpr):  # fmt: skip
    """One step of flash attention: the softmax over the keys so far, and these."""
    n = key + tl.arange(0, BLOCK_N)
    inside = n < stop
    if WINDOW:
        inside = inside & (n >= start)
    scores = tl.dot(q.to(k.dtype), tl.trans(k), input_precision="ieee") * exponent_scale
    scores = tl.where(inside[None, :], scores, float("-inf"))
    new_max = tl.maximum(running_max, tl.max(scores, 1))
    weights = tl.exp2(scores - new_max[:, None])
    shrink = tl.exp2(running_max - new_max)
    running_sum = running_sum * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return new_max, running_sum, acc


@triton.jit
@no_type_check
def _keys_seen(seq_len, WINDOW: tl.constexpr, FUSED: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr):
    """(first key, last key + 1, first tile, shares in use) of the cached keys that one query sees."""
    start = tl.maximum(seq_len - WINDOW, 0) if WINDOW else 0
    stop = tl.maximum(seq_len - 1, 0) if FUSED else seq_len
    first_tile = start // BLOCK_N
    tiles = (stop + BLOCK_N - 1) // BLOCK_N - first_tile
    return start, stop, first_tile, tl.minimum(tl.maximum(tiles, 1), SPLITS)


@triton.jit(do_not_specialize=["table_reach"])
@no_type_check
def attention_kernel(
    # pointers
    q_ptr, k_cache_ptr, v_cache_ptr, table_ptr, seq_lens_ptr, out_ptr, partial_ptr, stats_ptr,
    cos_ptr, sin_ptr, slot_ptr, q_norm_ptr, k_norm_ptr,
    # strides in elements, of caches in rows of D elements
    q_stride, q_head_stride, k_block_rows, k_head_rows, v_block_rows, v_head_rows, table_stride,
    out_stride, out_head_stride,
    # scalars
    table_reach, scale, norm_eps,
    # shapes and switches
    D: tl.constexpr, GROUP: tl.constexpr, KV_BLOCK: tl.constexpr, ROTARY_DIM: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, SPLITS: tl.constexpr,
    FUSED: tl.constexpr, HAS_NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program takes one KV head of one sequence, and of its tiles of keys every SPLITS-th: flash attention with the
    queries of the KV head (padded to BLOCK_G) as the rows of one matrix.

    The grid is fixed by the bucket, the number of shares in use follows from the sequence's length. A lone share
    writes the result, several leave float32 sums for the merge, surplus programs nothing.
    With FUSED every program rotates its queries; the last share's also the new key, writes it and the value to the
    cache and starts its softmax from them, so that nothing which is written is read back within the launch.

    Where the first tile lies does not depend on the length, so its block numbers are asked for with the length, and
    later ones a tile ahead. With STAGES 1, keys and values go to registers, as words of two elements (the compiler
    would take single ones apart, and wait for them, as soon as they are kept over a turn of the loop): the first
    while the queries are being rotated, the next while these are being used. Else they go through a pipeline of so
    many stages in shared memory.
    There is no early way out: the compiler would move the first loads behind it, where they wait for the length.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    split = tl.program_id(0)
    kv_head = tl.program_id(1)
    num_kv_heads = tl.num_programs(1)
    seq = tl.program_id(2).to(tl.int64)
    STEP: tl.constexpr = SPLITS * BLOCK_N
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + g
    heads_inside = (g < GROUP)[:, None] & (d < D)[None, :]
    table_row = table_ptr + seq * table_stride
    k_head_ptr = k_cache_ptr + tl.cast(kv_head * k_head_rows, tl.int64) * D
    v_head_ptr = v_cache_ptr + tl.cast(kv_head * v_head_rows, tl.int64) * D

    seq_len = tl.load(seq_lens_ptr + seq)
    start, stop, first_tile, used = _keys_seen(seq_len, WINDOW, FUSED, BLOCK_N, SPLITS)
    first = (first_tile + split) * BLOCK_N
    blocks = block_numbers(table_row, first, table_reach, KV_BLOCK, BLOCK_N)
    if STAGES == 1:
        k_words = _words(k_head_ptr, blocks, first, k_block_rows, start, stop, D, KV_BLOCK, BLOCK_D, BLOCK_N, WINDOW)
        v_words = _words(v_head_ptr, blocks, first, v_block_rows, start, stop, D, KV_BLOCK, BLOCK_D, BLOCK_N, WINDOW)

    exponent_scale = scale * 1.4426950408889634  # softmax in powers of two
    running_max = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    running_sum = tl.zeros((BLOCK_G,), tl.float32)
    acc = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
    if FUSED:
        token_ptr = q_ptr + seq * q_stride
        q = rotated_heads(token_ptr + kv_head * GROUP * D, g, GROUP, cos_ptr, sin_ptr, q_norm_ptr, norm_eps, seq,
                          D, ROTARY_DIM, BLOCK_D, HAS_NORM)  # fmt: skip
        if split == used - 1:
            keys_ptr = token_ptr + (num_kv_heads * GROUP + kv_head) * D
            slot = tl.load(slot_ptr + seq)
            new_v = tl.load(keys_ptr + num_kv_heads * D + d, mask=d < D, other=0.0).to(v_cache_ptr.dtype.element_ty)
            new_k = rotated_heads(keys_ptr, tl.arange(0, 1), 1, cos_ptr, sin_ptr, k_norm_ptr, norm_eps, seq,
                                  D, ROTARY_DIM, BLOCK_D, HAS_NORM).to(k_cache_ptr.dtype.element_ty)  # fmt: skip
            block, offset = slot // KV_BLOCK, slot % KV_BLOCK
            tl.store(k_head_ptr + (block * k_block_rows + offset) * D + d[None, :], new_k, mask=(d < D)[None, :])
            tl.store(v_head_ptr + (block * v_block_rows + offset) * D + d, new_v, mask=d < D)
            running_max = tl.sum(q.to(tl.float32) * new_k.to(tl.float32), 1) * exponent_scale
            running_sum += 1.0
            acc += new_v.to(tl.float32)[None, :]
    else:
        q_pointers = q_ptr + seq * q_stride + head[:, None] * q_head_stride + d[None, :]
        q = tl.load(q_pointers, mask=heads_inside, other=0.0)

    if STAGES == 1:
        blocks = block_numbers(table_row, first + STEP, stop, KV_BLOCK, BLOCK_N)
    for key in tl.range(first, stop, STEP, num_stages=STAGES):
        if STAGES == 1:
            k = _halves(k_words, k_cache_ptr.dtype.element_ty)
            v = _halves(v_words, v_cache_ptr.dtype.element_ty)
            later = key + STEP
            if later < stop:
                k_words = _words(
                    k_head_ptr, blocks, later, k_block_rows, start, stop, D, KV_BLOCK, BLOCK_D, BLOCK_N, WINDOW
                )
                v_words = _words(
                    v_head_ptr, blocks, later, v_block_rows, start, stop, D, KV_BLOCK, BLOCK_D, BLOCK_N, WINDOW
                )
                blocks = block_numbers(table_row, later + STEP, stop, KV_BLOCK, BLOCK_N)
        else:
            k = cached_tile(k_head_ptr, blocks, key, k_block_rows, start, stop, D, KV_BLOCK, BLOCK_D, BLOCK_N, WINDOW)
            v = cached_tile(v_head_ptr, blocks, key, v_block_rows, start, stop, D, KV_BLOCK, BLOCK_D, BLOCK_N, WINDOW)
            blocks = block_numbers(table_row, key + STEP, stop, KV_BLOCK, BLOCK_N)
        running_max, running_sum, acc = _attend(
            q, k, v, key, start, stop, exponent_scale, running_max, running_sum, acc, BLOCK_N, WINDOW
        )

    if split >= used:
        return
    if SPLITS > 1 and used > 1:
        entry = ((seq * num_kv_heads + kv_head) * GROUP + g) * SPLITS + split
        tl.store(partial_ptr + entry[:, None] * D + d[None, :], acc, mask=heads_inside)
        tl.store(stats_ptr + 2 * entry, running_max, mask=g < GROUP)
        tl.store(stats_ptr + 2 * entry + 1, running_sum, mask=g < GROUP)
    else:
        result = tl.where(seq_len > 0, acc / tl.where(running_sum > 0.0, running_sum, 1.0)[:, None], 0.0)
        pointers = out_ptr + seq * out_stride + head[:, None] * out_head_stride + d[None, :]
        tl.store(pointers, result.to(out_ptr.dtype.element_ty), mask=heads_inside)


@triton.jit
@no_type_check
def merged_shares(partial_ptr, stats_ptr, entry, used, D: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr):
    """One head's result `[BLOCK_D]` out of its `used` shares from `entry` on, in index order; zero if none saw a key.

    A thread holds its elements of CHUNK shares at once, so nothing is exchanged between threads.
    """
    d = tl.arange(0, BLOCK_D)
    largest = float("-inf")
    total = 0.0
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for first in range(0, used, CHUNK):
        maxima = ()
        sums = ()
        shares = ()
        for i in tl.static_range(CHUNK):
            there = first + i < used
            share = entry + first + i
            maxima = maxima + (tl.load(stats_ptr + 2 * share, mask=there, other=float("-inf")),)
            sums = sums + (tl.load(stats_ptr + 2 * share + 1, mask=there, other=0.0),)
            shares = shares + (tl.load(partial_ptr + share * D + d, mask=there & (d < D), other=0.0),)
        new_largest = largest
        for i in tl.static_range(CHUNK):
            new_largest = tl.maximum(new_largest, maxima[i])
        shrink = tl.exp2(largest - new_largest)
        total *= shrink
        acc *= shrink
        for i in tl.static_range(CHUNK):
            weight = tl.exp2(maxima[i] - new_largest)
            total += sums[i] * weight
            acc += shares[i] * weight
        largest = new_largest
    return acc / tl.where(total > 0.0, total, 1.0)


@triton.jit
@no_type_check
def attention_merge_kernel(
    partial_ptr, stats_ptr, seq_lens_ptr, out_ptr, out_stride, out_head_stride,
    D: tl.constexpr, WINDOW: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
    CHUNK: tl.constexpr, FUSED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program merges the shares of one head of one sequence, unless there was only one."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    head = tl.program_id(0)
    seq = tl.program_id(1).to(tl.int64)
    _, _, _, used = _keys_seen(tl.load(seq_lens_ptr + seq), WINDOW, FUSED, BLOCK_N, SPLITS)
    if used == 1:
        return
    result = merged_shares(partial_ptr, stats_ptr, (seq * tl.num_programs(0) + head) * SPLITS, used, D, BLOCK_D, CHUNK)
    d = tl.arange(0, BLOCK_D)
    pointers = out_ptr + seq * out_stride + head * out_head_stride + d
    tl.store(pointers, result.to(out_ptr.dtype.element_ty), mask=d < D)
