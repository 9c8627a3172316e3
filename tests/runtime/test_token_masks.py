"""Allowed tokens: words of each row wherever it goes, whole steps under a mask, functions asked before each token."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.kernels import pack_token_bitmask
from ostinato.model import Decoder
from ostinato.runtime import Engine, Reason, SamplingParams, Sequence
from ostinato.runtime.sampler import Sampler

Make = Callable[..., Engine]
Generate = Callable[..., list[Sequence]]
VOCAB, NUM_ROWS = 61, 4


def words_of(ids: Any) -> list[int]:
    mask = torch.zeros(VOCAB, dtype=torch.bool)
    mask[list(ids)] = True
    return pack_token_bitmask(mask).tolist()


def asked(prompt: Any, output: Any) -> list[int]:
    """What may come depends on what came: a token of the last one's parity, beside one that depends on the length."""
    return [*range(output[-1] % 2 if output else 0, VOCAB, 2), len(output)]


ALL = [-1, -1]
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["list", "function", "none", "clear", "move", "ask"]),
        st.integers(0, NUM_ROWS - 1),
        st.integers(0, NUM_ROWS - 1),
        st.sets(st.integers(0, VOCAB - 1), min_size=1),
    ),
    max_size=30,
)


@settings(deadline=None, max_examples=60)
@given(EVENTS)
def test_whatever_happens_to_rows_each_has_its_own_words(events: list[Any]) -> None:
    """A row without a mask allows all, whoever had it before; a moved row takes its words along."""
    sampler, kinds, expected = Sampler(NUM_ROWS, VOCAB, device="cpu"), ["none"] * NUM_ROWS, [ALL] * NUM_ROWS
    for event, row, other, ids in events:
        if event in ("list", "function", "none"):
            allowed: Any = {"list": list(ids), "function": asked, "none": None}[event]
            sampler.set_row(row, SamplingParams(allowed_token_ids=allowed), 0, [1])
            kinds[row], expected[row] = event, words_of(ids) if event == "list" else ALL
        elif event == "clear":
            sampler.clear_row(row)
            kinds[row], expected[row] = "none", ALL
        elif event == "move":
            sampler.move_row(row, other)
            kinds[other], expected[other] = kinds[row], expected[row]
        else:
            rows = [one for one in range(NUM_ROWS) if kinds[one] == "function"]
            for one in rows:
                expected[one] = words_of({*ids, one})
            if rows:
                sampler.set_masks(rows, torch.tensor([expected[one] for one in rows], dtype=torch.int32))
        assert sampler._bitmask.tolist() == expected
        assert [sampler.road([one]).masks for one in range(NUM_ROWS)] == [kind != "none" for kind in kinds]


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_mask_comes_before_penalties_biases_and_log_probabilities(temperature: float) -> None:
    """A bias of 100 brings no forbidden token back, and log-probabilities are those of what is allowed; rows beside it
    keep theirs, bit for bit."""
    logits, allowed = torch.randn(2, VOCAB), [3, 8, 60]
    params = SamplingParams(
        temperature=temperature, allowed_token_ids=allowed, logit_bias={5: 100.0, 8: 1.0}, repetition_penalty=1.5,
        logprobs=True, top_logprobs=2,
    )  # fmt: skip
    sampler = Sampler(2, VOCAB, device="cpu")
    sampler.set_row(0, SamplingParams(temperature=0.0), 0, [1])
    sampler.set_row(1, params, 7, [3, 4])
    given_logits = logits.clone()
    for position in range(20):
        sampled = sampler.sample(given_logits, torch.tensor([position, position]))
        exact = torch.log_softmax(logits[1, allowed], 0)
        token = int(sampled.token_ids[1])
        assert token in allowed
        torch.testing.assert_close(sampled.logprobs[1], exact[allowed.index(token)])  # type: ignore[index]
        torch.testing.assert_close(sampled.top_logprobs[1], exact.sort(descending=True).values[:2])  # type: ignore[index]
    assert torch.equal(given_logits[0], logits[0])
    assert torch.equal(given_logits[1, allowed], logits[1, allowed])


@pytest.fixture
def engine(make_engine: Make, tiny_decoder: Callable[..., Decoder], device: str) -> Make:
    """`engine(**config)`: whole steps of 1, 2 and 4 rows, prompts of up to 8 tokens in a graph from the second on."""

    def make(**config: Any) -> Engine:
        sizes = {"max_num_seqs": NUM_ROWS, "capture_sizes": (1, 2, 4), "graphs": "whole"}
        prompts: dict[str, Any] = {"prompt_capture_sizes": (8,), "graph_warmup_steps": 1}
        prompts = {} if config.get("graphs") == "off" else prompts
        return make_engine(tiny_decoder(device), **(sizes | prompts | config))

    return make


