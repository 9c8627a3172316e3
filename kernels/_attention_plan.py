"""How decode attention is cut: one pure function of the bucket."""

from dataclasses import dataclass


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


def _splits(wanted: int, max_keys: int, block_n: int) -> int:
    """The largest power of two of shares up to 64, `wanted` and a tile each."""
    most = max(1, min(64, wanted, -(-max_keys // block_n)))
    return 1 << (most.bit_length() - 1)
