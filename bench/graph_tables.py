"""docs/graphs.md with its tables rebuilt from bench/results: `ostinato report` writes what this prints."""

from collections.abc import Iterator
from typing import Any

from records import TITLES, cells
from tables import fill, loop_records, table

LADDERS = {"llama-3.2-1b:256:whole": "whole", "llama-3.2-1b:256:piecewise": "piecewise"}
SAMPLES = {"sample.0": "sample, greedy", "sample.1": "sample, random", "sample.2": "sample, everything"}
PARTS = "pool", "tensors", "driver"


def ladder() -> str:
    head = ["graphs", "number", "pool, MiB", "driver, MiB", "outputs of their own, MiB", "copies", "nodes",
            "programmatic edges", "warm-up, s", "capture, s"]  # fmt: skip
    rows = []
    for mode, cell in _ladders():
        for name, kind in cell["kinds"].items():
            rows.append(_ladder_row(f"{mode}: {_name(name)}", kind, kind["counts"]))
        sums = {key: sum(kind[key] for kind in cell["kinds"].values()) for key in next(iter(cell["kinds"].values()))
                if key != "counts"}  # fmt: skip
        rows.append(_ladder_row(f"**{mode}: all**", sums, {}))
    return f"{table(head, rows)}\n\n" + "\n\n".join(_start(mode, cell) for mode, cell in _ladders())


def _ladders() -> Iterator[tuple[str, dict[str, Any]]]:
    found = cells("h200-graph-ladder")
    return ((mode, found[f"ladder/{name}"]) for name, mode in LADDERS.items() if f"ladder/{name}" in found)


def _ladder_row(name: str, kind: dict[str, Any], counts: dict[str, int]) -> list[str]:
    sizes = (kind[part] for part in ("pool_bytes", "driver_bytes", "output_bytes"))
    nodes = (str(counts.get(part, "")) for part in ("nodes", "programmatic_edges"))
    times = (f"{kind[part]:.2f}" for part in ("warm_up_seconds", "capture_seconds"))
    return [name, str(kind["graphs"]), *map(_mib, sizes), str(kind["num_copies"]), *nodes, *times]


def _start(mode: str, cell: dict[str, Any]) -> str:
    phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in cell["start_seconds"].items() if seconds > 0.05)
    device = cell["device"]
    return (
        f"{mode}: {len(cell['sizes'])} sizes up to {max(cell['sizes'])}; {_mib(cell['ledger']['buffer_bytes'])} MiB of "
        f"shared buffers; the engine was ready after {cell['engine_seconds']:.1f} s ({phases}), {cell['kernels']} "
        f"kernels compiled before in {cell['compile_seconds']:.1f} s. {device['device']}, torch {device['torch']}, "
        f"Triton {device['triton']}, {device['date'][:10]}, commit {cell['commit'][:7]}."
    )


def prediction() -> str:
    rows = []
    for mode, cell in _ladders():
        predicted, actual = cell["ledger"]["predicted"], cell["ledger"]["actual"]
        for name, parts in (("predicted", predicted), ("taken", actual)):
            rows.append([f"{mode}, {name}", *(_mib(parts[part]) for part in PARTS), _mib(sum(parts.values())), ""])
        off = sum(actual.values()) - sum(predicted.values())
        rows[-1][-1] = f"{_mib(off)} MiB, {100 * off / sum(actual.values()):.2f} %"
    return table(["", "pool, MiB", "other tensors, MiB", "driver, MiB", "all, MiB", "off by"], rows)


def copies() -> str:
    rows = [
        [
            _name(cost["region"]),
            str(cost["batch_size"]),
            f"{cost['outputs']}, {cost['bytes']} bytes",
            str(cost["copies"]),
            f"{cost['as_it_is_us']:.2f}",
            f"{cost['copy_us']:.2f} ({cost['p10']:.2f} to {cost['p90']:.2f})",
        ]
        for name, cell in cells("h200-graph-ladder").items()
        if name.endswith(":copies")
        for cost in cell["copy_costs"]
    ]
    head = ["region", "batch", "outputs", "copies as it is", "its graph, µs", "with a copy of each output, µs more"]
    return table(head, rows)


def launches() -> str:
    """What the driver is asked for in a step of each kind; steps that agree share a row."""
    same: dict[tuple[str, str], list[str]] = {}
    for (model, batch), modes in loop_records()[1].items():
        for mode, cell in modes.items():
            if "launches" in cell:
                calls = (f"{name} {count:g}" for name, count in cell["launches"].items() if "Device" not in name)
                same.setdefault((mode, ", ".join(calls)), []).append(f"{TITLES[model]} {batch}")
    rows = [[mode, calls, ", ".join(where)] for (mode, calls), where in sorted(same.items(), reverse=True)]
    return table(["mode", "calls of the driver, a step", "model and batch"], rows)


def slots() -> str:
    found = {tuple(name.removeprefix("decode/").split(":")): cell for name, cell in cells("h200-graph-slots").items()}
    rows = [
        [TITLES[model], batch, f"{found[model, batch, 'whole']['ms']:.3f}", f"{cell['ms']:.3f}"]
        for (model, batch, mode), cell in found.items()
        if mode == "two-slots"
    ]
    return table(["model", "batch", "one slot, ms", "two in turns, ms"], rows)


def _name(runner: str) -> str:
    """Of a kind of graph, without the buffers that a block region goes from and to."""
    name = runner.removeprefix("decode").strip(" .")
    return SAMPLES.get(name, name.split(" ")[0]).split("+")[0]


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.1f}"


TABLES = {"ladder": ladder, "prediction": prediction, "copies": copies, "launches": launches, "slots": slots}

if __name__ == "__main__":
    print(fill("docs/graphs.md", TABLES), end="")
