import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ostinato.kernels import attention_decode, attention_prefill, attention_prefill_ref, kv_cache_shape
from ostinato.kernels._attention_plan import PrefillPlan

Draw = Callable[..., Tensor]
Near = Callable[[Tensor, Tensor], None]
Paged = Callable[..., Any]
MODULE = "ostinato.kernels.attention_prefill"


class Batch:
    """Random sequences of (cached, new) tokens in a cache that is NaN wherever no key lies.

    Both caches lie in one pool, and tables in wider ones, as a step's do in those of the whole engine.
    """

    def __init__(
        self, draw: Draw, paged: Paged, counts: list[tuple[int, int]], kv_heads: int, head_dim: int, block_size: int
    ) -> None:
        keys, values = ([draw(cached + new, kv_heads, head_dim) for cached, new in counts] for _ in "kv")
        k_cache, v_cache, tables, self.seq_lens = paged(keys, values, block_size).tensors()
        self.k_cache, self.v_cache = torch.stack((k_cache, v_cache), 1).unbind(1)
        self.tables = F.pad(tables, (1, 2))[:, 1:-2]
        self.offsets = torch.tensor([0, *(new for _, new in counts)]).cumsum(0).to(self.tables)
        self.num_tokens = int(self.offsets[-1])
        self.scale = head_dim**-0.5

    def attend(self, q: Tensor, **options: Any) -> Tensor:
        lens = (self.tables, self.seq_lens, self.offsets, self.scale)
        return attention_prefill(q, self.k_cache, self.v_cache, *lens, **options)

    def truth(self, q: Tensor, window: int | None = None) -> Tensor:
        lens = (self.tables, self.seq_lens, self.offsets, self.scale)
        return attention_prefill_ref(q.double(), self.k_cache.double(), self.v_cache.double(), *lens, window=window)


SHAPES = [
    # (cached, new) tokens of each sequence, heads, kv_heads, head_dim, block_size, window
    pytest.param([(0, 17), (5, 3), (0, 0), (40, 20)], 6, 2, 64, 16, None, id="group3-d64"),
    pytest.param([(0, 40), (33, 1)], 4, 1, 128, 32, None, id="group4-d128"),
    pytest.param([(70, 20)], 1, 1, 80, 16, None, id="mha-d80"),
    pytest.param([(90, 12), (0, 35)], 4, 2, 96, 64, 50, id="group2-d96-window"),
    pytest.param([(2, 33), (129, 2)], 5, 1, 112, 128, 24, id="group5-d112-window"),
    pytest.param([(16, 8)], 7, 1, 256, 16, None, id="group7-d256"),
    pytest.param([(9, 11), (0, 1)], 24, 1, 64, 16, 1, id="group24-window1"),
    pytest.param([(20, 13)], 9, 1, 192, 64, None, id="group9-d192"),
    pytest.param([(6, 20)], 8, 1, 20, 16, 7, id="group8-d20"),
]
FIELDS = ("counts", "heads", "kv_heads", "head_dim", "block_size", "window")


@pytest.mark.parametrize(FIELDS, SHAPES)
def test_attention_prefill(
    counts: list[tuple[int, int]], heads: int, kv_heads: int, head_dim: int, block_size: int, window: int | None,
    draw: Draw, paged: Paged, assert_near: Near, nan_poison: Draw, device: str, dtype: torch.dtype,
) -> None:  # fmt: skip
    """B45, B47: ragged, with and without context, poison wherever no key lies, padding behind, strided in and out."""
    batch = Batch(draw, paged, counts, kv_heads, head_dim, block_size)
    q = draw(batch.num_tokens + 2, heads + 1, head_dim + 3)[:, 1:, 2 : head_dim + 2]
    buffer = nan_poison(batch.num_tokens + 3, heads, head_dim + 4, dtype=dtype, device=device)
    out = buffer[:-1, :, :head_dim]
    assert batch.attend(q, window=window, out=out) is out
    assert_near(out, batch.truth(q, window))
    assert (out[batch.num_tokens :] == 0).all()
    assert buffer[-1].isnan().all()
    assert buffer[..., head_dim:].isnan().all()


