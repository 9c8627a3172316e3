"""`ostinato bench modes`: the same decode steps piecewise, whole and eager, taking turns in one process."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from ..model import Decoder
from ..runtime import EngineConfig
from .errors import BenchError
from .mode_subjects import MODES, LeftOut, affordable, check_mode, graphs_per_step, make_subject
from .output import Column, Report
from .subject import TAPE, Subject, place
from .timing import read_ceiling
from .traffic import step_bytes

PREFILLS = 3
"""Of each mode, in turns, behind those of which the last has its graph captured."""

UNTIMED_PREFILLS = EngineConfig.graph_warmup_steps + 1

EAGER_SHARE = 3
"""An eager turn has this part of the steps of another."""

CHECKED_STEPS = 6
"""Whose tokens are compared before anything is timed; more than a lazy capture waits."""


@dataclass(frozen=True)
class ModeCell:
    """Steps of one mode at one batch size and context; milliseconds, with tokens on the host.

    Attributes:
        step_bytes: that a step must move.
        ceiling_share: of the read ceiling of the same process.
        speedup_over_eager: of medians; None where eager was not measured.
        prefill_ms: of one prompt of the context, to its first token; None but in the first cell of a context.
    """

    batch: int
    context: int
    mode: str
    median_ms: float
    p10_ms: float
    p90_ms: float
    tokens_per_second: float
    step_bytes: int
    ceiling_share: float
    speedup_over_eager: float | None
    graphs_per_step: int
    graph_bytes: int
    capture_seconds: float
    start_seconds: float
    prefill_ms: float | None


@dataclass(frozen=True)
class ModesResult:
    """Attributes:
    read_ceiling: bytes a second.
    cells: by context and batch size, whatever the order in which they were measured.
    """

    device: torch.device
    dtype: str
    read_ceiling: float
    cells: list[ModeCell]
    left_out: list[LeftOut] = field(default_factory=list)


def measure(
    decoder: Decoder,
    cells: Sequence[tuple[int, int]],
    modes: Sequence[str],
    *,
    rounds: int,
    steps: int,
    ceiling: float | None = None,
    seconds: float | None = None,
    keep: Callable[[ModesResult], None] = lambda result: None,
) -> ModesResult:
    """Each batch size and context in each mode.

    Args:
        cells: (batch, context).
        rounds, steps: turns of each mode, and steps of a turn that are timed.
        ceiling: bytes a second; None: measured here.
        seconds: after which no cell is begun.
        keep: called after every cell.

    Raises:
        BenchError: tokens differ between modes, or steps did not run in the mode that is measured.
    """
    ceiling = ceiling or read_ceiling(decoder.device)
    result = ModesResult(decoder.device, str(decoder.dtype).removeprefix("torch."), ceiling, [])
    room = room_of(rounds, steps)
    for batch, context in affordable(decoder, cells, room, seconds, result.left_out):
        prompts = PREFILLS if all(cell.context != context for cell in result.cells) else 0
        result.cells.extend(_cell(decoder, batch, context, modes, rounds, steps, room, prompts, ceiling))
        result.cells.sort(key=lambda cell: (cell.context, cell.batch))
        keep(result)
    return result


def room_of(rounds: int, steps: int) -> int:
    """Tokens that a sequence may get, and more than it does."""
    return CHECKED_STEPS + rounds * (steps + 1) + 4


def _cell(
    decoder: Decoder,
    batch: int,
    context: int,
    modes: Sequence[str],
    rounds: int,
    steps: int,
    room: int,
    prompts: int,
    ceiling: float,
) -> list[ModeCell]:
    subjects: dict[str, Subject] = {}
    kv_cache, tokens, at = None, {}, f"batch {batch}, context {context}"
    for mode in modes:  # each fills the cache anew, and then writes what the one before wrote, or its tokens differ
        subject = subjects[mode] = make_subject(
            decoder, batch, context, mode, room, kv_cache=kv_cache, prompt_capture_sizes=(context,) if prompts else ()
        )
        kv_cache = subject.kv_cache
        subject.step(CHECKED_STEPS)
        tokens[mode] = [row[: CHECKED_STEPS + 1] for row in subject.tokens()]
    for mode in modes[1:]:
        check_tokens(tokens[modes[0]], tokens[mode], f"{at}: {modes[0]} and {mode}")
    before = {mode: subject.counts() for mode, subject in subjects.items()}
    times: dict[str, list[float]] = {mode: [] for mode in modes}
    turns = {mode: -(-steps // EAGER_SHARE) if mode == "eager" else steps for mode in modes}
    for turn in range(rounds):
        for mode in modes if turn % 2 == 0 else modes[::-1]:
            times[mode] += subjects[mode].step(turns[mode] + 1)
    ran = {mode: subject.counts() - before[mode] for mode, subject in subjects.items()}
    prefills: dict[str, list[float]] = {mode: [] for mode in modes}
    for _ in range(UNTIMED_PREFILLS + prompts if prompts else 0):
        for mode in modes:
            prefills[mode].append(subjects[mode].prefill())
    medians = {mode: statistics.median(times[mode]) for mode in modes}
    cells = []
    for mode, subject in subjects.items():
        check_mode(dict(ran[mode]), MODES[mode][1], f"{at}: {mode}")
        ordered, median = sorted(times[mode]), medians[mode]
        length = context + CHECKED_STEPS + rounds * (turns[mode] + 1) // 2  # halfway
        num_bytes = step_bytes(decoder.config, [length] * batch, decoder.dtype.itemsize)
        summary = subject.engine.graph_report()
        tenth = len(ordered) // 10
        cells.append(
            ModeCell(
                batch=batch,
                context=context,
                mode=mode,
                median_ms=median,
                p10_ms=ordered[tenth],
                p90_ms=ordered[-1 - tenth],
                tokens_per_second=1e3 * batch / median,
                step_bytes=num_bytes,
                ceiling_share=num_bytes / (median * 1e-3) / ceiling,
                speedup_over_eager=medians["eager"] / median if "eager" in medians else None,
                graphs_per_step=graphs_per_step(subject, mode),
                graph_bytes=summary.num_bytes,
                capture_seconds=summary.seconds,
                start_seconds=subject.start_seconds,
                prefill_ms=statistics.median(prefills[mode][UNTIMED_PREFILLS:]) if prompts else None,
            )
        )
    return cells


def check_tokens(first: list[list[int]], second: list[list[int]], what: str) -> None:
    """Raises BenchError with the first row and place where tokens differ."""
    for row, (left, right) in enumerate(zip(first, second, strict=True)):
        for number, (a, b) in enumerate(zip(left, right, strict=True)):
            if a != b:
                raise BenchError(f"{what} give other tokens: row {row}, token {number}: {a} and {b}; nothing was timed")


def report(result: ModesResult, model: str) -> Report:
    """The comparison, to be shown."""
    columns = [
        Column("batch", "d"),
        Column("context", "d"),
        Column("mode"),
        Column("ms a step", ".3f"),
        Column("p10", ".3f"),
        Column("p90", ".3f"),
        Column("tok/s", ".1f"),
        Column("speed-up over eager", ".3f"),
        Column("MB to move", ".1f"),
        Column("share of ceiling", ".1%"),
        Column("a prompt, ms", ".1f"),
        Column("graphs a step", "d"),
        Column("graph memory, MB", ".1f"),
        Column("capture, s", ".2f"),
    ]
    rows = [
        (
            cell.batch,
            cell.context,
            cell.mode,
            cell.median_ms,
            cell.p10_ms,
            cell.p90_ms,
            cell.tokens_per_second,
            cell.speedup_over_eager,
            cell.step_bytes / 1e6,
            cell.ceiling_share,
            cell.prefill_ms,
            cell.graphs_per_step,
            cell.graph_bytes / 1e6,
            cell.capture_seconds,
        )
        for cell in result.cells
    ]
    where = place(result.device, model, result.dtype)
    notes = [
        f"{where['device']}, torch {where['torch']}; tokens of all modes equal, every step in its mode",
        "a prompt: one of the context, to its first token; in one graph, but for eager steps and where it takes parts",
        f"read ceiling {result.read_ceiling / 1e9:.1f} GB/s; lazy: captured when first used",
    ]
    notes += [f"batch {one.batch}, context {one.context}: {one.why}" for one in result.left_out]
    if result.device.type != "cuda":
        notes.insert(0, TAPE)
    document = {
        "command": "modes",
        "version": 2,
        "where": where,
        "read_ceiling": result.read_ceiling,
        "cells": [asdict(cell) for cell in result.cells],
        "left_out": [asdict(one) for one in result.left_out],
    }
    return Report(f"decode steps of {model}, {result.dtype}, greedy", columns, rows, notes, document)


def plot(result: ModesResult, path: Path) -> None:
    """Speed-up over eager, and time beside what the bytes would take at the read ceiling, over the batch size."""
    from .output import figure

    label = "" if result.device.type == "cuda" else "\n(tape on a CPU, no CUDA graphs)"
    with figure(path, 10, 4, 2) as [speedups, times]:
        for mode, context in dict.fromkeys((cell.mode, cell.context) for cell in result.cells):
            line = [cell for cell in result.cells if (cell.mode, cell.context) == (mode, context)]
            batches, name = [cell.batch for cell in line], f"{mode}, {context} tokens"
            if line[0].speedup_over_eager is not None:
                speedups.plot(batches, [cell.speedup_over_eager for cell in line], "o-", label=name)
            times.plot(batches, [cell.median_ms for cell in line], "o-", label=name)
        for context in dict.fromkeys(cell.context for cell in result.cells):
            floor = {c.batch: 1e3 * c.step_bytes / result.read_ceiling for c in result.cells if c.context == context}
            times.plot(list(floor), list(floor.values()), "k--", label=f"bytes at the ceiling, {context} tokens")
        speedups.set_ylabel(f"speed-up over eager{label}")
        times.set_ylabel(f"ms a step{label}")
        times.set_yscale("log")
        for axes in (speedups, times):
            axes.set_xlabel("batch size")
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:.0f}")
            axes.legend(fontsize=7)
