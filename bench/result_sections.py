"""The sections of docs/results.md on gains, costs and lists, each of whatever was measured."""

from collections.abc import Iterator, Sequence

import records
from result_files import SHAPES, Document, cells, files, results, where
from tables import table

GUIDE = [
    ("7B, batch 1", "1.45 to 1.60", ("llama-3.1-8b", 1)),
    ("7B, batch 32", "1.15 to 1.25", ("llama-3.1-8b", 32)),
    ("70B on 8 GPUs, batch 1, 32 and 128", "1.30 to 1.40, 1.15 to 1.22, 1.06 to 1.12", None),
    ("prompts", "about 1.00", "prompts"),
]
"""Speed-ups from graphs in the text that the exercises come from, and what of ours is nearest."""

LAUNCH_US = 5.0
"""Of host time for a kernel launch, in the same text."""

CONTEXT = 1024
PROMPTS = "h200-prompts"

WHAT_IT_BUYS = """\
Milliseconds of a decode step with the tokens on the host, all modes in turns in one process, tokens equal. Eager is the
graphs' own Python on the same rows: what differs is the recording alone.
"""
BESIDE_THE_GUIDE = """\
Beside the speed-ups that a well-known text on graphs in serving gives (*CUDA Graphs in Serving*, section 7):
"""
WHY = f"""\
Why ours are other figures. An eager step takes whatever is longer, the host's launches or the device's kernels; a
recorded one takes the kernels. So a speed-up is about the host as much as about graphs. Here a launch goes through
Triton from Python, on a host that is slow and uneven; the text counts {LAUNCH_US:g} µs a launch, and 350 to 2,000
kernels a token. Ours are fused and fewer, so that launches as cheap as those would hide behind the kernels: the last
column.
"""
AND_SO = """\
So expect less from an engine whose launches are cheap, and more from a busier host: what a recorded step takes does not
depend on the host. With the batch and with the model kernels take longer, while launches take what they took: the
speed-up falls. A long prompt keeps the device busy for longer than its launches take, and a graph buys it little
(`docs/kernels.md`, whole prompts); a short one that comes alone is recorded, and its time above is that to the first
token on the host.
"""
WHAT_IT_COSTS = """\
An engine started on an empty GPU, without graphs, with piecewise and with whole ones, kernels compiled; the KV cache
gets what is left. A start with graphs rehearses them before the cache is sized, and compares each with its Python.
The text's figures are 20 to 60 s of start, 50 to 150 MB for each captured size of a 70B on 8 GPUs, 1 to 3 GB together.
"""
TUNED = """\
A batch is padded to the next recorded size. Requests of three kinds are simulated, each step takes what its graph was
measured to take, and every list is priced under the batch sizes that come out. Padding rows are computed but have no
keys to read, so they cost what a graph with one live row costs more than a smaller one with one: much less than their
share of the rows. The tuned lists are the best of so many sizes, by `ostinato bench capture-list`; the list of 20 is
the text's for a batch that is mostly 20 to 60, as far as it goes. Of each list: rows that are padding, and what padding
takes of a step.
"""
LIST_NAMES = {"default": "default", "powers of two": "powers of two", "given 1": "the text's 20"}
"""Those that are given; the others are tuned."""


def speed_ups() -> Iterator[str]:
    yield WHAT_IT_BUYS
    head = ["model", "context", "batch", "eager, ms", "piecewise, ms", "whole, ms", "eager / piecewise",
            "eager / whole", "piecewise / whole", "whole, tok/s", "whole, share of the ceiling"]  # fmt: skip
    rows = []
    for (model, context, batch), one in by_mode().items():
        times = {mode: cell["median_ms"] for mode, cell in one.items()}
        whole = one.get("whole", {})
        rows.append(
            [
                model,
                f"{context:,}",
                str(batch),
                *(f"{times[mode]:.3f}" if mode in times else "" for mode in ("eager", "piecewise", "whole")),
                ratio(times, "eager", "piecewise"),
                ratio(times, "eager", "whole"),
                ratio(times, "piecewise", "whole", ".3f"),
                f"{whole['tokens_per_second']:,.0f}" if whole else "",
                f"{100 * whole['ceiling_share']:.0f} %" if whole else "",
            ]
        )
    yield f"{table(head, rows)}\n\n{where(results('modes'))}\n"
    for shape in SHAPES:
        if files("modes", shape):
            yield plot_link(f"modes-{shape}", f"speed-up over eager and milliseconds of a step, {shape}")
    yield from beside_the_guide()


