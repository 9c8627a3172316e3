"""What the capture machinery needs of a device: graphs, pools of memory, streams and events."""

import contextlib
import gc
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from .graph_nodes import GraphCounts, GraphNode


class CaptureError(RuntimeError):
    """Work that cannot be recorded: it would need its values at capture time, or another state of the recorder."""


class Graph(Protocol):
    """A recorded piece of work that runs again without its Python."""

    def replay(self) -> None: ...

    def reset(self) -> None:
        """Forget the recording; its memory may go back once nothing else of the pool needs it."""


class Stream(Protocol):
    """An order of work; `wait_stream` and `wait_event` order it after other work."""

    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...


class Event(Protocol):
    """A point in a stream that others can wait for."""

    def record(self, stream: Any = None) -> Any: ...
    def synchronize(self) -> None: ...


class GraphPool(Protocol):
    """Memory that several graphs share. What lies in it is rewritten whenever any graph of the pool replays."""

    @property
    def backend(self) -> "GraphBackend": ...


class GraphBackend(ABC):
    """Recording and replaying on one device.

    A capture is `begin`, the work, `end`, `instantiate`; whichever of them fails, `abandon` afterwards puts pool and
    thread back. `capture_into_graph` is the only caller of these. Nothing that is recorded is computed meanwhile.
    """

    device: torch.device

    @abstractmethod
    def new_pool(self) -> GraphPool: ...

    @abstractmethod
    def new_graph(self) -> Graph: ...

    @abstractmethod
    def begin(self, graph: Graph, pool: GraphPool) -> None:
        """Record what this thread does from now on, on the capture stream, its new tensors taken from the pool."""

    @abstractmethod
    def end(self, graph: Graph) -> None:
        """Stop recording, and put the thread back on the stream that it came from."""

    @abstractmethod
    def instantiate(self, graph: Graph) -> None:
        """Make the recording ready to replay."""

    @abstractmethod
    def abandon(self, graph: Graph, pool: GraphPool) -> None:
        """Undo a capture that failed at any stage: stream, allocator and the memory it took."""

    @abstractmethod
    def on_capture_stream(self) -> AbstractContextManager[None]:
        """Run the body on the capture stream, ordered after and before the thread's own; for warm-ups."""

    @abstractmethod
    def current_stream(self) -> Stream: ...

    @abstractmethod
    def new_stream(self) -> Stream: ...

    @abstractmethod
    def on_stream(self, stream: Stream) -> AbstractContextManager[object]: ...

    @abstractmethod
    def new_event(self) -> Event: ...

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has done everything."""

    @abstractmethod
    def memory_bytes(self) -> int:
        """Bytes of the device in use, by all pools and everything else that this process can see."""

    @abstractmethod
    def allocator_bytes(self) -> int:
        """Of these, what the allocator of tensors holds, whether tensors lie there or not."""

    @abstractmethod
    def count_nodes(self, graph: Graph) -> GraphCounts:
        """How large a recorded graph is."""

    @abstractmethod
    def nodes(self, graph: Graph) -> tuple[GraphNode, ...] | None:
        """The work that a graph consists of; None where nobody can tell."""

    @abstractmethod
    def pool_ranges(self, pool: GraphPool) -> Sequence[range]:
        """The address ranges that belong to the pool."""

    def pool_bytes(self, pool: GraphPool) -> int:
        return sum(len(addresses) for addresses in self.pool_ranges(pool))

    @abstractmethod
    def fill_pool(self, pool: GraphPool, byte: int) -> None:
        """Overwrite all of the pool's memory, between replays, for tests: nothing that outlives a replay may be there.

        0xFF makes every float NaN and every integer -1.
        """

    @abstractmethod
    def memory_state(self) -> str:
        """For the log of a failure: what is in use, in words."""

    @abstractmethod
    def range_marker(self, name: str) -> AbstractContextManager[object]:
        """Name the body's work in a profiler's timeline."""


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Collect garbage once and then none, until the body ends; within another such body, do nothing."""
    if not gc.isenabled():
        yield
        return
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
