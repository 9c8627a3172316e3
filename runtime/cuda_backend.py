"""Recording CUDA graphs through torch, with what torch leaves undone after a capture that failed."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .graph_backend import Event, Graph, GraphBackend, GraphPool, Stream


@dataclass(frozen=True, eq=False)
class CudaPool:
    """A private pool of torch's caching allocator."""

    backend: "CudaBackend"
    handle: Any


class _Bytes:
    """Device memory by its addresses, in the form that torch takes as a tensor without a copy."""

    def __init__(self, addresses: range) -> None:
        self.__cuda_array_interface__ = {
            "shape": (len(addresses),),
            "typestr": "|u1",
            "data": (addresses.start, False),
            "version": 2,
        }


class CudaBackend(GraphBackend):
    """CUDA graphs of one device. One capture stream for all captures: blocks are reused only within a stream."""

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self._index = index
        self._capture_stream = torch.cuda.Stream(self.device)
        self._outer_stream: torch.cuda.Stream | None = None

    def new_pool(self) -> GraphPool:
        return CudaPool(self, torch.cuda.graph_pool_handle())

    def new_graph(self) -> Graph:
        return torch.cuda.CUDAGraph(keep_graph=True)

    def begin(self, graph: Graph, pool: GraphPool) -> None:
        assert isinstance(graph, torch.cuda.CUDAGraph), "a backend records its own graphs"
        assert isinstance(pool, CudaPool), "a backend records its own graphs"
        torch.cuda.synchronize(self.device)
        self._outer_stream = torch.cuda.current_stream(self.device)
        torch.cuda.set_stream(self._capture_stream)
        # Other threads may copy and allocate meanwhile: only this one records.
        graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")

    def end(self, graph: Graph) -> None:
        assert isinstance(graph, torch.cuda.CUDAGraph), "a backend records its own graphs"
        graph.capture_end()
        self._restore_stream()

    def instantiate(self, graph: Graph) -> None:
        assert isinstance(graph, torch.cuda.CUDAGraph), "a backend records its own graphs"
        graph.instantiate()

    def abandon(self, graph: Graph, pool: GraphPool) -> None:
        """Three things survive a failed capture in torch: the stream that records, the allocator's routing of this
        stream's tensors into the pool with a claim on the pool, and the current stream. Each is undone if it is there.
        """
        assert isinstance(graph, torch.cuda.CUDAGraph), "a backend abandons its own graphs"
        assert isinstance(pool, CudaPool), "a backend abandons its own graphs"
        with torch.cuda.stream(self._capture_stream), contextlib.suppress(RuntimeError):
            graph.capture_end()  # reports the failure again; where it reaches its end, it stops the routing itself
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


def graph_backend(device: torch.device) -> GraphBackend:
    """The backend of a device: CUDA graphs, or tapes on a CPU."""
    from .tape_graph import TapeBackend

    return CudaBackend(device) if device.type == "cuda" else TapeBackend(device)
