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
    """KV slot of each token, `[num_tokens]` int64.

    A position past the table's reach goes to the sink block, and so does a token past the last query offset (padding).

    Args:
        positions: `[num_tokens]` int64.
        block_tables: `[num_seqs, max_blocks_per_seq]` int32.
        cu_seqlens_q: `[num_seqs + 1]` int32, which tokens belong to which sequence; None: token `i` is of sequence `i`.
        out: the result's buffer, written and returned when given.
    """
    num_tokens, (num_seqs, num_columns) = positions.shape[0], block_tables.shape
    seq = torch.arange(num_tokens, device=positions.device)
    if cu_seqlens_q is not None:
        seq = torch.searchsorted(cu_seqlens_q.to(torch.int64), seq, right=True) - 1
    column = positions // block_size
    mapped = (seq < num_seqs) & (column < num_columns)
    block = block_tables[seq.clamp(max=num_seqs - 1), column.clamp(max=num_columns - 1)]
    block = torch.where(mapped, block, SINK_BLOCK).to(torch.int64)
    return torch.add(block * block_size, positions % block_size, out=out)


slot_mapping = slot_mapping_ref
