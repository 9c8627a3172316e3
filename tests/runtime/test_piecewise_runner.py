"""Regions: replayed in any order from one pool, and what they hand out."""

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato.runtime import cuda_graph_runner
from ostinato.runtime.cuda_backend import graph_backend
from ostinato.runtime.dummy_rows import PlanTarget, RowInfo, RowInputs
from ostinato.runtime.graph_buckets import SlotLease
from ostinato.runtime.graph_capture import aliased_outputs, capture_into_graph
from ostinato.runtime.graph_reason import Reason
from ostinato.runtime.piecewise_config import (
    InputSpec,
    PiecewiseCallInputs,
    PiecewiseCaptureShape,
    PiecewiseConfig,
    PiecewiseGraphData,
    PiecewiseGraphKey,
)
from ostinato.runtime.piecewise_output import PiecewiseOutput
from ostinato.runtime.piecewise_runner import PiecewiseCudaGraphRunner
from ostinato.runtime.static_buffers import GraphResources, Planner, StaticBuffers

CPU = torch.device("cpu")
SIZES = (1, 2, 4, 8)
WIDTH = 6


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


class Steps:
    """Notes declare, plan and commit of each region."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def open_rows(self, rids: Sequence[int]) -> None: ...
    def reset_rows(self, rids: Sequence[int], free: bool) -> None: ...

    def declare(self, graph_walk: str, rows: Sequence[RowInputs], metadata: Mapping[int, RowInfo]) -> str:
        self.calls.append(("declare", graph_walk, [row.length for row in rows]))
        assert {row.rid for row in rows} == set(metadata)
        return graph_walk

    def plan(self, step: Any, target: PlanTarget) -> None:
        self.calls.append(("plan", target.label, None if target.key is None else target.key.bs, target.slot))

    def commit(self, step: Any) -> None:
        self.calls.append(("commit", step))


def region_math(index: int, x: Tensor) -> dict[str, Tensor]:
    """With scratch of several sizes, so that regions find each other's memory."""
    wide = torch.cat([x + index] * (index + 2), dim=1)
    y = (wide * wide).view(x.shape[0], index + 2, WIDTH).sum(1) - x
    return {"y": torch.tanh(y) + 1, "norm": (wide * 0.5).square().sum(1).sqrt()}


class Regions:
    """Several regions in one pool."""

    def __init__(
        self,
        num_regions: int = 3,
        shapes: Sequence[tuple[int, int]] | None = None,
        device: str = "cpu",
        **runner: Any,
    ) -> None:
        self.backend, self.steps, self.runs = graph_backend(torch.device(device)), Steps(), Counter[tuple[int, int]]()
        self.resources = GraphResources(self.backend, self.backend.new_pool(), StaticBuffers(self.backend.device))
        pairs = shapes or [(size, size) for size in SIZES]
        self.runners = [
            PiecewiseCudaGraphRunner(
                f"region{index}",
                PiecewiseConfig(
                    lambda call, index=index: self.compute(index, call),
                    tuple(PiecewiseCaptureShape(*pair) for pair in pairs),
                    {"x": InputSpec((WIDTH,), torch.float32)},
                ),
                self.resources,
                self.steps,
                self.backend.device,
                None,
                1,
                **runner,
            )
            for index in range(num_regions)
        ]

    def compute(self, index: int, call: PiecewiseCallInputs) -> dict[str, Tensor]:
        self.runs[index, call.shape.total_tokens] += 1
        return region_math(index, call.inputs["x"])

    def captured(self) -> "Regions":
        for runner in self.runners:
            runner.prepare_for_capture()
        for runner in self.runners:
            runner.warmup_and_capture()
        return self


