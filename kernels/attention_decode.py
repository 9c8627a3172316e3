"""Paged attention with one query token a sequence."""

import torch
import torch.nn.functional as F
from torch import Tensor


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


attention_decode = attention_decode_ref
