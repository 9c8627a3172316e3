"""A region and an eager piece of one's own, added as docs/graphs.md says: all that captures and checks has them."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato.model import Decoder
from ostinato.runtime import Engine, Path, Reason, SamplingParams, decode_graphs, piecewise_step
from ostinato.runtime.decode_pieces import BLOCKS_OUT, DecodePieces, head_region
from ostinato.runtime.graph_aliases import find_aliases, lasting
from ostinato.runtime.graph_self_test import self_test
from ostinato.runtime.piecewise_config import InputSpec, PiecewiseCallInputs, PiecewiseCaptureShape, PiecewiseConfig
from ostinato.runtime.piecewise_runner import PiecewiseCudaGraphRunner
from ostinato.runtime.piecewise_step import Piece, PiecewiseStep
from ostinato.runtime.sample_road import SampleRoad
from ostinato.runtime.static_buffers import StaticBuffers

SIZES = (1, 2)
NEGATED = "negated.hidden"


def negate_region(
    pieces: DecodePieces, buffers: StaticBuffers, sizes: Sequence[int], ran: list[int]
) -> PiecewiseConfig:
    """The region from hidden states to their negatives."""
    hidden = InputSpec((pieces.model.config.hidden_size,), pieces.model.dtype, buffer=BLOCKS_OUT)

    def run(call: PiecewiseCallInputs) -> dict[str, Tensor]:
        ran.append(call.shape.bs)
        return {"hidden": torch.neg(call.inputs["hidden"], out=buffers.get(NEGATED, call.shape.bs))}

    def claim(shapes: Sequence[PiecewiseCaptureShape]) -> None:
        buffers.claim(NEGATED, max(shape.bs for shape in shapes), hidden.row_shape, hidden.dtype)

    shapes = tuple(PiecewiseCaptureShape(size, size) for size in sizes)
    return PiecewiseConfig(run, shapes, {"hidden": hidden}, claim)


def head_of_negated(pieces: DecodePieces, buffers: StaticBuffers, sizes: Sequence[int]) -> PiecewiseConfig:
    config = head_region(pieces, buffers, sizes)
    hidden = InputSpec((pieces.model.config.hidden_size,), pieces.model.dtype, buffer=NEGATED)
    return PiecewiseConfig(config.fn, config.shapes, {"hidden": hidden}, config.claim)


class LongerStep(PiecewiseStep):
    """Behind the blocks a region negates, and an eager piece negates again. Without either, tokens would be others."""

    def __init__(
        self, pieces: DecodePieces, buffers: StaticBuffers, sizes: Sequence[int], make: Any, before_replay: Any
    ) -> None:
        self.ran: list[int] = []
        self.num_eager = 0
        self.negate: PiecewiseCudaGraphRunner = make("negate", negate_region(pieces, buffers, sizes, self.ran))
        super().__init__(pieces, buffers, sizes, make, before_replay)

    def _order(self, road: SampleRoad) -> Iterator[Piece]:
        for piece in super()._order(road):
            if piece.region is self.head:
                yield Piece(region=self.negate)
                yield Piece(eager=self._negate_again)
            yield piece

    def _negate_again(self, rows: int) -> None:
        self.num_eager += 1
        self._buffers.get(NEGATED, rows).neg_()


@pytest.fixture
def engine(make_engine: Callable[..., Engine], tiny_decoder: Callable[..., Decoder], device: str) -> Any:
    def make(**config: Any) -> Engine:
        return make_engine(tiny_decoder(device), **({"max_num_seqs": 2, "capture_sizes": SIZES} | config))

    return make


def tokens(engine: Engine, params: SamplingParams) -> list[list[int]]:
    sequences = [s for prompt in ([1, 2], [3]) for s in engine.create(prompt, params)]
    for sequence in sequences:
        engine.add(sequence)
    while engine.has_work:
        engine.step()
    return [sequence.output_ids for sequence in sequences]


@pytest.mark.parametrize("capture", ["startup", "lazy"])
def test_a_region_and_an_eager_piece_are_added_in_one_place(
    engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, capture: str
) -> None:
    """Captured, checked, counted and replayed, with and without users' code before and behind them."""
    plain = SamplingParams(temperature=0.0, max_tokens=6)
    nothing = SamplingParams(temperature=0.0, max_tokens=6, logits_processors=[lambda prompt, output, row: None])
    exact = tokens(engine(), plain)
    monkeypatch.setattr(decode_graphs, "PiecewiseStep", LongerStep)
    monkeypatch.setattr(piecewise_step, "head_region", head_of_negated)
    one = engine(graphs="piecewise", capture=capture, graph_warmup_steps=1, run_ahead=True)
    graphs = one.decode_runner.graphs
    assert graphs is not None
    step = graphs.step
    assert isinstance(step, LongerStep)

    for params in (plain, nothing):
        assert tokens(one, params) == exact
    for layer in (1, 2):  # in the middle, and right in front of the new region
        handle = one.hooks.add(layer, lambda hidden, rows: None)
        assert tokens(one, plain) == exact
        handle.remove()

    counters = one.decode_runner.counters
    late = {Reason.WARMUP} if capture == "lazy" else set()
    replays = {Reason.PIECEWISE, Reason.LOGITS_PROCESSOR, Reason.HOOK}
    assert counters.by_reason.keys() == replays | late | {Reason.PREFILL}
    num_replayed = sum(counters.by_reason[reason] for reason in replays)
    assert step.num_eager >= counters.num_decodes, "more often only where a step was begun ahead in vain"
    assert step.negate.counts[Reason.PIECEWISE] >= num_replayed
    num_ran, num_before = len(step.ran), step.negate.counts[Reason.PIECEWISE]
    tokens(one, plain)
    assert len(step.ran) == num_ran, "no Python in a replay"
    assert step.negate.counts[Reason.PIECEWISE] == num_before + plain.max_tokens - 1  # type: ignore[operator]
    assert one.graph_report().region_replays["decode.negate"] == step.negate.counts[Reason.PIECEWISE]
    assert "decode.negate" in {entry.runner for entry in graphs.ledger.entries}
    assert any(name.startswith("output hidden of decode.negate") for name in lasting(graphs))
    assert find_aliases(graphs) == []
    assert self_test(graphs, Path.PIECEWISE) > 0
    assert graphs.drops() == []
