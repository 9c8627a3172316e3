"""What the scripts here stand on: timed graph replays, and records that survive a short lease."""

import datetime
import json
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import triton

from ostinato.bench import timing
from ostinato.bench.timing import Timing as Timing
from ostinato.runtime.graph_backend import Graph

DEVICE = torch.device("cuda")


def capture(step: Callable[[], Any]) -> Graph:
    return timing.capture(step, DEVICE)


def time_graph(graph: Graph, *, replays: int = 40, per_sample: int = 1) -> Timing:
    return timing.time_graph(graph, DEVICE, replays=replays, per_sample=per_sample)


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
        header = environment() | {"commit": commit, "read_ceiling": timing.streaming_rate(DEVICE)}
        self.ceiling: float = header["read_ceiling"]
        header["void"] = self.ceiling < timing.LOWEST_CEILING.get(header["device"], 0.0)
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
