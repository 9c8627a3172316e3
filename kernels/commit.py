"""The end of a decode step: rows move on, sampled tokens become next tokens."""

from typing import no_type_check

import torch
from torch import Tensor

from . import _triton
from ._triton import tl, triton


def commit_ref(
    sampled: Tensor, token_ids: Tensor, positions: Tensor, seq_lens: Tensor, ring: Tensor, step: Tensor
) -> None:
    """End a decode step: live rows take their sampled token and advance by one, the ring records the step's tokens.

    Args:
        sampled: `[num_rows]` int64.
        token_ids, positions: `[num_rows]` int64; seq_lens: `[num_rows]` int32; live rows change in place.
        ring: `[depth, max_num_seqs]` int64; entry `step % depth` is written.
        step: `[1]` int64, the number of commits before this one; incremented.
    """
    live = seq_lens > 0
    torch.where(live, sampled, token_ids, out=token_ids)
    positions += live
    seq_lens += live
    ring[:, : sampled.shape[0]].index_copy_(0, step % ring.shape[0], sampled[None])
    step += 1


@triton.jit(do_not_specialize=["num_rows", "depth"])
@no_type_check
def _commit_kernel(
    sampled_ptr, token_ids_ptr, positions_ptr, seq_lens_ptr, ring_ptr, step_ptr,
    num_rows, depth, ring_stride,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program does all rows, so that the step count needs no atomics."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.arange(0, BLOCK)
    inside = row < num_rows
    step = tl.load(step_ptr)
    sampled = tl.load(sampled_ptr + row, mask=inside, other=0)
    seq_len = tl.load(seq_lens_ptr + row, mask=inside, other=0)
    live = seq_len > 0
    position = tl.load(positions_ptr + row, mask=live, other=0)
    tl.store(token_ids_ptr + row, sampled, mask=live)
    tl.store(positions_ptr + row, position + 1, mask=live)
    tl.store(seq_lens_ptr + row, seq_len + 1, mask=live)
    tl.store(ring_ptr + (step % depth) * ring_stride + row, sampled, mask=inside)
    tl.store(step_ptr, step + 1)


def commit(sampled: Tensor, token_ids: Tensor, positions: Tensor, seq_lens: Tensor, ring: Tensor, step: Tensor) -> None:
    """End a decode step; see `commit_ref`."""
    if not _triton.on_triton(sampled):
        return commit_ref(sampled, token_ids, positions, seq_lens, ring, step)
    num_rows = sampled.shape[0]
    for name, state in (("sampled", sampled), ("token_ids", token_ids), ("positions", positions)):
        assert state.dtype == torch.int64, f"{name} must be int64"
        assert state.shape == (num_rows,), f"{name} needs one element for each of {num_rows} rows"
        assert state.is_contiguous(), f"{name} must be contiguous"
    assert seq_lens.shape == (num_rows,), f"seq_lens needs one element for each of {num_rows} rows"
    assert seq_lens.dtype == torch.int32, "seq_lens must be int32"
    assert seq_lens.is_contiguous(), "seq_lens must be contiguous"
    assert ring.dtype == step.dtype == torch.int64, "the ring and the step count are int64"
    assert ring.shape[1] >= num_rows, f"an entry of the ring holds {ring.shape[1]} rows, not {num_rows}"
    assert ring.stride(1) == 1, "an entry of the ring must be contiguous"
    pdl = _triton.has_pdl(sampled.device)
    _commit_kernel[(1,)](
        sampled, token_ids, positions, seq_lens, ring, step, num_rows, ring.shape[0], ring.stride(0),
        BLOCK=max(32, _triton.next_power_of_2(num_rows)), PDL=pdl,
        num_warps=1 if num_rows <= 128 else 4, launch_pdl=pdl,
    )  # fmt: skip
