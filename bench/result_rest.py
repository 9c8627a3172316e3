"""The sections of docs/results.md on where the time is, on other engines, and on what features do."""

from collections import defaultdict
from collections.abc import Iterator

from result_files import SHAPES, Document, cells, files, results, where
from result_sections import CONTEXT, by_mode, folded, plot_link
from tables import table

WHERE_IT_IS = """\
A whole step, from the floor upwards. The floor is reading every weight and key once, at the best rate that a plain
kernel reaches in the same process; what kernels take beyond it, and the gaps between kernels, are what is left to gain.
"""
LAUNCHES = """\
What the host launches and what the device runs of it, by torch.profiler, which slows the host: gaps before a kernel
that the host launches by itself, in piecewise and eager steps, are longer here than without it.
"""
BY_PART = """\
Each part of a step by itself, in a graph over all layers. Bytes at the ceiling would be the floor: what is above it
are the small projections, which are over before the memory is busy, and attention, whose keys are few at this length.
"""
BESIDE_OTHERS = """\
Milliseconds of a step, and how many times that of Ostinato in the same run, taking turns in one process on the same
shapes; above 1 is slower. `torch` is cuBLAS and SDPA in one CUDA graph, `transformers compiled` its static cache under
`torch.compile(mode="reduce-overhead")`. The tokens of torch and transformers stay on the device, those of Ostinato and
vLLM are on the host after each step. transformers without a graph is bound by the host, as eager steps are, and as far
from other hosts' figures as this host is from others. Of {rows} rows with the same weights and keys, all but {others}
begin with Ostinato's token: bfloat16 sums depend on their order, and random weights have near-ties.
"""
SWITCHED_ON = """\
One feature or fault at a time, and how its steps run then; `docs/feature-interactions.md` has the reasons.
"""
COLUMNS = {
    "torch": "torch",
    "vllm": "vLLM",
    "transformers-compiled": "transformers compiled",
    "transformers": "transformers eager",
}


