"""Many tokens of one row by `sample_rows` have the distribution that its parameters ask for."""

import pytest
import torch
from torch import Tensor

from ostinato.kernels import SampleSteps, SamplingRows, sample_rows

REALS = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "repetition": 1.0, "presence": 0.0, "frequency": 0.0}
DISTRIBUTIONS = {
    "temperature": {"temperature": 1.3},
    "top_k": {"temperature": 0.8, "top_k": 40},
    "a large top_k": {"temperature": 1.5, "top_k": 500},
    "top_p": {"top_p": 0.9},
    "top_p of flat logits": {"temperature": 5.0, "top_p": 0.9},
    "min_p": {"min_p": 0.05},
    "all filters": {"temperature": 1.2, "top_k": 400, "top_p": 0.97, "min_p": 0.002},
    "changed logits": {"top_p": 0.8, "repetition": 1.3, "presence": 0.2, "frequency": 0.1, "listed": 1},
}


def exact_distribution(logits: Tensor, wanted: dict[str, float], state: SamplingRows) -> Tensor:
    """By sorting, in float64, the first row of the state; tokens 0 ... 99 are in the prompt, and generated twice."""
    numbers, values = REALS | wanted, logits.double()
    if "listed" in wanted:
        values[state.bias_ids[0]] += state.biases[0].double()
    seen = torch.arange(len(values)) < 100
    factor = torch.where(values > 0, 1 / numbers["repetition"], numbers["repetition"])
    values = torch.where(seen, values * factor - 2 * numbers["frequency"] - numbers["presence"], values)
    if "listed" in wanted:
        values[state.banned_ids[0]] = float("-inf")
    weights = ((values - values.max()) / numbers["temperature"]).exp()
    order = weights.argsort(descending=True)
    ordered = weights[order]
    ordered[int(numbers.get("top_k", len(values))) :] = 0.0
    before = ordered.cumsum(0) - ordered
    ordered[before >= numbers["top_p"] * ordered.sum()] = 0.0
    ordered[ordered < numbers["min_p"]] = 0.0
    return torch.zeros_like(weights).scatter(0, order, ordered / ordered.sum())


@pytest.mark.gpu
@pytest.mark.parametrize("wanted", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)
def test_100_000_tokens_have_the_exact_distribution(wanted: dict[str, float]) -> None:
    """Chi-squared, at the 99.9 % point. Logits are in float32, so that no two tie."""
    num, vocab, generator = 20_000, 1000, torch.Generator().manual_seed(1)
    logits = torch.randn(vocab, generator=generator) * 1.5
    reals = torch.tensor(list((REALS | {name: wanted[name] for name in REALS.keys() & wanted.keys()}).values()))
    integers = torch.tensor([int(wanted.get("top_k", 0)), 42, 0, 2**40])
    lists = torch.arange(0, 32, 2), torch.arange(16) / 8, torch.arange(500, 504), torch.ones(4, dtype=torch.bool)
    prompt = torch.arange(vocab) < 100
    rows = (reals, integers, *lists, prompt, 2 * prompt.int())
    state = SamplingRows(*(one.repeat(num, 1).cuda() for one in rows))
    steps = SampleSteps(
        random=True, top_k="top_k" in wanted, top_p="top_p" in wanted, min_p="min_p" in wanted,
        penalties="repetition" in wanted, biases="listed" in wanted, bans="listed" in wanted,
    )  # fmt: skip
    index, counts = torch.arange(num, device="cuda"), torch.zeros(vocab, dtype=torch.int64)
    assert state.output_counts is not None
    for first in range(0, 5 * num, num):
        token_ids = sample_rows(logits.cuda().expand(num, vocab), index + first, index, state, steps)
        counts += torch.bincount(token_ids.cpu(), minlength=vocab)
        state.output_counts[:] = 2 * prompt.int().cuda()
    expected = exact_distribution(logits, wanted, SamplingRows(*(one[None] for one in rows))) * 5 * num
    assert not counts[expected == 0].any()
    frequent = expected >= 10
    observed = torch.cat([counts[frequent].double(), counts[~frequent].sum()[None].double()])
    expected = torch.cat([expected[frequent], expected[~frequent].sum()[None]]).clamp(min=1e-9)
    degrees = len(expected) - 1
    limit = degrees * (1 - 2 / (9 * degrees) + 3.09 * (2 / (9 * degrees)) ** 0.5) ** 3  # Wilson and Hilferty, 1931
    assert ((observed - expected) ** 2 / expected).sum() < limit
