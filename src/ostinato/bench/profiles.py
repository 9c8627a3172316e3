"""`ostinato bench profile`: what the host launches in a step, what then runs on the device, and when nothing does."""

import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from ..model import Decoder
from .errors import BenchError
from .mode_subjects import MODES, LeftOut, affordable, check_mode, graphs_per_step, make_subject
from .modes import CHECKED_STEPS
from .output import Column, Report
from .subject import TAPE, Subject, place
from .timeline import STEP_RANGE, Gap, Span, Step, busy, draw, gaps, layer_of, picture, read_steps

WARM_STEPS = 3
"""Under the profiler, before those that count."""


@dataclass(frozen=True)
class GapPlace:
    """Gaps between two kernels, of a step on average."""

    after: str
    before: str
    count: float
    us: float


@dataclass(frozen=True)
class KernelTime:
    """Launches of one kernel, of a step on average."""

    name: str
    count: float
    us: float


@dataclass(frozen=True)
class ProfileCell:
    """Steps of one mode at one batch size and context.

    Numbers are of a step on average; microseconds are with the profiler watching.

    Attributes:
        median_ms: without the profiler, tokens on the host.
        graph_launches, kernel_launches, copies: asked for by the host.
        kernels: run by the device; `layer` are those of one layer, by name, where layers repeat.
        busy_us, idle_us: of the device; `between_us` of the idle time is before the first kernel of a step.
        largest_gap_us: of all, between `largest_gap_after` and `largest_gap_before`.
        gaps, by_kernel: most time first.
    """

    batch: int
    context: int
    mode: str
    median_ms: float
    graph_launches: float
    kernel_launches: float
    copies: float
    kernels: float
    layer: list[str]
    busy_us: float
    idle_us: float
    between_us: float
    largest_gap_us: float
    largest_gap_after: str
    largest_gap_before: str
    gaps: list[GapPlace]
    by_kernel: list[KernelTime]


@dataclass(frozen=True)
class ProfileResult:
    """Cells and, for the plot, the steps that each is made of."""

    device: torch.device
    dtype: str
    cells: list[ProfileCell]
    steps: list[list[Step]]
    left_out: list[LeftOut] = field(default_factory=list)


def measure(
    decoder: Decoder,
    cells: Sequence[tuple[int, int]],
    modes: Sequence[str],
    steps: int,
    *,
    traces: Path | None = None,
    seconds: float | None = None,
    keep: Callable[[ProfileResult], None] = lambda result: None,
) -> ProfileResult:
    """Profile so many steps of each mode at each batch size and context.

    Args:
        cells: (batch, context).
        traces: a folder for `MODE-BATCH-CONTEXT.json`, a Chrome trace each; None: they are not kept.
        seconds: after which no cell is begun.
        keep: called after every cell.

    Raises:
        BenchError: steps did not run in their mode, or the host launched something else than the mode says.
    """
    result = ProfileResult(decoder.device, str(decoder.dtype).removeprefix("torch."), [], [])
    room = room_of(steps)
    with nullcontext(traces) if traces is not None else tempfile.TemporaryDirectory() as folder:
        assert folder is not None, "one of the two is a folder"
        Path(folder).mkdir(parents=True, exist_ok=True)
        for batch, context in affordable(decoder, cells, room, seconds, result.left_out):
            kv_cache = None
            for mode in modes:
                subject = make_subject(decoder, batch, context, mode, room, kv_cache=kv_cache)
                kv_cache = subject.kv_cache
                path = Path(folder) / f"{mode}-{batch}-{context}.json"
                cell, found = _cell(subject, mode, steps, path)
                result.cells.append(cell)
                result.steps.append(found)
            del subject, kv_cache
            keep(result)
    return result


def room_of(steps: int) -> int:
    """Tokens that a sequence may get, and more than it does."""
    return CHECKED_STEPS + 2 * steps + WARM_STEPS + 8


def _cell(subject: Subject, mode: str, steps: int, path: Path) -> tuple[ProfileCell, list[Step]]:
    subject.step(CHECKED_STEPS)
    before = subject.counts()
    median = statistics.median(subject.step(steps + 1))
    record(subject, steps, path)
    check_mode(dict(subject.counts() - before), MODES[mode][1], mode)
    found = read_steps(path, on_gpu=subject.on_gpu)
    check_launches(found, steps, graphs_per_step(subject, mode), mode)
    return summarise(found, subject.batch, subject.context, mode, median, subject.pieces.num_layers), found


def record(subject: Subject, steps: int, path: Path) -> None:
    """A Chrome trace of some steps, each within a range of its own."""
    from torch.profiler import ProfilerActivity, profile, record_function

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if subject.on_gpu else [])]
    with profile(activities=activities) as profiler:
        for _ in range(WARM_STEPS):
            subject.engine.step()  # without a wait: the device has work when the first step that counts is launched
        for _ in range(steps):
            with record_function(STEP_RANGE):
                subject.engine.step()
        subject.wait()
    profiler.export_chrome_trace(str(path))


