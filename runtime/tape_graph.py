"""CUDA graphs without a GPU: a tape of operators with the memory behaviour of a capture.

While a tape records, Python runs and nothing is computed, as in a capture on a GPU: shapes come from meta tensors, new
tensors from the pool, and results hold whatever the memory held. A replay computes the operators in order, into the
same addresses, without the Python that called them. A block goes back to the pool when the last tensor or view of its
storage dies, and is handed out again, in this capture or in a later one. So a value that is left in the pool is
overwritten by other replays here as it would be on a GPU.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten

from .graph_backend import CaptureError, Event, Graph, GraphBackend, GraphPool, Stream
from .graph_capture import autocast_scope
from .graph_nodes import GraphCounts, GraphNode
from .tape_operators import Shape, infer_shapes, operator_facts, written_arguments
from .tape_pool import TapePool

REPLAY_RANGE = "tape replay"
"""The name of a replay in a profile."""


class TapeGraph:
    """A list of operators over fixed addresses."""

    def __init__(self) -> None:
        self._steps: list[Callable[[], object]] = []
        self.operators: list[str] = []
        self._pool: TapePool | None = None
        self._mode: contextlib.ExitStack | None = None
        self.segments: set[int] = set()

    @property
    def num_operators(self) -> int:
        return len(self._steps)

    @torch.inference_mode()
    def replay(self) -> None:
        # The casts of the capture are on the tape; autocast around a replay reaches a graph on a GPU no more than this.
        with torch.profiler.record_function(REPLAY_RANGE), autocast_scope(None, "cpu"):
            for step in self._steps:
                step()

    def reset(self) -> None:
        self._steps.clear()
        self.operators.clear()
        self.segments.clear()
        if self._pool is not None:
            self._pool.forget(self)
            self._pool = None


class TapeStream:
    """A CPU has one order of work; a stream is only a name for where the thread says that it is."""

    def wait_stream(self, stream: Stream) -> None: ...
    def wait_event(self, event: Event) -> None: ...
    def synchronize(self) -> None: ...


class TapeEvent:
    """Work on a CPU is done when it returns, so an event has always happened."""

    def record(self, stream: Stream | None = None) -> None: ...
    def synchronize(self) -> None: ...


class TapeBackend(GraphBackend):
    """Graphs of the CPU. Use one an engine; captures are made by one thread at a time."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._outer_stream = TapeStream()
        self._capture_stream = TapeStream()
        self._current: Stream = self._outer_stream
        self._pools: list[TapePool] = []

    def new_pool(self) -> GraphPool:
        pool = TapePool(self)
        self._pools.append(pool)
        return pool

    def new_graph(self) -> Graph:
        return TapeGraph()

    def begin(self, graph: Graph, pool: GraphPool) -> None:
        assert isinstance(graph, TapeGraph), "a backend records its own graphs"
        assert isinstance(pool, TapePool), "a backend records its own graphs"
        if pool.recording is not None:
            raise CaptureError("the pool is recording already: an earlier capture was neither ended nor abandoned")
        pool.recording, graph._pool = graph, pool
        self._current = self._capture_stream
        graph._mode = contextlib.ExitStack()
        graph._mode.enter_context(_NoValues())
        graph._mode.enter_context(_Recorder(graph, pool))

    def end(self, graph: Graph) -> None:
        assert isinstance(graph, TapeGraph), "a backend records its own graphs"
        assert graph._mode is not None, "only a capture that has begun can end"
        graph._mode.close()
        graph._mode = None
        assert graph._pool is not None, "a graph that records has a pool"
        graph._pool.recording = None
        self._current = self._outer_stream

    def instantiate(self, graph: Graph) -> None:
        """A tape is ready as it is."""

    def abandon(self, graph: Graph, pool: GraphPool) -> None:
        assert isinstance(graph, TapeGraph), "a backend abandons its own graphs"
        assert isinstance(pool, TapePool), "a backend abandons its own graphs"
        if graph._mode is not None:
            graph._mode.close()
            graph._mode = None
        if pool.recording is graph:
            pool.recording = None
        self._current = self._outer_stream
        graph.reset()

    @contextlib.contextmanager
    def on_capture_stream(self) -> Iterator[None]:
        with self.on_stream(self._capture_stream):
            yield

    def current_stream(self) -> Stream:
        return self._current

    def new_stream(self) -> Stream:
        return TapeStream()

    @contextlib.contextmanager
    def on_stream(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def new_event(self) -> Event:
        return TapeEvent()

    def synchronize(self) -> None:
        """Everything is done already."""

    def memory_bytes(self) -> int:
        return sum(pool.num_bytes for pool in self._pools)

    def allocator_bytes(self) -> int:
        return self.memory_bytes()

    def count_nodes(self, graph: Graph) -> GraphCounts:
        assert isinstance(graph, TapeGraph), "a backend looks at its own graphs"
        return GraphCounts(graph.num_operators)

    def nodes(self, graph: Graph) -> tuple[GraphNode, ...] | None:
        assert isinstance(graph, TapeGraph), "a backend looks at its own graphs"
        return tuple(GraphNode("operator", name) for name in graph.operators)

    def pool_ranges(self, pool: GraphPool) -> Sequence[range]:
        assert isinstance(pool, TapePool), "a backend knows its own pools"
        return pool.ranges()

    def fill_pool(self, pool: GraphPool, byte: int) -> None:
        assert isinstance(pool, TapePool), "a backend knows its own pools"
        pool.fill(byte)

    def memory_state(self) -> str:
        return f"{self.memory_bytes()} bytes in {len(self._pools)} pools of the CPU tape"

    @contextlib.contextmanager
    def range_marker(self, name: str) -> Iterator[None]:
        with torch.profiler.record_function(name):
            yield


class _NoValues(TorchFunctionMode):
    """Refuses what reads a tensor's values without an operator, which a dispatch mode would not see."""

    _READS = (Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._READS:
            raise CaptureError(f"Tensor.{func.__name__} reads values, which a capture has not computed")
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    """Writes operators on a tape instead of running them."""

    def __init__(self, graph: TapeGraph, pool: TapePool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._graph = graph
        self._pool = pool

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        facts = operator_facts(func)
        if facts.is_composite:
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        leaves, structure = tree_flatten((args, kwargs))
        facts.refuse(args, kwargs, leaves)
        if facts.is_mutable:
            self._append(func, leaves, structure)
            return written_arguments(func, args, kwargs)
        if facts.is_view:
            return func(*args, **kwargs)  # other shape, same memory, nothing to do in a replay
        shapes, out_structure = infer_shapes(func, leaves, structure)
        if not any(isinstance(shape, Shape) for shape in shapes):
            return func(*args, **kwargs)  # a question about shapes
        results = [self._allocate(shape) if isinstance(shape, Shape) else shape for shape in shapes]
        if not facts.is_empty:
            self._append(func, leaves, structure, [self._fixed(r) for r in results if isinstance(r, Tensor)])
        return out_structure.unflatten(results)

    def _allocate(self, shape: Shape) -> Tensor:
        tensor, segment = self._pool.hand_out(*shape)
        if segment is not None:
            self._graph.segments.add(segment)
        return tensor

    def _append(self, func: Any, leaves: list[Any], structure: TreeSpec, results: list[Tensor] | None = None) -> None:
        args, kwargs = structure.unflatten([self._fixed(leaf) for leaf in leaves])

        def run() -> None:
            fresh = func(*args, **kwargs)
            if results is not None:
                tensors = [fresh] if isinstance(fresh, Tensor) else [t for t in fresh if isinstance(t, Tensor)]
                for result, value in zip(results, tensors, strict=True):
                    result.copy_(value)

        self._graph._steps.append(run)
        self._graph.operators.append(str(func))

    def _fixed(self, value: Any) -> Any:
        """The same memory by address: a tape must not keep alive what would be free in a capture."""
        return self._pool.alias(value) if isinstance(value, Tensor) else value
