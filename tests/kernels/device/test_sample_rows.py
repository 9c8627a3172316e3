"""`sample_rows` against its reference: every operation alone and all at once, ties, odd vocabularies, poison."""

import sys
from collections.abc import Callable
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from ostinato.kernels import (
    UNUSED_BIAS,
    SampleSteps,
    SampleWorkspace,
    SamplingRows,
    sample_ref,
    sample_rows,
    sample_rows_ref,
)
from ostinato.kernels._triton import INTERPRETED

Draw = Callable[..., Tensor]
PLACES = [*[("cpu", torch.float32)] * INTERPRETED, pytest.param(("cuda", torch.bfloat16), marks=pytest.mark.gpu)]
STEPS = [one.name for one in fields(SampleSteps)]
EVERYTHING = SampleSteps(*[True] * len(STEPS))


@pytest.fixture(params=PLACES, ids=lambda place: place[0])
def place(request: pytest.FixtureRequest) -> tuple[str, torch.dtype]:
    """One dtype a device: what is random here has one code path for all, and the interpreter takes its time."""
    return request.param


def some_rows(num: int, vocab: int, device: str) -> SamplingRows:
    """Rows of all kinds: greedy and random, each filter on and off, lists from empty to seven long."""

    def random(*shape: int) -> Tensor:
        return torch.rand(*shape)

    def sometimes(on: Tensor, off: float) -> Tensor:
        return torch.where(random(num) < 0.5, on, off)

    reals = [
        torch.tensor([0.7, 1.0, 0.0, 2.0, 0.1])[torch.arange(num) % 5],
        sometimes(random(num), 1.0),
        sometimes(random(num) * 0.1, 0.0),
        sometimes(random(num) + 0.6, 1.0),
        sometimes(random(num) * 2 - 1, 0.0),
        sometimes(random(num) * 2 - 1, 0.0),
    ]
    integers = [
        sometimes(torch.randint(1, 60, (num,)), 0).long(),
        torch.randint(-(2**62), 2**62, (num,)),
        torch.arange(num) % 3,
        sometimes(torch.full((num,), 100), 0).long(),
    ]
    bias_ids, biases = torch.zeros(num, 16, dtype=torch.int64), torch.full((num, 16), UNUSED_BIAS)
    banned_ids, is_banned = torch.zeros(num, 4, dtype=torch.int64), torch.zeros(num, 4, dtype=torch.bool)
    for row in range(num):
        for ids, mark, width in ((bias_ids, biases, row % 8), (banned_ids, is_banned, row % 4)):
            used = min(width, vocab - 1)
            if used:
                ids[row, -used:] = torch.randperm(vocab)[:used].sort().values
                mark[row, -used:] = torch.randn(used) * 5 if mark is biases else True
    counts = (torch.randint(-5, 4, (num, vocab)).clamp(min=0)).to(torch.int32)
    state = torch.stack(reals, 1), torch.stack(integers, 1), bias_ids, biases, banned_ids, is_banned
    return SamplingRows(*(one.contiguous().to(device) for one in (*state, random(num, vocab) < 0.2, counts)))


def poisoned(num: int, vocab: int, device: str) -> SampleWorkspace:
    workspace = SampleWorkspace(num, vocab, device=device)
    for tensor in vars(workspace).values():
        if isinstance(tensor, Tensor):
            tensor.fill_(float("nan") if tensor.is_floating_point() else 123456789)
    return workspace


def check(logits: Tensor, rows: Tensor, state: SamplingRows, steps: SampleSteps) -> Tensor:
    """The reference computes on the CPU, where the weights of a test never come near a border or a tie of a race."""
    num, positions = len(rows), torch.arange(len(rows)) * 30
    theirs = SamplingRows(*(tensor.cpu().clone() for tensor in state.tensors()))
    expected = sample_rows_ref(logits.cpu(), positions, rows.cpu(), theirs, steps)
    out = torch.full((num + 1,), -7, dtype=torch.int64, device=logits.device)
    before, workspace = logits.clone(), poisoned(num + 1, logits.shape[1] + 9, str(logits.device))
    token_ids = sample_rows(logits, positions.to(logits.device), rows, state, steps, workspace=workspace, out=out[:num])
    assert token_ids.cpu().tolist() == expected.tolist()
    assert out[num] == -7
    assert torch.equal(logits.nan_to_num(7.0), before.nan_to_num(7.0))
    assert state.output_counts is not None
    assert theirs.output_counts is not None
    assert torch.equal(state.output_counts.cpu(), theirs.output_counts)
    return token_ids


