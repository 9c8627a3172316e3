"""What each graph cost: bytes by where they lie, nodes and edges, and time."""

from dataclasses import asdict, dataclass, field
from typing import Any

from .graph_nodes import GraphCounts


@dataclass(frozen=True)
class MemoryParts:
    """Bytes of a device by whose they are, or differences of such.

    Attributes:
        pool: of the graphs.
        tensors: all else that the allocator holds.
        driver: outside of the allocator: executables of graphs, loaded kernels and the like.
    """

    pool: int = 0
    tensors: int = 0
    driver: int = 0

    @property
    def total(self) -> int:
        return self.pool + self.tensors + self.driver

    def __sub__(self, other: "MemoryParts") -> "MemoryParts":
        return MemoryParts(self.pool - other.pool, self.tensors - other.tensors, self.driver - other.driver)

    def __str__(self) -> str:
        pool, tensors, driver, total = (n / 2**20 for n in (self.pool, self.tensors, self.driver, self.total))
        return f"{total:.1f} MiB (pool {pool:.1f}, tensors {tensors:.1f}, driver {driver:.1f})"


@dataclass(frozen=True)
class LedgerEntry:
    """One bucket of one runner, all its graph slots together.

    Attributes:
        key_info: what the bucket is specific to beside its size, as text; empty if nothing.
        pool_bytes: by how much the capture let the shared pool grow; often 0, since smaller graphs find room.
        driver_bytes: device memory that went at the capture and is none of the allocator's: executables and the like.
        output_bytes: static outputs that were made for this graph alone, outside the pool.
        num_copies: how many these are; each is written by a copy at the graph's end, since the region's last kernel
            could not write there.
        counts: of its nodes and edges.
        warm_up_seconds, capture_seconds: the first includes whatever had to be compiled or loaded.
    """

    runner: str
    key_info: str
    batch_size: int
    num_tokens: int
    pool_bytes: int
    driver_bytes: int
    output_bytes: int
    num_copies: int
    counts: GraphCounts
    warm_up_seconds: float
    capture_seconds: float

    @property
    def graph_bytes(self) -> int:
        """What would not be there without this graph."""
        return self.pool_bytes + max(0, self.driver_bytes) + self.output_bytes

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class GraphLedger:
    """The graphs of an engine.

    Attributes:
        entries: in the order of the captures; a bucket that was dropped is not among them.
        buffer_bytes: claimed buffers, which all graphs share.
        predicted, actual: what everything but weights and KV cache takes, graphs, buffers and step state, as the
            rehearsal said before the KV cache was sized, and as it came; None where there was none.
        device_bytes: by how much the device's memory in use grew over all captures.
    """

    entries: list[LedgerEntry] = field(default_factory=list)
    buffer_bytes: int = 0
    predicted: MemoryParts | None = None
    actual: MemoryParts | None = None
    device_bytes: int = 0

    @property
    def pool_bytes(self) -> int:
        return sum(entry.pool_bytes for entry in self.entries)

    @property
    def driver_bytes(self) -> int:
        return sum(entry.driver_bytes for entry in self.entries)

    @property
    def output_bytes(self) -> int:
        return sum(entry.output_bytes for entry in self.entries)

    @property
    def graph_bytes(self) -> int:
        """All graphs together, without the buffers that were claimed for them."""
        return sum(entry.graph_bytes for entry in self.entries)

    @property
    def unexplained_bytes(self) -> int:
        """Growth of the device's memory over the captures that no entry has: allocator segments kept for reuse."""
        return self.device_bytes - self.pool_bytes - self.driver_bytes - self.output_bytes

    @property
    def warm_up_seconds(self) -> float:
        return sum(entry.warm_up_seconds for entry in self.entries)

    @property
    def capture_seconds(self) -> float:
        return sum(entry.capture_seconds for entry in self.entries)

    def to_dict(self) -> dict[str, Any]:
        return {
            "pool_bytes": self.pool_bytes,
            "driver_bytes": self.driver_bytes,
            "output_bytes": self.output_bytes,
            "buffer_bytes": self.buffer_bytes,
            "device_bytes": self.device_bytes,
            "predicted": None if self.predicted is None else asdict(self.predicted),
            "actual": None if self.actual is None else asdict(self.actual),
            "warm_up_seconds": self.warm_up_seconds,
            "capture_seconds": self.capture_seconds,
            "entries": [entry.to_dict() for entry in self.entries],
        }

    def lines(self) -> list[str]:
        """A table."""
        names = ("batch", "pool", "driver", "outputs", "copies", "nodes", "PDL", "warm ms", "capture ms")
        widths = (6, 10, 10, 10, 8, 8, 8, 10, 13)
        head = f"{'graph (sizes in KiB)':38}" + "".join(f"{n:>{w}}" for n, w in zip(names, widths, strict=True))
        lines = [head, *(_line(entry) for entry in self.entries), self.total_line()]
        if self.predicted is not None and self.actual is not None:
            lines.append(f"beside weights and KV cache: predicted {self.predicted}, took {self.actual}")
        return lines

    def total_line(self) -> str:
        mib = [f"{n / 2**20:.1f}" for n in (self.pool_bytes, self.driver_bytes, self.output_bytes, self.buffer_bytes)]
        return (
            f"{len(self.entries)} graphs: pool {mib[0]} MiB, driver {mib[1]} MiB, own outputs {mib[2]} MiB, shared "
            f"buffers {mib[3]} MiB; warm-up {self.warm_up_seconds:.2f} s, capture {self.capture_seconds:.2f} s"
        )


def _line(entry: LedgerEntry) -> str:
    kib = (f"{n // 1024:10d}" for n in (entry.pool_bytes, entry.driver_bytes, entry.output_bytes))
    numbers = entry.num_copies, entry.counts.nodes, entry.counts.programmatic_edges
    counts = (f"{'?' if n is None else n:>8}" for n in numbers)
    times = f"{1e3 * entry.warm_up_seconds:10.1f}{1e3 * entry.capture_seconds:13.1f}"
    tokens = f"{entry.num_tokens} tokens" if entry.num_tokens > entry.batch_size else ""
    name = " ".join(part for part in (entry.runner, entry.key_info, tokens) if part)[:38]
    return f"{name:38}{entry.batch_size:6d}{''.join(kib)}{''.join(counts)}{times}"
