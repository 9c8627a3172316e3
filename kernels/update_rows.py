"""Host changes to the step state, applied on the device in stream order.

A row is one sequence's place in the batch; it is live while its `seq_lens` entry is above zero.
"""

from typing import no_type_check

import torch
from torch import Tensor

from . import _triton
from ._triton import tl, triton


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


@triton.jit(do_not_specialize=["num_columns"])
@no_type_check
def _update_rows_kernel(
    updates_ptr, token_ids_ptr, positions_ptr, seq_lens_ptr, table_ptr,
    num_columns, updates_stride, table_stride,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program writes one row."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    update = updates_ptr + tl.program_id(0).to(tl.int64) * updates_stride
    row = tl.load(update)
    tl.store(token_ids_ptr + row, tl.load(update + 1))
    tl.store(positions_ptr + row, tl.load(update + 2))
    tl.store(seq_lens_ptr + row, tl.load(update + 3).to(tl.int32))
    for first in range(0, num_columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        blocks = tl.load(update + 4 + column, mask=column < num_columns, other=0)
        tl.store(table_ptr + row * table_stride + column, blocks.to(tl.int32), mask=column < num_columns)


def update_rows(updates: Tensor, token_ids: Tensor, positions: Tensor, seq_lens: Tensor, block_tables: Tensor) -> None:
    """Write whole rows of the step state; see `update_rows_ref`."""
    if not _triton.on_triton(token_ids):
        return update_rows_ref(updates, token_ids, positions, seq_lens, block_tables)
    num_columns = block_tables.shape[1]
    assert updates.shape[1] == 4 + num_columns, f"an update has {4 + num_columns} columns, not {updates.shape[1]}"
    assert updates.dtype == token_ids.dtype == positions.dtype == torch.int64, "updates, ids and positions are int64"
    assert seq_lens.dtype == block_tables.dtype == torch.int32, "lengths and block tables are int32"
    assert updates.stride(1) == block_tables.stride(1) == 1, "rows of updates and block tables must be contiguous"
    for name, state in (("token_ids", token_ids), ("positions", positions), ("seq_lens", seq_lens)):
        assert state.is_contiguous(), f"{name} must be contiguous"
    if updates.shape[0] == 0:
        return
    pdl = _triton.has_pdl(token_ids.device)
    _update_rows_kernel[(updates.shape[0],)](
        updates, token_ids, positions, seq_lens, block_tables, num_columns, updates.stride(0), block_tables.stride(0),
        BLOCK=min(1024, _triton.next_power_of_2(num_columns)), PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
