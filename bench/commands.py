"""Several commands of `ostinato bench` in one process, on a GPU: what they launch is compiled first, in 15 processes.

    python bench/commands.py OUT SECONDS 'modes --shape llama-3.1-8b --batch 1,8 --context 1024' 'cost --shape ...' ...

Only `modes`, `profile`, `break`, `cost`, `kernels` and `peers`, with `--shape`. What each finds goes to
`OUT/h200-COMMAND-SHAPE.json`, with `-bBATCH` at the end of `break` and `kernels`, which have one, `-CONTEXT` where that
is not 1024, and `-MAX_NUM_SEQS` of `cost` with the sizes that are the default; traces of `profile` go to OUT/traces. No
command is begun that is not likely to end within SECONDS. Exits with 1 if one failed.
"""

import argparse
import gc
import shlex
import sys
import time
import traceback
from pathlib import Path

import aot
import torch
from decode_kernels import launches_of

from ostinato.bench import breaks, kernel_times, modes, peers, profiles, timing
from ostinato.bench.break_features import sizes_of
from ostinato.cli import main as ostinato
from ostinato.runtime import EngineConfig
from ostinato.runtime.graph_buckets import parse_sizes

STEPS = {"modes": 20, "profile": 5, "break": 20, "cost": 0, "kernels": 0, "peers": 20}
SHORTEST = {"modes": 8, "profile": 8, "break": 20, "cost": 20, "kernels": 8, "peers": 8}
"""Seconds; with fewer a command is not begun."""

Step = tuple[str, EngineConfig, list[int]]


def parse(line: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=STEPS)
    parser.add_argument("--shape", required=True)
    parser.add_argument("--batch")
    parser.add_argument("--context", default="1024")
    parser.add_argument("--peer", action="append")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--capture-sizes")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-model-len", type=int, default=131072)
    found = parser.parse_args(shlex.split(line))
    found.batch = found.batch or str(breaks.BATCH if found.command == "break" else 1)
    found.steps = found.steps or STEPS[found.command]
    found.rounds = found.rounds or (5 if found.command == "peers" else 3)
    return found


def steps_of(asked: argparse.Namespace) -> list[Step]:
    """The engines that a command starts, as far as what they launch depends on them."""
    if asked.command == "cost":
        sizes = tuple(parse_sizes(asked.capture_sizes)) if asked.capture_sizes else None
        engine = EngineConfig(max_num_seqs=asked.max_num_seqs, max_model_len=asked.max_model_len, capture_sizes=sizes)
        return [(asked.shape, engine, list(sizes or (1, 2, 4, 8, *range(16, asked.max_num_seqs + 1, 8))))]
    contexts = [int(part) for part in asked.context.split(",")]
    batches = [int(part) for part in asked.batch.split(",")]
    cells = [(batch, [batch], context) for context in contexts for batch in batches]
    if asked.command == "break":
        cells = [(batch, sorted({*sizes_of(batch), max(1, batch - 1)}), context) for batch, _, context in cells]
    rooms = {
        "modes": lambda: modes.room_of(asked.rounds, asked.steps),
        "peers": lambda: peers.room_of(asked.rounds, asked.steps),
        "profile": lambda: profiles.room_of(asked.steps),
        "break": lambda: breaks.room_of(asked.steps),
        "kernels": lambda: kernel_times.ROOM,
    }
    room = rooms[asked.command]()
    return [
        (asked.shape, EngineConfig(max_num_seqs=batch, max_model_len=context + room + 1, block_size=16), sizes)
        for batch, sizes, context in cells
    ]


def compile_all(steps: list[Step], prompts: list[tuple[str, int]]) -> None:
    """Decode steps, chunks of prompts, and what measures the read ceiling."""
    from prefill import Prompt

    began = time.perf_counter()
    launches = launches_of(steps)
    with aot.recording() as more, torch.inference_mode():
        for shape, tokens in dict.fromkeys((shape, min(tokens, 2048)) for shape, tokens in prompts):
            Prompt(shape, tokens, "meta").run()
        x, out = torch.empty(1 << 30, dtype=torch.int32, device="meta"), torch.empty(1 << 20, device="meta")
        for block, warps, programs in timing.READ_SHAPES:
            timing._read(x, out, block, warps, programs)
    unique = list({launch.key: launch for launch in [*launches, *more]}.values())
    recorded = time.perf_counter() - began
    aot.compile_everywhere(unique, (90,), 15)
    print(
        f"{len(unique)} kernels noted in {recorded:.1f} s, compiled after {time.perf_counter() - began:.1f} s",
        flush=True,
    )


def run(line: str, asked: argparse.Namespace, out: Path, left: float) -> int:
    more = f"-b{asked.batch}" if asked.command in ("break", "kernels") else ""
    more += f"-{asked.context}" if asked.context != "1024" else ""
    if asked.command == "cost" and not asked.capture_sizes:
        more += f"-{asked.max_num_seqs}"
    name = f"{asked.command}-{asked.shape}{more}"
    words = ["bench", *shlex.split(line), "--out", str(out / f"h200-{name}.json")]
    if asked.command in ("modes", "profile", "peers"):
        words += ["--seconds", str(left - 5)]
    if asked.command == "profile":
        words += ["--trace", str(out / "traces" / asked.shape)]
    print("$ ostinato", shlex.join(words), flush=True)
    began, code = time.perf_counter(), 0
    try:
        ostinato(words)
    except SystemExit as end:
        code = int(end.code or 0)
    except Exception:  # the next command may do better
        traceback.print_exc()
        code = 1
    gc.collect()
    torch.cuda.empty_cache()
    print(f"exit code {code} after {time.perf_counter() - began:.1f} s", flush=True)
    return code


def main(out: Path, seconds: float, lines: list[str]) -> int:
    began = time.perf_counter()
    asked = [parse(line) for line in lines]
    prompts = [(a.shape, int(c)) for a in asked if a.command == "modes" for c in a.context.split(",")]
    compile_all([step for one in asked for step in steps_of(one)], prompts)
    codes = []
    for line, one in zip(lines, asked, strict=True):
        left = seconds - (time.perf_counter() - began)
        if left < SHORTEST[one.command]:
            print(f"not begun, {left:.0f} s are left: {line}", flush=True)
            continue
        codes.append(run(line, one, out, left))
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
