"""Replays a whole forward: everything from the inputs of a step to its outputs in one graph."""

import functools
import threading
from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from .bucket_capture import Capturer
from .dummy_rows import DummyRowPool, PlanTarget, RowInfo, RowInputs, StepRunner, dummy_metadata
from .graph_backend import Event, GraphPool, Stream
from .graph_buckets import (
    BucketKey,
    CaptureSpec,
    CudaGraphBucket,
    CudaGraphConfig,
    CudaGraphSlot,
    SlotLease,
    largest_batch,
    tightest,
    tightest_batched,
)
from .graph_capture import autocast_scope, capture_with_static_outputs
from .graph_reason import Reason
from .static_buffers import GraphResources

_UNMARKED = nullcontext()


class GraphSubmodule(Protocol):
    """A forward that can be captured: it reads static inputs and buffers at fixed addresses, and nothing else."""

    def graph_configs(self) -> Sequence[CudaGraphConfig]: ...

    def claim(self, configs: Sequence[CudaGraphConfig]) -> None:
        """Claim whatever buffers the forward needs at the largest bucket."""

    def static_inputs(self, key: BucketKey) -> dict[str, Tensor]:
        """The buffers that inputs are copied into, of the bucket's size; smaller buckets are slices."""

    def prepare_inputs(self, key: BucketKey) -> None:
        """Fill the static inputs with what warm-ups and captures may run on: anything written goes to the sink."""

    def template_row(self, config: CudaGraphConfig, rid: int) -> RowInputs:
        """A row of the length that a bucket of this config has, for declaring."""

    def forward(self, key: BucketKey, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]: ...


