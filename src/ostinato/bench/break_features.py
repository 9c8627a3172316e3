"""What `ostinato bench break` switches on, for batches of any size."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from ..runtime import SamplingParams
from ..runtime.graph_reason import Path, Reason
from .subject import Subject

Rows = Callable[[int], int]
"""A number of rows, of the number in a batch."""


def sizes_of(batch: int) -> tuple[int, ...]:
    """The sizes that are captured: the batch, and half of it."""
    return tuple(sorted({max(1, _half(batch)), batch}))


def _all(batch: int) -> int:
    return batch


def _half(batch: int) -> int:
    return batch // 2


def _one_less(batch: int) -> int:
    return batch - 1


@dataclass(frozen=True)
class Break:
    """A feature, or a fault.

    Attributes:
        reason: that its steps must give.
        params: of each request.
        options: of the engine, beside `graphs="whole"`.
        prepare: done to the engine before it decodes, for good.
        hook: in front of a middle layer.
        rows: that decode side by side, of a batch.
        samples: the rows are samples of one prompt.
        fresh: steps are counted from the first one on, and not timed.
        least: the smallest batch for which it is something.
    """

    name: str
    reason: Reason
    params: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0))
    options: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[Subject], None] | None = None
    hook: bool = False
    rows: Rows = _all
    samples: bool = False
    fresh: bool = False
    least: int = 1

    def requests(self, batch: int) -> list[SamplingParams]:
        """Of a batch."""
        rows = self.rows(batch)
        return [replace(self.params, n=rows)] if self.samples else [self.params] * rows


def _drop(*sizes: Rows, reason: Reason = Reason.REPLAY_FAILED) -> Callable[[Subject], None]:
    """As if the buckets of these sizes had failed for a reason."""

    def drop(subject: Subject) -> None:
        graphs = subject.engine.decode_runner.graphs
        assert graphs is not None, "there are buckets"
        gone = {size(subject.batch) for size in sizes}
        with quiet(logging.CRITICAL):
            for key in [key for config in graphs.configs for key in config.bucket_keys() if key.bs in gone]:
                graphs.fail(Path.WHOLE, key, "dropped by ostinato bench break", reason)

    return drop


@contextmanager
def quiet(level: int) -> Iterator[None]:
    """Nothing below this level is logged: what was switched on is known, and is a row of the table."""
    logger = logging.getLogger("ostinato")
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)


def _same_logits(prompt_ids: object, output_ids: object, logits: object) -> None:
    """A logits processor that changes nothing."""


def _drawn(**more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.8, seed=7, **more)


PLAIN = Break("nothing: greedy requests", Reason.WHOLE)
BREAKS = (
    PLAIN,
    Break("draws with a seed each", Reason.WHOLE, _drawn()),
    Break("top-k, top-p, min-p", Reason.WHOLE, _drawn(top_k=20, top_p=0.9, min_p=0.01)),
    Break("penalties", Reason.WHOLE, _drawn(repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.5)),
    Break("logit bias", Reason.WHOLE, _drawn(logit_bias={1: 1.0})),
    Break("samples of one prompt, n > 1", Reason.WHOLE, _drawn(), samples=True, least=2),
    Break("log-probabilities", Reason.WHOLE, SamplingParams(temperature=0.0, logprobs=True, top_logprobs=2)),
    Break("a batch between two sizes", Reason.WHOLE, rows=_one_less, least=3),
    Break("a hook on hidden states", Reason.HOOK, hook=True),
    Break(
        "a Python logits processor",
        Reason.LOGITS_PROCESSOR,
        SamplingParams(temperature=0.0, logits_processors=[_same_logits]),
    ),
    Break("a list of allowed tokens", Reason.WHOLE, SamplingParams(temperature=0.0, allowed_token_ids=[1, 2, 3])),
    Break(
        "a function of allowed tokens",
        Reason.WHOLE,
        SamplingParams(temperature=0.0, allowed_token_ids=lambda prompt_ids, output_ids: [1, 2, 3]),
    ),
    Break("a batch above the largest graph", Reason.SPLIT, prepare=_drop(_all), least=2),
    Break(
        "the same, without splitting",
        Reason.REPLAY_FAILED,
        options={"split_large_batches": False},
        prepare=_drop(_all),
        least=2,
    ),
    Break("a bucket that was dropped, a larger one left", Reason.WHOLE, prepare=_drop(_half), rows=_half, least=2),
    Break("no bucket left: replays failed", Reason.REPLAY_FAILED, prepare=_drop(_all, _half)),
    Break(
        "graphs above their memory budget",
        Reason.OVER_BUDGET,
        # Not by a budget: what a graph that is dropped leaves in the pool, the next one has for nothing.
        prepare=_drop(_all, _half, reason=Reason.OVER_BUDGET),
    ),
    Break("capture when used, first steps", Reason.WARMUP, options={"capture": "lazy"}, fresh=True),
    Break("piecewise on request", Reason.PIECEWISE, options={"graphs": "piecewise"}),
    Break("graphs switched off", Reason.OFF, options={"graphs": "off"}),
)
