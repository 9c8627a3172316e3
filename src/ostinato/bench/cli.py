"""The commands of `ostinato bench`. What a command needs is imported when it runs."""

import json as json_module
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

if TYPE_CHECKING:
    from .capture_list import Traffic

app = typer.Typer(no_args_is_help=True, help="Measure what graphs buy and cost, on your own model and traffic.")

_output = partial(Option, rich_help_panel="Output")
_traffic = partial(Option, rich_help_panel="Batch sizes, one of these")
_budget = partial(Option, rich_help_panel="Budget, one of these")

Json = Annotated[bool, _output("--json", help="Print one JSON document, by `ostinato bench schema COMMAND`.")]
Plot = Annotated[Path | None, _output("--plot", metavar="FILE", help="Draw, as .png or .svg; needs ostinato[bench].")]

CAPTURE_SIZES = "1,2,4 or a list file, as `ostinato bench capture-list --out` writes it."


Model = Annotated[
    str | None, Option("--model", "-m", help="A checkpoint: folder, .gguf file or hub id. Default: demo.")
]
Shape = Annotated[str | None, Option(help="Instead: random weights of a named shape, such as llama-3.2-1b.")]
Device = Annotated[str | None, Option(help="cpu, cuda or cuda:N. Default: CUDA where there is one, else the CPU.")]
DType = Annotated[str, Option(help="float32, float16, bfloat16, or auto.")]


def parse_numbers(text: str, option: str) -> list[int]:
    """Numbers of at least 1 with commas between them."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(f"{option} must be whole numbers of at least 1, such as 1,8, got {text!r}")
    return [int(part) for part in parts]


class Minimise(StrEnum):
    """What the best list makes least."""

    ROWS = "rows"
    PER_BATCH = "per-batch"
    MS = "ms"


@app.command()
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
        _output("--out", "-o", metavar="FILE", help="Write the best list for EngineConfig(capture_sizes=…)."),
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


class Mode(StrEnum):
    """How decode steps run."""

    PIECEWISE = "piecewise"
    WHOLE = "whole"
    EAGER = "eager"
    LAZY = "lazy"


@app.command()
def modes(
    model: Model = None,
    shape: Shape = None,
    device: Device = None,
    dtype: DType = "auto",
    batch: Annotated[
        str | None, Option(metavar="N,N", help="Batch sizes. Default: 1,8,32,128 on a GPU, else 1,4.")
    ] = None,
    context: Annotated[
        str | None, Option(metavar="N,N", help="Tokens that each sequence has. Default: 1024, or 32.")
    ] = None,
    mode: Annotated[
        list[Mode] | None,
        Option(help="Several times; lazy is whole, captured when used. Default: piecewise, whole and eager."),
    ] = None,
    rounds: Annotated[int, Option(min=1, help="Each mode's turns, one after the other.")] = 3,
    steps: Annotated[int | None, Option(min=1, help="Steps of a turn. Default: 20 on a GPU, else 4.")] = None,
    json: Json = False,
    plot: Plot = None,
) -> None:
    """Piecewise, whole and eager decode steps side by side in one process, taking turns.

    Tokens are compared first, and each mode must have run as that mode: else the exit code is 1. Keys and values of the
    contexts are made up. Without a GPU, a tape stands in for CUDA graphs: a check of the tool, not a measurement.
    """
    from ..llm import _device
    from . import modes as bench
    from .subject import load_decoder

    target = _device(device)
    on_gpu = target.type == "cuda"
    cells = [
        (one, length)
        for length in parse_numbers(context or ("1024" if on_gpu else "32"), "--context")
        for one in parse_numbers(batch or ("1,8,32,128" if on_gpu else "1,4"), "--batch")
    ]
    decoder = load_decoder(model, shape, target, dtype)
    chosen = list(dict.fromkeys(one.value for one in mode or (Mode.PIECEWISE, Mode.WHOLE, Mode.EAGER)))
    result = bench.measure(decoder, cells, chosen, rounds=rounds, steps=steps or (20 if on_gpu else 4))
    if plot is not None:
        bench.plot(result, plot)
    bench.report(result, shape or model or "demo").show(as_json=json)


@app.command("break")
def break_(
    model: Model = None,
    shape: Shape = None,
    device: Device = None,
    dtype: DType = "auto",
    context: Annotated[
        int | None, Option(min=1, help="Tokens of each sequence. Default: 1024 on a GPU, else 32.")
    ] = None,
    steps: Annotated[
        int | None, Option(min=0, help="Of a turn; 0: time nothing. Default: 20 on a GPU, else 3.")
    ] = None,
    json: Json = False,
    plot: Plot = None,
) -> None:
    """Switch on one feature or fault at a time: how steps then run, why, and what that costs beside the plain step.

    Exits with 1 where a step runs for another reason than expected. docs/feature-interactions.md is made from this.
    """
    from ..llm import _device
    from . import breaks
    from .subject import load_decoder

    target = _device(device)
    on_gpu = target.type == "cuda"
    decoder = load_decoder(model, shape, target, dtype)
    length = context or (1024 if on_gpu else 32)
    cells = breaks.measure(decoder, length, (20 if on_gpu else 3) if steps is None else steps, breaks.BREAKS)
    if plot is not None:
        breaks.plot(cells, target, plot)
    breaks.report(cells, target, shape or model or "demo", str(decoder.dtype).removeprefix("torch.")).show(as_json=json)


@app.command()
def profile(
    model: Model = None,
    shape: Shape = None,
    device: Device = None,
    dtype: DType = "auto",
    batch: Annotated[int, Option(min=1, help="Sequences that decode side by side.")] = 1,
    context: Annotated[
        int | None, Option(min=1, help="Tokens of each sequence. Default: 1024 on a GPU, else 32.")
    ] = None,
    mode: Annotated[list[Mode] | None, Option(help="Several times. Default: piecewise, whole and eager.")] = None,
    steps: Annotated[int, Option(min=1, help="Steps that are profiled.")] = 5,
    traces: Annotated[
        Path | None, _output("--trace", metavar="FOLDER", help="Keep MODE.json there, a Chrome trace of each mode.")
    ] = None,
    json: Json = False,
    plot: Plot = None,
) -> None:
    """What a step launches and what runs of it, by torch.profiler: launches, kernels, and the gaps between them.

    Exits with 1 unless a whole step is exactly one graph launch and no kernel launch, and a piecewise one as many
    graph launches as it has regions. --plot draws a step of each mode on one scale of time.
    """
    from ..llm import _device
    from . import profiles
    from .subject import load_decoder

    target = _device(device)
    decoder = load_decoder(model, shape, target, dtype)
    length = context or (1024 if target.type == "cuda" else 32)
    chosen = list(dict.fromkeys(one.value for one in mode or (Mode.PIECEWISE, Mode.WHOLE, Mode.EAGER)))
    result = profiles.measure(decoder, batch, length, chosen, steps, traces)
    if plot is not None:
        profiles.plot(result, plot)
    profiles.report(result, shape or model or "demo").show(as_json=json)


@app.command()
def schema(command: Annotated[str, typer.Argument(metavar="COMMAND")]) -> None:
    """Print the JSON Schema of what a command prints with --json."""
    from .schema import SCHEMAS

    if command not in SCHEMAS:
        raise ValueError(f"{command!r} has no schema; there are {', '.join(SCHEMAS)}")
    print(json_module.dumps(SCHEMAS[command], indent=2))


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
