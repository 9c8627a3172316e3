"""Log-probabilities of the model's own distribution."""

import torch
from torch import Tensor

from .ordering import ordering_keys_ref


def logprobs_ref(
    logits: Tensor, token_ids: Tensor, k: int, *, out: tuple[Tensor, Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The log-probability of one given token a row, and the k most probable tokens with theirs.

    The k are ordered by larger logit, then lower id: a shorter list is a prefix of a longer one, and the first id is
    the greedy token. NaN counts as -inf in that order.

    Args:
        logits: `[num_rows, vocab_size]`, any float dtype, as the model gave them: no penalty, temperature or filter.
        token_ids: `[num_rows]` int64.
        k: a k above vocab_size gives the whole vocabulary.
        out: tensors for the results, written and returned when given.

    Returns:
        `[num_rows]` float32, `[num_rows, k]` int64 and `[num_rows, k]` float32.
    """
    log_softmax = torch.log_softmax(logits.float(), dim=-1)
    values = torch.nan_to_num(logits.float(), nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    top_ids = ordering_keys_ref(values).topk(min(k, logits.shape[-1])).indices
    results = log_softmax.gather(1, token_ids[:, None]).squeeze(1), top_ids, log_softmax.gather(1, top_ids)
    if out is None:
        return results
    for destination, result in zip(out, results, strict=True):
        destination.copy_(result)
    return out


logprobs = logprobs_ref
