from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato.kernels import linear, linear_ref, swiglu, swiglu_ref
from ostinato.kernels._linear_call import LinearCall
from ostinato.kernels._linear_plan import LinearPlan
from ostinato.kernels.linear import linear_planned

Draw = Callable[..., Tensor]
Near = Callable[[Tensor, Tensor], None]

GEMV = LinearPlan("gemv", 4, 256, 1, early=2)
TENSOR = LinearPlan("tensor", 32, 64, 4, num_stages=3)
SPLIT = LinearPlan("tensor", 64, 64, 4, split_k=3)
SLICES = LinearPlan("tensor", 16, 16, 4, num_stages=3, slices=4)
TILE = LinearPlan("tile", 32, 64, 4, num_stages=3, norm_apart=True, block_m=32)
CASES = [
    pytest.param(1, 10, 576, "norm", GEMV, id="gemv-1-norm"),
    pytest.param(1, 7, 576, "bias residual", LinearPlan("gemv", 2, 512, 2, early=1), id="gemv-1-bias-residual"),
    pytest.param(1, 11, 520, "norm swiglu bias", LinearPlan("gemv", 2, 256, 1, programs_per_sm=1), id="gemv-1-loop"),
    pytest.param(2, 33, 300, "norm swiglu", LinearPlan("gemv", 4, 256, 1, early=1), id="gemv-2-swiglu"),
    pytest.param(3, 9, 576, "norm bias residual", GEMV, id="gemv-3-all"),
    pytest.param(4, 30, 256, "residual", LinearPlan("gemv", 2, 256, 1, programs_per_sm=1), id="gemv-4-loop"),
    pytest.param(5, 40, 200, "", TENSOR, id="tensor-5-plain"),
    pytest.param(7, 72, 192, "norm bias residual", TENSOR, id="tensor-7-all"),
    pytest.param(17, 40, 200, "norm swiglu bias", replace(TENSOR, early=0), id="tensor-17-swiglu"),
    pytest.param(9, 40, 256, "norm residual", LinearPlan("tensor", 16, 64, 4, split_k=2), id="tensor-9-split"),
    pytest.param(33, 300, 320, "norm swiglu bias residual", SPLIT, id="tensor-33-split-all"),
    pytest.param(9, 40, 256, "norm swiglu", LinearPlan("tensor", 16, 64, 4, norm_apart=True), id="tensor-9-norm-apart"),
    pytest.param(5, 150, 200, "norm residual", replace(TENSOR, programs_per_sm=1), id="tensor-5-loop"),
    pytest.param(7, 72, 200, "norm bias residual", SLICES, id="slices-7-all"),
    pytest.param(17, 70, 300, "norm swiglu", replace(SLICES, early=2, programs_per_sm=1), id="slices-17-loop"),
    pytest.param(3, 100, 256, "norm bias", replace(SLICES, early=0, split_k=2, programs_per_sm=1), id="slices-3-split"),
    pytest.param(40, 40, 192, "norm bias residual", TILE, id="tile-40-all"),
    pytest.param(70, 72, 200, "norm swiglu bias", TILE, id="tile-70-swiglu"),
    pytest.param(33, 100, 320, "norm swiglu residual", replace(TILE, split_k=2), id="tile-33-split"),
    pytest.param(17, 40, 197, "residual", TILE, id="tile-17-pointers"),
    pytest.param(70, 24, 64, "norm residual", LinearPlan("blas"), id="blas-70-norm-residual"),
    pytest.param(70, 24, 64, "norm swiglu bias", LinearPlan("blas"), id="blas-70-swiglu"),
    pytest.param(3, 24, 64, "norm swiglu bias residual", LinearPlan("blas"), id="blas-3-all"),
    pytest.param(3, 24, 64, "bias", LinearPlan("blas"), id="blas-3-bias"),
]  # fmt: skip


def arguments(draw: Draw, tokens: int, features: int, inputs: int, extras: str) -> dict[str, Any]:
    rows = 2 * features if "swiglu" in extras else features
    made: dict[str, Any] = {"x": draw(tokens, inputs), "weight": draw(rows, inputs, scale=inputs**-0.5)}
    if "bias" in extras:
        made["bias"] = draw(rows)
    if "norm" in extras:
        made |= {"norm_weight": draw(inputs), "norm_eps": 1e-5}
    if "residual" in extras:
        made["residual"] = draw(tokens, features)
    return made | {"swiglu": "swiglu" in extras}


