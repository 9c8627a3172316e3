"""The commands of `ostinato bench`. What a command needs is imported when it runs."""

import json as json_module
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from .cli_capture_list import capture_list
from .cli_options import (
    CAPTURE_SIZES,
    Batch,
    Batches,
    Context,
    Contexts,
    Device,
    DType,
    Json,
    Model,
    Out,
    Plot,
    Seconds,
    Shape,
    output,
    parse_cells,
)

if TYPE_CHECKING:
    from .output import Report

app = typer.Typer(no_args_is_help=True, help="Measure what graphs buy and cost, on your own model and traffic.")
app.command()(capture_list)


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
    batch: Batches = None,
    context: Contexts = None,
    mode: Annotated[
        list[Mode] | None,
        Option(help="Several times; lazy is whole, captured when used. Default: piecewise, whole and eager."),
    ] = None,
    rounds: Annotated[int, Option(min=1, help="Each mode's turns, one after the other.")] = 3,
    steps: Annotated[
        int | None, Option(min=1, help="Steps of a turn, eager ones a third. Default: 20 on a GPU, else 4.")
    ] = None,
    seconds: Seconds = None,
    json: Json = False,
    out: Out = None,
    plot: Plot = None,
) -> None:
    """Piecewise, whole and eager decode steps side by side in one process, taking turns.

    Tokens are compared first, and each mode must have run as that mode: else the exit code is 1. Keys and values of the
    contexts are made up, and lie in one KV cache that the modes share; a cell whose cache does not fit is named. Cells
    are measured in the order in which they are given. Without a GPU, a tape stands in for CUDA graphs: a check of the
    tool, not a measurement.
    """
    from ..llm import _device
    from . import modes as bench
    from .subject import load_decoder

    target = _device(device)
    on_gpu = target.type == "cuda"
    cells = parse_cells(batch, context, on_gpu=on_gpu)
    decoder = load_decoder(model, shape, target, dtype)
    result = bench.measure(
        decoder,
        cells,
        modes_of(mode),
        rounds=rounds,
        steps=steps or (20 if on_gpu else 4),
        seconds=seconds,
        keep=lambda result: keep(bench.report(result, shape or model or "demo"), out),
    )
    bench.report(result, shape or model or "demo").show(as_json=json, out=out)
    if plot is not None:
        bench.plot(result, plot)


def modes_of(chosen: list[Mode] | None) -> list[str]:
    return list(dict.fromkeys(one.value for one in chosen or (Mode.PIECEWISE, Mode.WHOLE, Mode.EAGER)))


def keep(report: "Report", out: Path | None) -> None:
    """Write what is known so far, for the case that there will be no more."""
    if out is not None:
        report.write(out)


@app.command("break")
def break_(
    model: Model = None,
    shape: Shape = None,
    device: Device = None,
    dtype: DType = "auto",
    batch: Batch = 4,
    context: Context = None,
    steps: Annotated[
        int | None, Option(min=0, help="Of a turn; 0: time nothing. Default: 20 on a GPU, else 3.")
    ] = None,
    json: Json = False,
    out: Out = None,
    plot: Plot = None,
) -> None:
    """Switch on one feature or fault at a time: how steps then run, why, and what that costs beside the plain step.

    Graphs are of --batch and of half as much; what needs more rows than --batch has is named.

    Exits with 1 where a step runs for another reason than expected. docs/feature-interactions.md is made from this.
    """
    from ..llm import _device
    from . import breaks
    from .break_features import BREAKS
    from .subject import load_decoder

    if plot is not None and steps == 0:
        raise ValueError("--plot draws times: give --steps above 0")
    target = _device(device)
    on_gpu = target.type == "cuda"
    decoder = load_decoder(model, shape, target, dtype)
    length = context or (1024 if on_gpu else 32)
    name = shape or model or "demo"
    result = breaks.measure(
        decoder,
        batch,
        length,
        (20 if on_gpu else 3) if steps is None else steps,
        BREAKS,
        keep=lambda result: keep(breaks.report(result, name), out),
    )
    breaks.report(result, name).show(as_json=json, out=out)
    if plot is not None:
        breaks.plot(result, plot)


@app.command()
def profile(
    model: Model = None,
    shape: Shape = None,
    device: Device = None,
    dtype: DType = "auto",
    batch: Annotated[str, Option(metavar="N,N", help="Batch sizes.")] = "1",
    context: Contexts = None,
    mode: Annotated[list[Mode] | None, Option(help="Several times. Default: piecewise, whole and eager.")] = None,
    steps: Annotated[int, Option(min=1, help="Steps that are profiled.")] = 5,
    seconds: Seconds = None,
    traces: Annotated[
        Path | None, output("--trace", metavar="FOLDER", help="Keep MODE-BATCH-CONTEXT.json there, Chrome traces.")
    ] = None,
    json: Json = False,
    out: Out = None,
    plot: Plot = None,
) -> None:
    """What a step launches and what runs of it, by torch.profiler: launches, kernels, and the gaps between them.

    Exits with 1 unless a whole step is exactly one graph launch and no kernel launch, and a piecewise one as many
    graph launches as it has regions. --plot draws a step of each cell and mode on one scale of time.
    """
    from ..llm import _device
    from . import profiles
    from .subject import load_decoder

    target = _device(device)
    decoder = load_decoder(model, shape, target, dtype)
    result = profiles.measure(
        decoder,
        parse_cells(batch, context, on_gpu=target.type == "cuda"),
        modes_of(mode),
        steps,
        traces=traces,
        seconds=seconds,
        keep=lambda result: keep(profiles.report(result, shape or model or "demo"), out),
    )
    profiles.report(result, shape or model or "demo").show(as_json=json, out=out)
    if plot is not None:
        profiles.plot(result, plot)


