"""Repetition, presence and frequency penalties, and the token counts they stand on."""

import torch
from torch import Tensor


def penalties_ref(
    logits: Tensor,
    in_prompt: Tensor,
    output_counts: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Penalised logits in float32. The neutral numbers 1, 0, 0 leave a row bit for bit as it was.

    Repetition (Keskar et al., "CTRL", 2019, with the sign rule of transformers and vLLM), for tokens of prompt and
    output: `l / r` where `l > 0`, else `l * r`. Then, for tokens of the output: `l - frequency * count - presence`.

    Args:
        logits: `[num_rows, vocab_size]`, any float dtype.
        in_prompt: `[num_rows, vocab_size]` bool.
        output_counts: `[num_rows, vocab_size]` int32, how often each token was generated.
        repetition, presence, frequency: `[num_rows]` float32.
        out: `[num_rows, vocab_size]` float32, written and returned when given.
    """
    values = logits.float()
    generated = output_counts > 0
    factor = torch.where(in_prompt | generated, repetition[:, None], 1.0)
    values = torch.where(values > 0, values / factor, values * factor)
    return torch.sub(values, frequency[:, None] * output_counts + presence[:, None] * generated, out=out)


def count_tokens_ref(output_counts: Tensor, rows: Tensor, token_ids: Tensor) -> None:
    """Count one generated token for each of some rows, in place.

    Args:
        output_counts: `[max_num_seqs, vocab_size]` int32, contiguous.
        rows, token_ids: `[num_rows]` int64.
    """
    places = rows * output_counts.shape[-1] + token_ids
    output_counts.view(-1).scatter_add_(0, places, torch.ones_like(places, dtype=torch.int32))


penalties = penalties_ref
count_tokens = count_tokens_ref
