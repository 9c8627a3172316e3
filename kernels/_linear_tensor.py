# ruff: noqa: RUF005 -- Triton adds tuples and cannot unpack them.
"""The linear projection for some tens of tokens: tensor cores, still at the speed of reading the weights."""

from typing import no_type_check

import torch
from torch import Tensor

from . import _triton
from ._launch import Prepared, launch
from ._linear_call import LinearCall
from ._linear_plan import LinearPlan
from ._triton import tl, triton

# Every tile has one of two forms, [rows, BLOCK_K] if SLICES is 1 and [SLICES, rows, BLOCK_K] if it is more: with the
# first, all warps multiply the same columns (on Hopper by their common instruction), with the second a warp or two has
# a slice of them to itself.


@triton.jit
@no_type_check
def _columns(k, SLICES: tl.constexpr, BLOCK_K: tl.constexpr):
    """[BLOCK_K], or [SLICES, BLOCK_K]."""
    cols = k + tl.arange(0, BLOCK_K)
    if SLICES > 1:
        cols = cols[None, :] + (tl.arange(0, SLICES) * BLOCK_K)[:, None]
    return cols


@triton.jit
@no_type_check
def _weight_tile(ptr, rows, num_rows, stride, k, K: tl.constexpr, SLICES: tl.constexpr, BLOCK_K: tl.constexpr):
    cols = _columns(k, SLICES, BLOCK_K)
    mask = (rows < num_rows)[:, None]
    pointers = ptr + rows[:, None] * stride
    if SLICES > 1:
        mask = mask[None, :, :]
        pointers = pointers[None, :, :]
        cols = cols[:, None, :]
    else:
        cols = cols[None, :]
    if K % (SLICES * BLOCK_K) != 0:
        mask = mask & (cols < K)
    return tl.load(pointers + cols, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
@no_type_check
def _tokens_tile(
    ptr, num_tokens, stride, k, K: tl.constexpr, BLOCK_M: tl.constexpr, SLICES: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """Of x with its columns as rows, [.., BLOCK_K, BLOCK_M], zero where there is no token."""
    tokens = tl.arange(0, BLOCK_M)
    cols = _columns(k, SLICES, BLOCK_K)
    mask = (tokens < num_tokens)[None, :]
    pointers = ptr + tokens.to(tl.int64)[None, :] * stride
    if SLICES > 1:
        mask = mask[None, :, :]
        pointers = pointers[None, :, :]
        cols = cols[:, :, None]
    else:
        cols = cols[:, None]
    if K % (SLICES * BLOCK_K) != 0:
        mask = mask & (cols < K)
    return tl.load(pointers + cols, mask=mask, other=0.0)


@triton.jit
@no_type_check
def _norm_tile(ptr, k, K: tl.constexpr, SLICES: tl.constexpr, BLOCK_K: tl.constexpr):
    """Of the norm's weight, to go with a tile of x."""
    cols = _columns(k, SLICES, BLOCK_K)
    tile = tl.load(ptr + cols, mask=cols < K, other=0.0)
    return tile[:, :, None] if SLICES > 1 else tile[:, None]


@triton.jit
@no_type_check
def _scaled(x, norm_weight, squares):
    """x * norm_weight, and the running squares of x."""
    wide = x.to(tl.float32)
    return (wide * norm_weight.to(tl.float32)).to(x.dtype), squares + wide * wide


@triton.jit
@no_type_check
def _zeros(ROWS: tl.constexpr, COLUMNS: tl.constexpr, SLICES: tl.constexpr):
    return tl.zeros((SLICES, ROWS, COLUMNS) if SLICES > 1 else (ROWS, COLUMNS), tl.float32)


@triton.jit
@no_type_check
def _arrived(tile, ASKED: tl.constexpr):
    """The same tile. The compiler would wait for it, to change its layout, right where it is asked for: not so here."""
    if ASKED:
        PACK: tl.constexpr = 32 // tile.dtype.primitive_bitwidth
        tile = tl.inline_asm_elementwise("", "=r,0", [tile], dtype=tile.dtype, is_pure=False, pack=PACK)
    return tile


@triton.jit
@no_type_check
def _residual_tile(ptr, rows, tokens, num_features, num_tokens, stride, HAS_RESIDUAL: tl.constexpr):
    """[features, tokens] of what is added last; zero if there is nothing."""
    if HAS_RESIDUAL:
        mask = (rows < num_features)[:, None] & (tokens < num_tokens)[None, :]
        tile = tl.load(ptr + tokens.to(tl.int64)[None, :] * stride + rows[:, None], mask=mask, other=0.0)
    else:
        tile = 0.0
    return tile


@triton.jit
@no_type_check
def _epilogue(
    y, up, scale, residual, rows, tokens, num_features, num_tokens, bias_ptr, out_ptr, out_stride,
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
        y += residual.to(tl.float32)
    tl.store(
        out_ptr + tokens.to(tl.int64)[None, :] * out_stride + rows[:, None], y.to(out_ptr.dtype.element_ty), mask=mask
    )


@triton.jit
@no_type_check
def _finish_tile(
    sums, sums_up, squares, residual, tile, split, num_features, num_tokens, bias_ptr, out_ptr, out_stride, partial_ptr,
    squares_ptr, norm_eps, K: tl.constexpr, SPLIT_K: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_RESIDUAL: tl.constexpr, SWIGLU: tl.constexpr,
):  # fmt: skip
    """The results of a tile, or its share of them."""
    BLOCK_N: tl.constexpr = sums.shape[-2]
    BLOCK_M: tl.constexpr = sums.shape[-1]
    if len(sums.shape) == 3:
        sums = tl.sum(sums, 0)
        sums_up = tl.sum(sums_up, 0)
        squares = tl.sum(squares, 0)
    rows = (tile * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    tokens = tl.arange(0, BLOCK_M)
    total = tl.sum(squares, 0)
    if SPLIT_K == 1:
        scale = tl.rsqrt(total / K + norm_eps) if HAS_NORM else total
        _epilogue(
            sums, sums_up, scale, residual, rows, tokens, num_features, num_tokens, bias_ptr, out_ptr, out_stride,
            HAS_BIAS, HAS_NORM, HAS_RESIDUAL, SWIGLU,
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
        if HAS_NORM and tile == 0:
            tl.store(squares_ptr + split * num_tokens + tokens, total, mask=tokens < num_tokens)


@triton.jit(do_not_specialize=["num_tokens", "num_tiles", "num_programs"])
@no_type_check
def _linear_tensor_kernel(
    # pointers
    x_ptr, weight_ptr, bias_ptr, norm_weight_ptr, residual_ptr, out_ptr, partial_ptr, squares_ptr,
    # sizes
    num_tokens, num_features, num_tiles, num_programs,
    # strides between rows, in elements
    x_stride, weight_stride, residual_stride, out_stride,
    # scalars
    norm_eps,
    # shapes and switches
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SLICES: tl.constexpr,
    SPLIT_K: tl.constexpr,
    STAGES: tl.constexpr, LOOP: tl.constexpr, EARLY: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, SWIGLU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program owns tiles of BLOCK_N features of all tokens, over K or over one of SPLIT_K shares of it.

    The weights are the left operand (features are the rows of the matrix instruction, tokens its few columns), so the
    instruction's width is not wasted on absent tokens. A chunk is BLOCK_K columns, or as many for each of SLICES.
    With LOOP a fixed number of programs walks over all tiles, and the pipeline runs on from one into the next.
    The very last weights of a program (EARLY chunks) are asked for before the wait on the previous kernel and are
    multiplied when all others have been, so that nothing stands between the wait and the pipeline.
    The norm is folded: the operand is x * norm_weight rounded to its dtype, squares are summed on the way, and the sum
    is scaled by 1 / rms at the end. Shares of K leave float32 sums that `_linear_merge_kernel` adds in index order.
    """
    CHUNK: tl.constexpr = SLICES * BLOCK_K
    SHARE: tl.constexpr = (K + SPLIT_K * CHUNK - 1) // (SPLIT_K * CHUNK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    split = tl.program_id(1)
    k_start = split * SHARE * CHUNK
    chunks = tl.minimum(SHARE, tl.cdiv(K - k_start, CHUNK))
    last_tile = tl.program_id(0)
    steps = chunks
    if LOOP:
        turns = (num_tiles - 1 - last_tile) // num_programs
        last_tile += turns * num_programs
        steps += turns * chunks
    features = tl.arange(0, BLOCK_N)
    up_ptr = weight_ptr + tl.cast(num_features, tl.int64) * weight_stride

    # early[PARTS * e] is chunk e of the last EARLY ones; with SWIGLU the entry after it belongs to the up half.
    PARTS: tl.constexpr = 2 if SWIGLU else 1
    early_k = k_start + (chunks - EARLY) * CHUNK
    rows = (last_tile * BLOCK_N + features).to(tl.int64)
    early = ()
    for e in tl.static_range(EARLY):
        for part in tl.static_range(PARTS):
            part_ptr = up_ptr if part else weight_ptr
            k = early_k + e * CHUNK
            early = early + (_weight_tile(part_ptr, rows, num_features, weight_stride, k, K, SLICES, BLOCK_K),)
    early_norm = ()
    for e in tl.static_range(EARLY if HAS_NORM else 0):
        early_norm = early_norm + (_norm_tile(norm_weight_ptr, early_k + e * CHUNK, K, SLICES, BLOCK_K),)
    if PDL:
        tl.extra.cuda.gdc_wait()
    tokens = tl.arange(0, BLOCK_M)
    last_residual = _residual_tile(
        residual_ptr, rows, tokens, num_features, num_tokens, residual_stride, HAS_RESIDUAL and SPLIT_K == 1
    )
    early_x = ()
    for e in tl.static_range(EARLY):
        k = early_k + e * CHUNK
        early_x = early_x + (_tokens_tile(x_ptr, num_tokens, x_stride, k, K, BLOCK_M, SLICES, BLOCK_K),)

    sums = _zeros(BLOCK_N, BLOCK_M, SLICES)
    sums_up = _zeros(BLOCK_N, BLOCK_M, SLICES)
    squares = _zeros(BLOCK_K, BLOCK_M, SLICES)
    for step in tl.range(0, steps - EARLY, num_stages=STAGES):
        tile = tl.program_id(0)
        chunk = step
        if LOOP:
            tile += step // chunks * num_programs
            chunk = step % chunks
        k = k_start + chunk * CHUNK
        rows = (tile * BLOCK_N + features).to(tl.int64)
        weights = _weight_tile(weight_ptr, rows, num_features, weight_stride, k, K, SLICES, BLOCK_K)
        x = _tokens_tile(x_ptr, num_tokens, x_stride, k, K, BLOCK_M, SLICES, BLOCK_K)
        if HAS_NORM:
            x, squares = _scaled(x, _norm_tile(norm_weight_ptr, k, K, SLICES, BLOCK_K), squares)
        sums = tl.dot(weights, x, sums, input_precision="ieee")
        if SWIGLU:
            weights_up = _weight_tile(up_ptr, rows, num_features, weight_stride, k, K, SLICES, BLOCK_K)
            sums_up = tl.dot(weights_up, x, sums_up, input_precision="ieee")
        if LOOP:
            done = chunk == chunks - 1
            if done:
                residual = _residual_tile(
                    residual_ptr, rows, tokens, num_features, num_tokens, residual_stride, HAS_RESIDUAL and SPLIT_K == 1
                )
                _finish_tile(
                    sums, sums_up, squares, residual, tile, split, num_features, num_tokens, bias_ptr, out_ptr,
                    out_stride, partial_ptr, squares_ptr, norm_eps, K, SPLIT_K, HAS_BIAS, HAS_NORM, HAS_RESIDUAL,
                    SWIGLU,
                )  # fmt: skip
                sums = _zeros(BLOCK_N, BLOCK_M, SLICES)
                sums_up = _zeros(BLOCK_N, BLOCK_M, SLICES)
                squares = _zeros(BLOCK_K, BLOCK_M, SLICES)
    for e in tl.static_range(EARLY):
        x = _arrived(early_x[e], PDL)
        if HAS_NORM:
            x, squares = _scaled(x, early_norm[e], squares)
        sums = tl.dot(_arrived(early[PARTS * e], PDL), x, sums, input_precision="ieee")
        if SWIGLU:
            sums_up = tl.dot(_arrived(early[PARTS * e + 1], PDL), x, sums_up, input_precision="ieee")
    if EARLY or not LOOP:
        if HAS_RESIDUAL and SPLIT_K == 1:
            last_residual = _arrived(last_residual, PDL)
        _finish_tile(
            sums, sums_up, squares, last_residual, last_tile, split, num_features, num_tokens, bias_ptr, out_ptr,
            out_stride, partial_ptr, squares_ptr, norm_eps, K, SPLIT_K, HAS_BIAS, HAS_NORM, HAS_RESIDUAL, SWIGLU,
        )  # fmt: skip


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
    scale = (tl.rsqrt(square / K + norm_eps) if HAS_NORM else square) + tl.zeros((1,), tl.float32)
    tokens = token + tl.arange(0, 1)
    residual = _residual_tile(residual_ptr, rows, tokens, num_features, num_tokens, residual_stride, HAS_RESIDUAL)
    _epilogue(
        y[:, None], up[:, None], scale, residual, rows, tokens, num_features, num_tokens, bias_ptr, out_ptr, out_stride,
        HAS_BIAS, HAS_NORM, HAS_RESIDUAL, SWIGLU,
    )  # fmt: skip


def launch_tensor(call: LinearCall, plan: LinearPlan) -> None:
    # Hopper's instruction for all warps has at least 16 columns here, the one for a single warp has 8.
    block_m = max(8 if plan.slices > 1 else 16, triton.next_power_of_2(call.num_tokens))
    assert block_m <= 128, f"the tensor-core kernel takes up to 128 tokens, not {call.num_tokens}"
    split = plan.split_k
    chunks = triton.cdiv(call.in_features, plan.slices * plan.block_k)
    fewest_chunks = chunks - (split - 1) * triton.cdiv(chunks, split)
    assert fewest_chunks > 0, f"{split} shares of {call.in_features} features leave one empty"
    partial = squares = None
    if split > 1:
        partial = call.x.new_empty(split, call.num_tokens, call.weight.shape[0], dtype=torch.float32)
        if call.norm_weight is not None:
            squares = call.x.new_empty(split, call.num_tokens, dtype=torch.float32)
    num_tiles, num_programs = call.tiles_and_programs(plan)
    _linear_tensor_kernel[(num_programs, split)](
        call.x, call.weight, call.bias, call.norm_weight, call.residual, call.result, partial, squares,
        call.num_tokens, call.num_features, num_tiles, num_programs, *call.strides, call.norm_eps,
        BLOCK_M=block_m, BLOCK_N=plan.block_n, BLOCK_K=plan.block_k, SLICES=plan.slices, SPLIT_K=split,
        STAGES=plan.num_stages, LOOP=num_programs < num_tiles, EARLY=min(plan.early, fewest_chunks),
        num_warps=plan.num_warps, **call.switches,
    )  # fmt: skip
    if partial is not None:
        merge_shares(
            partial, squares, call.bias, call.residual, call.result, call.norm_eps, call.in_features, call.swiglu
        )


def merge_shares(
    partial: Tensor, squares: Tensor | None, bias: Tensor | None, residual: Tensor | None, out: Tensor,
    norm_eps: float, in_features: int, swiglu: bool,
) -> None:  # fmt: skip
    def prepare() -> Prepared:
        (num_tokens, num_features), block = out.shape, 256
        strides = 0 if residual is None else residual.stride(0), out.stride(0)
        constants = {
            "K": in_features, "SPLIT_K": partial.shape[0], "BLOCK_N": block, "HAS_BIAS": bias is not None,
            "HAS_NORM": squares is not None, "HAS_RESIDUAL": residual is not None, "SWIGLU": swiglu,
        }  # fmt: skip
        grid = _triton.cdiv(num_features, block), num_tokens
        return grid, (num_tokens, num_features, *strides, norm_eps), constants, 2

    launch(_linear_merge_kernel, (partial, squares, bias, residual, out), (norm_eps, in_features, swiglu), prepare)