def wide(made: dict[str, Any]) -> dict[str, Any]:
    return {name: value.double() if isinstance(value, Tensor) else value for name, value in made.items()}


@pytest.mark.parametrize(("tokens", "features", "inputs", "extras", "plan"), CASES)
def test_against_float64(
    tokens: int, features: int, inputs: int, extras: str, plan: LinearPlan, draw: Draw, assert_near: Near,
    nan_poison: Callable[..., Tensor], device: str, dtype: torch.dtype,
) -> None:  # fmt: skip
    made = arguments(draw, tokens, features, inputs, extras)
    buffer = nan_poison(tokens + 1, features + 8, dtype=dtype, device=device)
    out = buffer[:tokens, :features]
    assert linear_planned(LinearCall(**made, out=out), plan) is out
    assert_near(out, linear_ref(**wide(made)))
    assert buffer[tokens:].isnan().all()
    assert buffer[:, features:].isnan().all()


@pytest.mark.parametrize("tokens", [1, 3, 5, 20, 70])
def test_strided_rows(tokens: int, draw: Draw, assert_near: Near) -> None:
    """B48: x, weight and residual as parts of larger buffers, at odd offsets; the output is the residual itself."""
    x, weight = draw(tokens, 200)[:, 3:163], draw(50, 171)[2:, 5:165]
    residual = draw(tokens, 60)[:, 1:49]
    truth = linear_ref(x.double(), weight.double(), residual=residual.double())
    assert linear(x, weight, residual=residual, out=residual) is residual
    assert_near(residual, truth)


@pytest.mark.parametrize("left", [3, 8], ids=["odd", "aligned"])
@pytest.mark.parametrize("plan", [GEMV, TENSOR, SPLIT, SLICES, TILE], ids=["gemv", "tensor", "split", "slices", "tile"])
def test_nothing_around_a_matrix_reaches_the_result(plan: LinearPlan, left: int, draw: Draw, assert_near: Near) -> None:
    """B48: tokens and weights, gates and ups among them, lie in buffers of NaN; chunks reach past the columns. Where
    rows are aligned a tile has its operands by descriptors."""
    made = arguments(draw, 4, 20, 150, "norm swiglu bias residual")
    for name, (rows, columns) in (("x", made["x"].shape), ("weight", made["weight"].shape)):
        buffer = draw(rows + 3, columns + 18).fill_(float("nan"))
        inner = buffer[1:-2, left : left + columns]
        made[name] = inner.copy_(made[name])
    assert_near(linear_planned(LinearCall(**made), plan), linear_ref(**wide(made)))


@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 16, 33, 64, 65])
def test_planned_by_itself(tokens: int, draw: Draw, assert_near: Near) -> None:
    made = arguments(draw, tokens, 20, 64, "norm swiglu")
    assert_near(linear(**made), linear_ref(**wide(made)))


@pytest.mark.parametrize("plan", [GEMV, TENSOR], ids=["gemv", "tensor"])
def test_a_row_does_not_depend_on_its_neighbours(plan: LinearPlan, draw: Draw) -> None:
    made = arguments(draw, 4, 12, 320, "norm")
    first = linear_planned(LinearCall(**made), plan)
    made["x"][1:] = float("inf")
    assert torch.equal(linear_planned(LinearCall(**made), plan)[0], first[0])


def test_large_squares_do_not_overflow(draw: Draw, assert_near: Near) -> None:
    """B59: a float16 row of 300s, whose squares do not fit float16, is normed to ones."""
    made = arguments(draw, 1, 16, 64, "norm")
    made["x"].fill_(300.0)
    assert_near(linear(**made), linear_ref(**wide(made)))


def test_refuses_what_it_does_not_compute(draw: Draw) -> None:
    with pytest.raises(AssertionError, match="x has 8 features and the weight takes 9"):
        linear(draw(1, 8), draw(4, 9))
    with pytest.raises(AssertionError, match="contiguous"):
        linear(draw(8, 2).t(), draw(4, 8))


@pytest.mark.parametrize(("tokens", "size"), [(1, 7), (3, 1536), (20, 1100)])
def test_swiglu(tokens: int, size: int, draw: Draw, assert_near: Near, nan_poison: Callable[..., Tensor]) -> None:
    gate_up = draw(tokens, 2 * size + 3)[:, 2 : 2 * size + 2]
    out = nan_poison(tokens, size, dtype=gate_up.dtype, device=gate_up.device)
    assert_near(swiglu(gate_up, out=out), swiglu_ref(gate_up.double()))
