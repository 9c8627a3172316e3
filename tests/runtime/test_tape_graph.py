"""The CPU tape behaves like a capture: nothing is computed, addresses are fixed, freed memory is shared."""

import gc

import pytest
import torch
from torch import Tensor

from ostinato.runtime.graph_backend import CaptureError
from ostinato.runtime.graph_capture import aliased_outputs, capture_into_graph
from ostinato.runtime.tape_graph import TapeBackend, TapeGraph
from ostinato.runtime.tape_pool import TapePool

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _inference() -> object:
    with torch.inference_mode():
        yield


@pytest.fixture
def backend() -> TapeBackend:
    return TapeBackend()


@pytest.fixture
def pool(backend: TapeBackend) -> TapePool:
    made = backend.new_pool()
    assert isinstance(made, TapePool)
    return made


def test_a_capture_computes_nothing_and_a_replay_runs_no_python(pool: TapePool) -> None:
    x, out, calls = torch.tensor([1.0, 2.0]), torch.zeros(2), []

    def run() -> Tensor:
        calls.append(None)
        return torch.add(x * 2, 1, out=out)

    graph, returned = capture_into_graph(run, pool, CPU, None)
    assert returned is out or returned.data_ptr() == out.data_ptr()
    assert out.tolist() == [0, 0]
    graph.replay()
    assert out.tolist() == [3, 5]
    x.copy_(torch.tensor([10.0, 20.0]))
    graph.replay()
    assert out.tolist() == [21, 41]
    assert len(calls) == 1


def test_views_lists_and_in_place_operators(pool: TapePool) -> None:
    x, state, out = torch.randn(4, 6), torch.zeros(4, 2), torch.zeros(4, 2)

    def run() -> None:
        first, second = (x + 1).chunk(2, dim=1)
        values, indices = (first * second).topk(2, dim=1)
        state.add_(values)
        out.copy_(state.gather(1, indices % 2).reshape(-1).view(4, 2))

    expected_state = torch.zeros(4, 2)
    graph, _ = capture_into_graph(run, pool, CPU, None)
    for _ in range(3):
        x.normal_()
        values, indices = ((x + 1)[:, :3] * (x + 1)[:, 3:]).topk(2, dim=1)
        expected_state += values
        graph.replay()
        assert torch.equal(out, expected_state.gather(1, indices % 2))


def test_freed_memory_is_used_again_within_a_capture_and_by_later_ones(pool: TapePool) -> None:
    x, addresses = torch.randn(64), []

    def chain() -> Tensor:
        y = x + 1
        for _ in range(6):
            addresses.append(y.data_ptr())
            y = y * 2
        return y

    graphs = [capture_into_graph(chain, pool, CPU, None) for _ in range(3)]
    assert len(set(addresses[:6])) == 2
    outputs = [output.data_ptr() for _, output in graphs]
    assert len(set(outputs)) == 3, "an output that is referenced keeps its block"
    assert outputs[0] not in addresses[6:]
    assert set(addresses[6:12]) & set(addresses[:6])


def test_a_block_lives_as_long_as_its_last_view(pool: TapePool) -> None:
    x = torch.randn(64)

    def run() -> tuple[Tensor, int]:
        base = x + 1
        view = base.view(8, 8)[1:].t()
        del base
        return view, (x * 2).data_ptr()

    _, (view, other) = capture_into_graph(run, pool, CPU, None)
    addresses = range(view.untyped_storage().data_ptr(), view.untyped_storage().data_ptr() + 256)
    assert other not in addresses


def test_sharing_hazard_shows(pool: TapePool) -> None:
    """B39: an output left in the pool is overwritten by a graph that was captured *earlier*."""
    x = torch.arange(16.0)

    def first() -> Tensor:
        scratch = x + 1
        result = scratch * 2
        return result

    early, _ = capture_into_graph(first, pool, CPU, None)
    late, held = capture_into_graph(lambda: x * 10, pool, CPU, None)
    late.replay()
    assert torch.equal(held, x * 10)
    early.replay()
    assert not torch.equal(held, x * 10)
    assert aliased_outputs(pool, {"held": held, "x": x}) == ["held"]


@pytest.mark.parametrize(
    ("name", "run"),
    [
        ("item", lambda x: (x.sum() > 0).item()),
        ("bool", lambda x: bool(x.sum() > 0)),
        ("tolist", lambda x: (x + 1).tolist()),
        ("nonzero", lambda x: x.nonzero()),
        ("masked-select", lambda x: x.masked_select(x > 0)),
        ("mask-index", lambda x: x[x > 0]),
        ("mask-write", lambda x: x.__setitem__(x > 0, torch.ones(()))),
        ("unique", lambda x: x.unique()),
        ("equal", lambda x: torch.equal(x, x)),
        ("rand", lambda x: x + torch.rand(4)),
        ("bernoulli", lambda x: x.bernoulli_()),
        ("multinomial", lambda x: torch.multinomial(x.abs() + 1, 1)),
        ("dropout", lambda x: torch.nn.functional.dropout(x, 0.5)),
        ("host-list", lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0])),
    ],
)
def test_what_a_capture_cannot_hold_is_refused(pool: TapePool, name: str, run: object) -> None:
    x = torch.randn(4)
    with pytest.raises(CaptureError):
        capture_into_graph(lambda: run(x), pool, CPU, None)
    graph, _ = capture_into_graph(lambda: torch.add(x, 1, out=x), pool, CPU, None)
    before = x.clone()
    graph.replay()
    assert torch.equal(x, before + 1)


def test_memory_of_a_graph_that_is_reset_goes_back(backend: TapeBackend, pool: TapePool) -> None:
    x = torch.randn(1 << 19)

    def run() -> None:
        (x + 1).mul_(2)

    graphs = [capture_into_graph(run, pool, CPU, None)[0] for _ in range(3)]
    one = backend.memory_bytes()
    assert 0 < one < 2 * x.nbytes, "scratch is shared"
    for graph in graphs:
        assert backend.memory_bytes() == one
        graph.reset()
    assert backend.memory_bytes() == 0


def test_empty_tensors_and_no_operators(pool: TapePool) -> None:
    graph, out = capture_into_graph(lambda: torch.zeros(0, 3) + 1, pool, CPU, None)
    graph.replay()
    assert out.shape == (0, 3)
    graph, _ = capture_into_graph(lambda: None, pool, CPU, None)
    assert isinstance(graph, TapeGraph)
    assert graph.num_operators == 0


def test_a_tape_survives_the_loss_of_everything_it_read(pool: TapePool) -> None:
    """Strong ownership of what lies outside the pool, whatever the allocator does meanwhile."""
    x, out = torch.randn(1024), torch.zeros(1024)
    expected = x * 3
    graph, _ = capture_into_graph(lambda x=x: torch.mul(x, 3, out=out), pool, CPU, None)
    del x
    gc.collect()
    [torch.full((1024,), 7.0) for _ in range(20)]
    graph.replay()
    assert torch.equal(out, expected)


def test_a_pool_is_filled_in_any_mode(backend: TapeBackend, pool: TapePool) -> None:
    """Though a capture in inference mode made its segments."""
    capture_into_graph(lambda: torch.ones(3) + 1, pool, CPU, None)
    with torch.inference_mode(False):
        backend.fill_pool(pool, 0xFF)
    assert pool.num_bytes > 0
    assert all(segment.eq(0xFF).all() for segment in pool._segments.values())
