"""Penalties by the published numbers and by the rule in float64; biases and bans; rows without any stay bit-equal."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.kernels import UNUSED_BIAS, ban_tokens_ref, count_tokens_ref, logit_bias_ref, penalties_ref

ODD_VALUES = [0.0, -0.0, 1e-42, -1e-42, 3e38, -3e38, torch.inf, -torch.inf]


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32)


def penalise(
    logits: torch.Tensor, prompts: list[list[int]], outputs: list[list[int]], strengths: list[tuple], **kwargs
):
    in_prompt = torch.zeros(logits.shape, dtype=torch.bool)
    counts = torch.zeros(logits.shape, dtype=torch.int32)
    for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        in_prompt[row, prompt] = True
        for token_id in output:
            count_tokens_ref(counts, torch.tensor([row]), torch.tensor([token_id]))
    repetition, presence, frequency = torch.tensor(strengths).unbind(1)
    return penalties_ref(logits, in_prompt, counts, repetition, presence, frequency, **kwargs)


def b23_logits(size: int = 12) -> torch.Tensor:
    logits = torch.zeros(size)
    logits[5], logits[7], logits[9] = 2.0, -2.0, 1.0
    return logits


@pytest.mark.parametrize("place", [0, 1], ids=["penalised row first", "penalised row last"])
@pytest.mark.parametrize(
    ("strengths", "expected"),
    [
        ((1.3, 0.0, 0.0), {5: 1.538462, 7: -2.6, 9: 0.769231}),
        ((1.0, 0.5, 0.25), {5: 2.0, 7: -2.75, 9: 0.0}),
    ],
    ids=["repetition", "presence and frequency"],
)
def test_b23_published_numbers_and_an_untouched_neighbour(strengths: tuple, expected: dict, place: int) -> None:
    neighbour = torch.tensor([*ODD_VALUES, 0.1, 0.2, 0.3, 0.4])
    order = slice(None, None, -1 if place else 1)
    result = penalise(
        torch.stack([b23_logits(), neighbour][order]),
        [[5, 5, 7], [1, 2, 3]][order],
        [[7, 9, 9], [4, 4, 5]][order],
        [strengths, (1.0, 0.0, 0.0)][order],
    )
    wanted = torch.zeros(12)
    for token_id, value in expected.items():
        wanted[token_id] = value
    torch.testing.assert_close(result[place], wanted, rtol=1e-6, atol=0)
    assert torch.equal(bits(result[1 - place]), bits(neighbour))


def test_b23_first_token_feels_neither_presence_nor_frequency() -> None:
    logits = b23_logits()[None]
    assert torch.equal(bits(penalise(logits, [[5, 5, 7]], [[]], [(1.0, 2.0, 2.0)])), bits(logits))


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_penalties_equal_the_rule_in_float64(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 12))
    ids = st.lists(st.integers(0, size - 1), max_size=8)
    logits = data.draw(st.lists(st.floats(-20, 20, width=32), min_size=size, max_size=size))
    prompt, output = data.draw(ids), data.draw(ids)
    repetition = data.draw(st.floats(0.5, 2, width=32))
    presence, frequency = data.draw(st.floats(-2, 2, width=32)), data.draw(st.floats(-2, 2, width=32))
    (result,) = penalise(torch.tensor([logits]), [prompt], [output], [(repetition, presence, frequency)])
    for token_id, value in enumerate(logits):
        if token_id in prompt or token_id in output:
            value = value / repetition if value > 0 else value * repetition
        value -= frequency * output.count(token_id) + presence * (token_id in output)
        assert result[token_id].item() == pytest.approx(value, rel=1e-6, abs=1e-5)


def test_counting_touches_one_place_a_row_in_any_order_of_rows() -> None:
    counts = torch.zeros(4, 6, dtype=torch.int32)
    for _ in range(3):
        count_tokens_ref(counts, torch.tensor([3, 0]), torch.tensor([5, 2]))
    expected = torch.zeros(4, 6, dtype=torch.int32)
    expected[3, 5] = expected[0, 2] = 3
    assert torch.equal(counts, expected)


def test_b26_biases_are_added_and_unused_entries_change_no_bit() -> None:
    logits = torch.tensor([ODD_VALUES, ODD_VALUES])
    ids = torch.tensor([[7, 0, 3, 0], [0, 0, 0, 0]])
    biases = torch.tensor([[5.0, 100.0, -100.0, UNUSED_BIAS], [UNUSED_BIAS] * 4])
    result = logit_bias_ref(logits, ids, biases)
    expected = logits[0].clone()
    expected[0], expected[3] = 100.0, -100.0
    assert torch.equal(bits(result[0]), bits(expected))
    assert torch.equal(bits(result[1]), bits(logits[1]))


def test_b28_only_banned_ids_are_masked_and_the_last_id_keeps_its_logit() -> None:
    logits = torch.tensor([ODD_VALUES, ODD_VALUES])
    ids, banned = torch.tensor([[2, 6, 2, 0], [0, 0, 0, 0]]), torch.tensor([[True, True, True, False], [False] * 4])
    result = ban_tokens_ref(logits, ids, banned)
    expected = logits.clone()
    expected[0, [2, 6]] = -torch.inf
    assert torch.equal(bits(result), bits(expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_op_writes_all_of_out_in_float32_and_leaves_its_input(
    dtype: torch.dtype, nan_poison: Callable[..., torch.Tensor]
) -> None:
    logits = torch.randn(2, 12).to(dtype)
    before = logits.clone()
    ids = torch.tensor([[3, 0], [0, 0]])
    neutral = [(1.0, 0.0, 0.0)] * 2
    for op in (
        lambda out: penalise(logits, [[1], [2]], [[3], []], neutral, out=out),
        lambda out: logit_bias_ref(logits, ids, torch.full((2, 2), UNUSED_BIAS), out=out),
        lambda out: ban_tokens_ref(logits, ids, torch.zeros(2, 2, dtype=torch.bool), out=out),
    ):
        out = nan_poison(2, 12)
        assert op(out) is out
        assert torch.equal(out, before.float())
        assert torch.equal(logits, before)