ODD, FEW = list(range(1, VOCAB, 2)), [4, 9, 33, 60]
MASKED: list[tuple[list[int], SamplingParams]] = [
    ([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=3, allowed_token_ids=FEW)),
    ([4] * 20, SamplingParams(seed=1, max_tokens=9, allowed_token_ids=ODD, stop_token_ids=[7, 21])),
    ([5, 6], SamplingParams(seed=2, max_tokens=12, repetition_penalty=1.3)),
    ([7], SamplingParams(temperature=0.0, max_tokens=7, allowed_token_ids=asked)),
    ([8, 9], SamplingParams(seed=3, top_k=9, max_tokens=11, allowed_token_ids=asked, n=2)),
    ([10, 11], SamplingParams(temperature=0.0, max_tokens=9)),
    ([12], SamplingParams(temperature=0.0, max_tokens=6, allowed_token_ids=ODD, logprobs=True, top_logprobs=3)),
    ([13, 14], SamplingParams(seed=4, max_tokens=8, allowed_token_ids=FEW, n=2)),
]
"""More than there are rows, and some end early: others move into their rows, with a mask or without."""


def allowed_next(params: SamplingParams, prompt: Any, output: Any) -> set[int]:
    allowed = params.allowed_token_ids
    if allowed is None:
        return set(range(VOCAB))
    return set(allowed(prompt, output) if callable(allowed) else allowed)  # type: ignore[arg-type]


def serve(engine: Engine, requests: list[Any]) -> list[Sequence]:
    """As `generate`, without its look at rows between steps, where a step launched ahead is under way."""
    sequences = [sequence for prompt, params in requests for sequence in engine.create(prompt, params)]
    for sequence in sequences:
        engine.add(sequence)
    while engine.has_work:
        engine.step()
    return sequences


def results(sequences: list[Sequence]) -> list[Any]:
    return [(one.output_ids, one.logprobs, one.finish_reason) for one in sequences]


@pytest.mark.parametrize("requests", [MASKED, MASKED[::-1]], ids=["in order", "reversed"])
@pytest.mark.parametrize("run_ahead", [False, True], ids=["step by step", "launched ahead"])
def test_eager_on_bucket_is_piecewise_is_whole_and_every_token_is_allowed(
    engine: Make, inside: Any, requests: list[Any], run_ahead: bool, device: str
) -> None:
    """The first one, behind the prompt, too. Whole steps stay whole, and nothing is left in any row."""
    runs = {}
    for graphs in ("off", "eager", "piecewise", "whole"):
        config = {"enable_decode_graphs": False} if graphs == "eager" else {"graphs": graphs}
        one = engine(**config, run_ahead=run_ahead)
        sequences = serve(one, requests)
        inside(one).check_idle()
        runs[graphs] = results(sequences)
        assert (one._runner._sampler._bitmask == -1).all()
        for sequence in sequences:
            assert sequence.error is None
            for length, token in enumerate(sequence.output_ids):
                assert token in allowed_next(sequence.params, sequence.prompt_ids, sequence.output_ids[:length])
        if graphs == "whole":
            decodes = set(one.decode_runner.counters.by_reason) - {Reason.PREFILL, Reason.PROMPT}
            assert decodes == {Reason.WHOLE}
    assert runs["piecewise"] == runs["eager"]
    assert runs["whole"] == runs["eager"]
    assert device != "cpu" or runs["off"] == runs["eager"]  # other kernels elsewhere: not the same bits


def test_a_prompt_in_a_graph_is_masked_behind_it(engine: Make, generate: Generate) -> None:
    """The replay's logits are the graph's own: the next prompt without a mask has all of its tokens again."""
    one, plain = engine(), SamplingParams(temperature=0.0, max_tokens=1)
    [free] = generate(one, ([5, 6, 7], plain))
    best = free.output_ids[0]
    for allowed in ([best + 1], lambda prompt, output: [best + 2]):
        masked = SamplingParams(temperature=0.0, max_tokens=1, allowed_token_ids=allowed)  # type: ignore[arg-type]
        found = generate(one, ([5, 6, 7], masked), ([5, 6, 7], plain))
        assert found[0].output_ids == ([best + 2] if callable(allowed) else allowed)
        assert found[1].output_ids == [best]
        [alone] = generate(one, ([5, 6, 7], masked))
        assert alone.output_ids == found[0].output_ids
        [again] = generate(one, ([5, 6, 7], plain))
        assert again.output_ids == [best]
    assert one.decode_runner.counters.prompts[Reason.PROMPT] >= 3


