"""Paged attention with one query token a sequence, alone or with the rotation and the KV write in front of it."""

from typing import Any, no_type_check

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _triton
from ._attention_plan import AttentionPlan, attention_plan
from ._attention_split import attention_merge_kernel, shares
from ._attention_vector import attention_vector_kernel
from ._triton import tl, triton
from .rotary_kv_write import check_rotary, rotary_kv_write_ref, rotated_heads

HEAD_DIMS = range(16, 257)
"""Head sizes that the kernels are built for; others, which no known model has, go to the references."""


def attention_decode_ref(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    scale: float,
    *,
    window: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`softmax(scale · q Kᵀ) V` over the keys of each sequence's blocks; returns `[num_seqs, num_heads, head_dim]`.

    The query is the newest token: it sees keys `max(0, seq_len - window) .. seq_len - 1`. A sequence of length 0 gives
    zeros. Nothing outside the visible keys reaches the result, whatever the cache holds there.

    Args:
        q: `[num_seqs, num_heads, head_dim]`; query head `h` reads KV head `h // (num_heads / num_kv_heads)`.
        k_cache, v_cache: `[num_blocks, num_kv_heads, block_size, head_dim]`.
        block_tables: `[num_seqs, max_blocks_per_seq]` int32; entries past a sequence's blocks must name some block.
        seq_lens: `[num_seqs]` int32, at most `max_blocks_per_seq * block_size`.
        window: keys visible at most, the query's own included; None for all.
        out: like `q`, written and returned when given.
    """
    num_seqs, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[1]
    index = torch.arange(block_tables.shape[1] * k_cache.shape[2], device=q.device)
    hidden = index >= seq_lens[:, None]
    if window is not None:
        hidden |= index < seq_lens[:, None] - window
    k, v = gather_blocks(k_cache, block_tables, hidden), gather_blocks(v_cache, block_tables, hidden)
    bias = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, -torch.inf)
    # The query heads of one KV head are rows of one small matrix: no head is repeated.
    grouped = q.view(num_seqs, num_kv_heads, num_heads // num_kv_heads, head_dim)
    result = F.scaled_dot_product_attention(grouped, k, v, attn_mask=bias[:, None, None], scale=scale)
    result = result.reshape(q.shape).masked_fill_((seq_lens == 0)[:, None, None], 0.0)
    return result if out is None else out.copy_(result)


def gather_blocks(cache: Tensor, block_tables: Tensor, hidden: Tensor) -> Tensor:
    """The cached keys (or values) of each sequence, `[num_seqs, num_kv_heads, num_keys, head_dim]`; zero where hidden.

    Args:
        cache: `[num_blocks, num_kv_heads, block_size, head_dim]`.
        block_tables: `[num_seqs, num_table_columns]`.
        hidden: `[num_seqs, num_keys]` bool, `num_keys = num_table_columns * block_size`.
    """
    num_seqs, num_columns = block_tables.shape
    _, num_kv_heads, block_size, head_dim = cache.shape
    blocks = cache.index_select(0, block_tables.reshape(-1)).view(num_seqs, num_columns, *cache.shape[1:])
    keys = blocks.transpose(1, 2).reshape(num_seqs, num_kv_heads, num_columns * block_size, head_dim)
    return keys.masked_fill_(hidden[:, None, :, None], 0.0)


def rotary_attention_decode_ref(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    scale: float,
    *,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
    window: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`rotary_kv_write`, then `attention_decode` with the rotated queries: `[num_seqs, num_heads, head_dim]`.

    See `rotary_kv_write_ref` and `attention_decode_ref` for the arguments. Each row of `qkv` is the newest token of
    its sequence, so `slot_mapping` names the place of key `seq_len - 1`.
    """
    q = rotary_kv_write_ref(qkv, cos, sin, slot_mapping, k_cache, v_cache, q_norm_weight=q_norm_weight,
                            k_norm_weight=k_norm_weight, norm_eps=norm_eps)  # fmt: skip
    return attention_decode_ref(q, k_cache, v_cache, block_tables, seq_lens, scale, window=window, out=out)


@triton.jit
@no_type_check
def _attention_decode_kernel(
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
    """A program takes one KV head of one sequence, over all keys or one share of them: flash attention with the
    queries of the KV head (padded to BLOCK_G) as the rows of one matrix.

    The grid is fixed by the bucket, the split is not: each program works out from the sequence's length how many
    shares there are, and those too many leave. A lone share writes the result, several leave float32 sums.
    With FUSED every program rotates its queries and the new key, which costs nothing; the program of the last share
    writes the key and the value to the cache and starts its softmax from them, so that nothing which is written is
    read back within the launch.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    split = tl.program_id(0)
    kv_head = tl.program_id(1)
    num_kv_heads = tl.num_programs(1)
    seq = tl.program_id(2).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + seq)

    # All that does not depend on the length is asked for before the length is looked at.
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + g
    heads_inside = (g < GROUP)[:, None] & (d < D)[None, :]
    if FUSED:
        token_ptr = q_ptr + seq * q_stride
        keys_ptr = token_ptr + (num_kv_heads * GROUP + kv_head) * D
        slot = tl.load(slot_ptr + seq)
        new_v = tl.load(keys_ptr + num_kv_heads * D + d, mask=d < D, other=0.0).to(v_cache_ptr.dtype.element_ty)
        q = rotated_heads(token_ptr + kv_head * GROUP * D, g, cos_ptr, sin_ptr, q_norm_ptr, norm_eps, seq,
                          D, ROTARY_DIM, BLOCK_D, GROUP, HAS_NORM)  # fmt: skip
        new_k = rotated_heads(keys_ptr, tl.arange(0, 1), cos_ptr, sin_ptr, k_norm_ptr, norm_eps, seq,
                              D, ROTARY_DIM, BLOCK_D, 1, HAS_NORM).to(k_cache_ptr.dtype.element_ty)  # fmt: skip
    else:
        q_pointers = q_ptr + seq * q_stride + head[:, None] * q_head_stride + d[None, :]
        q = tl.load(q_pointers, mask=heads_inside, other=0.0)

    start, stop, share, num_splits = shares(seq_len, WINDOW, FUSED, BLOCK_N, MIN_TILES, MAX_SPLITS)
    if split >= num_splits:
        return

    running_max = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    running_sum = tl.zeros((BLOCK_G,), tl.float32)
    acc = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
    exponent_scale = scale * 1.4426950408889634  # softmax in powers of two
    if FUSED:
        newest = split == num_splits - 1
        new_block, new_offset = slot // KV_BLOCK, slot % KV_BLOCK
        new_k_ptr = k_cache_ptr + new_block * k_block_stride + kv_head * k_head_stride + new_offset * D + d
        new_v_ptr = v_cache_ptr + new_block * v_block_stride + kv_head * v_head_stride + new_offset * D + d
        tl.store(new_k_ptr[None, :], new_k, mask=(newest & (d < D))[None, :])
        tl.store(new_v_ptr, new_v, mask=newest & (d < D))
        score = tl.sum(q.to(tl.float32) * new_k.to(tl.float32), 1) * exponent_scale
        running_max = tl.where(newest, score, running_max)
        running_sum = tl.where(newest, 1.0, running_sum)
        acc = tl.where(newest, acc + new_v.to(tl.float32)[None, :], acc)

    k_head_ptr = k_cache_ptr + kv_head * tl.cast(k_head_stride, tl.int64)
    v_head_ptr = v_cache_ptr + kv_head * tl.cast(v_head_stride, tl.int64)
    first = start + split * share * BLOCK_N
    last = tl.minimum(first + share * BLOCK_N, stop)
    for key in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        n = key + tl.arange(0, BLOCK_N)
        inside = n < last
        block = tl.load(table_ptr + seq * table_stride + n // KV_BLOCK, mask=inside, other=0).to(tl.int64)
        offset = (n % KV_BLOCK) * D
        k_pointers = k_head_ptr + (block * k_block_stride + offset)[None, :] + d[:, None]
        v_pointers = v_head_ptr + (block * v_block_stride + offset)[:, None] + d[None, :]
        if D == BLOCK_D:
            k = tl.load(k_pointers, mask=inside[None, :], other=0.0)
            v = tl.load(v_pointers, mask=inside[:, None], other=0.0)
        else:
            k = tl.load(k_pointers, mask=inside[None, :] & (d < D)[:, None], other=0.0)
            v = tl.load(v_pointers, mask=inside[:, None] & (d < D)[None, :], other=0.0)
        scores = tl.dot(q.to(k.dtype), k, input_precision="ieee") * exponent_scale
        scores = tl.where(inside[None, :], scores, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(scores, 1))
        weights = tl.exp2(scores - new_max[:, None])
        shrink = tl.exp2(running_max - new_max)
        running_sum = running_sum * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
        running_max = new_max

    alone = MAX_SPLITS == 1 or num_splits == 1
    result = tl.where(seq_len > 0, acc / tl.where(running_sum > 0.0, running_sum, 1.0)[:, None], 0.0)
    pointers = out_ptr + seq * out_stride + head[:, None] * out_head_stride + d[None, :]
    tl.store(pointers, result.to(out_ptr.dtype.element_ty), mask=heads_inside & alone)
    if MAX_SPLITS > 1:
        shared = (g < GROUP) & (num_splits > 1)
        entry = (seq * num_kv_heads * GROUP + head) * MAX_SPLITS + split
        tl.store(partial_ptr + entry[:, None] * D + d[None, :], acc, mask=shared[:, None] & (d < D)[None, :])
        tl.store(stats_ptr + 2 * entry, running_max, mask=shared)
        tl.store(stats_ptr + 2 * entry + 1, running_sum, mask=shared)


def attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    scale: float,
    *,
    window: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`softmax(scale · q Kᵀ) V` over paged keys; see `attention_decode_ref`."""
    if not _triton.on_triton(q) or q.shape[-1] not in HEAD_DIMS:
        return attention_decode_ref(q, k_cache, v_cache, block_tables, seq_lens, scale, window=window, out=out)
    assert q.stride(2) == 1, "the elements of a head of q must be contiguous"
    assert q.shape[2] == k_cache.shape[3], (
        f"heads of q have {q.shape[2]} elements, those of the cache {k_cache.shape[3]}"
    )
    return _launch(q, q.shape[1], k_cache, v_cache, block_tables, seq_lens, scale, window, out, {})


def rotary_attention_decode(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    scale: float,
    *,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
    window: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Rotation, KV write and attention in one kernel; see `rotary_attention_decode_ref`."""
    if not _triton.on_triton(qkv) or k_cache.shape[-1] not in HEAD_DIMS:
        return rotary_attention_decode_ref(
            qkv, cos, sin, slot_mapping, k_cache, v_cache, block_tables, seq_lens, scale, q_norm_weight=q_norm_weight,
            k_norm_weight=k_norm_weight, norm_eps=norm_eps, window=window, out=out,
        )  # fmt: skip
    check_rotary(qkv, cos, sin, slot_mapping, k_cache, v_cache, q_norm_weight, k_norm_weight)
    num_heads = qkv.shape[1] // k_cache.shape[3] - 2 * k_cache.shape[1]
    rotary = {
        "cos_ptr": cos, "sin_ptr": sin, "slot_ptr": slot_mapping, "q_norm_ptr": q_norm_weight,
        "k_norm_ptr": k_norm_weight, "norm_eps": norm_eps, "ROTARY_DIM": 2 * cos.shape[1],
        "HAS_NORM": q_norm_weight is not None,
    }  # fmt: skip
    return _launch(qkv, num_heads, k_cache, v_cache, block_tables, seq_lens, scale, window, out, rotary)


def _launch(
    q: Tensor,
    num_heads: int,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int | None,
    out: Tensor | None,
    rotary: dict[str, Any],
    plan: AttentionPlan | None = None,
) -> Tensor:
    """Both launchers' common end. `q` is `[num_seqs, num_heads, head_dim]`, or rows of qkv if `rotary` is given."""
    num_seqs = q.shape[0]
    _, num_kv_heads, block_size, head_dim = k_cache.shape
    if out is None:
        out = torch.empty((num_seqs, num_heads, head_dim), dtype=q.dtype, device=q.device)
    assert num_heads % num_kv_heads == 0, f"{num_heads} query heads cannot share {num_kv_heads} KV heads"
    assert head_dim in HEAD_DIMS, f"head_dim must be 16 to 256, not {head_dim}"
    assert out.shape == (num_seqs, num_heads, head_dim), "out must be [num_seqs, num_heads, head_dim]"
    assert out.stride(2) == 1, "the elements of a head of out must be contiguous"
    assert v_cache.shape == k_cache.shape, "k_cache and v_cache must have one shape"
    assert k_cache.dtype == v_cache.dtype, "k_cache and v_cache must have one dtype"
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        assert cache.stride()[2:] == (head_dim, 1), f"the tokens of one head of a block of {name} must be contiguous"
    assert block_tables.shape[0] == seq_lens.shape[0] == num_seqs, "every sequence needs a block table and a length"
    assert block_tables.dtype == seq_lens.dtype == torch.int32, "block tables and lengths are int32"
    assert block_tables.stride(1) == 1, "a block table must be contiguous"
    assert seq_lens.is_contiguous(), "seq_lens must be contiguous"
    assert window is None or window > 0, f"a window holds at least the query's own key, not {window}"
    if num_seqs == 0:
        return out
    if plan is None:
        max_keys = min(block_tables.shape[1] * block_size, window or 2**31)
        plan = attention_plan(
            num_seqs, num_kv_heads, num_heads // num_kv_heads, head_dim, k_cache.element_size(), max_keys,
            _triton.num_multiprocessors(q.device), _triton.shared_memory(q.device),
        )  # fmt: skip
    partial = stats = None
    if plan.max_splits > 1:
        partial = torch.empty(num_seqs * num_heads * plan.max_splits * head_dim, dtype=torch.float32, device=q.device)
        stats = torch.empty(num_seqs * num_heads * plan.max_splits * 2, dtype=torch.float32, device=q.device)
    pdl = _triton.has_pdl(q.device)
    fused = bool(rotary)
    common = {
        "D": head_dim, "WINDOW": window or 0, "BLOCK_D": triton.next_power_of_2(head_dim), "BLOCK_N": plan.block_n,
        "MAX_SPLITS": plan.max_splits, "MIN_TILES": plan.min_tiles, "FUSED": fused, "PDL": pdl, "launch_pdl": pdl,
    }  # fmt: skip
    unfused = {"cos_ptr": None, "sin_ptr": None, "slot_ptr": None, "q_norm_ptr": None, "k_norm_ptr": None,
               "norm_eps": 0.0, "ROTARY_DIM": 0, "HAS_NORM": False}  # fmt: skip
    group = num_heads // num_kv_heads
    kernel = _attention_decode_kernel if plan.dot else attention_vector_kernel
    kernel[(plan.max_splits, num_kv_heads, num_seqs)](
        q, k_cache, v_cache, block_tables, seq_lens, out, partial, stats,
        q_stride=q.stride(0), q_head_stride=0 if fused else q.stride(1),
        k_block_stride=k_cache.stride(0), k_head_stride=k_cache.stride(1),
        v_block_stride=v_cache.stride(0), v_head_stride=v_cache.stride(1), table_stride=block_tables.stride(0),
        out_stride=out.stride(0), out_head_stride=out.stride(1), scale=scale,
        GROUP=group, KV_BLOCK=block_size, BLOCK_G=max(16, triton.next_power_of_2(group)) if plan.dot else 1,
        STAGES=plan.num_stages, num_warps=plan.num_warps, **(unfused | rotary | common),
    )  # fmt: skip
    if plan.max_splits > 1:
        attention_merge_kernel[(num_heads, num_seqs)](
            partial, stats, seq_lens, out, out.stride(0), out.stride(1), num_warps=4, **common
        )
    return out
