"""`ostinato bench break`: features switched on one by one, and what becomes of the graphs."""

import gc
import logging
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path as FilePath
from typing import Any

import torch

from ..model import Decoder, KVCache
from ..runtime import EngineConfig
from ..runtime.graph_reason import REPLAYS, Path, Reason
from ..runtime.token_masks import has_mask_function
from .break_features import BREAKS, PLAIN, Break, quiet, sizes_of
from .errors import BenchError
from .mode_subjects import LeftOut, affordable, make_subject
from .output import Column, Report
from .subject import TAPE, Subject, place

BATCH = 4
"""Where none is given."""

WARM_STEPS = 3


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


def _look(hidden: object, rows: object) -> None:
    """A hook that changes nothing."""


@dataclass(frozen=True)
class BreaksResult:
    """Attributes:
    batch, context: rows of a plain step, and tokens of each.
    too_small: names of features that a batch of this size is too small for.
    """

    device: torch.device
    dtype: str
    batch: int
    context: int
    cells: list[BreakCell]
    too_small: list[str]


def measure(
    decoder: Decoder,
    batch: int,
    context: int,
    steps: int,
    breaks: Sequence[Break] = BREAKS,
    keep: Callable[[BreaksResult], None] = lambda result: None,
) -> BreaksResult:
    """Each feature by itself, timed in turns with the plain step; all on one KV cache.

    Args:
        steps: of a turn, of which there are two; 0: nothing is timed.
        keep: called after every feature.

    Raises:
        BenchError: the KV cache does not fit; or steps ran for another reason than their feature's: the others have
            been measured all the same.
    """
    room, left_out = room_of(steps), list[LeftOut]()
    if not list(affordable(decoder, [(batch, context)], room, None, left_out)):
        raise BenchError(f"batch {batch}, context {context}: {left_out[0].why}")
    chosen = [one for one in breaks if one.least <= batch]
    too_small = [one.name for one in breaks if one.least > batch]
    result = BreaksResult(decoder.device, str(decoder.dtype).removeprefix("torch."), batch, context, [], too_small)
    wrong = []
    with quiet(logging.ERROR):
        shared = _subject(decoder, PLAIN, batch, context, room)
        plain = _subject(decoder, PLAIN, batch, context, room, shared.kv_cache) if steps else None
        for one in chosen:
            if one.options or one.prepare is not None:
                subject = _subject(decoder, one, batch, context, room, shared.kv_cache)
            else:
                subject = shared
                subject.restart(one.requests(batch), room)
            if one.prepare is not None:
                one.prepare(subject)
            hook = subject.engine.hooks.add(decoder.config.num_layers // 2, _look) if one.hook else None
            try:
                result.cells.append(_cell(subject, one, plain, steps, room))
            except BenchError as error:
                wrong.append(str(error))
            if hook is not None:
                hook.remove()
            del subject
            gc.collect()  # its graphs, before there are others
            keep(result)
    if wrong:
        raise BenchError("; ".join(wrong))
    return result


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
        plain.restart(PLAIN.requests(plain.batch), room)  # as long as the feature's
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


def report(result: BreaksResult, model: str) -> Report:
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
        for cell in result.cells
    ]
    said = refusals()
    notes = [f"not built: {name}: {text}" for name, text in said.items()]
    if result.too_small:
        notes.insert(0, f"not for a batch of {result.batch}: {'; '.join(result.too_small)}")
    if result.device.type != "cuda":
        notes.insert(0, TAPE)
    document = {
        "command": "break",
        "version": 2,
        "where": place(result.device, model, result.dtype),
        "batch": result.batch,
        "context": result.context,
        "cells": [asdict(cell) for cell in result.cells],
        "refused": said,
    }
    rows_of = f"{result.batch} row{'s' * (result.batch > 1)} of {result.context} tokens"
    return Report(f"one feature at a time, {model}, {result.dtype}, {rows_of}", columns, rows, notes, document)


def plot(result: BreaksResult, path: FilePath) -> None:
    """Times the plain step, one bar a feature.

    Raises:
        ValueError: nothing was timed.
    """
    from .output import figure

    cells = [cell for cell in result.cells if cell.cost is not None]
    if not cells:
        raise ValueError("--plot draws times: give --steps above 0")
    label = "" if result.device.type == "cuda" else " (tape on a CPU, no CUDA graphs)"
    with figure(path, 8, 5) as [axes]:
        axes.barh([f"{cell.name}: {cell.reason}" for cell in cells][::-1], [cell.cost for cell in cells][::-1])
        axes.axvline(1.0, color="k", linewidth=0.8)
        axes.set_xlabel(f"times the plain step{label}")


def _subject(
    decoder: Decoder, one: Break, batch: int, context: int, room: int, kv_cache: KVCache | None = None
) -> Subject:
    options = {"capture_sizes": sizes_of(batch), **one.options}
    return make_subject(decoder, batch, context, "whole", room, one.requests(batch), kv_cache, **options)


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
