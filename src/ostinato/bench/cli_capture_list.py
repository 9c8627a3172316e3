"""`ostinato bench capture-list`, as a command."""

import json as json_module
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from .cli_options import CAPTURE_SIZES, Json, Plot, output

if TYPE_CHECKING:
    from .capture_list import Traffic

_traffic = partial(Option, rich_help_panel="Batch sizes, one of these")
_budget = partial(Option, rich_help_panel="Budget, one of these")


class Minimise(StrEnum):
    """What the best list makes least."""

    ROWS = "rows"
    PER_BATCH = "per-batch"
    MS = "ms"


def capture_list(
    report: Annotated[
        Path | None,
        _traffic(
            "--from", metavar="FILE", help="JSON of llm.graph_report().to_dict(), with times, or llm.batch_histogram()."
        ),
    ] = None,
    normal: Annotated[
        str | None, _traffic("--normal", metavar="CENTER:DEVIATION", help="A normal distribution.")
    ] = None,
    trace: Annotated[
        Path | None, _traffic(metavar="FILE", help="Simulate these arrivals: JSON, [[second, output tokens], …].")
    ] = None,
    rate: Annotated[float | None, _traffic(help="Simulate random arrivals, so many a second.")] = None,
    mean_tokens: Annotated[float, Option(help="With --rate: output tokens of a request.")] = 200.0,
    requests: Annotated[int, Option(help="With --rate: how many requests.")] = 10_000,
    seed: Annotated[int, Option(help="With --rate: makes arrivals repeatable.")] = 0,
    step_ms: Annotated[float, Option(help="With --trace or --rate, where no replay times are: of a step.")] = 10.0,
    replay_ms: Annotated[
        Path | None, Option("--replay-ms", metavar="FILE", help='Milliseconds of a replay: JSON, {"8": 0.9, …}.')
    ] = None,
    max_num_seqs: Annotated[int | None, Option(help="Default: the largest batch; 256 where none is given.")] = None,
    sizes: Annotated[
        int | None, _budget("--sizes", help="So many graphs. Default: as many as the default list.")
    ] = None,
    graph_memory: Annotated[float | None, _budget("--graph-memory", help="Megabytes of all graphs.")] = None,
    capture_time: Annotated[float | None, _budget("--capture-time", help="Seconds of all captures at start.")] = None,
    graph_mb: Annotated[float | None, Option(help="With --graph-memory, without a report: of one graph.")] = None,
    capture_ms: Annotated[float | None, Option(help="With --capture-time, without a report: of one capture.")] = None,
    force: Annotated[list[int] | None, Option(help="A size that must be in; may be given several times.")] = None,
    minimise: Annotated[
        Minimise | None,
        Option(help="Rows computed, the per-b measure, or milliseconds. Default: ms if known, or rows."),
    ] = None,
    kv_fraction: Annotated[
        float, Option(help="For the per-b measure: share of a step's bytes that grow with it.")
    ] = 1.0,
    weights_gb: Annotated[float | None, Option(help="With --kv-gb, for the same: weights that a step reads.")] = None,
    kv_gb: Annotated[float | None, Option(help="Keys and values of one sequence.")] = None,
    compare_with: Annotated[list[str] | None, Option("--list", help=f"Compare this one, too: {CAPTURE_SIZES}")] = None,
    out: Annotated[
        Path | None,
        output("--out", "-o", metavar="FILE", help="Write the best list for EngineConfig(capture_sizes=…)."),
    ] = None,
    json: Json = False,
    plot: Plot = None,
) -> None:
    """What lists of capture sizes waste on padding, and the best list of a budget. Needs neither model nor GPU."""
    from ..runtime.capture_list import StepBytes
    from ..runtime.graph_buckets import parse_sizes
    from . import capture_list as lists

    times = {} if replay_ms is None else lists.numbers(json_module.loads(replay_ms.read_text()), replay_ms)
    traffic = _traffic_of(report, normal, trace, rate, mean_tokens, requests, seed, step_ms, max_num_seqs, times)
    largest = max_num_seqs or max(traffic.batches)
    every = range(1, largest + 1)
    traffic = lists.Traffic(
        traffic.source,
        traffic.batches,
        times or traffic.replay_ms,
        traffic.graph_bytes if graph_mb is None else dict.fromkeys(every, 1e6 * graph_mb),
        traffic.capture_seconds if capture_ms is None else dict.fromkeys(every, capture_ms / 1e3),
    )
    if (weights_gb is None) != (kv_gb is None):
        raise ValueError("--weights-gb and --kv-gb need each other")
    by_bytes = StepBytes(weights_gb, kv_gb) if weights_gb is not None and kv_gb is not None else None
    objective, costs = lists.compare(
        traffic,
        largest,
        count=sizes,
        memory_bytes=None if graph_memory is None else round(1e6 * graph_memory),
        capture_seconds=capture_time,
        forced=force or (),
        others={f"given {number}": parse_sizes(text) for number, text in enumerate(compare_with or (), 1)},
        minimise=None if minimise is None else minimise.value,
        kv_fraction=kv_fraction if by_bytes is None else by_bytes.kv_fraction,
    )
    if out is not None:
        lists.write_list(out, traffic, objective, costs[-1])
    if plot is not None:
        lists.plot(costs, traffic, plot)
    said = f"{kv_fraction:g}" if by_bytes is None else f"b·{kv_gb:g} / ({weights_gb:g} + b·{kv_gb:g})"
    lists.report(traffic, objective, costs, said).show(as_json=json)


def _traffic_of(
    report: Path | None,
    normal: str | None,
    trace: Path | None,
    rate: float | None,
    mean_tokens: float,
    requests: int,
    seed: int,
    step_ms: float,
    max_num_seqs: int | None,
    times: dict[int, float],
) -> "Traffic":
    from . import arrivals
    from . import capture_list as lists

    if [report, normal, trace, rate].count(None) != 3:
        raise ValueError("batch sizes come from one of --from, --normal, --trace and --rate")
    if report is not None:
        return lists.read_traffic(report)
    largest = max_num_seqs or 256
    if normal is not None:
        center, _, deviation = normal.partition(":")
        return lists.normal_traffic(float(center), float(deviation or "nan"), largest)
    if step_ms <= 0:
        raise ValueError(f"--step-ms must be above 0, got {step_ms}")
    spread = lists.spread(times, largest, what="replay times")
    if trace is not None:
        coming = lists.read_trace(trace)
        source = f"{len(coming)} arrivals of {trace}"
    else:
        assert rate is not None, "one of the sources is given"
        coming = list(arrivals.poisson_arrivals(rate, mean_tokens, requests, seed))
        source = f"{requests} random arrivals, {rate:g} a second, {mean_tokens:g} tokens each"
    batches = arrivals.simulate(coming, lambda batch: (spread[batch] if spread else step_ms) / 1e3, largest)
    return lists.Traffic(source, batches)
