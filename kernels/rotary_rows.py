"""The rotations of a step's tokens."""

from typing import no_type_check

import torch
from torch import Tensor

from . import _triton
from ._launch import Prepared, launch
from ._triton import tl, triton


def rotary_rows_ref(
    positions: Tensor, cos: Tensor, sin: Tensor, *, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """The rows of both rotary tables at each position: two tensors `[num_tokens, rotary_dim / 2]` float32.

    A position past the tables gets the rotation of the last one: a decode that runs ahead of the host may overshoot by
    a few tokens, which are dropped.

    Args:
        positions: `[num_tokens]` int64, none negative.
        cos, sin: `[max_position, rotary_dim / 2]` float32.
        out: the results' buffers, written and returned when given.
    """
    rows = positions.clamp(max=cos.shape[0] - 1)
    out_cos, out_sin = out if out is not None else (None, None)
    return torch.index_select(cos, 0, rows, out=out_cos), torch.index_select(sin, 0, rows, out=out_sin)


@triton.jit(do_not_specialize=["last_row"])
@no_type_check
def _rotary_rows_kernel(positions_ptr, cos_ptr, sin_ptr, out_cos_ptr, out_sin_ptr, last_row, SIZE: tl.constexpr,
                        BLOCK: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """A program copies the two rows of one token."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    row = tl.minimum(tl.load(positions_ptr + token), last_row)
    cos = tl.load(cos_ptr + row * SIZE + cols, mask=cols < SIZE, other=0.0)
    sin = tl.load(sin_ptr + row * SIZE + cols, mask=cols < SIZE, other=0.0)
    tl.store(out_cos_ptr + token * SIZE + cols, cos, mask=cols < SIZE)
    tl.store(out_sin_ptr + token * SIZE + cols, sin, mask=cols < SIZE)


def rotary_rows(
    positions: Tensor, cos: Tensor, sin: Tensor, *, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """The rows of both rotary tables at each position; see `rotary_rows_ref`."""
    if not _triton.on_triton(positions):
        return rotary_rows_ref(positions, cos, sin, out=out)
    if out is None:
        shape = (positions.shape[0], cos.shape[1])
        out = cos.new_empty(shape), cos.new_empty(shape)
    tensors = (positions, cos, sin, *out)
    launch(_rotary_rows_kernel, tensors, None, lambda: _prepare(*tensors))
    return out


def _prepare(positions: Tensor, cos: Tensor, sin: Tensor, out_cos: Tensor, out_sin: Tensor) -> Prepared:
    num_tokens, size = positions.shape[0], cos.shape[1]
    assert positions.dtype == torch.int64, "positions are int64"
    assert positions.is_contiguous(), "positions must be contiguous"
    assert cos.shape == sin.shape, "the two tables must have one shape"
    for name, table in (("cos", cos), ("sin", sin), ("out", out_cos), ("out", out_sin)):
        assert table.is_contiguous(), f"{name} must be contiguous"
    assert out_cos.shape == out_sin.shape == (num_tokens, size), f"out must be two of {num_tokens} x {size}"
    constants = {"SIZE": size, "BLOCK": _triton.next_power_of_2(size)}
    return (num_tokens,), (cos.shape[0] - 1,), constants, 1
