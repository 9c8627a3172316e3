"""A decode step as pieces over the step state: preamble, blocks, head, sample and commit."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels import SINK_BLOCK
from ..model import AttentionMetadata, Decoder, KVCache
from ..model.decoder import Preamble
from .dummy_rows import RowInputs
from .graph_buckets import BucketKey, CudaGraphConfig
from .piecewise_config import InputSpec, PiecewiseCallInputs, PiecewiseCaptureShape, PiecewiseConfig
from .sample_road import SampleRoad
from .sampler import SampledTokens, Sampler
from .sampling_params import MAX_TOP_LOGPROBS
from .static_buffers import StaticBuffers
from .step_state import StepState

WALK = "decode"

GRAPH_ROADS = (
    SampleRoad(),
    SampleRoad(random=True, top_k=True, top_p=True, min_p=True, masks=True),
    SampleRoad(True, True, True, True, True, True, True, True, True, MAX_TOP_LOGPROBS),
)
"""What sampling is captured for: greedy, random or masked, and everything. A batch takes the first that covers its
needs; what it does not need changes no bit of its tokens."""

BOUNDARIES = ("blocks.cut.0", "blocks.cut.1")
"""Buffers of hidden states between regions of blocks, claimed so that the stack can be cut after start-up. The regions
before the last one take them in turns: with up to two cuts each region has a buffer to itself."""

BLOCKS_IN, BLOCKS_OUT, LOGITS = "blocks.in", "blocks.out", "sample.logits"


class DecodePieces:
    """The pieces, over the leading `rows` rows of the step state. Whoever runs them decides what is recorded."""

    def __init__(self, model: Decoder, kv_cache: KVCache, state: StepState, sampler: Sampler) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.state = state
        self.sampler = sampler
        self._metadata: dict[int, AttentionMetadata] = {}

    @property
    def num_layers(self) -> int:
        return self.model.config.num_layers

    def metadata(self, rows: int) -> AttentionMetadata:
        if rows not in self._metadata:
            self._metadata[rows] = AttentionMetadata(self.state.block_tables[:rows], self.state.seq_lens[:rows])
        return self._metadata[rows]

    def preamble(self, rows: int, out: Preamble | None = None) -> Preamble:
        state = self.state
        return self.model.preamble(
            state.token_ids[:rows], state.positions[:rows], self.metadata(rows), self.kv_cache.block_size, out=out
        )

    def sample(self, logits: Tensor, road: SampleRoad, out: SampledTokens | None = None) -> SampledTokens:
        return self.sampler.sample(logits, self.state.positions[: logits.shape[0]], road=road, out=out)

    def commit(self, token_ids: Tensor) -> None:
        """The device's part of the end of a step; the host's is `StepState.count_commit`."""
        self.state.commit_rows(token_ids)

    def run(self, rows: int, road: SampleRoad, out: SampledTokens | None = None) -> SampledTokens:
        """All of it, the commit included."""
        preamble = self.preamble(rows)
        hidden = self.model.blocks(preamble.hidden, preamble, self.metadata(rows), self.kv_cache)
        sampled = self.sample(self.model.head(hidden), road, out)
        self.commit(sampled.token_ids)
        return sampled


class DecodeSteps:
    """The declare → plan → commit road of recorded steps: rows live on the device, and the host plans nothing."""

    def open_rows(self, rids: Sequence[int]) -> None:
        """A dead row of the step state needs no storage."""

    def reset_rows(self, rids: Sequence[int], free: bool) -> None:
        """A dead row does not advance, so it is at rest."""

    def declare(self, graph_walk: str, rows: Any, metadata: Any) -> None:
        """Block tables and lengths are on the device already."""

    def plan(self, step: Any, target: Any) -> None:
        """Kernels read lengths on the device."""

    def commit(self, step: Any) -> None:
        """The last piece of the step commits, on the device."""


class WholeDecode:
    """A decode step as one forward, which a `CudaGraphRunner` captures. It reads the step state and takes no inputs."""

    def __init__(
        self, pieces: DecodePieces, buffers: StaticBuffers, sizes: Sequence[int], *, caps_batch_size: bool
    ) -> None:
        self._pieces = pieces
        self._buffers = buffers
        self._configs = decode_configs(sizes, caps_batch_size)

    def graph_configs(self) -> list[CudaGraphConfig]:
        return self._configs

    def claim(self, configs: Sequence[CudaGraphConfig]) -> None:
        rows = max(size for config in configs for size in config.capture_batch_sizes)
        for config in configs:
            claim_sampled(self._pieces, self._buffers, rows, config.cg_key_info)

    def static_inputs(self, key: BucketKey) -> dict[str, Tensor]:
        return {}

    def prepare_inputs(self, key: BucketKey) -> None:
        """Nothing: the rows of the step state are at rest."""

    def template_row(self, config: CudaGraphConfig, rid: int) -> RowInputs:
        return RowInputs(rid, 1, {})

    def forward(self, key: BucketKey, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        assert isinstance(key.cg_key_info, SampleRoad), "decode buckets are keyed by what sampling needs"
        out = sampled_buffers(self._buffers, key.bs, key.cg_key_info)
        return sampled_outputs(self._pieces.run(key.bs, key.cg_key_info, out))


def decode_configs(sizes: Sequence[int], caps_batch_size: bool) -> list[CudaGraphConfig]:
    """The buckets of decode steps, for each kind of sampling."""
    return [
        CudaGraphConfig(WALK, tuple(sizes), cg_key_info=road, caps_batch_size=caps_batch_size) for road in GRAPH_ROADS
    ]


def block_spans(num_layers: int, cuts: Sequence[int]) -> list[tuple[int, int, str, str]]:
    """The regions of a block stack that is cut in front of some layers: (first layer, last + 1, buffer in, buffer out).

    A cut at 0 or `num_layers` lies outside of the stack and makes no region.
    """
    inner = sorted({cut for cut in cuts if 0 < cut < num_layers})
    edges = [0, *inner, num_layers]
    names = [BLOCKS_IN, *(BOUNDARIES[i % 2] for i in range(len(inner))), BLOCKS_OUT]
    return list(zip(edges[:-1], edges[1:], names[:-1], names[1:], strict=True))


def block_region(
    pieces: DecodePieces,
    buffers: StaticBuffers,
    sizes: Sequence[int],
    span: tuple[int, int, str, str],
) -> PiecewiseConfig:
    """The region `blocks[start:stop]`, from one buffer of hidden states to another."""
    start, stop, source, target = span
    config, dtype = pieces.model.config, pieces.model.dtype

    def run(call: PiecewiseCallInputs) -> dict[str, Tensor]:
        rows, given = call.shape.bs, call.inputs
        preamble = Preamble(given["hidden"], given["cos"], given["sin"], given["slot_mapping"])
        out = buffers.get(target, rows)
        metadata = pieces.metadata(rows)
        hidden = pieces.model.blocks(given["hidden"], preamble, metadata, pieces.kv_cache, start, stop, out=out)
        return {"hidden": hidden}

    half = config.rotary.rotary_dim // 2
    inputs = {
        "hidden": InputSpec((config.hidden_size,), dtype, buffer=source),
        "cos": InputSpec((half,), torch.float32, buffer="preamble.cos"),
        "sin": InputSpec((half,), torch.float32, buffer="preamble.sin"),
        "slot_mapping": InputSpec(
            (), torch.int64, buffer="preamble.slot_mapping", fill=SINK_BLOCK * pieces.kv_cache.block_size
        ),
    }

    def claim(shapes: Sequence[PiecewiseCaptureShape]) -> None:
        for name in (*BOUNDARIES, BLOCKS_OUT):
            buffers.claim(name, max(shape.bs for shape in shapes), (config.hidden_size,), dtype)

    return PiecewiseConfig(run, _shapes(sizes), inputs, claim)


def head_region(pieces: DecodePieces, buffers: StaticBuffers, sizes: Sequence[int]) -> PiecewiseConfig:
    """The region from hidden states to logits."""
    config, dtype = pieces.model.config, pieces.model.dtype

    def run(call: PiecewiseCallInputs) -> dict[str, Tensor]:
        out = buffers.get(LOGITS, call.shape.bs)
        return {"logits": pieces.model.head(call.inputs["hidden"], out=out)}

    def claim(shapes: Sequence[PiecewiseCaptureShape]) -> None:
        buffers.claim(LOGITS, max(shape.bs for shape in shapes), (config.vocab_size,), dtype)

    inputs = {"hidden": InputSpec((config.hidden_size,), dtype, buffer=BLOCKS_OUT)}
    return PiecewiseConfig(run, _shapes(sizes), inputs, claim)


def sample_region(
    pieces: DecodePieces, buffers: StaticBuffers, sizes: Sequence[int], road: SampleRoad
) -> PiecewiseConfig:
    """The region from logits to the next step: sample and commit."""
    config, dtype = pieces.model.config, pieces.model.dtype

    def run(call: PiecewiseCallInputs) -> dict[str, Tensor]:
        sampled = pieces.sample(call.inputs["logits"], road, sampled_buffers(buffers, call.shape.bs, road))
        pieces.commit(sampled.token_ids)
        return sampled_outputs(sampled)

    def claim(shapes: Sequence[PiecewiseCaptureShape]) -> None:
        claim_sampled(pieces, buffers, max(shape.bs for shape in shapes), road)

    inputs = {"logits": InputSpec((config.vocab_size,), dtype, buffer=LOGITS)}
    return PiecewiseConfig(run, _shapes(sizes), inputs, claim)


def claim_sampled(pieces: DecodePieces, buffers: StaticBuffers, rows: int, road: object) -> None:
    """Claim the buffers that a sample of this road writes to."""
    assert isinstance(road, SampleRoad), "decode buckets are keyed by what sampling needs"
    buffers.claim("sample.token_ids", rows, (), torch.int64)
    if road.logprobs:
        k = min(road.num_top_logprobs, pieces.model.config.vocab_size)
        buffers.claim("sample.logprobs", rows)
        buffers.claim("sample.top_token_ids", rows, (k,), torch.int64)
        buffers.claim("sample.top_logprobs", rows, (k,))


def sampled_buffers(buffers: StaticBuffers, rows: int, road: SampleRoad) -> SampledTokens:
    names = ("token_ids", "logprobs", "top_token_ids", "top_logprobs") if road.logprobs else ("token_ids",)
    return SampledTokens(*(buffers.get(f"sample.{name}", rows) for name in names))


def sampled_outputs(sampled: SampledTokens) -> dict[str, Tensor]:
    """The tensors of a sample by name; what there is depends on the road alone."""
    named = {name: getattr(sampled, name) for name in ("token_ids", "logprobs", "top_token_ids", "top_logprobs")}
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def _shapes(sizes: Sequence[int]) -> tuple[PiecewiseCaptureShape, ...]:
    return tuple(PiecewiseCaptureShape(size, size) for size in sizes)