class CudaGraphRunner:
    """Captures a submodule's buckets and replays them under the engine's control.

    A step: `lease_slot`, `pad_inputs` and `step_metadata` for what is declared, planned and committed, `run_forward`,
    `release`.

    Args:
        submodule_name: in logs, reports, and the names of padding rows.
        resources: backend, pool and buffers, shared with the engine's other runners.
        step_runner: the declare → plan → commit road that captured and eager steps share.
        autocast_dtype: None runs in the submodule's own types.
        joint_comm_group: ranks that must keep the same buckets; None for one.
        num_slots: graph slots of a bucket; one is made where nothing is planned on the host.
        enable_nvtx: name staging, replay and commit in a profiler's timeline.
    """

    CAPTURE_BATCH_SIZES: Sequence[int] = (1, 2, 4, 8, 16, 32, 64)
    NUM_WARMUP = 2

    def __init__(
        self,
        submodule_name: str,
        submodule: GraphSubmodule,
        resources: GraphResources,
        step_runner: StepRunner,
        device: torch.device,
        autocast_dtype: torch.dtype | None,
        joint_comm_group: Any,
        num_slots: int,
        enable_nvtx: bool = False,
    ) -> None:
        self.name = submodule_name
        self.dropped_buckets: list[BucketKey] = []
        self.drop_reasons: dict[BucketKey, tuple[Reason, str]] = {}
        self._submodule = submodule
        self._resources = resources
        self._step_runner = step_runner
        self._device = device
        self._autocast_dtype = autocast_dtype
        self._comm_group = joint_comm_group
        self._num_slots = num_slots if resources.planners else 1
        self._nvtx = enable_nvtx
        self._configs = list(submodule.graph_configs())
        self._wanted = {
            key: index for index, config in enumerate(self._configs) for key in reversed(config.bucket_keys())
        }
        self._buckets: dict[BucketKey, CudaGraphBucket] = {}
        self._warm: dict[tuple[BucketKey, int], dict[str, Tensor]] = {}
        self._dummies = DummyRowPool(submodule_name, step_runner)
        self._turns: dict[BucketKey, int] = {}
        self._selected: dict[tuple[str, int, int, Hashable], BucketKey | None] = {}
        self._read_done: dict[SlotLease, Event] = {}
        self._templates: dict[BucketKey, list[RowInputs]] = {}
        self._plan_stream = resources.backend.new_stream() if resources.planners else None

    # Capturing

    def prepare_for_capture(self) -> list[CaptureSpec]:
        """Claim the buffers that captures will read. All runners claim before any captures.

        Returns:
            What will be captured, largest first.
        """
        self._submodule.claim(self._configs)
        specs = [CaptureSpec(key, slot, i) for key, i in self._wanted.items() for slot in range(self._num_slots)]
        specs.sort(key=lambda spec: (spec.key.bs, spec.key.num_tokens), reverse=True)
        for planner in self._resources.planners:
            planner.claim(specs)
        return specs

    def warmup_and_capture(self) -> None:
        """Capture every bucket, largest first; one that fails is dropped whole, on every rank."""
        self._resources.buffers.seal()
        Capturer(self._resources.backend, self._device, self._comm_group).capture([self])

    def bucket_keys(self) -> list[BucketKey]:
        return list(self._wanted)

    def warm_up(self, key: BucketKey, times: int | None = None) -> None:
        """Run a bucket eagerly on padding rows, on the capture stream; `NUM_WARMUP` times unless told."""
        for slot in range(self._num_slots):
            for _ in range(times or self.NUM_WARMUP):
                step = self._plan_dummies(key, slot)
                with self._resources.backend.on_capture_stream(), self._autocast():
                    outputs = self._submodule.forward(key, self._submodule.static_inputs(key))
                self._step_runner.commit(step)
                self._dummies.reset(self._dummies.handles((key, slot), key.bs))
            self._warm[key, slot] = outputs

    def capture(self, key: BucketKey) -> None:
        """Capture all graph slots of a bucket that has been warmed up."""
        config_idx, slots = self._wanted[key], []
        try:
            for slot in range(self._num_slots):
                self._plan_dummies(key, slot)
                inputs = self._submodule.static_inputs(key)
                graph, outputs = capture_with_static_outputs(
                    functools.partial(self._submodule.forward, key, inputs),
                    self._warm.pop((key, slot)),
                    self._resources.pool,
                    self._device,
                    self._autocast_dtype,
                )
                rids = self._dummies.handles((key, slot), key.bs)
                metadata = dummy_metadata(rids, key.graph_walk)
                slots.append(CudaGraphSlot(graph, inputs, tuple(inputs), outputs, rids, metadata, config_idx))
        except BaseException:
            for made in slots:
                made.graph.reset()
            raise
        self._buckets[key] = CudaGraphBucket(self._configs[config_idx], config_idx, slots)
        self._changed()

    def drop(self, key: BucketKey, reason: Reason, detail: str) -> None:
        """Do without a bucket from now on."""
        bucket = self._buckets.pop(key, None)
        self._changed()
        for slot in bucket.slots if bucket is not None else ():
            slot.graph.reset()
        if key not in self.drop_reasons:
            self.dropped_buckets.append(key)
        self.drop_reasons[key] = (reason, detail)

    def _changed(self) -> None:
        self._selected.clear()
        self._resources.changes.count += 1

    def finish_capture(self) -> None:
        """Captures are over: give back what only they needed."""
        self._dummies.release_all()

    # Asking

    @property
    def any_graphs(self) -> bool:
        return bool(self._buckets)

    def has(self, key: BucketKey) -> bool:
        """Whether a bucket has its graphs."""
        return key in self._buckets

    def slots(self, key: BucketKey) -> list[CudaGraphSlot]:
        """The captured graphs of a bucket; none if it has none."""
        return self._buckets[key].slots if key in self._buckets else []

    def own_outputs(self, key: BucketKey) -> list[Tensor]:
        """Of a bucket's static outputs those that no claimed buffer holds, so that a copy writes them."""
        claimed = {b.untyped_storage().data_ptr() for b in self._resources.buffers.tensors.values()}
        outputs = [tensor for slot in self.slots(key) for tensor in slot.static_outputs.values()]
        return [tensor for tensor in outputs if tensor.untyped_storage().data_ptr() not in claimed]

    @property
    def pool(self) -> GraphPool:
        """The memory of all its graphs."""
        return self._resources.pool

    def release_graphs(self) -> None:
        """Forget every graph: the runner is not used any more."""
        for bucket in self._buckets.values():
            for slot in bucket.slots:
                slot.graph.reset()
        self._buckets.clear()
        self._changed()

    def captures_walk(self, graph_walk: str) -> bool:
        """Whether any graph replays this walk."""
        return any(key.graph_walk == graph_walk for key in self._buckets)

    def can_run(self, graph_walk: str, bs: int, num_tokens: int, cg_key_info: Hashable = None) -> bool:
        return self.select_bucket(graph_walk, bs, num_tokens, cg_key_info) is not None

    def select_bucket(
        self, graph_walk: str, bs: int, num_tokens: int, cg_key_info: Hashable = None
    ) -> BucketKey | None:
        """The tightest captured bucket, over all matching configs; None: run eagerly."""
        wanted = (graph_walk, bs, num_tokens, cg_key_info)
        if wanted not in self._selected:
            self._selected[wanted] = tightest(self._captured(), *wanted)
        return self._selected[wanted]

    def select_batched_bucket(self, graph_walk: str, bs: int, cg_key_info: Hashable = None) -> BucketKey | None:
        """A bucket before the inputs exist; only batched configs can tell then."""
        return tightest_batched(self._captured(), graph_walk, bs, cg_key_info)

    def max_batch_size_for(self, graph_walk: str) -> int | None:
        """The largest batch that this walk takes in one piece; None: no cap."""
        return largest_batch(self._configs, self._buckets, graph_walk)

    def plan_stream(self) -> Stream | None:
        """Where plans for the next step run, beside the default stream; None where nothing is planned ahead."""
        return self._plan_stream

    # One step

    def lease_slot(
        self,
        graph_walk: str,
        bs: int,
        slot: int | None,
        num_tokens: int | None = None,
        cg_key_info: Hashable = None,
    ) -> SlotLease | None:
        """The bucket and graph slot of a coming step; None: run eagerly.

        Args:
            slot: None takes the bucket's slots in turn; one that was reserved for a plan is taken as it is.
            num_tokens: input tokens of the batch; None: not known yet, so only batched buckets are looked at.
        """
        key = (
            self.select_batched_bucket(graph_walk, bs, cg_key_info)
            if num_tokens is None
            else self.select_bucket(graph_walk, bs, num_tokens, cg_key_info)
        )
        return None if key is None else self.lease(key, slot)

    def lease(self, key: BucketKey, slot: int | None = None) -> SlotLease:
        """A graph slot of a captured bucket."""
        num_slots = len(self._buckets[key].slots)
        if slot is None:
            slot = self._turns.get(key, 0)
            self._turns[key] = (slot + 1) % num_slots
        assert 0 <= slot < num_slots, f"slot {slot} is not one of the bucket's {num_slots}"
        return SlotLease(key, slot)

    def slot_for(self, lease: SlotLease) -> CudaGraphSlot:
        return self._buckets[lease.key].slots[lease.slot]

    def config_for(self, lease: SlotLease) -> CudaGraphConfig:
        return self._buckets[lease.key].config

    def step_ids(self, lease: SlotLease, request_ids: Sequence[int]) -> list[int]:
        """The ids of a padded step: the real ones, then those of padding rows."""
        return [*request_ids, *self._padding(lease, len(request_ids))]

    def step_metadata(
        self, lease: SlotLease, request_ids: Sequence[int], per_request_info: Mapping[int, RowInfo]
    ) -> dict[int, RowInfo]:
        """What a padded step knows of each of its ids."""
        dummies = self.slot_for(lease).dummy_metadata
        return {
            **{rid: per_request_info[rid] for rid in request_ids},
            **{rid: dummies[rid] for rid in self._padding(lease, len(request_ids))},
        }

    def pad_inputs(self, lease: SlotLease, inputs: Sequence[RowInputs]) -> list[RowInputs]:
        """Real rows, then padding rows of length 0, for which no block is taken."""
        template = self.declare_inputs_for(lease)[0]
        empty = {name: tensor[:0] for name, tensor in template.tensors.items()}
        return [*inputs, *(RowInputs(rid, 0, empty) for rid in self._padding(lease, len(inputs)))]

    def declare_inputs_for(self, lease: SlotLease) -> list[RowInputs]:
        """Rows of the bucket's shape for declaring only: one list a bucket, shared and never to be changed."""
        if lease.key not in self._templates:
            config = self.config_for(lease)
            rids = self._dummies.handles((lease.key, 0), lease.key.bs)
            self._templates[lease.key] = [self._submodule.template_row(config, rid) for rid in rids]
        return self._templates[lease.key]

    def run_forward(
        self,
        lease: SlotLease,
        preprocessed: Mapping[str, Tensor],
        plan_done_event: Event | None = None,
        launch_started_event: threading.Event | None = None,
    ) -> dict[str, Tensor]:
        """Copy this step's inputs into the slot and replay it; returns its output buffers, padding rows included.

        Args:
            preprocessed: inputs by name; rows beyond theirs are zeroed. An input that is its static buffer already is
                not copied.
            plan_done_event: recorded after the plan that wrote this slot's buffers on another stream.
            launch_started_event: set when staging is over, right before the replay: the thread that waits for it would
                fight for the interpreter's lock any earlier.

        Raises:
            ValueError: an input of an unknown name, or with more rows than the bucket has.
        """
        slot = self.slot_for(lease)
        with self._marked("stage"):
            for name, value in preprocessed.items():
                stage(slot.static_inputs, name, value)
        if plan_done_event is not None:
            self._resources.backend.current_stream().wait_event(plan_done_event)
        if launch_started_event is not None:
            launch_started_event.set()
        with self._marked("replay"):
            slot.graph.replay()
        if self._plan_stream is not None:
            event = self._read_done.setdefault(lease, self._resources.backend.new_event())
            event.record(self._resources.backend.current_stream())
        return slot.static_outputs

    def read_done(self, lease: SlotLease) -> Event | None:
        """Recorded behind the slot's last replay: a plan that rewrites the slot's buffers waits for it. None before."""
        return self._read_done.get(lease)

    def run_eager(self, key: BucketKey, preprocessed: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What a replay of the bucket computes, on the same static inputs, by running its Python."""
        inputs = self._submodule.static_inputs(key)
        for name, value in preprocessed.items():
            stage(inputs, name, value)
        with self._autocast():
            return self._submodule.forward(key, inputs)

    def release(self, lease: SlotLease, real_bs: int) -> None:
        """The step is over: its padding rows go back to rest."""
        with self._marked("commit"):
            self._dummies.reset(self._padding(lease, real_bs))

    def _captured(self) -> list[tuple[BucketKey, CudaGraphConfig]]:
        ordered = sorted(self._buckets.items(), key=lambda item: item[1].config_idx)
        return [(key, bucket.config) for key, bucket in ordered]

    def _padding(self, lease: SlotLease, real_bs: int) -> list[int]:
        assert real_bs <= lease.key.bs, f"{real_bs} rows do not fit a bucket of {lease.key.bs}"
        return self.slot_for(lease).dummy_rids[: lease.key.bs - real_bs]

    def _plan_dummies(self, key: BucketKey, slot: int) -> Any:
        self._submodule.prepare_inputs(key)
        rids = self._dummies.ensure((key, slot), key.bs)
        config = self._configs[self._wanted[key]]
        rows = [self._submodule.template_row(config, rid) for rid in rids]
        step = self._step_runner.declare(key.graph_walk, rows, dummy_metadata(rids, key.graph_walk))
        self._step_runner.plan(step, PlanTarget(self.name, key, slot))
        return step

    def _autocast(self) -> AbstractContextManager[None]:
        return autocast_scope(self._autocast_dtype, self._device.type)

    def _marked(self, what: str) -> AbstractContextManager[object]:
        return self._resources.backend.range_marker(f"{self.name} {what}") if self._nvtx else _UNMARKED


def stage(static_inputs: Mapping[str, Tensor], name: str, value: Tensor) -> None:
    """Copy an input to the front of its buffer and zero the rest.

    Raises:
        ValueError: no buffer of this name, or more rows than it has.
    """
    if name not in static_inputs:
        raise ValueError(f"there is no static input {name!r}; there are {sorted(static_inputs)}")
    buffer, rows = static_inputs[name], value.shape[0]
    if rows > buffer.shape[0]:
        raise ValueError(f"input {name!r} has {rows} rows, its buffer {buffer.shape[0]}")
    if value.data_ptr() != buffer.data_ptr():
        buffer[:rows].copy_(value)
        buffer[rows:].zero_()
