"""Embedding gather."""

from typing import no_type_check

import torch
from torch import Tensor

from . import _triton
from ._launch import Prepared, launch
from ._triton import tl, triton


def embedding_ref(token_ids: Tensor, weight: Tensor, *, scale: float = 1.0, out: Tensor | None = None) -> Tensor:
    """Rows of `weight` by token id, times `scale`.

    Args:
        token_ids: `[num_tokens]` int64, each in `[0, vocab_size)`.
        weight: `[vocab_size, hidden_size]`.
        out: `[num_tokens, hidden_size]` in the dtype of `weight`, written and returned when given.
    """
    rows = torch.index_select(weight, 0, token_ids, out=out)
    return rows if scale == 1.0 else rows.mul_(scale)


@triton.jit(do_not_specialize=["size"])
@no_type_check
def _embedding_kernel(ids_ptr, weight_ptr, out_ptr, size, weight_stride, out_stride, scale, BLOCK: tl.constexpr,
                      PDL: tl.constexpr):  # fmt: skip
    """A program copies BLOCK columns of one row."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids_ptr + token)
    values = tl.load(weight_ptr + row * weight_stride + cols, mask=cols < size, other=0.0)
    # Times 1 in float32 and back changes no value.
    values = (values.to(tl.float32) * scale).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * out_stride + cols, values, mask=cols < size)


def embedding(token_ids: Tensor, weight: Tensor, *, scale: float = 1.0, out: Tensor | None = None) -> Tensor:
    """Rows of `weight` by token id; see `embedding_ref`. An id outside the table is not caught on a device."""
    if not _triton.on_triton(weight):
        return embedding_ref(token_ids, weight, scale=scale, out=out)
    if out is None:
        out = weight.new_empty((token_ids.shape[0], weight.shape[1]))
    tensors = (token_ids, weight, out)
    launch(_embedding_kernel, tensors, scale, lambda: _prepare(*tensors, scale))
    return out


def _prepare(token_ids: Tensor, weight: Tensor, out: Tensor, scale: float) -> Prepared:
    num_tokens, size = token_ids.shape[0], weight.shape[1]
    assert token_ids.dtype == torch.int64, "token ids are int64"
    assert token_ids.is_contiguous(), "token ids must be contiguous"
    assert out.shape == (num_tokens, size), f"out must be {num_tokens} x {size}, not {tuple(out.shape)}"
    assert out.dtype == weight.dtype, "out must have the dtype of the weight"
    assert weight.stride(1) == out.stride(1) == 1, "columns must be contiguous"
    block = min(1024, _triton.next_power_of_2(size))
    arguments = (size, weight.stride(0), out.stride(0), float(scale))
    return (num_tokens, _triton.cdiv(size, block)), arguments, {"BLOCK": block}, 4
