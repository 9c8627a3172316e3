"""The greedy token of each row."""

from typing import no_type_check

import torch
from torch import Tensor

from . import _triton
from ._triton import tl, triton


def greedy_ref(logits: Tensor, *, vocab_limit: int | None = None, out: Tensor | None = None) -> Tensor:
    """The id of the largest logit of each row, a tie going to the lowest id.

    torch.argmax documents that the first of several maxima is returned, on every device (its CUDA reduction compares
    indices where values are equal); topk and sort leave the order of equal values open. Half-precision logits are
    widened, which changes no comparison and is faster on a CPU.

    NaN counts as -inf, which torch.argmax would prefer to all else: overflow in half precision makes whole rows of it,
    and the id must be one of the vocabulary even then, for the next step reads the embedding there.

    Args:
        logits: `[num_rows, vocab_size]`, any float dtype.
        vocab_limit: only ids below it can win: the tokenizer's range, where the model's vocabulary is padded.
        out: `[num_rows]` int64, written and returned when given.
    """
    values = torch.nan_to_num(logits[:, :vocab_limit].float(), nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    return torch.argmax(values, dim=-1, out=out)


@triton.jit(do_not_specialize=["limit", "num_chunks"])
@no_type_check
def _greedy_chunks_kernel(logits_ptr, values_ptr, ids_ptr, limit, num_chunks, stride, BLOCK: tl.constexpr,
                          PDL: tl.constexpr):  # fmt: skip
    """A program finds the winner of BLOCK ids of one row."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(1).to(tl.int64)
    chunk = tl.program_id(0)
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + row * stride + ids, mask=ids < limit, other=float("-inf")).to(tl.float32)
    logits = tl.where(logits == logits, logits, float("-inf"))
    largest = tl.max(logits, 0)
    winner = tl.min(tl.where((logits == largest) & (ids < limit), ids, 2147483647), 0)
    tl.store(values_ptr + row * num_chunks + chunk, largest)
    tl.store(ids_ptr + row * num_chunks + chunk, winner)


@triton.jit(do_not_specialize=["num_chunks"])
@no_type_check
def _greedy_merge_kernel(values_ptr, ids_ptr, out_ptr, num_chunks, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """A program finds the winner of the chunks of one row."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK)
    values = tl.load(values_ptr + row * num_chunks + chunk, mask=chunk < num_chunks, other=float("-inf"))
    ids = tl.load(ids_ptr + row * num_chunks + chunk, mask=chunk < num_chunks, other=2147483647)
    winner = tl.min(tl.where(values == tl.max(values, 0), ids, 2147483647), 0)
    tl.store(out_ptr + row, winner.to(tl.int64))


def greedy(logits: Tensor, *, vocab_limit: int | None = None, out: Tensor | None = None) -> Tensor:
    """The greedy token of each row; see `greedy_ref`."""
    if not _triton.on_triton(logits):
        return greedy_ref(logits, vocab_limit=vocab_limit, out=out)
    num_rows, limit = logits.shape[0], min(logits.shape[1], vocab_limit or logits.shape[1])
    if out is None:
        out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    assert logits.stride(1) == 1, "the logits of a row must be contiguous"
    assert out.shape == (num_rows,), "out must have one element a row"
    assert out.dtype == torch.int64, "token ids are int64"
    assert out.is_contiguous(), "out must be contiguous"
    if num_rows == 0:
        return out
    block = 4096
    num_chunks = _triton.cdiv(limit, block)
    values = torch.empty((num_rows, num_chunks), dtype=torch.float32, device=logits.device)
    ids = torch.empty((num_rows, num_chunks), dtype=torch.int32, device=logits.device)
    pdl = _triton.has_pdl(logits.device)
    _greedy_chunks_kernel[(num_chunks, num_rows)](
        logits, values, ids, limit, num_chunks, logits.stride(0), BLOCK=block, PDL=pdl, num_warps=8, launch_pdl=pdl
    )
    _greedy_merge_kernel[(num_rows,)](
        values, ids, out, num_chunks, BLOCK=_triton.next_power_of_2(num_chunks), PDL=pdl, num_warps=1, launch_pdl=pdl
    )
    return out
