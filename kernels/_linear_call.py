"""What a linear projection is called with, once for all the roads that it may take."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from . import _triton
from ._linear_plan import LinearPlan


@dataclass(frozen=True)
class LinearCall:
    """The arguments of `linear`, which describes them; every assumption of the kernels is checked here."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    norm_weight: Tensor | None = None
    norm_eps: float = 0.0
    swiglu: bool = False
    residual: Tensor | None = None
    out: Tensor | None = None

    def __post_init__(self) -> None:
        shape, in_features = (self.num_tokens, self.num_features), self.in_features
        x, weight, residual, out = self.x, self.weight, self.residual, self.result
        assert weight.shape[1] == in_features, f"x has {in_features} features and the weight takes {weight.shape[1]}"
        assert out.shape == shape, f"out must be {shape[0]} x {shape[1]}, not {tuple(out.shape)}"
        assert weight.dtype == out.dtype == x.dtype, "x, weight and out must have one dtype"
        for name, rows in (("x", x), ("weight", weight), ("out", out), ("residual", residual)):
            assert rows is None or rows.stride(1) == 1, f"the features of {name} must be contiguous"
        for name, row, size in (
            ("bias", self.bias, weight.shape[0]), ("norm_weight", self.norm_weight, in_features),
        ):  # fmt: skip
            assert row is None or row.is_contiguous(), f"{name} must be contiguous"
            assert row is None or row.shape == (size,), f"{name} needs {size} elements, not {tuple(row.shape)}"
        assert residual is None or residual.shape == shape, "residual must have the shape of the result"

    @property
    def num_tokens(self) -> int:
        return self.x.shape[0]

    @property
    def in_features(self) -> int:
        return self.x.shape[1]

    @property
    def num_features(self) -> int:
        """Of the result."""
        return self.weight.shape[0] // (2 if self.swiglu else 1)

    @cached_property
    def result(self) -> Tensor:
        return self.x.new_empty(self.num_tokens, self.num_features) if self.out is None else self.out

    @property
    def strides(self) -> tuple[int, int, int, int]:
        """Between rows of x, weight, residual and result, in elements."""
        residual = 0 if self.residual is None else self.residual.stride(0)
        return self.x.stride(0), self.weight.stride(0), residual, self.result.stride(0)

    @property
    def switches(self) -> dict[str, Any]:
        """Constants that all kernels take, and the launch option."""
        pdl = _triton.has_pdl(self.x.device)
        return {
            "K": self.in_features, "HAS_BIAS": self.bias is not None, "HAS_NORM": self.norm_weight is not None,
            "HAS_RESIDUAL": self.residual is not None, "SWIGLU": self.swiglu, "PDL": pdl, "launch_pdl": pdl,
        }  # fmt: skip

    def tiles_and_programs(self, plan: LinearPlan) -> tuple[int, int]:
        num_tiles = -(-self.num_features // plan.block_n)
        if not plan.programs_per_sm:
            return num_tiles, num_tiles
        return num_tiles, min(num_tiles, plan.programs_per_sm * _triton.num_multiprocessors(self.x.device))
