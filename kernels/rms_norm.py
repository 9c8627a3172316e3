"""Root-mean-square norm, alone or after a residual add."""

from typing import no_type_check

import torch
from torch import Tensor

from . import _triton
from ._launch import Prepared, launch
from ._triton import tl, triton


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that references compute in: float32, or float64 where the input already is."""
    return torch.promote_types(dtype, torch.float32)


def rms_norm_ref(x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    """`x / sqrt(mean(x², -1) + eps)`, rounded to the dtype of `x`, then times `weight` in that dtype.

    The rounding before the product is the order of the Llama reference implementation; it is visible in bf16.

    Args:
        x: `[..., size]`; any strides.
        weight: `[size]`, dtype of `x`.
        out: like `x`, written and returned when given.
    """
    wide = x.to(wide_dtype(x.dtype))
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return torch.mul((wide * scale).to(x.dtype), weight, out=out)


def add_rms_norm_ref(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None, out_sum: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Residual add, then `rms_norm` of the sum: returns `(normed, sum)`.

    The sum is rounded to the dtype of `x` before it is normed, so that the fused op equals the two separate ones
    bit for bit.

    Args:
        x, residual: `[..., size]` of one dtype.
        weight: `[size]`, dtype of `x`.
        out, out_sum: like `x`; `out_sum` may be `residual` itself.
    """
    total = torch.add(x, residual, out=out_sum)
    return rms_norm_ref(total, weight, eps, out=out), total


@triton.jit
@no_type_check
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, sum_ptr,
    size, num_inner,
    x_outer, x_inner, residual_outer, residual_inner, out_outer, out_inner, sum_outer, sum_inner,
    eps,
    BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program norms one row, held in registers whole; rows are addressed by two indices, such as token and head."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    cols = tl.arange(0, BLOCK)
    mask = cols < size
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    outer = (tl.program_id(0) // num_inner).to(tl.int64)
    inner = (tl.program_id(0) % num_inner).to(tl.int64)
    dtype = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + outer * x_outer + inner * x_inner + cols, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual = residual_ptr + outer * residual_outer + inner * residual_inner + cols
        total = (x + tl.load(residual, mask=mask, other=0.0).to(tl.float32)).to(dtype)
        tl.store(sum_ptr + outer * sum_outer + inner * sum_inner + cols, total, mask=mask)
        x = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / size + eps)
    y = (x * scale).to(dtype).to(tl.float32) * weight
    tl.store(out_ptr + outer * out_outer + inner * out_inner + cols, y.to(dtype), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    """`x / sqrt(mean(x², -1) + eps) * weight`; see `rms_norm_ref`. On a device `x` has two or three dimensions."""
    if not _triton.on_triton(x):
        return rms_norm_ref(x, weight, eps, out=out)
    out = torch.empty_like(x) if out is None else out
    tensors = (x, None, weight, out, None)
    launch(_rms_norm_kernel, tensors, eps, lambda: _prepare(*tensors, eps))
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None, out_sum: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Residual add, then norm of the rounded sum: `(normed, sum)`; see `add_rms_norm_ref`."""
    if not _triton.on_triton(x):
        return add_rms_norm_ref(x, residual, weight, eps, out=out, out_sum=out_sum)
    out = torch.empty_like(x) if out is None else out
    out_sum = torch.empty_like(x) if out_sum is None else out_sum
    tensors = (x, residual, weight, out, out_sum)
    launch(_rms_norm_kernel, tensors, eps, lambda: _prepare(*tensors, eps))
    return out, out_sum


def _prepare(
    x: Tensor, residual: Tensor | None, weight: Tensor, out: Tensor, out_sum: Tensor | None, eps: float
) -> Prepared:
    size = x.shape[-1]
    assert x.dim() in (2, 3), f"x has two or three dimensions, not {x.dim()}"
    assert weight.shape == (size,), f"the weight must have {size} elements, not {tuple(weight.shape)}"
    assert weight.is_contiguous(), "the weight must be contiguous"
    assert size <= 32768, f"a row is held in registers: at most 32768 elements, not {size}"
    strides: list[int] = []
    for name, tensor in (("x", x), ("residual", residual), ("out", out), ("out_sum", out_sum)):
        if tensor is None:
            strides += [0, 0]
            continue
        assert tensor.shape == x.shape, f"{name} must have the shape of x"
        assert tensor.stride(-1) == 1 or size == 1, f"the last dimension of {name} must be contiguous"
        strides += [tensor.stride(0), tensor.stride(1) if x.dim() == 3 else 0]
    num_rows = x.numel() // size if size else 0
    block = _triton.next_power_of_2(size)
    constants = {"BLOCK": block, "HAS_RESIDUAL": residual is not None}
    arguments = (size, x.shape[1] if x.dim() == 3 else 1, *strides, eps)
    return (num_rows,), arguments, constants, min(16, max(1, block // 512))
