"""The whole ladder of graphs of an engine: time, bytes by where they lie, nodes and edges, prediction and outcome.

    python bench/graph_ladder.py OUT.jsonl COMMIT MODEL:MAX_NUM_SEQS:MODE[:profile|:copies][,...]

Kernels are compiled before the clock starts. Weights are random. The KV cache gets what the rehearsal leaves. With
`profile` all that is told is where the Python of a start spends its time; with `copies` (MODE is piecewise then), what
it would cost each region to end in a copy of its outputs.
"""

import cProfile
import gc
import json
import pathlib
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import harness
import torch
from decode_kernels import compile_decode
from torch import Tensor

from ostinato.model import SHAPES, Decoder
from ostinato.runtime import Engine, EngineConfig
from ostinato.runtime.decode_graphs import DecodeGraphs
from ostinato.runtime.graph_backend import Graph
from ostinato.runtime.graph_buckets import capture_sizes
from ostinato.runtime.graph_manifest import graph_manifest
from ostinato.runtime.piecewise_config import PiecewiseCallInputs, PiecewiseCaptureShape
from ostinato.weights import dummy_model

COPY_SIZES = (1, 8, 32, 256)
PAIRS, COPIES = 100, 10
QUEUEING_CYCLES = 10_000_000
"""About 5 ms, in which the host launches the graphs that are timed: small ones are over before the next is launched."""
SUMMED = ("pool_bytes", "driver_bytes", "output_bytes", "num_copies", "warm_up_seconds", "capture_seconds")


def engine_config(name: str) -> EngineConfig:
    _, rows, mode, *_ = name.split(":")
    return EngineConfig(max_num_seqs=int(rows), max_model_len=4096, block_size=16, graphs=mode)  # type: ignore[arg-type]


def copy_costs(graphs: DecodeGraphs, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Microseconds that a copy of all that a region puts out takes at the end of its graph.

    A graph in other scratch memory takes a microsecond or two more or less, so that a single copy would be lost in it.
    """
    costs = []
    with graphs.at_rest():
        for region in graphs.regions:
            for key in region.bucket_keys():
                if key.bs not in sizes or not region.has(key):
                    continue
                [slot] = region.slots(key)
                call = PiecewiseCallInputs(slot.static_inputs, PiecewiseCaptureShape(key.bs, key.num_tokens))
                targets = {name: torch.empty_like(output) for name, output in slot.static_outputs.items()}
                copied = harness.capture(with_copies(region.config.fn, call, targets))
                costs.append(
                    {
                        "region": region.label,
                        "batch_size": key.bs,
                        "outputs": len(targets),
                        "bytes": sum(target.nbytes for target in targets.values()),
                        "copies": len(region.own_outputs(key)),
                        **compare_graphs(slot.graph, copied),
                    }
                )
    return costs


def compare_graphs(plain: Graph, copied: Graph) -> dict[str, float]:
    """Microseconds of two graphs that take turns; all launches are queued before the device begins with the first."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * PAIRS + 1)]
    for graph in (plain, copied):
        graph.replay()
    torch.cuda._sleep(QUEUEING_CYCLES)
    events[0].record()
    for turn in range(PAIRS):
        plain.replay()
        events[2 * turn + 1].record()
        copied.replay()
        events[2 * turn + 2].record()
    torch.cuda.synchronize()
    times = [1e3 * a.elapsed_time(b) for a, b in pairwise(events)]
    costs = sorted((b - a) / COPIES for a, b in zip(times[::2], times[1::2], strict=True))
    return {
        "as_it_is_us": round(statistics.median(times[::2]), 2),
        "with_copies_us": round(statistics.median(times[1::2]), 2),
        "copy_us": round(statistics.median(costs), 2),
        "p10": round(costs[PAIRS // 10], 2),
        "p90": round(costs[-1 - PAIRS // 10], 2),
    }


def with_copies(
    region: Callable[[PiecewiseCallInputs], Mapping[str, Tensor]],
    call: PiecewiseCallInputs,
    targets: Mapping[str, Tensor],
) -> Callable[[], None]:
    def run() -> None:
        outputs = region(call)
        for _ in range(COPIES):
            for name, output in outputs.items():
                targets[name].copy_(output)

    return run


def slowest(profile: cProfile.Profile, count: int) -> dict[str, float]:
    """Seconds of the functions that take most, without those that they call; the profiler adds its own share."""
    own = {
        f"{pathlib.Path(file).name}:{line}:{name}": seconds
        for (file, line, name), (_, _, seconds, _, _) in pstats.Stats(profile).stats.items()  # type: ignore[attr-defined]
    }
    return {name: round(own[name], 2) for name in sorted(own, key=own.__getitem__, reverse=True)[:count]}


def measure(model: Decoder, name: str) -> dict[str, Any]:
    started = time.perf_counter()
    engine = Engine(model, engine_config(name), tokenizer=None, eos_token_ids=())
    seconds = time.perf_counter() - started
    report, graphs = engine.graph_report(), engine.decode_runner.graphs
    assert graphs is not None
    assert report.ledger is not None
    ledger = report.ledger.to_dict()
    entries = ledger.pop("entries")
    kinds: dict[str, dict[str, Any]] = {}
    for entry in entries:
        kind = f"{entry['runner']} {entry['key_info']}".strip()
        of = kinds.setdefault(kind, dict.fromkeys(("graphs", *SUMMED), 0))
        of["graphs"] += 1
        for part in SUMMED:
            of[part] += entry[part]
        of["counts"] = entry["counts"]  # of the smallest batch, the last one captured
    manifest = graph_manifest(graphs)
    smallest = min(manifest["buckets"], key=lambda bucket: bucket["batch_size"])
    return {
        "engine_seconds": round(seconds, 2),
        "start_seconds": report.start_seconds,
        "missing": list(report.missing),
        "sizes": list(report.sizes),
        "captured_seconds": report.seconds,
        "kv_blocks": engine.kv_plan.num_blocks,
        "ledger": ledger,
        "kinds": kinds,
        "smallest": smallest,
    }


def measure_copies(model: Decoder, name: str) -> dict[str, Any]:
    engine = Engine(model, engine_config(name), tokenizer=None, eos_token_ids=())
    graphs = engine.decode_runner.graphs
    assert graphs is not None
    return {"copy_costs": copy_costs(graphs, COPY_SIZES)}


def profile_start(model: Decoder, name: str) -> dict[str, Any]:
    profile = cProfile.Profile()
    profile.enable()
    engine = Engine(model, engine_config(name), tokenizer=None, eos_token_ids=())
    profile.disable()
    return {"start_seconds": engine.graph_report().start_seconds, "slowest": slowest(profile, 40)}


MEASURES = {"": measure, "profile": profile_start, "copies": measure_copies}


def main(path: str, commit: str, names: list[str]) -> None:
    compiled = compile_decode(
        (name.split(":")[0], engine_config(name), capture_sizes(None, engine_config(name).max_num_seqs))
        for name in names
    )
    for name in names:
        model = dummy_model(SHAPES[name.split(":")[0]], dtype=torch.bfloat16, device="cuda")
        try:
            cell = MEASURES["".join(name.split(":")[3:])](model, name)
        except Exception as error:  # one cell's failure must not hide the others
            cell = {"error": f"{type(error).__name__}: {error}"}
        with pathlib.Path(path).open("a") as file:
            line = {"id": f"ladder/{name}", "device": harness.environment(), "commit": commit, **compiled, **cell}
            file.write(json.dumps(line) + "\n")
        print(name, json.dumps({k: v for k, v in cell.items() if k != "smallest"}), flush=True)
        del model
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3].split(","))
