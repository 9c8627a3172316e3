"""Paged attention with one query token a sequence, alone or with the rotation and the KV write in front of it."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _triton
from ._attention_kernel import attention_kernel, attention_merge_kernel
from ._attention_plan import attention_plan
from .rotary_kv_write import check_rotary, rotary_kv_write_ref

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
) -> Tensor:
    """Both launchers' common end. `q` is `[num_seqs, num_heads, head_dim]`, or rows of qkv if `rotary` is given."""
    num_seqs, (num_blocks, num_kv_heads, block_size, head_dim) = q.shape[0], k_cache.shape
    if out is None:
        out = torch.empty((num_seqs, num_heads, head_dim), dtype=q.dtype, device=q.device)
    assert num_heads % num_kv_heads == 0, f"{num_heads} query heads cannot share {num_kv_heads} KV heads"
    assert head_dim in HEAD_DIMS, f"head_dim must be 16 to 256, not {head_dim}"
    assert out.shape == (num_seqs, num_heads, head_dim), "out must be [num_seqs, num_heads, head_dim]"
    assert out.stride(2) == 1, "the elements of a head of out must be contiguous"
    assert v_cache.shape == k_cache.shape, "k_cache and v_cache must have one shape"
    assert k_cache.dtype == v_cache.dtype, "k_cache and v_cache must have one dtype"
    assert block_tables.shape[0] == seq_lens.shape[0] == num_seqs, "every sequence needs a block table and a length"
    assert block_tables.dtype == seq_lens.dtype == torch.int32, "block tables and lengths are int32"
    assert block_tables.stride(1) == 1, "a block table must be contiguous"
    assert seq_lens.is_contiguous(), "seq_lens must be contiguous"
    assert window is None or window > 0, f"a window holds at least the query's own key, not {window}"
    rows: dict[str, int] = {}
    for name, cache in (("k", k_cache), ("v", v_cache)):
        block_stride, head_stride, *inner = cache.stride()
        assert inner == [head_dim, 1], f"the tokens of one head of a block of {name}_cache must be contiguous"
        assert block_stride % head_dim == head_stride % head_dim == 0, f"strides of {name}_cache must be whole rows"
        assert num_blocks * block_stride < 2**31 * head_dim, f"{name}_cache is too large to count its rows in 32 bits"
        rows |= {f"{name}_block_rows": block_stride // head_dim, f"{name}_head_rows": head_stride // head_dim}
    if num_seqs == 0:
        return out
    group, reach = num_heads // num_kv_heads, block_tables.shape[1] * block_size
    plan = attention_plan(
        num_seqs, num_kv_heads, head_dim, k_cache.element_size(), min(reach, window or reach),
        _triton.num_multiprocessors(q.device), _triton.shared_memory(q.device),
    )  # fmt: skip
    assert plan.num_stages > 1 or k_cache.element_size() == 2, "registers hold words of two elements"
    partial = stats = None
    if plan.splits > 1:
        partial = torch.empty(num_seqs * num_heads * plan.splits * head_dim, dtype=torch.float32, device=q.device)
        stats = torch.empty(num_seqs * num_heads * plan.splits * 2, dtype=torch.float32, device=q.device)
    pdl = _triton.has_pdl(q.device)
    common = {
        "D": head_dim, "WINDOW": window or 0, "BLOCK_D": _triton.next_power_of_2(head_dim), "BLOCK_N": plan.block_n,
        "SPLITS": plan.splits, "FUSED": bool(rotary), "PDL": pdl, "launch_pdl": pdl,
    }  # fmt: skip
    unfused = {"cos_ptr": None, "sin_ptr": None, "slot_ptr": None, "q_norm_ptr": None, "k_norm_ptr": None,
               "norm_eps": 0.0, "ROTARY_DIM": 0, "HAS_NORM": False}  # fmt: skip
    attention_kernel[(plan.splits, num_kv_heads, num_seqs)](
        q, k_cache, v_cache, block_tables, seq_lens, out, partial, stats,
        q_stride=q.stride(0), q_head_stride=0 if rotary else q.stride(1), table_stride=block_tables.stride(0),
        out_stride=out.stride(0), out_head_stride=out.stride(1), table_reach=reach, scale=scale,
        GROUP=group, KV_BLOCK=block_size, BLOCK_G=max(16, _triton.next_power_of_2(group)), STAGES=plan.num_stages,
        num_warps=plan.num_warps, **(rows | unfused | rotary | common),
    )  # fmt: skip
    if plan.splits > 1:
        attention_merge_kernel[(num_heads, num_seqs)](
            partial, stats, seq_lens, out, out.stride(0), out.stride(1), CHUNK=min(plan.splits, 16), num_warps=1,
            **common,
        )  # fmt: skip
    return out
