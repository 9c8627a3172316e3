"""Which cut of each projection is fastest: alone against cuBLAS, then within the chain of a model.

    python bench/sweep_linear.py OUT.jsonl SECONDS COMMIT MODEL:TOKENS[,MODEL:TOKENS...] [EARLIER.jsonl]

A projection is timed as one graph over the weights of several layers, so nothing is served from the L2. cuBLAS times
are of the bare product through `F.linear`, ours include norm, activation and residual. The chain is the projections of
every layer and the head, with no attention; starting from the best cut of each, one projection at a time tries its next
best ones inside the chain. Plans that an earlier sweep found more than 3 % behind its best are left out.
"""

import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import aot
import harness
import torch
import torch.nn.functional as F
from projections import BLAS, OPS, Chain, label

from ostinato.kernels._linear_plan import LinearPlan
from ostinato.model import SHAPES

SHARED_MEMORY, MULTIPROCESSORS = 227 * 1024, 132


def gemv_candidates(name: str, rows: int, cols: int, tokens: int) -> Iterator[LinearPlan]:
    parts = 2 if name == "gate_up" else 1
    for block_k, warps in ((1024, 4), (2048, 4), (2048, 8), (1024, 2), (4096, 8), (4096, 16)):
        chunks = -(-cols // block_k)
        if chunks * block_k > 1.2 * cols:
            continue
        for block_n in (1, 2, 4, 8, 16):
            tile = block_n * parts * cols * 2
            chunk_registers = block_n * parts * block_k // (warps * 64)
            if not 4096 <= tile <= 65536 or chunk_registers > 64:
                continue
            for early in sorted({min(chunks, e) for e in (1, 2, 4, 8)}):
                if early * chunk_registers <= 64:
                    yield LinearPlan("gemv", block_n, block_k, warps, early=early)
            if chunks * chunk_registers <= 40 and tokens == 1:
                for programs in (1, 2, 3, 4, 6, 8):
                    if programs * warps <= 32 and 32768 <= programs * tile <= 131072:
                        yield LinearPlan("gemv", block_n, block_k, warps, programs_per_sm=programs)


TILES = ((64, 128, 1), (64, 64, 1), (32, 256, 1), (32, 128, 4), (16, 128, 4), (16, 64, 4))


def tensor_candidates(name: str, rows: int, cols: int, tokens: int) -> Iterator[LinearPlan]:
    """Tiles with as many stages as fit, for one, two or three programs on a multiprocessor at a time."""
    parts = 2 if name == "gate_up" else 1
    for (block_n, block_k, slices), split in itertools.product(TILES, (1, 2, 4, 8)):
        block_m = max(8 if slices > 1 else 16, 1 << (tokens - 1).bit_length())
        stage = (block_n * parts + block_m) * block_k * slices * 2
        tiles, chunks = -(-rows // parts // block_n), cols // split // (block_k * slices)
        if cols % (block_k * slices * split) or chunks < 3 or tiles * split < 96:
            continue
        if split > 1 and (tiles * split > 4 * MULTIPROCESSORS or slices > 1 or name in ("gate_up", "head")):
            continue
        for resident in (1, 2, 3):
            stages = min(8, SHARED_MEMORY // resident // stage + (slices > 1), chunks)
            if stages < 3 or (stages < chunks and stage * stages * resident < 100000):
                continue
            plan = LinearPlan("tensor", block_n, block_k, 4, num_stages=stages, split_k=split, slices=slices)
            if name in ("qkv", "gate_up", "head"):
                plan = replace(plan, norm_apart=True)
            yield plan
            if name == "gate_up" and tiles > resident * MULTIPROCESSORS:
                yield replace(plan, programs_per_sm=resident)


def candidates(chain: Chain, name: str) -> list[LinearPlan]:
    rules = [gemv_candidates] * (chain.tokens <= 2) + [tensor_candidates] * (chain.tokens > 1)
    return [plan for rule in rules for plan in rule(name, *chain.shapes[name], chain.tokens)]


def time(run: Callable[[], object], replays: int) -> harness.Timing:
    return harness.time_graph(harness.capture(run), replays=replays)


@dataclass
class Sweep:
    """One model at one number of tokens."""

    key: str
    chain: Chain
    recorder: harness.Recorder

    def alone(self, name: str, plans: list[LinearPlan]) -> list[tuple[float, LinearPlan]]:
        """Plans of a projection by their time; prints the best beside cuBLAS."""
        chain, timed = self.chain, []
        x = chain.arguments(name, chain.hidden)["x"]

        def blas() -> None:
            for weight in chain.weights[name]:
                F.linear(x, weight)

        count, num_bytes = len(chain.weights[name]), chain.bytes_of(name)
        timing = time(blas, 10)
        self.recorder.record(f"{self.key}/{name}/cublas", timing, num_bytes=num_bytes, count=count)
        base = min(timing.median, timing.again)
        truth = chain.result(name, BLAS)
        for plan in plans:
            if self.recorder.late:
                break
            timing = time(lambda plan=plan: chain.alone(name, plan), 10)  # type: ignore[misc]
            self.recorder.record(f"{self.key}/{name}/{label(plan)}", timing, num_bytes=num_bytes, count=count)
            error = ((chain.result(name, plan) - truth).norm() / truth.norm()).item()
            if not error < 0.02:
                print(f"    {label(plan)} is wrong by {error:.3f}", flush=True)
                continue
            timed.append((min(timing.median, timing.again), plan))
        timed.sort(key=lambda pair: pair[0])
        print(f"{self.key} {name}: cublas {base / count:.2f} us", flush=True)
        for micros, plan in timed[:5]:
            share = num_bytes / micros / 1e-6 / self.recorder.ceiling
            print(f"    {label(plan):24s} {micros / count:7.2f} us, {micros / base:.3f}, share {share:.3f}", flush=True)
        return timed

    def together(self, best: dict[str, list[tuple[float, LinearPlan]]]) -> None:
        """The chain, from the best plans alone towards the best within it."""
        chain = self.chain
        chosen = {name: best[name][0][1] for name in OPS}

        def whole(plans: dict[str, LinearPlan]) -> harness.Timing:
            return time(lambda: chain.step(plans), 20)

        timing = whole(chosen)
        for name in ("o", "qkv", "down", "gate_up", "head"):
            for _, plan in best[name][1:5]:
                if self.recorder.late:
                    continue
                other = whole({**chosen, name: plan})
                if other.median < timing.median and other.again < timing.again:
                    timing, chosen = other, {**chosen, name: plan}
        total = sum(chain.bytes_of(name) for name in OPS)
        facts = {name: label(plan) for name, plan in chosen.items()}
        self.recorder.record(f"{self.key}/chain", timing, num_bytes=total, plans=facts, layers=chain.layers)
        share = total / timing.median / 1e-6 / self.recorder.ceiling
        print(f"{self.key} chain {timing.median:.1f} us, share {share:.4f} {facts}", flush=True)
        if chain.tokens > 1:
            ours, theirs = (time(partial(chain.step_layers, p), 15) for p in (chosen, dict.fromkeys(OPS, BLAS)))
            self.recorder.record(f"{self.key}/layers", ours, plans=facts, blas=theirs.median, layers=chain.layers)
            print(f"{self.key} layers {ours.median:.1f} us, {ours.median / theirs.median:.3f} of cuBLAS'", flush=True)


def promising(earlier: list[str], key: str, plans: list[LinearPlan]) -> list[LinearPlan]:
    """Those that an earlier sweep found within 3 % of its best, or did not know."""
    cells = [json.loads(line) for line in earlier]
    times = {cell["id"]: min(cell["median"], cell["again"]) for cell in cells if "id" in cell}
    known = [times[f"{key}/{label(plan)}"] for plan in plans if f"{key}/{label(plan)}" in times]
    limit = 1.03 * min(known, default=0.0)
    return [plan for plan in plans if times.get(f"{key}/{label(plan)}", 0.0) <= limit]


def compilable(cells: list[str], earlier: list[str]) -> dict[str, dict[str, list[LinearPlan]]]:
    """The candidates that fit the device and spill no registers, all of them compiled."""
    noted: dict[tuple[str, str, LinearPlan], list[aot.Launch]] = {}
    for cell in cells:
        model, tokens = cell.split(":")
        chain = Chain(replace(SHAPES[model], num_layers=1), int(tokens), "meta")
        for name in OPS:
            for plan in promising(earlier, f"{model}/{tokens}/{name}", candidates(chain, name)):
                with aot.recording() as noted[cell, name, plan]:
                    chain.alone(name, plan)
    unique = list({launch.key: launch for launches in noted.values() for launch in launches}.values())
    print(f"{len(unique)} kernels to compile", flush=True)
    results = zip(unique, aot.compile_everywhere(unique, (90,), os.cpu_count() or 1), strict=True)
    good = {launch.key for launch, made in results if made.shared <= SHARED_MEMORY and not made.stack}
    plans: dict[str, dict[str, list[LinearPlan]]] = {cell: {name: [] for name in OPS} for cell in cells}
    for (cell, name, plan), launches in noted.items():
        if all(launch.key in good for launch in launches):
            plans[cell][name].append(plan)
    return plans


def main(path: str, seconds: float, commit: str, cells: list[str], earlier: str | None = None) -> None:
    plans = compilable(cells, Path(earlier).read_text().splitlines() if earlier else [])
    recorder = harness.Recorder(Path(path), seconds, commit)
    weights, model = None, None
    for cell in cells:
        config, tokens = SHAPES[cell.split(":")[0]], int(cell.split(":")[1])
        if config != model:
            weights, model = None, config
            torch.cuda.empty_cache()
        chain = Chain(config, tokens, "cuda", min(config.num_layers, 16), weights)
        weights = chain.weights
        sweep = Sweep(cell.replace(":", "/"), chain, recorder)
        best = {name: sweep.alone(name, plans[cell][name]) for name in OPS}
        if all(best.values()):
            sweep.together(best)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), sys.argv[3], sys.argv[4].split(","), *sys.argv[5:])