def test_rows_of_a_split_batch_keep_their_masks(engine: Make, generate: Generate, inside: Any) -> None:
    """The later part takes the place of the first rows for one replay."""
    one = engine()
    graphs = one.decode_runner.graphs
    assert graphs is not None
    for key in [key for key in graphs.whole.bucket_keys() if key.bs == 4 and key.graph_walk == "decode"]:
        graphs.whole.drop(key, Reason.OVER_BUDGET, "for a test")
    requests = [([1 + i, 2], SamplingParams(temperature=0.0, max_tokens=5, allowed_token_ids=[10 + i])) for i in (0, 1)]
    requests += [([9], SamplingParams(temperature=0.0, max_tokens=5, allowed_token_ids=lambda p, o: [30 + len(o)]))]
    requests += [([7], SamplingParams(temperature=0.0, max_tokens=5))]
    sequences = generate(one, *requests)
    assert [s.output_ids for s in sequences[:3]] == [[10] * 5, [11] * 5, [30, 31, 32, 33, 34]]
    [alone] = generate(engine(graphs="off"), requests[3])
    assert sequences[3].output_ids == alone.output_ids
    assert one.decode_runner.counters.by_reason[Reason.SPLIT] == 8
    inside(one).check_idle()


@pytest.mark.parametrize("kind", ["list", "function"])
def test_lists_are_launched_ahead_and_functions_are_asked_first(engine: Make, kind: str) -> None:
    """A function sees each token before it is asked for the next one, once for each."""
    one, seen = engine(run_ahead=True), []

    def note(prompt: Any, output: Any) -> list[int]:
        seen.append(tuple(output))
        return FEW

    params = SamplingParams(temperature=0.0, max_tokens=6, allowed_token_ids=note if kind == "function" else FEW)
    [sequence] = one.create([1, 2], params)
    one.add(sequence)
    ahead = []
    while one.has_work:
        one.step()
        ahead.append(one._ahead is not None)
    assert any(ahead) == (kind == "list")
    if kind == "function":
        assert seen == [tuple(sequence.output_ids[:length]) for length in range(6)]


@pytest.mark.parametrize("graphs", ["off", "whole", "piecewise"])
@pytest.mark.parametrize("at", [0, 3])
def test_a_function_that_fails_ends_its_own_request(engine: Make, generate: Generate, graphs: str, at: int) -> None:
    """Its own logits processors are not called for that token; neighbours get the tokens they get without it."""
    one, processed = engine(graphs=graphs), []

    def fails(prompt: Any, output: Any) -> list[int]:
        return [7] if len(output) < at else [VOCAB]

    def process(prompt: Any, output: Any, logits: Any) -> None:
        processed.append(len(output))

    beside = [([1, 2], SamplingParams(temperature=0.0, max_tokens=8, allowed_token_ids=asked)), MASKED[2]]
    expected = results(generate(one, *beside))
    bad = SamplingParams(max_tokens=8, allowed_token_ids=fails, logits_processors=[process])
    first, failed, last = generate(one, beside[0], ([3, 4], bad), beside[1])
    assert results([first, last]) == expected
    assert (failed.output_ids, failed.finish_reason) == ([7] * at, "error")
    assert str(failed.error) == (
        f"allowed_token_ids, for output token {at}, raised ValueError: "
        f"allowed_token_ids must be in 0 ... {VOCAB - 1}, got [{VOCAB}]"
    )
    assert processed == list(range(at))


def test_a_mask_comes_after_logits_processors(engine: Make, generate: Generate) -> None:
    """They see all logits, and cannot bring a token back."""
    for graphs, allowed in itertools.product(("off", "whole"), (FEW, lambda prompt, output: FEW)):
        one, finite = engine(graphs=graphs), []

        def process(prompt: Any, output: Any, logits: torch.Tensor, finite: list[bool] = finite) -> None:
            finite.append(bool(logits.isfinite().all()))
            logits[5] = 1e4

        params = SamplingParams(temperature=0.0, max_tokens=5, allowed_token_ids=allowed, logits_processors=[process])
        [sequence] = generate(one, ([1, 2], params))
        assert set(sequence.output_ids) <= set(FEW)
        assert finite == [True] * 5
