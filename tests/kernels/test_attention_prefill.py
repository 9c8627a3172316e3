from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato.kernels import attention_decode_ref, attention_prefill_ref

# num_kv_heads, query heads per KV head, head_dim, block_size
SHAPES = [(2, 1, 64, 16), (2, 3, 80, 16), (1, 7, 96, 5), (2, 9, 20, 7), (3, 3, 5, 1)]
IDS = [f"{kv}kv x {group}q, head_dim {dim}, block {block}" for kv, group, dim, block in SHAPES]

# Roundings allowed: the softmax weights and the result are each rounded once, the sums are longer than one step.
ULPS = 16


def dense(
    lengths: list[int], num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: str = "cpu"
) -> list[Tensor]:
    return [torch.randn(n, num_kv_heads, head_dim).to(device, dtype) for n in lengths]


def offsets(counts: list[int], device: str = "cpu") -> Tensor:
    return torch.tensor([0, *counts]).cumsum(0).to(device, torch.int32)


@pytest.mark.parametrize("window", [None, 4], ids=["all keys", "window 4"])
@pytest.mark.parametrize(("num_kv_heads", "group", "head_dim", "block_size"), SHAPES, ids=IDS)
def test_equals_loops_over_ragged_sequences(
    num_kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
    window: int | None,
    dtype: torch.dtype,
    device: str,
    paged: Callable[..., Any],
    exact_attention: Callable[..., Tensor],
    assert_near: Callable[..., None],
) -> None:
    """B45, B47, B35: cached context or none, borders, sequences without queries, padding at the end, NaN elsewhere."""
    cached_and_new = [(0, 1), (0, block_size + 1), (3, 0), (block_size, 2), (2, block_size), (0, 0), (6, 1)]
    counts = [new for _, new in cached_and_new]
    lengths = [cached + new for cached, new in cached_and_new]
    keys, values = (dense(lengths, num_kv_heads, head_dim, dtype, device) for _ in "kv")
    num_padding = 3
    q = torch.randn(sum(counts) + num_padding, num_kv_heads * group, head_dim).to(device, dtype)
    q[-num_padding:] = float("nan")
    batch = paged(keys, values, block_size).tensors()

    result = attention_prefill_ref(q, *batch, offsets(counts, device), head_dim**-0.5, window=window)

    assert result.dtype == dtype
    assert result.is_contiguous()
    token = 0
    for seq, (cached, new) in enumerate(cached_and_new):
        for position in range(cached, cached + new):
            first = 0 if window is None else max(0, position - window + 1)
            seen = slice(first, position + 1)
            exact = exact_attention(q[token], keys[seq][seen], values[seq][seen], head_dim**-0.5)
            assert_near(result[token], exact, ULPS)
            token += 1
    assert torch.equal(result[token:], torch.zeros_like(result[token:]))


@pytest.mark.parametrize("poison", [0.0, 1e4, float("inf"), float("nan")])
@pytest.mark.parametrize("window", [None, 3])
def test_places_that_no_query_sees_change_no_bit(
    poison: float, window: int | None, dtype: torch.dtype, paged: Callable[..., Any]
) -> None:
    """With a window also the keys that even the first new token has left behind: their blocks may be freed."""
    keys, values = (dense([9, 6], 2, 16, dtype) for _ in "kv")
    q = torch.randn(4, 6, 16).to(dtype)
    cu_seqlens_q = offsets([2, 2])
    clean = attention_prefill_ref(q, *paged(keys, values, 4, poison=-3.0).tensors(), cu_seqlens_q, 0.25, window=window)
    if window is not None:
        for tensor, left_behind in ((keys[0], 5), (values[0], 5), (keys[1], 2), (values[1], 2)):
            tensor[:left_behind] = poison
    poisoned = paged(keys, values, 4, poison=poison).tensors()
    assert torch.equal(attention_prefill_ref(q, *poisoned, cu_seqlens_q, 0.25, window=window), clean)


