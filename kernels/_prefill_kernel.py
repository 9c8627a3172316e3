"""The Triton kernels of attention with any number of queries a sequence: one over keys, one that merges its shares."""

from typing import no_type_check

from ._attention_kernel import block_numbers, cached_tile, merged_shares
from ._triton import tl, triton


@triton.jit
@no_type_check
def _attend(
    q, position, running_max, running_sum, acc, k_head_ptr, v_head_ptr, table_row, block_rows, blocks, first, last,
    step, start, stop, exponent_scale,
    D: tl.constexpr, KV_BLOCK: tl.constexpr, WINDOW: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Flash attention over every so-many-th tile of keys from `first` on, before `last`: the softmax so far, and these.

    `blocks` are the KV blocks of the first tile. Without MASKED every query sees all of the keys.
    """
    for key in tl.range(first, last, step, num_stages=STAGES):
        k = cached_tile(k_head_ptr, blocks, key, block_rows, start, stop, D, KV_BLOCK, BLOCK_D, BLOCK_N, WINDOW, MASKED)
        v = cached_tile(v_head_ptr, blocks, key, block_rows, start, stop, D, KV_BLOCK, BLOCK_D, BLOCK_N, WINDOW, MASKED)
        blocks = block_numbers(table_row, key + step, stop, KV_BLOCK, BLOCK_N)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:
            n = (key + tl.arange(0, BLOCK_N))[None, :]
            visible = n <= position[:, None]
            if WINDOW:
                visible = visible & (n > position[:, None] - WINDOW)
            scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(scores, 1) * exponent_scale)
        weights = tl.exp2(scores * exponent_scale - new_max[:, None])
        shrink = tl.exp2(running_max - new_max)
        running_sum = running_sum * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        running_max = new_max
    return running_max, running_sum, acc


@triton.jit
@no_type_check
def _place(offsets_ptr, num_tokens, num_seqs, tile, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """The sequence that a tile of rows belongs to, and how many of its tiles lie before that one.

    Sequences have their tiles one behind the other. Padding counts as one more, `num_seqs`, without keys; a tile
    behind the last one is in no sequence, and gets a higher number.
    """
    CHUNK: tl.constexpr = 128
    seq, before, so_far = 0, 0, 0
    for first in range(0, num_seqs + 1, CHUNK):
        index = first + tl.arange(0, CHUNK)
        start = tl.load(offsets_ptr + index, mask=index <= num_seqs, other=num_tokens)
        stop = tl.load(offsets_ptr + index + 1, mask=index < num_seqs, other=num_tokens)
        tiles = ((stop - start) * GROUP + BLOCK_M - 1) // BLOCK_M
        behind = so_far + tl.cumsum(tiles, 0) <= tile
        seq += tl.sum(behind.to(tl.int32), 0)
        before += tl.sum(tl.where(behind, tiles, 0), 0)
        so_far += tl.sum(tiles, 0)
    return seq, tile - before


@triton.jit
@no_type_check
def _attend_rows(
    q_ptr, k_head_ptr, v_head_ptr, table_row, blocks, out_ptr, partial_ptr, stats_ptr,
    q_stride, q_head_stride, block_rows, out_stride, out_head_stride,
    first_token, num_queries, seq_len, nth, kv_head, num_kv_heads, scale,
    D: tl.constexpr, GROUP: tl.constexpr, KV_BLOCK: tl.constexpr, WINDOW: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """One tile of rows of a sequence, the `nth` from its end, with one KV head, over all keys or over one share."""
    num_rows = num_queries * GROUP
    first_row = (tl.cdiv(num_rows, BLOCK_M) - 1 - nth) * BLOCK_M
    row = first_row + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    token = (first_token + row // GROUP).to(tl.int64)
    head = kv_head * GROUP + row % GROUP
    mask = (row < num_rows)[:, None] & (d < D)[None, :]
    q = tl.load(q_ptr + token[:, None] * q_stride + head[:, None] * q_head_stride + d[None, :], mask=mask, other=0.0)
    q = q.to(k_head_ptr.dtype.element_ty)

    cached = seq_len - num_queries
    position = cached + row // GROUP
    first_position = cached + first_row // GROUP
    last_position = cached + (tl.minimum(first_row + BLOCK_M, num_rows) - 1) // GROUP
    start = tl.maximum(first_position - WINDOW + 1, 0) if WINDOW else 0
    stop = tl.maximum(last_position + 1, 0)
    first = start // BLOCK_N * BLOCK_N
    exponent_scale = scale * 1.4426950408889634  # softmax in powers of two
    running_max = tl.full((BLOCK_M,), -3.0e38, tl.float32)  # finite: a row may see none of the first keys
    running_sum = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    if SHARED:
        first += tl.program_id(1) * BLOCK_N
        step = tl.num_programs(1) * BLOCK_N
        if WINDOW:
            blocks = block_numbers(table_row, first, stop, KV_BLOCK, BLOCK_N)
    else:
        step = BLOCK_N
        if WINDOW:
            bare = tl.maximum(tl.cdiv(last_position - WINDOW + 1, BLOCK_N) * BLOCK_N, first)
            bare = tl.minimum(bare, stop)
            blocks = block_numbers(table_row, first, stop, KV_BLOCK, BLOCK_N)
            running_max, running_sum, acc = _attend(
                q, position, running_max, running_sum, acc, k_head_ptr, v_head_ptr, table_row, block_rows, blocks,
                first, bare, step, start, stop, exponent_scale,
                D, KV_BLOCK, WINDOW, BLOCK_D, BLOCK_N, STAGES, True,
            )  # fmt: skip
            first = tl.cdiv(bare, BLOCK_N) * BLOCK_N
        bare = tl.maximum((first_position + 1) // BLOCK_N * BLOCK_N, first)
        blocks = block_numbers(table_row, first, stop, KV_BLOCK, BLOCK_N)
        running_max, running_sum, acc = _attend(
            q, position, running_max, running_sum, acc, k_head_ptr, v_head_ptr, table_row, block_rows, blocks,
            first, bare, step, start, stop, exponent_scale,
            D, KV_BLOCK, WINDOW, BLOCK_D, BLOCK_N, STAGES, False,
        )  # fmt: skip
        first = bare
        blocks = block_numbers(table_row, first, stop, KV_BLOCK, BLOCK_N)
    running_max, running_sum, acc = _attend(
        q, position, running_max, running_sum, acc, k_head_ptr, v_head_ptr, table_row, block_rows, blocks,
        first, stop, step, start, stop, exponent_scale,
        D, KV_BLOCK, WINDOW, BLOCK_D, BLOCK_N, STAGES, True,
    )  # fmt: skip

    if SHARED:
        entry = (token * (num_kv_heads * GROUP) + head) * tl.num_programs(1) + tl.program_id(1)
        tl.store(partial_ptr + entry[:, None] * D + d[None, :], acc, mask=mask)
        tl.store(stats_ptr + 2 * entry, running_max, mask=row < num_rows)
        tl.store(stats_ptr + 2 * entry + 1, running_sum, mask=row < num_rows)
    else:
        result = acc / tl.where(running_sum > 0.0, running_sum, 1.0)[:, None]
        pointers = out_ptr + token[:, None] * out_stride + head[:, None] * out_head_stride + d[None, :]
        tl.store(pointers, result.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["table_stride", "table_reach", "num_tokens", "num_seqs"])
@no_type_check
def prefill_kernel(
    # pointers
    q_ptr, k_cache_ptr, v_cache_ptr, table_ptr, seq_lens_ptr, offsets_ptr, out_ptr, partial_ptr, stats_ptr,
    # strides in elements, of caches in rows of D elements
    q_stride, q_head_stride, block_rows, head_rows, table_stride, out_stride, out_head_stride,
    # scalars
    table_reach, num_tokens, num_seqs, num_kv_heads, scale,
    # shapes and switches
    D: tl.constexpr, GROUP: tl.constexpr, KV_BLOCK: tl.constexpr, WINDOW: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, SHARED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program takes BLOCK_M rows of one KV head of one sequence, a row being one query head of one token.

    Of a sequence, tiles with more keys come first. All rows see most of the keys, which need no mask: it is for those
    at the end and, with a window, at the start.

    With SHARED, for few queries, a sequence's place in the grid is known, as in a decode; its tiles of keys are shared
    out to as many programs as the second dimension has, for the merge; and a program takes further tiles of rows if
    there are more than the grid was made for. Where the first tile of keys lies does not depend on the length, so its
    block numbers are asked for with the length.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    tile, kv_head = tl.program_id(0) // num_kv_heads, tl.program_id(0) % num_kv_heads
    k_head_ptr = k_cache_ptr + tl.cast(kv_head * head_rows, tl.int64) * D
    v_head_ptr = v_cache_ptr + tl.cast(kv_head * head_rows, tl.int64) * D
    if SHARED:
        seq = tl.program_id(2)
        table_row = table_ptr + seq.to(tl.int64) * table_stride
        blocks = block_numbers(table_row, tl.program_id(1) * BLOCK_N, table_reach, KV_BLOCK, BLOCK_N)
        first_token = tl.load(offsets_ptr + seq)
        num_queries = tl.load(offsets_ptr + seq + 1) - first_token
        seq_len = tl.load(seq_lens_ptr + seq)
        for nth in range(tile, tl.cdiv(num_queries * GROUP, BLOCK_M), tl.num_programs(0) // num_kv_heads):
            _attend_rows(
                q_ptr, k_head_ptr, v_head_ptr, table_row, blocks, out_ptr, partial_ptr, stats_ptr,
                q_stride, q_head_stride, block_rows, out_stride, out_head_stride,
                first_token, num_queries, seq_len, nth, kv_head, num_kv_heads, scale,
                D, GROUP, KV_BLOCK, WINDOW, BLOCK_M, BLOCK_D, BLOCK_N, STAGES, SHARED,
            )  # fmt: skip
    else:
        seq, nth = _place(offsets_ptr, num_tokens, num_seqs, tile, GROUP, BLOCK_M)
        if seq <= num_seqs:
            table_row = table_ptr + seq.to(tl.int64) * table_stride
            first_token = tl.load(offsets_ptr + seq)
            num_queries = tl.load(offsets_ptr + seq + 1, mask=seq < num_seqs, other=num_tokens) - first_token
            seq_len = tl.load(seq_lens_ptr + seq, mask=seq < num_seqs, other=0)
            _attend_rows(
                q_ptr, k_head_ptr, v_head_ptr, table_row, None, out_ptr, partial_ptr, stats_ptr,
                q_stride, q_head_stride, block_rows, out_stride, out_head_stride,
                first_token, num_queries, seq_len, nth, kv_head, num_kv_heads, scale,
                D, GROUP, KV_BLOCK, WINDOW, BLOCK_M, BLOCK_D, BLOCK_N, STAGES, SHARED,
            )  # fmt: skip


@triton.jit(do_not_specialize=["splits", "num_seqs"])
@no_type_check
def prefill_merge_kernel(
    partial_ptr, stats_ptr, offsets_ptr, out_ptr, out_stride, out_head_stride, num_seqs, splits,
    D: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program merges the shares of one head of one token; padding has none."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    head = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64)
    num_tokens = tl.load(offsets_ptr + num_seqs)
    entry = (token * tl.num_programs(0) + head) * splits
    result = merged_shares(partial_ptr, stats_ptr, entry, splits, D, BLOCK_D, CHUNK)
    result = tl.where(token < num_tokens, result, 0.0)
    d = tl.arange(0, BLOCK_D)
    pointers = out_ptr + token * out_stride + head * out_head_stride + d
    tl.store(pointers, result.to(out_ptr.dtype.element_ty), mask=d < D)
