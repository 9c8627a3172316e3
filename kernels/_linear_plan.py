"""How a linear projection is cut: one pure function over tables of measured choices."""

from dataclasses import dataclass
from functools import cache
from typing import Literal


@dataclass(frozen=True)
class LinearPlan:
    """One way to run a projection.

    Attributes:
        road: `gemv` (dot-free, 1 token or a few), `tensor` (tensor cores, up to 64), `tile` (tensor cores, the norm a
            kernel of its own), `blas` (torch, with all neighbours as kernels of their own).
        block_n: output features of a program.
        block_k: input features of a chunk, or of a slice of one.
        num_warps: warps of a program.
        early: chunks asked for before the wait on the previous kernel; `tile`: only the L2 is asked.
        programs_per_sm: programs walk over the tiles in a loop, so many a multiprocessor; 0: a program a tile.
        norm_apart: `tensor`: the norm is a kernel of its own, so the pipeline's operands need no arithmetic.
        num_stages: `tensor`, `tile`: depth of the software pipeline.
        split_k: `tensor`, `tile`: programs that share a tile's input features; a second kernel merges their sums.
        block_m: `tile`: tokens of a program.
        slices: `tensor`: slices of a chunk, each for a warp or two of its own; their sums are added at the end.
    """

    road: Literal["gemv", "tensor", "tile", "blas"]
    block_n: int = 0
    block_k: int = 0
    num_warps: int = 4
    early: int = 1
    programs_per_sm: int = 0
    norm_apart: bool = False
    num_stages: int = 1
    split_k: int = 1
    slices: int = 1
    block_m: int = 0


