"""docs/results.md out of what `ostinato bench` wrote to bench/results, and the plots in docs/plots.

    python bench/result_tables.py
    python bench/result_tables.py --plots FOLDER

`ostinato report` calls both.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from result_files import SHAPES, cells, results
from result_plots import draw_all
from result_rest import COLUMNS, features, others, remaining_time, times_ours
from result_sections import CONTEXT, by_mode, percents, prices, saved, speed_ups, tuned_lists

INTRODUCTION = """\
# Results

What recording the decode step buys, what it costs, and where the rest of the time is: for whoever has to decide.
Random weights in bfloat16, greedy decoding, one NVIDIA H200. `docs/benchmarking.md` says how each figure is measured;
`ostinato report` makes this page from `bench/results/h200-*.json`, and `ostinato bench` makes those on your machine.
What is not in a table was not measured.
"""

SECTIONS: dict[str, tuple[str, Callable[[], Iterator[str]]]] = {
    "modes": ("What recording buys", speed_ups),
    "cost": ("What it costs", prices),
    "capture-list": ("What a tuned list saves", tuned_lists),
    "profile": ("Where the time is", remaining_time),
    "peers": ("Beside others", others),
    "break": ("What switching something on costs", features),
}

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXTS = (CONTEXT, 8192)
PEER_CELLS = [(CONTEXT, 1), (CONTEXT, 8), (CONTEXT, 32), (CONTEXT, 128), (8192, 1), (8192, 8)]


def page() -> str:
    lines = [INTRODUCTION, "## In short\n", *summary(), ""]
    for command, (title, section) in SECTIONS.items():
        if results(command):
            lines += [f"## {title}\n", *section()]
    lines += ["## Not measured\n", "Batch x context, where a part is missing.\n", *missing()]
    return "\n".join(lines).rstrip() + "\n"


def summary() -> Iterator[str]:
    for model in SHAPES:
        found = {
            batch: one for (shape, context, batch), one in by_mode().items() if (shape, context) == (model, CONTEXT)
        }
        whole = {batch: one["whole"] for batch, one in found.items() if {"whole", "eager"} <= one.keys()}
        if whole:
            gains = ", ".join(f"{cell['speedup_over_eager']:.1f}x at {batch}" for batch, cell in whole.items())
            shares = percents([cell["ceiling_share"] for cell in whole.values()], ".0f")
            beside = [one["piecewise"]["median_ms"] / one["whole"]["median_ms"] for one in found.values()
                      if {"piecewise", "whole"} <= one.keys()]  # fmt: skip
            piecewise = f" A piecewise step takes at most {max(beside):.3f} times as long." if beside else ""
            yield f"- **{model}**, whole over eager by batch size: {gains}; {shares} of the read ceiling.{piecewise}"
    for run in results("cost"):
        none, *_, last = run["cells"]
        share = last["fewer_tokens"] / none["kv_tokens"]
        seconds, held = last["start_seconds"] - none["start_seconds"], last["graph_bytes"] / 1e6
        yield (
            f"- **The cost**, {run['model']}: {seconds:.1f} s of start and {held:.0f} MB, for {len(last['buckets'])} "
            f"batch sizes; {100 * share:.1f} % of the KV cache."
        )
    if results("capture-list"):
        yield f"- **A list tuned to the traffic** saves {saved()}."
    for peer, name in COLUMNS.items():
        by_model: dict[str, list[str]] = {}
        for model, batch, times in times_ours(peer):
            by_model.setdefault(model, []).append(f"{times:.2f}x at {batch}")
        if by_model:
            said = "; ".join(f"{model} {', '.join(by_batch)}" for model, by_batch in by_model.items())
            yield f"- **{name}**, its time over ours by batch size: {said}."


def missing() -> Iterator[str]:
    """What was planned and has no figure."""
    for model in SHAPES:
        have = {(context, batch) for shape, context, batch in by_mode() if shape == model}
        why = {(one["context"], one["batch"]): one["why"] for run in results("modes") if run["model"] == model
               for one in run["left_out"]}  # fmt: skip
        for context in CONTEXTS:
            if gone := [batch for batch in BATCHES if (context, batch) not in have]:
                at = "" if len(gone) == len(BATCHES) else f", batch {', '.join(map(str, gone))}"
                reasons = dict.fromkeys(why[context, batch] for batch in gone if (context, batch) in why)
                said = f" ({'; '.join(reasons)})" if reasons else ""
                yield f"- modes, {model}, {context:,} tokens{at}{said}."
        for command in ("cost", "profile", "capture-list", "break"):
            if model not in [run["model"] for run in results(command)]:
                yield f"- {command}, {model}."
        timed = {(cell["peer"], cell["context"], cell["batch"]) for cell in cells("peers")
                 if cell["model"] == model and cell["error"] is None}  # fmt: skip
        for peer, name in COLUMNS.items():
            gone_ = [f"{batch} x {context:,}" for context, batch in PEER_CELLS if (peer, context, batch) not in timed]
            if gone_:
                yield f"- {name}, {model}{'' if len(gone_) == len(PEER_CELLS) else ': ' + ', '.join(gone_)}."
    yield "- A 70B, and several GPUs."


if __name__ == "__main__":
    if sys.argv[1:2] == ["--plots"]:
        draw_all(Path(sys.argv[2]))
    else:
        print(page(), end="")
