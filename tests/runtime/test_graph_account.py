"""What graphs cost and contain, and the checks at start: ledger, manifest, self-test, addresses, rehearsal."""

import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato.model import Decoder
from ostinato.runtime import Engine, EngineConfig, Reason, SamplingParams, late_captures
from ostinato.runtime.config import KVPlan
from ostinato.runtime.cuda_backend import graph_backend
from ostinato.runtime.decode_graphs import DecodeGraphs
from ostinato.runtime.engine_parts import build_runner
from ostinato.runtime.graph_ledger import GraphLedger, LedgerEntry, MemoryParts
from ostinato.runtime.graph_manifest import diff_manifests, graph_manifest
from ostinato.runtime.graph_nodes import GraphCounts
from ostinato.runtime.graph_reason import Path
from ostinato.runtime.graph_rehearsal import rehearse
from ostinato.runtime.graph_self_test import self_test, self_test_late
from ostinato.runtime.interventions import Hooks

Make = Callable[..., Engine]


@pytest.fixture
def engine(make_engine: Make, tiny_decoder: Callable[..., Decoder], device: str) -> Make:
    def make(**config: Any) -> Engine:
        sizes = {"max_num_seqs": 3, "capture_sizes": (1, 3), "graphs": "whole", "max_model_len": 64}
        return make_engine(tiny_decoder(device), **(sizes | config))

    return make


def graphs_of(engine: Engine) -> DecodeGraphs:
    graphs = engine.decode_runner.graphs
    assert graphs is not None
    return graphs


def test_the_ledger_has_every_graph_and_adds_up(engine: Make) -> None:
    one = engine()
    graphs, report = graphs_of(one), one.graph_report()
    ledger = graphs.ledger
    assert {(entry.key_info, entry.batch_size) for entry in ledger.entries} == {
        (info, size) for info in ("greedy", "random+top_k+top_p+min_p+masks", "everything") for size in (1, 3)
    }
    assert ledger.pool_bytes == graphs.backend.pool_bytes(graphs.resources.pool)
    assert ledger.buffer_bytes == graphs.resources.buffers.num_bytes
    assert ledger.driver_bytes == 0 or graphs.backend.device.type == "cuda", "a tape has no driver"
    for entry in ledger.entries:
        counts = entry.counts.nodes
        assert counts is None or counts > 10
        assert (entry.output_bytes, entry.num_copies) == (0, 0), "all that is sampled goes to claimed buffers"
        assert entry.capture_seconds > 0
    assert report.to_dict()["ledger"]["entries"][0]["runner"] == "decode"
    assert {"rehearsal", "capture", "aliases"} <= report.start_seconds.keys()
    assert "start: rehearsal" in str(report)
    json.dumps(report.to_dict())
    assert "decode everything" in str(report)
    assert ledger.total_line() in str(report)


def test_a_ledger_in_numbers() -> None:
    def entry(pool: int, driver: int) -> LedgerEntry:
        return LedgerEntry("decode", "", 1, 1, pool, driver, 7, 1, GraphCounts(5, 4, 3), 0.5, 0.25)

    ledger = GraphLedger([entry(100, 10), entry(0, -4)], buffer_bytes=1000, device_bytes=150)
    assert ledger.graph_bytes == 100 + 10 + 7 + 0 + 0 + 7
    assert ledger.unexplained_bytes == 150 - 100 - 6 - 14
    assert (ledger.warm_up_seconds, ledger.capture_seconds) == (1.0, 0.5)
    assert len(ledger.lines()) == 4
    ledger.predicted, ledger.actual = MemoryParts(1 << 20, 2 << 20, 3 << 20), MemoryParts(1 << 20, 2 << 20)
    assert ledger.lines()[-1].endswith(
        "predicted 6.0 MiB (pool 1.0, tensors 2.0, driver 3.0), took 3.0 MiB (pool 1.0, tensors 2.0, driver 0.0)"
    )
    assert (ledger.predicted - ledger.actual).total == 3 << 20


