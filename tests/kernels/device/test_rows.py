"""The small ops: norms, gathers, the step state, and the greedy choice."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ostinato.kernels import (
    SINK_BLOCK,
    add_rms_norm,
    add_rms_norm_ref,
    commit,
    commit_ref,
    embedding,
    embedding_ref,
    greedy,
    greedy_ref,
    residual_add,
    residual_add_ref,
    rms_norm,
    rms_norm_ref,
    rotary_kv_write,
    rotary_rows,
    rotary_rows_ref,
    slot_mapping,
    slot_mapping_ref,
    swiglu,
    update_rows,
    update_rows_ref,
)

Draw = Callable[..., Tensor]
Near = Callable[[Tensor, Tensor], None]


@pytest.mark.parametrize("shape", [(1, 576), (5, 63), (3, 9, 80), (2, 3, 1)], ids=str)
def test_rms_norm(shape: tuple[int, ...], draw: Draw, assert_near: Near) -> None:
    """B48: rows of a larger buffer, such as the heads of a fused projection."""
    x = draw(*shape[:-1], shape[-1] + 5)[..., 2:-3]
    weight = draw(shape[-1])
    out = torch.full((*shape[:-1], shape[-1] + 1), float("nan"), dtype=x.dtype, device=x.device)
    assert_near(rms_norm(x, weight, 1e-5, out=out[..., :-1]), rms_norm_ref(x.double(), weight.double(), 1e-5))
    assert out[..., -1].isnan().all()


def test_add_rms_norm_equals_its_parts(draw: Draw) -> None:
    """B59: the sum is rounded before it is normed: fused and separate are the same bits, and 256 + 1 is 256 in bf16."""
    x, residual, weight = draw(4, 200), draw(4, 200), draw(200)
    residual[0] = 256.0
    x[0] = 1.0
    normed, total = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, rms_norm(total, weight, 1e-5))
    assert torch.equal(total, add_rms_norm_ref(x, residual, weight, 1e-5)[1])
    again, same = add_rms_norm(x, residual, weight, 1e-5, out_sum=residual)
    assert same is residual
    assert torch.equal(again, normed)
    assert torch.equal(residual, total)


@pytest.mark.parametrize("op", ["rms_norm", "residual_add", "rotary_kv_write"])
def test_a_norm_is_rounded_before_the_product_with_its_weight(op: str, draw: Draw, dtype: torch.dtype) -> None:
    """B59: the order of the Llama family. The other changes a quarter of all elements; a sum in another order hardly
    any."""
    half = torch.float16 if dtype == torch.float32 else dtype
    x, weight = draw(32, 96).to(half), draw(96).to(half)
    expected = rms_norm_ref(x, weight, 1e-5)
    if op == "rms_norm":
        result = rms_norm(x, weight, 1e-5)
    elif op == "residual_add":
        result = residual_add(x, torch.zeros_like(x), norm_weight=weight, norm_eps=1e-5)
    else:
        caches = [torch.zeros(4, 1, 16, 96, dtype=half, device=x.device) for _ in "kv"]
        still, slots = torch.zeros(32, 4, device=x.device)[:, :0], torch.arange(16, 48, device=x.device)
        norms = {"q_norm_weight": weight, "k_norm_weight": weight, "norm_eps": 1e-5}
        result = rotary_kv_write(x.repeat(1, 3), still, still, slots, *caches, **norms)[:, 0]
        assert torch.equal(caches[0][1:3, 0].flatten(0, 1), result)
    assert (result != expected).float().mean() < 0.01


@pytest.mark.parametrize("scale", [1.0, 0.22])
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("shape", [(1, 576), (5, 63)], ids=str)
def test_residual_add(shape: tuple[int, int], normed: bool, scale: float, draw: Draw, assert_near: Near) -> None:
    """B48: rows of larger buffers, and a result that replaces the residual."""
    x, residual = (draw(shape[0], shape[1] + 5)[:, 2:-3] for _ in range(2))
    weight = draw(shape[1]) if normed else None
    expected = residual_add_ref(
        x.double(), residual.double(), scale=scale, norm_weight=None if weight is None else weight.double(),
        norm_eps=1e-5,
    )  # fmt: skip
    kept = residual.clone()
    result = residual_add(x, residual, scale=scale, norm_weight=weight, norm_eps=1e-5)
    assert_near(result, expected)
    assert torch.equal(residual, kept)
    assert residual_add(x, residual, scale=scale, norm_weight=weight, norm_eps=1e-5, out=residual) is residual
    assert torch.equal(residual, result)
    # A float32 product may go into the sum unrounded, as an FMA.
    if not normed and (scale == 1.0 or x.dtype != torch.float32):
        assert torch.equal(result, residual_add_ref(x, kept, scale=scale))


def test_large_squares_do_not_overflow(draw: Draw) -> None:
    """B59: a float16 row of 300s is normed to ones."""
    weight = draw(64)
    assert torch.equal(rms_norm(torch.full_like(draw(1, 64), 300.0), weight, 1e-5)[0], weight)


@pytest.mark.parametrize(("tokens", "size"), [(1, 576), (7, 33), (3, 1100)])
def test_embedding(tokens: int, size: int, draw: Draw) -> None:
    weight = draw(50, size + 3)[:, 1 : size + 1]
    ids = torch.randint(50, (tokens,)).to(weight.device)
    out = torch.full((tokens + 1, size + 2), float("nan"), dtype=weight.dtype, device=weight.device)
    assert torch.equal(embedding(ids, weight, out=out[:tokens, 1:-1]), embedding_ref(ids, weight))
    assert out[tokens].isnan().all()
    assert out[:, 0].isnan().all()
    assert torch.equal(embedding(ids, weight, scale=2.7), embedding_ref(ids, weight, scale=2.7))


def test_rms_norm_in_place(draw: Draw) -> None:
    """Queries and keys, as columns of a fused projection."""
    qkv, weight = draw(3, 60), draw(40)
    expected, rest = rms_norm(qkv[:, :40].clone(), weight, 1e-5), qkv[:, 40:].clone()
    rms_norm(qkv[:, :40], weight, 1e-5, out=qkv[:, :40])
    assert torch.equal(qkv[:, :40], expected)
    assert torch.equal(qkv[:, 40:], rest)


def test_rotary_rows(device: str) -> None:
    """Positions past the tables get the last row."""
    cos, sin = torch.rand(20, 40).to(device), torch.rand(20, 40).to(device)
    positions = torch.tensor([0, 19, 20, 5000, 7], device=device)
    for ours, truth in zip(rotary_rows(positions, cos, sin), rotary_rows_ref(positions, cos, sin), strict=True):
        assert torch.equal(ours, truth)


@pytest.mark.parametrize("packed", [False, True], ids=["decode", "packed"])
def test_slot_mapping(packed: bool, device: str) -> None:
    """Positions past the table's reach and tokens past the last query offset go to the sink."""
    tables = (torch.randperm(40).view(4, 10) + 2).to(device, torch.int32)[:, :7]  # of wider ones
    tables[1, 1] = 2**31 - 1  # B44: whose slots need more than 32 bits
    positions = torch.tensor([0, 16, 111, 112, 5, 6][: 6 if packed else 4], device=device)
    offsets = torch.tensor([0, 2, 2, 4, 5], dtype=torch.int32, device=device) if packed else None
    slots = slot_mapping(positions, tables, 16, cu_seqlens_q=offsets)
    assert torch.equal(slots, slot_mapping_ref(positions, tables, 16, cu_seqlens_q=offsets))
    assert slots[-1 if packed else 3] // 16 == SINK_BLOCK


