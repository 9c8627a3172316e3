"""Decode steps through the engine's loop: whole, piecewise, with a hook, and eager, beside the bare replay.

    python bench/decode_loop.py OUT.jsonl SECONDS COMMIT MODEL:BATCH:MODE[,...]

MODE is whole, piecewise, hook (whole, cut in the middle) or eager. Weights are random, decoding is greedy, and every
sequence starts with 1024 keys. A cell's time is that of one step, with tokens on the host; `replay` is what a bare
replay of the step's graph takes, one after the other, in the same process; `launches` is what the driver was asked for
in one step, from a profile.
"""

import cProfile
import gc
import json
import pstats
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aot
import harness
import torch
from step import BF16, Step

from ostinato.bench.traffic import step_bytes
from ostinato.model import SHAPES, Decoder
from ostinato.runtime import Engine, EngineConfig, SamplingParams
from ostinato.runtime.step_state import RowUpdate
from ostinato.weights import dummy_model

KEYS, WARM_STEPS, STEPS = 1024, 12, 50
BLOCK = 16
ROOM = KEYS + 256


def make_engine(model: Decoder, batch: int, mode: str) -> Engine:
    config = EngineConfig(
        max_num_seqs=batch,
        max_model_len=ROOM,
        block_size=BLOCK,
        kv_cache_memory_bytes=(batch * ROOM + 64) * model.config.kv_bytes_per_token(model.dtype),
        capture_sizes=(batch,),
        graphs={"hook": "whole", "eager": "off"}.get(mode, mode),  # type: ignore[arg-type]
        graph_self_test=False,
    )
    return Engine(model, config, tokenizer=None, eos_token_ids=())


def start(engine: Engine, batch: int) -> None:
    """`batch` sequences of `KEYS` tokens that are about to decode; their keys and values are made up, not computed."""
    params = SamplingParams(temperature=0.0, max_tokens=ROOM - KEYS - 8, ignore_eos=True)
    scheduler, runner = engine._scheduler, engine._runner
    for row in range(batch):
        engine.add(engine.create([row + 1] * KEYS, params)[0])
    scheduler._admit()
    for row, sequence in enumerate(scheduler.prefilling):
        sequence.row, sequence.num_computed = row, KEYS
        sequence.output_ids.append(row)
        sequence.output_texts.append("")
    scheduler.running, scheduler.prefilling = scheduler.prefilling, []
    assert len(scheduler.running) == batch
    for cache in (*runner._kv_cache.k, *runner._kv_cache.v):
        cache.normal_()
    runner._state.write_rows([RowUpdate(s.row, s.row, KEYS, KEYS + 1, s.blocks) for s in scheduler.running])


def profile(engine: Engine, steps: int) -> dict[str, float]:
    """Driver calls that put work on the device, for one step."""
    from torch.profiler import ProfilerActivity

    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as record:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    words = ("cudaGraphLaunch", "cudaLaunch", "cuLaunch", "cudaMemcpy", "cudaMemset", "Synchronize", "EventRecord")
    calls: Counter[str] = Counter()
    for event in record.events():
        if any(word in event.name for word in words):
            calls[event.name] += 1
    return {name: round(count / steps, 2) for name, count in sorted(calls.items())}


def host(engine: Engine, steps: int) -> dict[str, float]:
    """Milliseconds of Python in one step without waits, and the functions that take most; the profiler doubles them."""
    record = cProfile.Profile()
    record.enable()
    for _ in range(steps):
        engine.step()
    record.disable()
    rows = []
    for (file, _, name), (_, _, own, _, _) in pstats.Stats(record).stats.items():  # type: ignore[attr-defined]
        if "synchronize" not in name:
            rows.append((1e3 * own / steps, f"{Path(file).name}:{name}"))
    rows.sort(reverse=True)
    return {"all": round(sum(ms for ms, _ in rows), 3)} | {name: round(ms, 3) for ms, name in rows[:14]}


def bare_replay(engine: Engine) -> float:
    """Milliseconds of a replay of the whole step's graph, back to back; rows go on decoding."""
    graphs = engine.decode_runner.graphs
    assert graphs is not None
    key = graphs.configs[0].bucket_keys()[0]
    [slot] = graphs.whole.slots(key)
    return harness.time_graph(slot.graph, replays=40).median / 1e3  # type: ignore[arg-type]


def measure(model: Decoder, batch: int, mode: str, ceiling: float) -> dict[str, Any]:
    gc.collect()
    torch.cuda.empty_cache()
    before = time.perf_counter()
    engine = make_engine(model, batch, mode)
    made = time.perf_counter() - before
    if mode == "hook":
        engine.hooks.add(model.config.num_layers // 2, lambda hidden, rows: None)
    start(engine, batch)
    for _ in range(WARM_STEPS):
        engine.step()
    times = []
    steps = STEPS if mode != "eager" else 12
    torch.cuda.synchronize()
    begin = last = time.perf_counter()
    for _ in range(steps):
        engine.step()
        now = time.perf_counter()
        times.append(1e3 * (now - last))
        last = now
    torch.cuda.synchronize()
    total = 1e3 * (time.perf_counter() - begin) / steps
    keys = KEYS + WARM_STEPS + steps // 2
    num_bytes = step_bytes(model.config, [keys] * batch)
    cell: dict[str, Any] = {
        "ms": round(statistics.median(times), 4),
        "mean_ms": round(total, 4),
        "p10": round(sorted(times)[len(times) // 10], 4),
        "p90": round(sorted(times)[-1 - len(times) // 10], 4),
        "share": round(num_bytes / (total * 1e-3) / ceiling, 3),
        "start_s": round(made, 2),
    }
    report = engine.graph_report()
    cell |= {"capture_s": round(report.seconds, 3), "graph_bytes": report.num_bytes, "missing": list(report.missing)}
    if batch == 1:
        cell["launches"] = profile(engine, 10)
        cell["host_ms"] = host(engine, 10)
    if mode == "whole":
        cell["replay"] = round(bare_replay(engine), 4)
    return cell


def main(path: str, seconds: float, commit: str, names: list[str]) -> None:
    with aot.recording() as launches:
        for name in dict.fromkeys(":".join(name.split(":")[:2]) for name in names):
            model, batch = name.split(":")
            Step(SHAPES[model], int(batch), "meta").run()
    aot.compile_everywhere(list({launch.key: launch for launch in launches}.values()), (90,), 15)
    recorder = harness.Recorder(Path(path), seconds, commit)
    model, shape = None, ""
    for name in recorder.cells(names):
        wanted, batch, mode = name.split(":")
        if wanted != shape:
            model = None
            gc.collect()
            torch.cuda.empty_cache()
            model, shape = dummy_model(SHAPES[wanted], dtype=BF16, device="cuda"), wanted
        assert model is not None
        try:
            cell = measure(model, int(batch), mode, recorder.ceiling)
        except Exception as error:  # one cell's failure must not hide the others
            cell = {"error": f"{type(error).__name__}: {error}"}
        with recorder.path.open("a") as file:
            file.write(json.dumps({"id": f"decode/{name}", **cell}) + "\n")
        print(name, json.dumps(cell), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), sys.argv[3], sys.argv[4].split(","))
