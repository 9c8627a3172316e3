"""How decode attention is cut: one pure function of the bucket."""

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionPlan:
    """One way to run decode attention.

    Attributes:
        block_n: keys of a tile.
        num_warps: warps of a program.
        num_stages: depth of the software pipeline.
        max_splits: shares that the grid has room for, a power of two; the device uses as many as a length needs.
        min_tiles: tiles that a share has at least.
        dot: whether the products go through tensor cores, or one query head after another through registers.
    """

    block_n: int
    num_warps: int
    num_stages: int
    max_splits: int
    min_tiles: int
    dot: bool = True


def attention_plan(
    num_seqs: int, num_kv_heads: int, group: int, head_dim: int, element_size: int, max_keys: int,
    multiprocessors: int, shared_memory: int,
) -> AttentionPlan:  # fmt: skip
    """The plan for a bucket: everything here is known on the host before a capture.

    Few short sequences are a matter of latency, and go without tensor cores: alone that is slower, within a decode step
    on an H200 faster (0.761 against 0.824 ms for Llama-3.2-1B at batch 1 and 1k keys). Why is not measured; perhaps
    its programs, which need no shared memory, share a multiprocessor with those of the projections around them.

    Args:
        group: query heads of a KV head.
        max_keys: what the block tables have room for; with a sliding window, no more than the window.
        multiprocessors: of the device.
        shared_memory: bytes of it that a program can have.
    """
    few = num_seqs * num_kv_heads <= 16 and max_keys <= 4096
    if few and group <= 8 and head_dim <= 128 and element_size == 2:
        return vector_plan(num_seqs, num_kv_heads, head_dim, max_keys, multiprocessors)
    return tensor_plan(num_seqs, num_kv_heads, head_dim, element_size, max_keys, multiprocessors, shared_memory)


def vector_plan(num_seqs: int, num_kv_heads: int, head_dim: int, max_keys: int, multiprocessors: int) -> AttentionPlan:
    """One warp and one tile of 4 KB of keys a program, as long as the multiprocessors hold them all."""
    block_n = 32 if head_dim <= 64 else 16
    splits = _splits(num_seqs * num_kv_heads, 4 * multiprocessors, -(-max_keys // block_n))
    return AttentionPlan(block_n, 1, 1, splits, 1, dot=False)


def tensor_plan(
    num_seqs: int, num_kv_heads: int, head_dim: int, element_size: int, max_keys: int, multiprocessors: int,
    shared_memory: int,
) -> AttentionPlan:  # fmt: skip
    """Tiles of 8 or 16 KB of keys. Measured on an H200 in bf16 with 8 KV heads of 64 and 128 elements.

    With a program for every multiprocessor and more, keys are not shared out and the pipeline is as deep as two
    programs' shared memory allows. Below, keys are shared out until there are two programs a multiprocessor, or four
    where the sequences are very few.
    """
    num_rows = num_seqs * num_kv_heads
    row = max(64, head_dim) * element_size
    small = row <= 128
    block_n = 64 if row <= 256 else 32 if row <= 512 else 16
    deep = 8 if shared_memory >= 163840 else 4
    if num_rows >= multiprocessors:
        return AttentionPlan(128 if small else block_n, 4, deep, 1, 1)
    tiles = -(-max_keys // block_n)
    if num_rows > 16:
        return AttentionPlan(block_n, 4, deep, _splits(num_rows, 2 * multiprocessors - num_rows, tiles), 1)
    splits = _splits(num_rows, 4 * multiprocessors, tiles)
    return AttentionPlan(block_n, 2, deep, splits, 1) if small else AttentionPlan(block_n, 4, 4, splits, 1)


def _splits(num_rows: int, num_programs: int, tiles: int) -> int:
    """The smallest power of two of shares, 64 at most, that makes about so many programs, or a tile each."""
    splits = 1
    while splits < min(64, -(-num_programs // num_rows), tiles):
        splits *= 2
    return splits
