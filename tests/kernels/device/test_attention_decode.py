import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ostinato.kernels import (
    SINK_BLOCK,
    attention_decode,
    attention_decode_ref,
    kv_cache_shape,
    rotary_attention_decode,
    rotary_attention_decode_ref,
    rotary_kv_write,
    rotary_kv_write_ref,
)
from ostinato.kernels._attention_plan import AttentionPlan

Draw = Callable[..., Tensor]
Near = Callable[[Tensor, Tensor], None]


class Batch:
    """Random sequences in a cache that is NaN wherever no key lies, with tables whose tails name a NaN block.

    The strides of the two caches differ, and tables lie in wider ones, as a step's do in those of the whole engine.
    """

    def __init__(
        self, draw: Draw, lengths: list[int], heads: int, kv_heads: int, head_dim: int, block_size: int
    ) -> None:
        device = draw(1).device
        columns = max(1, *(-(-length // block_size) for length in lengths)) + 2
        num_blocks = 3 + len(lengths) * columns
        shape = kv_cache_shape(num_blocks, block_size, kv_heads, head_dim)
        self.k_cache, self.v_cache = draw(*shape), draw(num_blocks, kv_heads, block_size + 3, head_dim)[:, :, 3:]
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
        tables = (torch.randperm(num_blocks - 3) + 3)[: len(lengths) * columns].view(len(lengths), columns)
        used = torch.zeros(num_blocks, block_size, dtype=torch.bool)
        for row, length in enumerate(lengths):
            for key in range(length):
                used[tables[row, key // block_size], key % block_size] = True
            tables[row, -(-length // block_size) :] = 2
            if length == 0:
                tables[row] = SINK_BLOCK
        for cache in (self.k_cache, self.v_cache):
            cache.masked_fill_(~used[:, None, :, None].to(device), float("nan"))
            cache[SINK_BLOCK] = 0.0
        self.tables = F.pad(tables, (1, 2), value=2).to(device, torch.int32)[:, 1:-2]
        self.slots = torch.tensor(
            [int(tables[row, max(n - 1, 0) // block_size]) * block_size + max(n - 1, 0) % block_size
             for row, n in enumerate(lengths)], device=device,
        )  # fmt: skip
        self.scale = head_dim**-0.5


SHAPES = [
    # lengths, heads, kv_heads, head_dim, block_size, window
    pytest.param([1, 37, 0, 200], 9, 3, 64, 16, None, id="smollm2"),
    pytest.param([300, 5], 8, 2, 128, 32, None, id="group4-d128"),
    pytest.param([130], 3, 3, 80, 16, None, id="mha-d80"),
    pytest.param([65, 0, 64], 4, 2, 96, 64, 50, id="group2-d96-window"),
    pytest.param([40, 129], 5, 1, 112, 128, 128, id="group5-d112-window"),
    pytest.param([33], 7, 1, 256, 16, None, id="group7-d256"),
    pytest.param([90, 17], 24, 1, 64, 16, 1, id="group24-window1"),
    pytest.param([50, 3], 9, 1, 192, 64, None, id="group9-d192"),
    pytest.param([20], 8, 1, 32, 16, 7, id="group8-d32"),
]


@pytest.mark.parametrize(("lengths", "heads", "kv_heads", "head_dim", "block_size", "window"), SHAPES)
def test_attention_decode(
    lengths: list[int], heads: int, kv_heads: int, head_dim: int, block_size: int, window: int | None,
    draw: Draw, assert_near: Near, nan_poison: Callable[..., Tensor], device: str, dtype: torch.dtype,
) -> None:  # fmt: skip
    """B45, B47: head sizes that are no powers of two, empty sequences, poison wherever no key lies."""
    batch = Batch(draw, lengths, heads, kv_heads, head_dim, block_size)
    q = draw(len(lengths), heads + 1, head_dim + 3)[:, 1:, 2 : head_dim + 2]
    buffer = nan_poison(len(lengths) + 1, heads, head_dim + 4, dtype=dtype, device=device)
    out = buffer[:-1, :, :head_dim]
    args = (batch.tables, batch.seq_lens, batch.scale)
    assert attention_decode(q, batch.k_cache, batch.v_cache, *args, window=window, out=out) is out
    truth = attention_decode_ref(
        q.double(), batch.k_cache.double(), batch.v_cache.double(), *args, window=window
    )  # fmt: skip
    assert_near(out, truth)
    assert (out[batch.seq_lens == 0] == 0).all()
    assert buffer[-1].isnan().all()
    assert buffer[..., head_dim:].isnan().all()


@pytest.mark.parametrize(("lengths", "heads", "kv_heads", "head_dim", "block_size", "window"), SHAPES)
@pytest.mark.parametrize("qk_norm", [False, True], ids=["plain", "qk-norm"])
def test_rotary_attention_decode(
    lengths: list[int], heads: int, kv_heads: int, head_dim: int, block_size: int, window: int | None, qk_norm: bool,
    draw: Draw, assert_near: Near,
) -> None:  # fmt: skip
    """The fused op equals rotation and write, then attention; the cache gets the same keys and values.

    Without norms they are the same bits; a norm is summed in another order by another number of warps.
    """
    batch = Batch(draw, lengths, heads, kv_heads, head_dim, block_size)
    qkv = draw(len(lengths), (heads + 2 * kv_heads) * head_dim + 5)[:, 2:-3]
    angle = torch.rand(len(lengths), head_dim // 4) * 6
    cos, sin = angle.cos().to(qkv.device), angle.sin().to(qkv.device)
    norms = {"q_norm_weight": draw(head_dim), "k_norm_weight": draw(head_dim), "norm_eps": 1e-6} if qk_norm else {}
    wide = {name: value.double() if isinstance(value, Tensor) else value for name, value in norms.items()}
    k_truth, v_truth = batch.k_cache.double(), batch.v_cache.double()
    k_two, v_two = batch.k_cache.clone(), batch.v_cache.clone()
    args = (batch.tables, batch.seq_lens, batch.scale)
    out = rotary_attention_decode(
        qkv, cos, sin, batch.slots, batch.k_cache, batch.v_cache, *args, window=window, **norms
    )
    truth = rotary_attention_decode_ref(
        qkv.double(), cos, sin, batch.slots, k_truth, v_truth, *args, window=window, **wide
    )
    assert_near(out, truth)
    q_two = rotary_kv_write(qkv, cos, sin, batch.slots, k_two, v_two, **norms)
    live = torch.arange(k_two.shape[0]) != SINK_BLOCK  # several dead rows may write there in any order
    if not qk_norm:
        assert torch.equal(batch.k_cache[live].view(torch.uint8), k_two[live].view(torch.uint8))
    assert_near(batch.k_cache[live].nan_to_num(), k_truth[live.to(k_truth.device)].nan_to_num())
    assert torch.equal(batch.v_cache[live].view(torch.uint8), v_two[live].view(torch.uint8))
    assert_near(k_two[live].nan_to_num(), k_truth[live.to(k_truth.device)].nan_to_num())
    assert_near(q_two, rotary_kv_write_ref(qkv.double(), cos, sin, batch.slots, k_truth, v_truth, **wide))


def test_many_tokens_are_written_by_several_heads_a_program(
    draw: Draw, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits as of one head a program, whatever is left over of each kind."""
    qkv, cache = draw(3, (7 + 2 * 3) * 24), kv_cache_shape(4, 16, 3, 24)
    angle = torch.rand(3, 12, device=qkv.device) * 6
    slots = torch.tensor([17, 63, 32], device=qkv.device)
    results = []
    for heads in (1, 4):
        monkeypatch.setattr(sys.modules["ostinato.kernels.rotary_kv_write"], "heads_of_a_program", lambda *_: heads)  # noqa: B023
        k_cache, v_cache = (torch.zeros(cache, dtype=dtype, device=qkv.device) for _ in "kv")
        q = rotary_kv_write(qkv, angle.cos(), angle.sin(), slots, k_cache, v_cache)
        results.append((q, k_cache, v_cache))
    for one, several in zip(*results, strict=True):
        assert torch.equal(one, several)
    assert results[0][0].any()


PLANS = {
    "registers": AttentionPlan(16, 2, 1, 4),
    "registers-many": AttentionPlan(32, 2, 1, 32),
    "pipeline": AttentionPlan(16, 2, 3, 4),
    "pipeline-lone": AttentionPlan(32, 4, 4, 1),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize(("lengths", "heads", "kv_heads", "head_dim", "block_size", "window"), SHAPES[:4:3])
def test_every_plan(
    plan: AttentionPlan, lengths: list[int], heads: int, kv_heads: int, head_dim: int, block_size: int,
    window: int | None, draw: Draw, assert_near: Near, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """One tile and many, one share and more than there are tiles, blocks smaller and larger than a tile."""
    if dtype.itemsize != 2:
        plan = replace(plan, num_stages=max(2, plan.num_stages))  # registers are for elements of two bytes
    monkeypatch.setattr(sys.modules["ostinato.kernels.attention_decode"], "attention_plan", lambda *_: plan)
    batch = Batch(draw, lengths, heads, kv_heads, head_dim, block_size)
    args = (batch.tables, batch.seq_lens, batch.scale)
    wide = [batch.k_cache.double(), batch.v_cache.double()]
    qkv = draw(len(lengths), (heads + 2 * kv_heads) * head_dim)
    angle = torch.rand(len(lengths), head_dim // 2).to(qkv.device) * 6
    rotation = (angle.cos(), angle.sin(), batch.slots)
    out = rotary_attention_decode(qkv, *rotation, batch.k_cache, batch.v_cache, *args, window=window)
    assert_near(out, rotary_attention_decode_ref(qkv.double(), *rotation, *wide, *args, window=window))
    assert_near(batch.k_cache.nan_to_num(), wide[0].nan_to_num())
    assert_near(batch.v_cache.nan_to_num(), wide[1].nan_to_num())


def test_shares_are_merged_in_several_looks(draw: Draw, assert_near: Near, monkeypatch: pytest.MonkeyPatch) -> None:
    """More shares than the merge holds at once; the largest score comes last in one row, and first in the other."""
    monkeypatch.setattr(
        sys.modules["ostinato.kernels.attention_decode"], "attention_plan", lambda *_: AttentionPlan(16, 1, 2, 64)
    )
    batch = Batch(draw, [700, 330], 2, 1, 16, 16)
    for row, slope in enumerate((0.004, -0.004)):
        for key in range(int(batch.seq_lens[row])):
            batch.k_cache[int(batch.tables[row, key // 16]), 0, key % 16] = slope * key
    q = draw(2, 2, 16).abs()
    args = (batch.tables, batch.seq_lens, batch.scale)
    out = attention_decode(q, batch.k_cache, batch.v_cache, *args)
    assert_near(out, attention_decode_ref(q.double(), batch.k_cache.double(), batch.v_cache.double(), *args))


def test_blocks_past_two_to_the_31_elements(
    device: str, dtype: torch.dtype, draw: Draw, vast: Draw, assert_near: Near
) -> None:
    """B44: block 131072 of [blocks, 8, 16, 128] begins at element 2**31. On the CPU only the pages touched exist."""
    shape = kv_cache_shape(131074, 16, 8, 128)
    if dtype == torch.float32:
        shape = kv_cache_shape(65538, 32, 8, 128)
    k_cache, v_cache = vast(*shape), vast(*shape)
    block_size, last = shape[2], shape[0] - 1
    q, k, v = draw(2, 8, 128), draw(2, 8, block_size, 128), draw(2, 8, block_size, 128)
    k_cache[last - 1 :], v_cache[last - 1 :] = k, v
    tables = torch.tensor([[last], [last - 1]], dtype=torch.int32, device=device)
    lens = torch.full((2,), block_size, dtype=torch.int32, device=device)
    small = torch.tensor([[1], [0]], dtype=torch.int32, device=device)
    truth = attention_decode_ref(q.double(), k.double(), v.double(), small, lens, 0.1)
    assert_near(attention_decode(q, k_cache, v_cache, tables, lens, 0.1), truth)
    qkv, still = draw(2, 24 * 128), torch.ones(2, 64, device=device)
    slots = tables[:, 0].long() * block_size + 3
    rotary_kv_write(qkv, still, 0 * still, slots, k_cache, v_cache)
    assert torch.equal(k_cache[tables[:, 0].long(), :, 3], qkv.view(2, 24, 128)[:, 8:16])
    assert torch.equal(v_cache[tables[:, 0].long(), :, 3], qkv.view(2, 24, 128)[:, 16:])
    lens.fill_(4)  # so that this slot is the newest key's
    qkv = draw(2, 24 * 128)
    rotary_attention_decode(qkv, still, 0 * still, slots, k_cache, v_cache, tables, lens, 0.1)
    assert torch.equal(k_cache[tables[:, 0].long(), :, 3], qkv.view(2, 24, 128)[:, 8:16])
    assert torch.equal(v_cache[tables[:, 0].long(), :, 3], qkv.view(2, 24, 128)[:, 16:])


def test_equal_scores_give_the_average(draw: Draw, assert_near: Near) -> None:
    """B47: scores that are all about -6e4 average the values; they are not taken for masked keys."""
    batch = Batch(draw, [70], 2, 1, 64, 16)
    batch.k_cache.fill_(-30.0)
    q = torch.full((1, 2, 64), 30.0, dtype=batch.k_cache.dtype, device=batch.k_cache.device)
    args = (batch.tables, batch.seq_lens, 1.0)
    out = attention_decode(q, batch.k_cache, batch.v_cache, *args)
    assert_near(out, attention_decode_ref(q.double(), batch.k_cache.double(), batch.v_cache.double(), *args))


def test_a_sequence_does_not_depend_on_its_neighbours(draw: Draw) -> None:
    batch = Batch(draw, [100, 45], 4, 2, 64, 16)
    q = draw(2, 4, 64)
    before = attention_decode(q, batch.k_cache, batch.v_cache, batch.tables, batch.seq_lens, 0.125)
    batch.seq_lens[1] = 0
    after = attention_decode(q, batch.k_cache, batch.v_cache, batch.tables, batch.seq_lens, 0.125)
    assert torch.equal(before[0], after[0])


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_contexts_of_128k(head_dim: int) -> None:
    """With the plan that ships, beside a sequence of some keys."""
    length, kv_heads, block_size = 131072, 2, 16
    columns = length // block_size
    caches = [torch.randn(2 + columns, kv_heads, block_size, head_dim, device="cuda").bfloat16() for _ in "kv"]
    tables = (torch.randperm(columns) + 2).to("cuda", torch.int32).repeat(2, 1)
    lens = torch.tensor([length, 77], dtype=torch.int32, device="cuda")
    q = torch.randn(2, 4 * kv_heads, head_dim, device="cuda").bfloat16()
    out = attention_decode(q, *caches, tables, lens, 1.0)
    truth = attention_decode_ref(q.double(), *(cache.double() for cache in caches), tables, lens, 1.0)
    for row, exact in zip(out.double(), truth, strict=True):
        assert (row - exact).norm() <= 8e-3 * exact.norm()
