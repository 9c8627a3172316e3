"""`ostinato bench capture-list`, as a command."""

from dataclasses import replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from .cli_options import CAPTURE_SIZES, Json, Plot, output

if TYPE_CHECKING:
    from .batch_traffic import Traffic

_traffic = partial(Option, rich_help_panel="Batch sizes, one of these")
_budget = partial(Option, rich_help_panel="Budget, one of these")


class Shape(StrEnum):
    """Of `arrivals.TRAFFIC`."""

    STEADY = "steady"
    BURSTY = "bursty"
    CHAT = "chat"


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
        Path | None,
        _traffic(metavar="FILE", help="Simulate these arrivals: JSON, [[second, output tokens], …]."),
    ] = None,
    rate: Annotated[float | None, _traffic(help="Simulate random arrivals, so many a second.")] = None,
    traffic: Annotated[Shape | None, _traffic(help="Simulate requests of a kind, at a load that it says.")] = None,
    mean_tokens: Annotated[float, Option(help="With --rate: output tokens of a request.")] = 200.0,
    requests: Annotated[int, Option(help="With --rate or --traffic: how many requests.")] = 10_000,
    seed: Annotated[int, Option(help="With --rate or --traffic: makes arrivals repeatable.")] = 0,
    step_ms: Annotated[float, Option(help="Simulating, where no replay times are: of a step.")] = 10.0,
    replay_ms: Annotated[
        Path | None,
        Option("--replay-ms", metavar="FILE", help='Of a replay: JSON, {"8": 0.9, …}, or of bench/bucket_times.py.'),
    ] = None,
    max_num_seqs: Annotated[int | None, Option(help="Default: the largest batch; 256 where none is given.")] = None,
    sizes: Annotated[
        list[int] | None,
        _budget("--sizes", help="So many graphs; several times: one best list each. Default: as the default list."),
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

    found = _traffic_of(
        report, normal, trace, rate, traffic, mean_tokens, requests, seed, step_ms, max_num_seqs, replay_ms
    )
    largest = max_num_seqs or max(found.batches)
    every = range(1, largest + 1)
    if graph_mb is not None:
        found = replace(found, graph_bytes=dict.fromkeys(every, 1e6 * graph_mb))
    if capture_ms is not None:
        found = replace(found, capture_seconds=dict.fromkeys(every, capture_ms / 1e3))
    if (weights_gb is None) != (kv_gb is None):
        raise ValueError("--weights-gb and --kv-gb need each other")
    if not 0 <= kv_fraction <= 1:
        raise ValueError(f"--kv-fraction is a share, from 0 to 1, got {kv_fraction:g}")
    by_bytes = StepBytes(weights_gb, kv_gb) if weights_gb is not None and kv_gb is not None else None
    given = {f"given {number}": parse_sizes(text) for number, text in enumerate(compare_with or (), 1)}
    objective, costs = lists.compare(
        found,
        largest,
        counts=sizes or (),
        memory_bytes=None if graph_memory is None else round(1e6 * graph_memory),
        capture_seconds=capture_time,
        forced=force or (),
        others=given,
        minimise=None if minimise is None else minimise.value,
        kv_fraction=kv_fraction if by_bytes is None else by_bytes.kv_fraction,
    )
    if out is not None:
        lists.write_list(out, found, objective, costs[-1])
    if plot is not None:
        lists.plot(costs, found, plot)
    said = f"{kv_fraction:g}" if by_bytes is None else f"b·{kv_gb:g} / ({weights_gb:g} + b·{kv_gb:g})"
    lists.report(found, objective, costs, said, lists.cut_short(given, largest)).show(as_json=json)


def _traffic_of(
    report: Path | None,
    normal: str | None,
    trace: Path | None,
    rate: float | None,
    shape: Shape | None,
    mean_tokens: float,
    requests: int,
    seed: int,
    step_ms: float,
    max_num_seqs: int | None,
    replay_ms: Path | None,
) -> "Traffic":
    from . import arrivals, batch_traffic

    if [report, normal, trace, rate, shape].count(None) != 4:
        raise ValueError("batch sizes come from one of --from, --normal, --trace, --rate and --traffic")
    known = {} if replay_ms is None else batch_traffic.read_times(replay_ms)._asdict()
    if report is not None:
        return replace(batch_traffic.read_traffic(report), **known)
    largest = max_num_seqs or 256
    if normal is not None:
        center, _, deviation = normal.partition(":")
        return replace(batch_traffic.normal_traffic(float(center), float(deviation or "nan"), largest), **known)
    if step_ms <= 0:
        raise ValueError(f"--step-ms must be above 0, got {step_ms}")
    spread = batch_traffic.spread(known["replay_ms"], largest, what="replay times") if known else None

    def step(batch: int) -> float:
        return (spread[batch] if spread else step_ms) / 1e3

    if trace is not None:
        coming = batch_traffic.read_trace(trace)
        source = f"{len(coming)} arrivals of {trace}"
    elif shape is not None:
        coming = list(arrivals.TRAFFIC[shape.value].arrivals(step, requests, seed))
        source = f"{requests} requests, {arrivals.TRAFFIC[shape.value].what}, seed {seed}"
    else:
        assert rate is not None, "one of the sources is given"
        coming = list(arrivals.poisson_arrivals(rate, mean_tokens, requests, seed))
        source = f"{requests} random arrivals, {rate:g} a second, {mean_tokens:g} tokens each"
    return batch_traffic.Traffic(source, arrivals.simulate(coming, step, largest), **known)
