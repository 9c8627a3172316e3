"""Linear projection with the neighbours of a decoder layer fused to it."""

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _triton
from ._linear_gemv import launch_gemv
from ._linear_plan import LinearPlan, linear_plan
from ._linear_tensor import launch_tensor
from .rms_norm import rms_norm, rms_norm_ref
from .swiglu import swiglu as swiglu_op


def linear(
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
    """`epilogue(norm(x) @ weightᵀ + bias)`; see `linear_ref` for the arguments.

    Few tokens read each weight once and do everything in one kernel: dot-free for one token or two, with tensor cores
    for some tens; above that cuBLAS multiplies and the neighbours are kernels of their own. `_linear_plan` holds the
    choice.
    """
    if not _triton.on_triton(x):
        return linear_ref(x, weight, bias, norm_weight=norm_weight, norm_eps=norm_eps, swiglu=swiglu,
                          residual=residual, out=out)  # fmt: skip
    plan = linear_plan(
        x.shape[0], *weight.shape, swiglu=swiglu, element_size=x.element_size(),
        device_name=_triton.device_name(x.device), shared_memory=_triton.shared_memory(x.device),
    )  # fmt: skip
    return linear_planned(x, weight, bias, norm_weight=norm_weight, norm_eps=norm_eps, swiglu=swiglu,
                          residual=residual, out=out, plan=plan)  # fmt: skip


def linear_planned(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
    swiglu: bool = False,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    plan: LinearPlan,
) -> Tensor:
    """`linear` on the device by a given plan."""
    num_tokens, in_features = x.shape
    num_features = weight.shape[0] // (2 if swiglu else 1)
    if out is None:
        out = x.new_empty(num_tokens, num_features)
    assert weight.shape[1] == in_features, f"x has {in_features} features and the weight takes {weight.shape[1]}"
    assert out.shape == (num_tokens, num_features), f"out must be {num_tokens} x {num_features}, not {tuple(out.shape)}"
    assert weight.dtype == out.dtype == x.dtype, "x, weight and out must have one dtype"
    for name, rows in (("x", x), ("weight", weight), ("out", out), ("residual", residual)):
        assert rows is None or rows.stride(1) == 1, f"the features of {name} must be contiguous"
    for name, row in (("bias", bias), ("norm_weight", norm_weight)):
        assert row is None or row.is_contiguous(), f"{name} must be contiguous"
    assert bias is None or bias.shape == (weight.shape[0],), "bias needs one element for each row of the weight"
    assert norm_weight is None or norm_weight.shape == (in_features,), "norm_weight needs one element a feature of x"
    assert residual is None or residual.shape == out.shape, "residual must have the shape of the result"
    if num_tokens == 0:
        return out
    if plan.road == "blas":
        return _linear_blas(x, weight, bias, norm_weight, norm_eps, swiglu, residual, out)
    if plan.norm_apart and norm_weight is not None:
        x, norm_weight = rms_norm(x, norm_weight, norm_eps), None
    launch = launch_gemv if plan.road == "gemv" else launch_tensor
    launch(x, weight, bias, norm_weight, norm_eps, swiglu, residual, out, plan)
    return out


def _linear_blas(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_eps: float,
    swiglu: bool,
    residual: Tensor | None,
    out: Tensor,
) -> Tensor:
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, norm_eps)
    if residual is None:
        if swiglu:
            return swiglu_op(F.linear(x, weight, bias), out=out)
        return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)
    if bias is None and not swiglu:
        return torch.addmm(residual, x, weight.t(), out=out)
    y = F.linear(x, weight, bias)  # and not into out, which may be the residual
    return torch.add(swiglu_op(y) if swiglu else y, residual, out=out)


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
