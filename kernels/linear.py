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
    y = _project(x, weight, bias) if x.device.type == "cpu" else F.linear(x, weight, bias)
    if swiglu:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    if residual is not None:
        return torch.add(y, residual, out=out)
    return y if out is None else out.copy_(y)


def _project(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear`, by roads that are faster on a CPU. Times below: two AVX2 cores, weight `[49152, 576]`.

    float32 rows go as columns of `weight @ xᵀ`, with the long side first (4 rows: 8 ms against 45); a single one is
    taken twice, since the product with one column runs on one core (8 ms against 13). Where the CPU has no
    half-precision matrix instructions, torch multiplies such rows one by one; from 4 rows on it is faster to widen a
    slice of the weight that fits the cache and to use it for all rows (4 rows: 17 ms against 22; 8: 22 against 45).
    """
    num_rows = x.shape[0]
    if num_rows >= 4 and x.dtype in (torch.float16, torch.bfloat16) and not _has_half_matmul(x.dtype):
        wide = x.float()
        y = torch.cat([_columns(wide, part.float()) for part in weight.split(1024)], dim=-1)
        return (y if bias is None else y + bias).to(x.dtype)
    if x.dtype == torch.float32 and num_rows <= 256:
        y = _columns(x.expand(2, -1) if num_rows == 1 else x, weight)[:num_rows]
        return y if bias is None else y + bias
    return F.linear(x, weight, bias)


def _columns(x: Tensor, weight: Tensor) -> Tensor:
    if x.shape[0] > 256:
        return torch.mm(x, weight.t())
    # BLAS is only fast in this form if the rows of x are contiguous.
    return torch.mm(weight, x.contiguous().t()).t().contiguous()


def _has_half_matmul(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    ops = torch.ops.mkldnn
    return bool(ops._is_mkldnn_bf16_supported() if dtype == torch.bfloat16 else ops._is_mkldnn_fp16_supported())


linear = linear_ref
