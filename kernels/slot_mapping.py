"""Where the keys and values of a step go."""

from typing import no_type_check

import torch
from torch import Tensor

from . import _triton
from ._launch import Prepared, launch
from ._triton import tl, triton
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


@triton.jit(do_not_specialize=["num_tokens", "num_seqs", "num_columns"])
@no_type_check
def _slot_mapping_kernel(
    positions_ptr, table_ptr, offsets_ptr, out_ptr,
    num_tokens, num_seqs, num_columns, table_stride,
    KV_BLOCK: tl.constexpr, SINK: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr, BLOCK_SEQS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A program does BLOCK tokens. The sequence of a packed token is the number of query offsets at or before it."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < num_tokens
    if PACKED:
        seq = tl.zeros((BLOCK,), tl.int32)
        for first in range(0, num_seqs, BLOCK_SEQS):
            index = first + tl.arange(0, BLOCK_SEQS)
            ends = tl.load(offsets_ptr + 1 + index, mask=index < num_seqs, other=2147483647)
            seq += tl.sum((ends[None, :] <= token[:, None]).to(tl.int32), 1)
    else:
        seq = token
    position = tl.load(positions_ptr + token, mask=inside, other=0)
    column = position // KV_BLOCK
    mapped = inside & (seq < num_seqs) & (column < num_columns)
    entry = seq.to(tl.int64) * table_stride + column
    block = tl.load(table_ptr + entry, mask=mapped, other=SINK).to(tl.int64)
    tl.store(out_ptr + token, block * KV_BLOCK + position % KV_BLOCK, mask=inside)


def slot_mapping(
    positions: Tensor,
    block_tables: Tensor,
    block_size: int,
    *,
    cu_seqlens_q: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """KV slot of each token; see `slot_mapping_ref`."""
    if not _triton.on_triton(positions):
        return slot_mapping_ref(positions, block_tables, block_size, cu_seqlens_q=cu_seqlens_q, out=out)
    out = torch.empty_like(positions) if out is None else out
    tensors = (positions, block_tables, cu_seqlens_q, out)
    launch(_slot_mapping_kernel, tensors, block_size, lambda: _prepare(*tensors, block_size))
    return out


def _prepare(
    positions: Tensor, block_tables: Tensor, cu_seqlens_q: Tensor | None, out: Tensor, block_size: int
) -> Prepared:
    num_tokens, (num_seqs, num_columns) = positions.shape[0], block_tables.shape
    assert positions.dtype == out.dtype == torch.int64, "positions and KV slots are int64"
    assert block_tables.dtype == torch.int32, "block tables are int32"
    assert out.shape == positions.shape, "out must have one element a token"
    assert positions.is_contiguous(), "positions must be contiguous"
    assert out.is_contiguous(), "out must be contiguous"
    assert block_tables.stride(1) == 1, "a block table must be contiguous"
    if cu_seqlens_q is None:
        assert num_tokens <= num_seqs, "without query offsets, each token needs a sequence of its own"
    else:
        assert cu_seqlens_q.shape == (num_seqs + 1,), "there is one query offset more than there are sequences"
        assert cu_seqlens_q.is_contiguous(), "query offsets must be contiguous"
    block = min(128, _triton.next_power_of_2(max(1, num_tokens)))
    constants = {
        "KV_BLOCK": block_size, "SINK": SINK_BLOCK, "PACKED": cu_seqlens_q is not None, "BLOCK": block,
        "BLOCK_SEQS": min(128, _triton.next_power_of_2(num_seqs)),
    }  # fmt: skip
    arguments = (num_tokens, num_seqs, num_columns, block_tables.stride(0))
    return (_triton.cdiv(num_tokens, block),), arguments, constants, 1 if block <= 32 else 4
