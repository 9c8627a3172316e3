"""Buckets that are captured between two steps: when that is due, how they are checked, and whether they may replay."""

from collections.abc import Sequence

from .decode_graphs import DecodeGraphs
from .graph_aliases import find_aliases
from .graph_buckets import BucketKey
from .graph_reason import Path, Reason
from .graph_self_test import self_test_late
from .inference_graph_capture import InferenceGraphCapture, StepMode


class LateCaptures:
    """Of one engine: all buckets where captures are lazy, and elsewhere the regions that a hook has cut anew.

    Args:
        lazy_steps: eager steps of a bucket before its capture; None: a bucket is captured when it is first met.
        self_test: compare each with its Python before it serves.
    """

    def __init__(self, graphs: DecodeGraphs, lazy_steps: int | None, self_test: bool) -> None:
        self._graphs = graphs
        self._lazy_steps = lazy_steps
        self._self_test = self_test
        self._machines: dict[tuple[Path, BucketKey], InferenceGraphCapture] = {}
        self._num_captured = 0

    def ready(self, path: Path, key: BucketKey) -> bool:
        """Whether the bucket's graphs are there and right; those that are missing are captured and compared first."""
        graphs = self._graphs
        if not graphs.has(path, key):
            if graphs.capture_bucket(path, key):
                self._check(path, key)
            if not graphs.has(path, key):
                return False
        machine = self._machines.get((path, key))
        if machine is not None and not machine.is_captured:
            self._num_captured += 1
            machine.record_capture(self._num_captured, key.bs, 1)
        assert machine is None or machine.check_static_shape(key.bs, 1), "a bucket replays its own shape"
        return True

    def _check(self, path: Path, key: BucketKey) -> None:
        """What is done at start for all graphs, for those that were captured now."""
        aliases = find_aliases(self._graphs)
        if aliases:
            self._graphs.fail(path, key, "; ".join(aliases), Reason.ALIASED)
        elif self._self_test:
            self_test_late(self._graphs, path, key)

    def advance(self, path: Path, key: BucketKey) -> None:
        """A step that was to run on this path and bucket is over, however it ran."""
        if self._lazy_steps is None:
            return
        if (path, key) not in self._machines:
            self._machines[path, key] = InferenceGraphCapture(self._lazy_steps).enabled(True)
        machine = self._machines[path, key]
        machine.advance()
        if machine.step_mode is StepMode.REPLAY and not machine.is_captured:
            machine.disable()

    def step_mode(self, path: Path, key: BucketKey, cuts: Sequence[int]) -> StepMode | None:
        """What the next step of a bucket does, with the blocks cut there; None where nothing is lazy."""
        if self._lazy_steps is None:
            return None
        machine = self._machines.get((path, key))
        if machine is not None and not machine.is_enabled and path is Path.PIECEWISE and self._graphs.would_recut(cuts):
            machine = None  # as `recut` will forget it
        return machine.step_mode if machine is not None else StepMode.WARMUP

    def recut(self, cuts: Sequence[int]) -> None:
        """Cut the blocks there. What failed may have been a region that is gone: its bucket gets another attempt."""
        if self._graphs.recut(cuts):
            tried = [at for at, one in self._machines.items() if at[0] is Path.PIECEWISE and not one.is_enabled]
            for at in tried:
                del self._machines[at]
