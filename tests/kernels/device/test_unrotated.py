"""Layers without rotary embedding, whose tables have no columns."""

import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ostinato.kernels import kv_cache_shape, rotary_attention_decode, rotary_attention_decode_ref, rotary_kv_write
from ostinato.kernels._attention_plan import AttentionPlan

PLANS = {"registers": AttentionPlan(32, 1, 1, 4), "pipeline": AttentionPlan(32, 1, 3, 4)}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_nothing_is_rotated(
    plan: AttentionPlan, device: str, dtype: torch.dtype, draw: Callable[..., Tensor],
    assert_near: Callable[[Tensor, Tensor], None], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Keys are cached bit by bit as they came, at 3 keys of context, and so are queries in a prefill."""
    if dtype.itemsize != 2:
        plan = replace(plan, num_stages=max(2, plan.num_stages))  # registers are for elements of two bytes
    monkeypatch.setattr(sys.modules["ostinato.kernels.attention_decode"], "attention_plan", lambda *_: plan)
    k_cache, v_cache = (draw(*kv_cache_shape(3, 16, 1, 16)) for _ in range(2))
    wide = k_cache.double(), v_cache.double()
    qkv, none = draw(1, 4 * 16), torch.empty(1, 20, device=device)[:, :0]
    slots = torch.tensor([2 * 16 + 3], device=device)
    tables, lens = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([[2]], [4]))
    out = rotary_attention_decode(qkv, none, none, slots, k_cache, v_cache, tables, lens, 0.25)
    assert_near(out, rotary_attention_decode_ref(qkv.double(), none, none, slots, *wide, tables, lens, 0.25))
    assert torch.equal(k_cache[2, 0, 3], qkv[0, 32:48])
    assert torch.equal(v_cache[2, 0, 3], qkv[0, 48:])
    assert torch.equal(rotary_kv_write(qkv, none, none, slots, k_cache, v_cache)[0].flatten(), qkv[0, :32])
    assert torch.equal(k_cache[2, 0, 3], qkv[0, 32:48])
