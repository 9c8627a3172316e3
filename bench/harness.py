"""What every measurement stands on: the read ceiling, timed graph replays, and records that survive a short lease."""

import datetime
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

# Datasheet names of devices, and the read ceiling (bytes a second) below which a run on one is void: something else
# was using the memory.
LOWEST_CEILING = {"NVIDIA H200": 4.45e12}


@dataclass(frozen=True)
class Timing:
    """Microseconds of one replay, over many: median, 10th and 90th percentile; `again` is the median of a second go."""

    median: float
    p10: float
    p90: float
    again: float


def capture(step: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """Run `step` twice, so that everything is compiled, then record it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    return graph


def time_graph(graph: torch.cuda.CUDAGraph, *, replays: int = 40, per_sample: int = 1) -> Timing:
    """Replay and time with events. `per_sample` replays lie between two events; the time is for one."""
    return _timing(lambda: _samples(graph, replays, per_sample))


def _samples(graph: torch.cuda.CUDAGraph, replays: int, per_sample: int) -> list[float]:
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


def _timing(sample: Callable[[], list[float]]) -> Timing:
    first, second = sorted(sample()), sample()
    tenth = len(first) // 10
    return Timing(statistics.median(first), first[tenth], first[-1 - tenth], statistics.median(second))


@triton.jit
def _read_kernel(x_ptr, out_ptr, num_tiles, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        values = tl.load(x_ptr + tile.to(tl.int64) * BLOCK + tl.arange(0, BLOCK), eviction_policy="evict_first")
        total += values.to(tl.float32)
    tl.store(out_ptr + tl.program_id(0), tl.sum(total, 0))


def read_ceiling(size: int = 4 << 30) -> float:
    """Bytes a second of reading `size` bytes once, the best of a few shapes of a plain streaming kernel."""
    x = torch.empty(size // 4, dtype=torch.int32, device="cuda").random_(0, 1 << 20)
    out = torch.empty(1 << 20, dtype=torch.float32, device="cuda")
    best = 0.0
    for block, warps, programs in ((8192, 8, 132 * 4), (8192, 8, 132 * 8), (4096, 4, 132 * 16), (16384, 16, 132 * 4)):
        tiles = x.numel() // block

        def run(block: int = block, warps: int = warps, programs: int = programs, tiles: int = tiles) -> None:
            _read_kernel[(programs,)](x, out, tiles, BLOCK=block, num_warps=warps)

        timing = time_graph(capture(run), replays=10)
        best = max(best, size / (min(timing.median, timing.again) * 1e-6))
    return best


def environment() -> dict[str, Any]:
    """Where and with what a figure was measured."""
    query = "clocks.sm,clocks.mem,clocks.max.sm,driver_version"
    reply = subprocess.run(
        ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True, text=True, check=False
    ).stdout.strip()
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "clocks": dict(zip(query.split(","), (part.strip() for part in reply.split(",")), strict=False)),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


class Recorder:
    """Appends one JSON line a cell, skips cells that are there already, and stops starting cells at the deadline.

    The first line of a run is its environment with the read ceiling of this process; cells that follow belong to it.
    """

    def __init__(self, path: Path, seconds: float, commit: str) -> None:
        self.path, self.deadline = path, time.monotonic() + seconds
        lines = path.read_text().splitlines() if path.exists() else []
        self.done = {cell["id"] for cell in map(json.loads, lines) if "id" in cell and "error" not in cell}
        header = environment() | {"commit": commit, "read_ceiling": read_ceiling()}
        self.ceiling: float = header["read_ceiling"]
        header["void"] = self.ceiling < LOWEST_CEILING.get(header["device"], 0.0)
        self._append(header)
        print(f"{header['device']}: read ceiling {self.ceiling / 1e12:.3f} TB/s{' VOID' * header['void']}", flush=True)

    def cells(self, names: Iterable[str], prefix: str = "") -> Iterable[str]:
        """Those of the names that have no cell yet; cells are recorded under `prefix` and name."""
        for name in names:
            if time.monotonic() > self.deadline:
                print("deadline: the rest is for the next run", flush=True)
                return
            if prefix + name not in self.done:
                yield name

    @property
    def late(self) -> bool:
        return time.monotonic() > self.deadline

    def record(self, name: str, timing: Timing, *, num_bytes: float = 0.0, **facts: Any) -> None:
        """One cell: its time, the bytes that had to move, and whatever else describes it."""
        rate = num_bytes / (timing.median * 1e-6)
        cell = {"id": name, **asdict(timing), "bytes": num_bytes, "share": rate / self.ceiling, **facts}
        self._append(cell)
        self.done.add(name)

    def _append(self, line: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
