"""Sparse changes to logits: biases and bans, as short fixed-width lists of ids per row.

Unused entries name any valid id (0) and carry a value that changes no bit of any logit: -0.0 for a bias, "not banned"
for a ban. So a list needs no length and no negative marker, and the last vocabulary id is never hit by accident.
"""

import torch
from torch import Tensor

UNUSED_BIAS = -0.0


def logit_bias_ref(logits: Tensor, ids: Tensor, biases: Tensor, *, out: Tensor | None = None) -> Tensor:
    """logits + biases at ids, [num_rows, vocab] float32.

    logits: [num_rows, vocab] any float dtype;  ids: [num_rows, width] int64, used ones distinct within a row
    biases: [num_rows, width] float32, UNUSED_BIAS where unused
    """
    return torch.scatter_add(logits.float(), 1, ids, biases, out=out)


def ban_tokens_ref(logits: Tensor, ids: Tensor, banned: Tensor, *, out: Tensor | None = None) -> Tensor:
    """-inf at the banned ids, [num_rows, vocab] float32.

    logits: [num_rows, vocab] any float dtype;  ids: [num_rows, width] int64;  banned: [num_rows, width] bool
    """
    ceiling = torch.where(banned, -torch.inf, torch.inf)
    return torch.scatter_reduce(logits.float(), 1, ids, ceiling, "amin", out=out)
