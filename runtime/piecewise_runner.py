"""Captures one inner callable of a forward, a region, while the code around it stays eager."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .cuda_graph_runner import CudaGraphRunner
from .dummy_rows import PlanTarget, RowInfo, RowInputs, StepRunner
from .graph_backend import GraphPool
from .graph_buckets import BucketKey, CaptureSpec, CudaGraphConfig, CudaGraphSlot, SlotLease
from .graph_capture import autocast_scope
from .graph_reason import Reason
from .piecewise_config import (
    PiecewiseCallInputs,
    PiecewiseCaptureShape,
    PiecewiseConfig,
    PiecewiseGraphData,
    PiecewiseGraphKey,
)
from .piecewise_output import PiecewiseOutput
from .static_buffers import GraphResources


@dataclass(eq=False)
class PiecewiseCudaGraphRunner:
    """Replays a region at `run`, called by the forward that it is part of.

    Args:
        label: names the region: in its keys, plan buffers, logs and reports.
        resources: shared with the other runners: one pool for all regions.
        step_runner: the road by which a region's step is declared, planned and committed, captured or not.
        joint_comm_group: ranks that must keep the same buckets; None for one.
        node_name: prefix of the label in logs.
        memory_pool: None takes the pool of `resources`.
    """

    CAPTURE_BATCH_SIZES = CudaGraphRunner.CAPTURE_BATCH_SIZES
    NUM_WARMUP = CudaGraphRunner.NUM_WARMUP

    label: str
    config: PiecewiseConfig
    resources: GraphResources
    step_runner: StepRunner
    device: torch.device
    autocast_dtype: torch.dtype | None
    num_slots: int
    joint_comm_group: Any = None
    node_name: str | None = None
    memory_pool: GraphPool | None = None
    counts: Counter[Reason] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        pool = self.memory_pool or self.resources.pool
        resources = replace(self.resources, pool=pool)
        self.name = self.label if self.node_name is None else f"{self.node_name}.{self.label}"
        self._slot: int | None = None
        self._leased: SlotLease | None = None
        self._unnamed: dict[tuple[SlotLease, int], tuple[list[RowInputs], dict[int, RowInfo]]] = {}
        self._region = _Region(self)
        self._runner = CudaGraphRunner(
            self.name,
            self._region,
            resources,
            self.step_runner,
            self.device,
            self.autocast_dtype,
            self.joint_comm_group,
            self.num_slots,
        )
        self.bucket_keys = self._runner.bucket_keys
        self.warm_up, self.capture = self._runner.warm_up, self._runner.capture
        self.pool, self.own_outputs = pool, self._runner.own_outputs
        self.drop, self.finish_capture = self._runner.drop, self._runner.finish_capture

    @property
    def any_graphs(self) -> bool:
        return self._runner.any_graphs

    @property
    def dropped_shapes(self) -> list[tuple[int, int]]:
        """(batch size, total tokens) of the buckets that are missing."""
        return [(key.bs, key.num_tokens) for key in self._runner.dropped_buckets]

    @property
    def drop_reasons(self) -> dict[BucketKey, tuple[Reason, str]]:
        return self._runner.drop_reasons

    @property
    def graphs(self) -> dict[PiecewiseGraphKey, PiecewiseGraphData]:
        """Everything that is captured."""
        found = {}
        for key in self.bucket_keys():
            for slot in range(len(self.slots(key))):
                data = self._runner.slot_for(SlotLease(key, slot))
                shape = PiecewiseCaptureShape(key.bs, key.num_tokens)
                found[PiecewiseGraphKey(key.bs, key.num_tokens, slot)] = PiecewiseGraphData(
                    data.graph, data.static_inputs, data.static_outputs, data.dummy_rids, shape, key
                )
        return found

    def prepare_for_capture(self) -> list[CaptureSpec]:
        """Claim the region's buffers; see `CudaGraphRunner.prepare_for_capture`."""
        return self._runner.prepare_for_capture()

    def warmup_and_capture(self) -> None:
        """Capture every bucket; see `CudaGraphRunner.warmup_and_capture`."""
        self._runner.warmup_and_capture()

    def slots(self, key: BucketKey) -> list[CudaGraphSlot]:
        """The captured graphs of a bucket; none if it has none."""
        return self._runner.slots(key)

    def outputs(self, bs: int) -> dict[str, Tensor]:
        """The output buffers of the graphs for `bs` requests."""
        slots = [slot for key in self.bucket_keys() if key.bs == bs for slot in self.slots(key)]
        return {name: tensor for slot in slots for name, tensor in slot.static_outputs.items()}

    def has(self, key: BucketKey) -> bool:
        return self._runner.has(key)

    def release_graphs(self) -> None:
        """Forget every graph; the region is not part of the step any more."""
        self._runner.release_graphs()

    def can_run(self, batch_size: int, total_tokens: int | None = None) -> bool:
        """Whether a bucket holds the batch; without `total_tokens`, one token a request is meant."""
        return self._select(batch_size, total_tokens) is not None

    def lease_slot(self, batch_size: int, total_tokens: int | None = None) -> SlotLease | None:
        """What the next `run` of this batch replays, asked before the forward: asked again, it is the same."""
        key = self._select(batch_size, total_tokens)
        if key is None:
            return None
        if self._leased is None or self._leased.key != key:
            self._leased = self._runner.lease(key, self._slot)
        return self._leased

    def set_slot(self, slot: int) -> None:
        """Replay this graph slot from now on."""
        self._slot, self._leased = slot, None

    def run(
        self,
        static_inputs: Mapping[str, Tensor],
        request_ids: Sequence[int] | None = None,
        seq_lens: Sequence[int] | None = None,
        real_bs: int | None = None,
    ) -> PiecewiseOutput:
        """Replay the region for these inputs: copy in, declare and plan the padded step, replay, commit.

        Where no bucket fits, the region's Python runs on the inputs as they are, by the same road; `counts` has the
        reason of either.

        Args:
            static_inputs: by name, `[tokens, …]`; an input that is the region's buffer already is not copied.
            request_ids: of the batch; None: rows without a request.
            seq_lens: query tokens of each request; None: one each.
            real_bs: rows that are real, where the inputs are padded already.

        Raises:
            ValueError: an input that the region does not have, one that is missing, or more rows than its buffer has.
        """
        if static_inputs.keys() != self.config.inputs.keys():
            raise ValueError(f"region {self.label!r} takes {sorted(self.config.inputs)}, got {sorted(static_inputs)}")
        num_rows = next(t.shape[0] for name, t in static_inputs.items() if not self.config.inputs[name].per_request)
        bs = real_bs if real_bs is not None else len(request_ids or seq_lens or ()) or num_rows
        real_len = bs if seq_lens is None else sum(seq_lens)
        lease, self._leased = self.lease_slot(bs, max(real_len, num_rows)), None
        if lease is None:
            rows, info = self._rows(bs, request_ids, seq_lens)
            return self._run_eager(static_inputs, rows, info, real_len)
        rows, info = self._padded_rows(lease, bs, request_ids, seq_lens)
        return self._replay(lease, static_inputs, rows, info, bs, real_len)

    def run_in_place(self, key: BucketKey, real_bs: int) -> PiecewiseOutput:
        """`run` of rows without a request on a captured bucket whose static inputs hold them already."""
        lease = self._runner.lease(key, self._slot)
        rows, info = self._padded_rows(lease, real_bs, None, None)
        return self._replay(lease, {}, rows, info, real_bs, real_bs)

    def run_eager_in_place(self, key: BucketKey, real_bs: int) -> PiecewiseOutput:
        """What `run_in_place` computes, by the region's Python."""
        return PiecewiseOutput(self._runner.run_eager(key, {}), real_bs)

    def _replay(
        self,
        lease: SlotLease,
        inputs: Mapping[str, Tensor],
        rows: list[RowInputs],
        info: dict[int, RowInfo],
        bs: int,
        real_len: int,
    ) -> PiecewiseOutput:
        step = self.step_runner.declare(self.label, rows, info)
        self.step_runner.plan(step, PlanTarget(self.name, lease.key, lease.slot))
        outputs = self._runner.run_forward(lease, inputs)
        self.step_runner.commit(step)
        self._runner.release(lease, bs)
        self.counts[Reason.PIECEWISE] += 1
        return PiecewiseOutput(outputs, real_len)

    def run_eager(self, static_inputs: Mapping[str, Tensor], bs: int, real_len: int) -> PiecewiseOutput:
        """The region's Python, on its inputs as they are."""
        shape = PiecewiseCaptureShape(bs, next(iter(static_inputs.values())).shape[0])
        with autocast_scope(self.autocast_dtype, self.device.type):
            return PiecewiseOutput(dict(self.config.fn(PiecewiseCallInputs(static_inputs, shape))), real_len)

    def _rows(
        self, bs: int, request_ids: Sequence[int] | None, seq_lens: Sequence[int] | None
    ) -> tuple[list[RowInputs], dict[int, RowInfo]]:
        ids = range(bs) if request_ids is None else request_ids
        lens = [1] * bs if seq_lens is None else seq_lens
        rows = [RowInputs(rid, length, {}) for rid, length in zip(ids, lens, strict=True)]
        return rows, {rid: RowInfo(rid, self.label) for rid in ids}

    def _padded_rows(
        self, lease: SlotLease, bs: int, request_ids: Sequence[int] | None, seq_lens: Sequence[int] | None
    ) -> tuple[list[RowInputs], dict[int, RowInfo]]:
        """What a padded step declares. Rows without a request are the same at every step, and made once."""
        made = self._unnamed.get((lease, bs)) if request_ids is None and seq_lens is None else None
        if made is None:
            rows, info = self._rows(bs, request_ids, seq_lens)
            ids = [row.rid for row in rows]
            made = self._runner.pad_inputs(lease, rows), self._runner.step_metadata(lease, ids, info)
            if request_ids is None and seq_lens is None:
                self._unnamed[lease, bs] = made
        return made

    def _run_eager(
        self, inputs: Mapping[str, Tensor], rows: list[RowInputs], info: dict[int, RowInfo], real_len: int
    ) -> PiecewiseOutput:
        step = self.step_runner.declare(self.label, rows, info)
        self.step_runner.plan(step, PlanTarget(self.name, None, 0))
        output = self.run_eager(inputs, len(rows), real_len)
        self.step_runner.commit(step)
        self.counts[self._missing_reason(len(rows), real_len)] += 1
        return output

    def _missing_reason(self, bs: int, total_tokens: int) -> Reason:
        fitting = [key for key in self.drop_reasons if key.bs >= bs and key.num_tokens >= total_tokens]
        tightest = min(fitting, key=lambda key: (key.num_tokens, key.bs), default=None)
        return Reason.NO_BUCKET if tightest is None else self.drop_reasons[tightest][0]

    def _select(self, batch_size: int, total_tokens: int | None) -> BucketKey | None:
        tokens = batch_size if total_tokens is None else total_tokens
        return self._runner.select_bucket(self.label, batch_size, tokens)


