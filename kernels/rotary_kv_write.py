"""Between the qkv projection and attention: q/k norm, rotary embedding, and the write of K and V to the paged cache."""

from typing import no_type_check

import torch
from torch import Tensor

from . import _triton
from ._launch import Prepared, launch
from ._triton import tl, triton
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
    pairs: Tensor = wide[..., : 2 * half].unflatten(-1, (2, half))
    rotated = pairs * cos[:, None, None]
    rotated[..., 0, :].addcmul_(pairs[..., 1, :], sin[:, None], value=-1)
    rotated[..., 1, :].addcmul_(pairs[..., 0, :], sin[:, None])
    rotated = rotated.flatten(-2)
    if 2 * half < x.shape[-1]:
        rotated = torch.cat((rotated, wide[..., 2 * half :]), dim=-1)
    return rotated.to(x.dtype)


@triton.jit
@no_type_check
def rotated_heads(
    heads_ptr, rows, num_rows, cos_ptr, sin_ptr, norm_weight_ptr, norm_eps, token,
    D: tl.constexpr, ROTARY_DIM: tl.constexpr, BLOCK_D: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Heads `rows` (those below `num_rows`) of one token, normed and rotated: [rows, BLOCK_D], rounded to their dtype.

    Each element is read a second time at the place of its partner, so that a pair never has to change threads.
    """
    HALF: tl.constexpr = ROTARY_DIM // 2
    d = tl.arange(0, BLOCK_D)
    partner = tl.where(d < HALF, d + HALF, tl.where(d < ROTARY_DIM, d - HALF, d))
    pair = tl.where(d < HALF, d, d - HALF)
    mask = (rows < num_rows)[:, None] & (d < D)[None, :]
    dtype = heads_ptr.dtype.element_ty
    x = tl.load(heads_ptr + rows[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
    y = tl.load(heads_ptr + rows[:, None] * D + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / D + norm_eps)[:, None]
        weight = tl.load(norm_weight_ptr + d, mask=d < D, other=0.0).to(tl.float32)
        weight_of_partner = tl.load(norm_weight_ptr + partner, mask=d < D, other=0.0).to(tl.float32)
        x = ((x * scale).to(dtype).to(tl.float32) * weight[None, :]).to(dtype).to(tl.float32)
        y = ((y * scale).to(dtype).to(tl.float32) * weight_of_partner[None, :]).to(dtype).to(tl.float32)
    turns = d < ROTARY_DIM
    cos = tl.load(cos_ptr + token * HALF + pair, mask=turns, other=1.0)
    sin = tl.load(sin_ptr + token * HALF + pair, mask=turns, other=0.0)
    sin = tl.where(d < HALF, -sin, sin)
    return (x * cos[None, :] + y * sin[None, :]).to(dtype)


@triton.jit
@no_type_check
def _rotary_kv_write_kernel(
    qkv_ptr, cos_ptr, sin_ptr, slot_ptr, k_cache_ptr, v_cache_ptr, q_norm_ptr, k_norm_ptr, out_ptr,
    num_heads, num_kv_heads,
    qkv_stride, k_block_stride, k_head_stride, v_block_stride, v_head_stride, out_stride, out_head_stride,
    norm_eps,
    D: tl.constexpr, ROTARY_DIM: tl.constexpr, BLOCK_D: tl.constexpr, KV_BLOCK: tl.constexpr, ROWS: tl.constexpr,
    HAS_NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program does ROWS heads of one token: queries, keys or values, in this order, fewer at each end."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    q_parts, kv_parts = tl.cdiv(num_heads, ROWS), tl.cdiv(num_kv_heads, ROWS)
    row, d = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    token_ptr = qkv_ptr + token * qkv_stride
    if part < q_parts:
        head = part * ROWS + row
        q = rotated_heads(token_ptr, head, num_heads, cos_ptr, sin_ptr, q_norm_ptr, norm_eps, token,
                          D, ROTARY_DIM, BLOCK_D, HAS_NORM)  # fmt: skip
        pointers = out_ptr + token * out_stride + head[:, None] * out_head_stride + d[None, :]
        tl.store(pointers, q.to(out_ptr.dtype.element_ty), mask=(head < num_heads)[:, None] & (d < D)[None, :])
    else:
        slot = tl.load(slot_ptr + token)
        block, offset = slot // KV_BLOCK, slot % KV_BLOCK
        keys_ptr = token_ptr + num_heads * D
        head = (part - q_parts) % kv_parts * ROWS + row
        mask = (head < num_kv_heads)[:, None] & (d < D)[None, :]
        if part - q_parts < kv_parts:
            k = rotated_heads(keys_ptr, head, num_kv_heads, cos_ptr, sin_ptr, k_norm_ptr, norm_eps, token,
                              D, ROTARY_DIM, BLOCK_D, HAS_NORM)  # fmt: skip
            pointers = k_cache_ptr + block * k_block_stride + head[:, None] * k_head_stride + offset * D + d[None, :]
            tl.store(pointers, k.to(k_cache_ptr.dtype.element_ty), mask=mask)
        else:
            v = tl.load(keys_ptr + (num_kv_heads + head)[:, None] * D + d[None, :], mask=mask, other=0.0)
            pointers = v_cache_ptr + block * v_block_stride + head[:, None] * v_head_stride + offset * D + d[None, :]
            tl.store(pointers, v.to(v_cache_ptr.dtype.element_ty), mask=mask)


def heads_of_a_program(num_tokens: int, num_heads: int, num_kv_heads: int) -> int:
    """One where tokens are few; with many, programs would take longer to be launched than to run."""
    if num_tokens * num_heads < 4096:
        return 1
    return 1 << (min(8, num_kv_heads) - 1).bit_length()


def rotary_kv_write(
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
    """Rotated queries; K and V go to their KV slots. See `rotary_kv_write_ref` for the arguments."""
    if not _triton.on_triton(qkv):
        return rotary_kv_write_ref(qkv, cos, sin, slot_mapping, k_cache, v_cache, q_norm_weight=q_norm_weight,
                                   k_norm_weight=k_norm_weight, norm_eps=norm_eps, out=out)  # fmt: skip
    num_tokens, (_, num_kv_heads, _, head_dim) = qkv.shape[0], k_cache.shape
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    if out is None:
        out = qkv.new_empty((num_tokens, num_heads, head_dim))
    if num_tokens == 0:
        return out
    rows = heads_of_a_program(num_tokens, num_heads, num_kv_heads)
    tensors = (qkv, cos, sin, slot_mapping, k_cache, v_cache, q_norm_weight, k_norm_weight, out)
    launch(_rotary_kv_write_kernel, tensors, (rows, norm_eps), lambda: _prepare(*tensors, rows, norm_eps))
    return out


def _prepare(
    qkv: Tensor, cos: Tensor, sin: Tensor, slot_mapping: Tensor, k_cache: Tensor, v_cache: Tensor,
    q_norm_weight: Tensor | None, k_norm_weight: Tensor | None, out: Tensor, rows: int, norm_eps: float,
) -> Prepared:  # fmt: skip
    check_rotary(qkv, cos, sin, slot_mapping, k_cache, v_cache, q_norm_weight, k_norm_weight)
    num_tokens, (_, num_kv_heads, block_size, head_dim) = qkv.shape[0], k_cache.shape
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    assert out.shape == (num_tokens, num_heads, head_dim), "out must be [num_tokens, num_heads, head_dim]"
    assert out.stride(2) == 1, "the elements of a head of out must be contiguous"
    grid = num_tokens, _triton.cdiv(num_heads, rows) + 2 * _triton.cdiv(num_kv_heads, rows)
    strides = (qkv.stride(0), *k_cache.stride()[:2], *v_cache.stride()[:2], *out.stride()[:2])
    constants = {
        "D": head_dim, "ROTARY_DIM": 2 * cos.shape[1], "BLOCK_D": _triton.next_power_of_2(head_dim),
        "KV_BLOCK": block_size, "ROWS": rows, "HAS_NORM": q_norm_weight is not None,
    }  # fmt: skip
    return grid, (num_heads, num_kv_heads, *strides, norm_eps), constants, 1 if rows == 1 else 2


def check_rotary(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_norm_weight: Tensor | None,
    k_norm_weight: Tensor | None,
) -> None:
    """What every kernel that rotates and writes the cache assumes of its inputs."""
    num_tokens, (_, num_kv_heads, _, head_dim) = qkv.shape[0], k_cache.shape
    assert qkv.shape[1] % head_dim == 0, f"a row of qkv must hold whole heads of {head_dim} elements"
    assert qkv.shape[1] > 2 * num_kv_heads * head_dim, "qkv must hold a query head beside the K and V heads"
    assert qkv.stride(1) == 1, "the columns of qkv must be contiguous"
    assert cos.shape == sin.shape == (num_tokens, cos.shape[1]), "cos and sin must be [num_tokens, rotary_dim / 2]"
    assert 2 * cos.shape[1] <= head_dim, f"at most {head_dim} elements of a head can be rotated"
    assert cos.is_contiguous(), "cos must be contiguous"
    assert sin.is_contiguous(), "sin must be contiguous"
    assert cos.dtype == sin.dtype == torch.float32, "cos and sin must be float32"
    assert slot_mapping.shape == (num_tokens,), "slot_mapping needs one KV slot a token"
    assert slot_mapping.dtype == torch.int64, "KV slots are int64"
    assert slot_mapping.is_contiguous(), "slot_mapping must be contiguous"
    assert v_cache.shape == k_cache.shape, "k_cache and v_cache must have one shape"
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        assert cache.stride()[2:] == (head_dim, 1), f"the tokens of one head of a block of {name} must be contiguous"
    assert (q_norm_weight is None) == (k_norm_weight is None), "queries and keys are both normed or neither is"
    for weight in (q_norm_weight, k_norm_weight):
        assert weight is None or weight.is_contiguous(), "a norm weight must be contiguous"
