"""Buffers: claims first, addresses fixed afterwards."""

import pytest
import torch

from ostinato.runtime.static_buffers import StaticBuffers


def test_the_largest_claim_counts_and_smaller_ones_are_slices() -> None:
    buffers = StaticBuffers(torch.device("cpu"))
    for rows in (4, 16, 8):
        buffers.claim("hidden", rows, (3,), torch.float16)
    buffers.seal()
    whole = buffers.get("hidden", 16)
    assert whole.shape == (16, 3)
    assert whole.eq(0).all()
    assert buffers.get("hidden", 4).data_ptr() == whole.data_ptr()
    assert buffers.num_bytes == 16 * 3 * 2


def test_growth_after_the_claims_are_in_raises() -> None:
    buffers = StaticBuffers(torch.device("cpu"))
    buffers.claim("a", 4)
    buffers.seal()
    address = buffers.get("a", 4).data_ptr()
    buffers.claim("a", 3)
    with pytest.raises(RuntimeError, match=r"'a' has 4 rows; 5 were claimed after"):
        buffers.claim("a", 5)
    with pytest.raises(RuntimeError, match=r"'b' has 0 rows"):
        buffers.claim("b", 1)
    buffers.seal()
    assert buffers.get("a", 4).data_ptr() == address


def test_two_claims_of_one_name_agree() -> None:
    buffers = StaticBuffers(torch.device("cpu"))
    buffers.claim("a", 4, (2,))
    with pytest.raises(ValueError, match=r"'a' holds rows of \(2,\)"):
        buffers.claim("a", 4, (3,))
