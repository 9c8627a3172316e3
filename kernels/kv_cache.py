"""The layout of the paged KV cache, shared by every kernel that touches it."""

SINK_BLOCK = 1
"""The block that padding rows write to and read from; never in the table of a live row."""

FIRST_BLOCK = 2
"""The first block handed out. Block 0 belongs to nobody, so that a table left at zero is caught instead of forgiven."""


def kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, int, int, int]:
    """Shape of one layer's `k_cache` (and `v_cache`): `[num_blocks, num_kv_heads, block_size, head_dim]`.

    The tokens of one head in one block are contiguous, so that a decode program streams whole blocks.
    A KV slot is `block * block_size + offset`.
    """
    return (num_blocks, num_kv_heads, block_size, head_dim)
