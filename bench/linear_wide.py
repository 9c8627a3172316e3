"""Projections of 64 to 256 tokens: which road and which cut, against cuBLAS with the neighbours as our own kernels.

    python bench/linear_wide.py OUT.jsonl SECONDS COMMIT MODEL:TOKENS[,MODEL:TOKENS...] [sweep [EARLIER.jsonl]]

Graphs over the weights of several layers, so nothing is served from the L2. Of each projection: the bare product by
`F.linear` (`cublas`), the same with norm, SwiGLU and residual add as kernels of their own (`neighbours`), the road that
takes cuBLAS in `linear` (`blas`), and what ships. Of the layers, without attention: `layers-neighbours` has seven
launches a layer, a residual add and the norm behind it in one; `layers-blas`, and `layers-ships`. A sweep tries many
cuts; those that an earlier one found more than 5 % behind its best are left out.
"""

import gc
import itertools
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import aot
import harness
import torch
import torch.nn.functional as F
from linear import time
from projections import BLAS, OPS, Chain, label, planned

from ostinato.kernels._linear_plan import LinearPlan
from ostinato.model import SHAPES

SHARED_MEMORY, MULTIPROCESSORS = 227 * 1024, 132
LAYER_OPS = OPS[:-1]

# By tokens: of a tile the tokens, the rows of the weight, the columns, and warps.
TILES = {
    64: (
        (64, 16, 128, 4), (64, 32, 128, 4), (64, 64, 128, 4), (64, 64, 256, 4), (64, 128, 128, 4), (64, 64, 64, 4),
        (64, 128, 64, 4),
    ),
    128: (
        (64, 32, 128, 4), (64, 64, 128, 4), (128, 16, 128, 4), (128, 32, 128, 4), (128, 64, 128, 4), (128, 64, 64, 4),
        (128, 128, 64, 4), (128, 128, 64, 8), (128, 128, 128, 8),
    ),
    256: (
        (64, 64, 128, 4), (128, 32, 128, 4), (128, 64, 128, 4), (128, 64, 64, 4), (128, 128, 64, 4), (128, 128, 64, 8),
        (128, 128, 128, 8), (256, 32, 128, 8), (256, 64, 64, 8), (256, 64, 128, 8), (256, 128, 64, 8),
        (128, 256, 64, 8),
    ),
}  # fmt: skip


