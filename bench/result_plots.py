"""The plots that pages show, as SVG, each with the digest of the results that it shows in a comment at its end."""

import hashlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from records import RESULTS
from result_files import SHAPES, Document, files, results
from tables import loop_records

from ostinato.bench import modes, peer_table, peers
from ostinato.bench.output import figure
from ostinato.bench.timeline import Picture, draw

GPU = torch.device("cuda")
LOOP = "decode-loop"
MOST_KERNELS = 6


def draw_all(folder: Path) -> None:
    """Those whose results have changed; one of a command and a shape shows all runs of it."""
    folder.mkdir(parents=True, exist_ok=True)
    _draw(folder / f"{LOOP}.svg", [RESULTS / f"h200-{LOOP}.jsonl"], plot_loop)
    for source in RESULTS.glob("h200-timeline-*.json"):
        _draw(folder / f"{source.stem.removeprefix('h200-')}.svg", [source], partial(plot_steps, source))
    for command, plot in PLOTS.items():
        for shape in SHAPES:
            if sources := files(command, shape):
                runs = [run for run in results(command) if run["model"] == shape]
                _draw(folder / f"{command}-{shape}.svg", sources, partial(plot, runs))


def _draw(path: Path, sources: list[Path], plot: Callable[[Path], None]) -> None:
    end = f"\n<!-- {hashlib.sha256(b''.join(source.read_bytes() for source in sources)).hexdigest()} -->\n"
    if not path.exists() or not path.read_text().endswith(end):
        plot(path)
        path.write_text(path.read_text().rstrip() + end)


def plot_steps(source: Path, path: Path) -> None:
    """A step of each mode, as bench/timelines.py keeps it."""
    found = json.loads(source.read_text())
    draw(
        [(f"{mode}, batch {found['batch']}", Picture(**one)) for mode, one in found["modes"].items()], path, on_gpu=True
    )


def plot_modes(runs: list[Document], path: Path) -> None:
    cells = [modes.ModeCell(**cell) for run in runs for cell in run["cells"]]
    ceiling = max(run["read_ceiling"] for run in runs)
    modes.plot(modes.ModesResult(GPU, runs[0]["where"]["dtype"], ceiling, cells, []), path)


def plot_peers(runs: list[Document], path: Path) -> None:
    """Of an engine in several runs the last."""
    cells = {(cell["peer"], cell["context"], cell["batch"]): cell for run in runs for cell in run["cells"]}
    ordered = [peers.PeerCell(**cells[key]) for key in sorted(cells)]
    peer_table.plot(peers.PeersResult(GPU, runs[0]["where"]["dtype"], runs[0]["read_ceiling"], ordered), path)


def plot_lists(runs: list[Document], path: Path) -> None:
    """Milliseconds of padding in a step, by kind of traffic and list."""
    with figure(path, 8, 4) as [axes]:
        names = [one["name"] for one in runs[0]["lists"]]
        width = 0.8 / len(names)
        for place, name in enumerate(names):
            wasted = [one["wasted_milliseconds"] or 0.0 for run in runs for one in run["lists"] if one["name"] == name]
            axes.bar([kind + place * width for kind in range(len(runs))], wasted, width, label=name)
        axes.set_xticks([kind + 0.4 - width / 2 for kind in range(len(runs))], [run["more"] for run in runs])
        axes.set_ylabel("ms of padding in a step")
        axes.legend(fontsize=7)


def plot_profile(runs: list[Document], path: Path) -> None:
    """A whole step by batch size: its kernels, and the gaps between them."""
    whole = [cell for run in runs for cell in run["cells"] if cell["mode"] == "whole"]
    totals: dict[str, float] = {}
    for cell in whole:
        for kernel in cell["by_kernel"]:
            totals[kernel["name"]] = totals.get(kernel["name"], 0.0) + kernel["us"] / cell["busy_us"]
    names = sorted(totals, key=lambda name: -totals[name])[:MOST_KERNELS]
    with figure(path, 8, 0.8 + 0.6 * len(whole)) as [axes]:
        labels = [f"batch {cell['batch']}, {cell['context']:,} tokens" for cell in whole]
        left = [0.0] * len(whole)
        for name in [*names, "other kernels", "gaps"]:
            widths = [_part(cell, name, names) for cell in whole]
            axes.barh(labels, widths, left=left, label=name.strip("_"))
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axes.invert_yaxis()
        axes.set_xlabel("µs of a step; kernels that overlap count in full")
        axes.legend(fontsize=7)


def _part(cell: Document, name: str, shown: list[str]) -> float:
    if name == "gaps":
        return float(cell["idle_us"])
    by_kernel = {kernel["name"]: kernel["us"] for kernel in cell["by_kernel"]}
    if name == "other kernels":
        return float(sum(us for kernel, us in by_kernel.items() if kernel not in shown))
    return float(by_kernel.get(name, 0.0))


def plot_loop(path: Path) -> None:
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


PLOTS: dict[str, Callable[[list[Document], Path], None]] = {
    "modes": plot_modes,
    "peers": plot_peers,
    "capture-list": plot_lists,
    "profile": plot_profile,
}
