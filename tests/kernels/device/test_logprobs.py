"""`logprobs` against float64: the values, the order of the most probable tokens, rows that are no logits."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ostinato.kernels import LogprobsWorkspace, logprobs, logprobs_ref
from ostinato.kernels._triton import INTERPRETED

Draw = Callable[..., Tensor]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
PLACES = [*[("cpu", torch.float32)] * INTERPRETED, *(pytest.param(("cuda", d), marks=pytest.mark.gpu) for d in DTYPES)]
# Float32 sums of up to 2**18 exponentials, summed in stretches: some 2**-20 of a logarithm up to 30.
NEAR = {"rtol": 2e-6, "atol": 1e-5}


@pytest.fixture(params=PLACES, ids=lambda place: f"{place[0]}-{place[1]}".replace("torch.", ""))
def place(request: pytest.FixtureRequest) -> tuple[str, torch.dtype]:
    """One dtype in the interpreter: what is widened first has one code path for all."""
    return request.param


def check(logits: Tensor, token_ids: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Everything is written where it should be, over poison, and k ids are exactly those of the reference."""
    num_rows, vocab = logits.shape
    workspace = LogprobsWorkspace(num_rows + 1, vocab + 5000, device=logits.device)
    for tensor in (workspace.largest, workspace.sums):
        tensor.fill_(float("nan"))
    workspace.keys.fill_(2**62)
    poison = logits.new_full((num_rows + 1,), float("nan"), dtype=torch.float32)
    tops = torch.full((num_rows, k), -7, device=logits.device), poison.new_full((num_rows, k), float("nan"))
    out = poison[:num_rows], *tops
    before = logits.clone()
    assert logprobs(logits, token_ids, k, workspace=workspace, out=out) is out
    assert poison[num_rows].isnan()
    assert torch.equal(logits.nan_to_num(7.0), before.nan_to_num(7.0))
    exact = torch.log_softmax(logits.double(), -1)
    assert torch.equal(out[1], logprobs_ref(logits, token_ids, k)[1])
    torch.testing.assert_close(out[0].double(), exact.gather(1, token_ids[:, None])[:, 0], equal_nan=True, **NEAR)
    torch.testing.assert_close(out[2].double(), exact.gather(1, out[1]), equal_nan=True, **NEAR)
    return out


@pytest.mark.parametrize(("vocab", "k"), [(1, 1), (63, 20), (4099, 20), (4099, 0)])
def test_log_probabilities_are_those_of_the_softmax(vocab: int, k: int, draw: Draw, device: str) -> None:
    """Rows of a wider buffer whose other columns would come first."""
    buffer = draw(3, vocab + 3, scale=3.0)
    buffer[:, vocab:] = 99.0
    check(buffer[:, :vocab], torch.tensor([0, vocab // 2, vocab - 1], device=device), k)


@pytest.mark.parametrize("kind", ["levels", "equal", "zeros", "nan", "-inf", "inf", "holes", "one group"])
def test_ties_and_rows_that_are_no_logits(kind: str, draw: Draw, device: str) -> None:
    logits = draw(2, 4500, scale=2.0)
    if kind == "levels":
        logits = logits.round()
    elif kind == "zeros":
        logits[:] = 0.0
        logits[:, ::2] = -0.0
    elif kind == "holes":
        logits[:, 100:] = float("-inf")
        logits[1, 3] = float("nan")
    elif kind == "one group":
        logits[:, 4416:4450] = 30.0
    else:
        logits[1] = 2.5 if kind == "equal" else float(kind)
    check(logits, torch.tensor([7, 4400], device=device), 20)


def test_a_row_is_bitwise_the_same_alone_and_in_a_batch_and_a_shorter_list_is_a_prefix(draw: Draw, device: str) -> None:
    logits, token_ids = draw(3, 5000, scale=3.0), torch.arange(3, device=device)
    together = logprobs(logits, token_ids, 9)
    for row in range(3):
        alone = logprobs(logits[row : row + 1], token_ids[row : row + 1], 4)
        for mine, theirs in zip(alone, together, strict=True):
            assert torch.equal(mine[0], theirs[row, :4] if theirs.dim() > 1 else theirs[row])


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [128256, 262144])
def test_large_rows_on_a_gpu(vocab: int) -> None:
    logits = (torch.randn(33, vocab, device="cuda") * 2.5).bfloat16()
    check(logits, torch.arange(33, device="cuda") * 3000, 20)


@pytest.mark.gpu
def test_a_recorded_chain_follows_its_inputs() -> None:
    logits, token_ids = torch.randn(4, 50001, device="cuda"), torch.arange(4, device="cuda")
    workspace, out = LogprobsWorkspace(4, 50001, device="cuda"), logprobs(logits, token_ids, 20)
    logprobs(logits, token_ids, 20, workspace=workspace, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logprobs(logits, token_ids, 20, workspace=workspace, out=out)
    for step in range(10):
        logits.normal_(std=3)
        token_ids.fill_(5000 * step)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(out, logprobs(logits, token_ids, 20), strict=True))