# Rows and columns of the weights of Llama-3.2-1B and Llama-3.1-8B: qkv, o, gate_up, down, head. Each plan is the best
# of its projection within a decode chain (one token) or alone (more), by bench/sweep_linear.py.
_ONE_TOKEN_H200 = {
    (3072, 2048): LinearPlan("gemv", 4, 1024, 2, early=1),
    (2048, 2048): LinearPlan("gemv", 8, 1024, 4, early=2),
    (16384, 2048): LinearPlan("gemv", 4, 1024, 2, early=1),
    (2048, 8192): LinearPlan("gemv", 1, 2048, 4, programs_per_sm=4),
    (128256, 2048): LinearPlan("gemv", 4, 1024, 2, early=1),
    (6144, 4096): LinearPlan("gemv", 1, 2048, 4, programs_per_sm=6),
    (4096, 4096): LinearPlan("gemv", 2, 1024, 4, programs_per_sm=4),
    (28672, 4096): LinearPlan("gemv", 2, 2048, 4, early=1),
    (4096, 14336): LinearPlan("gemv", 1, 2048, 8, programs_per_sm=2),
    (128256, 4096): LinearPlan("gemv", 2, 2048, 8, early=2),
}
_2_TOKENS_H200 = {
    (3072, 2048): LinearPlan("gemv", 4, 2048, 8, early=2),
    (6144, 4096): LinearPlan("gemv", 4, 1024, 4, early=2),
}
_8_TOKENS_H200 = {
    (3072, 2048): LinearPlan("tensor", 32, 128, 4, norm_apart=True, num_stages=4, slices=4),
    (2048, 2048): LinearPlan("tensor", 32, 128, 4, num_stages=4, slices=4),
    (16384, 2048): LinearPlan("tensor", 64, 128, 4, norm_apart=True, num_stages=6),
    (2048, 8192): LinearPlan("tensor", 16, 128, 4, num_stages=8, slices=4),
    (128256, 2048): LinearPlan("tensor", 16, 128, 4, norm_apart=True, num_stages=4, slices=4),
    (6144, 4096): LinearPlan("tensor", 64, 128, 4, norm_apart=True, num_stages=6),
    (4096, 4096): LinearPlan("tensor", 16, 128, 4, num_stages=5, slices=4),
    (28672, 4096): LinearPlan("tensor", 16, 128, 4, programs_per_sm=1, norm_apart=True, num_stages=6, slices=4),
    (4096, 14336): LinearPlan("tensor", 32, 128, 4, num_stages=6, slices=4),
    (128256, 4096): LinearPlan("tensor", 16, 128, 4, norm_apart=True, num_stages=5, slices=4),
}
_16_TOKENS_H200 = {
    (3072, 2048): LinearPlan("tensor", 64, 128, 4, norm_apart=True, num_stages=6),
    (2048, 2048): LinearPlan("tensor", 16, 128, 4, num_stages=5, slices=4),
    (16384, 2048): LinearPlan("tensor", 64, 128, 4, norm_apart=True, num_stages=6),
    (2048, 8192): LinearPlan("tensor", 16, 128, 4, num_stages=5, slices=4),
    (128256, 2048): LinearPlan("tensor", 64, 128, 4, norm_apart=True, num_stages=4),
    (6144, 4096): LinearPlan("tensor", 64, 128, 4, norm_apart=True, num_stages=6),
    (4096, 4096): LinearPlan("tensor", 32, 256, 4, num_stages=7),
    (28672, 4096): LinearPlan("tensor", 64, 128, 4, norm_apart=True, num_stages=3),
    (4096, 14336): LinearPlan("tensor", 64, 128, 4, num_stages=6, split_k=2),
    (128256, 4096): LinearPlan("tensor", 64, 128, 4, norm_apart=True, num_stages=4),
}
_32_TOKENS_H200 = {
    (3072, 2048): LinearPlan("tensor", 64, 128, 4, norm_apart=True, num_stages=6, split_k=2),
    (2048, 2048): LinearPlan("tensor", 16, 128, 4, early=0, num_stages=4, slices=4),
    (16384, 2048): LinearPlan("tensor", 64, 64, 4, norm_apart=True, num_stages=8),
    (2048, 8192): LinearPlan("tensor", 64, 64, 4, num_stages=8, split_k=8),
    (128256, 2048): LinearPlan("tensor", 64, 128, 4, norm_apart=True, num_stages=4),
    (6144, 4096): LinearPlan("tensor", 64, 128, 4, norm_apart=True, num_stages=6),
    (4096, 4096): LinearPlan("tensor", 64, 128, 4, num_stages=6, split_k=2),
    (28672, 4096): LinearPlan("tensor", 64, 64, 4, norm_apart=True, num_stages=4),
    (4096, 14336): LinearPlan("tensor", 64, 128, 4, num_stages=6, split_k=2),
    (128256, 4096): LinearPlan("tensor", 64, 128, 4, norm_apart=True, num_stages=4),
}
# From here on the best within all layers, by bench/linear_wide.py. A shape of the next table must be in this one, too.
_64_TOKENS_H200 = {
    (3072, 2048): LinearPlan("tile", 32, 128, early=6, norm_apart=True, num_stages=6, block_m=64),
    (2048, 2048): LinearPlan("tile", 32, 128, early=6, norm_apart=True, num_stages=6, split_k=2, block_m=64),
    (16384, 2048): LinearPlan("tile", 32, 128, early=3, norm_apart=True, num_stages=3, block_m=64),
    (2048, 8192): LinearPlan("tensor", 64, 128, norm_apart=True, num_stages=4, split_k=4),
    (128256, 2048): LinearPlan("tile", 128, 64, early=4, norm_apart=True, num_stages=4, block_m=64),
    (6144, 4096): LinearPlan("blas"),
    (4096, 4096): LinearPlan("tile", 64, 128, early=0, norm_apart=True, num_stages=6, block_m=64),
    (28672, 4096): LinearPlan("tile", 64, 128, early=4, norm_apart=True, num_stages=4, block_m=64),
    (4096, 14336): LinearPlan("tile", 64, 128, early=6, norm_apart=True, num_stages=6, split_k=2, block_m=64),
    (128256, 4096): LinearPlan("tile", 128, 64, early=4, norm_apart=True, num_stages=4, block_m=64),
}
_128_TOKENS_H200 = {
    (3072, 2048): LinearPlan("tile", 64, 128, early=6, norm_apart=True, num_stages=6, block_m=64),
    (2048, 2048): LinearPlan("tile", 32, 128, early=6, norm_apart=True, num_stages=6, block_m=64),
    (16384, 2048): LinearPlan("tile", 32, 64, early=4, norm_apart=True, num_stages=4, block_m=128),
    (2048, 8192): LinearPlan("tile", 64, 128, early=4, norm_apart=True, num_stages=4, split_k=4, block_m=128),
    (4096, 4096): LinearPlan("tile", 64, 128, early=6, norm_apart=True, num_stages=6, block_m=64),
    (28672, 4096): LinearPlan("tile", 64, 64, 8, early=3, norm_apart=True, num_stages=3, block_m=128),
    (4096, 14336): LinearPlan("tile", 64, 128, early=4, norm_apart=True, num_stages=4, split_k=2, block_m=128),
    **dict.fromkeys(((6144, 4096), (128256, 2048), (128256, 4096)), LinearPlan("blas")),
}
# The others are faster by cuBLAS, as the rule has it.
_256_TOKENS_H200 = {
    (16384, 2048): LinearPlan("tile", 128, 64, 8, early=4, norm_apart=True, num_stages=4, block_m=128),
    (2048, 8192): LinearPlan("tile", 128, 64, early=6, norm_apart=True, num_stages=6, split_k=4, block_m=128),
    (28672, 4096): LinearPlan("tile", 128, 64, 8, early=0, norm_apart=True, num_stages=4, block_m=128),
}
TABLES: dict[str, dict[int, dict[tuple[int, int], LinearPlan]]] = {
    "NVIDIA H200": {
        1: _ONE_TOKEN_H200,
        2: _2_TOKENS_H200,
        8: _8_TOKENS_H200,
        16: _16_TOKENS_H200,
        32: _32_TOKENS_H200,
        64: _64_TOKENS_H200,
        128: _128_TOKENS_H200,
        256: _256_TOKENS_H200,
    },
}
"""Measured plans by device, by the most tokens that they are for, by shape of the weight."""


