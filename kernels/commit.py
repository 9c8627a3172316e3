"""The end of a decode step: rows move on, sampled tokens become next tokens."""

import torch
from torch import Tensor


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


commit = commit_ref