@pytest.mark.parametrize("rows", [1, 5, 130])
def test_commit(rows: int, device: str) -> None:
    """Dead rows do not move, the last one among them; the ring wraps around; nothing beyond the rows changes."""
    state = [torch.randint(9, (rows + 2,)), torch.arange(rows + 2), torch.randint(3, (rows + 2,), dtype=torch.int32)]
    state[2][rows - 1] = 0
    ours, theirs = ([tensor.clone().to(device) for tensor in state] for _ in range(2))
    ring, step = torch.zeros(3, rows + 4, dtype=torch.int64, device=device), torch.tensor([4], device=device)
    ring_ref, step_ref = ring.clone(), step.clone()
    for _ in range(4):
        sampled = torch.randint(1000, (rows,)).to(device)
        commit(sampled, *(tensor[:rows] for tensor in ours), ring, step)
        commit_ref(sampled, *(tensor[:rows] for tensor in theirs), ring_ref, step_ref)
    for mine, truth in zip([*ours, ring, step], [*theirs, ring_ref, step_ref], strict=True):
        assert torch.equal(mine, truth)


@pytest.mark.parametrize("columns", [1, 7, 1500])
def test_update_rows(columns: int, device: str) -> None:
    rows, updates = 6, torch.randint(100, (3, 4 + columns)).to(device)
    updates[:, 0] = torch.tensor([4, 0, 5], device=device)
    ours = [torch.full(shape, -7, dtype=kind, device=device) for shape, kind in (
        ((rows,), torch.int64), ((rows,), torch.int64), ((rows,), torch.int32), ((rows, columns + 3), torch.int32),
    )]  # fmt: skip
    theirs = [tensor.clone() for tensor in ours]
    update_rows(updates, *ours[:3], ours[3][:, 1:-2])
    update_rows_ref(updates, *theirs[:3], theirs[3][:, 1:-2])
    for mine, truth in zip(ours, theirs, strict=True):
        assert torch.equal(mine, truth)


