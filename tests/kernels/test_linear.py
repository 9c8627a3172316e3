from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ostinato.kernels import linear_ref, rms_norm_ref

# num_tokens, in_features, out_features
SHAPES = [(1, 1, 2), (3, 7, 10), (5, 96, 6), (33, 20, 34), (0, 8, 4)]


def exact_linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, swiglu: bool, residual: Tensor | None) -> Tensor:
    """Output by output, in float64."""
    x, weight = x.cpu().double(), weight.cpu().double()
    num_tokens, num_rows = len(x), len(weight)
    y = torch.zeros(num_tokens, num_rows, dtype=torch.float64)
    for token in range(num_tokens):
        for row in range(num_rows):
            y[token, row] = (x[token] * weight[row]).sum() + (0.0 if bias is None else bias[row].item())
    if swiglu:
        gate, up = y[:, : num_rows // 2], y[:, num_rows // 2 :]
        y = gate / (1 + (-gate).exp()) * up
    return y if residual is None else y + residual.cpu().double()


@pytest.mark.parametrize("residual", [False, True], ids=["", "residual"])
@pytest.mark.parametrize("swiglu", [False, True], ids=["", "swiglu"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(("num_tokens", "in_features", "out_features"), SHAPES, ids=str)
def test_equals_loops(
    num_tokens: int,
    in_features: int,
    out_features: int,
    bias: bool,
    swiglu: bool,
    residual: bool,
    dtype: torch.dtype,
    device: str,
    assert_near: Callable[..., None],
) -> None:
    x = torch.randn(num_tokens, in_features).to(device, dtype)
    weight = (torch.randn(out_features, in_features) / in_features**0.5).to(device, dtype)
    b = torch.randn(out_features).to(device, dtype) if bias else None
    r = torch.randn(num_tokens, out_features // (2 if swiglu else 1)).to(device, dtype) if residual else None

    result = linear_ref(x, weight, b, swiglu=swiglu, residual=r)

    assert result.dtype == dtype
    # Roundings allowed: of gate, up, silu, their product and the sum, some of them twice as large as the result.
    assert_near(result, exact_linear(x, weight, b, swiglu=swiglu, residual=r), 8)


def test_the_norm_prologue_is_rms_norm(dtype: torch.dtype) -> None:
    x, weight, norm_weight = torch.randn(5, 24).to(dtype), torch.randn(7, 24).to(dtype), torch.randn(24).to(dtype)
    fused = linear_ref(x, weight, norm_weight=norm_weight, norm_eps=1e-2)
    assert torch.equal(fused, linear_ref(rms_norm_ref(x, norm_weight, 1e-2), weight))


def test_swiglu_takes_the_first_half_as_gate() -> None:
    """One feature in; gate 0 closes, a large gate passes `gate * up`, a very negative one closes without a NaN."""
    up = torch.tensor([[3.0], [3.0], [3.0]])
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        gates = torch.tensor([[0.0], [64.0], [-3e4]])
        result = linear_ref(torch.ones(1, 1, dtype=dtype), torch.cat((gates, up)).to(dtype), swiglu=True)
        assert result.tolist() == [[0.0, 192.0, 0.0]]


@pytest.mark.parametrize("residual", [False, True], ids=["", "residual"])
@pytest.mark.parametrize("swiglu", [False, True], ids=["", "swiglu"])
@pytest.mark.parametrize("num_tokens", [1, 2, 8, 9])
def test_the_result_is_contiguous_and_the_same_with_out(
    num_tokens: int, swiglu: bool, residual: bool, dtype: torch.dtype
) -> None:
    """Other strides would reach the next op, whose sums may then differ in their last bit from those after `out=`."""
    x, weight, bias = torch.randn(num_tokens, 24).to(dtype), torch.randn(40, 24).to(dtype), torch.randn(40).to(dtype)
    r = torch.randn(num_tokens, 20 if swiglu else 40).to(dtype) if residual else None
    result = linear_ref(x, weight, bias, swiglu=swiglu, residual=r)
    assert result.is_contiguous()
    assert torch.equal(linear_ref(x, weight, bias, swiglu=swiglu, residual=r, out=torch.empty_like(result)), result)


def test_a_poisoned_token_stays_alone(dtype: torch.dtype) -> None:
    x, weight, norm_weight = torch.randn(3, 24).to(dtype), torch.randn(8, 24).to(dtype), torch.randn(24).to(dtype)
    clean = linear_ref(x, weight, norm_weight=norm_weight, norm_eps=1e-5, swiglu=True)
    x[1] = float("nan")
    poisoned = linear_ref(x, weight, norm_weight=norm_weight, norm_eps=1e-5, swiglu=True)
    assert torch.equal(poisoned[[0, 2]], clean[[0, 2]])


def test_views_equal_contiguous_inputs(dtype: torch.dtype, assert_near: Callable[..., None]) -> None:
    """B48: tokens out of a wider buffer, transposed tokens, and the rows of one projection inside a fused weight."""
    x, weight, bias = torch.randn(5, 24).to(dtype), torch.randn(7, 24).to(dtype), torch.randn(7).to(dtype)
    exact = exact_linear(x, weight, bias, swiglu=False, residual=None)
    wide = torch.full((6, 50), float("nan"), dtype=dtype)
    wide[1:, 1:49:2] = x
    fused = torch.full((20, 24), float("nan"), dtype=dtype)
    fused[9:16] = weight
    for tokens in (wide[1:, 1:49:2], x.t().contiguous().t()):
        assert_near(linear_ref(tokens, fused[9:16], bias), exact, 8)
        residual = torch.randn(7, 5).to(dtype).t()
        assert_near(linear_ref(tokens, weight, bias, residual=residual), exact + residual.double(), 8)


@pytest.mark.parametrize("residual", [False, True], ids=["", "residual"])
@pytest.mark.parametrize("swiglu", [False, True], ids=["", "swiglu"])
def test_out_may_be_a_strided_view(
    swiglu: bool, residual: bool, dtype: torch.dtype, nan_poison: Callable[..., Tensor]
) -> None:
    x, weight = torch.randn(3, 8).to(dtype), torch.randn(6, 8).to(dtype)
    width = 3 if swiglu else 6
    r = torch.randn(3, width).to(dtype) if residual else None
    buffer = nan_poison(5, 2 * width, dtype=dtype)
    out = buffer[1:4, ::2]
    assert linear_ref(x, weight, swiglu=swiglu, residual=r, out=out) is out
    assert torch.equal(out, linear_ref(x, weight, swiglu=swiglu, residual=r))
    assert buffer[[0, 4]].isnan().all()
    assert buffer[:, 1::2].isnan().all()


def test_out_may_be_the_residual_or_the_input(dtype: torch.dtype) -> None:
    x, weight, residual = (torch.randn(8, 8).to(dtype) for _ in range(3))
    expected = linear_ref(x, weight, residual=residual)
    assert torch.equal(linear_ref(x, weight, residual=residual, out=residual), expected)
    assert torch.equal(residual, expected)
    expected = linear_ref(x, weight)
    linear_ref(x, weight, out=x)
    assert torch.equal(x, expected)
