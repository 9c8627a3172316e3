"""The padding rows of captured steps, and the names they go by."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from .graph_buckets import BucketKey

_MARK = b"\1padding/"


@dataclass(frozen=True)
class RowInfo:
    """What a step knows of one request beside its tensors."""

    rid: int
    graph_walk: str
    is_padding: bool = False
    request: Any = None


@dataclass(frozen=True)
class RowInputs:
    """The inputs of one row: `length` tokens, and tensors with them in front. Length 0: no token, and so no block."""

    rid: int
    length: int
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True)
class PlanTarget:
    """Whose plan buffers a plan is written to: those of one label, bucket and graph slot."""

    label: str
    key: BucketKey | None
    slot: int


class StepRunner(Protocol):
    """The declare → plan → commit road of a step, which eager and captured steps share."""

    def open_rows(self, rids: Sequence[int]) -> None:
        """Admit padding rows, once each."""

    def reset_rows(self, rids: Sequence[int], free: bool) -> None:
        """Put padding rows back to where they stood when opened; `free` gives their storage back too."""

    def declare(self, graph_walk: str, rows: Sequence[RowInputs], metadata: Mapping[int, RowInfo]) -> Any:
        """Say which rows take part with how many tokens; returns the step."""

    def plan(self, step: Any, target: PlanTarget) -> None:
        """Write what the host decides for the step into the target's plan buffers, on the current stream."""

    def commit(self, step: Any) -> None:
        """The step has been run: real rows move on."""


def dummy_rid_handle(name: str) -> int:
    """A negative number for a padding row, one-to-one with its name; beyond 64 bits, so that no tensor takes it as an
    index."""
    return -int.from_bytes(_MARK + name.encode(), "big")


def dummy_rid_name(handle: int) -> str:
    """The name that a handle was made of; for logs."""
    digits = abs(handle).to_bytes((handle.bit_length() + 7) // 8, "big")
    if handle >= 0 or not digits.startswith(_MARK):
        raise ValueError(f"{handle} is not the handle of a padding row")
    return digits.removeprefix(_MARK).decode()


def dummy_metadata(rids: Iterable[int], graph_walk: str) -> dict[int, RowInfo]:
    """Stand-ins for the request that a padding row does not have."""
    return {rid: RowInfo(rid, graph_walk, is_padding=True) for rid in rids}


class DummyRowPool:
    """Padding rows, opened once and kept: no step that pads has to allocate.

    Args:
        prefix: tells the rows of this pool from those of others.
        step_runner: opens, resets and closes them.
        resources: whatever the rows hold storage in; each that has `reset_rows(rids, free)` is told too.
    """

    def __init__(self, prefix: str, step_runner: StepRunner, resources: Iterable[object] = ()) -> None:
        self._prefix = prefix
        self._step_runner = step_runner
        self._resources = list(resources)
        self._opened: set[int] = set()

    def handles(self, key: Hashable, bs: int) -> list[int]:
        """Handles of the first `bs` rows of a key, whether opened or not: negative, the same at every call."""
        return [dummy_rid_handle(f"{self._prefix}/{key}/{index}") for index in range(bs)]

    def ensure(self, key: Hashable, bs: int) -> list[int]:
        """`bs` open rows of a key; those that were opened before are not opened again."""
        rids = self.handles(key, bs)
        new = [rid for rid in rids if rid not in self._opened]
        if new:
            self._step_runner.open_rows(new)
            self._opened.update(new)
        return rids

    def reset(self, rids: Sequence[int], free: bool = False) -> None:
        """Put rows back to rest; with `free`, without storage."""
        assert self._opened.issuperset(rids), "only rows of this pool are reset"
        self._step_runner.reset_rows(rids, free)
        for resource in self._resources:
            reset = getattr(resource, "reset_rows", None)
            if reset is not None:
                reset(rids, free)

    def release_all(self) -> None:
        """Give back the storage of all rows, which only captures need: a replay pads with rows of length 0."""
        self.reset(sorted(self._opened), free=True)
