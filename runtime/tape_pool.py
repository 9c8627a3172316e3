"""The memory of tapes: blocks of a few segments, handed out again as soon as nothing holds them."""

import ctypes
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .graph_backend import GraphBackend

if TYPE_CHECKING:
    from .tape_graph import TapeGraph

SEGMENT_BYTES = 1 << 20
ALIGNMENT = 64  # that of torch's CPU allocator, so that a kernel takes the same path as without a tape


class _Extent(NamedTuple):
    segment: int
    start: int
    stop: int


class TapePool:
    """Best fit over segments; freed neighbours merge.

    A block that a graph has freed while it recorded stays its scratch in every replay, although others may get it. So a
    segment lives as long as a graph that recorded in it.
    """

    def __init__(self, backend: GraphBackend) -> None:
        self.backend = backend
        self.recording: TapeGraph | None = None
        self._segments: dict[int, Tensor] = {}
        self._free: list[_Extent] = []
        self._graphs: weakref.WeakSet[TapeGraph] = weakref.WeakSet()
        self._num_segments = 0

    @property
    def num_bytes(self) -> int:
        return sum(segment.numel() for segment in self._segments.values())

    def ranges(self) -> list[range]:
        return [range(s.data_ptr(), s.data_ptr() + s.numel()) for s in self._segments.values()]

    @torch.inference_mode()  # a segment that a capture made in this mode may be written to in no other
    def fill(self, byte: int) -> None:
        """Overwrite everything."""
        for segment in self._segments.values():
            segment.fill_(byte)

    def hand_out(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, int | None]:
        """A tensor of the pool's memory, and the segment that it lies in (None if it has no bytes)."""
        extent = 0 if 0 in shape else 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
        if not extent:
            return torch.empty_strided(shape, stride, dtype=dtype), None
        block = self._take(-(-extent * dtype.itemsize // ALIGNMENT) * ALIGNMENT)
        address = self._segments[block.segment].data_ptr() + block.start
        memory = memoryview((ctypes.c_char * (block.stop - block.start)).from_address(address)).cast("B")
        # The storage owns `memory`, and so `memory` dies with its last tensor or view.
        weakref.finalize(memory, self._give_back, block).atexit = False
        storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
        if self.recording is not None:
            self._graphs.add(self.recording)
        return torch.empty(0, dtype=dtype).set_(storage, 0, shape, stride), block.segment

    def alias(self, tensor: Tensor) -> Tensor:
        """The same memory without a claim on its block; a tensor from elsewhere is returned as it is."""
        address = tensor.untyped_storage().data_ptr()
        for segment in self._segments.values():
            offset = address - segment.data_ptr()
            if 0 <= offset < segment.numel():
                start = offset // tensor.element_size() + tensor.storage_offset()
                alias = torch.empty(0, dtype=tensor.dtype)
                return alias.set_(segment.untyped_storage(), start, tensor.shape, tensor.stride())
        return tensor

    def forget(self, graph: "TapeGraph") -> None:
        """A graph is gone: give back the segments that nobody needs any more."""
        self._graphs.discard(graph)
        self._trim()

    def _trim(self) -> None:
        used = {segment for graph in self._graphs for segment in graph.segments}
        for extent in list(self._free):
            whole = extent.start == 0 and extent.stop == self._segments[extent.segment].numel()
            if whole and extent.segment not in used:
                self._free.remove(extent)
                del self._segments[extent.segment]

    def _take(self, num_bytes: int) -> _Extent:
        fits = [extent for extent in self._free if extent.stop - extent.start >= num_bytes]
        if fits:
            extent = min(fits, key=lambda e: (e.stop - e.start, e))
            self._free.remove(extent)
        else:
            extent = _Extent(self._num_segments, 0, max(num_bytes, SEGMENT_BYTES))
            self._num_segments += 1
            self._segments[extent.segment] = torch.empty(extent.stop, dtype=torch.uint8)
        block = extent._replace(stop=extent.start + num_bytes)
        if block.stop < extent.stop:
            self._free.append(extent._replace(start=block.stop))
        return block

    def _give_back(self, block: _Extent) -> None:
        for neighbour in [e for e in self._free if e.segment == block.segment]:
            if neighbour.stop == block.start or neighbour.start == block.stop:
                self._free.remove(neighbour)
                block = block._replace(start=min(block.start, neighbour.start), stop=max(block.stop, neighbour.stop))
        self._free.append(block)
        if self.recording is None:
            self._trim()
