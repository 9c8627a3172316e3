"""Log-probabilities against float64, and the order of the most probable tokens."""

from collections.abc import Callable

import pytest
import torch

from ostinato.kernels import greedy_ref, logprobs_ref


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab_size", [1, 7, 1001])
def test_logprobs_are_those_of_the_softmax(dtype: torch.dtype, vocab_size: int) -> None:
    logits = (torch.randn(3, vocab_size) * 5).to(dtype)
    token_ids = torch.tensor([0, vocab_size // 2, vocab_size - 1])
    token_logprobs, top_ids, top_logprobs = logprobs_ref(logits, token_ids, 3)
    exact = torch.log_softmax(logits.double(), -1)
    # float32 sums over up to 1001 terms, logprobs up to about 40.
    torch.testing.assert_close(token_logprobs.double(), exact[range(3), token_ids], rtol=1e-6, atol=2e-5)
    torch.testing.assert_close(top_logprobs.double(), exact.gather(1, top_ids), rtol=1e-6, atol=2e-5)
    assert top_ids.shape == (3, min(3, vocab_size))
    assert (top_logprobs.diff() <= 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_b27_tied_tokens_come_in_the_order_of_their_ids(dtype: torch.dtype) -> None:
    logits = torch.zeros(2, 152064, dtype=dtype)
    logits[:, [150000, 7, 9000]] = 5.0
    logits[1, 40] = -0.0
    _, top_ids, _ = logprobs_ref(logits, torch.tensor([0, 1]), 5)
    assert top_ids.tolist() == [[7, 9000, 150000, 0, 1]] * 2
    assert torch.equal(top_ids[:, 0], greedy_ref(logits))


def test_a_shorter_list_is_a_prefix_of_a_longer_one() -> None:
    logits = torch.randint(0, 4, (4, 50)).float()
    longest = logprobs_ref(logits, torch.zeros(4, dtype=torch.int64), 20)
    for k in range(20):
        shorter = logprobs_ref(logits, torch.zeros(4, dtype=torch.int64), k)
        assert torch.equal(shorter[1], longest[1][:, :k])
        assert torch.equal(shorter[2], longest[2][:, :k])
        assert torch.equal(shorter[0], longest[0])


def test_a_row_is_bitwise_the_same_alone_and_in_a_batch() -> None:
    logits, token_ids = torch.randn(5, 1001), torch.arange(5)
    together = logprobs_ref(logits, token_ids, 4)
    for row in range(5):
        alone = logprobs_ref(logits[row : row + 1], token_ids[row : row + 1], 4)
        assert all(torch.equal(a[0], b[row]) for a, b in zip(alone, together, strict=True))


def test_impossible_and_undefined_logits_come_last_and_ids_stay_in_range() -> None:
    logits = torch.tensor([[-torch.inf, 1.0, torch.nan, 2.0]])
    token_logprobs, top_ids, _ = logprobs_ref(logits[:, [0, 1, 3]], torch.tensor([2]), 3)
    assert top_ids.tolist() == [[2, 1, 0]]
    assert token_logprobs.item() == pytest.approx(-0.3132617)
    assert logprobs_ref(logits, torch.tensor([2]), 4)[1].tolist() == [[3, 1, 0, 2]]


def test_everything_is_written_to_out(nan_poison: Callable[..., torch.Tensor]) -> None:
    logits, token_ids = torch.randn(3, 9), torch.tensor([1, 2, 3])
    out = nan_poison(3), nan_poison(3, 2, dtype=torch.int64), nan_poison(3, 2)
    assert logprobs_ref(logits, token_ids, 2, out=out) is out
    assert all(torch.equal(a, b) for a, b in zip(out, logprobs_ref(logits, token_ids, 2), strict=True))
