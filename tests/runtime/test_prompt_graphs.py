"""Prompts in one graph: the same bits as their Python on the same bucket, why others run eagerly, and what may fail."""

import logging
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from ostinato.kernels import FIRST_BLOCK, SINK_BLOCK
from ostinato.model import Decoder
from ostinato.runtime import Engine, Path, Reason, SamplingParams, Sequence
from ostinato.runtime.decode_graphs import DecodeGraphs
from ostinato.runtime.graph_aliases import find_aliases
from ostinato.runtime.graph_manifest import graph_manifest
from ostinato.runtime.graph_self_test import self_test_late
from ostinato.runtime.prompt_pieces import WholePrompt

Make = Callable[..., Engine]
Generate = Callable[..., list[Sequence]]
SIZES = (4, 8, 20)
ONE = SamplingParams(temperature=0.0, max_tokens=1)


@pytest.fixture
def engine(make_engine: Make, tiny_decoder: Callable[..., Decoder], device: str) -> Make:
    """`engine(**config)`: buckets of 4, 8 and 20 tokens, captured at their second prompt."""

    def make(**config: Any) -> Engine:
        sizes = {"max_num_seqs": 2, "capture_sizes": (2,), "graphs": "whole", "max_model_len": 64, "capture": "lazy"}
        prompts = {"prompt_capture_sizes": SIZES, "graph_warmup_steps": 1}
        return make_engine(tiny_decoder(device), **(sizes | prompts | config))

    return make


def graphs_of(engine: Engine) -> DecodeGraphs:
    graphs = engine.decode_runner.graphs
    assert graphs is not None
    return graphs


def prompt(size: int, first: int = 1) -> list[int]:
    return [(first + 7 * i) % 61 for i in range(size)]


def counts(engine: Engine) -> dict[Reason, int]:
    return dict(engine.decode_runner.counters.prompts)


def caches(engine: Engine) -> list[Tensor]:
    """All blocks that sequences may have."""
    kv_cache = engine._runner._pieces.kv_cache
    return [cache[FIRST_BLOCK:] for cache in (*kv_cache.k, *kv_cache.v)]


def noting(logits: list[Tensor]) -> SamplingParams:
    """Of a request that notes its logits."""

    def note(prompt_ids: Any, output_ids: Any, row: Tensor) -> None:
        logits.append(row.clone())

    return SamplingParams(temperature=0.0, max_tokens=1, logits_processors=[note])


@pytest.mark.parametrize("mode", ["whole", "piecewise"])
def test_a_replay_has_the_bits_of_its_python(engine: Make, generate: Generate, mode: str) -> None:
    """Logits, tokens and blocks, of prompts of every length and in an order that mixes buckets."""
    runs = []
    for config in ({}, {"enable_decode_graphs": False}):
        one, logits = engine(graphs=mode, **config), list[Tensor]()
        for size in (4, 8, 20):
            generate(one, (prompt(size), ONE))
        for cache in caches(one):
            cache.zero_()
        tokens = [
            generate(one, (prompt(size, size), noting(logits)))[0].output_ids
            for size in (20, 1, 7, 4, 19, 9, 5, 8, 2, 3, 13)
        ]
        runs.append((tokens, torch.stack(logits), caches(one), counts(one)))
    (tokens, logits, blocks, reasons), (expected_tokens, expected_logits, expected_blocks, expected) = runs
    assert tokens == expected_tokens
    assert torch.equal(logits, expected_logits)
    assert all(torch.equal(a, b) for a, b in zip(blocks, expected_blocks, strict=True))
    assert reasons == {Reason.WARMUP: 3, Reason.PROMPT: 11}
    assert expected == {Reason.FORCED: 14}


def test_tokens_are_those_without_graphs(engine: Make, generate: Generate) -> None:
    """And the decode steps behind a prompt find its keys and values."""
    requests = [(prompt(size, size), SamplingParams(temperature=0.0, max_tokens=6)) for size in (3, 4, 2, 18, 20, 9)]
    expected = [generate(engine(graphs="off"), request)[0].output_ids for request in requests]
    one = engine()
    assert [generate(one, request)[0].output_ids for request in requests] == expected
    assert counts(one) == {Reason.WARMUP: 2, Reason.PROMPT: 4}


def test_every_prompt_that_is_not_replayed_has_its_reason(engine: Make, generate: Generate) -> None:
    one = engine(max_num_batched_tokens=32)
    for size in (21, 40):  # above the largest bucket; in two parts
        generate(one, (prompt(size), ONE))
    generate(one, (prompt(3), ONE), (prompt(4), ONE))
    hook = one.hooks.add(1, lambda hidden, rows: None)
    generate(one, (prompt(3), ONE))
    hook.remove()
    for _ in range(2):
        generate(one, (prompt(3), ONE))
    assert counts(one) == {
        Reason.PROMPT_TOO_LONG: 1,
        Reason.PROMPT_IN_PARTS: 2,
        Reason.PROMPTS_TOGETHER: 1,
        Reason.PROMPT_HOOK: 1,
        Reason.WARMUP: 1,
        Reason.PROMPT: 1,
    }
    counters = one.decode_runner.counters
    assert (counters.by_reason[Reason.PREFILL], counters.by_reason[Reason.PROMPT], counters.num_decodes) == (6, 1, 0)
    report = one.graph_report()
    assert report.to_dict()["prompts"]["PROMPT_TOO_LONG"] == 1
    assert "prompts, with buckets of 4, 8, 20 tokens:\n" in str(report)
    without = engine(prompt_capture_sizes=())
    generate(without, (prompt(3), ONE))
    assert counts(without) == {Reason.PREFILL: 1}


