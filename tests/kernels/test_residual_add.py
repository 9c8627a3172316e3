from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ostinato.kernels import residual_add_ref, rms_norm_ref


@pytest.mark.parametrize("scale", [1.0, 0.22])
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
def test_equals_the_formula(dtype: torch.dtype, scale: float, normed: bool, assert_near: Callable[..., None]) -> None:
    x, residual, weight = torch.randn(5, 33).to(dtype), torch.randn(5, 33).to(dtype), torch.randn(33).to(dtype)
    wide = x.double()
    if normed:
        wide = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    result = residual_add_ref(x, residual, scale=scale, norm_weight=weight if normed else None, norm_eps=1e-5)
    assert result.dtype == dtype
    # A rounding each of the norm, its weight, the scale and the sum.
    assert_near(result, residual.double() + scale * wide, 4.0)


def test_every_step_is_rounded(dtype: torch.dtype) -> None:
    """B59: the same bits as the operations one by one."""
    x, residual, weight = torch.randn(3, 40).to(dtype), torch.randn(3, 40).to(dtype), torch.randn(40).to(dtype)
    expected = residual + rms_norm_ref(x, weight, 1e-6) * 0.3
    assert torch.equal(residual_add_ref(x, residual, scale=0.3, norm_weight=weight, norm_eps=1e-6), expected)


def test_out_may_be_a_view_or_either_input(nan_poison: Callable[..., Tensor]) -> None:
    """B48"""
    x, residual = torch.randn(3, 10)[:, 1:7], torch.randn(3, 10)[:, 2:8]
    expected = residual_add_ref(x.contiguous(), residual.contiguous(), scale=2.0)
    buffer = nan_poison(3, 8)
    assert torch.equal(residual_add_ref(x, residual, scale=2.0, out=buffer[:, 1:7]), expected)
    assert buffer[:, [0, 7]].isnan().all()
    for out in (x, residual):
        a, b = x.clone(), residual.clone()
        target = a if out is x else b
        assert torch.equal(residual_add_ref(a, b, scale=2.0, out=target), expected)
        assert torch.equal(target, expected)


def test_no_tokens() -> None:
    assert residual_add_ref(torch.empty(0, 5), torch.empty(0, 5), scale=2.0).shape == (0, 5)
