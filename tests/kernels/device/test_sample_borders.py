"""Which tokens `sample_rows` may draw, and what it makes of a logit: rows in which one step more or less would show."""

import sys

import pytest
import torch

from ostinato.kernels import UNUSED_BIAS, SampleSteps, SamplingRows, sample_rows
from ostinato.kernels._triton import INTERPRETED
from ostinato.kernels.philox import exponential_ref, random_bits_ref

PLACES = [*["cpu"] * INTERPRETED, pytest.param("cuda", marks=pytest.mark.gpu)]
VOCAB = 2100


@pytest.fixture(params=PLACES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def rows_of(reals: list[list[float]], integers: list[list[int]], device: str) -> SamplingRows:
    """Rows with one place for a bias and one for a ban, both unused, and a vocabulary of VOCAB without any count."""
    num = len(reals)
    tensors = (
        torch.tensor(reals), torch.tensor(integers),
        torch.zeros(num, 1, dtype=torch.int64), torch.full((num, 1), UNUSED_BIAS),
        torch.zeros(num, 1, dtype=torch.int64), torch.zeros(num, 1, dtype=torch.bool),
        torch.zeros(num, VOCAB, dtype=torch.bool), torch.zeros(num, VOCAB, dtype=torch.int32),
    )  # fmt: skip
    return SamplingRows(*(tensor.to(device) for tensor in tensors))


def clear_winner(row: int) -> tuple[int, int]:
    """(seed, token): at position `row` the token's exponential is by far the first, so that it wins among all but
    equal weights."""
    for seed in range(100):
        key = (torch.tensor([number]) for number in (seed, 0, row))
        times, ids = exponential_ref(random_bits_ref(*key, VOCAB))[0].topk(2, largest=False)
        if times[1] > 1.3 * times[0]:
            return seed, int(ids[0])
    raise AssertionError("one seed of a hundred has a clear winner")


SIZES: dict[str, dict[str, int]] = {"few": {}, "bins": {"FEW": 8}, "whole": {"FEW": 4, "CAPACITY": 4}}
CASES = [
    *((kind, road) for road in SIZES for kind in ("top_k", "top_p")),
    ("top_k and top_p", "bins"),
    ("min_p", "few"),
]


@pytest.mark.parametrize(("kind", "road"), CASES)
def test_the_last_token_that_is_kept_and_the_first_that_is_not(
    kind: str, road: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The winner of the race stands on the one side of the border, or on the other, of all but flat logits."""
    for name, size in SIZES[road].items():
        monkeypatch.setattr(sys.modules[sample_rows.__module__], name, size)
    borders = [5, VOCAB - 1] if road == "whole" else [1, 5, 200, VOCAB - 1]
    ordered = -1e-4 * torch.arange(VOCAB)
    weights, reals, integers, logits, winners = ordered.double().exp(), [], [], [], []
    for row in range(2 * len(borders)):
        kept, dropped = borders[row // 2], row % 2
        seed, winner = clear_winner(row)
        order = torch.randperm(VOCAB)
        place = int((order == winner).nonzero())
        order[place], order[kept - 1 + dropped] = order[kept - 1 + dropped].clone(), winner
        logits.append(torch.empty(VOCAB).index_copy_(0, order, ordered))
        k = kept if kind == "top_k" else min(kept + 50, VOCAB) if kind == "top_k and top_p" else 0
        mass = weights[: k or VOCAB].sum()
        p = float((weights[:kept].sum() - weights[kept - 1] / 2) / mass) if "top_p" in kind else 1.0
        least = float(weights[kept - 1 : kept + 1].mean()) if kind == "min_p" else 0.0
        reals.append([1.0, p, least, 1.0, 0.0, 0.0])
        integers.append([k, seed, 0, 0])
        winners.append(winner)
    index = torch.arange(len(reals), device=device)
    steps = SampleSteps(random=True, top_k="top_k" in kind, top_p="top_p" in kind, min_p=kind == "min_p")
    state = rows_of(reals, integers, device)
    drawn = sample_rows(torch.stack(logits).to(device), index, index, state, steps).tolist()
    assert [token == winner for token, winner in zip(drawn, winners, strict=True)] == [True, False] * len(borders)


@pytest.mark.parametrize("road", SIZES)
def test_a_share_that_is_held_exactly_takes_no_token_more(
    road: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of two equal tokens is the first of them, three quarters of four the first three."""
    for name, size in SIZES[road].items():
        monkeypatch.setattr(sys.modules[sample_rows.__module__], name, size)
    seeds = range(8)
    logits = torch.full((16, VOCAB), -torch.inf)
    logits[:8, [20, 2050]] = 1.0
    logits[8:, [20, 70, 700, 2050]] = 1.0
    state = rows_of(
        [[1.0, p, 0, 1, 0, 0] for p in (0.5, 0.75) for _ in seeds], [[0, seed, 0, 0] for seed in seeds] * 2, device
    )
    index = torch.arange(16, device=device)
    drawn = sample_rows(logits.to(device), index, index, state, SampleSteps(random=True, top_p=True)).tolist()
    assert set(drawn[:8]) == {20}
    assert set(drawn[8:]) == {20, 70, 700}


def test_temperature_divides_logits(device: str) -> None:
    """The race's winner loses to a token whose weight at this temperature makes up for its time, and just so."""
    reals, integers, logits, expected = [], [], [], []
    for row, temperature in enumerate([0.25, 0.25, 1.0, 1.0, 3.0, 3.0]):
        seed, winner = clear_winner(row)
        times = exponential_ref(random_bits_ref(*(torch.tensor([number]) for number in (seed, 0, row)), VOCAB))[0]
        rival = (winner + 1000) % VOCAB
        margin = -1e-3 if row % 2 else 1e-3
        values = torch.full((VOCAB,), -100.0 * temperature)
        values[winner] = 0.0
        values[rival] = temperature * (float((times[rival].double() / times[winner].double()).log()) + margin)
        logits.append(values)
        reals.append([temperature, 1.0, 0.0, 1.0, 0.0, 0.0])
        integers.append([0, seed, 0, 0])
        expected.append(winner if row % 2 else rival)
    index = torch.arange(len(reals), device=device)
    state = rows_of(reals, integers, device)
    drawn = sample_rows(torch.stack(logits).to(device), index, index, state, SampleSteps(random=True))
    assert drawn.tolist() == expected


CHANGES = [
    # raw logit, bias, in the prompt, times generated, repetition, presence, frequency
    (2.0, 0.0, True, 0, 1.3, 0.0, 0.0),
    (-2.0, 0.0, True, 0, 1.3, 0.0, 0.0),
    (1.0, 0.0, False, 2, 1.3, 0.0, 0.0),
    (1.0, 0.0, True, 3, 0.7, 0.0, 0.0),
    (2.0, 0.0, True, 0, 1.0, 0.5, 0.25),
    (-2.0, 0.0, True, 1, 1.0, 0.5, 0.25),
    (1.0, 0.0, False, 2, 1.0, 0.5, 0.25),
    (1.0, 0.0, False, 2, 1.0, -0.5, -1.5),
    (-1.0, 3.0, True, 1, 1.5, 0.5, 0.25),
    (1.0, -3.0, True, 1, 1.5, 0.5, 0.25),
    (1.0, 3.0, False, 0, 1.5, 0.5, 0.25),
]


@pytest.mark.parametrize("token", [0, 2047, 2048, 2099])
def test_a_logit_is_changed_by_as_much_as_the_rules_say(token: int, device: str) -> None:
    """B23: it wins over a token just below what the rules make of it, and loses to one just above.

    The first id, the last, and those on either side of where two programs' stretches meet.
    """
    num, rival = 2 * len(CHANGES), 7
    state = rows_of([[0.0] * 6] * num, [[0] * 4] * num, "cpu")
    assert state.in_prompt is not None
    assert state.output_counts is not None
    logits = torch.full((num, VOCAB), -50.0)
    for row in range(num):
        raw, bias, prompted, count, repetition, presence, frequency = CHANGES[row // 2]
        state.bias_ids[row, -1], state.biases[row, -1] = token, bias
        state.in_prompt[row, token], state.output_counts[row, token] = prompted, count
        state.reals[row] = torch.tensor([0.0, 1.0, 0.0, repetition, presence, frequency])
        expected = raw + bias
        if prompted or count:
            expected = expected / repetition if expected > 0 else expected * repetition
        expected -= frequency * count + presence * (count > 0)
        logits[row, token], logits[row, rival] = raw, expected + (1e-4 if row % 2 else -1e-4)
    state = SamplingRows(*(tensor.to(device) for tensor in state.tensors()))
    index = torch.arange(num, device=device)
    drawn = sample_rows(logits.to(device), index, index, state, SampleSteps(penalties=True, biases=True))
    assert drawn.tolist() == [token, rival] * len(CHANGES)
