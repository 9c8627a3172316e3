"""Allowed tokens that a request's own function names anew for each of its tokens."""

from collections.abc import Collection
from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from ..kernels import pack_token_bitmask
from .errors import RequestError, own_code
from .sampler import Sampler
from .sequence import Sequence


def has_mask_function(sequences: SequenceOf[Sequence]) -> bool:
    """Whether the host must have seen the tokens so far before the next step of these can be sampled."""
    return any(callable(sequence.params.allowed_token_ids) for sequence in sequences)


def ask_for_masks(sampler: Sampler, sequences: SequenceOf[Sequence], rows: SequenceOf[int]) -> None:
    """Call each sequence's function, if it has one, and hand the device what the next token may be, by one copy.

    A sequence whose function fails gets an `error`, and all tokens; the others do not notice.

    Args:
        rows: where the sequences stand, one each.
    """
    asked = [(row, one) for row, one in zip(rows, sequences, strict=True) if callable(one.params.allowed_token_ids)]
    if not asked:
        return
    allowed = torch.ones(len(asked), sampler.vocab_size, dtype=torch.bool)
    for mask, (_, sequence) in zip(allowed, asked, strict=True):
        try:
            mask.copy_(_ask(sequence, sampler.vocab_size))
        except RequestError as error:
            sequence.error = error
    sampler.set_masks([row for row, _ in asked], pack_token_bitmask(allowed))


def _ask(sequence: Sequence, vocab_size: int) -> Tensor:
    """What a sequence's function allows: `[vocab_size]` bool, with at least one token that may come now."""
    params, output_ids = sequence.params, tuple(sequence.output_ids)
    assert callable(params.allowed_token_ids), "a list is known when the row is set"
    with own_code(f"allowed_token_ids, for output token {len(output_ids)},"):
        ids = params.allowed_token_ids(sequence.prompt_ids, output_ids)
        mask = _mask(ids, vocab_size)
        if len(output_ids) < params.min_tokens and not _any_but(mask, sequence.stop_ids):
            raise ValueError(
                f"min_tokens {params.min_tokens} holds off every token that is allowed, stop and end ids all, "
                f"got {ids!r}"
            )
        return mask


def _mask(ids: SequenceOf[int] | Tensor, vocab_size: int) -> Tensor:
    """Bool mask of the vocabulary, from ids or from a mask."""
    if isinstance(ids, Tensor) and ids.dtype == torch.bool:
        mask = ids.cpu()
    else:
        mask = torch.zeros(vocab_size, dtype=torch.bool)
        index = torch.as_tensor(ids, dtype=torch.int64, device="cpu")
        if not bool(((index >= 0) & (index < vocab_size)).all()):
            raise ValueError(f"allowed_token_ids must be in 0 ... {vocab_size - 1}, got {ids!r}")
        mask[index] = True
    if mask.shape != (vocab_size,) or not bool(mask.any()):
        raise ValueError(f"allowed_token_ids must allow at least 1 of {vocab_size} tokens, got {ids!r}")
    return mask


def _any_but(mask: Tensor, ids: Collection[int]) -> bool:
    """Whether the mask holds a token that is none of `ids`."""
    return bool(mask.index_fill(0, torch.tensor(sorted(ids), dtype=torch.int64), False).any())