@pytest.mark.parametrize("vocab", [1, 4099])
def test_everything_at_once_over_odd_vocabularies(vocab: int, draw: Draw, device: str) -> None:
    """Rows in any order, of a wider buffer whose other columns would win."""
    buffer = draw(5, vocab + 3, scale=3.0)
    buffer[:, vocab:] = 99.0
    rows = torch.tensor([5, 0, 3, 6, 1]).to(device)
    check(buffer[:, :vocab], rows, some_rows(7, vocab, device), EVERYTHING)


@pytest.mark.parametrize("step", STEPS)
def test_one_operation(step: str, draw: Draw, device: str) -> None:
    steps = SampleSteps(**{"random": step in ("top_k", "top_p", "min_p"), step: True})
    state = some_rows(3, 700, device)
    if steps.random:
        state.reals[:, 0] = 1.3
    check(draw(3, 700, scale=2.0), torch.arange(3).to(device), state, steps)


@pytest.fixture(params=[256, 8], ids="few {}".format)
def few(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the lower number no filtered row of a test is ranked and drawn from at once."""
    monkeypatch.setattr(sys.modules[sample_rows.__module__], "FEW", request.param)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("kind", ["levels", "long ties", "equal", "nan", "-inf", "inf", "holes", "outlier"])
def test_ties_and_rows_that_are_no_logits(kind: str, draw: Draw, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row with a tie too long for the list is searched whole."""
    vocab, num = 300, 1 if kind == "long ties" else 2
    logits = draw(2, vocab, scale=3.0)
    if kind in ("levels", "long ties"):
        logits = logits.round()
        if kind == "long ties":
            for name in ("CAPACITY", "FEW"):
                monkeypatch.setattr(sys.modules[sample_rows.__module__], name, 16)
    elif kind == "holes":
        logits[:, ::2] = float("-inf")
        logits[1, 1::4] = float("nan")
    elif kind == "outlier":
        logits[0, 7], logits[1, 8] = -60000.0, 60000.0
    else:
        logits[:] = 2.5 if kind == "equal" else float(kind)
    state = some_rows(2, vocab, device)
    state.reals[:, 0] = 1.0
    state.reals[:, 1] = torch.tensor([0.9, 0.3])
    state.integers[:, 0] = torch.tensor([vocab - 150, 40])
    check(logits[:num], torch.arange(num).to(device), state, SampleSteps(random=True, top_k=True, top_p=True))


@pytest.mark.usefixtures("few")
def test_the_ends_of_the_filters(draw: Draw, device: str) -> None:
    """k of 1, of all but one, beyond the vocabulary; p of 0, next to 1; temperatures of next to nothing and far up."""
    num = 8
    state = some_rows(num, 500, device)
    state.reals[:, 0] = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1e-40, 1e6])
    state.reals[:, 1] = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.9999999, 1e-9, 0.5, 0.5])
    state.integers[:, 0] = torch.tensor([1, 499, 10**6, 0, -1, 0, 3, 30])
    check(draw(num, 500), torch.arange(num).to(device), state, SampleSteps(random=True, top_k=True, top_p=True))


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("top_k", [0, 3, 30])
def test_min_p_keeps_what_reaches_it(top_k: int, draw: Draw, device: str) -> None:
    """1 keeps the most probable tokens, whose weight it is, and of two such tokens draws either."""
    state, logits = some_rows(6, 300, device), draw(6, 300)
    logits[:, [20, 200]] = 9.0
    state.reals[:, 0], state.reals[:, 1], state.reals[:, 2] = 1.0, 1.0, 1.0
    state.integers[:, 0] = top_k
    steps = SampleSteps(random=True, top_k=True, min_p=True)
    drawn = check(logits, torch.arange(6).to(device), state, steps)
    assert set(drawn.tolist()) == {20, 200}


def test_bans_end_at_the_free_position(draw: Draw, device: str) -> None:
    """Row i stands at position 30 i: the last that is not free yet, and the first that is."""
    state, logits = some_rows(4, 300, device), draw(4, 300)
    state.banned_ids[:], state.is_banned[:] = torch.tensor([0, 128, 255, 299], device=device), True
    logits[:, [0, 128, 255, 299]] = torch.tensor([5.0, 8.0, 7.0, 6.0], device=device).to(logits.dtype)
    state.integers[:, 3] = torch.tensor([1, 30, 61, 0], device=device)
    drawn = check(logits, torch.arange(4).to(device), state, SampleSteps(bans=True))
    assert [token in (0, 128, 255, 299) for token in drawn.tolist()] == [False, True, False, True]


