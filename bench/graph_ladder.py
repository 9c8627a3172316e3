"""The whole ladder of graphs of an engine: time, bytes by where they lie, nodes and edges, prediction and outcome.

    python bench/graph_ladder.py OUT.jsonl COMMIT MODEL:MAX_NUM_SEQS:MODE[,...]

Kernels are compiled before the clock starts. Weights are random. The KV cache gets what the rehearsal leaves.
"""

import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import aot
import torch
from step import BF16, Step

from ostinato.model import SHAPES, Decoder
from ostinato.runtime import Engine, EngineConfig
from ostinato.runtime.graph_buckets import capture_sizes
from ostinato.runtime.graph_manifest import graph_manifest
from ostinato.weights import dummy_model


def measure(model: Decoder, max_num_seqs: int, mode: str) -> dict[str, Any]:
    started = time.perf_counter()
    config = EngineConfig(max_num_seqs=max_num_seqs, max_model_len=4096, block_size=16, graphs=mode)  # type: ignore[arg-type]
    engine = Engine(model, config, tokenizer=None, eos_token_ids=())
    seconds = time.perf_counter() - started
    report, graphs = engine.graph_report(), engine.decode_runner.graphs
    assert graphs is not None
    assert report.ledger is not None
    ledger = report.ledger.to_dict()
    entries = ledger.pop("entries")
    kinds: dict[str, dict[str, Any]] = {}
    for entry in entries:
        kind = f"{entry['runner']} {entry['key_info']}".strip()
        of = kinds.setdefault(kind, {"graphs": 0, "warm_up_seconds": 0.0, "capture_seconds": 0.0, "pool_bytes": 0})
        of["graphs"] += 1
        for name in ("warm_up_seconds", "capture_seconds", "pool_bytes"):
            of[name] += entry[name]
        of["counts"] = entry["counts"]  # of the smallest batch, the last one captured
        of["driver_bytes"] = of.get("driver_bytes", 0) + entry["driver_bytes"]
    manifest = graph_manifest(graphs)
    smallest = min(manifest["buckets"], key=lambda bucket: bucket["batch_size"])
    return {
        "engine_seconds": seconds,
        "missing": list(report.missing),
        "sizes": list(report.sizes),
        "captured_seconds": report.seconds,
        "kv_blocks": engine.kv_plan.num_blocks,
        "ledger": ledger,
        "kinds": kinds,
        "smallest": smallest,
    }


def main(path: str, commit: str, names: list[str]) -> None:
    with aot.recording() as launches:
        for name in names:
            model, rows, _ = name.split(":")
            for size in capture_sizes(None, int(rows)):
                Step(SHAPES[model], size, "meta").run()
    started = time.perf_counter()
    unique = list({launch.key: launch for launch in launches}.values())
    aot.compile_everywhere(unique, (90,), 15)
    compiled = {"kernels": len(unique), "compile_seconds": time.perf_counter() - started}
    for name in names:
        shape, rows, mode = name.split(":")
        model = dummy_model(SHAPES[shape], dtype=BF16, device="cuda")
        try:
            cell = measure(model, int(rows), mode)
        except Exception as error:  # one cell's failure must not hide the others
            cell = {"error": f"{type(error).__name__}: {error}"}
        with Path(path).open("a") as file:
            file.write(json.dumps({"id": f"ladder/{name}", "commit": commit, **compiled, **cell}) + "\n")
        print(name, json.dumps({k: v for k, v in cell.items() if k != "smallest"}), flush=True)
        del model
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3].split(","))
