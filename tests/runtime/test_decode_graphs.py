"""Decode steps through graphs, in a whole engine: the same bits as without, every reason counted, failures survived."""

import gc
import itertools
import logging
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato.kernels import SINK_BLOCK
from ostinato.model import Decoder
from ostinato.runtime import (
    Engine,
    GraphsRequiredError,
    Path,
    Reason,
    SamplingParams,
    Sequence,
    cuda_graph_runner,
    decode_pieces,
)
from ostinato.runtime.cuda_backend import graph_backend
from ostinato.runtime.cuda_graph_runner import CudaGraphRunner
from ostinato.runtime.decode_pieces import GRAPH_ROADS
from ostinato.runtime.decode_runner import DecodeResult, Launched
from ostinato.runtime.graph_aliases import find_aliases, lasting
from ostinato.runtime.graph_backend import Graph, GraphBackend, GraphPool
from ostinato.runtime.graph_buckets import BucketKey
from ostinato.runtime.graph_capture import capture_into_graph
from ostinato.runtime.graph_dispatch import Chunk

MakeEngine = Callable[..., Engine]
MakeDecoder = Callable[..., Decoder]
Generate = Callable[..., list[Sequence]]

SIZES = (1, 2, 4)
NUM_ROWS = 6

GREEDY = SamplingParams(temperature=0.0, max_tokens=7)
RANDOM = SamplingParams(temperature=0.9, seed=3, top_k=20, top_p=0.95, min_p=0.01, max_tokens=6)
EVERYTHING = SamplingParams(
    temperature=0.8,
    seed=9,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    logit_bias={5: 2.0, 60: -3.0},
    min_tokens=4,
    stop_token_ids=[7],
    logprobs=True,
    top_logprobs=4,
    max_tokens=8,
)
FEATURES = {"greedy": GREEDY, "random": RANDOM, "everything": EVERYTHING}


def requests(num: int, params: SamplingParams) -> list[tuple[list[int], SamplingParams]]:
    return [([1 + index, 2, 3] * (1 + 3 * index), params) for index in range(num)]


def results(sequences: list[Sequence]) -> list[Any]:
    return [(one.output_ids, one.logprobs) for one in sequences]


def drop_size(engine: Engine, size: int, reason: Reason = Reason.OVER_BUDGET) -> None:
    """Take a batch size away from every runner."""
    graphs = engine.decode_runner.graphs
    assert graphs is not None
    for runner in (graphs.whole, *graphs.regions):
        for key in runner.bucket_keys():
            if key.bs == size:
                runner.drop(key, reason, "for a test")


@pytest.fixture
def engine(make_engine: MakeEngine, tiny_decoder: MakeDecoder, device: str) -> Callable[..., Engine]:
    """`engine(largest=4, **config)`: buckets of 1, 2, 4 for up to 6 rows; `largest=6` keeps that bucket too."""

    def make(largest: int = 4, model: Any = None, **config: Any) -> Engine:
        sizes = {"max_num_seqs": NUM_ROWS, "capture_sizes": SIZES, "graphs": "whole"} | config
        made = make_engine(model or tiny_decoder(device), **sizes)
        if largest == 4 and made.decode_runner.graphs is not None:
            drop_size(made, NUM_ROWS)
        return made

    return make


@pytest.fixture(scope="module")
def engines() -> dict[str, Engine]:
    return {}


@pytest.fixture
def shared(
    make_engine: MakeEngine, tiny_decoder: MakeDecoder, device: str, engines: dict[str, Engine]
) -> Callable[..., Engine]:
    """The same without the bucket of 6, made once for each config: for tests that leave no trace in an engine."""

    def get(**config: Any) -> Engine:
        name = f"{device} {config}"
        if name not in engines:
            sizes = {"max_num_seqs": NUM_ROWS, "capture_sizes": SIZES, "graphs": "whole"} | config
            engines[name] = make_engine(tiny_decoder(device), **sizes)
            if config.get("graphs") != "off":
                drop_size(engines[name], NUM_ROWS)
        return engines[name]

    return get


