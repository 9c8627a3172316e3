"""The whole-forward runner over a small forward whose plan lives in buffers of each graph slot."""

import logging
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato.runtime.cuda_graph_runner import CudaGraphRunner
from ostinato.runtime.dummy_rows import PlanTarget, RowInfo, RowInputs
from ostinato.runtime.graph_backend import GraphPool
from ostinato.runtime.graph_buckets import BucketKey, CaptureSpec, CudaGraphBucket, CudaGraphConfig, SlotLease
from ostinato.runtime.graph_capture import aliased_outputs
from ostinato.runtime.graph_reason import Reason
from ostinato.runtime.rank_agreement import GraphsRequiredError, fail_if_graphs_required
from ostinato.runtime.static_buffers import GraphResources, Planner, StaticBuffers
from ostinato.runtime.tape_graph import TapeBackend

CPU = torch.device("cpu")
SCALE, SUM = "scale", "sum"


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


class Factors(Planner):
    """Plans a factor for each token into a buffer of each (bucket, slot)."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[BucketKey, int], Tensor] = {}

    def claim(self, specs: Sequence[Any]) -> None:
        for spec in specs:
            self.buffers[spec.key, spec.slot] = torch.ones(spec.key.num_tokens, 1)


class Steps:
    """Notes the road of every step, and plans factors."""

    def __init__(self, factors: Factors) -> None:
        self.factors, self.calls, self.factor = factors, [], 1.0
        self.opened: list[int] = []
        self.resets: Counter[int] = Counter()
        self.freed: list[int] = []

    def open_rows(self, rids: Sequence[int]) -> None:
        assert not set(rids) & set(self.opened), "each row is opened once"
        self.opened += rids

    def reset_rows(self, rids: Sequence[int], free: bool) -> None:
        self.resets.update(rids)
        self.freed += rids if free else ()

    def declare(self, graph_walk: str, rows: Sequence[RowInputs], metadata: Mapping[int, RowInfo]) -> list[int]:
        self.calls.append(("declare", [row.length for row in rows]))
        return [row.rid for row in rows]

    def plan(self, step: Any, target: PlanTarget) -> None:
        self.calls.append(("plan", target.key, target.slot))
        if target.key is not None and self.factors.buffers:
            self.factors.buffers[target.key, target.slot].fill_(self.factor)

    def commit(self, step: Any) -> None:
        self.calls.append(("commit",))


class Forward:
    """`{"y": (x + 1) * factor, "total": …}`; counts how often its Python runs for each bucket."""

    width = 4

    def __init__(self, factors: Factors, buffers: StaticBuffers, configs: list[CudaGraphConfig]) -> None:
        self.factors, self.buffers, self.configs = factors, buffers, configs
        self.runs: Counter[BucketKey] = Counter()
        self.slot_of: dict[BucketKey, int] = {}
        self.fails_at: dict[int, str] = {}

    def graph_configs(self) -> list[CudaGraphConfig]:
        return self.configs

    def claim(self, configs: Sequence[CudaGraphConfig]) -> None:
        tokens = max(key.num_tokens for config in configs for key in config.bucket_keys())
        self.buffers.claim("x", tokens, (self.width,))

    def static_inputs(self, key: BucketKey) -> dict[str, Tensor]:
        return {"x": self.buffers.get("x", key.num_tokens)}

    def prepare_inputs(self, key: BucketKey) -> None:
        self.buffers.get("x", key.num_tokens).zero_()
        self.slot_of[key] = self.slot_of.get(key, 0)

    def template_row(self, config: CudaGraphConfig, rid: int) -> RowInputs:
        length = config.tokens_per_row or 1
        return RowInputs(rid, length, {"x": torch.zeros(length, self.width)})

    def forward(self, key: BucketKey, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self.runs[key] += 1
        if self.fails_at.get(key.bs) == "warm-up" or (
            self.fails_at.get(key.bs) == "capture" and self.runs[key] > CudaGraphRunner.NUM_WARMUP
        ):
            raise RuntimeError(f"forced at {key.bs}")
        x = inputs["x"]
        y = x + 1
        if self.factors.buffers:
            # Warm-ups and the capture of slot 0 come before those of slot 1.
            slot = 0 if self.runs[key] <= 2 or self.runs[key] == 5 else 1
            y = y * self.factors.buffers[key, slot]
        return {"y": y, "total": y.sum(1)}


class Rig:
    """A runner and everything around it."""

    def __init__(
        self, configs: list[CudaGraphConfig] | None = None, num_slots: int = 1, planned: bool = False, **runner: Any
    ) -> None:
        self.backend = TapeBackend()
        self.pool: GraphPool = self.backend.new_pool()
        self.factors = Factors()
        self.steps = Steps(self.factors)
        self.buffers = StaticBuffers(CPU)
        self.forward = Forward(self.factors, self.buffers, configs or [CudaGraphConfig("decode", (1, 2, 4, 8))])
        self.resources = GraphResources(self.backend, self.pool, self.buffers, (self.factors,) if planned else ())
        self.runner = CudaGraphRunner(
            "toy", self.forward, self.resources, self.steps, CPU, None, None, num_slots, **runner
        )

    def captured(self) -> "Rig":
        self.specs = self.runner.prepare_for_capture()
        self.runner.warmup_and_capture()
        return self


@pytest.fixture
def rig() -> Rig:
    return Rig().captured()


def test_class_constants() -> None:
    assert list(CudaGraphRunner.CAPTURE_BATCH_SIZES) == [1, 2, 4, 8, 16, 32, 64]
    assert CudaGraphRunner.NUM_WARMUP == 2


def test_every_bucket_is_captured_largest_first() -> None:
    rig = Rig([CudaGraphConfig("decode", (1, 8)), CudaGraphConfig("verify", (4,), tokens_per_row=3)])
    assert not rig.runner.any_graphs
    rig.captured()
    expected = [("decode", 8, 8), ("verify", 4, 12), ("decode", 1, 1)]
    assert [(s.key.graph_walk, s.key.bs, s.key.num_tokens) for s in rig.specs] == expected
    assert all(isinstance(spec, CaptureSpec) for spec in rig.specs)
    assert [(k.graph_walk, k.bs, k.num_tokens) for k in rig.forward.runs] == expected
    assert rig.runner.any_graphs
    assert rig.runner.dropped_buckets == []


@pytest.mark.parametrize("bs", range(1, 9))
def test_a_replay_is_the_forward_on_the_padded_bucket(rig: Rig, bs: int) -> None:
    lease = rig.runner.lease_slot("decode", bs, None, bs)
    assert lease is not None
    before = Counter(rig.forward.runs)
    for _ in range(3):
        x = torch.randn(bs, 4)
        outputs = rig.runner.run_forward(lease, {"x": x})
        rig.runner.release(lease, bs)
        assert torch.equal(outputs["y"][:bs], x + 1)
        assert torch.equal(outputs["y"][bs:], torch.ones(lease.key.bs - bs, 4)), "padding is zero, not the last step"
        assert torch.equal(outputs["total"][:bs], (x + 1).sum(1))
        replayed = {name: tensor.clone() for name, tensor in outputs.items()}
        assert rig.forward.runs == before
        eager = rig.runner.run_eager(lease.key, {"x": x})
        assert all(torch.equal(eager[name], replayed[name]) for name in eager)
        before[lease.key] += 1


def test_the_python_ran_warm_ups_and_once(rig: Rig) -> None:
    assert set(rig.forward.runs.values()) == {CudaGraphRunner.NUM_WARMUP + 1}


def test_outputs_are_outside_the_pool(rig: Rig) -> None:
    for key in rig.runner.bucket_keys():
        slot = rig.runner.slot_for(SlotLease(key, 0))
        assert aliased_outputs(rig.pool, {**slot.static_outputs, **slot.static_inputs}) == []


def test_buckets_share_the_claimed_inputs(rig: Rig) -> None:
    inputs = [rig.runner.slot_for(SlotLease(key, 0)).static_inputs["x"] for key in rig.runner.bucket_keys()]
    assert len({x.data_ptr() for x in inputs}) == 1
    with pytest.raises(RuntimeError, match="after the first capture"):
        rig.buffers.claim("x", 9, (4,))


def test_records() -> None:
    """Two configs, two buckets and two slots, so that no field can be another's."""
    configs = [CudaGraphConfig("decode", (2, 4)), CudaGraphConfig("verify", (4,), tokens_per_row=3)]
    rig = Rig(configs, num_slots=2, planned=True).captured()
    for config_idx, (walk, num_tokens) in enumerate((("decode", 4), ("verify", 12))):
        lease = rig.runner.lease_slot(walk, 3, 1)
        assert lease is not None
        bucket, slot = rig.runner._buckets[lease.key], rig.runner.slot_for(lease)
        assert isinstance(bucket, CudaGraphBucket)
        assert bucket.config is rig.runner.config_for(lease) is configs[config_idx]
        assert bucket.config_idx == slot.config_idx == config_idx
        assert len(bucket.slots) == 2
        assert bucket.slots[1] is slot
        assert slot.static_input_keys == tuple(slot.static_inputs) == ("x",)
        assert slot.static_inputs["x"].shape == (num_tokens, 4)
        assert slot.dummy_rids == list(slot.dummy_metadata)
        assert all(rid == info.rid and info.is_padding for rid, info in slot.dummy_metadata.items())
        assert {info.graph_walk for info in slot.dummy_metadata.values()} == {walk}
        assert rig.runner.step_ids(lease, [7, 8, 9]) == [7, 8, 9, slot.dummy_rids[0]]
        slot.static_inputs["x"].fill_(2.0)
        slot.graph.replay()
        assert slot.static_outputs["y"].eq(3.0).all()
    rows = [len(slot.dummy_rids) for key in rig.runner.bucket_keys() for slot in rig.runner.slots(key)]
    assert sorted(rows) == [2, 2, 4, 4, 4, 4]
    every = {rid for key in rig.runner.bucket_keys() for slot in rig.runner.slots(key) for rid in slot.dummy_rids}
    assert len(every) == sum(rows), "each graph has padding rows of its own"


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_warm_up_replay_and_eager_run_have_the_runner_s_autocast(dtype: torch.dtype | None) -> None:
    class Product(Forward):
        def forward(self, key: BucketKey, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {"y": inputs["x"] @ weight}

    rig, weight, x = Rig(), torch.randn(4, 4), torch.randn(2, 4)
    submodule = Product(rig.factors, rig.buffers, [CudaGraphConfig("decode", (2,))])
    runner = CudaGraphRunner("toy", submodule, rig.resources, rig.steps, CPU, dtype, None, 1)
    with torch.autocast("cpu", torch.float16):
        runner.prepare_for_capture()
        runner.warmup_and_capture()
        [key] = runner.bucket_keys()
        replayed = runner.run_forward(runner.lease(key), {"x": x})["y"].clone()
        eager = runner.run_eager(key, {"x": x})["y"]
    assert replayed.dtype == eager.dtype == (dtype or torch.float32)
    assert torch.equal(replayed, eager)


def test_flags_are_agreed_on_in_the_order_of_the_configs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in that of the captures: decode 8, verify 4, decode 1."""
    asked = []

    def agree(comm_group: Any, flags: Sequence[bool], device: torch.device) -> list[bool]:
        asked.append(list(flags))
        return [False, *flags[1:]]

    monkeypatch.setattr("ostinato.runtime.bucket_capture.agree_across_ranks", agree)
    rig = Rig([CudaGraphConfig("decode", (1, 8)), CudaGraphConfig("verify", (4,), tokens_per_row=3)])
    rig.forward.fails_at[4] = "capture"
    runner = rig.captured().runner
    assert asked == [[True, True, False]]
    assert [(runner.drop_reasons[key][0], key.bs) for key in runner.dropped_buckets] == [
        (Reason.CAPTURE_FAILED, 4),
        (Reason.RANK_DISAGREED, 1),
    ]
    assert runner.captures_walk("decode")
    assert not runner.captures_walk("verify"), "its only bucket is dropped"
    assert runner.can_run("decode", 1, 1), "on the larger bucket"


def test_once_captures_are_over_padding_rows_hold_no_storage() -> None:
    rig = Rig()
    rig.runner.prepare_for_capture()
    assert rig.steps.opened == []
    rig.runner.warmup_and_capture()
    assert len(rig.steps.opened) == 15
    assert sorted(rig.steps.freed) == sorted(rig.steps.opened)


def test_asking(rig: Rig) -> None:
    runner = rig.runner
    assert runner.captures_walk("decode")
    assert not runner.captures_walk("prefill")
    assert [runner.can_run("decode", bs, bs) for bs in (1, 8, 9)] == [True, True, False]
    assert not runner.can_run("decode", 2, 2, cg_key_info="other")
    assert not runner.can_run("decode", 2, 9), "more tokens than any bucket plans"
    assert runner.select_bucket("decode", 3, 3) == BucketKey("decode", None, 4, 4)
    assert runner.select_bucket("decode", 9, 9) is None
    assert runner.select_batched_bucket("decode", 5) == BucketKey("decode", None, 8, 8)
    assert runner.max_batch_size_for("decode") == 8
    assert runner.max_batch_size_for("prefill") is None
    assert runner.lease_slot("decode", 9, None, 9) is None


def test_no_cap_where_every_config_opts_out() -> None:
    rig = Rig([CudaGraphConfig("decode", (1, 4), caps_batch_size=False)]).captured()
    assert rig.runner.max_batch_size_for("decode") is None
    assert rig.runner.lease_slot("decode", 5, None) is None


def test_packed_configs_need_the_tokens() -> None:
    packed = CudaGraphConfig("prefill", (2,), tokens_per_row=None, token_buckets=(8, 16), token_multiplier=2)
    rig = Rig([packed]).captured()
    assert rig.runner.lease_slot("prefill", 2, None) is None
    lease = rig.runner.lease_slot("prefill", 2, None, 7)
    assert lease is not None
    assert lease.key == BucketKey("prefill", None, 2, 16)
    x = torch.randn(14, 4)
    assert torch.equal(rig.runner.run_forward(lease, {"x": x})["y"][:14], x + 1)


def test_real_ids_then_padding_ids(rig: Rig) -> None:
    lease = rig.runner.lease_slot("decode", 3, None, 3)
    assert lease is not None
    dummies = rig.runner.slot_for(lease).dummy_rids
    assert rig.runner.step_ids(lease, [10, 11, 12]) == [10, 11, 12, dummies[0]]
    info = {rid: RowInfo(rid, "decode", request=str(rid)) for rid in (10, 11, 12)}
    metadata = rig.runner.step_metadata(lease, [10, 11, 12], info)
    assert list(metadata) == [10, 11, 12, dummies[0]]
    assert metadata[11].request == "11"
    assert metadata[dummies[0]].is_padding
    with pytest.raises(AssertionError, match="5 rows do not fit a bucket of 4"):
        rig.runner.step_ids(lease, range(5))


def test_padding_rows_have_no_token(rig: Rig) -> None:
    lease = rig.runner.lease_slot("decode", 3, None, 3)
    assert lease is not None
    real = [RowInputs(rid, 1, {"x": torch.ones(1, 4)}) for rid in (10, 11, 12)]
    padded = rig.runner.pad_inputs(lease, real)
    assert padded[:3] == real
    assert [row.length for row in padded] == [1, 1, 1, 0]
    assert padded[3].tensors["x"].shape == (0, 4)


def test_declared_inputs_are_made_once_a_bucket() -> None:
    configs = [CudaGraphConfig("decode", (1, 4)), CudaGraphConfig("verify", (4,), tokens_per_row=3)]
    runner = Rig(configs).captured().runner
    for walk, bs, lengths in (("decode", 3, [1] * 4), ("verify", 3, [3] * 4), ("decode", 1, [1])):
        lease, again = runner.lease_slot(walk, bs, None), runner.lease_slot(walk, len(lengths), None)
        assert lease is not None
        assert again is not None
        rows = runner.declare_inputs_for(lease)
        assert runner.declare_inputs_for(again) is rows
        assert [row.length for row in rows] == lengths


def test_inputs_that_do_not_fit_are_refused(rig: Rig) -> None:
    lease = rig.runner.lease_slot("decode", 2, None, 2)
    assert lease is not None
    with pytest.raises(ValueError, match=r"no static input 'z'"):
        rig.runner.run_forward(lease, {"z": torch.ones(2, 4)})
    with pytest.raises(ValueError, match=r"'x' has 3 rows, its buffer 2"):
        rig.runner.run_forward(lease, {"x": torch.ones(3, 4)})


def test_b38_a_large_batch_leaves_nothing_to_a_smaller_one(rig: Rig) -> None:
    """B38: replay 8 rows of garbage, then 5; and garbage in every static input before staging."""
    eight, five = rig.runner.lease_slot("decode", 8, None, 8), rig.runner.lease_slot("decode", 5, None, 5)
    assert eight is not None
    assert five is not None
    rig.runner.run_forward(eight, {"x": torch.full((8, 4), torch.nan)})
    x = torch.randn(5, 4)
    outputs = rig.runner.run_forward(five, {"x": x})
    assert torch.equal(outputs["y"], torch.cat((x + 1, torch.ones(3, 4))))


def test_release_puts_the_padding_rows_to_rest(rig: Rig) -> None:
    lease = rig.runner.lease_slot("decode", 3, None, 3)
    assert lease is not None
    rig.steps.resets.clear()
    rig.runner.release(lease, 3)
    assert list(rig.steps.resets) == rig.runner.slot_for(lease).dummy_rids[:1]


# Two slots


def planned() -> Rig:
    return Rig([CudaGraphConfig("decode", (2,))], num_slots=2, planned=True).captured()


def test_two_slots_only_where_something_is_planned() -> None:
    assert len(Rig(num_slots=2).captured().runner.slots(BucketKey("decode", None, 8, 8))) == 1
    assert Rig(num_slots=2).captured().runner.plan_stream() is None
    rig = planned()
    assert len(rig.runner.slots(BucketKey("decode", None, 2, 2))) == 2
    assert rig.runner.plan_stream() is not None
    assert rig.runner.plan_stream() is not rig.backend.current_stream(), "never the default stream"


def test_leases_alternate_and_a_reserved_slot_is_honoured() -> None:
    runner = planned().runner
    leases = [runner.lease_slot("decode", 2, slot) for slot in (None, None, None, 1, None, 0)]
    assert [lease.slot for lease in leases if lease is not None] == [0, 1, 0, 1, 1, 0]
    with pytest.raises(AssertionError, match="slot 2"):
        runner.lease_slot("decode", 2, 2)


def test_buckets_take_turns_on_their_own() -> None:
    runner = Rig([CudaGraphConfig("decode", (2, 4))], num_slots=2, planned=True).captured().runner
    leases = [runner.lease_slot("decode", bs, None) for bs in (2, 4, 4, 2, 2)]
    assert [lease.slot for lease in leases if lease is not None] == [0, 0, 1, 1, 0]


def test_a_plan_for_the_idle_slot_does_not_touch_the_other() -> None:
    rig = planned()
    key, x = BucketKey("decode", None, 2, 2), torch.randn(2, 4)
    rig.factors.buffers[key, 0].fill_(3.0)
    rig.factors.buffers[key, 1].fill_(5.0)
    for slot, factor in ((0, 3.0), (1, 5.0), (0, 3.0)):
        assert torch.equal(rig.runner.run_forward(SlotLease(key, slot), {"x": x})["y"], (x + 1) * factor)


def test_a_replay_waits_for_the_plan_and_tells_when_it_launches() -> None:
    """The order: stage, wait for the plan, set the launch event, replay."""
    rig, order = planned(), []
    lease = rig.runner.lease_slot("decode", 2, None)
    assert lease is not None
    slot = rig.runner.slot_for(lease)

    class Noting(threading.Event):
        def set(self) -> None:
            order.append(("launch", slot.static_inputs["x"].sum().item()))
            super().set()

    done, started = rig.backend.new_event(), Noting()
    stream = rig.backend.current_stream()
    stream.wait_event = lambda event: order.append(("wait", event is done))  # type: ignore[method-assign]
    replay = slot.graph.replay
    slot.graph.replay = lambda: (order.append(("replay", None)), replay())  # type: ignore[method-assign]
    rig.runner.run_forward(lease, {"x": torch.ones(2, 4)}, done, started)
    assert order == [("wait", True), ("launch", 8.0), ("replay", None)]
    assert started.is_set()


def test_the_next_plan_of_a_slot_can_wait_until_its_buffers_are_read() -> None:
    runner, x = planned().runner, torch.randn(2, 4)
    first, second = runner.lease_slot("decode", 2, 0), runner.lease_slot("decode", 2, 1)
    assert first is not None
    assert second is not None
    assert runner.read_done(first) is None
    runner.run_forward(first, {"x": x})
    event = runner.read_done(first)
    assert event is not None
    assert runner.read_done(second) is None
    runner.run_forward(first, {"x": x})
    assert runner.read_done(first) is event, "one event a slot"
    assert Rig().captured().runner.read_done(first) is None, "nothing is planned, nothing has to wait"


# Failures


@pytest.mark.parametrize("stage", ["warm-up", "capture"])
@pytest.mark.parametrize("bs", [1, 4, 8])
def test_a_failing_bucket_is_dropped_and_the_others_are_not(
    stage: str, bs: int, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig()
    rig.forward.fails_at[bs] = stage
    outer = rig.backend.current_stream()
    with caplog.at_level(logging.ERROR):
        rig.captured()
    key = BucketKey("decode", None, bs, bs)
    assert rig.runner.dropped_buckets == [key]
    assert rig.runner.drop_reasons[key] == (Reason.CAPTURE_FAILED, f"RuntimeError: forced at {bs}")
    [record] = caplog.records
    assert f"no graph for batch size {bs}" in record.message
    assert "bytes in 1 pools" in record.message
    assert rig.backend.current_stream() is outer
    for size in (1, 2, 4, 8):
        lease = rig.runner.lease_slot("decode", size, None, size)
        assert (lease is None) == (bs == 8 == size)
        if lease is not None:
            x = torch.randn(size, 4)
            assert torch.equal(rig.runner.run_forward(lease, {"x": x})["y"][:size], x + 1)
    assert rig.runner.max_batch_size_for("decode") == (4 if bs == 8 else 8)


def test_a_bucket_is_all_of_its_slots_or_nothing() -> None:
    rig = Rig([CudaGraphConfig("decode", (2, 4))], num_slots=2, planned=True)
    forward = rig.forward.forward

    def failing(key: BucketKey, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if key.bs == 4 and rig.forward.runs[key] == 5:  # two warm-ups a slot, slot 0, then this
            raise RuntimeError("forced in the second slot")
        return forward(key, inputs)

    rig.forward.forward = failing  # type: ignore[method-assign]
    rig.captured()
    assert rig.runner.dropped_buckets == [BucketKey("decode", None, 4, 4)]
    assert len(rig.runner.slots(BucketKey("decode", None, 2, 2))) == 2
    rig.runner.drop(BucketKey("decode", None, 2, 2), Reason.OVER_BUDGET, "for a test")
    assert rig.backend.pool_bytes(rig.pool) == 0


def test_all_that_is_missing_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_if_graphs_required([], required=True)
    fail_if_graphs_required(["bucket 4"])
    with pytest.raises(GraphsRequiredError, match=r"(?s)2 are missing.*bucket 4.*bucket 8"):
        fail_if_graphs_required(["bucket 4", "bucket 8"], required=True)
    monkeypatch.setenv("OSTINATO_REQUIRE_CUDA_GRAPHS", "1")
    with pytest.raises(GraphsRequiredError, match="bucket 4"):
        fail_if_graphs_required(["bucket 4"])
    monkeypatch.setenv("OSTINATO_REQUIRE_CUDA_GRAPHS", "0")
    fail_if_graphs_required(["bucket 4"])


@pytest.mark.parametrize("enabled", [False, True])
def test_nvtx_ranges_name_stage_and_replay_and_commit(enabled: bool) -> None:
    rig = Rig(enable_nvtx=enabled).captured()
    lease = rig.runner.lease_slot("decode", 2, None, 2)
    assert lease is not None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        rig.runner.run_forward(lease, {"x": torch.ones(2, 4)})
        rig.runner.release(lease, 2)
    names = {event.key for event in profile.key_averages() if event.key.startswith("toy ")}
    assert names == ({"toy stage", "toy replay", "toy commit"} if enabled else set())
