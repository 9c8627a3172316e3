"""Prompts through an engine, launched one by one and in one graph: to their logits and to their first token.

    python bench/prompts.py OUT.jsonl SECONDS COMMIT [MODEL:TOKENS,...]

A record's id is MODEL:TOKENS/eager or MODEL:TOKENS/graph. Its time is that from the request to its first token on the
host; `logits` is from the scheduled prompt to its logits on the device, `host` how long of it the host is busy.
"""

import sys
import time
from pathlib import Path

import aot
import harness
import torch
from prefill import Prompt

from ostinato.kernels import FIRST_BLOCK
from ostinato.model import SHAPES, Decoder
from ostinato.runtime import Engine, EngineConfig, SamplingParams
from ostinato.runtime.scheduler import PrefillChunk
from ostinato.weights import dummy_model

BF16 = torch.bfloat16
CELLS = [
    *(f"llama-3.2-1b:{tokens}" for tokens in (128, 512, 16, 1024, 64, 256, 32)),
    *(f"llama-3.1-8b:{tokens}" for tokens in (128, 512, 1024)),
]
WAYS = {"eager": False, "graph": True}
UNTIMED, TIMED = 6, 21
PARAMS = SamplingParams(temperature=0.0, max_tokens=1)


def parts(cell: str) -> tuple[str, int]:
    model, tokens = cell.split(":")
    return model, int(tokens)


def launches(cells: list[str]) -> list[aot.Launch]:
    with aot.recording() as noted:
        for cell in cells:
            Prompt(*parts(cell), "meta").run()
    return list({launch.key: launch for launch in noted}.values())


def make_engine(decoder: Decoder, tokens: int, *, with_graph: bool) -> Engine:
    """With room for one prompt; its graph is captured at the second, and no other."""
    config = EngineConfig(
        max_num_seqs=1,
        capture="lazy",
        max_model_len=tokens + 32,
        kv_cache_memory_bytes=4 * (tokens + 64) * decoder.config.kv_bytes_per_token(decoder.dtype),
        graph_warmup_steps=1,
        prompt_capture_sizes=(tokens,) if with_graph else (),
    )
    return Engine(decoder, config, tokenizer=None, eos_token_ids=())


def wait() -> None:
    """Until the device has done everything."""
    if harness.DEVICE.type == "cuda":
        torch.cuda.synchronize()


def first_token(engine: Engine, tokens: int) -> float:
    """Microseconds from a request to its first token on the host."""
    wait()
    start = time.perf_counter()
    [sequence] = engine.create(range(tokens), PARAMS)
    engine.add(sequence)
    engine.step()
    assert sequence.first_token_time is not None, "a prompt that is computed in one step has its first token"
    return 1e6 * (sequence.first_token_time - start)


def logits(engine: Engine, tokens: int) -> tuple[float, float]:
    """Microseconds from a scheduled prompt to its logits on the device, and until the host is free."""
    [sequence] = engine.create(range(tokens), PARAMS)
    sequence.blocks = list(range(FIRST_BLOCK, engine.kv_plan.num_blocks))
    wait()
    with torch.inference_mode():
        start = time.perf_counter()
        engine._runner._prompt_runner.run([PrefillChunk(sequence, 0, tokens)])
        launched = time.perf_counter()
        wait()
    return 1e6 * (time.perf_counter() - start), 1e6 * (launched - start)


def measure(cell: str, decoder: Decoder, recorder: harness.Recorder) -> None:
    _, tokens = parts(cell)
    engines = {way: make_engine(decoder, tokens, with_graph=with_graph) for way, with_graph in WAYS.items()}
    firsts: dict[str, list[float]] = {way: [] for way in WAYS}
    walls: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for turn in range(UNTIMED + TIMED):
        for way, engine in engines.items():
            first, wall = first_token(engine, tokens), logits(engine, tokens)
            if turn >= UNTIMED:
                firsts[way].append(first)
                walls[way].append(wall)
    line = []
    for way, engine in engines.items():
        ordered, middle = sorted(firsts[way]), TIMED // 2
        timing = harness.Timing(ordered[middle], ordered[TIMED // 10], ordered[-1 - TIMED // 10], ordered[middle])
        wall, host = (sorted(times)[middle] for times in zip(*walls[way], strict=True))
        reasons = {reason.name: count for reason, count in engine.decode_runner.counters.prompts.items()}
        recorder.record(f"{cell}/{way}", timing, logits=wall, host=host, reasons=reasons)
        line.append(f"{way}: token {timing.median / 1e3:.2f}, logits {wall / 1e3:.2f}, host {host / 1e3:.2f} {reasons}")
    print(f"{cell:20s} ms | {' | '.join(line)}", flush=True)


def main(path: str, seconds: float, commit: str, cells: list[str]) -> None:
    noted = launches(cells)
    print(f"{len(noted)} kernels to compile", flush=True)
    aot.compile_everywhere(noted, (90,), 15)
    recorder = harness.Recorder(Path(path), seconds, commit)
    decoders: dict[str, Decoder] = {}
    for cell in cells:
        if recorder.late:
            print("deadline: the rest is for the next run", flush=True)
            break
        if f"{cell}/graph" in recorder.done:
            continue
        model, _ = parts(cell)
        if model not in decoders:
            decoders.clear()
            decoders[model] = dummy_model(SHAPES[model], dtype=BF16, device=harness.DEVICE)
        measure(cell, decoders[model], recorder)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), sys.argv[3], sys.argv[4].split(",") if len(sys.argv) > 4 else CELLS)
