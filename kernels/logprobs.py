"""Log-probabilities of the model's own distribution."""

import torch
from torch import Tensor

from .ordering import ordering_keys_ref


def token_logprobs_ref(logits: Tensor, token_ids: Tensor, *, out: Tensor | None = None) -> Tensor:
    """log softmax(logits)[token_ids], [num_rows] float32.

    logits: [num_rows, vocab] any float dtype, as the model gave them;  token_ids: [num_rows] int64
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    return torch.gather(logprobs, 1, token_ids[:, None]).squeeze(1) if out is None else torch.gather(
        logprobs, 1, token_ids[:, None], out=out[:, None]
    ).squeeze(1)


def top_logprobs_ref(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k most probable ids, [num_rows, k] int64, and their log-probabilities, [num_rows, k] float32.

    Order: larger logit first, then lower id; so a shorter list is a prefix of a longer one and the first id is the
    greedy token. A k above the vocabulary size gives the whole vocabulary.
    """
    values = torch.nan_to_num(logits.float(), nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    ids = ordering_keys_ref(values).topk(min(k, logits.shape[-1])).indices
    return ids, torch.log_softmax(logits.float(), dim=-1).gather(1, ids)
