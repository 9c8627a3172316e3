"""What graphs will take, found out by making them once before the KV cache gets the rest of the memory."""

import gc
from collections.abc import Callable
from dataclasses import replace

import torch

from .graph_backend import GraphBackend, GraphPool
from .graph_ledger import MemoryParts
from .graph_self_test import self_test
from .model_runner import ModelRunner


def rehearse(build: Callable[[], tuple[ModelRunner, int]], backend: GraphBackend) -> MemoryParts:
    """What an engine's parts take once its graphs are captured, the KV cache aside; nothing of it stays.

    What is compiled or loaded meanwhile does stay, and is not counted: whoever looks for free memory afterwards finds
    that it is gone.

    Args:
        build: makes what runs the steps, over a KV cache of the least size; returns the cache's bytes, too.
        backend: the one that records the real graphs, too. Libraries keep a workspace for each stream that they have
            worked on, so that another capture stream would take more.
    """
    _take_workspaces(backend)
    runner, kv_bytes = build()
    graphs = runner.decode_runner.graphs
    assert graphs is not None, "without graphs there is nothing to rehearse"
    path = runner.decode_runner.policy.path
    graphs.capture_path(path, num_warmups=1)
    self_test(graphs, path, ends_only=True)  # loads what the real one will need
    full = memory_parts(backend, graphs.resources.pool)
    graphs.release()
    del runner, graphs
    taken = full - memory_parts(backend, None) - MemoryParts(tensors=kv_bytes)
    return replace(taken, driver=max(0, taken.driver))  # less than nothing: another process gave memory back


@torch.inference_mode()
def _take_workspaces(backend: GraphBackend) -> None:
    """Have libraries take their workspaces on both streams now, while all memory that nobody holds is given back.

    Taken in the middle of a rehearsal, one may settle in a segment that a larger tensor has left. The real start would
    then find other gaps than the rehearsal did, and its tensors other segments.
    """
    free_memory(backend.device)
    ones = torch.ones(16, 16, device=backend.device)
    torch.mm(ones, ones)
    with backend.on_capture_stream():
        torch.mm(ones, ones)


def memory_parts(backend: GraphBackend, pool: GraphPool | None) -> MemoryParts:
    """What is in use of a device, once what nobody holds is given back."""
    free_memory(backend.device)
    in_pool, held = 0 if pool is None else backend.pool_bytes(pool), backend.allocator_bytes()
    return MemoryParts(in_pool, held - in_pool, backend.memory_bytes() - held)


def free_memory(device: torch.device) -> None:
    """Give back what nobody holds."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
