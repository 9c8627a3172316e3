"""A decode step launched before the tokens of the one before are looked at: nobody can tell from the tokens."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato.model import Decoder
from ostinato.runtime import Engine, Reason, SamplingParams, Sequence

Make = Callable[..., Engine]

NUM_ROWS = 4


def greedy(max_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **more)


REQUESTS = [
    ([1, 2, 3], greedy(9)),
    ([4] * 20, SamplingParams(temperature=1.0, seed=5, max_tokens=14, stop_token_ids=list(range(0, 60, 4)))),
    ([5, 6], SamplingParams(temperature=1.0, seed=6, max_tokens=12, repetition_penalty=1.3, min_tokens=3)),
    ([7], greedy(1)),
    ([8, 9], SamplingParams(temperature=1.2, seed=7, max_tokens=11, stop_token_ids=list(range(1, 60, 7)))),
    ([10] * 33, greedy(2)),
    ([11, 12], SamplingParams(temperature=0.7, seed=8, top_k=9, max_tokens=13)),
    ([13, 14], greedy(5, logprobs=True)),
    ([15, 16], greedy(8)),
]
"""More than there are rows; some end by a stop id, which nobody knows of when the next step is launched."""


@pytest.fixture
def engine(make_engine: Make, tiny_decoder: Callable[..., Decoder], device: str) -> Make:
    def make(**config: Any) -> Engine:
        sizes = {"max_num_seqs": NUM_ROWS, "capture_sizes": (1, 2, 4), "graphs": "whole", "run_ahead": True}
        return make_engine(tiny_decoder(device), **(sizes | config))

    return make


def queue(engine: Engine, requests: list[Any]) -> list[Sequence]:
    sequences = [s for prompt, params in requests for s in engine.create(prompt, params)]
    for sequence in sequences:
        engine.add(sequence)
    return sequences


def results(sequences: list[Sequence]) -> list[Any]:
    return [(s.output_ids, s.logprobs, s.finish_reason, s.stop_reason) for s in sequences]


def launches(engine: Engine) -> list[bool]:
    """For every decode step that is launched from now on: whether another one was in flight."""
    noted: list[bool] = []
    runner = engine.decode_runner
    launch, finish, waiting = runner._launch_chunk, runner.finish, [0]

    def noting(*args: Any) -> Any:
        noted.append(waiting[0] > 0)
        launched = launch(*args)
        waiting[0] += 1
        return launched

    def ending(launched: Any) -> Any:
        waiting[0] -= 1
        return finish(launched)

    runner._launch_chunk, runner.finish = noting, ending  # type: ignore[method-assign]
    return noted


@pytest.mark.parametrize("graphs", ["whole", "piecewise", "off"])
def test_tokens_are_those_of_one_step_after_the_other(engine: Make, inside: Any, graphs: str) -> None:
    """With stops, more requests than rows, every kind of sampling; and all blocks are free at the end. Without graphs
    nothing is launched ahead."""
    runs = []
    for run_ahead in (True, False):
        one = engine(graphs=graphs, run_ahead=run_ahead)
        noted = launches(one)
        sequences = queue(one, REQUESTS)
        for number in itertools.count():
            if not one.has_work:
                break
            one.step()
            assert number < 200
        runs.append(results(sequences))
        inside(one).check_idle()
        assert one.decode_runner.counters.num_decodes == len(noted)
        assert any(noted) == (run_ahead and graphs != "off")
    assert runs[0] == runs[1]
    assert {reason for _, _, reason, _ in runs[0]} == {"stop", "length"}


def test_every_step_brings_a_token_and_none_is_launched_for_nobody(engine: Make) -> None:
    """Lengths are known in advance: steps of two sequences that take 6 and 9 tokens."""
    one = engine()
    noted = launches(one)
    first, second = queue(one, [([1, 2], greedy(6)), ([3, 4], greedy(9))])
    one.step()
    for number in range(2, 10):
        one.step()
        assert len(second.output_ids) == number
        assert len(first.output_ids) == min(number, 6)
    assert not one.has_work
    assert noted == [False, True, True, True, True, False, True, True]


def test_what_changes_between_steps_is_seen(engine: Make, inside: Any) -> None:
    """A request that comes, one that is aborted, a hook that is added and removed, while a step is in flight."""
    runs = []
    for run_ahead in (True, False):
        one = engine(run_ahead=run_ahead)
        noted = launches(one)
        sequences = queue(one, [([1, 2, 3], greedy(30)), ([4, 5], greedy(30)), ([6], greedy(30))])
        for _ in range(6):
            one.step()
        one.abort(sequences[0])
        for _ in range(3):
            one.step()
        sequences += queue(one, [([7, 8, 9], greedy(12))])
        for _ in range(4):
            one.step()

        def push(hidden: Tensor, rows: Any) -> Tensor:
            return hidden + torch.linspace(-1, 1, hidden.shape[1], device=hidden.device)

        while len(sequences[1].output_ids) < 16:  # a hook is there from the next step that is launched
            one.step()
        handle = one.hooks.add(1, push)
        for _ in range(4):
            one.step()
        handle.remove()
        while one.has_work:
            one.step()
        inside(one).check_idle()
        runs.append([s.output_ids for s in sequences])
        assert any(noted) == run_ahead
    ahead, after = runs
    assert ahead[0] == after[0][: len(ahead[0])]
    common = [len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))) for a, b in
              zip(ahead, after, strict=True)]  # fmt: skip
    assert common[1] >= 16, "until the hook, which a step in flight does not see"
    assert [len(tokens) for tokens in ahead[1:]] == [30, 30, 12]


def test_a_step_in_flight_survives_ctrl_c(engine: Make, monkeypatch: pytest.MonkeyPatch, inside: Any) -> None:
    """Requests under way are ended; the next ones get the tokens they get in a new engine."""
    one = engine()
    queue(one, REQUESTS[:3])
    for _ in range(4):
        one.step()

    def interrupt(*args: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(one.decode_runner, "finish", interrupt)
        with pytest.raises(KeyboardInterrupt):
            one.step()
    while one.has_work:
        one.step()
    again, fresh = queue(one, REQUESTS), engine()
    expected = queue(fresh, REQUESTS)
    for each in (one, fresh):
        while each.has_work:
            each.step()
        inside(each).check_idle()
    assert results(again) == results(expected)


def test_log_probabilities_of_a_split_batch_are_each_part_s_own(engine: Make) -> None:
    """Two parts replay one graph, and so share its outputs."""
    requests = [([1 + row, 2], greedy(4, logprobs=True, top_logprobs=2)) for row in range(NUM_ROWS)]
    found = []
    for drop in (False, True):
        one = engine()
        graphs = one.decode_runner.graphs
        assert graphs is not None
        for key in [key for key in graphs.whole.bucket_keys() if drop and key.bs == 4]:
            graphs.whole.drop(key, Reason.OVER_BUDGET, "for a test")
        sequences = queue(one, requests)
        while one.has_work:
            one.step()
        found.append([[entry.logprob for entry in s.logprobs] for s in sequences])
    for whole, split in zip(*found, strict=True):
        assert split == pytest.approx(whole, abs=1e-5)


@pytest.mark.parametrize("what", ["hook", "hook at 0", "processor", "processor and mask"])
def test_the_pieces_before_users_code_are_begun_ahead(engine: Make, inside: Any, what: str) -> None:
    """The same tokens, each token seen once by users' code, and regions run as often as without but for steps that are
    begun anew: when a sequence ends by a stop id, or a request comes."""
    runs = []
    for run_ahead in (True, False):
        one, seen = engine(run_ahead=run_ahead), []

        def push(hidden: Tensor, rows: Any, seen: list[Any] = seen) -> Tensor:
            seen.append([(row.position, len(row.output_ids)) for row in rows])
            return hidden * 1.25

        def process(prompt: Any, output: Any, logits: Tensor, seen: list[Any] = seen) -> None:
            seen.append((len(prompt), len(output)))
            logits[3] += 0.5

        more: dict[str, Any] = {}
        if "hook" in what:
            one.hooks.add(0 if "0" in what else 1, push)
        if "processor" in what:
            more["logits_processors"] = [process]
        if "mask" in what:
            more["allowed_token_ids"] = lambda prompt, output: [len(output), 5 + len(output), 9]
        requests = [
            ([1, 2, 3], greedy(12, **more)),
            (
                [4] * 20,
                SamplingParams(temperature=1.0, seed=5, max_tokens=14, stop_token_ids=[*range(0, 60, 7)], **more),
            ),
            ([5, 6], SamplingParams(temperature=1.0, seed=6, max_tokens=9, repetition_penalty=1.3, **more)),
        ]
        graphs = one.decode_runner.graphs
        assert graphs is not None
        sequences = queue(one, requests)
        for number in itertools.count():
            if not one.has_work:
                break
            one.step()
            if number == 4:
                sequences += queue(one, [([7, 8], greedy(6, **more))])
        inside(one).check_idle()
        runs.append((results(sequences), seen, graphs.step.head.counts.total(), graphs.step.blocks[0].counts.total()))
    (ahead, ahead_seen, heads, blocks), (after, after_seen, heads_after, blocks_after) = runs
    assert ahead == after
    assert ahead_seen == after_seen
    assert blocks >= blocks_after
    assert heads >= heads_after
    assert blocks <= blocks_after + 4


@pytest.mark.parametrize("layer", [0, 2])
def test_pieces_begun_for_a_hook_that_went_are_not_used_when_it_comes_back(engine: Make, layer: int) -> None:
    """Whole steps lie between, which change no row by the host's account. The hook does nothing, nor may its coming."""
    runs = []
    for run_ahead in (True, False):
        one = engine(run_ahead=run_ahead, max_num_seqs=1, capture_sizes=(1,))
        [sequence] = queue(one, [([1, 2, 3], greedy(14))])
        for length in (3, 10):
            handle = one.hooks.add(layer, lambda hidden, rows: None)
            while len(sequence.output_ids) < length:
                one.step()
            handle.remove()
            while len(sequence.output_ids) < length + 3:
                one.step()
        while one.has_work:
            one.step()
        runs.append(sequence.output_ids)
    assert runs[0] == runs[1]
