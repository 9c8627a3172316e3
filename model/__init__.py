"""The architecture: a frozen config, rotary tables, and the decoder in pieces."""

from .config import ModelConfig, RotaryConfig, UnsupportedModelError
from .decoder import AttentionMetadata, Decoder, Layer, Preamble
from .families import FAMILIES, Family
from .kv_cache import KVCache
from .shapes import SHAPES

__all__ = [
    "FAMILIES",
    "SHAPES",
    "AttentionMetadata",
    "Decoder",
    "Family",
    "KVCache",
    "Layer",
    "ModelConfig",
    "Preamble",
    "RotaryConfig",
    "UnsupportedModelError",
]
