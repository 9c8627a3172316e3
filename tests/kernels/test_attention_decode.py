from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato.kernels import SINK_BLOCK, attention_decode_ref

# num_kv_heads, query heads per KV head, head_dim, block_size
SHAPES = [(2, 1, 64, 16), (2, 3, 80, 16), (1, 7, 96, 5), (2, 9, 20, 7), (3, 3, 5, 1)]
IDS = [f"{kv}kv x {group}q, head_dim {dim}, block {block}" for kv, group, dim, block in SHAPES]

# Roundings allowed: the softmax weights and the result are each rounded once, the sums are longer than one step.
ULPS = 16


def dense(
    lengths: list[int], num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: str = "cpu"
) -> list[Tensor]:
    return [torch.randn(n, num_kv_heads, head_dim).to(device, dtype) for n in lengths]


@pytest.mark.parametrize(("num_kv_heads", "group", "head_dim", "block_size"), SHAPES, ids=IDS)
def test_equals_loops_whatever_lies_outside_the_visible_keys(
    num_kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: str,
    paged: Callable[..., Any],
    exact_attention: Callable[..., Tensor],
    assert_near: Callable[..., None],
) -> None:
    """B45, B47: odd head sizes, a dead row, lengths around the block border, NaN in every unused place."""
    lengths = [1, block_size, 0, block_size + 1, 3 * block_size - 1]
    keys, values = (dense(lengths, num_kv_heads, head_dim, dtype, device) for _ in "kv")
    q = torch.randn(len(lengths), num_kv_heads * group, head_dim).to(device, dtype)
    q[2] = float("nan")

    result = attention_decode_ref(q, *paged(keys, values, block_size).tensors(), head_dim**-0.5)

    assert result.dtype == dtype
    assert result.is_contiguous()
    for row, length in enumerate(lengths):
        if length == 0:
            assert torch.equal(result[row], torch.zeros_like(result[row]))
        else:
            assert_near(result[row], exact_attention(q[row], keys[row], values[row], head_dim**-0.5), ULPS)


@pytest.mark.parametrize("poison", [0.0, 1e4, float("inf"), float("nan")])
def test_places_outside_the_visible_keys_change_no_bit(
    poison: float, dtype: torch.dtype, paged: Callable[..., Any]
) -> None:
    lengths = [3, 0, 8, 17]
    keys, values = (dense(lengths, 2, 16, dtype) for _ in "kv")
    q = torch.randn(4, 6, 16).to(dtype)
    clean = attention_decode_ref(q, *paged(keys, values, 8, poison=-3.0).tensors(), 0.25)
    assert torch.equal(attention_decode_ref(q, *paged(keys, values, 8, poison=poison).tensors(), 0.25), clean)


def test_the_place_of_a_block_changes_no_bit(paged: Callable[..., Any]) -> None:
    lengths = [9, 20]
    keys, values = (dense(lengths, 2, 16, torch.float32) for _ in "kv")
    q = torch.randn(2, 4, 16)
    first, second = (attention_decode_ref(q, *paged(keys, values, 4, seed=seed).tensors(), 0.25) for seed in (1, 2))
    assert torch.equal(first, second)


def test_a_dead_row_of_the_sink_is_zero_and_leaves_the_others_alone(paged: Callable[..., Any]) -> None:
    """B47: whatever a padding row holds, the live rows of the same bucket get the same bits."""
    keys, values = (dense([5, 0, 11], 1, 8, torch.float32) for _ in "kv")
    batch = paged(keys, values, 4, spare_columns=3)
    batch.block_tables[1] = SINK_BLOCK
    q = torch.randn(3, 3, 8)
    results = []
    for garbage in (0.0, 1e30, float("nan")):
        q[1] = garbage
        batch.k_cache[SINK_BLOCK] = batch.v_cache[SINK_BLOCK] = garbage
        results.append(attention_decode_ref(q, *batch.tensors(), 0.3))
        assert torch.equal(results[-1][1], torch.zeros(3, 8))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_a_batch_of_dead_rows_is_zero(dtype: torch.dtype) -> None:
    cache = torch.full((2, 1, 4, 8), float("nan"), dtype=dtype)
    q = torch.full((3, 2, 8), float("nan"), dtype=dtype)
    tables = torch.full((3, 5), SINK_BLOCK, dtype=torch.int32)
    result = attention_decode_ref(q, cache, cache, tables, torch.zeros(3, dtype=torch.int32), 1.0)
    assert torch.equal(result, torch.zeros_like(q))


