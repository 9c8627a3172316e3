"""The draw: greedy and tied rows, temperatures, filters against float64 in plain Python, distribution, independence."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ostinato.kernels import greedy_ref, sample_ref
from ostinato.kernels.philox import random_bits_ref
from ostinato.kernels.sample import filter_ref

OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0, "sample_index": 0, "position": 0}
CHI_SQUARED_999 = {2: 13.8, 5: 20.5, 7: 24.3}


def draw(logits: torch.Tensor, rows: list[dict], *, every_filter: bool = False, out: torch.Tensor | None = None):
    """`sample_ref` with one dict of numbers a row, and the filters that a row uses, or all of them."""

    def column(name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([row.get(name, OFF[name]) for row in rows], dtype=dtype, device=logits.device)

    def filter_column(name: str, dtype: torch.dtype) -> torch.Tensor | None:
        return column(name, dtype) if every_filter or any(name in row for row in rows) else None

    return sample_ref(
        logits,
        column("temperature", torch.float32),
        filter_column("top_k", torch.int64),
        filter_column("top_p", torch.float32),
        filter_column("min_p", torch.float32),
        column("seed", torch.int64),
        column("sample_index", torch.int64),
        column("position", torch.int64),
        out=out,
    )


def kept(logits: torch.Tensor, top_k: list[int] | None = None, top_p=None, min_p=None) -> list[list[int]]:
    """The ids that survive the filters, a list a row, at temperature 1."""
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    as_column = [
        None if values is None else torch.tensor(values, dtype=dtype)
        for values, dtype in ((top_k, torch.int64), (top_p, torch.float32), (min_p, torch.float32))
    ]
    return [row.nonzero().flatten().tolist() for row in filter_ref(logits, weights, *as_column)]


def kept_in_float64(logits: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if 1 <= top_k < len(logits):
        order = order[:top_k]
    weight = {i: math.exp(logits[i] - max(logits)) for i in order}
    if top_p < 1:
        total, above, prefix = sum(weight.values()), 0.0, []
        for i in order:
            if prefix and above >= top_p * total:
                break
            prefix.append(i)
            above += weight[i]
        order = prefix
    return {i for i in order if weight[i] >= min_p}


def chi_squared(token_ids: torch.Tensor, probabilities: torch.Tensor) -> float:
    expected = probabilities.double() / probabilities.double().sum() * len(token_ids)
    counts = torch.bincount(token_ids, minlength=len(expected)).double()
    assert not counts[expected == 0].any(), "a token without probability was drawn"
    return float(((counts - expected)[expected > 0] ** 2 / expected[expected > 0]).sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch", ["alone", "beside a random row"])
def test_b27_a_tie_goes_to_the_lowest_id_on_every_road(dtype: torch.dtype, batch: str) -> None:
    logits = torch.zeros(1, 152064, dtype=dtype)
    logits[:, [7, 9000, 150000]] = 5.0
    rows = [{"temperature": 0.0}]
    if batch != "alone":
        logits, rows = torch.cat([logits, torch.randn(1, 152064).to(dtype)]), [*rows, {"seed": 3, "top_p": 0.9}]
    assert greedy_ref(logits)[0] == 7
    assert draw(logits, rows)[0] == 7
    assert draw(logits, rows, every_filter=True)[0] == 7
    for seed in range(2):
        assert draw(logits, [{"top_k": 1, "seed": seed}, *rows[1:]])[0] == 7
    assert kept(logits.float(), top_k=[2] * len(rows))[0] == [7, 9000]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9, "top_k": 5}], ids=["no filter", "top_p top_k"])
@pytest.mark.parametrize("temperature", [0.0, 1e-45, 1e-40, 1e-6, 3e-4])
def test_b21_zero_and_tiny_temperatures_take_the_best_token(temperature: float, filters: dict, dtype) -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0], [0.1, 0.2, 0.3]], dtype=dtype)
    for seed in range(20):
        rows = [{"temperature": temperature, "seed": seed, **filters}, {"temperature": 0.7, "seed": seed}]
        assert draw(logits[:1], rows[:1]).tolist() == [0]
        assert draw(logits, rows)[0] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1e6, 3e38, math.inf])
def test_b21_every_positive_temperature_gives_its_distribution(temperature: float, dtype: torch.dtype) -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0]], dtype=dtype)
    rows = [{"temperature": temperature, "position": p} for p in range(3000)]
    token_ids = draw(logits.expand(3000, 3), rows)
    assert chi_squared(token_ids, torch.softmax(logits[0].double() / temperature, 0)) < CHI_SQUARED_999[2]


def test_a_token_at_minus_infinity_is_not_drawn_at_any_temperature() -> None:
    logits = torch.tensor([[-torch.inf, 1.0, -torch.inf, 0.0]])
    for temperature in (1e-45, 1.0, 1e38, math.inf):
        rows = [{"temperature": temperature, "position": p} for p in range(200)]
        assert set(draw(logits.expand(200, 4), rows).tolist()) <= {1, 3}


@pytest.mark.parametrize(
    "row",
    [
        [math.nan] * 5,
        [-math.inf] * 5,
        [math.inf] * 5,
        [0.0, math.nan, math.inf, -math.inf, 1.0],
        [3e38, -3e38, 3e38, -3e38, 0.0],
    ],
    ids=["nan", "-inf", "inf", "mixed", "huge"],
)
@pytest.mark.parametrize("temperature", [0.0, 1e-45, 1.0, 3e38])
def test_whatever_the_logits_are_the_token_is_in_the_vocabulary(row: list[float], temperature: float) -> None:
    for filters in ({}, {"top_k": 2, "top_p": 0.5, "min_p": 0.1}):
        for seed in range(10):
            (token_id,) = draw(torch.tensor([row]), [{"temperature": temperature, "seed": seed, **filters}]).tolist()
            assert 0 <= token_id < 5
            assert math.isnan(row[0]) or not math.isnan(row[token_id])


def test_b24_edges_of_top_k() -> None:
    logits = torch.arange(8.0).flip(0)[None].expand(6, 8)
    everything = list(range(8))
    assert kept(logits, top_k=[-1, 0, 1, 8, 9, 10**6]) == [everything, everything, [0], *[everything] * 3]


def test_b24_edges_of_top_p() -> None:
    logits = torch.arange(8.0).flip(0)[None].expand(4, 8)
    assert kept(logits, top_p=[1.0, 0.999999, 1e-9, 0.0]) == [list(range(8)), list(range(8)), [0], [0]]
    # exp(-30) is far below a float32 unit of the sum: with a float sum, 1.0 is reached before the last token.
    assert kept(torch.tensor([[0.0, -30.0, -90.0, -200.0, -math.inf]]), top_p=[1.0]) == [[0, 1, 2, 3, 4]]


def test_b24_edges_of_min_p() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0]]).expand(3, 4)
    assert kept(logits, min_p=[0.0, 1.0, 0.2]) == [[0, 1, 2, 3], [1, 3], [1, 2, 3]]


def test_b24_a_row_is_the_same_alone_and_among_others() -> None:
    logits = torch.randn(6, 8)
    numbers = {
        "top_k": [0, 1, 3, 0, 5, 10**6],
        "top_p": [1.0, 0.3, 0.9, 0.5, 1.0, 0.0],
        "min_p": [0, 0, 0.1, 0, 0.9, 0],
    }
    together = kept(logits, **numbers)
    alone = [kept(logits[i : i + 1], **{k: v[i : i + 1] for k, v in numbers.items()})[0] for i in range(6)]
    assert together == alone
    assert all(together)


@pytest.mark.parametrize("vocab_size", [1, 2, 5])
def test_the_border_between_tied_tokens_is_drawn_by_id(vocab_size: int) -> None:
    logits = torch.full((1, vocab_size), 2.5)
    for k in range(1, vocab_size + 1):
        assert kept(logits, top_k=[k]) == [list(range(k))]
        assert kept(logits, top_p=[(k - 0.5) / vocab_size]) == [list(range(k))]
    assert kept(torch.tensor([[0.0, -0.0, 0.0]]), top_k=[2]) == [[0, 1]]


LOGITS = st.lists(st.floats(-30, 30, width=16) | st.sampled_from([-2.0, 0.0, -0.0, 4.0]), min_size=1, max_size=40)


@settings(deadline=None)
@given(LOGITS, st.integers(-1, 45), st.floats(0, 1), st.sampled_from([0.0, 1e-3, 0.1, 0.5, 1.0]))
def test_filters_equal_the_rule_in_float64(logits: list[float], top_k: int, top_p: float, min_p: float) -> None:
    """Up to 1e-6 in p and in min_p: weights are float32, and a token may stand that near to a border."""
    (ids,) = kept(torch.tensor([logits]), [top_k], [top_p], [min_p])
    sharpest = kept_in_float64(logits, top_k, top_p - 1e-6, min(min_p * (1 + 1e-6), 1.0))
    loosest = kept_in_float64(logits, top_k, top_p + 1e-6 if top_p < 1 else 1.0, min_p * (1 - 1e-6))
    assert sharpest <= set(ids) <= loosest
    assert min(range(len(logits)), key=lambda i: (-logits[i], i)) in ids


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_filters_keep_what_transformers_keeps(temperature: float) -> None:
    logits = torch.randn(64, 1000) * 3
    top_k, top_p, min_p = 50, 0.9, 0.02
    warped = logits
    for warper in (
        TemperatureLogitsWarper(temperature),
        TopKLogitsWarper(top_k),
        TopPLogitsWarper(top_p),
        MinPLogitsWarper(min_p),
    ):
        warped = warper(None, warped)
    theirs = [row.isfinite().nonzero().flatten().tolist() for row in warped]
    assert kept(logits / temperature, [top_k] * 64, [top_p] * 64, [min_p] * 64) == theirs


@pytest.mark.parametrize(
    ("filters", "survivors", "key"),
    [
        ({}, 8, "seed"),
        ({}, 8, "sample_index"),
        ({}, 8, "position"),
        ({"top_k": 6}, 6, "position"),
        ({"top_p": 0.95}, 6, "position"),
        ({"min_p": 0.14}, 3, "position"),
        ({"top_k": 6, "min_p": 0.14}, 3, "position"),
    ],
    ids=lambda value: "-".join(value) or "no filter" if isinstance(value, dict) else str(value),
)
def test_tokens_have_the_distribution_of_the_softmax(filters: dict, survivors: int, key: str) -> None:
    """Whichever part of the key the streams differ in; 3,000 draws."""
    logits = torch.tensor([0.0, 1.5, -1.0, 0.7, -0.2, 1.0, -2.5, 0.4])
    if "min_p" in filters:
        logits[[0, 2, 4, 6, 7]] -= 2.0
    probabilities = torch.softmax(logits.double(), 0)
    probabilities[probabilities.sort(descending=True).indices[survivors:]] = 0
    token_ids = draw(logits.expand(3000, 8), [{**filters, key: i} for i in range(3000)])
    assert chi_squared(token_ids, probabilities) < CHI_SQUARED_999[survivors - 1]


def test_successive_tokens_of_a_stream_are_independent() -> None:
    """Pairs of draws from three equal tokens at positions p and p + 1: nine equal pairs."""
    token_ids = draw(torch.zeros(6001, 3), [{"seed": 5, "position": p} for p in range(6001)])
    assert chi_squared(3 * token_ids[:6000:2] + token_ids[1::2], torch.ones(9)) < 26.1  # 8 degrees, 99.9 %


@pytest.mark.parametrize("vocab_size", [5, 1001, 40001])
def test_b22_a_row_gets_the_same_token_alone_and_anywhere_in_a_batch(vocab_size: int) -> None:
    """Odd sizes too, so that rows begin at every alignment."""
    logits = torch.randn(6, vocab_size)
    rows = [
        {"temperature": 0.8, "seed": 42, "position": 9},
        {"temperature": 0.0},
        {"temperature": 1.3, "seed": -(2**63), "top_p": 0.9},
        {"seed": 42, "sample_index": 1, "top_k": 3},
        {"seed": 7, "min_p": 0.05, "top_p": 0.5},
        {"temperature": 5.0, "seed": 1, "top_k": 40, "top_p": 0.95, "min_p": 0.01},
    ]
    together = draw(logits, rows)
    for order in ([5, 4, 3, 2, 1, 0], [2, 0, 4], [3]):
        assert torch.equal(draw(logits[order], [rows[i] for i in order]), together[order])


def test_a_token_does_not_depend_on_the_road() -> None:
    """All-greedy batches and batches without filters may go a shorter way."""
    logits = (torch.randn(60, 500) * 2).bfloat16()
    unfiltered = [{"temperature": 0.9, "seed": i, "position": i % 7} for i in range(60)]
    assert torch.equal(draw(logits, unfiltered), draw(logits, unfiltered, every_filter=True))
    assert torch.equal(draw(logits, unfiltered), draw(logits.float(), unfiltered))
    for number in ({"top_k": 500}, {"top_p": 1.0}, {"min_p": 0.0}):
        assert torch.equal(draw(logits, [{**row, **number} for row in unfiltered]), draw(logits, unfiltered))
    assert torch.equal(draw(logits, [{"temperature": 0.0, "top_p": 0.5}] * 60), greedy_ref(logits))


def test_everything_is_written_to_out(nan_poison: Callable[..., torch.Tensor]) -> None:
    logits = torch.randn(3, 9)
    rows = [{"temperature": 0.0}, {"seed": 1}, {"seed": 2, "top_k": 2}]
    out = nan_poison(3, dtype=torch.int64)
    assert draw(logits, rows, out=out) is out
    assert torch.equal(out, draw(logits, rows))
    out = nan_poison(3, dtype=torch.int64)
    assert greedy_ref(logits, out=out) is out
    assert torch.equal(out, greedy_ref(logits))


def test_sampling_reads_nothing_back_and_has_no_shape_that_depends_on_data() -> None:
    """Meta tensors have shapes but no values, so either would raise."""
    assert draw(torch.empty(4, 100, device="meta"), [OFF] * 4).shape == (4,)


def test_b22_torch_s_generators_are_neither_read_nor_moved() -> None:
    logits, rows = torch.randn(4, 50), [{"seed": i} for i in range(4)]
    state = torch.get_rng_state()
    first = draw(logits, rows)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(99)
    assert torch.equal(draw(logits, rows), first)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [8, 1001, 128256])
def test_a_cuda_device_draws_what_the_cpu_draws(vocab_size: int) -> None:
    """Random bits exactly; tokens unless two race times are within a rounding of exp or log1p, about once in 10**6."""
    key = torch.arange(32) * 2**57, torch.arange(32) % 2, torch.arange(32)
    assert torch.equal(
        random_bits_ref(*(part.cuda() for part in key), vocab_size).cpu(), random_bits_ref(*key, vocab_size)
    )
    numbers = torch.arange(32)
    columns = (numbers % 4 * 0.6, numbers % 3 * 5, 1 - numbers % 5 * 0.2, numbers % 2 * 0.05, *key)
    logits = torch.randn(32, vocab_size) * 3
    assert torch.equal(
        sample_ref(logits.cuda(), *(column.cuda() for column in columns)).cpu(), sample_ref(logits, *columns)
    )


@pytest.mark.gpu
def test_a_recorded_draw_follows_its_inputs() -> None:
    logits, positions = torch.randn(4, 1001, device="cuda"), torch.zeros(4, dtype=torch.int64, device="cuda")
    temperature, top_p = torch.full((4,), 0.8, device="cuda"), torch.full((4,), 0.9, device="cuda")
    numbers = temperature, None, top_p, None, positions + 42, positions * 0, positions
    out = torch.full((4,), -1, device="cuda")
    sample_ref(logits, *numbers, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sample_ref(logits, *numbers, out=out)
    for _ in range(3):
        logits.normal_()
        positions += 1
        graph.replay()
        assert torch.equal(out, sample_ref(logits, *numbers))
