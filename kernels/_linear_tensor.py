"""The linear projection for some tens of tokens: tensor cores, still at the speed of reading the weights."""

from typing import no_type_check

import torch
from torch import Tensor

from . import _triton
from ._linear_plan import LinearPlan
from ._triton import tl, triton


@triton.jit
@no_type_check
def _weight_tile(ptr, rows, num_rows, stride, k, k_end, K: tl.constexpr, BLOCK_K: tl.constexpr):
    cols = k + tl.arange(0, BLOCK_K)
    mask = (rows < num_rows)[:, None]
    if K % BLOCK_K != 0:
        mask = mask & (cols < k_end)[None, :]
    return tl.load(ptr + rows[:, None] * stride + cols[None, :], mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
@no_type_check
def _epilogue(
    y, up, scale, rows, tokens, num_features, num_tokens, bias_ptr, residual_ptr, residual_stride, out_ptr, out_stride,
    HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr, HAS_RESIDUAL: tl.constexpr, SWIGLU: tl.constexpr,
):  # fmt: skip
    """Finish sums of shape [features, tokens] and store them. `scale` is 1 / rms of each token."""
    mask = (rows < num_features)[:, None] & (tokens < num_tokens)[None, :]
    if HAS_NORM:
        y = y * scale[None, :]
    if HAS_BIAS:
        y += tl.load(bias_ptr + rows, mask=rows < num_features, other=0.0).to(tl.float32)[:, None]
    if SWIGLU:
        if HAS_NORM:
            up = up * scale[None, :]
        if HAS_BIAS:
            up += tl.load(bias_ptr + num_features + rows, mask=rows < num_features, other=0.0).to(tl.float32)[:, None]
        y = y * tl.sigmoid(y) * up
    if HAS_RESIDUAL:
        pointers = residual_ptr + tokens.to(tl.int64)[None, :] * residual_stride + rows[:, None]
        y += tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    tl.store(
        out_ptr + tokens.to(tl.int64)[None, :] * out_stride + rows[:, None], y.to(out_ptr.dtype.element_ty), mask=mask
    )


@triton.jit(do_not_specialize=["num_tokens"])
@no_type_check
def _linear_tensor_kernel(
    # pointers
    x_ptr, weight_ptr, bias_ptr, norm_weight_ptr, residual_ptr, out_ptr, partial_ptr, squares_ptr,
    # sizes
    num_tokens, num_features,
    # strides between rows, in elements
    x_stride, weight_stride, residual_stride, out_stride,
    # scalars
    norm_eps,
    # shapes and switches
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
    STAGES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    SWIGLU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program owns BLOCK_N features of all tokens, over K or over one of SPLIT_K shares of it.

    The weights are the left operand (features are the rows of the matrix instruction, tokens its few columns), so the
    instruction's width is not wasted on absent tokens. The first weight tile is asked for before the wait on the
    previous kernel. The norm is folded: the operand is x * norm_weight rounded to its dtype, squares are summed on the
    way, and the sum is scaled by 1 / rms at the end. Shares of K leave float32 sums that `_linear_merge_kernel` adds
    in index order.
    """
    SHARE: tl.constexpr = (K + SPLIT_K * BLOCK_K - 1) // (SPLIT_K * BLOCK_K) * BLOCK_K
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    split = tl.program_id(1)
    rows = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    tokens = tl.arange(0, BLOCK_M)
    k_start = split * SHARE
    k_end = tl.minimum(k_start + SHARE, K)
    up_ptr = weight_ptr + tl.cast(num_features, tl.int64) * weight_stride
    first = _weight_tile(weight_ptr, rows, num_features, weight_stride, k_start, k_end, K, BLOCK_K)
    if SWIGLU:
        first_up = _weight_tile(up_ptr, rows, num_features, weight_stride, k_start, k_end, K, BLOCK_K)
    if PDL:
        tl.extra.cuda.gdc_wait()

    sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    sums_up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    squares = tl.zeros((BLOCK_K, BLOCK_M), tl.float32)
    x_rows = x_ptr + tl.minimum(tokens, num_tokens - 1).to(tl.int64)[None, :] * x_stride
    x, squares = _tokens_tile(x_rows, norm_weight_ptr, squares, k_start, k_end, K, BLOCK_K, HAS_NORM)
    sums = tl.dot(first, x, sums, input_precision="ieee")
    if SWIGLU:
        sums_up = tl.dot(first_up, x, sums_up, input_precision="ieee")
    for k in tl.range(k_start + BLOCK_K, k_end, BLOCK_K, num_stages=STAGES):
        weights = _weight_tile(weight_ptr, rows, num_features, weight_stride, k, k_end, K, BLOCK_K)
        x, squares = _tokens_tile(x_rows, norm_weight_ptr, squares, k, k_end, K, BLOCK_K, HAS_NORM)
        sums = tl.dot(weights, x, sums, input_precision="ieee")
        if SWIGLU:
            weights_up = _weight_tile(up_ptr, rows, num_features, weight_stride, k, k_end, K, BLOCK_K)
            sums_up = tl.dot(weights_up, x, sums_up, input_precision="ieee")

    total = tl.sum(squares, 0)
    if SPLIT_K == 1:
        scale = tl.rsqrt(total / K + norm_eps) if HAS_NORM else total
        _epilogue(
            sums, sums_up, scale, rows, tokens, num_features, num_tokens, bias_ptr, residual_ptr, residual_stride,
            out_ptr, out_stride, HAS_BIAS, HAS_NORM, HAS_RESIDUAL, SWIGLU,
        )  # fmt: skip
    else:
        PARTS: tl.constexpr = 2 if SWIGLU else 1
        mask = (rows < num_features)[:, None] & (tokens < num_tokens)[None, :]
        # [SPLIT_K, tokens, PARTS, features]
        base = partial_ptr + tl.cast(split, tl.int64) * num_tokens * PARTS * num_features
        pointers = base + tokens.to(tl.int64)[None, :] * PARTS * num_features + rows[:, None]
        tl.store(pointers, sums, mask=mask)
        if SWIGLU:
            tl.store(pointers + num_features, sums_up, mask=mask)
        if HAS_NORM and tl.program_id(0) == 0:
            tl.store(squares_ptr + split * num_tokens + tokens, total, mask=tokens < num_tokens)


@triton.jit
@no_type_check
def _tokens_tile(x_rows, norm_weight_ptr, squares, k, k_end, K: tl.constexpr, BLOCK_K: tl.constexpr,
                 HAS_NORM: tl.constexpr):  # fmt: skip
    """[BLOCK_K, tokens] of the right operand, and the running squares."""
    cols = k + tl.arange(0, BLOCK_K)
    if K % BLOCK_K != 0:
        x = tl.load(x_rows + cols[:, None], mask=(cols < k_end)[:, None], other=0.0)
    else:
        x = tl.load(x_rows + cols[:, None])
    if HAS_NORM:
        wide = x.to(tl.float32)
        squares += wide * wide
        norm_weight = tl.load(norm_weight_ptr + cols, mask=cols < k_end, other=0.0).to(tl.float32)
        x = (wide * norm_weight[:, None]).to(x.dtype)
    return x, squares


@triton.jit(do_not_specialize=["num_tokens"])
@no_type_check
def _linear_merge_kernel(
    partial_ptr, squares_ptr, bias_ptr, residual_ptr, out_ptr,
    num_tokens, num_features, residual_stride, out_stride, norm_eps,
    K: tl.constexpr, SPLIT_K: tl.constexpr, BLOCK_N: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, SWIGLU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program adds the SPLIT_K sums of BLOCK_N features of one token, in index order, and finishes them."""
    PARTS: tl.constexpr = 2 if SWIGLU else 1
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(1)
    rows = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    mask = rows < num_features
    y = tl.zeros((BLOCK_N,), tl.float32)
    up = tl.zeros((BLOCK_N,), tl.float32)
    square = 0.0
    for split in tl.static_range(SPLIT_K):
        base = partial_ptr + (tl.cast(split, tl.int64) * num_tokens + token) * PARTS * num_features
        y += tl.load(base + rows, mask=mask, other=0.0)
        if SWIGLU:
            up += tl.load(base + num_features + rows, mask=mask, other=0.0)
        if HAS_NORM:
            square += tl.load(squares_ptr + split * num_tokens + token)
    scale = tl.rsqrt(square / K + norm_eps) + tl.zeros((1,), tl.float32)
    _epilogue(
        y[:, None], up[:, None], scale, rows, token + tl.arange(0, 1), num_features, num_tokens, bias_ptr, residual_ptr,
        residual_stride, out_ptr, out_stride, HAS_BIAS, HAS_NORM, HAS_RESIDUAL, SWIGLU,
    )  # fmt: skip


def launch_tensor(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_eps: float,
    swiglu: bool,
    residual: Tensor | None,
    out: Tensor,
    plan: LinearPlan,
) -> None:
    """Launch over checked arguments; see `linear` for their meaning."""
    num_tokens, in_features = x.shape
    num_features = out.shape[1]
    block_m = max(16, triton.next_power_of_2(num_tokens))
    assert block_m <= 128, f"the tensor-core kernel takes up to 128 tokens, not {num_tokens}"
    split = plan.split_k
    share = triton.cdiv(in_features, split * plan.block_k) * plan.block_k
    assert (split - 1) * share < in_features, f"{split} shares of {in_features} features leave one empty"
    partial = squares = None
    if split > 1:
        partial = x.new_empty(split, num_tokens, weight.shape[0], dtype=torch.float32)
        squares = x.new_empty(split, num_tokens, dtype=torch.float32) if norm_weight is not None else None
    residual_stride = residual.stride(0) if residual is not None else 0
    pdl = _triton.has_pdl(x.device)
    switches = {
        "K": in_features, "SPLIT_K": split, "HAS_BIAS": bias is not None, "HAS_NORM": norm_weight is not None,
        "HAS_RESIDUAL": residual is not None, "SWIGLU": swiglu, "PDL": pdl, "launch_pdl": pdl,
    }  # fmt: skip
    _linear_tensor_kernel[(triton.cdiv(num_features, plan.block_n), split)](
        x, weight, bias, norm_weight, residual, out, partial, squares,
        num_tokens, num_features, x.stride(0), weight.stride(0), residual_stride, out.stride(0), norm_eps,
        BLOCK_M=block_m, BLOCK_N=plan.block_n, BLOCK_K=plan.block_k, STAGES=plan.num_stages,
        num_warps=plan.num_warps, **switches,
    )  # fmt: skip
    if split > 1:
        block = 256
        _linear_merge_kernel[(triton.cdiv(num_features, block), num_tokens)](
            partial, squares, bias, residual, out, num_tokens, num_features, residual_stride, out.stride(0), norm_eps,
            BLOCK_N=block, num_warps=2, **switches,
        )  # fmt: skip
