"""The greedy token of each row."""

import torch
from torch import Tensor


def greedy_ref(logits: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The id of the largest logit of each row, a tie going to the lowest id.

    torch.argmax documents that the first of several maxima is returned, on every device (its CUDA reduction compares
    indices where values are equal); topk and sort leave the order of equal values open. Half-precision logits are
    widened, which changes no comparison and is faster on a CPU.

    Args:
        logits: `[num_rows, vocab_size]`, any float dtype.
        out: `[num_rows]` int64, written and returned when given.
    """
    return torch.argmax(logits.float(), dim=-1, out=out)


greedy = greedy_ref
