"""Buffers at fixed addresses, claimed by all before anything is captured."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .graph_backend import GraphBackend, GraphPool


class StaticBuffers:
    """Named buffers whose first dimension is as large as anyone's claim; a smaller bucket uses the leading part.

    Claims come first, from everybody; `seal` allocates. A claim for more than that afterwards raises: the graphs that
    exist hold the old address.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._claims: dict[str, tuple[int, tuple[int, ...], torch.dtype]] = {}
        self._buffers: dict[str, Tensor] = {}
        self._parts: dict[tuple[str, int], Tensor] = {}
        self._sealed = False

    @property
    def num_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())

    @property
    def tensors(self) -> dict[str, Tensor]:
        return dict(self._buffers)

    def claim(self, name: str, rows: int, row_shape: Sequence[int] = (), dtype: torch.dtype = torch.float32) -> None:
        """Ask for `[rows, *row_shape]`.

        Raises:
            RuntimeError: after `seal`, for a buffer that does not exist or is too small.
            ValueError: another claim of this name has another row shape or dtype.
        """
        before, shape, old_dtype = self._claims.get(name, (0, tuple(row_shape), dtype))
        if (shape, old_dtype) != (tuple(row_shape), dtype):
            raise ValueError(f"buffer {name!r} holds rows of {shape} {old_dtype}, not of {tuple(row_shape)} {dtype}")
        if self._sealed and rows > before:
            raise RuntimeError(f"buffer {name!r} has {before} rows; {rows} were claimed after the first capture")
        self._claims[name] = (max(before, rows), shape, old_dtype)

    def seal(self) -> None:
        """Allocate what was claimed, zeroed, from the ordinary allocator. Nothing grows from here on."""
        if not self._sealed:
            self._sealed = True
            for name, (rows, shape, dtype) in self._claims.items():
                self._buffers[name] = torch.zeros(rows, *shape, dtype=dtype, device=self._device)

    def get(self, name: str, rows: int) -> Tensor:
        """The first `rows` rows of a buffer; one tensor for all who ask."""
        part = self._parts.get((name, rows))
        if part is None:
            assert self._sealed, "buffers have addresses once all claims are in"
            buffer = self._buffers[name]
            assert rows <= buffer.shape[0], f"buffer {name!r} has {buffer.shape[0]} rows, {rows} were asked for"
            part = self._parts[name, rows] = buffer[:rows]
        return part


@dataclass
class Changes:
    """Counts what happened to the graphs of an engine, so that what follows from them is worked out once."""

    count: int = 0


@dataclass(frozen=True)
class GraphResources:
    """What the runners of one engine share.

    Attributes:
        pool: the memory of all their graphs.
        buffers: their static inputs and outputs.
        planners: what the host plans per step into buffers of a graph slot, each with `claim(specs)`; without any, one
            slot a bucket is enough.
        changes: counted whenever a graph comes or goes.
    """

    backend: GraphBackend
    pool: GraphPool
    buffers: StaticBuffers
    planners: tuple["Planner", ...] = ()
    changes: Changes = field(default_factory=Changes)


class Planner:
    """Something that is planned on the host before a step: it owns plan buffers for each target."""

    def claim(self, specs: Sequence[object]) -> None:
        """Allocate the plan buffers of these captures."""
