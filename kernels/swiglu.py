"""The gated activation of an MLP, where it is not fused to a projection."""

from typing import no_type_check

import torch.nn.functional as F
from torch import Tensor

from . import _triton
from ._launch import Prepared, launch
from ._triton import tl, triton
from .rms_norm import wide_dtype


def swiglu_ref(gate_up: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`silu(gate) * up`, computed in float32 and rounded once.

    Args:
        gate_up: `[num_tokens, 2 size]`, columns gate | up.
        out: `[num_tokens, size]`, written and returned when given.
    """
    gate, up = gate_up.to(wide_dtype(gate_up.dtype)).chunk(2, dim=-1)
    result = (F.silu(gate) * up).to(gate_up.dtype)
    return result if out is None else out.copy_(result)


@triton.jit
@no_type_check
def _swiglu_kernel(x_ptr, out_ptr, size, x_stride, out_stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """A program does BLOCK columns of one row."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < size
    gate = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + size + cols, mask=mask, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * out_stride + cols, y.to(out_ptr.dtype.element_ty), mask=mask)


def swiglu(gate_up: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`silu(gate) * up`; see `swiglu_ref`."""
    if not _triton.on_triton(gate_up):
        return swiglu_ref(gate_up, out=out)
    num_tokens, width = gate_up.shape
    if out is None:
        out = gate_up.new_empty((num_tokens, width // 2))
    launch(_swiglu_kernel, (gate_up, out), None, lambda: _prepare(gate_up, out))
    return out


def _prepare(gate_up: Tensor, out: Tensor) -> Prepared:
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    assert out.shape == (num_tokens, size), f"out must be {num_tokens} x {size}, not {tuple(out.shape)}"
    assert gate_up.stride(1) == out.stride(1) == 1, "columns must be contiguous"
    block = min(1024, _triton.next_power_of_2(size))
    arguments = (size, gate_up.stride(0), out.stride(0))
    return (num_tokens, _triton.cdiv(size, block)), arguments, {"BLOCK": block}, 4
