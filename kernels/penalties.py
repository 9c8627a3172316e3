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
    """Penalised logits, [num_rows, vocab] float32.

    logits:        [num_rows, vocab] any float dtype
    in_prompt:     [num_rows, vocab] bool
    output_counts: [num_rows, vocab] int32, how often each token was generated
    repetition:    [num_rows] float32, once per token of prompt or output: l / r where l > 0, else l * r
                   (Keskar et al., "CTRL", 2019, with the sign rule that transformers and vLLM use)
    presence, frequency: [num_rows] float32, output only: l - frequency * count - presence * (count > 0)

    The neutral values 1, 0, 0 leave a row bit for bit as it was.
    """
    values = logits.float()
    generated = output_counts > 0
    divisor = torch.where(in_prompt | generated, repetition[:, None], 1.0)
    values = torch.where(values > 0, values / divisor, values * divisor)
    return torch.sub(values, frequency[:, None] * output_counts + presence[:, None] * generated, out=out)


def count_tokens_ref(output_counts: Tensor, rows: Tensor, token_ids: Tensor) -> None:
    """Count one generated token for each of the given rows, in place.

    output_counts: [max_num_seqs, vocab] int32, contiguous;  rows, token_ids: [num_rows] int64
    """
    places = rows * output_counts.shape[-1] + token_ids
    output_counts.view(-1).scatter_add_(0, places, torch.ones_like(places, dtype=torch.int32))
