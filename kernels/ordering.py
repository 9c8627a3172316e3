"""One total order over the vocabulary: larger value first, then lower id."""

import torch
from torch import Tensor


def ordered_int32_ref(values: Tensor) -> Tensor:
    """int32 numbers that compare as the float32 of `values` do; same shape, no NaN, and -0.0 counts as 0.0."""
    bits = (values.float() + 0.0).view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def ordering_keys_ref(values: Tensor) -> Tensor:
    """int64 keys, all different within a row, that sort `[num_rows, vocab_size]` by value, then lower id.

    The largest key is that of the greedy token, ties included: topk and sort, which may order equal values anyhow,
    have nothing left to choose. High half: `ordered_int32_ref`; low half: the complement of the id.
    """
    ids = torch.arange(values.shape[-1], device=values.device)
    return (ordered_int32_ref(values).to(torch.int64) << 32) | (0x7FFFFFFF - ids)
