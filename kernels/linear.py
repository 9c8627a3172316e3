"""Linear projection with the neighbours of a decoder layer fused to it."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .rms_norm import rms_norm_ref


def linear_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
    swiglu: bool = False,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`epilogue(norm(x) @ weightᵀ + bias)`.

    Args:
        x: `[num_tokens, in_features]`.
        weight: `[out_features, in_features]`, as stored in checkpoints.
        bias: `[out_features]`.
        norm_weight: `[in_features]`; when given, `x` goes through `rms_norm` with `norm_eps` first.
        swiglu: rows of `weight` are gate then up; the result is `silu(gate) * up`, `[num_tokens, out_features / 2]`.
        residual: added last, in the shape of the result.
        out: the result's buffer, written and returned when given; may be `residual` itself.
    """
    if norm_weight is not None:
        x = rms_norm_ref(x, norm_weight, norm_eps)
    y = F.linear(x, weight, bias)
    if swiglu:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    if residual is not None:
        return torch.add(y, residual, out=out)
    return y if out is None else out.copy_(y)


linear = linear_ref
