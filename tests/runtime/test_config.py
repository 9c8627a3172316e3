"""Limits of an engine, and the KV cache that follows from them."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ostinato.kernels import FIRST_BLOCK
from ostinato.model import ModelConfig
from ostinato.runtime import EngineConfig
from ostinato.runtime.config import BLOCK_SIZES, plan_kv_cache
from ostinato.runtime.engine_parts import graph_plan

MakeConfig = Callable[..., ModelConfig]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((name, value) for name in ("max_num_seqs", "max_num_batched_tokens") for value in (0, -1, 1.0, True, None)),
        *((name, value) for name in ("max_model_len", "kv_cache_memory_bytes") for value in (0, -7, 2.5, "8", True)),
        *(("block_size", value) for value in (0, 1, 8, 17, 256, 16.0, "16", None)),
        *(("gpu_memory_utilization", value) for value in (0, -0.1, 1.01, float("nan"), float("inf"), "0.9", None)),
    ],
)
def test_a_value_outside_its_limits_is_named(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{field} must be .*{re.escape(repr(value))}"):
        EngineConfig(**{field: value})


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"max_num_seqs": 1, "max_num_batched_tokens": 1, "max_model_len": 1, "kv_cache_memory_bytes": 1},
        {"gpu_memory_utilization": 1},
        *({"block_size": size} for size in BLOCK_SIZES),
    ],
    ids=str,
)
def test_values_at_their_limits_are_accepted(values: dict[str, Any]) -> None:
    config = EngineConfig(**values)
    assert all(getattr(config, name) == value for name, value in values.items())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"graphs": "partly"}, "graphs must be one of .*'partly'"),
        ({"capture": "never"}, "capture must be one of .*'never'"),
        ({"capture_sizes": (1, 0)}, "capture_sizes must be .* got 0"),
        ({"graph_warmup_steps": -1}, "graph_warmup_steps must be .* got -1"),
        ({"graph_memory_bytes": 0}, "graph_memory_bytes must be .* got 0"),
        ({"graphs": "off", "enable_decode_graphs": True}, "contradicts"),
        ({"graphs": "off", "require_graphs": True}, "contradicts"),
        ({"graphs": "whole", "enable_decode_graphs": False, "require_graphs": True}, "contradicts"),
    ],
    ids=str,
)
def test_graph_settings_that_make_no_sense_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**values)


def test_capture_sizes_end_in_max_num_seqs() -> None:
    assert EngineConfig(capture_sizes=(64, 2), max_num_seqs=5).capture_sizes == (2, 5)
    assert EngineConfig().capture_sizes is None


@pytest.mark.parametrize(
    ("values", "path", "forced"),
    [
        ({}, "eager", False),
        ({"graphs": "off"}, "eager", False),
        ({"graphs": "whole"}, "whole", False),
        ({"graphs": "piecewise"}, "piecewise", False),
        ({"enable_decode_graphs": True}, "whole", False),
        ({"graphs": "whole", "enable_decode_graphs": False}, "whole", True),
    ],
    ids=str,
)
def test_what_a_config_means(values: dict[str, Any], path: str, forced: bool) -> None:
    policy, settings = graph_plan(EngineConfig(**values), torch.device("cpu"))
    assert (policy.path.value, policy.forced, policy.lazy_steps) == (path, forced, None)
    assert settings.sizes == (1, 2, 4, 8, 16, 24, 32)
    lazy, _ = graph_plan(EngineConfig(capture="lazy", graph_warmup_steps=0), torch.device("cpu"))
    assert lazy.lazy_steps == 1
    on_gpu, _ = graph_plan(EngineConfig(**values), torch.device("cuda"))
    auto = values.get("graphs", "auto") == "auto"
    assert on_gpu.path.value == ("whole" if auto else path), "auto is whole on a GPU"


sizes = st.fixed_dictionaries(
    {
        "max_num_seqs": st.integers(1, 300),
        "max_model_len": st.none() | st.integers(1, 5000),
        "block_size": st.sampled_from(BLOCK_SIZES),
    }
)


@settings(deadline=None, derandomize=True)
@given(sizes, st.integers(1, 4000), st.sampled_from([torch.float32, torch.bfloat16]), st.integers(-1, 1 << 26))
def test_a_planned_sequence_always_fits_into_what_was_available(
    model_config: MakeConfig, sizes: dict[str, Any], max_position: int, dtype: torch.dtype, available: int
) -> None:
    """B33: or planning fails, which it does only when it must."""
    engine, model = EngineConfig(**sizes), model_config(max_position=max_position)
    block_bytes = model.kv_bytes_per_token(dtype) * engine.block_size
    num_affordable = available // block_bytes - FIRST_BLOCK
    wanted = engine.max_model_len
    try:
        plan = plan_kv_cache(engine, model, dtype, available)
    except ValueError:
        is_too_long = wanted is not None and (wanted > max_position or wanted > num_affordable * engine.block_size)
        assert is_too_long or num_affordable < 1
        return
    assert plan.num_blocks * block_bytes <= available
    assert plan.num_usable_blocks == plan.num_blocks - FIRST_BLOCK
    assert 1 <= plan.max_model_len <= plan.num_usable_blocks * engine.block_size
    if wanted is None:
        assert plan.max_model_len == min(max_position, num_affordable * engine.block_size)
    else:
        assert plan.max_model_len == wanted
    blocks_of_longest = -(-plan.max_model_len // engine.block_size)
    assert plan.num_usable_blocks <= engine.max_num_seqs * blocks_of_longest


@settings(deadline=None, derandomize=True)
@given(sizes, st.integers(1 << 14, 1 << 24))
def test_more_memory_never_plans_less(model_config: MakeConfig, sizes: dict[str, Any], available: int) -> None:
    engine, model = EngineConfig(**sizes), model_config(max_position=5000)
    try:
        less = plan_kv_cache(engine, model, torch.float32, available)
    except ValueError:
        assume(False)
    more = plan_kv_cache(engine, model, torch.float32, 2 * available)
    assert more.num_blocks >= less.num_blocks
    assert more.max_model_len >= less.max_model_len


def bytes_of(model: ModelConfig, num_blocks: int, block_size: int = 16) -> int:
    return num_blocks * block_size * model.kv_bytes_per_token(torch.float32)


def test_b33_a_length_that_does_not_fit_is_refused_with_both_numbers(model_config: MakeConfig) -> None:
    """B33: the pool of 32 blocks has 2 that no sequence may use."""
    model = model_config(max_position=2048)
    available = bytes_of(model, 32)
    with pytest.raises(ValueError, match=r"max_model_len 1024 .*\b480 tokens"):
        plan_kv_cache(EngineConfig(block_size=16, max_model_len=1024), model, torch.float32, available)
    with pytest.raises(ValueError, match=r"max_model_len 481 .*\b480 tokens"):
        plan_kv_cache(EngineConfig(block_size=16, max_model_len=481), model, torch.float32, available)
    assert (
        plan_kv_cache(EngineConfig(block_size=16, max_model_len=480), model, torch.float32, available).num_blocks == 32
    )


def test_b33_a_length_that_nobody_asked_for_shrinks_to_the_pool(model_config: MakeConfig) -> None:
    """B33"""
    model = model_config(max_position=1024)
    plan = plan_kv_cache(EngineConfig(block_size=16), model, torch.float32, bytes_of(model, 32))
    assert plan.max_model_len == 480
    assert plan.num_usable_blocks == 30


def test_a_length_above_the_models_is_refused_with_both_numbers(model_config: MakeConfig) -> None:
    with pytest.raises(ValueError, match=r"max_model_len 257 .*\b256 tokens"):
        plan_kv_cache(EngineConfig(max_model_len=257), model_config(max_position=256), torch.float32, 1 << 30)


@pytest.mark.parametrize("short_by", [1, 10**9], ids=["one byte", "everything"])
def test_a_pool_without_one_block_is_refused_with_both_numbers(model_config: MakeConfig, short_by: int) -> None:
    """B33: what the message names as the least is enough."""
    model, config = model_config(), EngineConfig(block_size=16)
    least = bytes_of(model, FIRST_BLOCK + 1)
    available = max(0, least - short_by)
    with pytest.raises(ValueError, match=rf"^{available} bytes .*\b{least} bytes"):
        plan_kv_cache(config, model, torch.float32, available)
    assert plan_kv_cache(config, model, torch.float32, least).max_model_len == 16


@pytest.mark.parametrize(
    ("name", "value"),
    [("enable_decode_graphs", "no"), ("require_graphs", 1), ("split_large_batches", None), ("run_ahead", 0)],
)
def test_switches_are_true_or_false(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"^{name} must be True or False, got {value!r}"):
        EngineConfig(**{name: value})
