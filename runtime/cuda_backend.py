"""Recording CUDA graphs through torch, with what torch leaves undone after a capture that failed."""

import contextlib
import ctypes
import warnings
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .graph_backend import Event, Graph, GraphBackend, GraphPool, Stream
from .graph_nodes import GraphCounts, GraphNode, count_cuda_graph, cuda_graph_nodes


class CudaPool:
    """A private pool of torch's caching allocators.

    Torch gives a pool's memory back when its last graph is gone, and cannot record into that pool again. So it gets
    another name then.
    """

    def __init__(self, backend: "CudaBackend") -> None:
        self.backend = backend
        self._graphs: weakref.WeakSet[_CudaGraph] = weakref.WeakSet()
        self._handle = torch.cuda.graph_pool_handle()

    @property
    def handle(self) -> Any:
        return self._handle

    def join(self, graph: "_CudaGraph") -> Any:
        """The handle to record a graph with, which belongs to the pool from now on."""
        if not self._graphs:
            self._handle = torch.cuda.graph_pool_handle()
        self._graphs.add(graph)
        graph.pool_joined = self
        return self._handle

    def leave(self, graph: "_CudaGraph") -> None:
        self._graphs.discard(graph)


class _CudaGraph(torch.cuda.CUDAGraph):
    """Leaves its pool when it is reset."""

    pool_joined: CudaPool | None = None

    def reset(self) -> None:
        super().reset()
        if self.pool_joined is not None:
            self.pool_joined.leave(self)
            self.pool_joined = None


class _Bytes:
    """Device memory by its addresses, in the form that torch takes as a tensor without a copy."""

    def __init__(self, addresses: range) -> None:
        self.__cuda_array_interface__ = {
            "shape": (len(addresses),),
            "typestr": "|u1",
            "data": (addresses.start, False),
            "version": 2,
        }


_IDLE_STREAMS: defaultdict[int, list[torch.cuda.Stream]] = defaultdict(list)
"""Capture streams of backends that are gone, by device, for those to come: libraries keep a workspace for each stream
that they have worked on (cuBLAS 32 MiB), so that engines on new streams would take more and more."""