def replay_in_random_order(regions: Regions, num_orders: int) -> set[tuple[str, str]]:
    """Every region and bucket once in each order, on new inputs, with 1 row up to the bucket's.

    Each output is checked at once and after every later replay, until its own graph replays again.

    Returns:
        (region, output) of what was wrong.
    """
    generator = random.Random(5)
    kept: dict[tuple[int, int], tuple[PiecewiseOutput, dict[str, Tensor]]] = {}
    wrong = set()
    for _ in range(num_orders):
        pairs = [(index, size) for index in range(len(regions.runners)) for size in SIZES]
        generator.shuffle(pairs)
        for index, size in pairs:
            bs = generator.randrange(size // 2 + 1, size + 1)
            x = torch.randn(bs, WIDTH, device=regions.backend.device)
            exact = region_math(index, torch.cat((x, x.new_zeros(size - bs, WIDTH))))
            kept[index, size] = regions.runners[index].run({"x": x}), {n: value[:bs] for n, value in exact.items()}
            for (region, _), (output, expected) in kept.items():
                for name, value in expected.items():
                    held = output.get_view(name)
                    if held is None or not torch.equal(held, value):
                        wrong.add((f"region{region}", name))
    return wrong


def test_regions_replay_in_any_order_from_one_pool(device: str) -> None:
    """B39: 100 random orders over 3 regions of 4 buckets; every output handed out stays until its own graph replays."""
    regions = Regions(device=device).captured()
    runs = Counter(regions.runs)
    assert set(runs.values()) == {PiecewiseCudaGraphRunner.NUM_WARMUP + 1}
    assert len(runs) == 12
    assert replay_in_random_order(regions, 100) == set()
    assert regions.runs == runs, "no Python of a region ran during replays"
    assert sum(runner.counts[Reason.PIECEWISE] for runner in regions.runners) == 1200
    for runner in regions.runners:
        for data in runner.graphs.values():
            assert aliased_outputs(regions.resources.pool, {**data.static_outputs, **data.static_inputs}) == []


def test_negative_control_outputs_left_in_the_pool_are_found(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same replays fail by value where outputs stay in the pool, and the alias checker names those outputs."""

    def leave_in_pool(run: Any, warm_outputs: Any, pool: Any, device: Any, autocast_dtype: Any) -> Any:
        return capture_into_graph(run, pool, device, autocast_dtype)

    monkeypatch.setattr(cuda_graph_runner, "capture_with_static_outputs", leave_in_pool)
    regions = Regions(device=device).captured()
    wrong = replay_in_random_order(regions, 3)
    assert wrong, "a value was overwritten by another region's replay"
    flagged = {
        (runner.label, name)
        for runner in regions.runners
        for data in runner.graphs.values()
        for name in aliased_outputs(regions.resources.pool, {**data.static_inputs, **data.static_outputs})
    }
    assert wrong <= flagged
    assert flagged == {(f"region{index}", name) for index in range(3) for name in ("y", "norm")}


def test_scribbled_pool_memory_changes_no_output(device: str) -> None:
    """Nothing that lives across replays is in the pool: NaN all over it, then replay."""
    regions = Regions(device=device).captured()
    x = torch.randn(3, WIDTH, device=device)
    before = [runner.run({"x": x})["y"] for runner in regions.runners]
    regions.backend.fill_pool(regions.resources.pool, 0xFF)
    after = [runner.run({"x": x})["y"] for runner in regions.runners]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("bs", range(1, 11))
def test_declare_plan_replay_commit_and_the_same_road_without_a_bucket(bs: int) -> None:
    regions = Regions(1).captured()
    runner, x = regions.runners[0], torch.randn(bs, WIDTH)
    regions.steps.calls.clear()
    runs = regions.runs.total()
    output = runner.run({"x": x}, request_ids=list(range(100, 100 + bs)), seq_lens=[1] * bs)
    size = next((size for size in SIZES if size >= bs), None)
    lengths = [1] * bs + [0] * ((size or bs) - bs)
    assert regions.steps.calls == [
        ("declare", "region0", lengths),
        ("plan", "region0", size, 0),
        ("commit", "region0"),
    ]
    assert runner.can_run(bs) == (size is not None)
    assert regions.runs.total() - runs == (size is None)
    assert runner.counts == {Reason.PIECEWISE if size is not None else Reason.NO_BUCKET: 1}
    padded = torch.cat((x, torch.zeros((size or bs) - bs, WIDTH)))
    assert torch.equal(output["y"], region_math(0, padded)["y"][:bs])


def test_get_is_a_copy_and_get_view_is_not() -> None:
    runner = Regions(1).captured().runners[0]
    output = runner.run({"x": torch.randn(3, WIDTH)})
    copied, got, view = output["y"], output.get("y"), output.get_view("y")
    assert isinstance(got, Tensor)
    assert isinstance(view, Tensor)
    assert copied.shape == (3, WIDTH)
    assert torch.equal(copied, view)
    assert copied.data_ptr() != view.data_ptr()
    runner.run({"x": torch.randn(4, WIDTH)})
    assert not torch.equal(copied, view), "the same bucket's next run overwrites the view"
    assert torch.equal(copied, got)
    assert set(output.keys()) == set(output) == {"y", "norm"}
    assert "y" in output
    assert len(output) == 2
    assert output.get("z") is None
    assert output.get("z", 5) == 5
    assert output.get_view("z", 5) == 5
    with pytest.raises(KeyError):
        output["z"]


def test_an_output_is_cut_to_the_real_rows() -> None:
    output = PiecewiseOutput({"y": torch.arange(8)}, 3)
    assert output["y"].tolist() == [0, 1, 2]
    assert output.real_len == 3


def test_an_input_that_is_its_buffer_is_not_copied_and_may_be_padded_already() -> None:
    regions = Regions(1).captured()
    runner = regions.runners[0]
    buffer = runner.graphs[PiecewiseGraphKey(4, 4, 0)].static_inputs["x"]
    x = torch.randn(4, WIDTH)
    buffer.copy_(x)
    output = runner.run({"x": buffer}, real_bs=3)
    assert torch.equal(output["y"], region_math(0, x)["y"][:3])
    assert regions.steps.calls[-3] == ("declare", "region0", [1, 1, 1, 0])


def test_packed_shapes_and_query_lengths() -> None:
    regions = Regions(1, shapes=[(2, 8), (2, 32), (4, 16)]).captured()
    runner, x = regions.runners[0], torch.randn(11, WIDTH)
    assert runner.can_run(2, 9)
    assert not runner.can_run(4, 17)
    output = runner.run({"x": x}, request_ids=[7, 8], seq_lens=[5, 6])
    assert regions.steps.calls[-3:-1] == [("declare", "region0", [5, 6, 0, 0]), ("plan", "region0", 4, 0)]
    assert output["y"].shape == (11, WIDTH)
    padded = torch.cat((x, torch.zeros(5, WIDTH)))
    assert torch.equal(output["y"], region_math(0, padded)["y"][:11])


def test_graphs_and_their_keys() -> None:
    regions = Regions(1, shapes=[(2, 8), (4, 16)])
    [runner] = regions.runners
    specs = runner.prepare_for_capture()
    assert [(s.key.bs, s.key.num_tokens, s.slot) for s in specs] == [(4, 16, 0), (2, 8, 0)]
    regions.resources.buffers.seal()
    claimed = {tensor.data_ptr() for tensor in regions.resources.buffers.tensors.values()}
    assert not runner.any_graphs
    assert runner.graphs == {}
    runner.warmup_and_capture()
    assert runner.any_graphs
    assert set(runner.graphs) == {PiecewiseGraphKey(2, 8, 0), PiecewiseGraphKey(4, 16, 0)}
    key = PiecewiseGraphKey(bs=4, seq_len=16, slot=0)
    assert (key.bs, key.seq_len, key.slot) == tuple(key) == (4, 16, 0)
    data = runner.graphs[key]
    assert isinstance(data, PiecewiseGraphData)
    assert data.shape == PiecewiseCaptureShape(bs=4, total_tokens=16)
    assert (data.bucket.graph_walk, data.bucket.bs, data.bucket.num_tokens) == ("region0", 4, 16)
    assert len(set(data.dummy_rids)) == 4
    assert max(data.dummy_rids) < 0
    assert set(data.static_inputs) == {"x"}
    assert set(data.static_outputs) == {"y", "norm"}
    x = data.static_inputs["x"]
    assert x.shape == (16, WIDTH)
    assert x.data_ptr() in claimed, "claimed before the capture"
    x.normal_()
    data.graph.replay()
    assert all(torch.equal(data.static_outputs[name], value) for name, value in region_math(0, x).items())
    runner.release_graphs()
    assert not runner.any_graphs


def test_what_a_region_reads_beside_its_buffers_is_frozen() -> None:
    regions, factor = Regions(1), [2.0]
    regions.compute = lambda index, call: {"y": call.inputs["x"] * (factor[0] * call.shape.bs)}  # type: ignore[method-assign]
    [runner] = regions.captured().runners
    factor[0] = 5.0
    x = torch.ones(3, WIDTH)
    assert runner.run({"x": x})["y"].eq(2.0 * 4).all()
    assert runner.run({"x": 3 * x})["y"].eq(3 * 2.0 * 4).all(), "the buffers are read at every replay"


def test_leases_and_slots() -> None:
    runner = Regions(1).captured().runners[0]
    assert isinstance(runner.lease_slot(3), SlotLease)
    assert runner.lease_slot(9) is None
    runner.set_slot(0)
    assert runner.lease_slot(3) == runner.lease_slot(4)
    assert list(runner.CAPTURE_BATCH_SIZES) == [1, 2, 4, 8, 16, 32, 64]
    assert runner.NUM_WARMUP == 2


def test_a_slot_that_is_leased_ahead_is_the_one_that_runs() -> None:
    """With two slots: asked twice it is the same, the next run takes it, and the one after that the other."""
    regions = Regions(1)
    resources = GraphResources(regions.backend, regions.resources.pool, StaticBuffers(CPU), (Planner(),))
    runner = PiecewiseCudaGraphRunner("two", regions.runners[0].config, resources, regions.steps, CPU, None, 2)
    runner.prepare_for_capture()
    runner.warmup_and_capture()
    assert set(runner.graphs) == {PiecewiseGraphKey(size, size, slot) for size in SIZES for slot in (0, 1)}
    [key] = [key for key in runner.bucket_keys() if key.bs == 4]
    for slot in (0, 1, 0):
        assert runner.lease_slot(3) == runner.lease_slot(4) == SlotLease(key, slot)
        runner.run({"x": torch.randn(3, WIDTH)})
        assert regions.steps.calls[-2] == ("plan", "two", 4, slot)
    runner.lease_slot(3)
    runner.set_slot(0)
    runner.run({"x": torch.randn(3, WIDTH)})
    assert regions.steps.calls[-2] == ("plan", "two", 4, 0)


def test_a_dropped_shape_runs_eagerly_with_its_reason() -> None:
    regions = Regions(1)
    compute = regions.compute

    def failing(index: int, call: PiecewiseCallInputs) -> dict[str, Tensor]:
        if call.shape.bs == 8 and regions.runs[index, 8] == 2:
            regions.runs[index, 8] += 1
            raise RuntimeError("forced")
        return compute(index, call)

    regions.compute = failing  # type: ignore[method-assign]
    [runner] = regions.captured().runners
    assert runner.dropped_shapes == [(8, 8)]
    x = torch.randn(7, WIDTH)
    assert torch.equal(runner.run({"x": x})["y"], region_math(0, x)["y"])
    assert runner.counts == {Reason.CAPTURE_FAILED: 1}
    assert runner.can_run(4)


def test_a_pool_of_its_own_and_a_node_name() -> None:
    regions = Regions(1, node_name="decoder")
    pool = regions.backend.new_pool()
    other = Regions(1)
    runner = PiecewiseCudaGraphRunner(
        "own", other.runners[0].config, other.resources, other.steps, CPU, None, 1, memory_pool=pool
    )
    assert regions.runners[0].name == "decoder.region0"
    assert runner.name == "own"
    runner.prepare_for_capture()
    runner.warmup_and_capture()
    assert other.backend.pool_bytes(other.resources.pool) == 0
    assert regions.backend.pool_bytes(pool) > 0


def test_wrong_inputs_are_refused() -> None:
    runner = Regions(1).captured().runners[0]
    with pytest.raises(ValueError, match=r"takes \['x'\], got \['y'\]"):
        runner.run({"y": torch.randn(2, WIDTH)})
