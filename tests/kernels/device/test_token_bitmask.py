"""Allowed tokens by the kernel against the plain rule: any vocabulary, any rows, and not a bit of anything else."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ostinato.kernels import pack_token_bitmask, token_bitmask, token_bitmask_ref

Draw = Callable[..., Tensor]
VOCABS = [1, 31, 33, 2048, 2049, 4099, 6144]  # on either side of a word, and of what one program takes


def bits(tensor: Tensor) -> Tensor:
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


@pytest.fixture
def masks() -> Callable[[int, int], Tensor]:
    """`masks(rows, vocab)` bool on the CPU: all, one token, the last one, and some tokens of a row, in turns."""

    def make(rows: int, vocab: int) -> Tensor:
        some = torch.rand(rows, vocab) < 0.5
        some[0::4] = True
        some[1::4] = torch.arange(vocab) == vocab // 2
        some[2::4] = torch.arange(vocab) == vocab - 1
        return some

    return make


@pytest.mark.parametrize("vocab", VOCABS)
def test_rows_in_any_order_of_a_wider_buffer(
    vocab: int, draw: Draw, masks: Callable[[int, int], Tensor], device: str
) -> None:
    """What lies behind each row and behind the last one is NaN and stays so."""
    allowed, rows = masks(7, vocab), torch.tensor([6, 0, 3, 2, 1])
    buffer = torch.full((6, vocab + 5), float("nan"), dtype=draw(1).dtype, device=device)
    buffer[:5, :vocab] = draw(5, vocab)
    expected = buffer.clone()
    expected[:5, :vocab] = expected[:5, :vocab].masked_fill(~allowed[rows].to(device), -torch.inf)
    reference = buffer.clone()
    bitmask = pack_token_bitmask(allowed).to(device)
    token_bitmask(buffer[:5, :vocab], rows.to(device), bitmask)
    token_bitmask_ref(reference[:5, :vocab], rows.to(device), bitmask)
    assert torch.equal(bits(buffer), bits(expected))
    assert torch.equal(bits(reference), bits(expected))


@pytest.mark.parametrize("vocab", VOCABS)
def test_a_row_with_all_bits_keeps_every_bit_of_its_logits(vocab: int, draw: Draw, device: str) -> None:
    """Of NaN, infinities and zeros, too; also where a neighbour is left nothing but one token."""
    logits = draw(2, vocab)
    odd = torch.tensor([float("nan"), -float("nan"), float("inf"), -float("inf"), 0.0, -0.0])[: vocab // 2]
    logits[:, : len(odd)] = odd.to(logits)
    before = logits.clone()
    bitmask = torch.full((2, -(-vocab // 32)), -1, dtype=torch.int32)
    bitmask[1] = pack_token_bitmask(torch.arange(vocab) == vocab - 1)
    for _ in range(2):  # twice is once
        token_bitmask(logits, torch.arange(2, device=device), bitmask.to(device))
        assert torch.equal(bits(logits[0]), bits(before[0]))
        assert torch.equal(bits(logits[1, -1:]), bits(before[1, -1:]))
        assert (logits[1, :-1] == -torch.inf).all()


def test_no_row_is_no_launch(draw: Draw, device: str) -> None:
    bitmask = torch.zeros(3, 2, dtype=torch.int32, device=device)
    token_bitmask(draw(1, 40)[:0], torch.arange(0, device=device), bitmask)
    assert not bitmask.any()


@pytest.mark.parametrize(
    ("rows", "words", "dtype", "message"),
    [
        (3, 2, torch.int32, "one element for each of 2 rows"),
        (2, 1, torch.int32, "40 tokens have 2 words of bits, not 1"),
        (2, 2, torch.int64, "int32"),
    ],
    ids=["rows", "words", "dtype"],
)
def test_what_does_not_fit_is_named(
    rows: int, words: int, dtype: torch.dtype, message: str, draw: Draw, device: str
) -> None:
    with pytest.raises(AssertionError, match=message):
        token_bitmask(
            draw(2, 40), torch.arange(rows, device=device), torch.full((4, words), -1, dtype=dtype, device=device)
        )
