"""Sparse changes to logits, biases and bans, as lists of ids of one width for all rows.

An unused entry names a valid id (0) and carries what changes no bit of any logit: the bias -0.0, or "not banned". So a
list needs neither a length nor a negative marker that could hit the last id.
"""

import torch
from torch import Tensor

UNUSED_BIAS = -0.0


def logit_bias_ref(logits: Tensor, ids: Tensor, biases: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`logits` in float32, with `biases` added at `ids`.

    Args:
        logits: `[num_rows, vocab_size]`, any float dtype.
        ids: `[num_rows, width]` int64; those in use differ within a row.
        biases: `[num_rows, width]` float32, `UNUSED_BIAS` where unused.
        out: `[num_rows, vocab_size]` float32, written and returned when given.
    """
    return torch.scatter_add(logits.float(), 1, ids, biases, out=out)


def ban_tokens_ref(logits: Tensor, ids: Tensor, banned: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`logits` in float32, with -inf at the `ids` that are banned.

    Args:
        logits: `[num_rows, vocab_size]`, any float dtype.
        ids: `[num_rows, width]` int64.
        banned: `[num_rows, width]` bool.
        out: `[num_rows, vocab_size]` float32, written and returned when given.
    """
    ceiling = torch.where(banned, -torch.inf, torch.inf)
    return torch.scatter_reduce(logits.float(), 1, ids, ceiling, "amin", out=out)


logit_bias = logit_bias_ref
ban_tokens = ban_tokens_ref
