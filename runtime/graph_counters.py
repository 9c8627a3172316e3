"""How often steps ran in which way, and what that cost."""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from .capture_list import Budget, best_sizes, token_waste
from .graph_buckets import BucketKey
from .graph_dispatch import Chunk
from .graph_reason import DROPPED, REPLAYS, Path, Reason

logger = logging.getLogger(__name__)

EAGER_SHARE_WARNED = 0.01
EAGER_STEPS_JUDGED = 100

WASTE_MARGIN = 0.02
"""A better list is suggested where the share of padding among all rows would fall by more than this."""
STEPS_JUDGED = 1000

EXPECTED_EAGER = frozenset((Reason.OFF, Reason.FORCED, Reason.PREFILL, Reason.WARMUP))
"""Eager on purpose; no warning is due."""


UNREMARKABLE = frozenset((Reason.WHOLE, Reason.PIECEWISE)) | EXPECTED_EAGER
"""What an engine does as it was told; anything else is logged when it first happens."""


@dataclass
class GraphCounters:
    """Counts since the engine started.

    Attributes:
        by_reason: chunks of steps (a step is one chunk unless it is split); of prompts only whether they replayed.
        prompts: batches of prompts, by what decided how they ran.
        batches: how many decode steps had each number of sequences.
        num_padding_rows: rows that were computed for nobody.
        wasted_seconds: of the time of replays and eager steps on a bucket, the share of their padding rows; and what
            an unplanned eager step took longer than the bucket's replays have so far.
    """

    by_reason: Counter[Reason] = field(default_factory=Counter)
    prompts: Counter[Reason] = field(default_factory=Counter)
    batches: Counter[int] = field(default_factory=Counter)
    num_padding_rows: int = 0
    wasted_seconds: float = 0.0
    _replays: dict[BucketKey, tuple[int, float]] = field(default_factory=dict)
    _warned: bool = False
    _steps: int = 0
    _judged_at: int = STEPS_JUDGED
    _suggested: bool = False

    @property
    def num_decodes(self) -> int:
        return self.by_reason.total() - self.by_reason[Reason.PREFILL] - self.by_reason[Reason.PROMPT]

    @property
    def num_eager_decodes(self) -> int:
        """Those that nobody asked for."""
        return sum(n for reason, n in self.by_reason.items() if reason not in REPLAYS | EXPECTED_EAGER)

    @property
    def replay_seconds(self) -> dict[int, float]:
        """What a step took that replayed graphs of each size, on average, over all kinds of sampling."""
        sums: dict[int, tuple[int, float]] = {}
        for key, (number, seconds) in self._replays.items():
            before = sums.get(key.bs, (0, 0.0))
            sums[key.bs] = before[0] + number, before[1] + seconds
        return {size: seconds / number for size, (number, seconds) in sorted(sums.items())}

    def count_batch(self, batch: int, sizes: Sequence[int]) -> None:
        """A decode step of `batch` sequences was begun, where graphs of `sizes` are (none, where they are off).

        Logs once which list would be better, after 1,000, 2,000, 4,000 … steps.
        """
        self.batches[batch] += 1
        self._steps += 1
        if self._steps == self._judged_at:
            self._judged_at *= 2
            if sizes and not self._suggested:
                self._suggest(sizes)

    def _suggest(self, sizes: Sequence[int]) -> None:
        tuned = best_sizes(self.batches, Budget(len(sizes)), largest=sizes[-1])
        now, then = token_waste(self.batches, sizes), token_waste(self.batches, tuned)
        if now > then + WASTE_MARGIN:
            self._suggested = True
            logger.warning(
                "%.1f %% of the rows of %d decode steps were padding; %.1f %% would be with as many graphs as there "
                "are, at most, by capture_sizes=%s",
                *(100 * now, self._steps, 100 * then, tuned),
            )

    def count_prompts(self, reason: Reason) -> None:
        """A batch of prompts has been run, and why the way it was; logs when a graph that should be there was not."""
        self.prompts[reason] += 1
        self.by_reason[Reason.PROMPT if reason is Reason.PROMPT else Reason.PREFILL] += 1
        if self.prompts[reason] == 1 and reason in DROPPED:
            logger.warning("prompts run eagerly: %s", reason.value)

    def count(self, chunk: Chunk, seconds: float) -> None:
        """A chunk has been run, and its tokens are on the host."""
        self.by_reason[chunk.reason] += 1
        if self.by_reason[chunk.reason] == 1 and chunk.reason not in UNREMARKABLE:
            logger.warning("decode steps run %s: %s", chunk.path.value, chunk.reason.value)
        self.num_padding_rows += chunk.num_padding_rows
        if chunk.key is not None:
            self.wasted_seconds += seconds * chunk.num_padding_rows / chunk.key.bs
            num_replays, total = self._replays.get(chunk.key, (0, 0.0))
            if chunk.path is not Path.EAGER:
                self._replays[chunk.key] = num_replays + 1, total + seconds
            elif num_replays and chunk.reason not in EXPECTED_EAGER:
                self.wasted_seconds += max(0.0, seconds - total / num_replays)
        self._warn()

    def _warn(self) -> None:
        if self._warned or self.num_decodes < EAGER_STEPS_JUDGED:
            return
        share = self.num_eager_decodes / self.num_decodes
        if share > EAGER_SHARE_WARNED:
            self._warned = True
            reasons = {r.name: n for r, n in self.by_reason.items() if r not in REPLAYS | EXPECTED_EAGER}
            logger.warning("%.1f %% of decode steps run without a graph: %s", 100 * share, reasons)
