import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ostinato.kernels import SINK_BLOCK, kv_cache_shape, rms_norm_ref, rotary_kv_write_ref

# num_kv_heads, query heads per KV head, head_dim, rotary_dim, block_size
SHAPES = [(2, 1, 64, 64, 16), (1, 3, 80, 80, 16), (2, 7, 96, 96, 5), (1, 9, 20, 12, 3), (3, 3, 5, 4, 1)]
IDS = [f"{kv}kv x {group}q, head_dim {dim}, rotary {rot}, block {block}" for kv, group, dim, rot, block in SHAPES]
NUM_BLOCKS = 6


def angles(positions: list[int], rotary_dim: int) -> Tensor:
    rates = [10000.0 ** (-2 * i / rotary_dim) for i in range(rotary_dim // 2)]
    return torch.tensor([[p * rate for rate in rates] for p in positions], dtype=torch.float64)


def tables(positions: list[int], rotary_dim: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    exact = angles(positions, rotary_dim)
    return exact.cos().float().to(device), exact.sin().float().to(device)


def exact_rotation(head: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """One head of one token, pair by pair in float64, as a multiplication of complex numbers."""
    half = len(cos)
    result = head.cpu().double().clone()
    for i in range(half):
        turned = complex(result[i], result[half + i]) * complex(cos[i].item(), sin[i].item())
        result[i], result[half + i] = turned.real, turned.imag
    return result


def poisoned_caches(num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    shape = kv_cache_shape(NUM_BLOCKS, block_size, num_kv_heads, head_dim)
    return [torch.full(shape, float("nan"), dtype=dtype, device=device) for _ in "kv"]


@pytest.mark.parametrize(("num_kv_heads", "group", "head_dim", "rotary_dim", "block_size"), SHAPES, ids=IDS)
def test_equals_loops_and_writes_its_slots_only(
    num_kv_heads: int,
    group: int,
    head_dim: int,
    rotary_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: str,
    assert_near: Callable[..., None],
) -> None:
    """B37, B45: the expected slots change, the first and the last of the cache among them, and no other byte does."""
    num_heads = num_kv_heads * group
    slots = [NUM_BLOCKS * block_size - 1, 2 * block_size, 3 * block_size + block_size // 2]
    positions = [0, 17, 4000]
    cos, sin = tables(positions, rotary_dim, device)
    qkv = torch.randn(3, (num_heads + 2 * num_kv_heads) * head_dim).to(device, dtype)
    k_cache, v_cache = poisoned_caches(num_kv_heads, block_size, head_dim, dtype, device)

    q = rotary_kv_write_ref(qkv, cos, sin, torch.tensor(slots, device=device), k_cache, v_cache)

    assert q.shape == (3, num_heads, head_dim)
    assert q.dtype == dtype
    assert q.is_contiguous()
    heads = qkv.view(3, -1, head_dim)
    written = torch.zeros(NUM_BLOCKS, block_size, dtype=torch.bool)
    for token, slot in enumerate(slots):
        block, offset = divmod(slot, block_size)
        written[block, offset] = True
        # Roundings allowed: one of the result, and of two products in float32.
        for head in range(num_heads):
            assert_near(q[token, head], exact_rotation(heads[token, head], cos[token], sin[token]), 2)
        for kv_head in range(num_kv_heads):
            k = exact_rotation(heads[token, num_heads + kv_head], cos[token], sin[token])
            assert_near(k_cache[block, kv_head, offset], k, 2)
            v = heads[token, num_heads + num_kv_heads + kv_head]
            assert torch.equal(v_cache[block, kv_head, offset], v)
    for cache in (k_cache, v_cache):
        untouched = cache.transpose(1, 2).cpu()[~written]
        assert untouched.isnan().all()


def test_padding_rows_write_to_the_sink_only(dtype: torch.dtype) -> None:
    """B37: bucket 4, 3 live rows. Several rows may share a slot of the sink; whichever wins, it is finite."""
    block_size, caches = 4, poisoned_caches(2, 4, 8, dtype, "cpu")
    sink = SINK_BLOCK * block_size
    slots = torch.tensor([2 * block_size, 2 * block_size + 1, 5 * block_size, sink, sink])
    qkv, (cos, sin) = torch.randn(5, 6 * 8).to(dtype), tables([0, 1, 4, 0, 0], 8)
    rotary_kv_write_ref(qkv, cos, sin, slots, *caches)
    for cache in caches:
        finite = cache.isfinite().all(-1).all(1)
        assert finite.nonzero().tolist() == [[SINK_BLOCK, 0], [2, 0], [2, 1], [5, 0]]


def test_position_0_is_the_identity(dtype: torch.dtype) -> None:
    qkv, (cos, sin) = torch.randn(1, 5 * 6).to(dtype), tables([0], 6)
    k_cache, v_cache = poisoned_caches(1, 1, 6, dtype, "cpu")
    q = rotary_kv_write_ref(qkv, cos, sin, torch.tensor([2]), k_cache, v_cache)
    assert torch.equal(q.flatten(), qkv[0, :18])
    assert torch.equal(k_cache[2].flatten(), qkv[0, 18:24])
    assert torch.equal(v_cache[2].flatten(), qkv[0, 24:])


def test_elements_past_the_rotary_dimension_pass_through(dtype: torch.dtype) -> None:
    qkv, (cos, sin) = torch.randn(2, 3 * 10).to(dtype), tables([5, 900], 4)
    k_cache, v_cache = poisoned_caches(1, 2, 10, dtype, "cpu")
    q = rotary_kv_write_ref(qkv, cos, sin, torch.tensor([4, 5]), k_cache, v_cache)
    assert torch.equal(q[:, 0, 4:], qkv[:, 4:10])
    assert torch.equal(k_cache[2, 0, :, 4:], qkv[:, 14:20])
    assert (q[:, 0, :4] != qkv[:, :4]).all()


def test_scores_depend_on_the_distance_alone() -> None:
    """What the rotation is for: q at p and k at p' meet at the angle of p - p'. The tables here are float64."""
    qkv = torch.randn(1, 3 * 16, dtype=torch.float64)
    scores = []
    for start in (0, 100, 5000):
        exact = angles([start + 7, start], 16)
        k_cache, v_cache = poisoned_caches(1, 2, 16, torch.float64, "cpu")
        slots = torch.tensor([4, 5])
        q = rotary_kv_write_ref(qkv.expand(2, -1), exact.cos(), exact.sin(), slots, k_cache, v_cache)
        scores.append(torch.dot(q[0, 0], k_cache[2, 0, 1]).item())
    assert math.isclose(scores[0], scores[1], rel_tol=1e-9)
    assert math.isclose(scores[0], scores[2], rel_tol=1e-9)


def test_half_precision_is_rotated_in_float32(assert_near: Callable[..., None]) -> None:
    """B58: bf16 arithmetic or bf16 tables would show at once; the one rounding is that of the result."""
    qkv, (cos, sin) = torch.randn(64, 3 * 64).bfloat16(), tables([4097 + i for i in range(64)], 64)
    k_cache, v_cache = poisoned_caches(1, 16, 64, torch.bfloat16, "cpu")
    wide_k, wide_v = (cache.float() for cache in (k_cache, v_cache))
    slots = torch.arange(64) + 16
    q = rotary_kv_write_ref(qkv, cos, sin, slots, k_cache, v_cache)
    wide_q = rotary_kv_write_ref(qkv.float(), cos, sin, slots, wide_k, wide_v)
    assert torch.equal(q, wide_q.bfloat16())
    assert torch.equal(k_cache[1:5], wide_k[1:5].bfloat16())


def test_queries_and_keys_are_normed_head_by_head_before_the_rotation(dtype: torch.dtype) -> None:
    qkv, (cos, sin), slots = torch.randn(3, 8 * 12).to(dtype), tables([1, 20, 300], 12), torch.tensor([6, 7, 9])
    q_weight, k_weight = torch.randn(12).to(dtype), torch.randn(12).to(dtype)
    fused, apart = poisoned_caches(2, 3, 12, dtype, "cpu"), poisoned_caches(2, 3, 12, dtype, "cpu")
    q = rotary_kv_write_ref(qkv, cos, sin, slots, *fused, q_norm_weight=q_weight, k_norm_weight=k_weight, norm_eps=1e-3)
    heads = qkv.view(3, 8, 12).clone()
    heads[:, :4] = rms_norm_ref(heads[:, :4], q_weight, 1e-3)
    heads[:, 4:6] = rms_norm_ref(heads[:, 4:6], k_weight, 1e-3)
    assert torch.equal(q, rotary_kv_write_ref(heads.flatten(1), cos, sin, slots, *apart))
    for first, second in zip(fused, apart, strict=True):
        assert torch.equal(first.nan_to_num(7.0), second.nan_to_num(7.0))


def test_one_norm_without_the_other_is_a_mistake() -> None:
    caches = poisoned_caches(1, 1, 4, torch.float32, "cpu")
    with pytest.raises(AssertionError, match="both or neither"):
        rotary_kv_write_ref(
            torch.randn(1, 12), *tables([0], 4), torch.tensor([2]), *caches, q_norm_weight=torch.ones(4)
        )


def test_no_tokens() -> None:
    caches = poisoned_caches(1, 2, 8, torch.float32, "cpu")
    empty = torch.empty(0, 4)
    q = rotary_kv_write_ref(torch.empty(0, 5 * 8), empty, empty, torch.empty(0, dtype=torch.int64), *caches)
    assert q.shape == (0, 3, 8)


def test_qkv_caches_and_out_may_be_views(dtype: torch.dtype, nan_poison: Callable[..., Tensor]) -> None:
    """B48: qkv out of a wider and longer buffer, one layer of a joint cache, queries into every second element."""
    qkv, (cos, sin), slots = torch.randn(3, 5 * 8).to(dtype), tables([1, 20, 300], 8), torch.tensor([6, 7, 9])
    caches = poisoned_caches(1, 3, 8, dtype, "cpu")
    expected = rotary_kv_write_ref(qkv, cos, sin, slots, *caches)
    wide = nan_poison(4, 82, dtype=dtype)
    wide[1:, 1:81:2] = qkv
    joint = nan_poison(NUM_BLOCKS, 2, 1, 3, 16, dtype=dtype)
    k_cache, v_cache = joint[:, 0, ..., ::2], joint[:, 1, ..., ::2]
    buffer = nan_poison(5, 3, 16, dtype=dtype)
    out = buffer[1:4, :, ::2]
    assert rotary_kv_write_ref(wide[1:, 1:81:2], cos, sin, slots, k_cache, v_cache, out=out) is out
    assert torch.equal(out, expected)
    for view, cache in zip((k_cache, v_cache), caches, strict=True):
        assert torch.equal(view.nan_to_num(7.0), cache.nan_to_num(7.0))
    assert buffer[[0, 4]].isnan().all()
    assert buffer[..., 1::2].isnan().all()
    assert joint[..., 1::2].isnan().all()