PLANS = {
    "tall": PrefillPlan(64, 16, 4, 2, 1),
    "wide": PrefillPlan(16, 32, 2, 3, 1),
    "shares": PrefillPlan(16, 16, 2, 3, 4),
    "shares without keys": PrefillPlan(32, 32, 4, 2, 8),
}
PLANNED = [([(0, 7), (43, 1)], 3, 1, 64, 16, None), ([(50, 3)], 4, 2, 20, 64, 24)]


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize(FIELDS, PLANNED, ids=["group3-d64", "window"])
def test_every_plan(
    plan: PrefillPlan, counts: list[tuple[int, int]], heads: int, kv_heads: int, head_dim: int, block_size: int,
    window: int | None, draw: Draw, paged: Paged, assert_near: Near, dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if dtype.itemsize > 2:
        plan = replace(plan, block_m=min(32, plan.block_m), block_n=16, num_warps=8)
    monkeypatch.setattr(sys.modules[MODULE], "prefill_plan", lambda *_: plan)
    batch = Batch(draw, paged, counts, kv_heads, head_dim, block_size)
    q = draw(batch.num_tokens + 2, heads, head_dim)  # two of padding
    assert_near(batch.attend(q, window=window), batch.truth(q, window))


def test_shares_without_keys_change_no_bit(
    draw: Draw, paged: Paged, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B47: two tiles of keys, shared out to two programs or to eight."""
    batch = Batch(draw, paged, [(50, 3), (6, 2)], 1, 16, 16)
    q, results = draw(batch.num_tokens, 2, 16), []
    for splits in (2, 8):
        plan = PrefillPlan(16, 32, 4, 2, splits)
        monkeypatch.setattr(sys.modules[MODULE], "prefill_plan", lambda *_, plan=plan: plan)
        results.append(batch.attend(q))
    assert torch.equal(*results)


@pytest.mark.parametrize("queries", [3, pytest.param(16, marks=pytest.mark.gpu)])
def test_a_few_queries_each_are_decodes(queries: int, draw: Draw, paged: Paged, assert_near: Near) -> None:
    """Verification: query i of a sequence is what a decode at that length gives; rows that are not live give zeros."""
    lengths = [queries, 17, 20]
    batch = Batch(draw, paged, [(length - queries, queries) for length in lengths], 1, 64, 16)
    q = draw(batch.num_tokens, 3, 64)
    out = batch.attend(q).view(3, queries, 3, 64)
    for i in range(queries):
        lens = batch.seq_lens - (queries - 1 - i)
        row = attention_decode(q[i::queries], batch.k_cache, batch.v_cache, batch.tables, lens, batch.scale)
        assert_near(out[:, i], row)
    batch.seq_lens[1] = 0
    dead = batch.attend(q).view_as(out)
    assert (dead[1] == 0).all()
    assert torch.equal(dead[::2], out[::2])
    assert_near(dead.flatten(0, 1), batch.truth(q))


def test_many_sequences(draw: Draw, paged: Paged, assert_near: Near) -> None:
    """More than one look at the offsets; most sequences have no query."""
    batch = Batch(draw, paged, [(3, int(i % 20 == 0)) for i in range(131)], 1, 16, 16)
    q = draw(batch.num_tokens, 2, 16)
    assert_near(batch.attend(q), batch.truth(q))


def test_blocks_past_two_to_the_31_elements(
    device: str, dtype: torch.dtype, draw: Draw, vast: Draw, assert_near: Near
) -> None:
    """B44: block 131072 of [blocks, 8, 16, 128] begins at element 2**31. On the CPU only the pages touched exist."""
    shape = kv_cache_shape(131074, 16, 8, 128) if dtype.itemsize == 2 else kv_cache_shape(65538, 32, 8, 128)
    k_cache, v_cache = vast(*shape), vast(*shape)
    last = shape[0] - 1
    q, k, v = draw(5, 8, 128), draw(2, *shape[1:]), draw(2, *shape[1:])
    k_cache[last - 1 :], v_cache[last - 1 :] = k, v
    tables = torch.tensor([[last], [last - 1]], dtype=torch.int32, device=device)
    small = torch.tensor([[1], [0]], dtype=torch.int32, device=device)
    lens, offsets = torch.tensor([9, 16]).to(tables), torch.tensor([0, 3, 5]).to(tables)
    truth = attention_prefill_ref(q.double(), k.double(), v.double(), small, lens, offsets, 0.1)
    assert_near(attention_prefill(q, k_cache, v_cache, tables, lens, offsets, 0.1), truth)


def test_equal_scores_give_the_average(draw: Draw, paged: Paged, assert_near: Near) -> None:
    """B47: scores that are all about -6e4 average the values; they are not taken for masked keys."""
    batch = Batch(draw, paged, [(30, 6)], 1, 64, 16)
    batch.k_cache.fill_(-30.0)
    batch.scale = 1.0
    q = torch.full((6, 2, 64), 30.0, dtype=batch.k_cache.dtype, device=batch.k_cache.device)
    assert_near(batch.attend(q), batch.truth(q))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("window", [None, 300])
def test_long_prompts(head_dim: int, window: int | None, paged: Paged) -> None:
    """Tiles of every kind in the plans that ship: chunks of 1,000 tokens, with and without context, in bf16."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda").bfloat16()

    batch = Batch(draw, paged, [(0, 1000), (777, 350), (2000, 1)], 2, head_dim, 16)
    q = draw(batch.num_tokens, 8, head_dim)
    truth = batch.truth(q, window)
    assert (batch.attend(q, window=window).double() - truth).norm() <= 8e-3 * truth.norm()


@pytest.mark.gpu
def test_replays_with_other_lengths(paged: Paged) -> None:
    """A graph of four queries a sequence: lengths, one of them 0, and queries are the device's."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda").bfloat16()

    batch = Batch(draw, paged, [(296, 4), (1000, 4), (96, 4), (10, 4)], 2, 64, 16)
    q = draw(batch.num_tokens, 8, 64)
    out = batch.attend(q)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batch.attend(q, out=out)
    for lengths in ([300, 1004, 100, 14], [4, 0, 5, 12], [150, 999, 0, 1]):
        batch.seq_lens.copy_(torch.tensor(lengths))
        q.copy_(draw(*q.shape))
        graph.replay()
        assert torch.equal(out, batch.attend(q)), "a replay is the eager call, bit for bit"
        truth = batch.truth(q)
        assert (out.double() - truth).norm() <= 8e-3 * truth.norm()
