"""Rotary tables, computed in float64 and kept in float32 whatever the dtype of the model."""

import math

import torch
from torch import Tensor

from .config import RotaryConfig


def inverse_frequencies(rotary: RotaryConfig) -> Tensor:
    """Radians per position of each pair, `[rotary_dim / 2]` float64.

    `default`: `theta ** (-2 i / rotary_dim)` (RoPE, arXiv 2104.09864).
    `linear`: divided by the factor (arXiv 2306.15595).
    `llama3`: waves longer than `original_max_position / low_freq_factor` are divided by the factor, those shorter than
    `original_max_position / high_freq_factor` stay, and those between are blended linearly in waves per context
    (Llama 3.1 release, `apply_scaling`).
    """
    exponent = torch.arange(0, rotary.rotary_dim, 2, dtype=torch.float64) / rotary.rotary_dim
    frequencies = rotary.theta**-exponent
    if rotary.kind == "default":
        return frequencies
    if rotary.kind == "linear":
        return frequencies / rotary.factor
    assert rotary.kind == "llama3", "every rotary kind that a config may name is handled above"
    waves = rotary.original_max_position * frequencies / (2 * math.pi)
    keep = (waves - rotary.low_freq_factor) / (rotary.high_freq_factor - rotary.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return frequencies * (keep + (1.0 - keep) / rotary.factor)


def rotary_tables(rotary: RotaryConfig, max_position: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """`cos` and `sin` of every position, each `[max_position, rotary_dim / 2]` float32."""
    angles = torch.arange(max_position, dtype=torch.float64)[:, None] * inverse_frequencies(rotary)
    return angles.cos().to(device, torch.float32), angles.sin().to(device, torch.float32)
