"""What a layer adds to the residual stream, where that is more than a projection: normed first, or scaled."""

from typing import no_type_check

import torch
from torch import Tensor

from . import _triton
from ._triton import tl, triton
from .rms_norm import rms_norm_ref


def residual_add_ref(
    x: Tensor,
    residual: Tensor,
    *,
    scale: float = 1.0,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """`residual + scale * norm(x)`, rounded to the dtype of `x` after each of the three.

    Args:
        x, residual: `[num_tokens, size]` of one dtype.
        scale: a multiplier of all elements.
        norm_weight: `[size]`; when given, `x` goes through `rms_norm` with `norm_eps` first.
        out: like `x`, written and returned when given; may be `x` or `residual` itself.
    """
    if norm_weight is not None:
        x = rms_norm_ref(x, norm_weight, norm_eps)
    if scale != 1.0:
        x = x * scale
    return torch.add(residual, x, out=out)


@triton.jit
@no_type_check
def _residual_add_kernel(
    x_ptr, residual_ptr, norm_weight_ptr, out_ptr, size, x_stride, residual_stride, out_stride, scale, norm_eps,
    BLOCK: tl.constexpr, HAS_NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program does one row, held in registers whole."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    cols = tl.arange(0, BLOCK)
    mask = cols < size
    if HAS_NORM:
        weight = tl.load(norm_weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    dtype = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + row * residual_stride + cols, mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        x = x * tl.rsqrt(tl.sum(x * x, 0) / size + norm_eps)
        x = (x.to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)
    x = (x * scale).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * out_stride + cols, (residual + x).to(dtype), mask=mask)


def residual_add(
    x: Tensor,
    residual: Tensor,
    *,
    scale: float = 1.0,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """`residual + scale * norm(x)`; see `residual_add_ref` for the arguments."""
    if not _triton.on_triton(x):
        return residual_add_ref(x, residual, scale=scale, norm_weight=norm_weight, norm_eps=norm_eps, out=out)
    num_tokens, size = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    assert residual.shape == out.shape == x.shape, "x, residual and out must have one shape"
    assert residual.dtype == out.dtype == x.dtype, "x, residual and out must have one dtype"
    assert size <= 32768, f"a row is held in registers: at most 32768 elements, not {size}"
    for name, rows in (("x", x), ("residual", residual), ("out", out)):
        assert rows.stride(1) == 1 or size == 1, f"the elements of a row of {name} must be contiguous"
    if norm_weight is not None:
        assert norm_weight.shape == (size,), f"the norm weight must have {size} elements, not {norm_weight.shape}"
        assert norm_weight.is_contiguous(), "the norm weight must be contiguous"
    if num_tokens == 0:
        return out
    pdl = _triton.has_pdl(x.device)
    block = _triton.next_power_of_2(size)
    _residual_add_kernel[(num_tokens,)](
        x, residual, norm_weight, out, size, x.stride(0), residual.stride(0), out.stride(0), float(scale), norm_eps,
        BLOCK=block, HAS_NORM=norm_weight is not None, PDL=pdl,
        num_warps=min(16, max(1, block // 512)), launch_pdl=pdl,
    )  # fmt: skip
    return out
