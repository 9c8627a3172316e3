"""The self-test sees a graph that differs from its Python in one thing only, whatever that is."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from ostinato.model import AttentionMetadata, Decoder
from ostinato.runtime import Engine, Path, SamplingParams
from ostinato.runtime.decode_graphs import DecodeGraphs
from ostinato.runtime.decode_pieces import DecodePieces
from ostinato.runtime.graph_self_test import self_test
from ostinato.runtime.step_state import StepState

Make = Callable[..., Engine]


def only_short_lengths(pieces: DecodePieces, patch: pytest.MonkeyPatch) -> None:
    """As if a length, or what follows from it, had been decided at the capture."""
    state = pieces.state
    patch.setattr(
        pieces,
        "metadata",
        lambda rows: AttentionMetadata(state.block_tables[:rows], state.seq_lens[:rows].clamp(max=16)),
    )


def only_long_lengths(pieces: DecodePieces, patch: pytest.MonkeyPatch) -> None:
    state = pieces.state
    patch.setattr(
        pieces,
        "metadata",
        lambda rows: AttentionMetadata(state.block_tables[:rows], state.seq_lens[:rows].clamp(min=4)),
    )


def other_values(pieces: DecodePieces, patch: pytest.MonkeyPatch) -> None:
    """Of the last layer, once all layers are through: no output of this step shows it."""
    head = pieces.model.head

    def spoil(hidden: Tensor, *, out: Tensor | None = None) -> Tensor:
        pieces.kv_cache.v[-1].mul_(2.0)
        return head(hidden, out=out)

    patch.setattr(pieces.model, "head", spoil)


def other_positions(pieces: DecodePieces, patch: pytest.MonkeyPatch) -> None:
    """After everything else has been computed."""
    commit = StepState.commit_rows

    def spoil(self: StepState, sampled: Tensor) -> None:
        commit(self, sampled)
        self.positions.add_(1)

    patch.setattr(StepState, "commit_rows", spoil)


@pytest.mark.parametrize(
    ("spoil", "contexts", "what"),
    [
        (only_short_lengths, "long", "output"),
        (only_long_lengths, "short", "keys and values"),
        (other_values, "short", "keys and values"),
        (other_positions, "short", "positions"),
    ],
    ids=["lengths capped", "lengths from four on", "values", "positions"],
)
@pytest.mark.parametrize("path", [Path.WHOLE, Path.PIECEWISE])
def test_one_thing_that_differs_is_seen(
    make_engine: Make,
    tiny_decoder: Callable[..., Decoder],
    device: str,
    path: Path,
    spoil: Callable[[DecodePieces, pytest.MonkeyPatch], None],
    contexts: str,
    what: str,
) -> None:
    sizes: dict[str, Any] = {"max_num_seqs": 3, "capture_sizes": (3,), "max_model_len": 64}
    one = make_engine(tiny_decoder(device), graphs=path.value, capture="lazy", **sizes)
    graphs = graphs_of(one)
    with pytest.MonkeyPatch.context() as patch:
        spoil(graphs.pieces, patch)
        graphs.capture_path(path)
    assert graphs.drops() == []
    self_test(graphs, path)
    refused = graphs.drops()
    assert len(refused) == 3, refused
    assert all(f"over {contexts} contexts differs from its Python in" in line and what in line for line in refused)


@pytest.mark.parametrize("mode", ["whole", "piecewise"])
@pytest.mark.parametrize("what", ["norm_weight", "cache 1", "row state 3", "sample.token_ids"])
def test_what_moves_behind_the_self_test_is_found_at_the_first_replay(
    make_engine: Make, tiny_decoder: Callable[..., Decoder], device: str, mode: str, what: str
) -> None:
    """The replays of the self-test are nobody's first."""
    sizes: dict[str, Any] = {"max_num_seqs": 2, "capture_sizes": (2,), "max_model_len": 64}
    one = make_engine(tiny_decoder(device), graphs=mode, graph_self_test=True, **sizes)
    graphs = graphs_of(one)
    pieces = graphs.pieces
    moved = {
        "norm_weight": pieces.model.norm_weight,
        "cache 1": pieces.kv_cache.k[1],
        "row state 3": pieces.state.block_tables,
        "sample.token_ids": graphs.resources.buffers.tensors["sample.token_ids"],
    }[what]
    moved.data = moved.data.clone()
    [sequence] = one.create([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=3))
    one.add(sequence)
    while one.has_work:
        one.step()
    assert any(f"moved since the graphs were captured: {what}" in line for line in graphs.drops())
    assert len(sequence.output_ids) == 3


def graphs_of(engine: Engine) -> DecodeGraphs:
    graphs = engine.decode_runner.graphs
    assert graphs is not None
    return graphs
