"""Embedding gather."""

import torch
from torch import Tensor


def embedding_ref(token_ids: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Rows of `weight` by token id.

    Args:
        token_ids: `[num_tokens]` int64, each in `[0, vocab_size)`.
        weight: `[vocab_size, hidden_size]`.
        out: `[num_tokens, hidden_size]` in the dtype of `weight`, written and returned when given.
    """
    return torch.index_select(weight, 0, token_ids, out=out)


embedding = embedding_ref
