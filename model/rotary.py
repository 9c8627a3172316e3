"""Rotary embedding: its numbers, and its tables, computed in float64 and kept in float32 whatever the model's dtype."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .families import RotaryKind


@dataclass(frozen=True)
class RotaryConfig:
    """Rotary position embedding.

    Attributes:
        kind: how `theta`'s frequencies are scaled for long contexts.
        theta: base of the frequencies.
        rotary_dim: leading elements of a head that are rotated.
        factor: the context is this many times longer than in pre-training; for every kind but `default`.
        low_freq_factor, high_freq_factor: `llama3` only.
        original_max_position: positions of pre-training; `llama3`, `yarn` and `longrope`.
        attention_factor: both tables are multiplied by it; `yarn` and `longrope`.
        beta_fast, beta_slow, truncate: `yarn` only: turns over the original context above which a frequency stays, and
            below which it is divided by the factor; whether the bounds are rounded to whole pairs.
        short_factors, long_factors: `longrope` only: what each frequency is divided by, for contexts of up to
            `original_max_position`, and longer ones; `rotary_dim / 2` each.
    """

    kind: RotaryKind
    theta: float
    rotary_dim: int
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


NUMBERS: dict[RotaryKind, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position"),
    "yarn": ("factor", "original_max_position", "attention_factor", "beta_fast", "beta_slow"),
    "longrope": ("factor", "original_max_position", "attention_factor"),
}
"""The fields of `RotaryConfig` that mean something for a kind, beside `theta` and `rotary_dim`; lists left out."""


def inverse_frequencies(rotary: RotaryConfig, context: int = 1) -> Tensor:
    """Radians per position of each pair, `[rotary_dim / 2]` float64.

    `default`: `theta ** (-2 i / rotary_dim)` (RoPE, arXiv 2104.09864).
    `linear`: divided by the factor (arXiv 2306.15595).
    `dynamic`: as `default`: the base grows only past `max_position`, where no sequence gets (see docs/models.md).
    `llama3`: waves longer than `original_max_position / low_freq_factor` are divided by the factor, those shorter than
    `original_max_position / high_freq_factor` stay, and those between are blended linearly in waves per context
    (Llama 3.1 release, `apply_scaling`).
    `yarn`: the same with turns over the original context, `beta_slow` and `beta_fast`, blended linearly in the pair's
    index (arXiv 2309.00071).
    `longrope`: divided one by one (arXiv 2402.13753).

    Args:
        context: tokens of the longest sequence; `longrope` takes its long factors above `original_max_position`.
    """
    exponent = torch.arange(0, rotary.rotary_dim, 2, dtype=torch.float64) / rotary.rotary_dim
    frequencies = rotary.theta**-exponent
    if rotary.kind in ("default", "dynamic"):
        return frequencies
    if rotary.kind == "linear":
        return frequencies / rotary.factor
    if rotary.kind == "longrope":
        factors = rotary.long_factors if context > rotary.original_max_position else rotary.short_factors
        return frequencies / torch.tensor(factors, dtype=torch.float64)
    if rotary.kind == "llama3":
        waves = rotary.original_max_position * frequencies / (2 * math.pi)
        keep = (waves - rotary.low_freq_factor) / (rotary.high_freq_factor - rotary.low_freq_factor)
    else:
        assert rotary.kind == "yarn", "every rotary kind that a config may name is handled above"
        first, last = _yarn_pair(rotary, rotary.beta_fast), _yarn_pair(rotary, rotary.beta_slow)
        if rotary.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, rotary.rotary_dim - 1)
        # Equal bounds would divide by zero; the reference implementation parts them by this much.
        width = last - first or 0.001
        keep = 1.0 - (torch.arange(rotary.rotary_dim // 2, dtype=torch.float64) - first) / width
    keep = keep.clamp(0.0, 1.0)
    return frequencies * (keep + (1.0 - keep) / rotary.factor)


def _yarn_pair(rotary: RotaryConfig, turns: float) -> float:
    """The index of the pair, as a real number, that turns this often over the original context."""
    wavelength = rotary.original_max_position / turns
    return rotary.rotary_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(rotary.theta))


POSITIONS_AT_ONCE = 1 << 14
"""Of the float64 angles; those of a million positions would take a gigabyte and a half."""


def rotary_tables(rotary: RotaryConfig, num_positions: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """`cos` and `sin` of every position, each `[num_positions, rotary_dim / 2]` float32, times the attention factor."""
    frequencies = inverse_frequencies(rotary, num_positions)
    shape = num_positions, len(frequencies)
    cos, sin = (torch.empty(shape, dtype=torch.float32, device=device) for _ in range(2))
    for start in range(0, num_positions, POSITIONS_AT_ONCE):
        stop = min(start + POSITIONS_AT_ONCE, num_positions)
        angles = torch.arange(start, stop, dtype=torch.float64)[:, None] * frequencies
        cos[start:stop] = angles.cos() * rotary.attention_factor
        sin[start:stop] = angles.sin() * rotary.attention_factor
    return cos, sin
