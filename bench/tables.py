"""README.md with its tables rebuilt from bench/results: `ostinato report README.md` writes what this prints.

A table stands between `<!-- name -->` and `<!-- /name -->`; everything between them is replaced.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from records import RESULTS

ROOT = Path(__file__).resolve().parent.parent


def read(name: str) -> dict[str, Any]:
    results: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return results


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def machine(environment: dict[str, Any]) -> str:
    versions = environment["versions"]
    return (
        f"{environment['cpu']}, {environment['cpu_capability']}, {environment['torch_threads']} threads, "
        f"torch {versions['torch']}, transformers {versions['transformers']}, {environment['date'][:10]}"
    )


def cpu_generate() -> str:
    results = read("cpu_generate")
    rows = [
        [
            cell["dtype"],
            str(cell["batch"]),
            f"{cell['ostinato_tokens_per_second']:.1f}",
            f"{cell['transformers_tokens_per_second']:.1f}",
            f"{cell['ratio']:.2f}",
        ]
        for cell in results["cells"]
    ]
    head = ["dtype", "batch", "Ostinato tok/s", "transformers tok/s", "ratio"]
    return f"{table(head, rows)}\n\n{machine(results['environment'])}"


def cpu_load() -> str:
    loads = [read(f"cpu_load_{dtype}") for dtype in ("bfloat16", "float32")]
    rows = [
        [load["stored_dtype"], load["dtype"], f"{load['weight_bytes'] / 1e6:.0f} MB", f"{load['ratio']:.2f}"]
        for load in loads
    ]
    return table(["stored as", "loaded as", "weights", "peak / weights"], rows)


LOOP_MODES = {
    "piecewise": "piecewise, ms",
    "whole": "whole, ms",
    "eager": "eager, ms",
    "hook": "whole, a hook in the middle, ms",
    "replay": "bare replay of whole, ms",
}


def loop_records() -> tuple[list[dict[str, Any]], dict[tuple[str, int], dict[str, dict[str, Any]]]]:
    """Where and when steps of the loop were measured, and the last cell of each model, batch and mode."""
    runs: list[dict[str, Any]] = []
    cells: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    for line in map(json.loads, (RESULTS / "h200-decode-loop.jsonl").read_text().splitlines()):
        if "id" not in line:
            runs.append(line)
            continue
        model, batch, mode = line["id"].removeprefix("decode/").split(":")
        cells.setdefault((model, int(batch)), {})[mode] = line
    return runs, dict(sorted(cells.items(), key=lambda cell: (cell[0][0] != "llama-3.2-1b", cell[0][1])))


def decode_loop() -> str:
    runs, cells = loop_records()
    rows = []
    for (model, batch), modes in cells.items():
        times = {mode: cell["ms"] for mode, cell in modes.items() if "ms" in cell}
        if "whole" not in times:  # failed; the others have nothing to stand beside
            continue
        times["replay"] = modes["whole"]["replay"]
        rows.append([model, str(batch), *(_beside_whole(times, mode) for mode in LOOP_MODES)])
    columns = ["model", "batch", *LOOP_MODES.values()]
    first = runs[0]
    ceilings = list(dict.fromkeys(f"{rate / 1e12:.2f}" for rate in sorted(run["read_ceiling"] for run in runs)))
    where = f"{first['device']}, torch {first['torch']}, Triton {first['triton']}, {first['date'][:10]}"
    commits = list(dict.fromkeys(run["commit"][:7] for run in runs))
    return (
        f"{table(columns, rows)}\n\n{where}; read ceiling {' to '.join(ceilings[:1] + ceilings[1:][-1:])} TB/s; "
        f"commit {', '.join(commits)}; in brackets, times that of the whole step; no figure: not measured"
    )


def _beside_whole(times: dict[str, float], mode: str) -> str:
    """Milliseconds of a mode, and how many times that of the whole step it is."""
    if mode not in times:
        return ""
    beside = "" if mode == "whole" else f" ({times[mode] / times['whole']:.3f})"
    return f"{times[mode]:.3f}{beside}"


def gpu_step() -> str:
    head, *cells = [json.loads(line) for line in (RESULTS / "h200-step.jsonl").read_text().splitlines()]
    rows = []
    for cell in cells:
        _, model, batch = cell["id"].replace("/", ":").split(":")
        share = f"{100 * cell['share']:.0f} %"
        rows.append([model, batch, f"{cell['median'] / 1000:.3f}", share, f"{cell['eager'] / 1000:.1f}"])
    columns = ["model", "batch", "one graph, ms", "share of the read ceiling", "eager, ms"]
    where = f"{head['device']}, torch {head['torch']}, Triton {head['triton']}, {head['date'][:10]}"
    ceiling = head["read_ceiling"] / 1e12
    return f"{table(columns, rows)}\n\n{where}; read ceiling {ceiling:.2f} TB/s; commit {head['commit'][:7]}"


TABLES = {"decode_loop": decode_loop, "cpu_generate": cpu_generate, "cpu_load": cpu_load, "gpu_step": gpu_step}


def fill(page: str, tables: Mapping[str, Callable[[], str]]) -> str:
    """The text of a page with every table rebuilt; fails if a table has no place in it."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for name, make in tables.items():
        start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        text, count = re.subn(
            f"{re.escape(start)}.*?{re.escape(end)}",
            f"{start}\n{make()}\n{end}".replace("\\", r"\\"),
            text,
            flags=re.S,
        )
        if count != 1:
            raise ValueError(f"{page} must hold {start} … {end} exactly once, not {count} times")
    return text


if __name__ == "__main__":
    print(fill("README.md", TABLES), end="")
