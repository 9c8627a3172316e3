"""Decode attention without tensor cores, for few sequences: keys and values go straight to registers."""

# ruff: noqa: RUF005 -- Triton adds tuples and cannot unpack them.

from typing import no_type_check

from ._attention_split import shares
from ._triton import tl, triton
from .rotary_kv_write import rotated_heads


@triton.jit
@no_type_check
def attention_vector_kernel(
    # pointers
    q_ptr, k_cache_ptr, v_cache_ptr, table_ptr, seq_lens_ptr, out_ptr, partial_ptr, stats_ptr,
    cos_ptr, sin_ptr, slot_ptr, q_norm_ptr, k_norm_ptr,
    # strides, in elements
    q_stride, q_head_stride, k_block_stride, k_head_stride, v_block_stride, v_head_stride, table_stride,
    out_stride, out_head_stride,
    # scalars
    scale, norm_eps,
    # shapes and switches
    D: tl.constexpr, GROUP: tl.constexpr, KV_BLOCK: tl.constexpr, ROTARY_DIM: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    MAX_SPLITS: tl.constexpr, MIN_TILES: tl.constexpr, FUSED: tl.constexpr, HAS_NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The same as `_attention_decode_kernel`, one query head after another over a tile of keys held in registers.

    At batch 1 the time is latency, not bandwidth: no copy to shared memory, no padding to a matrix instruction, and
    with one warp no barrier. BLOCK_G and STAGES are not used.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    split = tl.program_id(0)
    kv_head = tl.program_id(1)
    num_kv_heads = tl.num_programs(1)
    seq = tl.program_id(2).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + seq)
    d = tl.arange(0, BLOCK_D)
    token_ptr = q_ptr + seq * q_stride
    q = ()
    for i in tl.static_range(GROUP):
        if FUSED:
            head = rotated_heads(token_ptr + (kv_head * GROUP + i) * D, tl.arange(0, 1), cos_ptr, sin_ptr, q_norm_ptr,
                                 norm_eps, seq, D, ROTARY_DIM, BLOCK_D, 1, HAS_NORM)  # fmt: skip
            q = q + (tl.reshape(head, (BLOCK_D,)).to(tl.float32),)
        else:
            head = tl.load(token_ptr + (kv_head * GROUP + i) * q_head_stride + d, mask=d < D, other=0.0)
            q = q + (head.to(tl.float32),)
    if FUSED:
        keys_ptr = token_ptr + (num_kv_heads * GROUP + kv_head) * D
        slot = tl.load(slot_ptr + seq)
        new_v = tl.load(keys_ptr + num_kv_heads * D + d, mask=d < D, other=0.0).to(v_cache_ptr.dtype.element_ty)
        new_k = rotated_heads(keys_ptr, tl.arange(0, 1), cos_ptr, sin_ptr, k_norm_ptr, norm_eps, seq,
                              D, ROTARY_DIM, BLOCK_D, 1, HAS_NORM)  # fmt: skip
        new_k = tl.reshape(new_k, (BLOCK_D,)).to(k_cache_ptr.dtype.element_ty)

    start, stop, share, num_splits = shares(seq_len, WINDOW, FUSED, BLOCK_N, MIN_TILES, MAX_SPLITS)
    if split >= num_splits:
        return

    exponent_scale = scale * 1.4426950408889634  # softmax in powers of two
    maxima = ()
    sums = ()
    accs = ()
    if FUSED:
        newest = split == num_splits - 1
        new_block, new_offset = slot // KV_BLOCK, slot % KV_BLOCK
        new_k_ptr = k_cache_ptr + new_block * k_block_stride + kv_head * k_head_stride + new_offset * D + d
        new_v_ptr = v_cache_ptr + new_block * v_block_stride + kv_head * v_head_stride + new_offset * D + d
        tl.store(new_k_ptr, new_k, mask=newest & (d < D))
        tl.store(new_v_ptr, new_v, mask=newest & (d < D))
        for i in tl.static_range(GROUP):
            score = tl.sum(q[i] * new_k.to(tl.float32), 0) * exponent_scale
            maxima = maxima + (tl.where(newest, score, float("-inf")),)
            sums = sums + (tl.where(newest, 1.0, 0.0),)
            accs = accs + (tl.where(newest, new_v.to(tl.float32), 0.0),)
    else:
        for _ in tl.static_range(GROUP):
            maxima = maxima + (seq_len * 0.0 + float("-inf"),)
            sums = sums + (seq_len * 0.0,)
            accs = accs + (tl.zeros((BLOCK_D,), tl.float32),)

    k_head_ptr = k_cache_ptr + kv_head * tl.cast(k_head_stride, tl.int64)
    v_head_ptr = v_cache_ptr + kv_head * tl.cast(v_head_stride, tl.int64)
    first = start + split * share * BLOCK_N
    last = tl.minimum(first + share * BLOCK_N, stop)
    for key in range(first, last, BLOCK_N):
        n = key + tl.arange(0, BLOCK_N)
        inside = n < last
        block = tl.load(table_ptr + seq * table_stride + n // KV_BLOCK, mask=inside, other=0).to(tl.int64)
        offset = (n % KV_BLOCK) * D
        mask = inside[:, None] & (d < D)[None, :]
        k = tl.load(k_head_ptr + (block * k_block_stride + offset)[:, None] + d[None, :], mask=mask, other=0.0)
        v = tl.load(v_head_ptr + (block * v_block_stride + offset)[:, None] + d[None, :], mask=mask, other=0.0)
        new_maxima = ()
        new_sums = ()
        new_accs = ()
        for i in tl.static_range(GROUP):
            scores = tl.sum(k.to(tl.float32) * q[i][None, :], 1) * exponent_scale
            scores = tl.where(inside, scores, float("-inf"))
            largest = tl.maximum(maxima[i], tl.max(scores, 0))
            weights = tl.exp2(scores - largest)
            shrink = tl.exp2(maxima[i] - largest)
            new_maxima = new_maxima + (largest,)
            new_sums = new_sums + (sums[i] * shrink + tl.sum(weights, 0),)
            new_accs = new_accs + (accs[i] * shrink + tl.sum(v.to(tl.float32) * weights[:, None], 0),)
        maxima = new_maxima
        sums = new_sums
        accs = new_accs

    for i in tl.static_range(GROUP):
        head = kv_head * GROUP + i
        if MAX_SPLITS > 1:
            entry = (seq * num_kv_heads * GROUP + head) * MAX_SPLITS + split
            tl.store(partial_ptr + entry * D + d, accs[i], mask=(d < D) & (num_splits > 1))
            tl.store(stats_ptr + 2 * entry, maxima[i], mask=num_splits > 1)
            tl.store(stats_ptr + 2 * entry + 1, sums[i], mask=num_splits > 1)
        result = tl.where(seq_len > 0, accs[i] / tl.where(sums[i] > 0.0, sums[i], 1.0), 0.0)
        pointers = out_ptr + seq * out_stride + head * out_head_stride + d
        tl.store(pointers, result.to(out_ptr.dtype.element_ty), mask=(d < D) & (num_splits == 1))
