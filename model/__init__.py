"""The architecture: a frozen config, rotary tables, and the decoder in pieces."""

from .config import ModelConfig, RotaryConfig, UnsupportedModelError
from .decoder import AttentionMetadata, Decoder, Layer, Preamble
from .kv_cache import KVCache
from .shapes import SHAPES

__all__ = [
    "SHAPES",
    "AttentionMetadata",
    "Decoder",
    "KVCache",
    "Layer",
    "ModelConfig",
    "Preamble",
    "RotaryConfig",
    "UnsupportedModelError",
]