def candidates(chain: Chain, name: str) -> Iterator[LinearPlan]:
    """Tiles with as many stages as fit, for one or two programs on a multiprocessor at a time."""
    (rows, cols), tokens, parts = chain.shapes[name], chain.tokens, 2 if name == "gate_up" else 1
    for (block_m, wide, block_k, warps), split in itertools.product(TILES[tokens], (1, 2, 4)):
        programs = -(-rows // wide) * -(-tokens // block_m) * split
        chunks = cols // split // block_k
        if programs < 64 or chunks < 4 or (split > 1 and (programs > 1.1 * MULTIPROCESSORS or parts == 2)):
            continue
        if wide < 128 and programs > 4 * MULTIPROCESSORS:
            continue
        for resident in (1, 2):
            stages = min(6, (SHARED_MEMORY - 2048) // resident // ((block_m + wide) * block_k * 2), chunks)
            if stages < 3 or (resident == 2 and (programs <= MULTIPROCESSORS or warps * block_m * wide > 2**17)):
                continue
            if resident == 1 and programs > 2 * MULTIPROCESSORS and block_m * wide < 2**15:
                continue
            yield LinearPlan(
                "tile", wide // parts, block_k, warps, early=stages, num_stages=stages, split_k=split, norm_apart=True,
                block_m=block_m,
            )  # fmt: skip


@dataclass
class Measuring:
    """One model at one number of tokens."""

    key: str
    chain: Chain
    recorder: harness.Recorder

    def alone(self, name: str, plans: list[LinearPlan]) -> list[tuple[float, LinearPlan]]:
        """Plans of a projection by their time; the first of them is what ships."""
        chain, timed = self.chain, []
        x = chain.arguments(name, chain.hidden)["x"]
        count, num_bytes = len(chain.weights[name]), chain.bytes_of(name)

        def blas() -> None:
            for weight in chain.weights[name]:
                F.linear(x, weight)

        times = {}
        for kind, run in (("cublas", blas), ("neighbours", lambda: chain.neighbours(name))):
            timing = time(run, 10)
            self.recorder.record(f"{self.key}/{name}/{kind}", timing, num_bytes=num_bytes, count=count)
            times[kind] = min(timing.median, timing.again)
        truth = chain.result(name, BLAS)

        def go(plan: LinearPlan) -> None:
            if self.recorder.late:
                return
            timing = time(lambda: chain.alone(name, plan), 10)
            error = ((chain.result(name, plan) - truth).norm() / truth.norm()).item()
            self.recorder.record(f"{self.key}/{name}/{label(plan)}", timing, num_bytes=num_bytes, count=count,
                                 road=plan.road, error=round(error, 5))  # fmt: skip
            if error < 0.02:
                timed.append((min(timing.median, timing.again), plan))
            else:
                print(f"    {label(plan)} is wrong by {error:.3f}", flush=True)

        for plan in plans:
            go(plan)
        timed.sort(key=lambda pair: pair[0])
        print(f"{self.key} {name}: " + ", ".join(f"{k} {v / count:.2f} us" for k, v in times.items()), flush=True)
        for micros, plan in timed[:5]:
            print(f"    {label(plan):24s} {micros / count:7.2f} us, {micros / times['neighbours']:.3f}", flush=True)
        return timed

    def layers(self, best: dict[str, list[tuple[float, LinearPlan]]] | None) -> None:
        """All layers with the plans that ship; given the best plans alone, also with those of them that help here."""
        chain = self.chain
        total = sum(chain.bytes_of(name) for name in LAYER_OPS)

        def whole(kind: str, plans: dict[str, LinearPlan] | None) -> harness.Timing:
            timing = time((lambda: chain.step_layers(plans)) if plans else chain.step_neighbours, 15)
            facts = {name: label(plan) for name, plan in (plans or {}).items() if name != "head"}
            self.recorder.record(f"{self.key}/{kind}", timing, num_bytes=total, plans=facts, layers=chain.layers)
            ratios[kind] = timing.median / ratios.get("layers-neighbours", timing.median)
            if kind == "layers-neighbours":
                ratios[kind] = timing.median
            return timing

        ratios: dict[str, float] = {}
        whole("layers-neighbours", None)
        blas = dict.fromkeys(OPS, BLAS)
        whole("layers-blas", blas)
        timing, chosen = whole("layers-ships", planned(chain)), planned(chain)
        if best:
            for name in LAYER_OPS:
                for _, plan in best.get(name, [])[:4]:
                    other = time(lambda tried={**chosen, name: plan}: chain.step_layers(tried), 15)  # type: ignore[misc]
                    if other.median < timing.median and other.again < timing.again and not self.recorder.late:
                        timing, chosen = other, {**chosen, name: plan}
            whole("layers-best", chosen)
            whole("layers-late", {name: replace(plan, early=0) for name, plan in chosen.items()})
        print(f"{self.key} {ratios} {[label(chosen[name]) for name in LAYER_OPS]}", flush=True)


def promising(earlier: list[str], key: str, plans: list[LinearPlan]) -> list[LinearPlan]:
    """Those that an earlier sweep found within 5 % of its best, or did not know."""
    cells = [json.loads(line) for line in earlier]
    times = {cell["id"]: min(cell["median"], cell["again"]) for cell in cells if "id" in cell}
    known = [times[f"{key}/{label(plan)}"] for plan in plans if f"{key}/{label(plan)}" in times]
    limit = 1.05 * min(known, default=0.0)
    return [plan for plan in plans if times.get(f"{key}/{label(plan)}", 0.0) <= limit]


class Compiling:
    """All plans, being compiled behind the measurements."""

    def __init__(self, cells: list[str], sweep: bool, earlier: list[str]) -> None:
        self.noted: dict[tuple[str, str], list[tuple[LinearPlan, list[aot.Launch]]]] = {}
        with aot.recording() as neighbours:
            for cell in cells:
                model, tokens = cell.split(":")
                Chain(replace(SHAPES[model], num_layers=1), int(tokens), "meta").step_neighbours()
        for cell in cells:
            model, tokens = cell.split(":")
            chain = Chain(replace(SHAPES[model], num_layers=1), int(tokens), "meta")
            for name in OPS:
                plans = [planned(chain)[name], BLAS]
                if sweep:
                    plans += promising(earlier, f"{model}/{tokens}/{name}", list(candidates(chain, name)))
                self.noted[cell, name] = []
                for plan in dict.fromkeys(plans):
                    with aot.recording() as launches:
                        chain.alone(name, plan)
                    self.noted[cell, name].append((plan, launches))
        noted = [*neighbours, *(one for plans in self.noted.values() for _, launches in plans for one in launches)]
        unique = {launch.key: launch for launch in noted}
        print(f"{len(unique)} kernels to compile", flush=True)
        made = aot.compile_behind(unique.values(), (90,), max(1, (os.cpu_count() or 1) - 1))
        self.made = dict(zip(unique, made, strict=True))

    def plans(self, cell: str, name: str) -> list[LinearPlan]:
        """Those that fit the device and spill no registers."""
        return [plan for plan, launches in self.noted[cell, name] if all(map(self._good, launches))]

    def _good(self, launch: aot.Launch) -> bool:
        made = self.made[launch.key].result()
        return made.shared <= SHARED_MEMORY and not made.stack


def main(path: str, seconds: float, commit: str, cells: list[str], sweep: str = "", earlier: str = "") -> None:
    compiling = Compiling(cells, bool(sweep), Path(earlier).read_text().splitlines() if earlier else [])
    recorder = harness.Recorder(Path(path), seconds, commit)
    gc.freeze()  # a capture collects garbage, and all that is here so far stays
    weights, model = None, None
    for cell in cells:
        config, tokens = SHAPES[cell.split(":")[0]], int(cell.split(":")[1])
        if config != model:
            weights, model = None, config
            torch.cuda.empty_cache()
        layers = min(config.num_layers, 4 if sweep and config.hidden_size >= 4096 else 16)
        chain = Chain(config, tokens, "cuda", layers, weights)
        weights = chain.weights
        measuring = Measuring(cell.replace(":", "/"), chain, recorder)
        best = {name: measuring.alone(name, compiling.plans(cell, name)) for name in OPS if not recorder.late}
        measuring.layers(best if sweep else None)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), sys.argv[3], sys.argv[4].split(","), *sys.argv[5:])
