"""The greedy token of each row."""

import torch
from torch import Tensor


def greedy_ref(logits: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Id of the largest logit of each row of [num_rows, vocab], a tie going to the lowest id: [num_rows] int64.

    torch.argmax documents that the first of several maxima is returned, on every device (its CUDA reduction compares
    indices when values are equal), whereas topk and sort leave the order of equal values open. Half-precision logits
    are widened, which changes no comparison and is faster on a CPU.
    """
    return torch.argmax(logits.float(), dim=-1, out=out)
