"""Paged attention with any number of query tokens a sequence, over whatever context is cached already."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention_decode import gather_blocks


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
    offset are padding and give zeros.

    Args:
        q: `[num_tokens, num_heads, head_dim]`.
        k_cache, v_cache: `[num_blocks, num_kv_heads, block_size, head_dim]`.
        block_tables: `[num_seqs, max_blocks_per_seq]` int32.
        seq_lens: `[num_seqs]` int32, cached keys and new ones together.
        cu_seqlens_q: `[num_seqs + 1]` int32, starting at 0.
        window: keys visible at most, the query's own included; None for all.
        out: like `q`, written and returned when given.
    """
    _, num_kv_heads, block_size, head_dim = k_cache.shape
    group = q.shape[1] // num_kv_heads
    result = torch.empty_like(q) if out is None else out
    offsets, lengths = cu_seqlens_q.tolist(), seq_lens.tolist()
    for seq, (start, stop, length) in enumerate(zip(offsets[:-1], offsets[1:], lengths, strict=True)):
        if start == stop:
            continue
        table = block_tables[seq : seq + 1, : -(-length // block_size)]
        key = torch.arange(table.shape[1] * block_size, device=q.device)
        position = torch.arange(length - (stop - start), length, device=q.device)[:, None]
        visible = key <= position
        if window is not None:
            visible &= key > position - window
        hidden = ~visible.any(0, keepdim=True)
        k, v = gather_blocks(k_cache, table, hidden), gather_blocks(v_cache, table, hidden)
        queries = q[start:stop].view(-1, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
        # Heads of one KV head share it by broadcasting: [num_kv_heads, group, n, head_dim] against [.., 1, length, ..].
        answer = F.scaled_dot_product_attention(
            queries,
            k.transpose(0, 1).expand(-1, group, -1, -1),
            v.transpose(0, 1).expand(-1, group, -1, -1),
            attn_mask=visible,
            scale=scale,
        )
        result[start:stop] = answer.permute(2, 0, 1, 3).reshape(stop - start, -1, head_dim)
    result[offsets[-1] :] = 0.0
    return result


attention_prefill = attention_prefill_ref
