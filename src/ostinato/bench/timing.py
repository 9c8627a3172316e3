"""Timed graph replays, and the rate at which a device reads its memory."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, no_type_check

import torch
from torch import Tensor

from ..kernels._triton import tl, triton
from ..runtime.cuda_backend import graph_backend
from ..runtime.graph_backend import Graph
from ..runtime.graph_capture import capture_into_graph
from .errors import BenchError

# Datasheet names of devices, and the read ceiling (bytes a second) below which a run on one is void: something else
# was using the memory.
LOWEST_CEILING = {"NVIDIA H200": 4.45e12}

READ_SHAPES = ((8192, 8, 132 * 4), (8192, 8, 132 * 8), (4096, 4, 132 * 16), (16384, 16, 132 * 4))
"""Elements of a block, warps and programs of the kernels that look for the ceiling."""


@dataclass(frozen=True)
class Timing:
    """Microseconds of one replay, over many: median, 10th and 90th percentile; `again` is the median of a second go."""

    median: float
    p10: float
    p90: float
    again: float


@torch.inference_mode()
def capture(run: Callable[[], Any], device: torch.device) -> Graph:
    """Run it twice, so that everything is compiled, then record it."""
    backend = graph_backend(device)
    with backend.on_capture_stream():
        for _ in range(2):
            run()
    graph, _ = capture_into_graph(run, backend.new_pool(), device, None)
    return graph


def time_graph(graph: Graph, device: torch.device, *, replays: int = 40, per_sample: int = 1) -> Timing:
    """Replay and time, on a GPU by events; each of `replays` samples is of `per_sample` replays, times are of one."""
    samples = _samples if device.type == "cuda" else _samples_of_host
    first, second = sorted(samples(graph, replays, per_sample)), samples(graph, replays, per_sample)
    tenth = len(first) // 10
    return Timing(statistics.median(first), first[tenth], first[-1 - tenth], statistics.median(second))


def _samples(graph: Graph, replays: int, per_sample: int) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    for _ in range(3):
        graph.replay()
    events[0].record()
    for event in events[1:]:
        for _ in range(per_sample):
            graph.replay()
        event.record()
    torch.cuda.synchronize()
    return [1e3 * a.elapsed_time(b) / per_sample for a, b in pairwise(events)]


def _samples_of_host(graph: Graph, replays: int, per_sample: int) -> list[float]:
    times = [time.perf_counter()]
    for _ in range(replays):
        for _ in range(per_sample):
            graph.replay()
        times.append(time.perf_counter())
    return [1e6 * (b - a) / per_sample for a, b in pairwise(times)]


@triton.jit
@no_type_check
def _read_kernel(x_ptr, out_ptr, num_tiles, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        values = tl.load(x_ptr + tile.to(tl.int64) * BLOCK + tl.arange(0, BLOCK), eviction_policy="evict_first")
        total += values.to(tl.float32)
    tl.store(out_ptr + tl.program_id(0), tl.sum(total, 0))


def streaming_rate(device: torch.device, size: int | None = None) -> float:
    """Bytes a second of reading `size` bytes once, far more than any cache holds.

    On a GPU the best of a few shapes of a plain streaming kernel, on a CPU that of a sum.
    """
    size = size or (4 << 30 if device.type == "cuda" else 256 << 20)
    if device.type != "cuda":
        values = torch.ones(size // 4)
        timing = time_graph(capture(values.sum, device), device, replays=10)
        return size / (timing.p10 * 1e-6)
    x = torch.empty(size // 4, dtype=torch.int32, device=device).random_(0, 1 << 20)
    out = torch.empty(1 << 20, dtype=torch.float32, device=device)
    best = 0.0
    for block, warps, programs in READ_SHAPES:
        graph = capture(lambda shape=(block, warps, programs): _read(x, out, *shape), device)  # type: ignore[misc]
        timing = time_graph(graph, device, replays=10)
        best = max(best, size / (min(timing.median, timing.again) * 1e-6))
    return best


def _read(x: Tensor, out: Tensor, block: int, warps: int, programs: int) -> None:
    _read_kernel[(programs,)](x, out, x.numel() // block, BLOCK=block, num_warps=warps)


def read_ceiling(device: torch.device) -> float:
    """The rate, where nobody else is using the memory.

    Raises:
        BenchError: it is below what this kind of device is known to reach.
    """
    rate = streaming_rate(device)
    name = torch.cuda.get_device_properties(device).name if device.type == "cuda" else device.type
    least = LOWEST_CEILING.get(name, 0.0)
    if rate < least:
        raise BenchError(
            f"{name}: the read ceiling is {rate / 1e12:.3f} TB/s, below {least / 1e12:.2f}: something else is using "
            "the memory, and whatever is measured now is void"
        )
    return rate
