"""Capturing the buckets of several runners: one order, one pool, failures dropped alike on every rank."""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .graph_backend import GraphBackend, GraphPool, collector_off
from .graph_buckets import BucketKey, CudaGraphSlot
from .graph_ledger import GraphLedger, LedgerEntry
from .graph_nodes import GraphCounts
from .graph_reason import Reason
from .rank_agreement import agree_across_ranks, barrier

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]

COUNTED = ("nodes", "edges", "programmatic_edges")


class CapturingRunner(Protocol):
    """What captures need of a runner; a bucket is all of its graph slots or nothing."""

    name: str

    @property
    def pool(self) -> GraphPool: ...

    def bucket_keys(self) -> list[BucketKey]:
        """In the order of the configs, equal on every rank."""

    def warm_up(self, key: BucketKey, times: int | None = None) -> None: ...
    def capture(self, key: BucketKey) -> None: ...
    def drop(self, key: BucketKey, reason: Reason, detail: str) -> None: ...
    def slots(self, key: BucketKey) -> list[CudaGraphSlot]: ...
    def own_outputs(self, key: BucketKey) -> list[Tensor]: ...
    def finish_capture(self) -> None: ...


@dataclass(frozen=True)
class CaptureSummary:
    """What a pass of captures took; bytes are the device's, graphs and their pool together."""

    num_captured: int
    num_buckets: int
    seconds: float
    num_bytes: int