class CudaBackend(GraphBackend):
    """CUDA graphs of one device. One capture stream for all captures: blocks are reused only within a stream."""

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self._index = index
        idle = _IDLE_STREAMS[index]
        self._capture_stream = idle.pop() if idle else torch.cuda.Stream(self.device)
        weakref.finalize(self, idle.append, self._capture_stream).atexit = False
        self._outer_stream: torch.cuda.Stream | None = None
        self._recording: _CudaGraph | None = None

    def new_pool(self) -> GraphPool:
        return CudaPool(self)

    def new_graph(self) -> Graph:
        return _CudaGraph(keep_graph=True)

    def begin(self, graph: Graph, pool: GraphPool) -> None:
        assert isinstance(graph, _CudaGraph), "a backend records its own graphs"
        assert isinstance(pool, CudaPool), "a backend records its own graphs"
        torch.cuda.synchronize(self.device)
        self._outer_stream = torch.cuda.current_stream(self.device)
        torch.cuda.set_stream(self._capture_stream)
        self._recording = graph
        # Other threads may copy and allocate meanwhile: only this one records.
        graph.capture_begin(pool=pool.join(graph), capture_error_mode="thread_local")

    def end(self, graph: Graph) -> None:
        assert isinstance(graph, _CudaGraph), "a backend records its own graphs"
        graph.capture_end()
        self._recording = None
        self._restore_stream()

    def instantiate(self, graph: Graph) -> None:
        assert isinstance(graph, _CudaGraph), "a backend records its own graphs"
        graph.instantiate()

    def abandon(self, graph: Graph, pool: GraphPool) -> None:
        """What survives a failed capture in torch: the stream that records, the allocators' routing of its tensors into
        the pool with a claim on it, the random generator's belief in a capture, and the current stream.
        """
        assert isinstance(graph, _CudaGraph), "a backend abandons its own graphs"
        assert isinstance(pool, CudaPool), "a backend abandons its own graphs"
        if self._recording is graph:
            with torch.cuda.stream(self._capture_stream), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of an empty graph
                try:
                    graph.capture_end()
                except RuntimeError:
                    # An invalid capture ends before torch has undone its own part. An empty one in its place lets it.
                    _begin_capture(self._capture_stream)
                    with contextlib.suppress(RuntimeError):
                        graph.capture_end()
            self._recording = None
        with contextlib.suppress(RuntimeError):  # raised when nothing was routed any more
            torch._C._cuda_endAllocateToPool(self._index, pool.handle)
            torch._C._cuda_releasePool(self._index, pool.handle)
        with contextlib.suppress(RuntimeError):
            graph.reset()
        self._restore_stream()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()

    def _restore_stream(self) -> None:
        if self._outer_stream is not None:
            torch.cuda.set_stream(self._outer_stream)
            self._outer_stream = None

    @contextlib.contextmanager
    def on_capture_stream(self) -> Iterator[None]:
        outer = torch.cuda.current_stream(self.device)
        self._capture_stream.wait_stream(outer)
        with torch.cuda.stream(self._capture_stream):
            yield
        outer.wait_stream(self._capture_stream)

    def current_stream(self) -> Stream:
        return torch.cuda.current_stream(self.device)

    def new_stream(self) -> Stream:
        return torch.cuda.Stream(self.device)

    def on_stream(self, stream: Stream) -> contextlib.AbstractContextManager[object]:
        assert isinstance(stream, torch.cuda.Stream), "a backend runs on its own streams"
        return torch.cuda.stream(stream)

    def new_event(self) -> Event:
        return torch.cuda.Event()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def memory_bytes(self) -> int:
        """By the driver's account, so that executables of graphs count beside tensors."""
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free

    def allocator_bytes(self) -> int:
        return torch.cuda.memory_reserved(self.device)

    def count_nodes(self, graph: Graph) -> GraphCounts:
        assert isinstance(graph, _CudaGraph), "a backend looks at its own graphs"
        return count_cuda_graph(graph.raw_cuda_graph())

    def nodes(self, graph: Graph) -> tuple[GraphNode, ...] | None:
        assert isinstance(graph, _CudaGraph), "a backend looks at its own graphs"
        return cuda_graph_nodes(graph.raw_cuda_graph())

    def pool_ranges(self, pool: GraphPool) -> Sequence[range]:
        assert isinstance(pool, CudaPool), "a backend knows its own pools"
        return [
            range(segment["address"], segment["address"] + segment["total_size"])
            for segment in torch.cuda.memory_snapshot(pool.handle)
        ]

    def fill_pool(self, pool: GraphPool, byte: int) -> None:
        for addresses in self.pool_ranges(pool):
            torch.as_tensor(_Bytes(addresses), device=self.device).fill_(byte)

    def memory_state(self) -> str:
        free, total = torch.cuda.mem_get_info(self.device)
        allocated, reserved = torch.cuda.memory_allocated(self.device), torch.cuda.memory_reserved(self.device)
        return f"{free} of {total} bytes free; torch has {allocated} in tensors and {reserved} reserved"

    @contextlib.contextmanager
    def range_marker(self, name: str) -> Iterator[None]:
        torch.cuda.nvtx.range_push(name)
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()


def _begin_capture(stream: torch.cuda.Stream) -> None:
    """Record on a stream past torch, by the driver, which torch does not offer; for this thread's calls alone."""
    thread_local = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    with contextlib.suppress(OSError):
        ctypes.CDLL("libcuda.so.1").cuStreamBeginCapture_v2(ctypes.c_void_p(stream.cuda_stream), thread_local)


def graph_backend(device: torch.device) -> GraphBackend:
    """The backend of a device: CUDA graphs, or tapes on a CPU."""
    from .tape_graph import TapeBackend

    return CudaBackend(device) if device.type == "cuda" else TapeBackend(device)
