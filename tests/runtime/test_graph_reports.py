"""Reports on graphs elsewhere (docs/graph_reports.md) that can come true on a CPU and that no other test covers."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from ostinato.kernels import FIRST_BLOCK, SINK_BLOCK
from ostinato.model import Decoder
from ostinato.runtime import Engine, Path, Reason, SamplingParams, Sequence
from ostinato.runtime.decode_graphs import DecodeGraphs
from ostinato.runtime.graph_backend import Graph, GraphPool
from ostinato.runtime.graph_buckets import capture_sizes
from ostinato.runtime.tape_graph import TapeBackend

Build = Callable[..., Engine]
Generate = Callable[..., list[Sequence]]

GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
RANDOM = SamplingParams(temperature=0.9, seed=3, max_tokens=6, logprobs=True)
BLOCK_BYTES = 4096
"""Of 16 tokens in the tiny model's cache."""
MODES = pytest.mark.parametrize("mode", ["whole", "piecewise"])


@pytest.fixture
def build(make_engine: Callable[..., Engine], tiny_decoder: Callable[..., Decoder]) -> Build:
    """`build(**config)`: graphs for 1, 2 and 4 rows, of 3 blocks of 16 tokens each."""

    def make(**config: Any) -> Engine:
        return make_engine(tiny_decoder(), **({"max_num_seqs": 4, "max_model_len": 48, "graphs": "whole"} | config))

    return make


def graphs_of(engine: Engine) -> DecodeGraphs:
    graphs = engine.decode_runner.graphs
    assert graphs is not None
    return graphs


def requests(num: int, params: SamplingParams = GREEDY) -> list[tuple[list[int], SamplingParams]]:
    return [([1 + index, 2, 3] * (1 + index), params) for index in range(num)]


def start(engine: Engine, num: int) -> list[Sequence]:
    """Queue as many sequences and compute their prompts."""
    sequences = [one for prompt, params in requests(num) for one in engine.create(prompt, params)]
    for one in sequences:
        engine.add(one)
    engine.step()
    return sequences


def tokens(sequences: list[Sequence]) -> list[list[int]]:
    return [one.output_ids for one in sequences]


def device_state(engine: Engine) -> list[torch.Tensor]:
    """All that graphs read or write across steps, the sink included."""
    runner = engine._runner
    state, sampler = runner._state, runner._sampler
    rows = [*state.row_tensors(), *sampler.row_tensors(), state._sampled, state._step]
    return [*runner._pieces.kv_cache.k, *runner._pieces.kv_cache.v, *rows]


def is_cache(tensor: torch.Tensor) -> bool:
    return tensor.ndim == 4


# Memory


def pool_bytes(engine: Engine) -> int:
    resources = graphs_of(engine).resources
    return resources.backend.pool_bytes(resources.pool)


