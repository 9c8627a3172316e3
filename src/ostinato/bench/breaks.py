"""`ostinato bench break`: features switched on one by one, and what becomes of the graphs."""

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path as FilePath
from typing import Any

import torch

from ..model import Decoder
from ..runtime import EngineConfig, SamplingParams
from ..runtime.graph_reason import REPLAYS, Path, Reason
from ..runtime.token_masks import has_mask_function
from .errors import BenchError
from .mode_subjects import make_subject
from .output import Column, Report
from .subject import TAPE, Subject, place

BATCH = 4
SMALLER = 2
"""Captured sizes are these two."""

WARM_STEPS = 3


@dataclass(frozen=True)
class Break:
    """A feature, or a fault.

    Attributes:
        reason: that its steps must give.
        params: of each request.
        options: of the engine, beside `graphs="whole"`.
        prepare: done to the engine before it decodes, for good.
        hook: in front of a middle layer.
        rows: requests that decode side by side.
        fresh: steps are counted from the first one on, and not timed.
    """

    name: str
    reason: Reason
    params: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0))
    options: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[Subject], None] | None = None
    hook: bool = False
    rows: int = BATCH
    fresh: bool = False


@dataclass(frozen=True)
class BreakCell:
    """What a feature's steps ran as.

    Attributes:
        graphs_per_step: replays; 0 where the step is eager.
        padding_rows: of a step.
        runs_ahead: whether a step is launched before the tokens of the last one are looked at, on a GPU.
        median_ms, cost: of a step, and over that of the plain one; None: not timed.
    """

    name: str
    path: str
    reason: str
    graphs_per_step: int
    padding_rows: int
    runs_ahead: bool
    median_ms: float | None = None
    cost: float | None = None


def _drop(*sizes: int, reason: Reason = Reason.REPLAY_FAILED) -> Callable[[Subject], None]:
    """As if the buckets of these sizes had failed for a reason."""

    def drop(subject: Subject) -> None:
        graphs = subject.engine.decode_runner.graphs
        assert graphs is not None, "there are buckets"
        for key in [key for config in graphs.configs for key in config.bucket_keys() if key.bs in sizes]:
            graphs.fail(Path.WHOLE, key, "dropped by ostinato bench break", reason)

    return drop


def _same_logits(prompt_ids: object, output_ids: object, logits: object) -> None:
    """A logits processor that changes nothing."""


def _look(hidden: object, rows: object) -> None:
    """A hook that changes nothing."""


def _drawn(**more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.8, seed=7, **more)


PLAIN = Break("nothing: greedy requests", Reason.WHOLE)
BREAKS = (
    PLAIN,
    Break("draws with a seed each", Reason.WHOLE, _drawn()),
    Break("top-k, top-p, min-p", Reason.WHOLE, _drawn(top_k=20, top_p=0.9, min_p=0.01)),
    Break("penalties", Reason.WHOLE, _drawn(repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.5)),
    Break("logit bias", Reason.WHOLE, _drawn(logit_bias={1: 1.0})),
    Break("n = 4 samples of one prompt", Reason.WHOLE, _drawn(n=BATCH), rows=1),
    Break("log-probabilities", Reason.WHOLE, SamplingParams(temperature=0.0, logprobs=True, top_logprobs=2)),
    Break("a batch between two sizes", Reason.WHOLE, rows=BATCH - 1),
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
    Break("a batch above the largest graph", Reason.SPLIT, prepare=_drop(BATCH)),
    Break(
        "the same, without splitting",
        Reason.REPLAY_FAILED,
        options={"split_large_batches": False},
        prepare=_drop(BATCH),
    ),
    Break("a bucket that was dropped, a larger one left", Reason.WHOLE, prepare=_drop(SMALLER), rows=SMALLER),
    Break("no bucket left: replays failed", Reason.REPLAY_FAILED, prepare=_drop(BATCH, SMALLER)),
    Break(
        "graphs above their memory budget",
        Reason.OVER_BUDGET,
        # Not by a budget: what a graph that is dropped leaves in the pool, the next one has for nothing.
        prepare=_drop(BATCH, SMALLER, reason=Reason.OVER_BUDGET),
    ),
    Break("capture when used, first steps", Reason.WARMUP, options={"capture": "lazy"}, fresh=True),
    Break("piecewise on request", Reason.PIECEWISE, options={"graphs": "piecewise"}),
    Break("graphs switched off", Reason.OFF, options={"graphs": "off"}),
)


