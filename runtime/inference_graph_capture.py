"""When one bucket that is captured late runs eagerly, is captured, and replays."""

import logging
from enum import Enum

logger = logging.getLogger(__name__)


class StepMode(Enum):
    """What the next step does."""

    WARMUP = "warmup"
    CAPTURE = "capture"
    REPLAY = "replay"


class InferenceGraphCapture:
    """Counts the steps of a bucket: eager ones first, then one that captures, then replays.

    It is off until `enabled(True)`. Ask `step_mode` before a step and call `advance` once after it, however it went.
    REPLAY with `is_captured` False means that the capture failed: run eagerly and `disable()`.

    Args:
        warmup_steps: eager steps before the capture; at least 1 is taken.

    Attributes:
        graph_id: of the captured graph, None without one.
        capture_attempted: whether a capture was recorded or the step that was to make one is over.
    """

    def __init__(self, warmup_steps: int) -> None:
        self.warmup_steps = max(1, warmup_steps)
        self.graph_id: int | None = None
        self.capture_attempted = False
        self.num_steps = 0
        self._enabled = False
        self._disabled = False
        self._batch_size: int | None = None
        self._query_len: int | None = None

    def enabled(self, on: bool) -> "InferenceGraphCapture":
        """Switch it on or off; after `disable` it stays off. Returns itself."""
        self._enabled = on and not self._disabled
        return self

    @property
    def is_enabled(self) -> bool:
        return self._enabled

    @property
    def is_captured(self) -> bool:
        return self.graph_id is not None

    @property
    def step_mode(self) -> StepMode:
        if not self._enabled or self.num_steps < self.warmup_steps:
            return StepMode.WARMUP
        if self.num_steps == self.warmup_steps and not self.capture_attempted:
            return StepMode.CAPTURE
        return StepMode.REPLAY

    def advance(self) -> None:
        """A step is over, in whatever mode, whether it failed or not."""
        if self.step_mode is StepMode.CAPTURE:
            self.capture_attempted = True
        self.num_steps += 1

    def record_capture(self, graph_id: int, batch_size: int, query_len: int) -> None:
        """A graph for exactly this shape is there."""
        self.capture_attempted = True
        self.graph_id, self._batch_size, self._query_len = graph_id, batch_size, query_len

    def check_static_shape(self, batch_size: int, query_len: int) -> bool:
        """Whether the graph serves this shape. The length of the context is data and no part of it."""
        if not self.is_captured:
            return False
        for name, captured, wanted in (
            ("batch size", self._batch_size, batch_size),
            ("query length", self._query_len, query_len),
        ):
            if captured != wanted:
                logger.warning("the graph was captured for %s %s, but the step has %s", name, captured, wanted)
                return False
        return True

    def disable(self) -> None:
        """Off for good: every further step is an eager one."""
        self._enabled, self._disabled = False, True