@pytest.fixture
def _small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tape whose memory grows in small steps, so that bytes can be compared."""
    monkeypatch.setattr("ostinato.runtime.tape_pool.SEGMENT_BYTES", 1 << 12)


@pytest.mark.usefixtures("_small_segments")
def test_graph_memory_does_not_depend_on_the_size_of_the_kv_cache(build: Build) -> None:
    small, large = (
        build(max_num_seqs=2, kv_cache_memory_bytes=(FIRST_BLOCK + blocks) * BLOCK_BYTES) for blocks in (3, 6)
    )
    assert (small.kv_plan.num_usable_blocks, large.kv_plan.num_usable_blocks) == (3, 6)
    assert pool_bytes(small) == pool_bytes(large)


@pytest.mark.usefixtures("_small_segments")
def test_smaller_buckets_live_in_the_memory_of_the_largest(build: Build) -> None:
    """Largest first: what a smaller bucket needs is free by then, but for a few blocks of an unlucky size."""
    alone, ladder = (pool_bytes(build(capture_sizes=sizes)) for sizes in ((4,), (1, 2, 4)))
    assert alone <= ladder <= 1.05 * alone


# Silent eager


@MODES
def test_a_full_cache_does_not_keep_padded_buckets_from_replaying(
    build: Build, drain: Callable[..., None], mode: str
) -> None:
    """Three sequences own every block; their steps are padded to four rows all the same."""
    engine = build(graphs=mode, kv_cache_memory_bytes=(FIRST_BLOCK + 3) * BLOCK_BYTES)
    sequences = start(engine, 3)
    assert sum(len(one.blocks) for one in sequences) == engine.kv_plan.num_usable_blocks
    drain(engine)
    counters = engine.decode_runner.counters
    assert counters.num_padding_rows == 5
    assert set(counters.by_reason) == {Reason.PREFILL, Reason[mode.upper()]}


@MODES
def test_a_prompt_that_comes_late_makes_no_decode_step_eager(
    build: Build, drain: Callable[..., None], mode: str
) -> None:
    engine = build(graphs=mode)
    start(engine, 2)
    engine.step()
    start(engine, 1)
    drain(engine)
    assert set(engine.decode_runner.counters.by_reason) == {Reason.PREFILL, Reason[mode.upper()]}
    assert engine.decode_runner.counters.by_reason[Reason.PREFILL] == 2


@pytest.mark.parametrize("largest", [256, 257, 700, 1024, 5000])
def test_the_default_buckets_at_most_double_a_batch(largest: int) -> None:
    """Up to 256 at most 7 rows are padding; above, at most a sixteenth of the batch, however many there are."""
    sizes = capture_sizes(None, largest)
    for batch in range(1, largest + 1):
        bucket = min(size for size in sizes if size >= batch)
        assert bucket - batch <= min(batch, 7) if batch <= 256 else bucket - batch < batch / 16
    assert len(sizes) <= 36 + 16 * max(0, (largest - 1).bit_length() - 8)


# Wrong results


@MODES
def test_no_address_that_a_graph_reads_changes_while_serving(build: Build, generate: Generate, mode: str) -> None:
    """Splits, moved rows, hooks and all kinds of sampling: tensors are written to and never replaced."""
    engine = build(graphs=mode)

    def addresses() -> list[int]:
        buffers = graphs_of(engine).resources.buffers.tensors.values()
        weights = engine._runner._pieces.model.parameters()
        return [tensor.data_ptr() for tensor in (*device_state(engine), *buffers, *weights)]

    before = addresses()
    generate(engine, *requests(3), *requests(3, RANDOM))
    handle = engine.hooks.add(1, lambda hidden, rows: hidden + 1)
    generate(engine, *requests(2))
    handle.remove()
    generate(engine, *requests(2))
    assert addresses() == before


@MODES
def test_a_capture_among_live_rows_changes_nothing_of_theirs(build: Build, mode: str) -> None:
    engine = build(graphs=mode, capture="lazy", graph_warmup_steps=100)
    with torch.inference_mode():
        for tensor in device_state(engine):
            if is_cache(tensor):
                tensor.fill_(3.0)  # memory that nobody has written may hold NaN, which equals nothing
    start(engine, 3)
    for _ in range(2):
        engine.step()
    before = [tensor.clone() for tensor in device_state(engine)]
    graphs = graphs_of(engine)
    for key in graphs.configs[0].bucket_keys():
        assert graphs.capture_bucket(Path(mode), key)
    for old, new in zip(before, device_state(engine), strict=True):
        if is_cache(new):
            assert new[SINK_BLOCK].eq(0).all()
            old, new = old[FIRST_BLOCK:], new[FIRST_BLOCK:]
        assert torch.equal(old, new)


@MODES
def test_a_sequence_fills_the_context_to_its_last_token(build: Build, generate: Generate, mode: str) -> None:
    """The captured block tables are as wide as the longest sequence, its last token included."""
    limit, to_the_end = 48, SamplingParams(temperature=0.0, max_tokens=None)
    batch = [(([5, 6, 7, 8] * 12)[:num_prompt], to_the_end) for num_prompt in (15, 16, 17, 31, 32, 47)]
    served = generate(build(graphs=mode, capture_sizes=(4,)), *batch)
    assert [len(one.prompt_ids) + len(one.output_ids) for one in served] == [limit] * len(batch)
    assert tokens(served) == tokens(generate(build(graphs="off"), *batch))


def test_an_eager_batch_above_the_largest_graph_needs_no_buffer_of_it(build: Build, generate: Generate) -> None:
    engine = build(capture_sizes=(1, 2), split_large_batches=False)
    graphs = graphs_of(engine)
    for key in graphs.whole.bucket_keys():
        if key.bs == 4:
            graphs.whole.drop(key, Reason.OVER_BUDGET, "for a test")
    served = tokens(generate(engine, *requests(4)))
    assert served == tokens(generate(build(graphs="off"), *requests(4)))
    assert engine.decode_runner.counters.num_eager_decodes == 5


# Captures


@MODES
def test_an_engine_works_on_when_another_has_come_and_gone(
    make_engine: Callable[..., Engine], tiny_decoder: Callable[..., Decoder], device: str, mode: str
) -> None:
    """B43: the other one decodes beside it, on the same weights, and goes in the middle of a sequence."""
    model, config = tiny_decoder(device), {"max_num_seqs": 2, "max_model_len": 48, "graphs": mode}
    expected = []
    for others in (False, True):
        one = make_engine(model, **config)
        sequences = start(one, 2)
        one.step()
        if others:
            other = make_engine(model, **config)
            start(other, 1)
            other.step()
            del other
            gc.collect()
        while one.has_work:
            one.step()
        expected.append(tokens(sequences))
        assert one.graph_report().eager_decodes == 0
    assert expected[0] == expected[1]


class Noting(TapeBackend):
    """Notes warm-ups, waits and captures in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []

    @contextmanager
    def on_capture_stream(self) -> Iterator[None]:
        with super().on_capture_stream():
            yield
        self.notes.append("warm-up")

    def synchronize(self) -> None:
        self.notes.append("wait")

    def begin(self, graph: Graph, pool: GraphPool) -> None:
        self.notes.append("capture")
        super().begin(graph, pool)


@pytest.mark.parametrize("capture", ["startup", "lazy"])
@MODES
def test_no_work_is_under_way_when_a_capture_begins(
    build: Build, generate: Generate, monkeypatch: pytest.MonkeyPatch, mode: str, capture: str
) -> None:
    """Between the last warm-up and the capture the device is waited for, at start and in the middle of serving."""
    backend = Noting()
    monkeypatch.setattr("ostinato.runtime.engine.graph_backend", lambda device: backend)
    generate(build(graphs=mode, capture=capture, graph_warmup_steps=1), *requests(3))
    captures = [index for index, note in enumerate(backend.notes) if note == "capture"]
    assert captures
    assert all(backend.notes[index - 2 : index] == ["warm-up", "wait"] for index in captures)
