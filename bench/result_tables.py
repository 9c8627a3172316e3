"""docs/results.md out of what `ostinato bench` wrote to bench/results, and the plots in docs/plots.

    python bench/result_tables.py
    python bench/result_tables.py --plots FOLDER

`ostinato report` calls both. A result is `h200-COMMAND-SHAPE.json`. A plot ends with a digest of the results that it
shows.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from records import RESULTS
from tables import loop_records, table

from ostinato.bench import modes, peer_table, peers
from ostinato.bench.arrivals import poisson_arrivals, simulate
from ostinato.bench.batch_traffic import Traffic, normal_traffic, spread
from ostinato.bench.capture_list import compare
from ostinato.bench.output import figure
from ostinato.bench.schema import SCHEMAS, check

SHAPES = ("llama-3.2-1b", "llama-3.1-8b")
GPU = torch.device("cuda")

COMMIT = "f88ab28"
"""Of the results of `ostinato bench`."""

INTRODUCTION = """\
# Results

What recording the decode step buys, what it costs, and where the rest of the time is: for whoever has to decide.
Random weights in bfloat16, greedy decoding, one NVIDIA H200. `docs/benchmarking.md` says how each figure is measured;
`ostinato report` makes this page from `bench/results/h200-*.json`, and `ostinato bench` makes those on your machine.
What is not in a table was not measured. The state that was measured is commit {commit}.
"""

WHAT_IT_BUYS = """\
Milliseconds of a decode step with the tokens on the host, all modes in turns in one process, tokens equal. Eager runs
the same pieces on the same rows.
"""
WHY_OTHER_THAN_ELSEWHERE = """\
A usual guide gives 1.45 to 1.60 times for a 7B at batch 1, 1.15 to 1.25 at batch 32, and nothing for prompts. Here it
is more, because eager is slower: each kernel is launched from Python, by Triton. A step cannot be faster than the host
launches it; with a graph only the device counts. So a speed-up says as much about the host as about graphs. It falls
with the batch and with the model, whose kernels take longer while launches take what they took. Prompts run eagerly
in every mode.
"""
WHAT_IT_COSTS = """\
An engine started on an empty GPU, without graphs, with piecewise and with whole ones, kernels compiled; the KV cache
gets what is left. A start with graphs rehearses them before the cache is sized, and compares each with its Python.
"""
WHERE_IT_IS = """\
What the host launches and what the device runs of it, by torch.profiler, which slows the host: gaps before a kernel
that the host launches by itself, in piecewise and eager steps, are longer here than without it.
"""
BY_PART = """\
Each part of a step by itself, in a graph over all layers. Bytes at the ceiling would be the floor: what is above it
are the small projections, which are over before the memory is busy, and attention, whose keys are few at this length.
"""
BESIDE_OTHERS = """\
The same shapes and random weights, taking turns in one process. torch is cuBLAS and SDPA in one CUDA graph. The tokens
of torch and transformers stay on the device, Ostinato's are on the host after each step. transformers without a graph
is bound by the host, as eager steps are, and as far from other hosts' figures as this host is from others.
"""
SWITCHED_ON = """\
One feature or fault at a time, and how its steps run then; `docs/feature-interactions.md` has the reasons.
"""
TUNED = """\
Simulated batch sizes, priced by the whole steps of the README's first table, on a line between the sizes measured. The
best list has as many graphs as there are powers of two.
"""


def result(command: str, shape: str) -> dict[str, Any] | None:
    """What a command wrote for a shape, checked; None if it was not measured."""
    path = RESULTS / f"h200-{command}-{shape}.json"
    if not path.exists():
        return None
    document: dict[str, Any] = json.loads(path.read_text())
    check(document, SCHEMAS[command])
    return document


def results(command: str) -> list[dict[str, Any]]:
    return [found for shape in SHAPES if (found := result(command, shape)) is not None]


def where(document: dict[str, Any]) -> str:
    place = document["where"]
    ceiling = f"; read ceiling {document['read_ceiling'] / 1e12:.2f} TB/s" if "read_ceiling" in document else ""
    return f"{place['model']}: {place['device']}, torch {place['torch']}{ceiling}."


def plot_link(name: str, what: str) -> str:
    return f"\n![{what}](plots/{name}.svg)\n"


def speed_ups() -> Iterator[str]:
    yield "## What recording buys\n"
    yield WHAT_IT_BUYS
    head = ["model", "batch", "context", "eager, ms", "piecewise, ms", "whole, ms", "eager / piecewise",
            "eager / whole", "whole, tok/s", "whole, share of the ceiling", "prompts, eager / whole"]  # fmt: skip
    rows, places = [], []
    for document in results("modes"):
        places.append(where(document))
        cells = {(cell["batch"], cell["context"], cell["mode"]): cell for cell in document["cells"]}
        for batch, context in dict.fromkeys((batch, context) for batch, context, _ in cells):
            eager, piecewise, whole = (cells[batch, context, mode] for mode in ("eager", "piecewise", "whole"))
            rows.append(
                [
                    document["where"]["model"],
                    str(batch),
                    str(context),
                    *(f"{cell['median_ms']:.3f}" for cell in (eager, piecewise, whole)),
                    *(f"{cell['speedup_over_eager']:.2f}" for cell in (piecewise, whole)),
                    f"{whole['tokens_per_second']:.0f}",
                    f"{100 * whole['ceiling_share']:.0f} %",
                    f"{eager['prefill_ms'] / whole['prefill_ms']:.2f}" if whole["prefill_ms"] else "",
                ]
            )
    yield f"{table(head, rows)}\n\n{' '.join(places)}\n\n{WHY_OTHER_THAN_ELSEWHERE}"
    for document in results("profile"):
        model = document["where"]["model"]
        launches = next(
            (cell["kernel_launches"] for cell in document["cells"] if (cell["mode"], cell["batch"]) == ("eager", 1)), 0
        )
        times = [cell["median_ms"] for found in results("modes") for cell in found["cells"]
                 if (found["where"]["model"], cell["mode"], cell["batch"]) == (model, "eager", 1)]  # fmt: skip
        if times and launches:
            each = 1e3 * times[0] / launches
            yield f"{model}, batch 1: {launches:.0f} launches in {times[0]:.2f} ms are {each:.0f} µs each on this host."
    for document in results("modes"):
        shape = document["where"]["model"]
        yield plot_link(f"modes-{shape}", f"speed-up over eager and milliseconds of a step, {shape}")


def prices() -> Iterator[str]:
    yield "## What it costs\n"
    yield WHAT_IT_COSTS
    head = ["model", "graphs", "start, s", "of it captures, s", "graphs, MB", "buffers, MB", "KV tokens",
            "fewer than without", "sequences of", "fewer than without"]  # fmt: skip
    rows, notes = [], []
    for document in results("cost"):
        for cell in document["cells"]:
            rows.append(
                [
                    document["where"]["model"],
                    cell["mode"],
                    f"{cell['start_seconds']:.1f}",
                    f"{cell['captures_seconds']:.1f}",
                    f"{cell['graph_bytes'] / 1e6:.0f}",
                    f"{cell['buffer_bytes'] / 1e6:.0f}",
                    f"{cell['kv_tokens']:,}",
                    f"{cell['fewer_tokens']:,}",
                    f"{document['context']}: {cell['sequences']:,}",
                    f"{cell['fewer_sequences']:,}",
                ]
            )
        sizes = [bucket["batch_size"] for bucket in document["cells"][-1]["buckets"]]
        notes.append(f"{where(document)} {len(sizes)} batch sizes, up to {sizes[-1]}, three kinds of sampling each; "
                     f"the first start in the process took {document['first_seconds']:.0f} s.")  # fmt: skip
    yield f"{table(head, rows)}\n\n{' '.join(notes)}\n"


def remaining_time() -> Iterator[str]:
    yield "## Where the time is\n"
    yield WHERE_IT_IS
    head = ["model", "batch", "mode", "ms a step", "graph launches", "kernel launches", "kernels", "of a layer",
            "busy, µs", "idle, µs", "of it between steps, µs", "largest gap, µs", "between"]  # fmt: skip
    rows = []
    for document in results("profile"):
        for cell in document["cells"]:
            rows.append(
                [
                    document["where"]["model"],
                    str(cell["batch"]),
                    cell["mode"],
                    f"{cell['median_ms']:.3f}",
                    f"{cell['graph_launches']:g}",
                    f"{cell['kernel_launches']:g}",
                    f"{cell['kernels']:g}",
                    str(len(cell["layer"]) or ""),
                    f"{cell['busy_us']:.0f}",
                    f"{cell['idle_us']:.0f}",
                    f"{cell['between_us']:.0f}",
                    f"{cell['largest_gap_us']:.1f}",
                    f"`{cell['largest_gap_after']}` and `{cell['largest_gap_before']}`",
                ]
            )
    yield f"{table(head, rows)}\n\n{' '.join(where(document) for document in results('profile'))}"
    yield f"\n{BY_PART.rstrip()}"
    head = ["model", "batch", "part", "calls a step", "µs a call", "µs a step", "GB/s", "share of the ceiling"]
    rows = []
    for document in results("kernels"):
        for cell in document["cells"]:
            share = cell["ceiling_share"]
            rows.append(
                [
                    document["where"]["model"],
                    str(document["batch"]),
                    cell["name"],
                    str(cell["calls"]),
                    f"{cell['us']:.2f}",
                    f"{cell['step_us']:.1f}",
                    "" if share is None else f"{cell['bytes_per_second'] / 1e9:.0f}",
                    "" if share is None else f"{100 * share:.0f} %",
                ]
            )
    yield f"\n{table(head, rows)}\n\n{' '.join(where(document) for document in results('kernels'))}\n"


def others() -> Iterator[str]:
    yield "## Beside others\n"
    yield BESIDE_OTHERS
    head = ["model", "batch", "context", "engine", "ms a step", "least to most", "times ours", "tok/s"]
    rows, notes = [], []
    for document in results("peers"):
        notes.append(where(document))
        for cell in document["cells"]:
            name = f"{cell['peer']} {cell['version'] or ''}".strip()
            start = [document["where"]["model"], str(cell["batch"]), str(cell["context"]), name]
            if cell["error"] is not None:
                rows.append([*start, cell["error"].replace("|", "/"), "", "", ""])
                continue
            spread_ms = f"{cell['least_ms']:.3f} to {cell['most_ms']:.3f}"
            times = f"{cell['times_ours']:.2f}"
            rows.append([*start, f"{cell['median_ms']:.3f}", spread_ms, times, f"{cell['tokens_per_second']:.0f}"])
    yield f"{table(head, rows)}\n\n{' '.join(notes)}"
    for document in results("peers"):
        shape = document["where"]["model"]
        yield plot_link(f"peers-{shape}", f"milliseconds of a step of each engine, {shape}")


def features() -> Iterator[str]:
    yield "## What switching something on costs\n"
    yield SWITCHED_ON
    documents = results("break")
    cells = [{cell["name"]: cell for cell in document["cells"]} for document in documents]
    head = ["switched on", "runs", "reason", *(f"{d['where']['model']}, times the plain step" for d in documents)]
    rows = []
    for name, cell in cells[0].items() if cells else ():
        costs_ = [f"{one[name]['cost']:.2f}" if one[name]["cost"] is not None else "" for one in cells]
        rows.append([name, cell["path"], f"`{cell['reason']}`", *costs_])
    notes = [f"{where(document)} Batch {document['batch']}." for document in documents]
    yield f"{table(head, rows)}\n\n{' '.join(notes)}\n"


def tuned_lists() -> Iterator[str]:
    """Three kinds of traffic, for the models of which steps of enough sizes were measured."""
    head = ["model", "traffic", "list", "graphs", "padding of all rows", "ms a step", "of it padding, ms"]
    rows = []
    cells = loop_records()[1]
    for model in dict.fromkeys(model for model, _ in cells):
        times = {batch: found["whole"]["ms"] for (one, batch), found in cells.items()
                 if one == model and "ms" in found.get("whole", {})}  # fmt: skip
        if len(times) < 4:
            continue
        for traffic in traffics(times):
            _, costs = compare(traffic, max(times), counts=[max(times).bit_length()], minimise="ms")
            for cost in costs:
                ms = [f"{value:.4f}" for value in (cost.milliseconds, cost.wasted_milliseconds) if value is not None]
                waste = f"{100 * cost.token_waste:.1f} %"
                rows.append([model, traffic.source, cost.name, str(len(cost.sizes)), waste, *ms])
    if rows:
        yield f"## What a tuned list saves\n\n{TUNED}\n{table(head, rows)}\n"


def traffics(times: dict[int, float]) -> list[Traffic]:
    """Batches around 41, and requests of 200 tokens that keep a third, or nine tenths, of the largest batch busy."""
    largest = max(times)
    step = spread(times, largest, what="replay times")
    assert step is not None, "there are times"
    normal = normal_traffic(41, 8, largest)
    found = [Traffic(normal.source, normal.batches, times)]
    for share in (1 / 3, 0.9):
        rate = round(share * largest / (200 * step[round(share * largest)] / 1e3))
        batches = simulate(poisson_arrivals(rate, 200.0, 4000, 0), lambda batch: step[batch] / 1e3, largest)
        found.append(Traffic(f"{rate} random arrivals a second, 200 tokens each", batches, times))
    return found


def page() -> str:
    sections = {
        "modes": speed_ups,
        "cost": prices,
        "profile": remaining_time,
        "peers": others,
        "break": features,
    }
    lines = [line for command, section in sections.items() if results(command) for line in section()]
    return "\n".join([INTRODUCTION.format(commit=COMMIT), *lines, *tuned_lists()])


def plots(folder: Path) -> None:
    """Every plot that a page shows, as SVG, with the digest of the results that it shows in a comment at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    for source in sorted(RESULTS.glob("h200-*.json*")):
        name = source.stem.removeprefix("h200-")
        draw = PLOTS.get(name.split("-")[0])
        if draw is not None:
            path = folder / f"{name}.svg"
            end = f"\n<!-- {hashlib.sha256(source.read_bytes()).hexdigest()} -->\n"
            if not path.exists() or not path.read_text().endswith(end):
                draw(source, path)
                path.write_text(path.read_text().rstrip() + end)


