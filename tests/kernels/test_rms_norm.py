from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ostinato.kernels import add_rms_norm_ref, linear_ref, rms_norm_ref

HALF = [torch.bfloat16, torch.float16]
HALF_IDS = ["bfloat16", "float16"]

# Roundings allowed: one of the norm, one of the product with the weight, and those of the sum in float32.
ULPS = 4


def exact_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Element by element, in float64 and without any rounding between."""
    rows = x.cpu().double().reshape(-1, x.shape[-1])
    result = torch.empty_like(rows)
    for i, row in enumerate(rows.tolist()):
        mean = sum(value * value for value in row) / len(row)
        for j, (value, factor) in enumerate(zip(row, weight.tolist(), strict=True)):
            result[i, j] = value / (mean + eps) ** 0.5 * factor
    return result.reshape(x.shape)


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 96), (2, 3, 80), (0, 8)], ids=str)
def test_equals_loops(
    shape: tuple[int, ...], dtype: torch.dtype, device: str, assert_near: Callable[..., None]
) -> None:
    x = (3 * torch.randn(shape)).to(device, dtype)
    weight = torch.randn(shape[-1]).to(device, dtype)
    result = rms_norm_ref(x, weight, 1e-5)
    assert result.dtype == dtype
    assert_near(result, exact_norm(x, weight, 1e-5), ULPS)


def test_squares_do_not_overflow_in_half_precision() -> None:
    """B59: a row of 300s in fp16 has squares above 65504; computed in fp16 the norm would be 0."""
    x, weight = torch.full((1, 64), 300.0, dtype=torch.float16), torch.linspace(-2, 2, 64).half()
    assert (x * torch.rsqrt(x.square().mean(-1, keepdim=True)) == 0).all()
    assert torch.equal(rms_norm_ref(x, weight, 1e-6)[0], weight)


def test_a_row_of_zeros_stays_zero(dtype: torch.dtype) -> None:
    zeros = torch.zeros(2, 8, dtype=dtype)
    assert torch.equal(rms_norm_ref(zeros, torch.ones(8, dtype=dtype), 1e-6), zeros)


def test_eps_is_inside_the_root() -> None:
    """With a mean square as small as eps the result is 1 / sqrt(2) of the normed row."""
    x = torch.full((1, 4), 1e-3, dtype=torch.float64)
    result = rms_norm_ref(x, torch.ones(4, dtype=torch.float64), 1e-6)
    torch.testing.assert_close(result, torch.full_like(x, 0.5**0.5), rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("half", HALF, ids=HALF_IDS)
def test_rounds_before_the_product_with_the_weight(half: torch.dtype) -> None:
    """B59: the order of the Llama family; the other one would change a good part of all elements."""
    x, weight = torch.randn(64, 96).to(half), torch.randn(96).to(half)
    normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
    result = rms_norm_ref(x, weight, 1e-5)
    assert torch.equal(result, normed.to(half) * weight)
    assert (result != (normed * weight.float()).to(half)).float().mean() > 0.1


def test_a_poisoned_row_stays_alone(dtype: torch.dtype) -> None:
    x, weight = torch.randn(3, 16).to(dtype), torch.randn(16).to(dtype)
    clean = rms_norm_ref(x, weight, 1e-5)
    x[1] = float("nan")
    result = rms_norm_ref(x, weight, 1e-5)
    assert torch.equal(result[[0, 2]], clean[[0, 2]])
    assert result[1].isnan().all()


def views(x: Tensor) -> dict[str, Tensor]:
    """The same numbers behind other strides and offsets."""
    wide = torch.full((x.shape[0], 3 * x.shape[1] + 1), float("nan"), dtype=x.dtype)
    wide[:, 1::3] = x
    offset = torch.full((x.shape[0] + 1, x.shape[1]), float("nan"), dtype=x.dtype)
    offset[1:] = x
    return {
        "transposed": x.t().contiguous().t(),
        "every third": wide[:, 1::3],
        "last rows": offset[1:],
        "expanded": x[:1].expand(4, -1),
    }


@pytest.mark.parametrize("kind", ["transposed", "every third", "last rows", "expanded"])
def test_strides_of_the_input_do_not_matter(kind: str, dtype: torch.dtype, assert_near: Callable[..., None]) -> None:
    """B48. Not bitwise for a transposed input: its mean may add up in another order."""
    x, weight = torch.randn(5, 24).to(dtype), torch.randn(24).to(dtype)
    view = views(x)[kind]
    assert_near(rms_norm_ref(view, weight, 1e-5), exact_norm(view, weight, 1e-5), ULPS)


def test_out_may_be_a_strided_view_or_the_input(dtype: torch.dtype, nan_poison: Callable[..., Tensor]) -> None:
    x, weight = torch.randn(3, 8).to(dtype), torch.randn(8).to(dtype)
    expected = rms_norm_ref(x, weight, 1e-5)
    buffer = nan_poison(5, 16, dtype=dtype)
    out = buffer[1:4, ::2]
    assert rms_norm_ref(x, weight, 1e-5, out=out) is out
    assert torch.equal(out, expected)
    assert buffer[[0, 4]].isnan().all()
    assert buffer[:, 1::2].isnan().all()
    rms_norm_ref(x, weight, 1e-5, out=x)
    assert torch.equal(x, expected)


def test_fused_add_equals_the_two_steps_bit_for_bit(dtype: torch.dtype, device: str) -> None:
    """B59: the sum is rounded first, as the unfused form does."""
    x, residual = (torch.randn(65, 96).to(device, dtype) for _ in range(2))
    weight = torch.randn(96).to(device, dtype)
    normed, total = add_rms_norm_ref(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, rms_norm_ref(x + residual, weight, 1e-5))


@pytest.mark.parametrize("half", HALF, ids=HALF_IDS)
def test_norming_the_unrounded_sum_would_differ(half: torch.dtype) -> None:
    """The test above can fail: in half precision the two choices are apart."""
    x, residual, weight = torch.randn(65, 96).to(half), torch.randn(65, 96).to(half), torch.ones(96, dtype=half)
    unrounded = rms_norm_ref(x.float() + residual.float(), weight.float(), 1e-5).to(half)
    assert not torch.equal(add_rms_norm_ref(x, residual, weight, 1e-5)[0], unrounded)


def test_a_residual_stream_loses_what_its_dtype_cannot_hold() -> None:
    """B59: 256 + 1 is 256 in bf16, sixty-four times over, and alike in each op that adds to the stream."""
    stream = torch.full((1, 4), 256.0, dtype=torch.bfloat16)
    one, weight = torch.ones_like(stream), torch.ones(4, dtype=torch.bfloat16)
    through_linear = stream.clone()
    for _ in range(64):
        stream = add_rms_norm_ref(one, stream, weight, 1e-6)[1]
        through_linear = linear_ref(one, torch.eye(4, dtype=torch.bfloat16), residual=through_linear)
    assert (stream == 256).all()
    assert (through_linear == 256).all()


def test_the_sum_may_replace_the_residual(dtype: torch.dtype, nan_poison: Callable[..., Tensor]) -> None:
    x, residual, weight = torch.randn(3, 8).to(dtype), torch.randn(3, 8).to(dtype), torch.randn(8).to(dtype)
    expected = add_rms_norm_ref(x, residual, weight, 1e-5)
    out = nan_poison(3, 16, dtype=dtype)[:, ::2]
    normed, total = add_rms_norm_ref(x, residual, weight, 1e-5, out=out, out_sum=residual)
    assert normed is out
    assert total is residual
    assert torch.equal(normed, expected[0])
    assert torch.equal(total, expected[1])