def beside_the_guide() -> Iterator[str]:
    yield BESIDE_THE_GUIDE
    rows = []
    for what, guide, nearest in GUIDE:
        ours = ""
        if nearest == "prompts":
            ours = ", ".join(f"{model}, {context:,} tokens: {gain:.2f}" for model, context, gain in prompt_gains())
        elif nearest is not None:
            one = by_mode().get((nearest[0], CONTEXT, int(nearest[1])), {})
            gain = ratio({mode: cell["median_ms"] for mode, cell in one.items()}, "eager", "whole")
            ours = f"{nearest[0]}: {gain}" if gain else ""
        rows.append([what, guide, ours or "not measured"])
    yield f"{table(['', 'the text', 'here, eager / whole'], rows)}\n"
    if hosts():
        head = ["model", "batch", "launches of an eager step", "each on this host, µs", "and on the device, µs",
                "eager / whole", f"at {LAUNCH_US:g} µs a launch"]  # fmt: skip
        rows = [
            [
                model,
                str(batch),
                f"{launches:.0f}",
                f"{1e3 * eager / launches:.0f}",
                f"{1e3 * busy / launches:.1f}",
                f"{eager / whole:.2f}",
                f"{max(launches * LAUNCH_US / 1e3, busy) / busy:.2f}",
            ]
            for model, batch, launches, eager, whole, busy in hosts()
        ]
        yield f"{WHY}\n{table(head, rows)}\n"
    yield AND_SO


def by_mode() -> dict[tuple[str, int, int], dict[str, Document]]:
    """Cells of `modes` by model, context and batch, then by mode."""
    found: dict[tuple[str, int, int], dict[str, Document]] = {}
    for cell in cells("modes"):
        found.setdefault((cell["model"], cell["context"], cell["batch"]), {})[cell["mode"]] = cell
    return {key: found[key] for key in sorted(found, key=lambda key: (SHAPES.index(key[0]), *key[1:]))}


def prompt_gains() -> list[tuple[str, int, float]]:
    """(model, tokens, eager over recorded), of the prompts that were timed both ways."""
    if not (records.RESULTS / f"{PROMPTS}.jsonl").exists():
        return []
    found = records.cells(PROMPTS)
    names = (name.removesuffix("/graph").split(":") for name in found if name.endswith("/graph"))
    ordered = sorted((SHAPES.index(model), int(tokens)) for model, tokens in names)
    times = {name: cell["median"] for name, cell in found.items()}
    prompts = [(f"{SHAPES[at]}:{tokens}", SHAPES[at], tokens) for at, tokens in ordered]
    return [(model, tokens, times[f"{name}/eager"] / times[f"{name}/graph"]) for name, model, tokens in prompts]


def hosts() -> list[tuple[str, int, float, float, float, float]]:
    """(model, batch, launches of an eager step, its ms, ms of a whole one, ms that this keeps the device busy)."""
    found = []
    profiles: dict[tuple[str, int, str], Document] = {
        (cell["model"], cell["batch"], cell["mode"]): cell for cell in cells("profile") if cell["context"] == CONTEXT
    }
    for (model, batch, mode), cell in profiles.items():
        one = by_mode().get((model, CONTEXT, batch), {})
        whole = profiles.get((model, batch, "whole"))
        if mode == "eager" and {"eager", "whole"} <= one.keys() and whole:
            times = one["eager"]["median_ms"], one["whole"]["median_ms"]
            found.append((model, batch, cell["kernel_launches"], *times, whole["busy_us"] / 1e3))
    return found