@pytest.mark.parametrize("vocab", [3, 4096, 49152 // 4 + 1], ids=str)
def test_greedy(vocab: int, draw: Draw) -> None:
    """B27: a tie goes to the lowest id, also across chunks; ids at and above the limit never win."""
    logits = draw(4, vocab + 1)[:, :vocab]
    logits[1, [vocab - 1, vocab // 2]] = 50.0
    logits[2] = float("-inf")
    logits[3, -1] = 60.0
    assert torch.equal(greedy(logits), greedy_ref(logits))
    assert greedy(logits)[1] == vocab // 2
    limited = greedy(logits, vocab_limit=vocab - 1)
    assert torch.equal(limited, greedy_ref(logits, vocab_limit=vocab - 1))
    assert limited[3] < vocab - 1


@pytest.mark.parametrize("vocab", [3, 4096, 49152 // 4 + 1], ids=str)
def test_greedy_of_nan(vocab: int, draw: Draw) -> None:
    """A row of NaN, as overflow leaves it, gives an id of the vocabulary; a single NaN never wins."""
    logits = draw(3, vocab)
    logits[0] = float("nan")
    logits[1, : vocab // 2 + 1] = float("nan")
    logits[2, 0] = float("nan")
    token_ids = greedy(logits)
    assert torch.equal(token_ids, greedy_ref(logits))
    assert token_ids[0] == 0
    assert not logits[[1, 2], token_ids[1:]].isnan().any()


def test_columns_with_a_stride_are_refused(draw: Draw) -> None:
    """B48: not read as if they were contiguous."""
    x, weight = draw(4, 128)[:, ::2], draw(64)
    for op in (
        lambda: rms_norm(x, weight, 1e-5),
        lambda: rms_norm(x.contiguous(), weight, 1e-5, out=x),
        lambda: add_rms_norm(x.contiguous(), x, weight, 1e-5),
        lambda: residual_add(x, x.contiguous()),
        lambda: swiglu(x),
        lambda: embedding(torch.arange(4, device=x.device), x),
        lambda: greedy(x),
    ):
        with pytest.raises(AssertionError, match="contiguous"):
            op()