class _Region:
    """A region in the form that the whole-forward runner captures."""

    def __init__(self, owner: PiecewiseCudaGraphRunner) -> None:
        self._owner = owner

    def graph_configs(self) -> list[CudaGraphConfig]:
        return [
            CudaGraphConfig(self._owner.label, (shape.bs,), tokens_per_row=None, token_buckets=(shape.total_tokens,))
            for shape in self._owner.config.shapes
        ]

    def claim(self, configs: Sequence[CudaGraphConfig]) -> None:
        config, buffers = self._owner.config, self._owner.resources.buffers
        for name, spec in config.inputs.items():
            rows = max(shape.bs if spec.per_request else shape.total_tokens for shape in config.shapes)
            buffers.claim(self._buffer(name), rows, spec.row_shape, spec.dtype)
        config.claim(config.shapes)

    def static_inputs(self, key: BucketKey) -> dict[str, Tensor]:
        buffers = self._owner.resources.buffers
        return {
            name: buffers.get(self._buffer(name), key.bs if spec.per_request else key.num_tokens)
            for name, spec in self._owner.config.inputs.items()
        }

    def template_row(self, config: CudaGraphConfig, rid: int) -> RowInputs:
        [bs], [tokens] = config.capture_batch_sizes, config.token_buckets
        return RowInputs(rid, tokens // bs, {})

    def prepare_inputs(self, key: BucketKey) -> None:
        for name, buffer in self.static_inputs(key).items():
            buffer.fill_(self._owner.config.inputs[name].fill)

    def forward(self, key: BucketKey, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        shape = PiecewiseCaptureShape(key.bs, key.num_tokens)
        return dict(self._owner.config.fn(PiecewiseCallInputs(inputs, shape)))

    def _buffer(self, name: str) -> str:
        return self._owner.config.inputs[name].buffer or f"{self._owner.name}.{name}"
