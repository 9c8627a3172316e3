"""One total order over the vocabulary: larger value first, then lower id."""

import torch
from torch import Tensor


def ordering_keys_ref(values: Tensor) -> Tensor:
    """int64 keys that are all different within a row and sort [num_rows, vocab] by (value, then lower id).

    The largest key is the greedy token, ties included, so topk and sort, which may order equal values anyhow, have
    nothing left to choose. High half: the float32 bits as an integer of the same order (-0.0 counts as 0.0). Low
    half: the complement of the id. Values must not be NaN.
    """
    bits = (values.float() + 0.0).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ids = torch.arange(values.shape[-1], device=values.device)
    return (ordered.to(torch.int64) << 32) | (0x7FFFFFFF - ids)
