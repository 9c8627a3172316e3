"""What a profile of decode steps holds: the host's launches, the device's kernels, and the time between kernels.

Read from a Chrome trace as torch.profiler writes it. On a CPU, operators stand for kernels.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..runtime.tape_graph import REPLAY_RANGE
from .output import figure

STEP_RANGE = "ostinato step"
"""Around each step, for the profiler."""

GRAPH_LAUNCHES = ("cudaGraphLaunch", "cuGraphLaunch")
KERNEL_LAUNCHES = ("cudaLaunch", "cuLaunch")
COPIES = ("cudaMemcpy", "cudaMemset", "cuMemcpy", "cuMemset")

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_COMPUTES_NOTHING = re.compile(
    "aten::(alias|as_strided|chunk|contiguous|detach|empty|empty_like|empty_strided|expand|flatten|narrow|permute|"
    "promote_types|reshape|resize_|resolve_conj|resolve_neg|result_type|select|slice|split|squeeze|t|to|transpose|"
    "unbind|unflatten|unsqueeze|view)"
)


@dataclass(frozen=True)
class Span:
    """Something that took time; microseconds."""

    name: str
    start: float
    end: float

    @property
    def length(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Gap:
    """Time in which no kernel ran, and between which: the kernel that ended last, and the next to start."""

    length: float
    after: str
    before: str


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        host: the call of the step.
        graphs, launches, copies: what the host asked the device for: graphs, single kernels, copies.
        kernels: what came of it on the device, in order of start; those of a step that was launched ahead end later
            than the host's call.
    """

    host: Span
    graphs: list[Span]
    launches: list[Span]
    copies: list[Span]
    kernels: list[Span]


@dataclass(frozen=True)
class Picture:
    """What is drawn of a step: starts, from its own, and lengths in microseconds; of kernels all that ran meanwhile."""

    host: list[tuple[float, float]]
    launches: list[tuple[float, float]]
    kernels: list[tuple[float, float]]


def picture(steps: Sequence[Step]) -> Picture:
    """Of the step in the middle."""
    step = steps[len(steps) // 2]
    begin, end = step.host.start, max(step.host.end, step.kernels[-1].end)
    kernels = [kernel for one in steps for kernel in one.kernels if begin <= kernel.start < end]
    rows = [step.host], [*step.graphs, *step.launches, *step.copies], kernels
    return Picture(*([(span.start - begin, span.length) for span in row] for row in rows))


def draw(pictures: Sequence[tuple[str, Picture]], path: Path, *, on_gpu: bool) -> None:
    """Steps with their titles: the host's calls above, the device's kernels below; all on one scale of time."""
    with figure(path, 10, 1.2 + 1.3 * len(pictures), len(pictures), stacked=True) as every:
        for axes, (title, one) in zip(every, pictures, strict=True):
            for row, bars, colours in (
                (2.0, one.host, ["0.85"]),
                (2.0, one.launches, ["tab:red"]),
                (1.0, one.kernels, ["tab:blue", "tab:cyan"]),
            ):
                shown = [colours[i % len(colours)] for i in range(len(bars))]
                axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=shown)
            axes.set_yticks([2.0, 1.0], ["host: the call and its launches", "GPU: kernels" if on_gpu else "operators"])
            axes.set_title(title, loc="left", fontsize=9)
        every[-1].set_xlabel("µs" if on_gpu else "µs (tape on a CPU, no CUDA graphs)")


def read_steps(path: Path, *, on_gpu: bool) -> list[Step]:
    """The steps of a trace, in order."""
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]
    ranges = [_span(event) for event in events if event.get("cat") == "user_annotation"]
    hosts = _sorted(span for span in ranges if span.name == STEP_RANGE)
    return _device_steps(events, hosts) if on_gpu else _tape_steps(events, ranges, hosts)


def gaps(kernels: Sequence[Span]) -> list[Gap]:
    """Between kernels in order of start, which may overlap."""
    found, last = [], None
    for kernel in kernels:
        if last is not None and kernel.start > last.end:
            found.append(Gap(kernel.start - last.end, last.name, kernel.name))
        if last is None or kernel.end > last.end:
            last = kernel
    return found


def busy(kernels: Sequence[Span]) -> float:
    """Microseconds in which at least one kernel ran."""
    if not kernels:
        return 0.0
    return max(kernel.end for kernel in kernels) - kernels[0].start - sum(gap.length for gap in gaps(kernels))


def layer_of(names: Sequence[str], num_layers: int) -> Sequence[str]:
    """The names that repeat, one layer after the other, as often as there are layers; empty if none do."""
    for period in range(len(names) // num_layers, 0, -1):
        span = period * num_layers
        for start in range(len(names) - span + 1):
            if all(names[i] == names[i + period] for i in range(start, start + span - period)):
                return names[start : start + period]
    return ()


def _span(event: dict[str, Any]) -> Span:
    return Span(event["name"], event["ts"], event["ts"] + event["dur"])


def _within(span: Span, outer: Span) -> bool:
    return outer.start <= span.start < outer.end


def _sorted(spans: Iterable[Span]) -> list[Span]:
    return sorted(spans, key=lambda span: (span.start, -span.end))


def _device_steps(events: list[dict[str, Any]], hosts: list[Span]) -> list[Step]:
    """Of each step the driver's calls within it, and what these started, whenever that ran."""
    started: dict[Any, list[Span]] = defaultdict(list)
    calls: list[tuple[Span, Any]] = []
    for event in events:
        number = event.get("args", {}).get("correlation")
        if event.get("cat") in _ON_DEVICE:
            started[number].append(_span(event))
        elif event.get("cat") in ("cuda_runtime", "cuda_driver"):
            calls.append((_span(event), number))
    steps = []
    for host in hosts:
        own = [(call, number) for call, number in calls if _within(call, host)]
        graphs, launches, copies = (
            _sorted(call for call, _ in own if call.name.startswith(words))
            for words in (GRAPH_LAUNCHES, KERNEL_LAUNCHES, COPIES)
        )
        kernels = _sorted(kernel for _, number in own for kernel in started.get(number, ()))
        steps.append(Step(host, graphs, launches, copies, kernels))
    return steps


def _tape_steps(events: list[dict[str, Any]], ranges: list[Span], hosts: list[Span]) -> list[Step]:
    """Of each step the replays, the operators that Python called outside of them, and all operators, as kernels."""
    operators = _outermost(events)
    steps = []
    for host in hosts:
        own = [operator for operator in operators if _within(operator, host)]
        replays = [span for span in ranges if span.name == REPLAY_RANGE and _within(span, host)]
        called = [operator for operator in own if not any(_within(operator, replay) for replay in replays)]
        steps.append(Step(host, replays, called, [], own))
    return steps


def _outermost(events: list[dict[str, Any]]) -> list[Span]:
    """Operators that compute something, without those that they call."""
    spans = _sorted(_span(e) for e in events if e.get("cat") == "cpu_op" and not _COMPUTES_NOTHING.fullmatch(e["name"]))
    kept: list[Span] = []
    for span in spans:
        if not kept or span.start >= kept[-1].end:
            kept.append(span)
    return kept