def measure(
    decoder: Decoder,
    context: int,
    steps: int,
    breaks: Sequence[Break] = BREAKS,
    keep: Callable[[list[BreakCell]], None] = lambda cells: None,
) -> list[BreakCell]:
    """Each feature by itself, timed in turns with the plain step.

    Args:
        steps: of a turn, of which there are two; 0: nothing is timed.
        keep: called after every feature.

    Raises:
        BenchError: steps ran for another reason than their feature's; the others have been measured all the same.
    """
    room = room_of(steps)
    plain = _subject(decoder, PLAIN, context, room) if steps else None
    shared = _subject(decoder, PLAIN, context, room)
    cells: list[BreakCell] = []
    wrong = []
    for one in breaks:
        if one.options or one.prepare is not None:
            subject = _subject(decoder, one, context, room)
        else:
            subject = shared
            subject.restart([one.params] * one.rows, room)
        if one.prepare is not None:
            one.prepare(subject)
        hook = subject.engine.hooks.add(decoder.config.num_layers // 2, _look) if one.hook else None
        try:
            cells.append(_cell(subject, one, plain, steps, room))
        except BenchError as error:
            wrong.append(str(error))
        if hook is not None:
            hook.remove()
        keep(cells)
    if wrong:
        raise BenchError("; ".join(wrong))
    return cells


def _cell(subject: Subject, one: Break, plain: Subject | None, steps: int, room: int) -> BreakCell:
    if not one.fresh:
        subject.step(WARM_STEPS)
    before, padding = subject.counts(), subject.engine.graph_report().num_padding_rows
    launches = _can_launch(subject)
    subject.step(2)
    ran = _check(subject, before, one)
    chunks = ran.total() // 2
    rows = (subject.engine.graph_report().num_padding_rows - padding) // 2
    path = Path.EAGER if one.reason not in REPLAYS else Path.PIECEWISE if _is_piecewise(one.reason) else Path.WHOLE
    graphs = 0 if path is Path.EAGER else chunks * (_num_regions(subject) if path is Path.PIECEWISE else 1)
    median = cost = None
    if plain is not None and not one.fresh:
        plain.restart([PLAIN.params] * PLAIN.rows, room)  # as long as the feature's
        plain.step(WARM_STEPS + 2)
        times, others = subject.step(steps + 1), plain.step(steps + 1)
        times, others = times + subject.step(steps + 1), others + plain.step(steps + 1)
        median = statistics.median(times)
        cost = median / statistics.median(others)
        _check(subject, before, one)
    return BreakCell(one.name, path.value, one.reason.name, graphs, rows, launches, median, cost)


def room_of(steps: int) -> int:
    """Tokens that a sequence may get, and more than it does."""
    return 2 * (steps + 1) + WARM_STEPS + 4


def _check(subject: Subject, before: Counter[Reason], one: Break) -> Counter[Reason]:
    """What the steps since `before` ran as; raises BenchError where that is not the feature's reason."""
    ran = subject.counts() - before
    if set(ran) != {one.reason}:
        names = {reason.name: count for reason, count in ran.items()}
        raise BenchError(f"{one.name}: steps should have run as {one.reason.name}, but ran as {names}")
    return ran


def refusals() -> dict[str, str]:
    """What is not built here, and what asking for it says; names of the options are vLLM's."""
    said = {}
    for name, value in (
        ("enable_lora", True),
        ("speculative_config", {"num_speculative_tokens": 3}),
        ("enable_prefix_caching", True),
        ("tensor_parallel_size", 2),
        ("pipeline_parallel_size", 2),
    ):
        try:
            EngineConfig(**{name: value})  # type: ignore[arg-type]
        except TypeError as error:
            said[name] = str(error).removeprefix("EngineConfig.__init__() ")
        else:
            raise BenchError(f"{name} is taken, and nothing is known of it here")
    return said


def report(cells: Sequence[BreakCell], device: torch.device, model: str, dtype: str) -> Report:
    """The features, to be shown."""
    columns = [
        Column("switched on"),
        Column("runs"),
        Column("reason"),
        Column("graphs a step", "d"),
        Column("padding rows", "d"),
        Column("launched ahead"),
        Column("ms a step", ".3f"),
        Column("times the plain step", ".3f"),
    ]
    rows = [
        (
            cell.name,
            cell.path,
            cell.reason,
            cell.graphs_per_step,
            cell.padding_rows,
            "yes" if cell.runs_ahead else "no",
            cell.median_ms,
            cell.cost,
        )
        for cell in cells
    ]
    said = refusals()
    notes = [f"not built: {name}: {text}" for name, text in said.items()]
    if device.type != "cuda":
        notes.insert(0, TAPE)
    document = {
        "command": "break",
        "version": 1,
        "where": place(device, model, dtype),
        "batch": BATCH,
        "cells": [asdict(cell) for cell in cells],
        "refused": said,
    }
    return Report(f"one feature at a time, {BATCH} rows of {model}, {dtype}", columns, rows, notes, document)


def plot(cells: Sequence[BreakCell], device: torch.device, path: FilePath) -> None:
    """Times the plain step, one bar a feature.

    Raises:
        ValueError: nothing was timed.
    """
    from .output import figure

    cells = [cell for cell in cells if cell.cost is not None]
    if not cells:
        raise ValueError("--plot draws times: give --steps above 0")
    label = "" if device.type == "cuda" else " (tape on a CPU, no CUDA graphs)"
    with figure(path, 8, 5) as [axes]:
        axes.barh([f"{cell.name}: {cell.reason}" for cell in cells][::-1], [cell.cost for cell in cells][::-1])
        axes.axvline(1.0, color="k", linewidth=0.8)
        axes.set_xlabel(f"times the plain step{label}")


def _subject(decoder: Decoder, one: Break, context: int, room: int) -> Subject:
    options = {"capture_sizes": (SMALLER, BATCH), "max_num_seqs": BATCH, **one.options}
    return make_subject(decoder, BATCH, context, "whole", room, params=[one.params] * one.rows, **options)


def _is_piecewise(reason: Reason) -> bool:
    return reason in (Reason.PIECEWISE, Reason.HOOK, Reason.LOGITS_PROCESSOR)


def _num_regions(subject: Subject) -> int:
    graphs = subject.engine.decode_runner.graphs
    assert graphs is not None, "piecewise steps have graphs"
    return len(graphs.regions_of(graphs.configs[0].bucket_keys()[0]))


def _can_launch(subject: Subject) -> bool:
    """Whether the next step can be handed to a GPU before the tokens of the last one are looked at."""
    runner = subject.engine.decode_runner
    if runner.graphs is None:
        return False
    batch = runner.batch_of(subject.sequences)
    chunks = runner.decide(batch)
    [key, *more] = [chunk.key for chunk in chunks]
    road: Any = batch.cg_key_info
    is_there = key is not None and not more and runner.graphs.has(chunks[0].path, key)
    waits = batch.eager_piece is not None or road.logprobs or has_mask_function(subject.sequences)
    return is_there and not waits
