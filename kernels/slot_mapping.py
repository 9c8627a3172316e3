"""Where the keys and values of a step go."""

import torch
from torch import Tensor

from .kv_cache import SINK_BLOCK


def slot_mapping_ref(
    positions: Tensor,
    block_tables: Tensor,
    block_size: int,
    *,
    cu_seqlens_q: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """KV slot of each token, `[num_tokens]` int64; a position past the table's reach goes to the sink block.

    Args:
        positions: `[num_tokens]` int64.
        block_tables: `[num_seqs, max_blocks_per_seq]` int32.
        cu_seqlens_q: `[num_seqs + 1]` int32, which tokens belong to which sequence; None: token `i` is of sequence `i`.
        out: the result's buffer, written and returned when given.
    """
    num_tokens, (num_seqs, num_columns) = positions.shape[0], block_tables.shape
    seq = torch.arange(num_tokens, device=positions.device)
    if cu_seqlens_q is not None:
        seq = torch.searchsorted(cu_seqlens_q, seq, right=True) - 1
        seq = seq.clamp(max=num_seqs - 1)
    column = positions // block_size
    block = block_tables[seq, column.clamp(max=num_columns - 1)]
    block = torch.where(column < num_columns, block, SINK_BLOCK).to(torch.int64)
    return torch.add(block * block_size, positions % block_size, out=out)


slot_mapping = slot_mapping_ref
