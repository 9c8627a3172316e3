"""Rows of sampling state over a model whose logits are a pure function of the tokens so far."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch

from ostinato.runtime.sampler import MAX_BANNED_IDS, SampledTokens, Sampler
from ostinato.runtime.sampling_params import SamplingParams

VOCAB_SIZE = 128


def fake_logits(token_ids: Sequence[int]) -> torch.Tensor:
    state = 17
    for token_id in token_ids:
        state = (state * 31 + token_id + 1) % 99991
    return torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(state)) * 2


@dataclass
class Request:
    params: SamplingParams
    seed: int
    prompt: list[int] = field(default_factory=lambda: [5, 5, 7])
    sample_index: int = 0
    stop_token_ids: tuple[int, ...] = ()
    output: list[int] = field(default_factory=list)

    def enter(self, sampler: Sampler, row: int) -> None:
        sampler.set_row(
            row,
            self.params,
            self.seed,
            self.prompt,
            self.output,
            sample_index=self.sample_index,
            stop_token_ids=self.stop_token_ids,
        )


Model = Callable[[Sequence[int]], torch.Tensor]


def step(sampler: Sampler, rows: dict[int, Request], *, model: Model = fake_logits, packed: bool = False):
    """One token for each request; `packed` when the rows are 0, 1, 2, ... and need not be named."""
    logits = torch.stack([model(request.prompt + request.output) for request in rows.values()])
    positions = torch.tensor([len(request.prompt + request.output) - 1 for request in rows.values()])
    sampled = sampler.sample(logits, positions, rows=None if packed else list(rows))
    for request, token_id in zip(rows.values(), sampled.token_ids.tolist(), strict=True):
        request.output.append(token_id)
    return sampled


def alone(request: Request, num_tokens: int, *, model: Model = fake_logits) -> list[int]:
    sampler = Sampler(1, VOCAB_SIZE, device="cpu")
    request.enter(sampler, 0)
    for _ in range(num_tokens):
        step(sampler, {0: request}, model=model, packed=True)
    return request.output


ALL = SamplingParams(
    temperature=0.8,
    top_k=50,
    top_p=0.95,
    min_p=0.001,
    repetition_penalty=1.2,
    presence_penalty=0.5,
    frequency_penalty=0.25,
    logit_bias={3: 2.0, 127: -5.0},
    min_tokens=4,
    logprobs=True,
    top_logprobs=3,
)
KINDS = [SamplingParams(temperature=0.8), ALL, SamplingParams(temperature=0.0), SamplingParams(top_p=0.7)]
KIND_IDS = ["temperature", "everything", "greedy", "top_p"]


def neighbours(num: int) -> list[Request]:
    return [Request(KINDS[i % 4], 1000 + i, [i, 2 * i], stop_token_ids=(0, 9)) for i in range(num)]


@pytest.mark.parametrize("params", KINDS, ids=KIND_IDS)
class TestB22SeedIsIndependentOfNeighbours:
    def make(self, params: SamplingParams) -> Request:
        return Request(params, 42, stop_token_ids=(11, 12))

    def test_in_row_5_of_8_and_in_a_packed_batch(self, params: SamplingParams) -> None:
        expected = alone(self.make(params), 12)
        sampler, request = Sampler(8, VOCAB_SIZE, device="cpu"), self.make(params)
        rows = dict(enumerate([*neighbours(5), request, *neighbours(2)]))
        for row, each in rows.items():
            each.enter(sampler, row)
        for i in range(12):
            step(sampler, rows, packed=i % 2 == 0)
        assert request.output == expected

    def test_admitted_late_into_a_used_row_and_named_in_any_order(self, params: SamplingParams) -> None:
        expected = alone(self.make(params), 8)
        sampler, request = Sampler(4, VOCAB_SIZE, device="cpu"), self.make(params)
        first = {3: Request(ALL, 1, stop_token_ids=(1, 2)), 1: Request(ALL, 2)}
        for row, each in first.items():
            each.enter(sampler, row)
        for _ in range(3):
            step(sampler, first)
        sampler.clear_row(3)
        request.enter(sampler, 3)
        for _ in range(4):
            step(sampler, {3: request, 1: first[1]})
        for _ in range(4):
            step(sampler, {1: first[1], 3: request})
        assert request.output == expected

    def test_preempted_and_resumed_in_another_row(self, params: SamplingParams) -> None:
        expected = alone(self.make(params), 10)
        sampler, request = Sampler(4, VOCAB_SIZE, device="cpu"), self.make(params)
        request.enter(sampler, 2)
        for _ in range(3):
            step(sampler, {2: request})
        sampler.clear_row(2)
        request.enter(sampler, 0)
        for _ in range(7):
            step(sampler, {0: request})
        assert request.output == expected

    def test_moved_over_a_finished_row(self, params: SamplingParams) -> None:
        expected = alone(self.make(params), 10)
        sampler, request, finished = Sampler(4, VOCAB_SIZE, device="cpu"), self.make(params), Request(ALL, 3)
        finished.enter(sampler, 0)
        request.enter(sampler, 1)
        for _ in range(5):
            step(sampler, {0: finished, 1: request}, packed=True)
        sampler.move_row(1, 0)
        sampler.clear_row(1)
        for _ in range(5):
            step(sampler, {0: request}, packed=True)
        assert request.output == expected


@pytest.mark.parametrize("seed", [0, 42, 2**63, 2**64 - 1])
def test_b22_n_samples_differ_and_repeat_exactly(seed: int) -> None:
    def samples() -> list[list[int]]:
        return [alone(Request(SamplingParams(n=4), seed, sample_index=i), 10) for i in range(4)]

    streams = samples()
    assert len({tuple(stream) for stream in streams}) == 4
    assert samples() == streams


def test_b22_equal_seeds_agree_and_the_global_generator_is_untouched() -> None:
    state = torch.get_rng_state()
    outputs = [alone(Request(ALL, seed), 10) for seed in (42, 42, 43, 42 + 2**32)]
    assert torch.equal(torch.get_rng_state(), state)
    assert outputs[0] == outputs[1]
    assert len({tuple(output) for output in outputs}) == 3


@pytest.mark.parametrize(
    ("penalties", "token_id", "expected"),
    [
        ({"repetition_penalty": 1.3}, 5, 1.538462),
        ({"repetition_penalty": 1.3}, 7, -2.6),
        ({"repetition_penalty": 1.3}, 9, 0.769231),
        ({"presence_penalty": 0.5, "frequency_penalty": 0.25}, 5, 2.0),
        ({"presence_penalty": 0.5, "frequency_penalty": 0.25}, 7, -2.75),
        ({"presence_penalty": 0.5, "frequency_penalty": 0.25}, 9, 0.0),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else str(value),
)
def test_b23_penalties_count_prompt_and_output_as_published(penalties: dict, token_id: int, expected: float) -> None:
    """The penalised logit loses the greedy choice to an unseen id just above it, and wins just below."""
    logits = torch.full((2, VOCAB_SIZE), -50.0)
    logits[:, token_id] = {5: 2.0, 7: -2.0, 9: 1.0}[token_id]
    for nudge, winner in ((1e-4, 100), (-1e-4, token_id)):
        sampler = Sampler(2, VOCAB_SIZE, device="cpu")
        request = Request(SamplingParams(temperature=0.0, **penalties), 0, [5, 5, 7], output=[7, 9, 9])
        request.enter(sampler, 0)
        Request(SamplingParams(temperature=0.0), 0, [5, 5, 7], output=[7, 9, 9]).enter(sampler, 1)
        logits[0, 100] = expected + nudge
        logits[1, 100] = logits[1, token_id] - 1e-4
        assert sampler.sample(logits, torch.tensor([5, 5])).token_ids.tolist() == [winner, token_id]


def test_b23_sampled_tokens_are_counted_as_they_come() -> None:
    request = Request(SamplingParams(temperature=0.0, frequency_penalty=1.0), 0)
    logits = torch.full((VOCAB_SIZE,), -50.0)
    logits[[4, 8]] = torch.tensor([2.5, 1.0])
    assert alone(request, 6, model=lambda _: logits) == [4, 4, 8, 4, 8, 4]


def test_b26_biases_turn_the_greedy_token() -> None:
    def first(**params) -> int:
        return alone(Request(SamplingParams(temperature=0.0, **params), 0), 1)[0]

    best = first()
    assert first(logit_bias={}) == best
    assert first(logit_bias={best: -100}) != best
    assert first(logit_bias={"126": 100}) == 126
    sampler = Sampler(1, VOCAB_SIZE, device="cpu")
    with pytest.raises(ValueError, match="191222"):
        Request(SamplingParams(logit_bias={191222: 1.0}), 0).enter(sampler, 0)
    request = Request(SamplingParams(temperature=0.0), 0)
    request.enter(sampler, 0)
    step(sampler, {0: request})
    assert request.output == [best]


def test_b26_a_bias_does_not_stay_behind_in_a_row_or_reach_a_neighbour() -> None:
    sampler = Sampler(2, VOCAB_SIZE, device="cpu")
    biased = Request(SamplingParams(temperature=0.0, logit_bias={1: 100.0}, min_tokens=9), 0, stop_token_ids=(2, 3))
    plain = Request(SamplingParams(temperature=0.0), 0)
    for first, second in ((biased, plain), (plain, biased)):
        first.enter(sampler, 0)
        second.enter(sampler, 1)
        step(sampler, {0: first, 1: second})
    assert biased.output == [1, 1]
    assert plain.output == alone(Request(SamplingParams(temperature=0.0), 0), 2)


def test_b28_nothing_ends_a_request_before_min_tokens_generated_ones() -> None:
    """The model prefers end ids in turn; the prompt is longer than min_tokens; the last id is no end id."""

    def model(token_ids: Sequence[int]) -> torch.Tensor:
        logits = torch.zeros(VOCAB_SIZE)
        logits[[2, 60, 99]] = torch.tensor([9.0, 8.0, 7.0])
        logits[VOCAB_SIZE - 1] = 5.0
        return logits

    params = SamplingParams(temperature=0.0, min_tokens=3, max_tokens=5)
    for ends in ((2, 60, 99), (99, 2, 60)):
        request = Request(params, 0, prompt=list(range(40)), stop_token_ids=ends)
        assert alone(request, 5, model=model) == [VOCAB_SIZE - 1] * 3 + [2] * 2
    # Under ignore_eos the engine names only the request's own ids.
    assert alone(Request(params, 0, stop_token_ids=(60,)), 5, model=model) == [2] * 5
    assert alone(Request(params, 0), 5, model=model) == [2] * 5


def test_b28_min_tokens_holds_for_random_tokens_and_after_resuming() -> None:
    ends = tuple(range(0, VOCAB_SIZE, 2))
    params = SamplingParams(temperature=2.0, min_tokens=6)
    request = Request(params, 3, stop_token_ids=ends)
    output = alone(request, 40)
    assert not set(output[:6]) & set(ends)
    assert set(output[6:]) & set(ends)
    resumed = Request(params, 3, stop_token_ids=ends, output=output[:4])
    assert alone(resumed, 36) == output


def test_more_end_ids_than_a_row_holds_are_refused() -> None:
    sampler = Sampler(1, 1000, device="cpu")
    ends = tuple(range(MAX_BANNED_IDS + 1))
    with pytest.raises(ValueError, match=f"at most {MAX_BANNED_IDS} stop and end ids, got {MAX_BANNED_IDS + 1}"):
        sampler.set_row(0, SamplingParams(min_tokens=1), 0, [1], stop_token_ids=ends)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_b27_greedy_ties_among_every_kind_of_neighbour(dtype: torch.dtype) -> None:
    tied = torch.zeros(VOCAB_SIZE, dtype=dtype)
    tied[[7, 90, 120]] = 5.0
    sampler = Sampler(5, VOCAB_SIZE, device="cpu")
    greedy = [SamplingParams(temperature=0.0), SamplingParams(top_k=1), SamplingParams(top_p=0.0)]
    for num_others in range(3):
        for row, params in enumerate([*greedy, SamplingParams(seed=1), ALL][: 3 + num_others]):
            Request(params, row, [1]).enter(sampler, row)
        logits = torch.stack([tied] * 3 + [torch.randn(VOCAB_SIZE).to(dtype)] * num_others)
        assert sampler.sample(logits, torch.zeros(len(logits), dtype=torch.int64)).token_ids[:3].tolist() == [7] * 3


def test_logprobs_are_the_model_s_own_and_come_only_when_asked_for() -> None:
    sampler = Sampler(3, VOCAB_SIZE, device="cpu")
    requests = {0: Request(ALL, 1), 1: Request(SamplingParams(logprobs=True), 2), 2: Request(SamplingParams(), 3)}
    for row, request in requests.items():
        request.enter(sampler, row)
    exact = torch.log_softmax(torch.stack([fake_logits(r.prompt) for r in requests.values()]), -1)
    sampled = step(sampler, requests)
    assert sampled.top_token_ids.shape == (3, 3)
    assert torch.equal(sampled.top_token_ids[0], exact[0].sort(descending=True, stable=True).indices[:3])
    torch.testing.assert_close(sampled.logprobs, exact.gather(1, sampled.token_ids[:, None]).squeeze(1))
    torch.testing.assert_close(sampled.top_logprobs, exact.gather(1, sampled.top_token_ids))
    assert step(sampler, {1: requests[1]}).top_token_ids.shape == (1, 0)
    assert step(sampler, {2: requests[2]}).logprobs is None


def test_asking_for_logprobs_does_not_change_the_token() -> None:
    asked = alone(Request(SamplingParams(logprobs=True, top_logprobs=20, top_p=0.9), 5), 10)
    assert asked == alone(Request(SamplingParams(top_p=0.9), 5), 10)


def test_a_greedy_batch_needs_no_random_road_and_counts_are_claimed_late() -> None:
    sampler = Sampler(2, VOCAB_SIZE, device="cpu")
    Request(SamplingParams(temperature=0.0, top_k=3, top_p=0.5, min_p=0.1), 0).enter(sampler, 0)
    assert sampler.road([0]) == sampler.road([0, 1]) == sampler.road([])
    assert sampler._counts is None
    Request(ALL, 0, stop_token_ids=(1,)).enter(sampler, 1)
    assert sampler._counts is not None
    road = sampler.road([0, 1])
    assert all([road.random, road.top_k, road.top_p, road.min_p, road.penalties, road.biases, road.bans, road.logprobs])
    sampler.clear_row(1)
    assert sampler.road([0, 1]) == sampler.road([0])


@pytest.mark.parametrize("params", KINDS, ids=KIND_IDS)
def test_everything_goes_to_out_and_logits_stay_as_they_are(
    params: SamplingParams, nan_poison: Callable[..., torch.Tensor]
) -> None:
    outputs = []
    ids, top_ids = nan_poison(1, dtype=torch.int64), nan_poison(1, 3, dtype=torch.int64)
    for out in (None, SampledTokens(ids, nan_poison(1), top_ids, nan_poison(1, 3))):
        sampler = Sampler(1, VOCAB_SIZE, device="cpu")
        Request(params, 9, [1, 2], stop_token_ids=(4,)).enter(sampler, 0)
        logits = fake_logits([1, 2])[None]
        sampled = sampler.sample(logits, torch.tensor([1]), out=out)
        assert torch.equal(logits[0], fake_logits([1, 2]))
        written = {name: tensor for name, tensor in vars(sampled).items() if tensor is not None}
        assert out is None or all(tensor is getattr(out, name) for name, tensor in written.items())
        outputs.append({name: tensor.tolist() for name, tensor in written.items()})
    assert outputs[0] == outputs[1]


def test_state_keeps_its_addresses() -> None:
    """Recorded steps read these tensors where they are."""
    sampler = Sampler(3, VOCAB_SIZE, device="cpu")
    tensors = [*sampler.claim_counts(), *(value for value in vars(sampler).values() if torch.is_tensor(value))]
    addresses = [tensor.data_ptr() for tensor in tensors]
    request = Request(ALL, 0, stop_token_ids=(1,))
    request.enter(sampler, 1)
    step(sampler, {1: request})
    sampler.move_row(1, 2)
    sampler.clear_row(1)
    after = [*sampler.claim_counts(), *(value for value in vars(sampler).values() if torch.is_tensor(value))]
    assert [tensor.data_ptr() for tensor in after] == addresses


def test_lists_of_ids_ascend_behind_what_is_unused() -> None:
    """The kernels look up a stretch of the vocabulary in them."""
    sampler = Sampler(1, VOCAB_SIZE, device="cpu")
    Request(SamplingParams(logit_bias={9: 1.0, 3: 2.0, 0: 4.0}, min_tokens=2), 0, stop_token_ids=(7, 2)).enter(
        sampler, 0
    )
    _, _, bias_ids, biases, banned_ids, is_banned, *_ = sampler.row_tensors()
    assert bias_ids[0, -4:].tolist() == [0, 0, 3, 9]
    assert biases[0, -4:].tolist() == [0.0, 4.0, 2.0, 1.0]
    assert (banned_ids[0, -3:].tolist(), is_banned[0, -3:].tolist()) == ([0, 2, 7], [False, True, True])