def everything(engine: Engine) -> list[Tensor]:
    """All device state that a step may change, the sink aside."""
    runner = engine._runner
    caches = [cache[SINK_BLOCK + 1 :].clone() for cache in (*runner._pieces.kv_cache.k, *runner._pieces.kv_cache.v)]
    return [*caches, *(tensor.clone() for tensor in runner._state.row_tensors())]


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("num_rows", range(1, NUM_ROWS + 1))
def test_eager_on_bucket_is_piecewise_is_whole(
    shared: Callable[..., Engine], generate: Generate, num_rows: int, feature: str
) -> None:
    """Bitwise: tokens, log-probabilities and the KV cache, for sizes up to the largest bucket and two beyond."""
    runs = {}
    for name, config in {
        "eager": {"enable_decode_graphs": False},
        "whole": {},
        "piecewise": {"graphs": "piecewise"},
        "lazy": {"capture": "lazy", "graph_warmup_steps": 1},
    }.items():
        one = shared(**config)
        with torch.inference_mode():
            for cache in (*one._runner._pieces.kv_cache.k, *one._runner._pieces.kv_cache.v):
                cache[SINK_BLOCK + 1 :] = 0.0
        sequences = generate(one, *requests(num_rows, FEATURES[feature]))
        runs[name] = results(sequences), everything(one)
    for name, (outputs, state) in runs.items():
        assert outputs == runs["eager"][0], name
        for mine, exact in zip(state, runs["eager"][1], strict=True):
            assert torch.equal(mine, exact), name


@pytest.mark.parametrize("mode", ["whole", "piecewise"])
def test_graphs_and_no_graphs_give_the_same_tokens(
    shared: Callable[..., Engine], generate: Generate, mode: str
) -> None:
    """Also without padding, where the reference sums fewer columns: a model without near-ties."""
    mixed = [(prompt, params) for params in FEATURES.values() for prompt, _ in requests(2, params)]
    plain = generate(shared(graphs="off"), *mixed)
    assert [one.output_ids for one in generate(shared(graphs=mode), *mixed)] == [one.output_ids for one in plain]


@pytest.mark.parametrize("mode", ["whole", "piecewise"])
def test_python_runs_at_warm_up_and_capture_only(
    engine: Callable[..., Engine], generate: Generate, tiny_decoder: MakeDecoder, device: str, mode: str
) -> None:
    """Replays are steps times regions; the blocks' Python ran warm-ups + 1 times a bucket and never in a replay."""
    model, calls = tiny_decoder(device), []
    blocks = model.blocks
    model.blocks = lambda *args, **kwargs: (calls.append(args[0].shape[0]), blocks(*args, **kwargs))[1]  # type: ignore[method-assign]
    one = engine(largest=6, model=model, graphs=mode)
    per_bucket = (CudaGraphRunner.NUM_WARMUP + 1) * (len(GRAPH_ROADS) if mode == "whole" else 1)
    assert {size: calls.count(size) for size in (*SIZES, NUM_ROWS)} == dict.fromkeys((*SIZES, NUM_ROWS), per_bucket)
    num_captures = len(calls)
    generate(one, *requests(3, GREEDY))
    runner = one.decode_runner
    num_steps = runner.counters.num_decodes
    assert len(calls) - num_captures == runner.counters.by_reason[Reason.PREFILL]
    assert num_steps == GREEDY.max_tokens - 1  # type: ignore[operator]
    assert runner.graphs is not None
    if mode == "piecewise":
        replays = sum(region.counts.total() for region in runner.graphs.regions)
        assert replays == 3 * num_steps
        assert all(set(region.counts) <= {Reason.PIECEWISE} for region in runner.graphs.regions)
    assert set(runner.counters.by_reason) == {Reason.PREFILL, Reason[mode.upper()]}


@pytest.mark.parametrize("mode", ["whole", "piecewise"])
def test_nothing_that_outlives_a_replay_lies_in_the_pool(shared: Callable[..., Engine], mode: str) -> None:
    """Weights, caches, state, buffers, inputs and outputs; and regions of one step write to different bytes."""
    graphs = shared(graphs=mode).decode_runner.graphs
    assert graphs is not None
    names = lasting(graphs)
    for kind in ("weight", "k cache", "step state", "sampling state", "buffer", "output token_ids", "output logprobs"):
        assert any(name.startswith(kind) for name in names), kind
    assert find_aliases(graphs) == []