@cache
def linear_plan(
    num_tokens: int, rows: int, columns: int, *, swiglu: bool, element_size: int, device_name: str, shared_memory: int
) -> LinearPlan:
    """The plan for `[num_tokens, columns]` times a weight `[rows, columns]`; with `swiglu` half the rows are gates.

    Args:
        element_size: bytes of an element; the tables are for 2.
        device_name, shared_memory: of the device; bytes that one program can have.
    """
    tables = TABLES.get(device_name, {}) if element_size == 2 else {}
    for most in sorted(tables):
        if num_tokens <= most and (rows, columns) in tables[most]:
            return tables[most][rows, columns]
    # In full float32 the tensor cores do not help.
    if num_tokens <= (1 if element_size == 2 else 4):
        return gemv_by_rule(num_tokens, columns, 2 if swiglu else 1)
    if num_tokens <= 64:
        return _tensor_by_rule(num_tokens, rows, columns, 2 if swiglu else 1, element_size, shared_memory)
    return LinearPlan("blas")


def gemv_by_rule(num_tokens: int, columns: int, parts: int) -> LinearPlan:
    """Tiles of about 16 KB, in chunks that fill whole vector loads, two of them asked for early."""
    block_k = next((size for size in (2048, 1024, 512) if columns % size == 0), 256)
    block_n = 1
    while block_n < 8 // num_tokens and 2 * block_n * parts * columns * 2 <= 16384:
        block_n *= 2
    return LinearPlan("gemv", block_n, block_k, block_k // 256, early=2)


def _tensor_by_rule(
    num_tokens: int, rows: int, columns: int, parts: int, element_size: int, shared_memory: int
) -> LinearPlan:
    """64 features a program, K shared out until two programs fill a multiprocessor, as many stages as fit."""
    block_m = 16 if num_tokens <= 16 else 32 if num_tokens <= 32 else 64
    block_k = 256 // element_size if columns % 128 == 0 and parts * block_m <= 64 else 128 // element_size
    stage = (64 * parts + block_m) * block_k * element_size
    programs = -(-rows // (64 * parts))
    split = 1
    while split < 4 and 2 * split * programs <= 264 and columns >= 8 * split * block_k:
        split *= 2
    stages = max(2, min(4, shared_memory // stage - 1))
    return LinearPlan("tensor", 64, block_k, 4, norm_apart=True, num_stages=stages, split_k=split)
