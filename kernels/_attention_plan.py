"""How attention is cut: pure functions of shapes that the host knows."""

from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class AttentionPlan:
    """One way to run decode attention.

    Attributes:
        block_n: keys of a tile.
        num_warps: warps of a program.
        num_stages: depth of the pipeline in shared memory; 1: keys and values go to registers.
        splits: shares that the grid has room for; the device uses as many as there are tiles.
    """

    block_n: int
    num_warps: int
    num_stages: int
    splits: int


def attention_plan(
    num_seqs: int, num_kv_heads: int, head_dim: int, element_size: int, max_keys: int, multiprocessors: int,
    shared_memory: int,
) -> AttentionPlan:  # fmt: skip
    """The plan for a bucket: everything here is known on the host before a capture.

    Measured on an H200 in bf16 with 8 KV heads of 64 and 128 elements, alone and within decode steps. Few rows (a row
    is a KV head of a sequence) are a matter of latency, and registers win: alone only sometimes, within a step of
    Llama-3.2-1B at batch 1 and 1k keys by a tenth (0.71 against 0.82 ms), why is not known. From 64 rows on it is the
    pipeline, within the step too. Whatever the rows, there are about 16 warps for each multiprocessor.

    Args:
        max_keys: what the block tables have room for; with a sliding window, no more than the window.
        multiprocessors: of the device.
        shared_memory: bytes of it that a program can have.
    """
    rows = num_seqs * num_kv_heads
    row_bytes = element_size * (1 << (max(64, head_dim) - 1).bit_length())
    narrow = row_bytes <= 128
    if rows <= 32 and element_size == 2 and row_bytes <= 256 and head_dim % 2 == 0:
        num_warps = 4 if narrow else 8
        return AttentionPlan(64, num_warps, 1, _splits(16 // num_warps * multiprocessors // rows, max_keys, 64))
    block_n, num_warps = max(16, 8192 // row_bytes), 4 if narrow and rows < multiprocessors else 2
    stages = 4 if shared_memory >= 163840 else 3
    return AttentionPlan(block_n, num_warps, stages, _splits(4 * multiprocessors // rows, max_keys, block_n))


@dataclass(frozen=True)
class PrefillPlan:
    """One way to run attention with any number of queries a sequence.

    Attributes:
        block_m: rows of a tile, a row being one query head of one token.
        block_n: keys of a tile.
        num_warps: warps of a program.
        num_stages: depth of the pipeline in shared memory.
        splits: shares that the keys of a tile are cut into; more than one are merged by a second launch.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    splits: int


@cache
def prefill_plan(
    num_tokens: int, num_seqs: int, num_kv_heads: int, group: int, head_dim: int, element_size: int, max_keys: int,
    multiprocessors: int, shared_memory: int,
) -> PrefillPlan:  # fmt: skip
    """The plan for a batch. Its lengths are on the device: what counts here is their mean, and the most keys.

    Few rows (verification) read their keys at the memory's speed, like a decode; for many, tensor cores are what is
    scarce, and on an H200 four warps with 64 rows and 64 keys were the best of all tiles, for heads of 64 and of 128.

    Args:
        group: query heads of a KV head.
        max_keys, multiprocessors, shared_memory: as in `attention_plan`.
    """
    rows = -(-num_tokens // num_seqs) * group
    block_m = 16 if rows <= 16 else 32 if rows <= 32 or element_size > 2 else 64
    row_bytes = element_size * (1 << (max(64, head_dim) - 1).bit_length())
    narrow = row_bytes <= 128
    programs = num_seqs * num_kv_heads * -(-rows // block_m)
    few = 4 if narrow and block_m == 16 else 2  # programs of few rows that a multiprocessor has room for
    wanted = few * multiprocessors // programs if rows <= 64 else multiprocessors // programs // 2
    if element_size > 2:  # without tensor cores
        return PrefillPlan(block_m, 16, 8, 2, _splits(wanted, max_keys, 16))
    if block_m < 64:
        block_n = 64 if row_bytes <= 256 else 32
        stages = 4 if narrow and shared_memory >= 163840 else 3 if row_bytes <= 256 else 2
        return PrefillPlan(block_m, block_n, 4, stages, _splits(wanted, max_keys, block_n))
    # Where products cannot read their operands from shared memory, registers are for fewer keys.
    block_n = 64 if narrow or (row_bytes <= 256 and shared_memory >= 200_000) else 32
    num_warps, num_stages = (4, 3) if row_bytes <= 256 or shared_memory >= 200_000 else (8, 2)
    return PrefillPlan(block_m, block_n, num_warps, num_stages, _splits(wanted, max_keys, 256))


def _splits(wanted: int, max_keys: int, least: int) -> int:
    """The largest power of two of shares up to 64 and `wanted`, of `least` keys each (a tile, mostly)."""
    most = max(1, min(64, wanted, -(-max_keys // least)))
    return 1 << (most.bit_length() - 1)