@pytest.mark.parametrize("score", [-6e4, 6e4], ids=["all scores -6e4", "all scores 6e4"])
def test_equal_scores_of_any_size_average_the_values(
    score: float, dtype: torch.dtype, device: str, paged: Callable[..., Any], assert_near: Callable[..., None]
) -> None:
    """B47: a finite mask value would take over here, and fp16 ends at 65504."""
    keys = [torch.full((7, 1, 64), score / 64 / 32, dtype=dtype, device=device)]
    values = dense([7], 1, 64, dtype, device)
    q = torch.full((1, 3, 64), 32.0, dtype=dtype, device=device)
    result = attention_decode_ref(q, *paged(keys, values, 4).tensors(), 1.0)
    assert_near(result, values[0].cpu().double().mean(0).expand(1, 3, 64), ULPS)


@pytest.mark.parametrize("window", [1, 4, 9, 10, 11, 1000])
def test_a_window_sees_exactly_its_newest_keys(
    window: int, paged: Callable[..., Any], exact_attention: Callable[..., Tensor], assert_near: Callable[..., None]
) -> None:
    """B35: W = 4, T = 10: the last row sees keys 6..9; older ones may be gone already."""
    lengths = [10, 3, 0]
    keys, values = (dense(lengths, 2, 6, torch.float64) for _ in "kv")
    q = torch.randn(3, 4, 6, dtype=torch.float64)
    seen_keys, seen_values = ([dense[-window:].clone() for dense in side] for side in (keys, values))
    for side in (keys, values):
        for tensor in side:
            tensor[:-window] = float("nan")

    result = attention_decode_ref(q, *paged(keys, values, 4).tensors(), 0.4, window=window)

    for row, length in enumerate(lengths):
        if length:
            assert_near(result[row], exact_attention(q[row], seen_keys[row], seen_values[row], 0.4), ULPS)
    assert torch.equal(result[2], torch.zeros_like(result[2]))


def test_out_may_be_a_strided_view_and_is_returned(
    dtype: torch.dtype, paged: Callable[..., Any], nan_poison: Callable[..., Tensor]
) -> None:
    lengths = [5, 0]
    keys, values = (dense(lengths, 1, 8, dtype) for _ in "kv")
    q = torch.randn(2, 3, 8).to(dtype)
    batch = paged(keys, values, 4).tensors()
    buffer = nan_poison(4, 3, 16, dtype=dtype)
    out = buffer[1:3, :, ::2]
    assert attention_decode_ref(q, *batch, 0.3, out=out) is out
    assert torch.equal(out, attention_decode_ref(q, *batch, 0.3))
    assert buffer[0].isnan().all()
    assert buffer[3].isnan().all()
    assert buffer[..., 1::2].isnan().all()


def test_queries_and_caches_may_be_views(paged: Callable[..., Any], assert_near: Callable[..., None]) -> None:
    """B48: queries sliced out of a fused projection, a transposed one, every second element; caches of every layer."""
    keys, values = (dense([5, 9], 1, 8, torch.float32) for _ in "kv")
    k_cache, v_cache, tables, lens = paged(keys, values, 4).tensors()
    q = torch.randn(2, 3, 8)
    expected = attention_decode_ref(q, k_cache, v_cache, tables, lens, 0.3)

    fused = torch.randn(2, 5, 8)
    fused[:, 1:4] = q
    transposed = q.transpose(0, 1).contiguous().transpose(0, 1)
    doubled = torch.stack((q, torch.full_like(q, float("nan"))), -1).flatten(-2)[..., ::2]
    layers = torch.stack((v_cache, k_cache, v_cache), 1)
    for view in (fused[:, 1:4], transposed, doubled):
        assert not view.is_contiguous()
        result = attention_decode_ref(view, layers[:, 1], layers[:, 2], tables, lens, 0.3)
        # Not bitwise: a matrix product over other strides may add up in another order.
        assert_near(result, expected.double(), ULPS)
