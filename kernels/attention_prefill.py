"""Paged attention with any number of query tokens a sequence, over whatever context is cached already."""

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _triton
from ._attention_plan import PrefillPlan, prefill_plan
from ._launch import Prepared, launch
from ._prefill_kernel import prefill_kernel, prefill_merge_kernel
from .attention_decode import HEAD_DIMS, gather_blocks


def attention_prefill_ref(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    scale: float,
    *,
    window: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of packed queries over paged keys; returns `[num_tokens, num_heads, head_dim]`.

    Sequence `s` owns the queries `cu_seqlens_q[s] .. cu_seqlens_q[s + 1] - 1`, which are its newest tokens: query `i`
    of `n` stands at position `p = seq_lens[s] - n + i` and sees keys `max(0, p - window + 1) .. p`. The keys of the
    queries themselves must be in the cache already. Keys that no query sees may hold anything. Tokens past the last
    offset are padding and give zeros, as do those before position 0 (in a row that is not live).

    Args:
        q: `[num_tokens, num_heads, head_dim]`.
        k_cache, v_cache: `[num_blocks, num_kv_heads, block_size, head_dim]`.
        block_tables: `[num_seqs, max_blocks_per_seq]` int32.
        seq_lens: `[num_seqs]` int32, cached keys and new ones together.
        cu_seqlens_q: `[num_seqs + 1]` int32, starting at 0.
        window: keys visible at most, the query's own included; None for all.
        out: like `q`, written and returned when given.
    """
    result = torch.empty_like(q) if out is None else out
    if seq_lens.shape[0] == 1:  # the numbers stay on the device, so that a graph can hold it
        return result.copy_(_one_sequence(q, k_cache, v_cache, block_tables, seq_lens, cu_seqlens_q[1:], scale, window))
    offsets, lengths = cu_seqlens_q.tolist(), seq_lens.tolist()
    for seq, (start, stop, length) in enumerate(zip(offsets[:-1], offsets[1:], lengths, strict=True)):
        if start == stop:
            continue
        table = block_tables[seq : seq + 1, : max(1, -(-length // k_cache.shape[2]))]
        result[start:stop] = _one_sequence(q[start:stop], k_cache, v_cache, table, length, stop - start, scale, window)
    result[offsets[-1] :] = 0.0
    return result


def _one_sequence(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    length: Tensor | int,
    num_queries: Tensor | int,
    scale: float,
    window: int | None,
) -> Tensor:
    """The attention of a sequence whose queries come first in `q`; what is behind them is padding."""
    _, num_kv_heads, block_size, head_dim = k_cache.shape
    group = q.shape[1] // num_kv_heads
    key = torch.arange(table.shape[1] * block_size, device=q.device)
    query = torch.arange(q.shape[0], device=q.device)[:, None]
    position = query + (length - num_queries)
    visible = (key <= position) & (query < num_queries)
    if window is not None:
        visible &= key > position - window
    hidden = ~visible.any(0, keepdim=True)
    k, v = gather_blocks(k_cache, table, hidden), gather_blocks(v_cache, table, hidden)
    queries = q.view(-1, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    # Heads of one KV head share it by broadcasting: [num_kv_heads, group, n, head_dim] against [.., 1, length, ..].
    answer = F.scaled_dot_product_attention(
        queries,
        k.transpose(0, 1).expand(-1, group, -1, -1),
        v.transpose(0, 1).expand(-1, group, -1, -1),
        attn_mask=visible,
        scale=scale,
    ).masked_fill_(~visible.any(1)[:, None], 0.0)
    return answer.permute(2, 0, 1, 3).reshape(q.shape)


def attention_prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    scale: float,
    *,
    window: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of packed queries over paged keys; see `attention_prefill_ref`.

    The grid and the memory depend on shapes alone, so that a graph can hold it: offsets and lengths are read on the
    device.
    """
    if not _triton.on_triton(q) or q.shape[-1] not in HEAD_DIMS:
        return attention_prefill_ref(
            q, k_cache, v_cache, block_tables, seq_lens, cu_seqlens_q, scale, window=window, out=out
        )
    (num_tokens, num_heads, head_dim), (_, num_kv_heads, block_size, _) = q.shape, k_cache.shape
    num_seqs, columns = block_tables.shape
    out = torch.empty_like(q) if out is None else out
    if num_tokens == 0:
        return out
    reach = columns * block_size
    plan = prefill_plan(
        num_tokens, num_seqs, num_kv_heads, num_heads // num_kv_heads, head_dim, k_cache.element_size(),
        min(reach, window or reach), _triton.num_multiprocessors(q.device), _triton.shared_memory(q.device),
    )  # fmt: skip
    partial = stats = None
    if plan.splits > 1:
        partial = torch.empty(num_tokens * num_heads * plan.splits * head_dim, dtype=torch.float32, device=q.device)
        stats = torch.empty(num_tokens * num_heads * plan.splits * 2, dtype=torch.float32, device=q.device)
    inputs = (q, k_cache, v_cache, block_tables, seq_lens, cu_seqlens_q, out)
    tensors = (*inputs, partial, stats)
    launch(prefill_kernel, tensors, (plan, scale, window), lambda: _prepare(*inputs, plan, scale, window))
    if partial is not None and stats is not None:
        shares = (partial, stats, cu_seqlens_q, out)
        launch(prefill_merge_kernel, shares, plan.splits, lambda: _prepare_merge(out, num_seqs, plan.splits))
    return out


def _prepare(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor,
    out: Tensor, plan: PrefillPlan, scale: float, window: int | None,
) -> Prepared:  # fmt: skip
    (num_tokens, num_heads, head_dim), (num_blocks, num_kv_heads, block_size, _) = q.shape, k_cache.shape
    num_seqs, group = block_tables.shape[0], num_heads // num_kv_heads
    assert num_heads % num_kv_heads == 0, f"{num_heads} query heads cannot share {num_kv_heads} KV heads"
    assert head_dim == k_cache.shape[3], f"heads of q have {head_dim} elements, those of the cache {k_cache.shape[3]}"
    assert out.shape == q.shape, "out must have the shape of q"
    assert q.stride(2) == out.stride(2) == 1, "the elements of a head of q and out must be contiguous"
    assert v_cache.shape == k_cache.shape, "k_cache and v_cache must have one shape"
    assert v_cache.stride() == k_cache.stride(), "k_cache and v_cache must have the same strides"
    assert k_cache.dtype == v_cache.dtype, "k_cache and v_cache must have one dtype"
    assert seq_lens.shape == (num_seqs,), "every sequence needs a block table and a length"
    assert cu_seqlens_q.shape == (num_seqs + 1,), "there is one query offset more than there are sequences"
    for name, numbers in (("block tables", block_tables), ("seq_lens", seq_lens), ("query offsets", cu_seqlens_q)):
        assert numbers.dtype == torch.int32, f"{name} must be int32"
        assert numbers.stride(-1) == 1 or numbers.shape[-1] == 1, f"{name} must be contiguous"
    assert window is None or window > 0, f"a window holds at least the query's own key, not {window}"
    assert scale > 0, f"the scale of scores must be positive, not {scale}"
    block_stride, head_stride, *inner = k_cache.stride()
    assert inner == [head_dim, 1], "the tokens of one head of a block must be contiguous"
    assert block_stride % head_dim == head_stride % head_dim == 0, "strides of the caches must be whole rows"
    assert num_blocks * block_stride < 2**31 * head_dim, "the caches are too large to count their rows in 32 bits"
    # Shares are for few queries, which most often are as many in every sequence; else there is room for all cases.
    alike = _triton.cdiv(_triton.cdiv(num_tokens, num_seqs) * group, plan.block_m) * num_kv_heads
    most = (num_tokens * group // plan.block_m + num_seqs + 1) * num_kv_heads
    grid = (alike, plan.splits, num_seqs) if plan.splits > 1 else (most,)
    cache_strides = (block_stride // head_dim, head_stride // head_dim)
    strides = (*q.stride()[:2], *cache_strides, block_tables.stride(0), *out.stride()[:2])
    constants = {
        "D": head_dim, "BLOCK_D": _triton.next_power_of_2(head_dim), "GROUP": group, "KV_BLOCK": block_size,
        "WINDOW": window or 0, "BLOCK_M": plan.block_m, "BLOCK_N": plan.block_n, "STAGES": plan.num_stages,
        "SHARED": plan.splits > 1,
    }  # fmt: skip
    arguments = (*strides, block_tables.shape[1] * block_size, num_tokens, num_seqs, num_kv_heads, scale)
    return grid, arguments, constants, plan.num_warps


def _prepare_merge(out: Tensor, num_seqs: int, splits: int) -> Prepared:
    num_tokens, num_heads, head_dim = out.shape
    constants = {"D": head_dim, "BLOCK_D": _triton.next_power_of_2(head_dim), "CHUNK": min(splits, 16)}
    return (num_heads, num_tokens), (*out.stride()[:2], num_seqs, splits), constants, 1