def plot_modes(source: Path, path: Path) -> None:
    document = json.loads(source.read_text())
    cells = [modes.ModeCell(**cell) for cell in document["cells"]]
    modes.plot(modes.ModesResult(GPU, document["where"]["dtype"], document["read_ceiling"], cells), path)


def plot_peers(source: Path, path: Path) -> None:
    document = json.loads(source.read_text())
    cells = [peers.PeerCell(**cell) for cell in document["cells"]]
    peer_table.plot(peers.PeersResult(GPU, document["where"]["dtype"], document["read_ceiling"], cells), path)


def plot_loop(source: Path, path: Path) -> None:
    """Milliseconds of a step by batch size, and what whole and piecewise gain over eager."""
    cells = loop_records()[1]
    with figure(path, 10, 4, 2) as [times, gains]:
        for colour, model in zip(("C0", "C1"), dict.fromkeys(model for model, _ in cells), strict=False):
            for mode, style in (("eager", "x:"), ("piecewise", "s--"), ("whole", "o-")):
                line = {batch: modes_ for (one, batch), modes_ in cells.items() if one == model}
                known = {batch: found[mode]["ms"] for batch, found in line.items() if "ms" in found.get(mode, {})}
                if known:
                    times.plot(list(known), list(known.values()), style, color=colour, label=f"{model}, {mode}")
                if mode != "eager":
                    both = {batch: found["eager"]["ms"] / known[batch] for batch, found in line.items()
                            if batch in known and "ms" in found.get("eager", {})}  # fmt: skip
                    if both:
                        gains.plot(list(both), list(both.values()), style, color=colour, label=f"{model}, {mode}")
        times.set_ylabel("ms a step")
        gains.set_ylabel("speed-up over eager")
        for axes in (times, gains):
            axes.set_xlabel("batch size")
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.xaxis.set_major_formatter("{x:.0f}")
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter("{x:g}")
            axes.legend(fontsize=7)


PLOTS: dict[str, Callable[[Path, Path], None]] = {"modes": plot_modes, "peers": plot_peers, "decode": plot_loop}
"""By the first word of a result's name."""

if __name__ == "__main__":
    if sys.argv[1:2] == ["--plots"]:
        plots(Path(sys.argv[2]))
    else:
        print(page(), end="")