def prices() -> Iterator[str]:
    yield WHAT_IT_COSTS
    head = ["model", "graphs", "start, s", "of it captures, s", "graphs, MB", "buffers, MB", "KV tokens",
            "fewer than without", "sequences of", "fewer than without"]  # fmt: skip
    rows, notes = [], []
    for run in results("cost"):
        for cell in run["cells"]:
            rows.append(
                [
                    run["model"],
                    cell["mode"],
                    f"{cell['start_seconds']:.1f}",
                    f"{cell['captures_seconds']:.1f}",
                    f"{cell['graph_bytes'] / 1e6:.0f}",
                    f"{cell['buffer_bytes'] / 1e6:.0f}",
                    f"{cell['kv_tokens']:,}",
                    f"{cell['fewer_tokens']:,}",
                    f"{run['context']}: {cell['sequences']:,}",
                    f"{cell['fewer_sequences']:,}",
                ]
            )
        last = run["cells"][-1]
        sizes, graphs = len(last["buckets"]), sum(bucket["graphs"] for bucket in last["buckets"])
        each = last["graph_bytes"] / sizes / 1e6
        first = f"; the first start of a process took {run['first_seconds']:.0f} s" if run["first_seconds"] else ""
        notes.append(f"{run['model']}: {graphs} graphs of {sizes} batch sizes, {each:.1f} MB a size{first}.")
    yield f"{table(head, rows)}\n\n{' '.join(notes)} {where(results('cost'))}\n"


def tuned_lists() -> Iterator[str]:
    yield TUNED
    runs = results("capture-list")
    titles = [
        f"{LIST_NAMES.get(one['name'], 'tuned')}, {len(one['sizes'])} graph{'s' if len(one['sizes']) > 1 else ''}"
        for one in runs[0]["lists"]
    ]
    rows = []
    for run in runs:
        least = run["lists"][0]["milliseconds"] - run["lists"][0]["wasted_milliseconds"]
        padding = [
            f"{100 * one['token_waste']:.0f} %, {100 * one['wasted_milliseconds'] / one['milliseconds']:.2f} %"
            for one in run["lists"]
        ]
        rows.append([run["model"], run["more"], f"{least:.3f}", *padding])
    kinds = dict.fromkeys((run["more"], run["source"]) for run in runs)
    said = "\n".join(f"- {kind}: {source}." for kind, source in kinds)
    times = "; ".join(dict.fromkeys(str(run["timed"]) for run in runs))
    head = ["model", "requests", "a step without padding, ms", *titles]
    yield f"{table(head, rows)}\n\n{said}\n\nTimes: {times}; on a line between the sizes that were timed.\n"
    for shape in SHAPES:
        if files("capture-list", shape):
            yield plot_link(f"capture-list-{shape}", f"milliseconds of padding in a step by list and traffic, {shape}")
    yield f"A tuned list saves {saved()}, each with as many graphs.\n"


def saved() -> str:
    """What tuning is worth, in half a sentence."""
    default, powers = (percents([_saving(run["lists"], name) for run in results("capture-list")]) for name in
                       ("default", "powers of two"))  # fmt: skip
    return f"{default} of a step over the default list, {powers} over powers of two"


def _saving(lists: list[Document], name: str) -> float:
    """Of a step, by the tuned list with as many sizes."""
    [known] = [one for one in lists if one["name"] == name]
    ours = min(
        one["milliseconds"]
        for one in lists
        if one["name"] not in LIST_NAMES and len(one["sizes"]) == len(known["sizes"])
    )
    return 1.0 - float(ours) / float(known["milliseconds"])


def percents(shares: Sequence[float], form: str = ".1f") -> str:
    """`3.1 %`, or `3.1 to 4.5 %`."""
    low, high = (format(100 * one, form) for one in (min(shares), max(shares)))
    return f"{low} %" if low == high else f"{low} to {high} %"


def ratio(times: dict[str, float], above: str, below: str, form: str = ".2f") -> str:
    return format(times[above] / times[below], form) if above in times and below in times else ""


def folded(what: str, text: str) -> str:
    """A long table that a reader opens."""
    return f"<details><summary>{what}</summary>\n\n{text}\n\n</details>\n"


def plot_link(name: str, what: str) -> str:
    return f"![{what}](plots/{name}.svg)\n"