def remaining_time() -> Iterator[str]:
    floors = list(above_floor())
    if floors:
        head = ["model", "context", "batch", "whole, ms", "floor, ms", "kernels beyond it, ms", "gaps, ms",
                "share of the ceiling", "kernels with the largest shares"]  # fmt: skip
        yield f"{WHERE_IT_IS}\n{table(head, floors)}\n"
        for shape in SHAPES:
            if files("profile", shape):
                yield plot_link(f"profile-{shape}", f"where a whole step's time goes, {shape}")
    yield LAUNCHES
    head = ["model", "context", "batch", "mode", "ms a step", "graph launches", "kernel launches", "kernels",
            "of a layer", "busy, µs", "idle, µs", "of it between steps, µs", "largest gap, µs", "between"]  # fmt: skip
    rows = [
        [
            cell["model"],
            f"{cell['context']:,}",
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
        for cell in cells("profile")
    ]
    yield folded(
        "Launches and kernels by model, batch size and mode", f"{table(head, rows)}\n\n{where(results('profile'))}"
    )
    for shape in SHAPES:
        if files("timeline", shape):
            yield plot_link(f"timeline-{shape}", f"launches and kernels of one step in each mode, {shape}")
    if results("kernels"):
        yield from by_part()


def above_floor() -> Iterator[list[str]]:
    """A row for each whole step that was profiled and timed."""
    for cell in cells("profile"):
        one = by_mode().get((cell["model"], cell["context"], cell["batch"]), {}).get("whole")
        if cell["mode"] != "whole" or one is None:
            continue
        floor, busy, idle = one["median_ms"] * one["ceiling_share"], cell["busy_us"] / 1e3, cell["idle_us"] / 1e3
        kernels = sorted(cell["by_kernel"], key=lambda kernel: -kernel["us"])
        total = sum(kernel["us"] for kernel in kernels)  # more than busy, where they overlap
        most = ", ".join(f"`{kernel['name']}` {100 * kernel['us'] / total:.0f} %" for kernel in kernels[:3])
        yield [
            cell["model"],
            f"{cell['context']:,}",
            str(cell["batch"]),
            f"{one['median_ms']:.3f}",
            f"{floor:.3f}",
            f"{max(0.0, busy - floor):.3f}",
            f"{idle:.3f}",
            f"{100 * one['ceiling_share']:.0f} %",
            most,
        ]


def by_part() -> Iterator[str]:
    yield BY_PART
    head = ["model", "batch", "part", "calls a step", "µs a call", "µs a step", "GB/s", "share of the ceiling"]
    rows = []
    for run in results("kernels"):
        for cell in run["cells"]:
            share = cell["ceiling_share"]
            rows.append(
                [
                    run["model"],
                    str(run["batch"]),
                    cell["name"],
                    str(cell["calls"]),
                    f"{cell['us']:.2f}",
                    f"{cell['step_us']:.1f}",
                    "" if share is None else f"{cell['bytes_per_second'] / 1e9:.0f}",
                    "" if share is None else f"{100 * share:.0f} %",
                ]
            )
    yield folded("Parts of a step", f"{table(head, rows)}\n\n{where(results('kernels'))}")


def others() -> Iterator[str]:
    checked = [cell for cell in cells("peers") if cell["peer"] != "ostinato" and cell["same_first_tokens"] is not None]
    rows_ = sum(cell["batch"] for cell in checked)
    yield BESIDE_OTHERS.format(others=rows_ - sum(cell["same_first_tokens"] for cell in checked), rows=rows_)
    names = [name for name in COLUMNS if any(cell["peer"] == name for cell in cells("peers"))]
    rows = []
    for (model, context, batch), found in by_peer().items():
        ours = sorted(cell["median_ms"] for cell in found["ostinato"])
        if not ours:
            continue
        low, high = f"{ours[0]:.3f}", f"{ours[-1]:.3f}"
        rows.append(
            [
                model,
                f"{context:,}",
                str(batch),
                low if low == high else f"{low} to {high}",
                *(", ".join(f"{c['median_ms']:.3f} ({c['times_ours']:.2f})" for c in found[name]) for name in names),
            ]
        )
    head = ["model", "context", "batch", "Ostinato, ms", *(f"{COLUMNS[name]}, ms (times ours)" for name in names)]
    versions = dict.fromkeys(
        f"{COLUMNS[cell['peer']]} {cell['version']}"
        for cell in cells("peers")
        if cell["peer"] in COLUMNS and cell["version"]
    )
    yield f"{table(head, rows)}\n\n{', '.join(versions)}; {where(results('peers'))}\n"
    failures: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for cell in cells("peers"):
        if cell["error"] is not None:
            failures[cell["model"], cell["peer"], cell["error"]].append(f"{cell['batch']} x {cell['context']:,}")
    for (model, peer, error), where_ in failures.items():
        yield f"- {peer}, {model}, {', '.join(where_)}: {error}"
    if failures:
        yield ""
    for shape in SHAPES:
        if files("peers", shape):
            yield plot_link(f"peers-{shape}", f"milliseconds of a step of each engine, {shape}")


def by_peer() -> dict[tuple[str, int, int], dict[str, list[Document]]]:
    """Cells of `peers` that have a time, by model, context and batch, then by engine; several are of several runs."""
    found: dict[tuple[str, int, int], dict[str, list[Document]]] = {}
    for cell in cells("peers"):
        if cell["error"] is None:
            one = found.setdefault((cell["model"], cell["context"], cell["batch"]), defaultdict(list))
            one[cell["peer"]].append(cell)
    return {key: found[key] for key in sorted(found, key=lambda key: (SHAPES.index(key[0]), *key[1:]))}


def times_ours(peer: str) -> list[tuple[str, int, float]]:
    """(model, batch, times ours) at the usual context."""
    return [
        (model, batch, found[peer][-1]["times_ours"])
        for (model, context, batch), found in by_peer().items()
        if context == CONTEXT and found[peer]
    ]


def features() -> Iterator[str]:
    yield SWITCHED_ON
    documents = results("break")
    found = [{cell["name"]: cell for cell in document["cells"]} for document in documents]
    head = ["switched on", "runs", "reason", *(f"{d['model']}, times the plain step" for d in documents)]
    rows = []
    for name, cell in found[0].items():
        costs = [f"{one[name]['cost']:.2f}" if name in one and one[name]["cost"] is not None else "" for one in found]
        rows.append([name, cell["path"], f"`{cell['reason']}`", *costs])
    yield f"{table(head, rows)}\n\nBatch {documents[0]['batch']}; {where(documents)}\n"