def check_launches(steps: Sequence[Step], count: int, graphs: int, mode: str) -> None:
    """Raises BenchError unless every step launched so many graphs and, in one graph, nothing else."""
    if len(steps) != count:
        raise BenchError(f"{mode}: the profile holds {len(steps)} of {count} steps")
    for number, step in enumerate(steps):
        launched = f"{len(step.graphs)} graphs and {len(step.launches)} kernels"
        if len(step.graphs) != graphs:
            raise BenchError(f"{mode}: step {number} launched {launched}; it must be {graphs} graphs")
        if mode in ("whole", "lazy") and step.launches:
            names = sorted({launch.name for launch in step.launches})
            raise BenchError(f"{mode}: step {number} launched {launched} ({', '.join(names)}); it must be none")
        if not step.kernels:
            raise BenchError(f"{mode}: the profile has no kernel of step {number}")


def summarise(
    steps: Sequence[Step], batch: int, context: int, mode: str, median_ms: float, num_layers: int
) -> ProfileCell:
    """Averages over the steps."""
    count = len(steps)
    kernels = [kernel for step in steps for kernel in step.kernels]
    found = gaps(kernels)
    idle = sum(gap.length for gap in found)
    within = sum(gap.length for step in steps for gap in gaps(step.kernels))
    largest = max(found, key=lambda gap: gap.length, default=Gap(0.0, "", ""))
    return ProfileCell(
        batch=batch,
        context=context,
        mode=mode,
        median_ms=median_ms,
        graph_launches=sum(len(step.graphs) for step in steps) / count,
        kernel_launches=sum(len(step.launches) for step in steps) / count,
        copies=sum(len(step.copies) for step in steps) / count,
        kernels=len(kernels) / count,
        layer=[short(name) for name in layer_of([kernel.name for kernel in steps[-1].kernels], num_layers)],
        busy_us=busy(kernels) / count,
        idle_us=idle / count,
        between_us=(idle - within) / count,
        largest_gap_us=largest.length,
        largest_gap_after=short(largest.after),
        largest_gap_before=short(largest.before),
        gaps=_gap_places(found, count)[:5],
        by_kernel=_kernel_times(kernels, count),
    )


def short(name: str) -> str:
    """A kernel's name without what C++ adds to it."""
    return name.removeprefix("void ").partition("<")[0].partition("(")[0]


def _gap_places(found: Sequence[Gap], steps: int) -> list[GapPlace]:
    lengths: dict[tuple[str, str], list[float]] = defaultdict(list)
    for gap in found:
        lengths[short(gap.after), short(gap.before)].append(gap.length)
    places = [GapPlace(*names, len(all_) / steps, sum(all_) / steps) for names, all_ in lengths.items()]
    return sorted(places, key=lambda place: -place.us)


def _kernel_times(kernels: Sequence[Span], steps: int) -> list[KernelTime]:
    lengths: dict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        lengths[short(kernel.name)].append(kernel.length)
    times = [KernelTime(name, len(all_) / steps, sum(all_) / steps) for name, all_ in lengths.items()]
    return sorted(times, key=lambda time: -time.us)


def report(result: ProfileResult, model: str) -> Report:
    """The modes side by side, to be shown."""
    columns = [
        Column("batch", "d"),
        Column("context", "d"),
        Column("mode"),
        Column("ms a step", ".3f"),
        Column("graph launches", ".2f"),
        Column("kernel launches", ".2f"),
        Column("copies", ".2f"),
        Column("kernels", ".1f"),
        Column("of a layer", "d"),
        Column("busy, µs", ".1f"),
        Column("idle, µs", ".1f"),
        Column("of it between steps", ".1f"),
        Column("largest gap, µs", ".1f"),
    ]
    rows = [
        (
            cell.batch,
            cell.context,
            cell.mode,
            cell.median_ms,
            cell.graph_launches,
            cell.kernel_launches,
            cell.copies,
            cell.kernels,
            len(cell.layer) or None,
            cell.busy_us,
            cell.idle_us,
            cell.between_us,
            cell.largest_gap_us,
        )
        for cell in result.cells
    ]
    where = place(result.device, model, result.dtype)
    notes = [
        f"{where['device']}, torch {where['torch']}; ms without the profiler, all else with it, of a step on average",
        *(f"largest gap, {at(c)}: after {c.largest_gap_after}, before {c.largest_gap_before}" for c in result.cells),
        *(f"batch {one.batch}, context {one.context}: {one.why}" for one in result.left_out),
    ]
    if result.device.type == "cuda":
        notes += [f"a layer, {at(cell)}: {', '.join(cell.layer)}" for cell in result.cells if cell.layer]
    else:
        notes.insert(0, f"{TAPE}. Graphs are replays of the tape, kernels are operators")
    document = {
        "command": "profile",
        "version": 2,
        "where": where,
        "cells": [asdict(cell) for cell in result.cells],
        "left_out": [asdict(one) for one in result.left_out],
    }
    return Report(f"what decode steps of {model} launch, {result.dtype}", columns, rows, notes, document)


def at(cell: ProfileCell) -> str:
    return f"{cell.mode}, batch {cell.batch}, context {cell.context}"


def plot(result: ProfileResult, path: Path) -> None:
    """One step of each cell."""
    parts = [picture(steps) for steps in result.steps]
    on_gpu = result.device.type == "cuda"
    draw(list(zip(map(at, result.cells), parts, strict=True)), path, on_gpu=on_gpu)
