"""What a captured region is: its Python, its inputs and its buckets."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .graph_backend import Graph
from .graph_buckets import BucketKey


class PiecewiseCaptureShape(NamedTuple):
    """A bucket of a region: requests, and tokens of all of them together."""

    bs: int
    total_tokens: int


class PiecewiseGraphKey(NamedTuple):
    """One graph of a region; `seq_len` is the total of tokens."""

    bs: int
    seq_len: int
    slot: int


@dataclass(frozen=True)
class InputSpec:
    """A static input of a region.

    Attributes:
        row_shape: of one token (or of one request, with `per_request`).
        buffer: the name of the buffer; inputs of several regions with one name are one buffer. None: its own.
        fill: what warm-up and capture read, and what must be harmless where it is an address.
    """

    row_shape: tuple[int, ...]
    dtype: torch.dtype
    per_request: bool = False
    buffer: str | None = None
    fill: float = 0


@dataclass(frozen=True)
class PiecewiseCallInputs:
    """What the region's callable gets: its static inputs, and the bucket. It is called at warm-up and capture only,
    so whatever it reads beside the inputs is frozen then.
    """

    inputs: Mapping[str, Tensor]
    shape: PiecewiseCaptureShape


@dataclass(frozen=True)
class PiecewiseConfig:
    """A region: `{name: tensor}` from static inputs.

    Attributes:
        fn: the region. An output may be a buffer that it owns (`out=`), else it is copied to one in the graph.
        shapes: the buckets.
        inputs: its static inputs.
        claim: claims further buffers that `fn` uses, for the largest shape.
    """

    fn: Callable[[PiecewiseCallInputs], Mapping[str, Tensor]]
    shapes: tuple[PiecewiseCaptureShape, ...]
    inputs: Mapping[str, InputSpec]
    claim: Callable[[Sequence[PiecewiseCaptureShape]], None] = lambda shapes: None


@dataclass(frozen=True)
class PiecewiseGraphData:
    """One captured region of one bucket."""

    graph: Graph
    static_inputs: dict[str, Tensor]
    static_outputs: dict[str, Tensor]
    dummy_rids: list[int]
    shape: PiecewiseCaptureShape
    bucket: BucketKey
