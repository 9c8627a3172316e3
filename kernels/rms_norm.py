"""Root-mean-square norm, alone or after a residual add."""

import torch
from torch import Tensor


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


rms_norm = rms_norm_ref
add_rms_norm = add_rms_norm_ref