@app.command()
def cost(
    model: Model = None,
    shape: Shape = None,
    device: Device = None,
    dtype: DType = "auto",
    context: Context = None,
    max_num_seqs: Annotated[int | None, Option(min=1, help="Default: 256 on a GPU, else 4.")] = None,
    max_model_len: Annotated[int | None, Option(min=1, help="Default: the model's on a GPU, else --context.")] = None,
    capture_sizes: Annotated[
        str | None, Option(metavar="LIST", help=f"Instead of the default: {CAPTURE_SIZES}")
    ] = None,
    json: Json = False,
    out: Out = None,
    plot: Plot = None,
) -> None:
    """What graphs cost: start-up time, memory by batch size, and the KV tokens and sequences given up for them.

    An engine is started without graphs, with piecewise and with whole ones; kernels are compiled before. On a GPU the
    KV cache gets what the graphs leave, and so shows what they take.
    """
    from ..llm import _device
    from ..runtime import EngineConfig
    from ..runtime.graph_buckets import parse_sizes
    from . import costs
    from .subject import load_decoder

    target = _device(device)
    on_gpu = target.type == "cuda"
    decoder = load_decoder(model, shape, target, dtype)
    length, rows = context or (1024 if on_gpu else 32), max_num_seqs or (256 if on_gpu else 4)
    fixed = rows * (length + 128) * decoder.config.kv_bytes_per_token(decoder.dtype)
    config = EngineConfig(
        max_num_seqs=rows,
        max_model_len=max_model_len or (None if on_gpu else length),
        kv_cache_memory_bytes=None if on_gpu else fixed,
        capture_sizes=None if capture_sizes is None else tuple(parse_sizes(capture_sizes)),
    )
    result = costs.measure(decoder, length, config)
    costs.report(result, shape or model or "demo").show(as_json=json, out=out)
    if plot is not None:
        costs.plot(result, plot)


class Peer(StrEnum):
    """Engines to compare with."""

    TORCH = "torch"
    TRANSFORMERS = "transformers"
    COMPILED = "transformers-compiled"
    VLLM = "vllm"


@app.command()
def peers(
    model: Model = None,
    shape: Shape = None,
    device: Device = None,
    dtype: DType = "auto",
    batch: Batches = None,
    context: Contexts = None,
    peer: Annotated[list[Peer] | None, Option(help="Several times. Default: all.")] = None,
    rounds: Annotated[int, Option(min=1, help="Each engine's turns, one after the other.")] = 5,
    steps: Annotated[int | None, Option(min=1, help="Steps of a turn. Default: 20 on a GPU, else 4.")] = None,
    seconds: Seconds = None,
    json: Json = False,
    out: Out = None,
    plot: Plot = None,
) -> None:
    """Decode steps of other engines beside Ostinato's, taking turns in one process, on the same shapes.

    torch: products by cuBLAS and SDPA, one graph. transformers: eager. transformers-compiled: static cache and
    torch.compile. vllm: if it can be imported. A peer that is missing, late or fails is a row with the reason.
    """
    from ..llm import _device
    from . import peers as bench
    from .peer_table import plot as draw
    from .peer_table import report
    from .subject import load_decoder

    def keep(result: bench.PeersResult) -> None:
        if out is not None:
            report(result, name).write(out)

    target, name = _device(device), shape or model or "demo"
    chosen = list(dict.fromkeys(one.value for one in peer or Peer))
    cells = parse_cells(batch, context, on_gpu=target.type == "cuda")
    decoder = load_decoder(model, shape, target, dtype)
    count = steps or (20 if target.type == "cuda" else 4)
    contest = bench.Contest(decoder, cells, chosen, rounds=rounds, steps=count, seconds=seconds)
    result = contest.measure(keep=keep)
    if plot is not None:
        draw(result, plot)
    report(result, name).show(as_json=json)


@app.command()
def kernels(
    model: Model = None,
    shape: Shape = None,
    device: Device = None,
    dtype: DType = "auto",
    batch: Batch = 1,
    context: Context = None,
    json: Json = False,
    out: Out = None,
    plot: Plot = None,
) -> None:
    """What each part of a decode step takes by itself, its bytes against the read ceiling, and the step they make."""
    from ..llm import _device
    from . import kernel_times
    from .subject import load_decoder

    target = _device(device)
    decoder = load_decoder(model, shape, target, dtype)
    result = kernel_times.measure(decoder, batch, context or (1024 if target.type == "cuda" else 32))
    if plot is not None:
        kernel_times.plot(result, plot)
    kernel_times.report(result, shape or model or "demo").show(as_json=json, out=out)


@app.command()
def schema(command: Annotated[str, typer.Argument(metavar="COMMAND")]) -> None:
    """Print the JSON Schema of what a command prints with --json."""
    from .schema import SCHEMAS

    if command not in SCHEMAS:
        raise ValueError(f"{command!r} has no schema; there are {', '.join(SCHEMAS)}")
    print(json_module.dumps(SCHEMAS[command], indent=2))
