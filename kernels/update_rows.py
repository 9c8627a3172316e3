"""Host changes to the step state, applied on the device in stream order.

A row is one sequence's place in the batch; it is live while its `seq_lens` entry is above zero.
"""

import torch
from torch import Tensor


def update_rows_ref(
    updates: Tensor, token_ids: Tensor, positions: Tensor, seq_lens: Tensor, block_tables: Tensor
) -> None:
    """Write whole rows of the step state, in place.

    Args:
        updates: `[num_updates, 4 + max_blocks_per_seq]` int64; columns row, token id, position, seq_len, block table.
            Rows must differ.
        token_ids, positions: `[max_num_seqs]` int64.
        seq_lens: `[max_num_seqs]` int32.
        block_tables: `[max_num_seqs, max_blocks_per_seq]` int32.
    """
    rows = updates[:, 0]
    token_ids.index_copy_(0, rows, updates[:, 1])
    positions.index_copy_(0, rows, updates[:, 2])
    seq_lens.index_copy_(0, rows, updates[:, 3].to(torch.int32))
    block_tables.index_copy_(0, rows, updates[:, 4:].to(torch.int32))


update_rows = update_rows_ref