@pytest.mark.parametrize("vocab", [152064, 2**18, 2**18 + 1])
def test_ties_in_the_largest_vocabularies(vocab: int, device: str) -> None:
    """B27: the lowest id wins, at temperature 0 and for a k of 1; the last id can. Beyond 256k, by the reference."""
    logits, state = torch.zeros(3, vocab, device=device), some_rows(3, 1, device)
    logits[:2, [7, 9000, 150000]] = 5.0
    logits[2, -1] = 5.0
    state.reals[:, 0], state.integers[:, 0] = torch.tensor([0.0, 1.0, 1.0], device=device), 1
    index = torch.arange(3, device=device)
    tokens = sample_rows(logits, index, index, state, SampleSteps(random=True, top_k=True))
    assert tokens.tolist() == [7, 7, vocab - 1]


def test_refuses_what_it_was_not_made_for(draw: Draw, device: str) -> None:
    logits, state, index = draw(3, 40), some_rows(3, 40, device), torch.arange(3, device=device)

    def refused(sentence: str, **other: object) -> None:
        made = {"logits": logits, "positions": index, "rows": index, "state": state, "steps": EVERYTHING} | other
        with pytest.raises(AssertionError, match=sentence):
            sample_rows(**made)  # type: ignore[arg-type]

    refused("for 2 rows, not 3", workspace=SampleWorkspace(2, 40, device=device))
    refused("for 39 tokens, not 40", workspace=SampleWorkspace(3, 39, device=device))
    refused("power of two, not 3", state=replace(state, is_banned=state.is_banned[:, 1:].contiguous()))
    refused("stand on token counts", state=replace(state, in_prompt=None, output_counts=None))
    refused("rows needs one element for each of 3", rows=index[:2])
    refused("contiguous", logits=draw(3, 80)[:, ::2])


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [128256, 262144])
def test_large_rows_on_a_gpu(vocab: int) -> None:
    """The same token as the reference unless it was a near-tie: 1 of these 64 rows at most, and never out of bounds."""
    state = some_rows(64, vocab, "cuda")
    logits = (torch.randn(64, vocab) * 2.5).bfloat16()
    rows, positions = torch.arange(64), torch.arange(64) * 7
    theirs = SamplingRows(*(tensor.cpu().clone() for tensor in state.tensors()))
    expected = sample_rows_ref(logits, positions, rows, theirs, EVERYTHING)
    arguments = logits.cuda(), positions.cuda(), rows.cuda(), state, EVERYTHING
    token_ids = sample_rows(*arguments)
    assert (token_ids.cpu() != expected).sum() <= 1
    assert state.output_counts is not None
    state.output_counts.copy_(theirs.output_counts)
    state.output_counts[rows.cuda(), expected.cuda()] -= 1
    assert torch.equal(sample_rows(*arguments), token_ids), "the same inputs gave other tokens"


@pytest.mark.gpu
def test_a_recorded_chain_follows_its_inputs() -> None:
    state, steps = some_rows(4, 50001, "cuda"), SampleSteps(random=True, top_k=True, top_p=True, min_p=True)
    state.reals[:, 0] = 0.9
    logits, positions = torch.randn(4, 50001, device="cuda") * 3, torch.zeros(4, dtype=torch.int64, device="cuda")
    rows, workspace = torch.arange(4, device="cuda"), SampleWorkspace(4, 50001, device="cuda")
    out = torch.empty(4, dtype=torch.int64, device="cuda")
    sample_rows(logits, positions, rows, state, steps, workspace=workspace, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sample_rows(logits, positions, rows, state, steps, workspace=workspace, out=out)
    for step in range(20):
        logits.normal_(std=3)
        positions.fill_(step)
        graph.replay()
        assert torch.equal(out, sample_rows(logits, positions, rows, state, steps))
        reals, integers = state.reals.unbind(1), state.integers.unbind(1)
        numbers = reals[0], integers[0], reals[1], reals[2], integers[1], integers[2]
        assert (out != sample_ref(logits, *numbers, positions)).sum() <= 1