class Capturer:
    """Warms up and captures, within a memory budget.

    Args:
        budget_bytes: that all graphs may take together; a bucket that goes beyond it is dropped. None: no limit.
        comm_group: ranks that must keep the same buckets; None for one rank.
    """

    def __init__(
        self, backend: GraphBackend, device: torch.device, comm_group: Any = None, budget_bytes: int | None = None
    ) -> None:
        self._backend = backend
        self._device = device
        self._comm_group = comm_group
        self._budget_bytes = budget_bytes
        self.ledger = GraphLedger()
        self._warm_seconds: dict[tuple[str, BucketKey], float] = {}

    def warm_up(self, runners: Iterable[CapturingRunner]) -> None:
        """Run every bucket eagerly, largest first, so that captures may come late and compile nothing."""
        for runner, key in _largest_first(runners):
            self._warm_up(runner, key)

    def capture(
        self,
        runners: Sequence[CapturingRunner],
        *,
        warm: bool = False,
        num_warmups: int | None = None,
        progress: Progress | None = None,
    ) -> CaptureSummary:
        """Capture every bucket of the runners, largest first over all of them.

        A bucket that fails is dropped with its reason and logged with the state of the memory; ranks drop alike.

        Args:
            warm: the buckets have been warmed up before.
            num_warmups: eager runs before each capture; None: as many as the runner is used to.
            progress: called with (buckets done, buckets in all).
        """
        started, before = time.perf_counter(), self._backend.memory_bytes()
        todo = _largest_first(runners)
        captured: set[tuple[str, BucketKey]] = set()
        with collector_off():
            for index, (runner, key) in enumerate(todo):
                is_warm = warm or self._warm_up(runner, key, num_warmups)
                # As many barriers on every rank, whatever failed where; no work is left running when a capture begins.
                self._backend.synchronize()
                barrier(self._comm_group)
                if is_warm and self._capture_within_budget(runner, key):
                    captured.add((runner.name, key))
                if progress is not None:
                    progress(index + 1, len(todo))
        for runner in runners:
            self._agree(runner, captured)
            runner.finish_capture()
        num_bytes = max(0, self._backend.memory_bytes() - before)
        self.ledger.device_bytes += num_bytes
        return CaptureSummary(len(captured), len(todo), time.perf_counter() - started, num_bytes)

    def capture_one(self, runner: CapturingRunner, key: BucketKey) -> bool:
        """Warm up and capture one bucket; every rank does so at the same step."""
        is_warm = self._warm_up(runner, key)
        self._backend.synchronize()
        barrier(self._comm_group)
        is_captured = is_warm and self._capture_within_budget(runner, key)
        [agreed] = agree_across_ranks(self._comm_group, [is_captured], self._device)
        if is_captured and not agreed:
            runner.drop(key, Reason.RANK_DISAGREED, "another rank has no graph for it")
        runner.finish_capture()
        return agreed

    def _warm_up(self, runner: CapturingRunner, key: BucketKey, times: int | None = None) -> bool:
        started = time.perf_counter()
        is_warm = self._try(runner, key, lambda key: runner.warm_up(key, times))
        self._warm_seconds[runner.name, key] = time.perf_counter() - started
        return is_warm

    def _capture_within_budget(self, runner: CapturingRunner, key: BucketKey) -> bool:
        used, pool, held = self._account(runner)
        started = time.perf_counter()
        if not self._try(runner, key, runner.capture):
            return False
        seconds = time.perf_counter() - started
        used_after, pool_after, held_after = self._account(runner)
        outputs = runner.own_outputs(key)
        counts = [self._backend.count_nodes(slot.graph) for slot in runner.slots(key)]
        entry = LedgerEntry(
            runner=runner.name,
            key_info="" if key.cg_key_info is None else str(key.cg_key_info),
            batch_size=key.bs,
            num_tokens=key.num_tokens,
            pool_bytes=pool_after - pool,
            driver_bytes=(used_after - used) - (held_after - held),
            output_bytes=sum(output.nbytes for output in outputs),
            num_copies=len(outputs),
            counts=GraphCounts(*(_sum(getattr(one, name) for one in counts) for name in COUNTED)),
            warm_up_seconds=self._warm_seconds.pop((runner.name, key), 0.0),
            capture_seconds=seconds,
        )
        total = self.ledger.graph_bytes + entry.graph_bytes
        if self._budget_bytes is None or total <= self._budget_bytes:
            self.ledger.entries.append(entry)
            return True
        detail = f"{total} bytes of graphs are above the budget of {self._budget_bytes}"
        runner.drop(key, Reason.OVER_BUDGET, detail)
        logger.warning("%s: no graph for batch size %d: %s", runner.name, key.bs, detail)
        return False

    def _account(self, runner: CapturingRunner) -> tuple[int, int, int]:
        """Bytes of the device in use, of the pool, and of all that the allocator holds."""
        backend = self._backend
        return backend.memory_bytes(), backend.pool_bytes(runner.pool), backend.allocator_bytes()

    def _try(self, runner: CapturingRunner, key: BucketKey, work: Callable[[BucketKey], None]) -> bool:
        try:
            work(key)
        except Exception as error:
            detail = f"{type(error).__name__}: {error}"
            runner.drop(key, Reason.CAPTURE_FAILED, detail)
            state = self._backend.memory_state()
            # The text, not the error: whoever keeps log records would keep its traceback, and with it the engine.
            logger.error(
                "%s: no graph for batch size %d, %d tokens: %s (%s)", runner.name, key.bs, key.num_tokens, detail, state
            )
            return False
        return True

    def _agree(self, runner: CapturingRunner, captured: set[tuple[str, BucketKey]]) -> None:
        keys = runner.bucket_keys()
        flags = [(runner.name, key) in captured for key in keys]
        for key, own, all_ranks in zip(
            keys, flags, agree_across_ranks(self._comm_group, flags, self._device), strict=True
        ):
            if own and not all_ranks:
                captured.discard((runner.name, key))
                runner.drop(key, Reason.RANK_DISAGREED, "another rank has no graph for it")
                logger.error("%s: batch size %d is dropped: another rank has no graph for it", runner.name, key.bs)


def _sum(numbers: Iterable[int | None]) -> int | None:
    known = list(numbers)
    return None if None in known else sum(n for n in known if n is not None)


def _largest_first(runners: Iterable[CapturingRunner]) -> list[tuple[CapturingRunner, BucketKey]]:
    pairs = [(runner, key) for runner in runners for key in runner.bucket_keys()]
    return sorted(pairs, key=lambda pair: (pair[1].bs, pair[1].num_tokens), reverse=True)
