"""From requests to tokens: KV blocks, scheduling, sampling, and the engine loop."""

from .config import EngineConfig
from .engine import Engine
from .sampling_params import SamplingParams
from .sequence import FinishReason, Sequence, TokenLogprobs

__all__ = [
    "Engine",
    "EngineConfig",
    "FinishReason",
    "SamplingParams",
    "Sequence",
    "TokenLogprobs",
]