def test_the_alias_checker_names_an_output_in_the_pool(
    engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: what is sampled goes to no claimed buffer and is left where it was made. The engine does not
    start."""

    def leave_in_pool(run: Any, warm_outputs: Any, pool: Any, device: Any, autocast_dtype: Any) -> Any:
        return capture_into_graph(run, pool, device, autocast_dtype)

    monkeypatch.setattr(cuda_graph_runner, "capture_with_static_outputs", leave_in_pool)
    monkeypatch.setattr(decode_pieces, "sampled_buffers", lambda buffers, rows, road: None)
    with pytest.raises(RuntimeError, match="graphs would overwrite what must last") as caught:
        engine(largest=6, capture_sizes=(2,))
    found = str(caught.value).partition(": ")[2].split("; ")
    assert len(found) == (3 + 3) * 2, found  # tokens of three kinds of sampling, log-probabilities of one
    assert {line.split()[1] for line in found} == {"token_ids", "logprobs", "top_logprobs", "top_token_ids"}


@pytest.mark.parametrize("mode", ["whole", "piecewise"])
def test_b37_padding_rows_write_to_the_sink_alone(engine: Callable[..., Engine], mode: str) -> None:
    """B37: a bucket of 4, 3 live rows, a cache full of a sentinel: 3 slots change, and the sink."""
    one = engine(graphs=mode)
    caches = (*one._runner._pieces.kv_cache.k, *one._runner._pieces.kv_cache.v)
    with torch.inference_mode():
        for cache in caches:
            cache.fill_(12345.0)
            cache[SINK_BLOCK].zero_()
    sequences = [s for prompt, params in requests(3, GREEDY) for s in one.create(prompt, params)]
    for sequence in sequences:
        one.add(sequence)
    one.step()
    before = [cache.clone() for cache in caches]
    expected = {(s.blocks[s.num_computed // 16], s.num_computed % 16) for s in sequences}
    one.step()
    for old, new in zip(before, caches, strict=True):
        changed = (old != new).any(3).any(1).nonzero().tolist()
        assert {(b, o) for b, o in changed if b != SINK_BLOCK} == expected
        assert new[0].eq(12345.0).all()
        assert new.isfinite().all()


@pytest.mark.parametrize("mode", ["whole", "piecewise"])
def test_poison_between_steps_changes_no_token(
    engine: Callable[..., Engine], shared: Callable[..., Engine], generate: Generate, drain: Any, mode: str
) -> None:
    """NaN over the whole pool and every claimed float buffer, garbage in the others, after each step."""
    exact = results(generate(shared(graphs="off"), *requests(3, GREEDY)))
    one = engine(graphs=mode)
    resources = one.decode_runner.graphs.resources  # type: ignore[union-attr]

    @torch.inference_mode()
    def poison() -> None:
        resources.backend.fill_pool(resources.pool, 0xFF)
        for buffer in resources.buffers.tensors.values():
            buffer.fill_(torch.nan if buffer.is_floating_point() else 7)

    sequences = [s for prompt, params in requests(3, GREEDY) for s in one.create(prompt, params)]
    for sequence in sequences:
        one.add(sequence)
    drain(one, poison)
    assert results(sequences) == exact


def test_the_sink_is_zero_after_captures_and_rows_are_as_before(engine: Callable[..., Engine]) -> None:
    one = engine()
    runner = one._runner
    for cache in (*runner._pieces.kv_cache.k, *runner._pieces.kv_cache.v):
        assert cache[SINK_BLOCK].eq(0).all()
    assert runner._state.seq_lens.eq(0).all()
    assert runner._state._step.item() == 0
    assert runner._sampler.claim_counts()[1].eq(0).all()


@pytest.mark.parametrize(
    "feature", ["greedy", "random", "everything", "hook", "processor", "mask", "asked mask", "hook+mask"]
)
@pytest.mark.parametrize("mode", ["whole", "piecewise", "off"])
def test_explain_is_what_happens(shared: Callable[..., Engine], generate: Generate, mode: str, feature: str) -> None:
    """For every size up to the largest bucket and two beyond."""
    one = shared(graphs=mode)
    params = FEATURES.get(feature, GREEDY)
    handle = one.hooks.add(1, lambda hidden, rows: None) if "hook" in feature else None
    if "processor" in feature:
        params = SamplingParams(temperature=0.0, max_tokens=2, logits_processors=[lambda prompt, out, row: None])
    if "mask" in feature:
        allowed: Any = (lambda prompt, output: range(61)) if "asked" in feature else range(61)
        params = SamplingParams(temperature=0.0, max_tokens=2, allowed_token_ids=allowed)
    expected_reason = {
        "hook": Reason.HOOK,
        "processor": Reason.LOGITS_PROCESSOR,
        "hook+mask": Reason.HOOK,
    }.get(feature, Reason[mode.upper()])
    runner = one.decode_runner
    for size in range(1, NUM_ROWS + 1):
        explained = runner.decide(runner.batch_of_params([params] * size))
        assert recorded(one, generate, requests(size, params)) == [expected(explained)]
        if expected_reason is Reason[mode.upper()]:
            assert not any(c.capture for c in explained), "captured at start"
        if mode == "off":
            assert [c.reason for c in explained] == [Reason.OFF]
        elif size <= 4:
            assert [c.reason for c in explained] == [expected_reason]
            assert explained[0].key is not None
            assert explained[0].key.bs == min(s for s in SIZES if s >= size)
        else:
            assert [c.num_rows for c in explained] == [4, size - 4]
    if handle is not None:
        handle.remove()


def test_a_bucket_that_is_removed_makes_an_explanation_false(engine: Callable[..., Engine], generate: Generate) -> None:
    """The comparison above would see it."""
    one = engine()
    explained = one.decode_runner.decide(one.decode_runner.batch_of_params([GREEDY] * 4))
    drop_size(one, 4)
    assert recorded(one, generate, requests(4, GREEDY)) != [expected(explained)]


def expected(explained: list[Chunk]) -> list[tuple[Reason, bool]]:
    return [(chunk.reason, chunk.capture) for chunk in explained]


def recorded(engine: Engine, generate: Generate, batch: list[Any]) -> list[list[tuple[Reason, bool]]]:
    """Of the first decode step of a batch: the reason of each chunk, and whether graphs were captured for it."""
    seen: list[list[tuple[Reason, bool]]] = []
    counters, graphs = engine.decode_runner.counters, engine.decode_runner.graphs
    count, run = counters.count, engine.decode_runner.run
    captures = graphs.ledger.entries if graphs is not None else []
    num_before = len(captures)

    def noting(chunk: Any, seconds: float) -> None:
        nonlocal num_before
        count(chunk, seconds)
        if seen and chunk.reason is not Reason.PREFILL:
            seen[-1].append((chunk.reason, len(captures) > num_before))
        num_before = len(captures)

    def stepping(sequences: Any, **more: Any) -> Any:
        seen.append([])
        return run(sequences, **more)

    counters.count, engine.decode_runner.run = noting, stepping  # type: ignore[method-assign]
    try:
        generate(engine, *batch)
    finally:
        del counters.count, engine.decode_runner.run
    return seen[:1]


def test_lazy_buckets_warm_up_then_capture_then_replay(engine: Callable[..., Engine], generate: Generate) -> None:
    one = engine(capture="lazy", graph_warmup_steps=2)
    generate(one, *requests(3, GREEDY))
    counts = one.decode_runner.counters.by_reason
    assert (counts[Reason.WARMUP], counts[Reason.WHOLE]) == (2, 4)
    generate(one, *requests(3, GREEDY))
    assert (counts[Reason.WARMUP], counts[Reason.WHOLE]) == (2, 10)
    graphs = one.decode_runner.graphs
    assert graphs is not None
    assert [key.bs for key in graphs.whole.bucket_keys() if graphs.whole.has(key)] == [4]


# Failures


class Failing(GraphBackend):
    """Mixed into a backend: fails once at a stage, in the n-th capture."""

    stage, at, num_captures = "", 0, 0

    def begin(self, graph: Graph, pool: GraphPool) -> None:
        self.num_captures += 1
        self._fail("begin")
        super().begin(graph, pool)

    def end(self, graph: Graph) -> None:
        self._fail("end")
        super().end(graph)

    def instantiate(self, graph: Graph) -> None:
        self._fail("instantiate")
        super().instantiate(graph)

    def _fail(self, stage: str) -> None:
        if stage == self.stage and self.num_captures == self.at:
            raise RuntimeError(f"forced at {stage}")


def failing_backend(device: str, stage: str, at: int) -> Any:
    class Backend(Failing, type(graph_backend(torch.device(device)))):  # type: ignore[misc]
        pass

    backend = Backend(torch.device(device))
    backend.stage, backend.at = stage, at
    return backend


@pytest.mark.parametrize("mode", ["whole", "piecewise"])
@pytest.mark.parametrize("stage", ["warm-up", "begin", "mid-capture", "end", "instantiate", "first-replay"])
def test_a_failure_drops_one_bucket_and_the_step_is_served(
    shared: Callable[..., Engine],
    engine: Callable[..., Engine],
    generate: Generate,
    tiny_decoder: MakeDecoder,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
    stage: str,
    mode: str,
) -> None:
    """The bucket of 4 greedy rows fails; batches of 1, 2, 3, 4 and 5 rows give the tokens of a run without graphs."""
    batches = [requests(num, GREEDY) for num in (1, 2, 3, 4, 5)]
    exact = [[s.output_ids for s in generate(shared(graphs="off"), *batch)] for batch in batches]
    # Captures go largest first over 3 kinds of sampling; piecewise has 5 regions at each size.
    backend = failing_backend(device, stage, at={"whole": 4, "piecewise": 6}[mode])
    monkeypatch.setattr("ostinato.runtime.engine.graph_backend", lambda device: backend)
    model, num_calls = tiny_decoder(device), {4: 0}
    blocks = model.blocks

    def failing(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        result = blocks(hidden, *args, **kwargs)
        if hidden.shape[0] == 4 and ("out" in kwargs or mode == "whole"):
            num_calls[4] += 1
            if num_calls[4] == {"warm-up": 1, "mid-capture": 3}.get(stage):
                raise RuntimeError(f"forced at {stage}")
        return result

    model.blocks = failing  # type: ignore[method-assign]
    outer = backend.current_stream()
    one = engine(largest=6, model=model, graphs=mode)
    model.blocks = blocks  # type: ignore[method-assign]
    runner = one.decode_runner
    graphs = runner.graphs
    assert graphs is not None
    assert backend.current_stream() == outer
    if stage == "first-replay":
        assert graphs.drops() == []
        target = graphs.whole if mode == "whole" else graphs.step.blocks[0]._runner
        key = next(key for key in target.bucket_keys() if key.bs == 4)
        [slot] = target._buckets[key].slots

        def broken() -> None:
            raise RuntimeError("forced at first-replay")

        slot.graph.replay = broken  # type: ignore[method-assign]
    else:
        assert len(graphs.drops()) == 1, graphs.drops()
        assert f"forced at {stage}" in graphs.drops()[0]
        assert "batch size 4" in graphs.drops()[0]
    for batch, tokens in zip(batches, exact, strict=True):
        assert [s.output_ids for s in generate(one, *batch)] == tokens
    counts = runner.counters.by_reason
    usual = Reason.WHOLE if mode == "whole" else Reason.PIECEWISE
    eager = {Reason.REPLAY_FAILED: 1} if stage == "first-replay" else {}
    assert {reason: n for reason, n in counts.items() if reason not in (usual, Reason.PREFILL)} == eager
    assert all("batch size 4" in line for line in graphs.drops())


@pytest.mark.parametrize("region", range(4))
def test_a_replay_that_fails_does_not_run_the_users_code_again(
    engine: Callable[..., Engine], generate: Generate, region: int
) -> None:
    """Whichever region fails, `blocks[0:1]`, `blocks[1:2]`, head or sample: the rest of the step is eager, and each
    hook and logits processor sees each token once."""

    def run(graphs: str, broken: int | None) -> tuple[list[Any], list[Any], Engine]:
        one, calls = engine(largest=6, graphs=graphs), []

        def watch(hidden: Tensor, rows: Any) -> Tensor:
            calls.append(("hook", [row.position for row in rows]))
            return hidden * 1.25

        def process(prompt_ids: Any, output_ids: Any, logits: Tensor) -> None:
            calls.append(("processor", output_ids))
            logits[5] += 0.5

        for layer in (0, 1, 2):
            one.hooks.add(layer, watch)
        params = SamplingParams(temperature=0.0, max_tokens=5, logits_processors=[process], frequency_penalty=0.3)
        if broken is not None:
            generate(one, *requests(3, params))  # captures
            calls.clear()
            road = GRAPH_ROADS[2]
            runners = one.decode_runner.graphs.regions_of(  # type: ignore[union-attr]
                next(c.key for c in one.decode_runner.decide(one.decode_runner.batch_of_params([params] * 3)) if c.key)
            )
            assert runners[-1] is one.decode_runner.graphs.step.samples[road]  # type: ignore[union-attr]
            target = runners[broken]._runner
            [slot] = target._buckets[next(key for key in target.bucket_keys() if key.bs == 4)].slots

            def fail() -> None:
                raise RuntimeError("forced")

            slot.graph.replay = fail  # type: ignore[method-assign]
        return results(generate(one, *requests(3, params))), calls, one

    expected, expected_calls, _ = run("off", None)
    outputs, calls, one = run("piecewise", region)
    assert outputs == expected
    assert calls == expected_calls
    assert one.decode_runner.counters.by_reason[Reason.REPLAY_FAILED] == 1


@pytest.mark.parametrize("capture", ["startup", "lazy"])
def test_explain_knows_of_a_hook_before_the_next_step(
    engine: Callable[..., Engine], generate: Generate, capture: str
) -> None:
    """The old cut's failures are no reason for the new one, and come back with neither."""
    one = engine(largest=6, graphs="piecewise", capture=capture, graph_warmup_steps=1)
    runner = one.decode_runner
    generate(one, *requests(2, GREEDY), *requests(2, GREEDY))
    graphs = runner.graphs
    assert graphs is not None
    [key] = [key for key in graphs.step.blocks[0].bucket_keys() if key.bs == 4]
    graphs.step.blocks[0].drop(key, Reason.CAPTURE_FAILED, "for a test")
    batch = runner.batch_of_params([GREEDY] * 4)
    assert runner.decide(batch)[0].key.bs == 6  # type: ignore[union-attr]
    handle = one.hooks.add(1, lambda hidden, rows: None)
    explained = runner.decide(runner.batch_of_params([GREEDY] * 4))
    assert explained[0].key.bs == 4  # type: ignore[union-attr]
    assert recorded(one, generate, requests(4, GREEDY)) == [expected(explained)]
    handle.remove()
    assert runner.decide(batch)[0].key.bs == 4  # type: ignore[union-attr]


@pytest.mark.parametrize("wants", [False, True], ids=["a-penalty", "log-probabilities"])
def test_log_probabilities_leave_a_bucket_only_for_who_asked(
    engine: Callable[..., Engine], generate: Generate, monkeypatch: pytest.MonkeyPatch, wants: bool
) -> None:
    """A step with penalties replays the bucket that makes them, too: nothing of them is copied or read."""
    one = engine(run_ahead=False)
    finish, seen = one.decode_runner.finish, []

    def spy(launched: Launched) -> DecodeResult:
        seen.append(finish(launched))
        return seen[-1]

    monkeypatch.setattr(one.decode_runner, "finish", spy)
    generate(one, *requests(3, SamplingParams(max_tokens=4, repetition_penalty=1.2, logprobs=wants)))
    assert len(seen) == 3
    assert {result.sampled.logprobs is not None for result in seen} == {wants}


def test_a_failed_capture_gives_its_memory_back(
    engine: Callable[..., Engine], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = []
    for at in (0, 10):
        backend = failing_backend(device, "end", at)
        monkeypatch.setattr("ostinato.runtime.engine.graph_backend", lambda device, backend=backend: backend)
        one = engine()
        used.append(backend.pool_bytes(one.decode_runner.graphs.resources.pool))  # type: ignore[union-attr]
    assert used[1] <= used[0]


def test_who_keeps_log_records_of_failures_keeps_no_engine(
    engine: Callable[..., Engine], device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    backend = failing_backend(device, "end", at=1)
    monkeypatch.setattr("ostinato.runtime.engine.graph_backend", lambda device: backend)
    gone = weakref.ref(engine().decode_runner)
    gc.collect()
    assert "no graph for batch size" in caplog.text
    assert gone() is None


def test_a_late_capture_that_fails_is_not_tried_again(
    engine: Callable[..., Engine],
    generate: Generate,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    backend = failing_backend(device, "end", at=1)
    monkeypatch.setattr("ostinato.runtime.engine.graph_backend", lambda device: backend)
    one = engine(capture="lazy", graph_warmup_steps=1, largest=6)
    exact = [s.output_ids for s in generate(engine(graphs="off"), *requests(4, GREEDY))]
    with caplog.at_level(logging.WARNING):
        assert [s.output_ids for s in generate(one, *requests(4, GREEDY))] == exact
    counts = one.decode_runner.counters.by_reason
    assert counts[Reason.WARMUP] == 2, "of the bucket that failed, and of the next larger one"
    assert counts[Reason.CAPTURE_FAILED] == 1
    assert counts[Reason.WHOLE] == 3
    assert "run eagerly: the bucket's capture failed" in caplog.text


def test_a_late_capture_that_failed_is_tried_again_when_the_blocks_are_cut_anew(
    engine: Callable[..., Engine], generate: Generate, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else every later step would be eager, and be told to be a warm-up."""
    backend = failing_backend(device, "begin", at=1)
    monkeypatch.setattr("ostinato.runtime.engine.graph_backend", lambda device: backend)
    one = engine(graphs="piecewise", capture="lazy", graph_warmup_steps=1, max_num_seqs=1, capture_sizes=(1,))
    counts = one.decode_runner.counters.by_reason
    generate(one, *requests(1, GREEDY))
    assert (counts[Reason.WARMUP], counts[Reason.CAPTURE_FAILED]) == (1, 5)
    handle = one.hooks.add(1, lambda hidden, rows: None)
    generate(one, *requests(1, GREEDY))
    handle.remove()
    assert (counts[Reason.WARMUP], counts[Reason.HOOK]) == (2, 5)
    generate(one, *requests(1, GREEDY))
    assert counts[Reason.PIECEWISE] == 6
    assert one.decode_runner.graphs is not None
    assert len(one.decode_runner.graphs.step.blocks) == 1, "the hook is gone, and its cut with it"


def test_required_graphs_that_are_missing_are_one_error_at_start(
    engine: Callable[..., Engine], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = failing_backend(device, "end", at=4)
    monkeypatch.setattr("ostinato.runtime.engine.graph_backend", lambda device: backend)
    with pytest.raises(GraphsRequiredError, match=r"1 are missing(?s:.)*batch size 4"):
        engine(require_graphs=True)
    monkeypatch.setenv("OSTINATO_REQUIRE_CUDA_GRAPHS", "1")
    backend.num_captures = 0
    with pytest.raises(GraphsRequiredError, match="batch size 4"):
        engine()


@pytest.mark.parametrize("by", ["config", "environment"])
def test_required_graphs_are_an_error_where_auto_means_none(
    make_engine: MakeEngine, tiny_decoder: MakeDecoder, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """As on a machine whose GPU is not found."""
    if by == "environment":
        monkeypatch.setenv("OSTINATO_REQUIRE_CUDA_GRAPHS", "1")
    with pytest.raises(GraphsRequiredError, match='graphs="auto" means none on cpu'):
        make_engine(tiny_decoder("cpu"), graphs="auto", require_graphs=by == "config")


@pytest.mark.parametrize("by", ["config", "environment"])
def test_required_graphs_make_an_eager_decode_step_an_error(
    engine: Callable[..., Engine], generate: Generate, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    if by == "environment":
        monkeypatch.setenv("OSTINATO_REQUIRE_CUDA_GRAPHS", "1")
    one = engine(require_graphs=by == "config")
    for size in SIZES:
        drop_size(one, size)
    with pytest.raises(GraphsRequiredError, match="2 rows would run eagerly"):
        generate(one, *requests(2, GREEDY))


def test_a_budget_shortens_the_list_and_graphs_stay_on(
    engine: Callable[..., Engine], generate: Generate, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A budget of nothing leaves the largest out, and on the tape, whose graphs all take some, every one."""
    with caplog.at_level(logging.WARNING):
        little = engine(graph_memory_bytes=1, largest=6)
    graphs = little.decode_runner.graphs
    assert graphs is not None
    drops = graphs.drops()
    assert graphs.backend.pool_bytes(graphs.resources.pool) == 0 or device != "cpu"
    assert len(drops) == 12 if device == "cpu" else len(drops) >= 1
    assert all("did not fit the memory for graphs" in line for line in drops)
    assert "above the budget of 1" in caplog.text
    plain = [s.output_ids for s in generate(engine(graphs="off"), *requests(3, GREEDY))]
    assert [s.output_ids for s in generate(little, *requests(3, GREEDY))] == plain
    if device == "cpu":
        assert little.decode_runner.counters.by_reason[Reason.OVER_BUDGET] == 6
    enough = engine(graph_memory_bytes=1 << 28, largest=6)
    assert enough.decode_runner.graphs.drops() == []  # type: ignore[union-attr]


# Cutting


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_hook_cuts_the_blocks_and_its_removal_makes_them_whole(
    shared: Callable[..., Engine], generate: Generate, layer: int
) -> None:
    """The same tokens as eagerly with the same hook, added in the middle of a generation and removed again."""

    def steer(hidden: Tensor, rows: Any) -> Tensor:
        return hidden + torch.linspace(-1, 1, hidden.shape[1], device=hidden.device)

    outputs = {}
    for name, config in {"off": {"graphs": "off"}, "whole": {}, "eager": {"enable_decode_graphs": False}}.items():
        one = shared(**config)
        before = Counter(one.decode_runner.counters.by_reason)
        sequences = [s for prompt, params in requests(3, RANDOM) for s in one.create(prompt, params)]
        for sequence in sequences:
            one.add(sequence)
        one.step()
        one.step()
        handle = one.hooks.add(layer, steer)
        one.step()
        one.step()
        handle.remove()
        handle.remove()
        while one.has_work:
            one.step()
        outputs[name] = [s.output_ids for s in sequences]
        if name == "whole":
            counts = one.decode_runner.counters.by_reason - before
            assert counts - Counter({Reason.PREFILL: 1}) == {Reason.WHOLE: 3, Reason.HOOK: 2}
            regions = one.decode_runner.graphs.regions  # type: ignore[union-attr]
            assert all(set(region.counts) <= {Reason.PIECEWISE} for region in regions), "the rest replays"
    assert outputs["whole"] == outputs["eager"] == outputs["off"]
    plain = [s.output_ids for s in generate(shared(graphs="off"), *requests(3, RANDOM))]
    assert outputs["off"] != plain, "the hook did something"


def test_a_cut_that_comes_back_replays_the_regions_of_now(engine: Callable[..., Engine], generate: Generate) -> None:
    """With steps between that are whole, and so look at no region."""
    one, plain = engine(largest=6), None
    for _ in range(3):
        handle = one.hooks.add(1, lambda hidden, rows: hidden * 1.5)
        tokens = [s.output_ids for s in generate(one, *requests(2, GREEDY))]
        handle.remove()
        generate(one, *requests(2, GREEDY))
        assert plain in (None, tokens)
        plain = tokens
    assert one.decode_runner.graphs.drops() == []  # type: ignore[union-attr]
    assert one.decode_runner.counters.num_eager_decodes == 0


def test_blocks_are_cut_anywhere_within_the_claimed_buffers(make_engine: MakeEngine, model_config: Any) -> None:
    """Three hooks, then two, then one: buffers stay the same, and so do the tokens."""
    from ostinato.weights import dummy_model

    model = dummy_model(model_config(num_layers=5), dtype=torch.float32)
    tokens = {}
    for graphs in ("piecewise", "off"):
        one = make_engine(model, graphs=graphs, max_num_seqs=4)
        buffers = one.decode_runner.graphs.resources.buffers if one.decode_runner.graphs else None
        addresses = {name: t.data_ptr() for name, t in buffers.tensors.items()} if buffers else {}
        handles = [one.hooks.add(layer, lambda hidden, rows: hidden * 1.5) for layer in (1, 2, 4)]
        [sequence] = one.create([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=12))
        one.add(sequence)
        for number in range(12):
            one.step()
            if number in (3, 6, 9):
                handles.pop().remove()
        tokens[graphs] = sequence.output_ids
        if buffers is not None:
            assert {name: t.data_ptr() for name, t in buffers.tensors.items()} == addresses
            labels = [region.label.split()[0] for region in one.decode_runner.graphs.step.blocks]  # type: ignore[union-attr]
            assert labels == ["blocks[0:5]"]
    assert tokens["piecewise"] == tokens["off"]


def test_sampling_without_a_captured_kind_does_not_exist() -> None:
    """The last kind covers every request: no batch is eager for its parameters."""
    from ostinato.runtime.sample_road import SampleRoad
    from ostinato.runtime.sampling_params import MAX_TOP_LOGPROBS

    most = SampleRoad(True, True, True, True, True, True, True, True, True, MAX_TOP_LOGPROBS)
    assert GRAPH_ROADS[-1] == most
    assert all(later.covers(earlier) for earlier, later in itertools.pairwise(GRAPH_ROADS))


def test_the_capture_key_is_the_key_that_is_looked_up(engine: Callable[..., Engine]) -> None:
    one = engine(largest=6)
    runner = one.decode_runner
    for feature in FEATURES.values():
        for size in (*SIZES, NUM_ROWS):
            [chunk] = runner.decide(runner.batch_of_params([feature] * size))
            assert isinstance(chunk.key, BucketKey)
            assert runner.graphs.whole.has(chunk.key)  # type: ignore[union-attr]
            assert chunk.path is Path.WHOLE
            assert chunk.num_padding_rows == 0