def test_a_capture_is_in_ledger_manifest_and_proof(engine: Make, generate: Generate) -> None:
    one = engine()
    for _ in range(2):
        generate(one, (prompt(5), ONE))
    graphs = graphs_of(one)
    [entry] = [entry for entry in graphs.ledger.entries if entry.runner == "prefill"]
    assert (entry.batch_size, entry.num_tokens, entry.num_copies) == (1, 8, 0)
    assert any(line.startswith("prefill 8 tokens") for line in graphs.ledger.lines())
    [bucket] = [bucket for bucket in graph_manifest(graphs)["buckets"] if bucket["runner"] == "prefill"]
    assert (bucket["num_tokens"], list(bucket["inputs"]), list(bucket["outputs"])) == (8, ["numbers"], ["logits"])
    assert find_aliases(graphs) == []
    assert graphs.prompts is not None
    graphs.release()
    assert not graphs.prompts.any_graphs


@pytest.mark.parametrize("run_ahead", [False, True], ids=["one step after the other", "one step ahead"])
def test_a_late_capture_leaves_sequences_alone(engine: Make, generate: Generate, run_ahead: bool) -> None:
    """One decodes while the bucket of another's prompt is captured and compared, over the blocks that it has."""
    params = SamplingParams(temperature=0.0, max_tokens=12)
    [expected] = generate(engine(graphs="off"), (prompt(30), params))
    one = engine(graph_self_test=True, run_ahead=run_ahead)
    [long], *shorts = (one.create(*request) for request in ((prompt(30), params), (prompt(6), ONE), (prompt(5), ONE)))
    one.add(long)
    for [short] in shorts:
        for _ in range(2):
            one.step()
        assert FIRST_BLOCK in long.blocks
        one.add(short)
    while one.has_work:
        one.step()
    assert counts(one) == {Reason.WARMUP: 1, Reason.PROMPT_TOO_LONG: 1, Reason.PROMPT: 1}
    assert long.output_ids == expected.output_ids
    assert one._runner._pieces.kv_cache.k[0][SINK_BLOCK].isfinite().all()


@pytest.mark.parametrize("what", ["logits", "keys and values"])
def test_a_graph_that_differs_is_not_used(engine: Make, generate: Generate, what: str) -> None:
    one, forward = engine(graph_self_test=True), WholePrompt.forward
    expected = [generate(one, (prompt(6), ONE))[0].output_ids]
    graphs = graphs_of(one)

    def other(self: WholePrompt, key: Any, inputs: Any) -> dict[str, Tensor]:
        outputs = forward(self, key, inputs)
        changed = outputs["logits"] if what == "logits" else one._runner._pieces.kv_cache.k[1]
        changed.mul_(2.0)
        return outputs

    assert graphs.prompts is not None
    key = graphs.prompts.bucket_keys()[1]
    with mock.patch.object(WholePrompt, "forward", other):
        assert graphs.capture_bucket(Path.WHOLE, key)
    self_test_late(graphs, Path.WHOLE, key)
    assert graphs.missing(Path.WHOLE, key) is Reason.SELF_TEST_FAILED
    assert [line for line in graphs.drops() if "8 tokens" in line and what in line]
    assert [generate(one, (prompt(6), ONE))[0].output_ids] == expected
    assert counts(one) == {Reason.WARMUP: 2}, "of two buckets"


def test_a_replay_that_fails_is_served_by_its_python(
    engine: Make, generate: Generate, caplog: pytest.LogCaptureFixture
) -> None:
    one = engine()
    expected = [generate(one, (prompt(6), ONE))[0].output_ids for _ in range(2)][-1]
    prompts = graphs_of(one).prompts
    with mock.patch.object(prompts, "run_forward", side_effect=RuntimeError("a launch failed")):
        assert generate(one, (prompt(6), ONE))[0].output_ids == expected
    with caplog.at_level(logging.WARNING):
        assert generate(one, (prompt(6), ONE))[0].output_ids == expected
    assert counts(one) == {Reason.WARMUP: 2, Reason.PROMPT: 1, Reason.REPLAY_FAILED: 1}
    assert [line for line in one.graph_report().missing if "8 tokens" in line]


def test_a_capture_that_fails_is_served_and_later_prompts_take_the_next_bucket(
    engine: Make, generate: Generate
) -> None:
    one = engine()
    expected = generate(one, (prompt(6), ONE))[0].output_ids
    with mock.patch.object(graphs_of(one).prompts, "warm_up", side_effect=RuntimeError("no such kernel")):
        assert generate(one, (prompt(6), ONE))[0].output_ids == expected
    assert [generate(one, (prompt(6), ONE))[0].output_ids for _ in range(2)] == [expected] * 2
    assert counts(one) == {Reason.WARMUP: 2, Reason.CAPTURE_FAILED: 1, Reason.PROMPT: 1}
