"""The linear projection for very few tokens: weights go through registers once, no tensor cores."""

# ruff: noqa: RUF005 -- Triton adds tuples and cannot unpack them.

from typing import no_type_check

from ._linear_call import LinearCall
from ._linear_plan import LinearPlan
from ._triton import tl, triton


@triton.jit
@no_type_check
def _weights(ptr, rows, num_rows, stride, K: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr):
    cols = CHUNK * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = (rows < num_rows)[:, None]
    if (CHUNK + 1) * BLOCK_K > K:
        mask = mask & (cols < K)[None, :]
    return tl.load(ptr + rows[:, None] * stride + cols[None, :], mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
@no_type_check
def _vector(ptr, K: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr):
    cols = CHUNK * BLOCK_K + tl.arange(0, BLOCK_K)
    return tl.load(ptr + cols, mask=cols < K, other=0.0)


@triton.jit
@no_type_check
def _products(weights, x, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Products of [BLOCK_N, BLOCK_K] weights with [BLOCK_K], summed over the eight neighbours that one thread holds."""
    products = weights.to(tl.float32) * x.to(tl.float32)[None, :]
    return tl.sum(tl.reshape(products, (BLOCK_N, BLOCK_K // 8, 8)), 2)


@triton.jit(do_not_specialize=["num_tokens", "num_tiles", "num_programs"])
@no_type_check
def _linear_gemv_kernel(
    # pointers
    x_ptr, weight_ptr, bias_ptr, norm_weight_ptr, residual_ptr, out_ptr,
    # sizes
    num_tokens, num_features, num_tiles, num_programs,
    # strides between rows, in elements
    x_stride, weight_stride, residual_stride, out_stride,
    # scalars
    norm_eps,
    # shapes and switches
    K: tl.constexpr, TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
    LOOP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    SWIGLU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program owns BLOCK_N features of all tokens and walks K in unrolled chunks of BLOCK_K.

    Each weight is read once, straight into registers. The first EARLY chunks are asked for before the wait on the
    previous kernel, so the memory stays busy while that kernel drains: most of what makes a small projection fast.
    With LOOP a fixed number of programs walks over all tiles, x stays in registers, and chunk c of the next tile is
    asked for as soon as chunk c of this one is summed (EARLY is then every chunk).
    What the epilogue adds is asked for before the sums, so that its latency hides behind them.
    The norm is folded: x * norm_weight is what weights meet, and the sum is scaled by 1 / rms once at the end.
    """
    CHUNKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    PARTS: tl.constexpr = 2 if SWIGLU else 1
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    rows = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    up_ptr = weight_ptr + tl.cast(num_features, tl.int64) * weight_stride

    # weights[PARTS * c] is chunk c of this tile; with SWIGLU the entry after it belongs to the up half.
    weights = ()
    for c in tl.static_range(EARLY):
        weights = weights + (_weights(weight_ptr, rows, num_features, weight_stride, K, c, BLOCK_K),)
        if SWIGLU:
            weights = weights + (_weights(up_ptr, rows, num_features, weight_stride, K, c, BLOCK_K),)
    norm_weights = ()
    if HAS_NORM:
        for c in tl.static_range(CHUNKS):
            norm_weights = norm_weights + (_vector(norm_weight_ptr, K, c, BLOCK_K),)
    if PDL:
        tl.extra.cuda.gdc_wait()

    # x[TOKENS * c + m] is chunk c of token m; scales[m] its 1 / rms.
    x = ()
    squares = ()
    for c in tl.static_range(CHUNKS):
        for m in tl.static_range(TOKENS):
            chunk = _vector(x_ptr + tl.minimum(m, num_tokens - 1) * x_stride, K, c, BLOCK_K)
            if HAS_NORM:
                wide = chunk.to(tl.float32)
                chunk = wide * norm_weights[c].to(tl.float32)
                squares = squares + (tl.sum(tl.reshape(wide * wide, (BLOCK_K // 8, 8)), 1),)
            x = x + (chunk,)
    scales = ()
    for m in tl.static_range(TOKENS):
        if HAS_NORM:
            total = squares[m]
            for c in tl.static_range(1, CHUNKS):
                total += squares[TOKENS * c + m]
            scales = scales + (tl.rsqrt(tl.sum(total, 0) / K + norm_eps),)

    for tile in range(tl.program_id(0), num_tiles, num_programs):
        rows = (tile * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
        mask = rows < num_features
        residuals = ()
        for m in tl.static_range(TOKENS):
            if HAS_RESIDUAL:
                pointers = residual_ptr + tl.minimum(m, num_tokens - 1) * residual_stride + rows
                residuals = residuals + (tl.load(pointers, mask=mask, other=0.0).to(tl.float32),)
        biases = ()
        for part in tl.static_range(PARTS):
            if HAS_BIAS:
                pointers = bias_ptr + part * num_features + rows
                biases = biases + (tl.load(pointers, mask=mask, other=0.0).to(tl.float32),)
        later_rows = rows + num_programs * BLOCK_N
        later = ()
        sums = ()
        for c in tl.static_range(CHUNKS):
            for part in tl.static_range(PARTS):
                part_ptr = up_ptr if part else weight_ptr
                if c < EARLY:
                    current = weights[PARTS * c + part]
                else:
                    current = _weights(part_ptr, rows, num_features, weight_stride, K, c, BLOCK_K)
                for m in tl.static_range(TOKENS):
                    products = _products(current, x[TOKENS * c + m], BLOCK_N, BLOCK_K)
                    if c > 0:
                        products += sums[((c - 1) * PARTS + part) * TOKENS + m]
                    sums = sums + (products,)
                if LOOP:
                    later = later + (_weights(part_ptr, later_rows, num_features, weight_stride, K, c, BLOCK_K),)
        for m in tl.static_range(TOKENS):
            y = tl.sum(sums[(CHUNKS - 1) * PARTS * TOKENS + m], 1)
            if HAS_NORM:
                y *= scales[m]
            if HAS_BIAS:
                y += biases[0]
            if SWIGLU:
                up = tl.sum(sums[(CHUNKS * PARTS - 1) * TOKENS + m], 1)
                if HAS_NORM:
                    up *= scales[m]
                if HAS_BIAS:
                    up += biases[1]
                y = y * tl.sigmoid(y) * up
            if HAS_RESIDUAL:
                y += residuals[m]
            tl.store(out_ptr + m * out_stride + rows, y.to(out_ptr.dtype.element_ty), mask=mask & (m < num_tokens))
        if LOOP:
            weights = later


def launch_gemv(call: LinearCall, plan: LinearPlan) -> None:
    tokens = 1 if call.num_tokens == 1 else 2 if call.num_tokens == 2 else 4
    assert call.num_tokens <= tokens, f"the dot-free kernel takes up to 4 tokens, not {call.num_tokens}"
    num_tiles, num_programs = call.tiles_and_programs(plan)
    loop = num_programs < num_tiles
    chunks = triton.cdiv(call.in_features, plan.block_k)
    _linear_gemv_kernel[(num_programs,)](
        call.x, call.weight, call.bias, call.norm_weight, call.residual, call.result,
        call.num_tokens, call.num_features, num_tiles, num_programs, *call.strides, call.norm_eps,
        TOKENS=tokens, BLOCK_N=plan.block_n, BLOCK_K=plan.block_k, EARLY=chunks if loop else min(plan.early, chunks),
        LOOP=loop, num_warps=plan.num_warps, **call.switches,
    )  # fmt: skip
