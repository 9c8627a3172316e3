"""What graphs will take, found out by making them once before the KV cache gets the rest of the memory."""

import gc
from collections.abc import Callable

import torch

from .cuda_backend import graph_backend
from .graph_self_test import self_test
from .model_runner import ModelRunner


def rehearse(build: Callable[[], tuple[ModelRunner, int]], device: torch.device) -> int:
    """Bytes that an engine's parts take once its graphs are captured, the KV cache aside; nothing of it stays.

    What is compiled or loaded meanwhile does stay, and is not counted: whoever looks for free memory afterwards finds
    that it is gone.

    Args:
        build: makes what runs the steps, over a KV cache of the least size; returns the cache's bytes, too.
    """
    backend = graph_backend(device)
    runner, kv_bytes = build()
    graphs = runner.decode_runner.graphs
    assert graphs is not None, "without graphs there is nothing to rehearse"
    runner.decode_runner.capture(None)
    self_test(graphs, runner.decode_runner.policy.path, smallest_only=True)  # loads what the real one will need
    free_memory(device)
    full = backend.memory_bytes()
    graphs.release()
    del runner, graphs
    free_memory(device)
    return max(0, full - backend.memory_bytes() - kv_bytes)


def free_memory(device: torch.device) -> None:
    """Give back what nobody holds."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
