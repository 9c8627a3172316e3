"""Which tokens a row may have, a bit each: what grammars and lists of allowed tokens come down to."""

from typing import no_type_check

import torch
from torch import Tensor

from . import _triton
from ._triton import tl, triton

_WORDS = 64  # of a row, that a program applies


def num_bitmask_words(vocab_size: int) -> int:
    """Words of 32 bits that hold a bit for each token."""
    return -(-vocab_size // 32)


def pack_token_bitmask(allowed: Tensor) -> Tensor:
    """The words of bool masks: `[..., vocab_size]` on a CPU to `[..., num_bitmask_words(vocab_size)]` int32.

    A token's bit is number `id % 32` of word `id // 32`, from the lowest on; bits beyond the vocabulary are 0. Eight
    bools are packed by one product, which moves each one's bit to a place of its own in the highest byte: some 60 µs
    for 128k tokens.
    """
    padding = -allowed.shape[-1] % 32
    eights = torch.nn.functional.pad(allowed, (0, padding)).view(torch.int64)
    return ((eights * 0x0102040810204080) >> 56).to(torch.uint8).view(torch.int32)


def token_bitmask_ref(logits: Tensor, rows: Tensor, bitmask: Tensor) -> None:
    """Minus infinity to the logits whose bit is not set, in place; no other bit of any logit changes.

    Args:
        logits: `[num_rows, vocab_size]`, any float dtype.
        rows: `[num_rows]` int64, which row of the bitmask each belongs to.
        bitmask: `[max_num_seqs, num_bitmask_words(vocab_size)]` int32, see `pack_token_bitmask`; -1 throughout a row
            leaves all tokens.
    """
    bits = bitmask[rows][:, :, None] >> torch.arange(32, dtype=torch.int32, device=bitmask.device)
    logits.masked_fill_((bits & 1).flatten(1)[:, : logits.shape[1]] == 0, -torch.inf)


@triton.jit(do_not_specialize=["vocab_size", "num_words"])
@no_type_check
def _token_bitmask_kernel(
    logits_ptr, rows_ptr, bitmask_ptr, stride, vocab_size, num_words, WORDS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """A program takes the tokens of WORDS words of one row, and leaves at once where all are allowed.

    Logits are read and written back: whole vectors take less time than single ones here and there.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    slot = tl.program_id(1).to(tl.int64)
    row = tl.load(rows_ptr + slot)
    word = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    words = tl.load(bitmask_ptr + row * num_words + word, mask=word < num_words, other=-1)
    if tl.sum((words != -1).to(tl.int32), 0) > 0:
        bit = tl.arange(0, 32)
        allowed = ((words[:, None] >> bit[None, :]) & 1) != 0
        ids = word[:, None] * 32 + bit[None, :]
        place = logits_ptr + slot * stride + ids
        if (tl.program_id(0) + 1) * WORDS * 32 <= vocab_size:
            tl.store(place, tl.where(allowed, tl.load(place), float("-inf")))
        else:
            inside = ids < vocab_size
            tl.store(place, tl.where(allowed, tl.load(place, mask=inside), float("-inf")), mask=inside)


def token_bitmask(logits: Tensor, rows: Tensor, bitmask: Tensor) -> None:
    """Minus infinity to the logits whose bit is not set, in place; see `token_bitmask_ref`. One launch."""
    if not _triton.on_triton(logits):
        return token_bitmask_ref(logits, rows, bitmask)
    num_rows, vocab_size = logits.shape
    num_words = num_bitmask_words(vocab_size)
    assert logits.stride(1) == 1 or vocab_size == 1, "the logits of a row must be contiguous"
    assert rows.shape == (num_rows,), f"rows needs one element for each of {num_rows} rows"
    assert rows.dtype == torch.int64, "rows must be int64"
    assert rows.is_contiguous(), "rows must be contiguous"
    assert bitmask.shape[1] == num_words, f"{vocab_size} tokens have {num_words} words of bits, not {bitmask.shape[1]}"
    assert bitmask.dtype == torch.int32, "a bitmask is int32"
    assert bitmask.is_contiguous(), "the bitmask must be contiguous"
    if num_rows == 0:
        return
    pdl = _triton.has_pdl(logits.device)
    _token_bitmask_kernel[(_triton.cdiv(num_words, _WORDS), num_rows)](
        logits, rows, bitmask, logits.stride(0), vocab_size, num_words,
        WORDS=_WORDS, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
