"""The linear projection for many tokens: tiles of tokens by features."""

from typing import Any, no_type_check

import torch
from torch import Tensor

from . import _triton
from ._launch import Prepared, launch
from ._linear_call import LinearCall
from ._linear_plan import LinearPlan
from ._linear_tensor import _epilogue, merge_shares
from ._triton import tl, triton


@triton.jit
@no_type_check
def _tokens_tile(x, token, num_tokens, stride, k, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                 TMA: tl.constexpr):  # fmt: skip
    """[ROWS, COLUMNS] from `token` and column `k` on, zero beyond the last."""
    if TMA:
        tile = x.load([token, k])
    else:
        rows = token + tl.arange(0, ROWS)
        cols = k + tl.arange(0, COLUMNS)
        mask = (rows < num_tokens)[:, None]
        if K % COLUMNS != 0:
            mask = mask & (cols < K)[None, :]
        tile = tl.load(x + rows.to(tl.int64)[:, None] * stride + cols[None, :], mask=mask, other=0.0)
    return tile


@triton.jit
@no_type_check
def _weights_tile(weight, row, num_features, stride, k, K: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
                  COLUMNS: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """[PARTS * ROWS, COLUMNS]: ROWS features from `row` on of every part."""
    if TMA:
        tile = weight.load([row, k]) if PARTS == 1 else weight.load([0, row, k]).reshape(PARTS * ROWS, COLUMNS)
    else:
        index = tl.arange(0, PARTS * ROWS)
        features = row + index % ROWS
        cols = k + tl.arange(0, COLUMNS)
        mask = (features < num_features)[:, None]
        if K % COLUMNS != 0:
            mask = mask & (cols < K)[None, :]
        rows = (features + index // ROWS * num_features).to(tl.int64)
        pointers = weight + rows[:, None] * stride + cols[None, :]
        tile = tl.load(pointers, mask=mask, other=0.0, eviction_policy="evict_first")
    return tile


@triton.jit
@no_type_check
def _ask(weight_ptr, row, num_features, stride, k, PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Have the L2 fetch what `_weights_tile` would load, line by line."""
    LINE: tl.constexpr = 128 // (weight_ptr.dtype.element_ty.primitive_bitwidth // 8)
    index = tl.arange(0, PARTS * ROWS)
    rows = (tl.minimum(row + index % ROWS, num_features - 1) + index // ROWS * num_features).to(tl.int64)
    lines = k + tl.arange(0, (COLUMNS + LINE - 1) // LINE) * LINE
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [weight_ptr + rows[:, None] * stride + lines[None, :]],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
@no_type_check
def _finish_tile(
    sums, row, token, split, num_features, num_tokens, bias_ptr, residual_ptr, out_ptr, partial_ptr,
    residual_stride, out_stride, SPLIT_K: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    SWIGLU: tl.constexpr,
):  # fmt: skip
    """The results of a tile [tokens, parts of features], or its share of them."""
    PARTS: tl.constexpr = 2 if SWIGLU else 1
    BLOCK_M: tl.constexpr = sums.shape[0]
    BLOCK_N: tl.constexpr = sums.shape[1] // PARTS
    tokens = token + tl.arange(0, BLOCK_M)
    if SPLIT_K == 1:
        rows = (row + tl.arange(0, BLOCK_N)).to(tl.int64)
        if SWIGLU:
            sums, up = sums.reshape(BLOCK_M, PARTS, BLOCK_N).permute(0, 2, 1).split()
            up = tl.trans(up)
        else:
            up = 0.0
        residual = 0.0
        if HAS_RESIDUAL:
            mask = (tokens < num_tokens)[:, None] & (rows < num_features)[None, :]
            pointers = residual_ptr + tokens.to(tl.int64)[:, None] * residual_stride + rows[None, :]
            residual = tl.trans(tl.load(pointers, mask=mask, other=0.0))
        _epilogue(
            tl.trans(sums), up, 0.0, residual, rows, tokens, num_features, num_tokens, bias_ptr, out_ptr,
            out_stride, HAS_BIAS, False, HAS_RESIDUAL, SWIGLU,
        )  # fmt: skip
    else:
        # [SPLIT_K, tokens, PARTS, features]
        index = tl.arange(0, PARTS * BLOCK_N)
        features = row + index % BLOCK_N
        mask = (tokens < num_tokens)[:, None] & (features < num_features)[None, :]
        line = (tl.cast(split, tl.int64) * num_tokens + tokens) * PARTS * num_features
        tl.store(partial_ptr + line[:, None] + (features + index // BLOCK_N * num_features)[None, :], sums, mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
@no_type_check
def _linear_tile_kernel(
    # pointers
    weight_ptr, bias_ptr, residual_ptr, out_ptr, partial_ptr,
    # the operands: descriptors with TMA, else pointers
    x, weight,
    # sizes
    num_tokens, num_features,
    # strides between rows, in elements
    x_stride, weight_stride, residual_stride, out_stride,
    # shapes and switches
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
    STAGES: tl.constexpr, EARLY: tl.constexpr, TMA: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    SWIGLU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program owns tiles of BLOCK_M tokens by BLOCK_N features, over K or over one of SPLIT_K shares of it.

    Programs that share features are neighbours, so the weights come from memory once and from the L2 after that. Before
    the wait on the previous kernel the L2 is asked for the first EARLY chunks of weights. Shares of K leave float32
    sums that `_linear_merge_kernel` adds in index order.
    """
    SHARE: tl.constexpr = (K + SPLIT_K * BLOCK_K - 1) // (SPLIT_K * BLOCK_K)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    split = tl.program_id(1)
    k_start = split * SHARE * BLOCK_K
    chunks = tl.minimum(SHARE, tl.cdiv(K - k_start, BLOCK_K))
    token_tiles = tl.cdiv(num_tokens, BLOCK_M)
    token = tl.program_id(0) % token_tiles * BLOCK_M
    row = tl.program_id(0) // token_tiles * BLOCK_N
    PARTS: tl.constexpr = 2 if SWIGLU else 1
    if PDL:
        for early in tl.static_range(EARLY):
            _ask(weight_ptr, row, num_features, weight_stride, k_start + early * BLOCK_K, PARTS, BLOCK_N, BLOCK_K)
        tl.extra.cuda.gdc_wait()
    sums = tl.zeros((BLOCK_M, PARTS * BLOCK_N), tl.float32)
    for step in tl.range(0, chunks, num_stages=STAGES):
        k = k_start + step * BLOCK_K
        tokens = _tokens_tile(x, token, num_tokens, x_stride, k, K, BLOCK_M, BLOCK_K, TMA)
        weights = _weights_tile(weight, row, num_features, weight_stride, k, K, PARTS, BLOCK_N, BLOCK_K, TMA)
        sums = tl.dot(tokens, weights.T, sums, input_precision="ieee")
    _finish_tile(
        sums, row, token, split, num_features, num_tokens, bias_ptr, residual_ptr, out_ptr, partial_ptr,
        residual_stride, out_stride, SPLIT_K, HAS_BIAS, HAS_RESIDUAL, SWIGLU,
    )  # fmt: skip


def launch_tile(
    x: Tensor, weight: Tensor, bias: Tensor | None, swiglu: bool, residual: Tensor | None, out: Tensor, plan: LinearPlan
) -> None:
    partial, split, num_features = None, plan.split_k, weight.shape[0] // (2 if swiglu else 1)
    if split > 1:
        partial = x.new_empty(split, x.shape[0], weight.shape[0], dtype=torch.float32)
    tma = _triton.has_tma(x.device) and all(map(_describable, (x, weight)))
    operands = _descriptors(x, weight, num_features, plan) if tma else (x, weight)

    def prepare() -> Prepared:
        call = LinearCall(x, weight, bias, swiglu=swiglu, residual=residual, out=out)
        chunks = _triton.cdiv(call.in_features, plan.block_k)
        fewest = chunks - (split - 1) * _triton.cdiv(chunks, split)
        assert fewest > 0, f"{split} shares of {call.in_features} features leave one empty"
        programs = _triton.cdiv(num_features, plan.block_n) * _triton.cdiv(call.num_tokens, plan.block_m)
        constants = {
            "K": call.in_features, "BLOCK_M": plan.block_m, "BLOCK_N": plan.block_n, "BLOCK_K": plan.block_k,
            "SPLIT_K": split, "STAGES": plan.num_stages, "EARLY": min(plan.early, fewest), "TMA": tma,
            "HAS_BIAS": bias is not None, "HAS_RESIDUAL": residual is not None, "SWIGLU": swiglu,
        }  # fmt: skip
        return (programs, split), (call.num_tokens, num_features, *call.strides), constants, plan.num_warps

    launch(_linear_tile_kernel, (weight, bias, residual, out, partial, *operands), (plan, swiglu), prepare)
    if partial is not None:
        merge_shares(partial, None, bias, residual, out, 0.0, x.shape[1], swiglu)


def _describable(rows: Tensor) -> bool:
    """Whether rows start where the tensor memory accelerator can find them."""
    return rows.data_ptr() % 16 == 0 and rows.stride(0) * rows.element_size() % 16 == 0


def _descriptors(x: Tensor, weight: Tensor, num_features: int, plan: LinearPlan) -> tuple[Any, Any]:
    """Of both operands; the weight has a dimension of its own for gate and up if there are such."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    (rows, columns), stride = weight.shape, weight.stride(0)
    shape, strides, block = [rows, columns], [stride, 1], [plan.block_n, plan.block_k]
    if rows != num_features:
        shape, strides, block = [2, num_features, columns], [num_features * stride, stride, 1], [2, *block]
    tokens = TensorDescriptor(x, x.shape, x.stride(), [plan.block_m, plan.block_k])
    return tokens, TensorDescriptor(weight, shape, strides, block)
