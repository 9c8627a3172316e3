"""The pure functions that cut the work, over everything that a launcher may ask of them."""

import itertools
import sys
from pathlib import Path

import pytest

from ostinato.kernels._attention_plan import attention_plan, prefill_plan
from ostinato.kernels._linear_plan import TABLES, LinearPlan, linear_plan
from ostinato.model import SHAPES

BENCH = Path(__file__).parents[2] / "bench"
DEVICES = {"A100": (108, 166912), "RTX 4090": (128, 101376), "NVIDIA H200": (132, 232448)}


def power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def assert_fits(plan: LinearPlan, num_tokens: int, columns: int, parts: int, size: int, shared_memory: int) -> None:
    assert power_of_two(plan.block_n)
    assert power_of_two(plan.block_k)
    assert power_of_two(plan.num_warps)
    if plan.road == "gemv":
        assert num_tokens <= 4
        assert plan.block_k % 8 == 0, "a thread sums eight neighbours"
        assert plan.block_n * parts * plan.block_k <= 64 * plan.num_warps * 64, "a chunk must fit the registers"
    elif plan.road == "tile":
        assert power_of_two(plan.block_m)
        assert plan.norm_apart
        assert (plan.block_n * parts + plan.block_m) * plan.block_k * size * plan.num_stages <= shared_memory
        assert_shares(plan, columns, plan.block_k)
    else:
        block_m = max(8 if plan.slices > 1 else 16, 1 << (num_tokens - 1).bit_length())
        chunk = plan.block_k * plan.slices
        # The pipeline has one buffer less where it feeds no instruction of Hopper's own.
        stages = plan.num_stages - (plan.slices > 1)
        assert (plan.block_n * parts + block_m) * chunk * size * stages <= shared_memory
        assert_shares(plan, columns, chunk)


def assert_shares(plan: LinearPlan, columns: int, chunk: int) -> None:
    chunks = -(-columns // chunk)
    assert (plan.split_k - 1) * -(-chunks // plan.split_k) < chunks, "a share of K is empty"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("model", SHAPES)
@pytest.mark.parametrize("size", [2, 4])
def test_linear_plan(device: str, model: str, size: int) -> None:
    config, (_, shared_memory) = SHAPES[model], DEVICES[device]
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    weights = [(q + 2 * kv, hidden), (hidden, q), (2 * inner, hidden), (hidden, inner), (config.vocab_size, hidden)]
    for (rows, columns), tokens in itertools.product(
        weights, [1, 2, 3, 4, 5, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257]
    ):
        swiglu = rows == 2 * inner
        plan = linear_plan(
            tokens, rows, columns, swiglu=swiglu, element_size=size, device_name=device, shared_memory=shared_memory
        )
        assert plan.road == "blas" or tokens <= (256 if plan.road == "tile" else 64)
        assert plan.road != "blas" or tokens > 32
        if plan.road != "blas":
            assert_fits(plan, tokens, columns, 2 if swiglu else 1, size, shared_memory)


def test_tables_are_used_on_their_device_only() -> None:
    for device, tiles in TABLES.items():
        for tile, plans in tiles.items():
            for (rows, columns), plan in plans.items():
                known = {"swiglu": False, "shared_memory": 232448}
                assert linear_plan(tile, rows, columns, element_size=2, device_name=device, **known) == plan
    rule = linear_plan(1, 3072, 2048, swiglu=False, element_size=2, device_name="", shared_memory=101376)
    assert rule != TABLES["NVIDIA H200"][1][3072, 2048]


@pytest.mark.parametrize("device", DEVICES)
def test_attention_plan(device: str) -> None:
    multiprocessors, shared_memory = DEVICES[device]
    cases = itertools.product([1, 2, 7, 32, 256], [1, 3, 8, 24], [16, 64, 79, 80, 128, 256], [2, 4])
    for seqs, kv_heads, head_dim, size in cases:
        for max_keys in (1, 16, 1000, 131072):
            plan = attention_plan(seqs, kv_heads, head_dim, size, max_keys, multiprocessors, shared_memory)
            assert power_of_two(plan.block_n)
            assert power_of_two(plan.splits)
            assert plan.block_n >= 16, "a matrix product has 16 keys at least"
            assert plan.splits == 1 or seqs * kv_heads * plan.splits <= 4 * multiprocessors
            assert plan.splits == 1 or (plan.splits - 1) * plan.block_n < max_keys, "a share has no tile"
            tile = plan.block_n * max(16, 1 << (head_dim - 1).bit_length()) * size
            if plan.num_stages == 1:
                assert (size, head_dim % 2) == (2, 0), "words hold two elements"
                assert tile <= 64 * plan.num_warps * 32, "two pairs of tiles must fit the registers"
            else:
                # Keys and values of all stages but one lie in shared memory, beside what a tile needs to change layout.
                assert 2 * tile * (plan.num_stages - 1) + tile // 2 <= shared_memory


@pytest.mark.parametrize("device", DEVICES)
def test_prefill_plan(device: str) -> None:
    multiprocessors, shared_memory = DEVICES[device]
    batches = [(1, 1), (5, 1), (128, 1), (8192, 1), (32, 8), (128, 8), (4096, 256)]
    for (tokens, seqs), group, head_dim, size in itertools.product(batches, [1, 3, 24], [16, 80, 128, 256], [2, 4]):
        for kv_heads, max_keys in itertools.product([1, 8], [1, 1000, 131072]):
            plan = prefill_plan(tokens, seqs, kv_heads, group, head_dim, size, max_keys, multiprocessors, shared_memory)
            assert all(map(power_of_two, (plan.block_m, plan.block_n, plan.num_warps, plan.splits)))
            assert min(plan.block_m, plan.block_n) >= 16, "a matrix product has 16 rows and keys at least"
            assert plan.block_m <= max(16, 2 * -(-tokens // seqs) * group), "half a tile is empty"
            assert plan.splits == 1 or (plan.splits - 1) * plan.block_n < max_keys, "a share has no tile"
            row = size * max(64, 1 << (head_dim - 1).bit_length())
            assert plan.block_m * row + 2 * plan.block_n * row * (plan.num_stages - 1) <= shared_memory


def test_the_page_shows_the_attention_plans_that_ship() -> None:
    sys.path.insert(0, str(BENCH))
    try:
        from kernel_tables import ATTENTION
        from sweep_attention import CELLS, label, shipped
    finally:
        sys.path.remove(str(BENCH))
    assert {name: (label(shipped(name)), cell[4]) for name, cell in CELLS.items()} == ATTENTION
