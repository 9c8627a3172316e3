"""B44: rows of activations and weights that begin past 2**31 elements, for every kernel that takes strided rows.

Nine rows lie 2**28 elements apart, so that strides fit 32 bits and the place of the last row does not.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato import kernels as k
from ostinato.kernels._linear_call import LinearCall
from ostinato.kernels._linear_plan import LinearPlan
from ostinato.kernels.linear import linear_planned

Draw = Callable[..., Tensor]
ROWS, APART = 9, 2**28 + 16
WIDTH = 64


@pytest.fixture
def far(vast: Draw, draw: Draw) -> Draw:
    """Random rows, far from each other; what is made at another place lies between."""
    buffer = vast((ROWS - 1) * APART + 1024)

    def make(width: int, at: int = 0) -> Tensor:
        rows = buffer[at:].as_strided((ROWS, width), (APART, 1))
        rows.copy_(draw(ROWS, width))
        return rows

    return make


def norm(x: Tensor, out: Tensor | None) -> Tensor:
    return k.rms_norm(x, torch.ones_like(x[0]), 1e-5, out=out)


def residual_norm(x: Tensor, out: Tensor | None) -> Tensor:
    return k.add_rms_norm(x, x, torch.ones_like(x[0]), 1e-5, out=out)[0]


def sum_of_residual_norm(x: Tensor, out: Tensor | None) -> Tensor:
    return k.add_rms_norm(x, x, torch.ones_like(x[0]), 1e-5, out_sum=out)[1]


def added(x: Tensor, out: Tensor | None) -> Tensor:
    return k.residual_add(x, x, scale=0.5, out=out)


def gathered(x: Tensor, out: Tensor | None) -> Tensor:
    return k.embedding(torch.arange(ROWS, device=x.device).flip(0), x, out=out)


def normed_heads(x: Tensor, out: Tensor | None) -> Tensor:
    """Rows that are addressed by token and head."""
    heads = None if out is None else out.unflatten(1, (2, -1))
    return k.rms_norm(x.unflatten(1, (2, -1)), torch.ones_like(x[0, : x.shape[1] // 2]), 1e-5, out=heads).flatten(1)


def prefill(x: Tensor, out: Tensor | None) -> Tensor:
    """Queries of one sequence with as many keys."""
    cache = torch.arange(16, dtype=x.dtype, device=x.device)[:, None].expand(3, 1, 16, 16).contiguous()
    table, length, offsets = (torch.tensor(v, dtype=torch.int32, device=x.device) for v in ([[2]], [ROWS], [0, ROWS]))
    heads = None if out is None else out.unflatten(1, (-1, 16))
    return k.attention_prefill(x.unflatten(1, (-1, 16)), cache, cache, table, length, offsets, 0.2, out=heads).flatten(
        1
    )


def decode(x: Tensor, out: Tensor | None) -> Tensor:
    """One query head with every key head; the values are written, and come back as they are the only ones."""
    caches = [torch.zeros(1 + ROWS, 1, 16, 16, dtype=x.dtype, device=x.device) for _ in "kv"]
    tables = torch.arange(1, 1 + ROWS, dtype=torch.int32, device=x.device)[:, None]
    still = torch.zeros(ROWS, 4, device=x.device)[:, :0]
    heads = None if out is None else out.unflatten(1, (-1, 16))
    slots, lens = tables[:, 0].long() * 16, torch.ones(ROWS, dtype=torch.int32, device=x.device)
    return k.rotary_attention_decode(x, still, still, slots, *caches, tables, lens, 0.2, out=heads).flatten(1)


def rotated(x: Tensor, out: Tensor | None) -> Tensor:
    caches = [torch.zeros(1 + ROWS, 1, 16, 16, dtype=x.dtype, device=x.device) for _ in "kv"]
    still = torch.zeros(ROWS, 4, device=x.device)[:, :0]
    heads = None if out is None else out.unflatten(1, (-1, 16))
    q = k.rotary_kv_write(x, still, still, 16 * torch.arange(1, 1 + ROWS, device=x.device), *caches, out=heads)
    torch.testing.assert_close(caches[1][1:, 0, 0], x[:, -16:], rtol=0, atol=0)
    return q.flatten(1)


def chosen(x: Tensor, out: Tensor | None) -> Tensor:
    return k.greedy(x)


def probable(x: Tensor, out: Tensor | None) -> Tensor:
    return torch.cat([result.reshape(ROWS, -1) for result in k.logprobs(x, torch.arange(ROWS, device=x.device), 4)], 1)


def sampled(x: Tensor, out: Tensor | None) -> Tensor:
    index = torch.arange(ROWS, device=x.device)
    reals = torch.tensor([[1.0, 1.0, 0.0, 1.0, 0.0, 0.0]], device=x.device).repeat(ROWS, 1)
    lists = [torch.zeros(ROWS, 1, dtype=kind, device=x.device) for kind in (torch.int64, torch.float32, torch.int64)]
    banned = torch.zeros(ROWS, 1, dtype=torch.bool, device=x.device)
    state = k.SamplingRows(reals, torch.ones(ROWS, 4, dtype=torch.int64, device=x.device) * 7, *lists, banned)
    return k.sample_rows(x, index, index, state, k.SampleSteps(random=True, top_k=True))


def masked(x: Tensor, out: Tensor | None) -> Tensor:
    """In place; the rows of the mask in another order than those of the logits."""
    allowed = torch.arange(x.shape[1]) % (2 + torch.arange(ROWS)[:, None]) == 0
    k.token_bitmask(x, torch.arange(ROWS, device=x.device).flip(0), k.pack_token_bitmask(allowed).to(x.device))
    return x


OPS: dict[str, tuple[Callable[[Tensor, Any], Tensor], int]] = {
    # with the width of the result, 0 where that is not rows
    "rms_norm": (norm, WIDTH),
    "rms_norm of heads": (normed_heads, WIDTH),
    "add_rms_norm": (residual_norm, WIDTH),
    "sum of add_rms_norm": (sum_of_residual_norm, WIDTH),
    "residual_add": (added, WIDTH),
    "swiglu": (lambda x, out: k.swiglu(x, out=out), WIDTH // 2),
    "embedding": (gathered, WIDTH),
    "attention_prefill": (prefill, WIDTH),
    "rotary_attention_decode": (decode, WIDTH - 32),
    "rotary_kv_write": (rotated, WIDTH - 32),
    "greedy": (chosen, 0),
    "logprobs": (probable, 0),
    "sample_rows": (sampled, 0),
    "token_bitmask": (masked, 0),
}


@pytest.mark.parametrize(("op", "width"), OPS.values(), ids=OPS)
def test_rows(op: Callable[[Tensor, Any], Tensor], width: int, far: Draw) -> None:
    x = far(WIDTH)
    out = far(width, 512) if width else None
    expected = op(x.contiguous(), None)
    result = op(x, out)
    assert torch.equal(result, expected)
    assert out is None or torch.equal(out, expected)


PLANS = {
    "gemv": LinearPlan("gemv", 1, 256, 1, early=1),
    "gemv of two chunks": LinearPlan("gemv", 1, 32, 1, early=1),
    "gemv in a loop": LinearPlan("gemv", 1, 256, 1, programs_per_sm=1),
    "tensor": LinearPlan("tensor", 16, 32, 4, num_stages=2),
    "slices": LinearPlan("tensor", 16, 16, 4, num_stages=2, slices=4),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_weights(plan: LinearPlan, far: Draw, draw: Draw) -> None:
    weight, x = far(WIDTH), draw(2, WIDTH)
    near = linear_planned(LinearCall(x, weight.contiguous()), plan)
    assert torch.equal(linear_planned(LinearCall(x, weight), plan), near)


@pytest.mark.parametrize("split", [1, 2])
def test_tokens_of_a_product(split: int, far: Draw, draw: Draw) -> None:
    """Such as logits of many rows, with tensor cores."""
    plan = LinearPlan("tensor", 16, 32, 4, num_stages=2, split_k=split)
    weight, x, residual, out = draw(40, WIDTH), far(WIDTH), far(40, 256), far(40, 512)
    near = linear_planned(LinearCall(x.contiguous(), weight, residual=residual.contiguous()), plan)
    assert linear_planned(LinearCall(x, weight, residual=residual, out=out), plan) is out
    assert torch.equal(out, near)
