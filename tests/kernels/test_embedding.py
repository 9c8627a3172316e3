from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ostinato.kernels import embedding_ref

IDS = [0, 6, 6, 3, 0]


def test_rows_by_id(dtype: torch.dtype, device: str) -> None:
    weight = torch.randn(7, 5).to(device, dtype)
    result = embedding_ref(torch.tensor(IDS, device=device), weight)
    assert result.dtype == dtype
    assert result.tolist() == [weight[i].tolist() for i in IDS]


def test_no_tokens() -> None:
    assert embedding_ref(torch.empty(0, dtype=torch.int64), torch.randn(7, 5)).shape == (0, 5)


@pytest.mark.parametrize("token_id", [-1, 7, 2**31])
def test_an_id_outside_the_vocabulary_is_refused_on_cpu(token_id: int) -> None:
    """A negative id must not read a row from the end (B53)."""
    with pytest.raises(IndexError):
        embedding_ref(torch.tensor([0, token_id]), torch.randn(7, 5))


def test_weight_ids_and_out_may_be_views(dtype: torch.dtype, nan_poison: Callable[..., Tensor]) -> None:
    """B48"""
    table = torch.randn(9, 10).to(dtype)
    weight, ids = table[1:8, ::2], torch.tensor([i for token_id in IDS for i in (token_id, -1)])[::2]
    buffer = nan_poison(7, 10, dtype=dtype)
    out = buffer[1:6, ::2]
    assert embedding_ref(ids, weight, out=out) is out
    assert torch.equal(out, weight.contiguous()[IDS])
    assert buffer[[0, 6]].isnan().all()
    assert buffer[:, 1::2].isnan().all()


def test_rows_are_multiplied(dtype: torch.dtype) -> None:
    """Rounded once, and the table itself stays as it is."""
    weight = torch.randn(7, 5).to(dtype)
    before, buffer = weight.clone(), torch.empty(5, 5, dtype=dtype)
    assert torch.equal(embedding_ref(torch.tensor(IDS), weight, scale=2.7), weight[IDS] * 2.7)
    assert torch.equal(embedding_ref(torch.tensor(IDS), weight, scale=2.7, out=buffer), weight[IDS] * 2.7)
    assert torch.equal(weight, before)
