"""From the rotary keys of a `config.json`, in any of their spellings, to a `RotaryConfig`."""

import math
from typing import Any

from .config_reader import ConfigReader, UnsupportedModelError
from .families import Family
from .rotary import RotaryConfig

SCALING = ("factor", "short_factor", "long_factor")
"""Keys of a rotary block that only mean something with a kind."""


def read_rotary(reader: ConfigReader, family: Family, head_dim: int, max_position: int) -> RotaryConfig:
    """Both spellings: `rope_parameters` (with the theta inside), and `rope_theta` beside `rope_scaling`.

    Nested theta and rotated part win over those at the top; the original length at the top wins over a nested one, and
    `max_position` stands in for both. All three are the order in which transformers looks.

    Raises:
        UnsupportedModelError: a kind that the family cannot have, or numbers that make no sense.
    """
    rope = ConfigReader(_rope_block(reader.config))
    part = rope.positive("partial_rotary_factor", reader.positive("partial_rotary_factor", 1.0))
    if part != 1.0 and ("partial_rotary_factor" not in family.keys or part > 1.0):
        supported = "up to 1.0" if "partial_rotary_factor" in family.keys else "1.0 or null"
        raise UnsupportedModelError(
            f"config key partial_rotary_factor = {part!r} is not supported; supported: {supported}"
        )
    rotary_dim = int(head_dim * part)
    kind = rope.config.get("rope_type", "default")
    if family.name == "phi3" and kind in ("su", "yarn"):
        kind = "longrope"  # as the first Phi-3 checkpoints call it
    if kind not in family.rotary_kinds:
        raise UnsupportedModelError(f"rope_type {kind!r} is not supported; supported: {', '.join(family.rotary_kinds)}")
    theta = rope.positive("rope_theta", reader.positive("rope_theta", 10000.0))
    if kind == "default":
        return RotaryConfig(kind, theta, rotary_dim)
    if kind in ("linear", "dynamic"):
        return RotaryConfig(kind, theta, rotary_dim, rope.positive("factor"))
    nested = rope.size("original_max_position_embeddings", max_position)
    original = reader.size("original_max_position_embeddings", nested)
    if kind == "llama3":
        return _llama3(rope, theta, rotary_dim, original)
    # The two that may leave their factor to the lengths.
    factor = rope.positive("factor", max_position / original)
    return (_yarn if kind == "yarn" else _longrope)(rope, theta, rotary_dim, original, factor)


def _llama3(rope: ConfigReader, theta: float, rotary_dim: int, original: int) -> RotaryConfig:
    factor = rope.positive("factor")
    low, high = rope.positive("low_freq_factor"), rope.positive("high_freq_factor")
    if not low < high:
        raise UnsupportedModelError(f"low_freq_factor {low} is not below high_freq_factor {high}")
    return RotaryConfig("llama3", theta, rotary_dim, factor, low, high, original)


def _yarn(rope: ConfigReader, theta: float, rotary_dim: int, original: int, factor: float) -> RotaryConfig:
    """The attention factor is given, or follows from `mscale` and `mscale_all_dim` if both are, or from the factor."""
    fast, slow = rope.positive("beta_fast", 32.0), rope.positive("beta_slow", 1.0)
    if fast < slow:
        raise UnsupportedModelError(f"beta_fast {fast} is below beta_slow {slow}")
    if theta <= 1.0:
        raise UnsupportedModelError(f"rope_theta {theta} must be above 1 for yarn")
    magnitude = _yarn_magnitude(factor, 1.0)
    if rope.config.get("mscale", 0) and rope.config.get("mscale_all_dim", 0):
        magnitude = _yarn_magnitude(factor, rope.positive("mscale"))
        magnitude /= _yarn_magnitude(factor, rope.positive("mscale_all_dim"))
    return RotaryConfig(
        "yarn",
        theta,
        rotary_dim,
        factor,
        original_max_position=original,
        attention_factor=rope.positive("attention_factor", magnitude),
        beta_fast=fast,
        beta_slow=slow,
        truncate=rope.flag("truncate", True),
    )


def _yarn_magnitude(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0


def _longrope(rope: ConfigReader, theta: float, rotary_dim: int, original: int, factor: float) -> RotaryConfig:
    if original < 2:
        raise UnsupportedModelError(f"original_max_position_embeddings {original} must be above 1 for longrope")
    magnitude = 1.0 if factor <= 1.0 else math.sqrt(1.0 + math.log(factor) / math.log(original))
    return RotaryConfig(
        "longrope",
        theta,
        rotary_dim,
        factor,
        original_max_position=original,
        attention_factor=rope.positive("attention_factor", magnitude),
        short_factors=rope.positives("short_factor", rotary_dim // 2),
        long_factors=rope.positives("long_factor", rotary_dim // 2),
    )


def _rope_block(config: Any) -> dict[str, Any]:
    """`rope_scaling` and `rope_parameters` as one, nulls dropped, `type` under its newer name `rope_type`.

    A block without a kind is of the default one: beside another kind it is a contradiction, of which transformers and
    others would make different models.
    """
    merged: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        block = config.get(key, {})
        if not isinstance(block, dict):
            raise UnsupportedModelError(f"config key {key} = {block!r} is not an object")
        if block and not block.keys() & {"type", "rope_type"}:
            scaling = sorted(name for name in SCALING if block.get(name) is not None)
            if scaling:
                raise UnsupportedModelError(
                    f"config key {key} has {', '.join(scaling)}, but no rope_type to say of what"
                )
            block = {"rope_type": "default", **block}
        for name, value in block.items():
            if isinstance(value, dict):
                raise UnsupportedModelError(
                    f"config key {key} by layer type ({', '.join(map(str, block))}) is not supported; "
                    "supported: one block for all layers"
                )
            name = "rope_type" if name == "type" else name
            if value is None:
                continue
            if name in merged and merged[name] != value:
                raise UnsupportedModelError(f"{name} is given twice: {merged[name]!r} and {value!r}")
            merged[name] = value
    return merged
