"""From requests to tokens: KV blocks, scheduling, sampling, and the engine loop."""

from .config import EngineConfig
from .engine import Engine
from .errors import HookError, RequestError
from .graph_dispatch import Chunk
from .graph_reason import Path, Reason
from .graph_report import GraphReport
from .inference_graph_capture import InferenceGraphCapture, StepMode
from .interventions import HookHandle, HookRow
from .memory import NotEnoughMemoryError
from .rank_agreement import GraphsRequiredError
from .sampling_params import SamplingParams
from .sequence import FinishReason, Sequence, TokenLogprobs

__all__ = [
    "Chunk",
    "Engine",
    "EngineConfig",
    "FinishReason",
    "GraphReport",
    "GraphsRequiredError",
    "HookError",
    "HookHandle",
    "HookRow",
    "InferenceGraphCapture",
    "NotEnoughMemoryError",
    "Path",
    "Reason",
    "RequestError",
    "SamplingParams",
    "Sequence",
    "StepMode",
    "TokenLogprobs",
]
