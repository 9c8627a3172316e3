"""Decode steps through the engine's loop: whole, piecewise, with a hook, and eager, beside the bare replay.

    python bench/decode_loop.py OUT.jsonl SECONDS COMMIT MODELS:BATCHES:MODES[,...]

Each of the three is one name or several joined by "+": llama-3.2-1b+llama-3.1-8b:1+8:whole. A mode is whole, piecewise,
hook (whole, cut in the middle), eager, or two-slots (whole, each bucket captured twice, replayed in turns). Cells that
are in the file already are not measured again.

Weights are random, decoding is greedy, and every sequence starts with 1024 keys. A cell is the time of one step, with
tokens on the host. Modes of one batch size that follow each other work on one KV cache. `replay` is what a bare replay
of the step's graph takes, one after the other, in the same process; `launches` is what the driver was asked for in one
step, from a profile.
"""

import cProfile
import gc
import itertools
import json
import pathlib
import pstats
import statistics
import sys
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import harness
import torch
from decode_kernels import compile_decode

from ostinato.bench.traffic import step_bytes
from ostinato.model import SHAPES, Decoder, KVCache, ModelConfig
from ostinato.runtime import Engine, EngineConfig, SamplingParams
from ostinato.runtime.cuda_graph_runner import CudaGraphRunner
from ostinato.runtime.decode_pieces import DecodeSteps, WholeDecode
from ostinato.runtime.graph_reason import Path
from ostinato.runtime.static_buffers import Planner
from ostinato.runtime.step_state import RowUpdate
from ostinato.weights import dummy_model

KEYS, WARM_STEPS, STEPS, EAGER_STEPS = 1024, 12, 50, 30
BLOCK = 16
ROOM = KEYS + 256
PROFILED = 1, 8, 32


def engine_config(model: ModelConfig, batch: int, mode: str) -> EngineConfig:
    return EngineConfig(
        max_num_seqs=batch,
        max_model_len=ROOM,
        block_size=BLOCK,
        kv_cache_memory_bytes=(batch * ROOM + 64) * model.kv_bytes_per_token(torch.bfloat16),
        capture_sizes=(batch,),
        graphs={"hook": "whole", "eager": "off", "two-slots": "whole"}.get(mode, mode),  # type: ignore[arg-type]
        graph_self_test=False,
    )


def make_engine(model: Decoder, batch: int, mode: str, kv_cache: KVCache | None) -> Engine:
    config = engine_config(model.config, batch, mode)
    engine = Engine(model, config, tokenizer=None, eos_token_ids=(), kv_cache=kv_cache)
    if mode == "hook":
        engine.hooks.add(model.config.num_layers // 2, lambda hidden, rows: None)
    if mode == "two-slots":
        use_two_slots(engine)
    return engine


def use_two_slots(engine: Engine) -> None:
    """Capture the whole step twice, and replay the two in turns, as if something were planned between two steps."""
    graphs = engine.decode_runner.graphs
    assert graphs is not None
    resources, settings = replace(graphs.resources, planners=(Planner(),)), graphs.settings
    decode = WholeDecode(graphs.pieces, resources.buffers, settings.sizes, caps_batch_size=True)
    device = graphs.backend.device
    graphs.whole.release_graphs()
    graphs.whole = CudaGraphRunner("decode", decode, resources, DecodeSteps(), device, None, None, num_slots=2)
    graphs.whole.prepare_for_capture()
    engine.decode_runner.summary = graphs.capture_path(Path.WHOLE)


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
    for cache in (*runner._pieces.kv_cache.k, *runner._pieces.kv_cache.v):
        cache.normal_()
    blocks = [sequence.blocks for sequence in scheduler.running]
    runner._state.write_rows([RowUpdate(row, row, KEYS, KEYS + 1, held) for row, held in enumerate(blocks)])


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
            rows.append((1e3 * own / steps, f"{pathlib.Path(file).name}:{name}"))
    rows.sort(reverse=True)
    return {"all": round(sum(ms for ms, _ in rows), 3)} | {name: round(ms, 3) for ms, name in rows[:14]}


def bare_replay(engine: Engine) -> float:
    """Milliseconds of a replay of the whole step's graph, back to back; rows go on decoding."""
    graphs = engine.decode_runner.graphs
    assert graphs is not None
    key = graphs.configs[0].bucket_keys()[0]
    [slot] = graphs.whole.slots(key)
    return harness.time_graph(slot.graph, replays=40).median / 1e3


def measure(
    model: Decoder, batch: int, mode: str, ceiling: float, kv_cache: KVCache | None
) -> tuple[dict[str, Any], KVCache]:
    gc.collect()
    torch.cuda.empty_cache()
    before = time.perf_counter()
    engine = make_engine(model, batch, mode, kv_cache)
    made = time.perf_counter() - before
    start(engine, batch)
    for _ in range(WARM_STEPS):
        engine.step()
    times = []
    steps = STEPS if mode != "eager" else EAGER_STEPS
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
    if batch in PROFILED and mode != "eager":
        cell["launches"] = profile(engine, 10)
    if batch == 1:
        cell["host_ms"] = host(engine, 10)
    if mode == "whole":
        cell["replay"] = round(bare_replay(engine), 4)
    return cell, engine._runner._pieces.kv_cache


def cells_of(names: list[str]) -> list[str]:
    """MODEL:BATCH:MODE of each cell, models outermost, since weights are made anew for each."""
    parts = [[part.split("+") for part in name.split(":")] for name in names]
    cells = [":".join(cell) for part in parts for cell in itertools.product(*part)]
    models = list(dict.fromkeys(cell.split(":")[0] for cell in cells))
    return sorted(dict.fromkeys(cells), key=lambda cell: models.index(cell.split(":")[0]))


def main(path: str, seconds: float, commit: str, names: list[str]) -> None:
    cells = cells_of(names)
    sizes = dict.fromkeys(tuple(cell.split(":")[:2]) for cell in cells)
    steps = [(model, engine_config(SHAPES[model], int(batch), "whole"), (int(batch),)) for model, batch in sizes]
    print(compile_decode(steps), flush=True)
    recorder = harness.Recorder(pathlib.Path(path), seconds, commit)
    model, shape = None, ""
    kv_cache, rows = None, ""  # of one batch size; where it lies in memory alone makes a percent or two
    for name in recorder.cells(cells, prefix="decode/"):
        wanted, batch, mode = name.split(":")
        if (wanted, batch) != (shape, rows):
            kv_cache, rows = None, batch
        if wanted != shape:
            model = None
            gc.collect()
            torch.cuda.empty_cache()
            model, shape = dummy_model(SHAPES[wanted], dtype=torch.bfloat16, device="cuda"), wanted
        assert model is not None
        started = time.perf_counter()
        try:
            cell, kv_cache = measure(model, int(batch), mode, recorder.ceiling, kv_cache)
        except Exception as error:  # one cell's failure must not hide the others
            cell = {"error": f"{type(error).__name__}: {error}"}
        cell["cell_s"] = round(time.perf_counter() - started, 2)
        with recorder.path.open("a") as file:
            file.write(json.dumps({"id": f"decode/{name}", **cell}) + "\n")
        print(name, json.dumps(cell), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), sys.argv[3], sys.argv[4].split(","))