def test_manifests_of_equal_builds_are_equal_and_a_changed_one_is_told(engine: Make) -> None:
    whole, again, piecewise = engine(), engine(), engine(graphs="piecewise")
    manifests = [json.loads(json.dumps(graph_manifest(graphs_of(one)))) for one in (whole, again, piecewise)]
    assert diff_manifests(manifests[0], manifests[1]) == []
    first = manifests[0]["buckets"][0]
    assert first["nodes"] is None or first["nodes"] == sum(kernel["count"] for kernel in first["kernels"])
    assert first["outputs"]["token_ids"]["dtype"] == "torch.int64"
    names = {line.split()[0] for line in diff_manifests(manifests[0], manifests[2])}
    assert names == {
        "decode",
        *(f"decode.{label}" for label in ("blocks[0:2]", "head", "sample.0", "sample.1", "sample.2")),
    }
    manifests[1]["buckets"][0]["nodes"] = 1
    if manifests[1]["buckets"][0]["kernels"]:
        manifests[1]["buckets"][0]["kernels"][0]["count"] += 2
        assert any("2 more of" in line for line in diff_manifests(manifests[0], manifests[1]))
    assert any("nodes" in line for line in diff_manifests(manifests[0], manifests[1]))
    manifests[1]["buckets"][1]["outputs"]["token_ids"]["bytes"][1] += 8
    assert any(": outputs" in line for line in diff_manifests(manifests[0], manifests[1]))


