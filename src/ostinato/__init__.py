"""A small, readable Llama-style decode engine whose steps can be recorded as CUDA graphs, whole or piecewise.

The names below are imported when they are first used: `import ostinato` alone does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CompletionOutput",
    "EngineConfig",
    "GraphReport",
    "GraphsRequiredError",
    "HookError",
    "HookRow",
    "InferenceGraphCapture",
    "NotEnoughMemoryError",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "StepMode",
    "StreamDelta",
    "TokenLogprobs",
    "__version__",
]

if TYPE_CHECKING:
    from .llm import LLM
    from .outputs import CompletionOutput, RequestMetrics, RequestOutput, StreamDelta
    from .runtime import (
        EngineConfig,
        GraphReport,
        GraphsRequiredError,
        HookError,
        HookRow,
        InferenceGraphCapture,
        NotEnoughMemoryError,
        RequestError,
        SamplingParams,
        StepMode,
        TokenLogprobs,
    )
else:  # hidden from type checkers, which would take any name for an existing one
    _HOMES = {
        "LLM": "llm",
        "CompletionOutput": "outputs",
        "RequestMetrics": "outputs",
        "RequestOutput": "outputs",
        "StreamDelta": "outputs",
        "EngineConfig": "runtime",
        "GraphReport": "runtime",
        "GraphsRequiredError": "runtime",
        "HookError": "runtime",
        "HookRow": "runtime",
        "InferenceGraphCapture": "runtime",
        "NotEnoughMemoryError": "runtime",
        "RequestError": "runtime",
        "SamplingParams": "runtime",
        "StepMode": "runtime",
        "TokenLogprobs": "runtime",
    }

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
