"""Linear projection with the neighbours of a decoder layer fused to it."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _triton
from ._linear_call import LinearCall
from ._linear_gemv import launch_gemv
from ._linear_plan import LinearPlan, linear_plan
from ._linear_tensor import launch_tensor
from ._linear_tile import launch_tile
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
    for some tens. Above that the norm is a kernel of its own, and tiles or cuBLAS multiply; with cuBLAS the activation
    is one, too. `_linear_plan` holds the choice.
    """
    if not _triton.on_triton(x):
        return linear_ref(x, weight, bias, norm_weight=norm_weight, norm_eps=norm_eps, swiglu=swiglu,
                          residual=residual, out=out)  # fmt: skip
    plan = linear_plan(
        x.shape[0], *weight.shape, swiglu=swiglu, element_size=x.element_size(),
        device_name=_triton.device_name(x.device), shared_memory=_triton.shared_memory(x.device),
    )  # fmt: skip
    if plan.road == "blas":
        return _linear_blas(x, weight, bias, norm_weight, norm_eps, swiglu, residual, out)
    if plan.road == "tile":
        return _linear_tile(x, weight, bias, norm_weight, norm_eps, swiglu, residual, out, plan)
    return linear_planned(LinearCall(x, weight, bias, norm_weight, norm_eps, swiglu, residual, out), plan)


def linear_planned(call: LinearCall, plan: LinearPlan) -> Tensor:
    """`linear` on the device by a given plan."""
    if call.num_tokens == 0:
        return call.result
    arguments = (
        call.x, call.weight, call.bias, call.norm_weight, call.norm_eps, call.swiglu, call.residual, call.result
    )  # fmt: skip
    if plan.road == "blas":
        return _linear_blas(*arguments)
    if plan.road == "tile":
        return _linear_tile(*arguments, plan)
    if call.norm_weight is not None and plan.norm_apart:
        x = rms_norm(call.x, call.norm_weight, call.norm_eps)
        call = replace(call, x=x, norm_weight=None, out=call.result)
    launch = launch_gemv if plan.road == "gemv" else launch_tensor
    launch(call, plan)
    return call.result


def _linear_tile(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_eps: float,
    swiglu: bool,
    residual: Tensor | None,
    out: Tensor | None,
    plan: LinearPlan,
) -> Tensor:
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, norm_eps)
    if out is None:
        out = x.new_empty(x.shape[0], weight.shape[0] // (2 if swiglu else 1))
    launch_tile(x, weight, bias, swiglu, residual, out, plan)
    return out


def _linear_blas(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_eps: float,
    swiglu: bool,
    residual: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    """By torch, which checks what it is given, but for what it would stretch."""
    shape = x.shape[0], weight.shape[0] // (2 if swiglu else 1)
    assert out is None or out.shape == shape, f"out must be {shape[0]} x {shape[1]}, not {tuple(out.shape)}"
    assert residual is None or residual.shape == shape, "residual must have the shape of the result"
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