def test_the_neighbours_and_the_place_of_a_sequence_change_no_bit(paged: Callable[..., Any]) -> None:
    keys, values = (dense([7, 12, 5], 2, 16, torch.float32) for _ in "kv")
    q = torch.randn(10, 4, 16)
    together = attention_prefill_ref(q, *paged(keys, values, 4).tensors(), offsets([4, 3, 3]), 0.25)
    for seq, rows in enumerate((slice(0, 4), slice(4, 7), slice(7, 10))):
        k, v, table, lens = paged(keys[seq : seq + 1], values[seq : seq + 1], 4, seed=9).tensors()
        table = table[:, : -(-len(keys[seq]) // 4)]  # alone, it is attended to over its whole table
        result = attention_prefill_ref(q[rows], k, v, table, lens, offsets([rows.stop - rows.start]), 0.25)
        assert torch.equal(result, together[rows])


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("length", "num_queries"), [(9, 9), (9, 2), (1, 1), (0, 0), (8, 5)])
def test_a_sequence_alone_may_have_padding_behind_it_and_a_table_beyond_it(
    length: int, num_queries: int, window: int | None, paged: Callable[..., Any], assert_near: Callable[..., None]
) -> None:
    """Its numbers stay on the device, so that a recording serves every prompt of a bucket."""
    keys, values = (dense([length, 3], 2, 16, torch.float32) for _ in "kv")
    k, v, table, lens = paged(keys, values, 4, poison=float("nan")).tensors()
    q = torch.randn(num_queries + 3, 4, 16)
    q[num_queries:] = float("nan")
    exact = attention_prefill_ref(q, k, v, table, lens, offsets([num_queries, 0]), 0.25, window=window)
    alone = attention_prefill_ref(q, k, v, table[:1], lens[:1], offsets([num_queries]), 0.25, window=window)
    assert_near(alone, exact, ULPS)
    assert torch.equal(alone[num_queries:], torch.zeros(3, 4, 16))


@pytest.mark.parametrize("window", [None, 4], ids=["all keys", "window 4"])
def test_decode_agrees_at_every_length(
    window: int | None, dtype: torch.dtype, paged: Callable[..., Any], assert_near: Callable[..., None]
) -> None:
    """B35, B60: T = 10, W = 4; a prefill's row is what a decode at that length gives."""
    keys, values = (dense([10], 2, 12, dtype) for _ in "kv")
    q = torch.randn(10, 6, 12).to(dtype)
    whole = attention_prefill_ref(q, *paged(keys, values, 4).tensors(), offsets([10]), 0.3, window=window)
    for length in range(1, 11):
        prefix = paged([keys[0][:length]], [values[0][:length]], 4).tensors()
        row = attention_decode_ref(q[length - 1 : length], *prefix, 0.3, window=window)
        assert_near(row[0], whole[length - 1].double(), ULPS)


@pytest.mark.parametrize("score", [-6e4, 6e4], ids=["all scores -6e4", "all scores 6e4"])
def test_equal_scores_of_any_size_average_the_values(
    score: float, dtype: torch.dtype, device: str, paged: Callable[..., Any], assert_near: Callable[..., None]
) -> None:
    """B47: a finite mask value would take over here, and fp16 ends at 65504."""
    keys = [torch.full((7, 1, 64), score / 64 / 32, dtype=dtype, device=device)]
    values = dense([7], 1, 64, dtype, device)
    q = torch.full((2, 3, 64), 32.0, dtype=dtype, device=device)
    result = attention_prefill_ref(q, *paged(keys, values, 4).tensors(), offsets([2], device), 1.0)
    for row, length in enumerate((6, 7)):
        assert_near(result[row], values[0][:length].cpu().double().mean(0).expand(3, 64), ULPS)


def test_out_may_be_a_strided_view_and_is_returned(
    dtype: torch.dtype, paged: Callable[..., Any], nan_poison: Callable[..., Tensor]
) -> None:
    keys, values = (dense([5, 3], 1, 8, dtype) for _ in "kv")
    q = torch.randn(7, 3, 8).to(dtype)
    batch = paged(keys, values, 4).tensors()
    buffer = nan_poison(9, 3, 16, dtype=dtype)
    out = buffer[1:8, :, ::2]
    assert attention_prefill_ref(q, *batch, offsets([4, 1]), 0.3, out=out) is out
    assert torch.equal(out, attention_prefill_ref(q, *batch, offsets([4, 1]), 0.3))
    assert buffer[0].isnan().all()
    assert buffer[8].isnan().all()
    assert buffer[..., 1::2].isnan().all()


def test_queries_and_caches_may_be_views(paged: Callable[..., Any], assert_near: Callable[..., None]) -> None:
    """B48: queries sliced out of a fused projection, a transposed one, every second element; caches of every layer."""
    keys, values = (dense([5, 9], 1, 8, torch.float32) for _ in "kv")
    k_cache, v_cache, tables, lens = paged(keys, values, 4).tensors()
    q, cu_seqlens_q = torch.randn(6, 3, 8), offsets([4, 2])
    expected = attention_prefill_ref(q, k_cache, v_cache, tables, lens, cu_seqlens_q, 0.3)

    fused = torch.randn(6, 5, 8)
    fused[:, 1:4] = q
    transposed = q.transpose(0, 1).contiguous().transpose(0, 1)
    doubled = torch.stack((q, torch.full_like(q, float("nan"))), -1).flatten(-2)[..., ::2]
    layers = torch.stack((v_cache, k_cache, v_cache), 1)
    for view in (fused[:, 1:4], transposed, doubled):
        assert not view.is_contiguous()
        result = attention_prefill_ref(view, layers[:, 1], layers[:, 2], tables, lens, cu_seqlens_q, 0.3)
        # Not bitwise: a matrix product over other strides may add up in another order.
        assert_near(result, expected.double(), ULPS)