@pytest.mark.parametrize("mode", ["whole", "piecewise"])
def test_the_self_test_passes_and_leaves_no_trace(engine: Make, mode: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        one = engine(graphs=mode, graph_self_test=True)
    assert "compared 6 graphs with their Python" in caplog.text
    assert graphs_of(one).drops() == []
    state = one._runner._state
    assert state.seq_lens.eq(0).all()
    assert state._step.item() == 0
    [sequence] = one.create([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=5))
    [plain] = engine(graphs="off").create([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=5))
    for each, sequence_of in ((one, sequence), (engine(graphs="off"), plain)):
        each.add(sequence_of)
        while each.has_work:
            each.step()
    assert sequence.output_ids == plain.output_ids


@pytest.mark.parametrize("mode", ["whole", "piecewise"])
def test_the_self_test_refuses_a_graph_that_differs(engine: Make, mode: str) -> None:
    """The head's graph was captured with other Python than the head has: one bucket, its reason said."""
    one = engine(graphs=mode)
    graphs, model = graphs_of(one), one._runner._pieces.model
    real = model.head

    def other_head(hidden: Tensor, *, out: Tensor | None = None) -> Tensor:
        return real(-hidden, out=out)

    runner = graphs.whole if mode == "whole" else graphs.step.head._runner
    [key] = [
        key for key in runner.bucket_keys() if key.bs == 3 and (mode == "piecewise" or str(key.cg_key_info) == "greedy")
    ]
    with graphs.at_rest():
        model.head = other_head  # type: ignore[method-assign]
        runner.drop(key, Reason.OVER_BUDGET, "to be made anew")
        del runner.drop_reasons[key]
        runner.warm_up(key)
        runner.capture(key)
        del model.head
    self_test(graphs, Path.WHOLE if mode == "whole" else Path.PIECEWISE)
    refused = graphs.drops()
    assert len(refused) == (1 if mode == "whole" else 3), refused
    assert all("batch size 3" in line and "differs from its Python in" in line for line in refused)
    batch = one.decode_runner.batch_of_params([SamplingParams(temperature=0.0)] * 3)
    chunks = one.decode_runner.decide(batch)
    assert not any(chunk.key == key for chunk in chunks), "what was refused is not replayed"


def test_what_moved_since_the_capture_is_found_at_the_first_replay(engine: Make) -> None:
    one = engine()
    model = one._runner._pieces.model
    model.norm_weight.data = model.norm_weight.data.clone()
    [sequence] = one.create([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=3))
    one.add(sequence)
    while one.has_work:
        one.step()
    assert any("moved since the graphs were captured: norm_weight" in line for line in graphs_of(one).drops())
    assert len(sequence.output_ids) == 3


def test_a_rehearsal_says_what_graphs_take_and_leaves_nothing(
    tiny_decoder: Callable[..., Decoder], device: str
) -> None:
    model = tiny_decoder(device)
    config = EngineConfig(max_num_seqs=3, capture_sizes=(3,), graphs="whole", block_size=16, graph_self_test=False)
    made, backend = [], graph_backend(torch.device(device))

    def build() -> Any:
        runner, num_bytes = build_runner(model, config, KVPlan(4, 64), Hooks(2), backend)
        made.append(runner.decode_runner.graphs)
        return runner, num_bytes + 12345

    predicted = rehearse(build, backend)
    assert predicted.pool > 0
    if device == "cpu":  # where only pools are counted, and what is said to be the KV cache's comes off
        assert (predicted.tensors, predicted.driver) == (-12345, 0)
    [graphs] = made
    assert not any(runner.any_graphs for runner in graphs.runners)
    assert graphs.backend.pool_bytes(graphs.resources.pool) == 0


def test_memory_that_another_process_gives_back_is_not_taken_for_the_graphs_own(
    tiny_decoder: Callable[..., Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """During the rehearsal a neighbour frees more than the graphs take."""
    readings = iter([MemoryParts(3000, 2000, driver=1 << 30), MemoryParts(0, 1000, driver=1 << 31)])
    monkeypatch.setattr("ostinato.runtime.graph_rehearsal.memory_parts", lambda *args: next(readings))
    config = EngineConfig(max_num_seqs=3, capture_sizes=(3,), graphs="whole", block_size=16, graph_self_test=False)
    model, hooks, backend = tiny_decoder("cpu"), Hooks(2), graph_backend(torch.device("cpu"))
    predicted = rehearse(lambda: build_runner(model, config, KVPlan(4, 64), hooks, backend), backend)
    assert predicted == MemoryParts(pool=3000, tensors=1000, driver=0)


def test_the_kv_cache_gets_what_the_prediction_leaves(
    engine: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """To the block, and the prediction is written down before, also where it leaves nothing."""
    predicted, block_bytes = MemoryParts(pool=1000, tensors=30_000, driver=200), 4096
    monkeypatch.setattr("ostinato.runtime.engine.rehearsed_memory", lambda *args: predicted)
    for left in (8, 7):
        one = engine(kv_cache_memory_bytes=predicted.total + left * block_bytes)
        assert one.kv_plan.num_blocks == left
        ledger = graphs_of(one).ledger
        assert ledger.predicted == predicted
        assert ledger.actual is not None
    with caplog.at_level(logging.INFO), pytest.raises(ValueError, match=r"hold no block.* are the least"):
        engine(kv_cache_memory_bytes=predicted.total, max_model_len=None)
    assert "graphs and what they work on will take 0.0 MiB (pool 0.0, tensors 0.0, driver 0.0)" in caplog.text


@pytest.mark.parametrize("mode", ["whole", "piecewise"])
def test_a_late_capture_is_compared_and_leaves_sequences_alone(engine: Make, mode: str) -> None:
    """Lazy buckets, captured while sequences are under way, and regions captured for a hook in the middle of them."""
    tested: list[Any] = []
    params = SamplingParams(temperature=0.9, seed=4, top_k=20, repetition_penalty=1.3, max_tokens=9)

    def run(one: Engine) -> list[Any]:
        sequences = [s for n in (3, 20, 7) for s in one.create(list(range(1, n)), params)]
        for sequence in sequences:
            one.add(sequence)
        for step in range(100):
            if step == 6:
                one.hooks.add(1, lambda hidden, rows: None)
            if one.has_work:
                one.step()
        return [sequence.output_ids for sequence in sequences]

    one = engine(graphs=mode, capture="lazy", graph_warmup_steps=1, graph_self_test=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(late_captures, "self_test_late", lambda *args: (tested.append(args[1:]), self_test_late(*args)))
        assert run(one) == run(engine(graphs="off"))
    assert [path for path, _ in tested] == [Path.WHOLE if mode == "whole" else Path.PIECEWISE, Path.PIECEWISE]
    assert graphs_of(one).drops() == []


def test_a_late_capture_that_differs_is_not_used(engine: Make) -> None:
    """Its Python is another at the capture than later: the step is eager, with the tokens of no graph at all."""
    one = engine(capture="lazy", graph_warmup_steps=1, graph_self_test=True)
    model, capture = one._runner._pieces.model, graphs_of(one).capture_bucket
    real = model.head

    def captured_otherwise(path: Path, key: Any) -> bool:
        model.head = lambda hidden, *, out=None: real(-hidden, out=out)  # type: ignore[method-assign]
        try:
            return capture(path, key)
        finally:
            del model.head

    graphs_of(one).capture_bucket = captured_otherwise  # type: ignore[method-assign]
    outputs = []
    for each in (one, engine(graphs="off")):
        [sequence] = each.create([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=6))
        each.add(sequence)
        while each.has_work:
            each.step()
        outputs.append(sequence.output_ids)
    assert outputs[0] == outputs[1]
    refused = graphs_of(one).drops()
    assert refused
    assert all("differs from its Python" in line for line in refused), refused
    assert one.decode_runner.counters.by_reason[Reason.WHOLE] == 0
