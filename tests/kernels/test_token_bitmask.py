"""Words of allowed tokens against Python's integers, and the reference that applies them against the plain rule."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ostinato.kernels import num_bitmask_words, pack_token_bitmask, token_bitmask_ref

MASKS = st.lists(st.booleans(), min_size=1, max_size=150)


@settings(deadline=None)
@given(MASKS)
def test_a_token_s_bit_is_in_the_word_of_its_thirty_two(mask: list[bool]) -> None:
    words = pack_token_bitmask(torch.tensor(mask))
    assert (words.dtype, words.shape) == (torch.int32, (num_bitmask_words(len(mask)),))
    as_one = sum((word % 2**32) << (32 * i) for i, word in enumerate(words.tolist()))
    assert as_one == sum(1 << i for i, allowed in enumerate(mask) if allowed)


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 1000])
def test_masks_of_many_rows_are_packed_one_by_one(vocab: int) -> None:
    masks = torch.rand(2, 3, vocab) < 0.5
    words = pack_token_bitmask(masks)
    assert words.shape == (2, 3, num_bitmask_words(vocab))
    assert torch.equal(words, torch.stack([torch.stack([pack_token_bitmask(one) for one in some]) for some in masks]))


@settings(deadline=None)
@given(st.lists(st.floats(width=32), min_size=1, max_size=100), st.randoms())
def test_what_is_left_out_is_minus_infinity_and_nothing_else_changes(logits: list[float], random) -> None:
    """Whatever a logit is, NaN included; rows in any order."""
    mask = [random.random() < 0.5 for _ in logits]
    bitmask = torch.stack([torch.full((num_bitmask_words(len(logits)),), -1), pack_token_bitmask(torch.tensor(mask))])
    rows = torch.tensor([logits, logits])
    token_ids = torch.tensor([1, 0])
    token_bitmask_ref(rows, token_ids, bitmask.to(torch.int32))
    expected = torch.tensor([[x if on else float("-inf") for x, on in zip(logits, mask, strict=True)], logits])
    assert torch.equal(rows.view(torch.int32), expected.view(torch.int32))


def test_every_dtype_and_rows_of_a_wider_buffer(dtype: torch.dtype, device: str) -> None:
    buffer = torch.full((3, 50), float("nan"), dtype=dtype, device=device)
    buffer[:, :45] = torch.arange(45)
    allowed = torch.arange(45) % 3 == torch.arange(3)[:, None]
    token_bitmask_ref(buffer[:, :45], torch.arange(3, device=device), pack_token_bitmask(allowed).to(device))
    kept: Tensor = buffer[:, :45].isfinite().cpu()
    assert torch.equal(kept, allowed)
    assert buffer[:, 45:].isnan().all()
