"""Between the qkv projection and attention: q/k norm, rotary embedding, and the write of K and V to the paged cache."""

import torch
from torch import Tensor

from .rms_norm import rms_norm_ref, wide_dtype


def rotary_kv_write_ref(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """Returns the rotated queries `[num_tokens, num_heads, head_dim]`; K (rotated) and V go to their KV slots.

    Pair `i` of a head is its elements `i` and `i + rotary_dim / 2` (the half-split form of RoPE, arXiv 2104.09864);
    elements past `rotary_dim` pass through. The rotation is done in float32.

    Args:
        qkv: `[num_tokens, (num_heads + 2 num_kv_heads) head_dim]`, columns q | k | v.
        cos, sin: `[num_tokens, rotary_dim / 2]` float32.
        slot_mapping: `[num_tokens]` int64.
        k_cache, v_cache: `[num_blocks, num_kv_heads, block_size, head_dim]`, written in place.
        q_norm_weight, k_norm_weight: `[head_dim]`, both or neither; per-head `rms_norm` with `norm_eps` before the
            rotation.
        out: the queries' buffer, written and returned when given.
    """
    _, num_kv_heads, block_size, head_dim = k_cache.shape
    heads = qkv.view(qkv.shape[0], qkv.shape[1] // head_dim, head_dim)
    num_heads = heads.shape[1] - 2 * num_kv_heads
    assert num_heads > 0, "qkv must hold at least one query head beside the K and V heads of the cache"
    assert (q_norm_weight is None) == (k_norm_weight is None), "queries and keys are normed both or neither"
    qk, v = heads[:, : num_heads + num_kv_heads], heads[:, num_heads + num_kv_heads :]
    if q_norm_weight is not None and k_norm_weight is not None:
        q = rms_norm_ref(qk[:, :num_heads], q_norm_weight, norm_eps)
        k = rms_norm_ref(qk[:, num_heads:], k_norm_weight, norm_eps)
        qk = torch.cat((q, k), dim=1)
    rotated = _rotate(qk, cos, sin)
    block, offset = slot_mapping // block_size, slot_mapping % block_size
    k_cache[block, :, offset] = rotated[:, num_heads:].to(k_cache.dtype)
    v_cache[block, :, offset] = v.to(v_cache.dtype)
    q = rotated[:, :num_heads]
    return q.contiguous() if out is None else out.copy_(q)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    wide = x.to(wide_dtype(x.dtype))
    pairs = wide[..., : 2 * half].unflatten(-1, (2, half))
    rotated: Tensor = pairs * cos[:, None, None]
    rotated[..., 0, :].addcmul_(pairs[..., 1, :], sin[:, None], value=-1)
    rotated[..., 1, :].addcmul_(pairs[..., 0, :], sin[:, None])
    rotated = rotated.flatten(-2)
    if 2 * half < x.shape[-1]:
        rotated = torch.cat((rotated, wide[..., 2 * half :]), dim=-1)
    return rotated.to(x.dtype)


rotary_kv_write = rotary_kv_write_ref
