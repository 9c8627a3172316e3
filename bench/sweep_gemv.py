"""Which cut of the dot-free projection is fastest: each projection alone, then the whole chain of a model.

    python bench/sweep_gemv.py MODEL OUT.jsonl SECONDS TOKENS COMMIT [EARLIER.jsonl]

A projection is timed as one graph over the weights of all layers, so nothing is served from the L2. The chain is the
projections of every layer and the head, with no attention; starting from the best cut of each, one projection at a
time tries its next best ones inside the chain.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import aot
import harness
import torch

from ostinato.kernels._linear_plan import LinearPlan
from ostinato.kernels.linear import linear_planned
from ostinato.model import SHAPES, ModelConfig

BF16 = torch.bfloat16
OPS = ("qkv", "o", "gate_up", "down", "head")


class Chain:
    """Random weights of a model's projections, and its decode chain without attention."""

    def __init__(
        self, config: ModelConfig, tokens: int, device: str, layers: int | None = None,
        weights: dict[str, list[torch.Tensor]] | None = None,
    ) -> None:  # fmt: skip
        hidden, inner = config.hidden_size, config.intermediate_size
        q = config.num_heads * config.head_dim
        qkv = q + 2 * config.num_kv_heads * config.head_dim
        self.tokens, self.layers, self.q = tokens, layers or config.num_layers, q
        self.shapes = {
            "qkv": (qkv, hidden),
            "o": (hidden, q),
            "gate_up": (2 * inner, hidden),
            "down": (hidden, inner),
            "head": (config.vocab_size, hidden),
        }

        def weight(rows: int, cols: int) -> torch.Tensor:
            made = torch.empty(rows, cols, dtype=BF16, device=device)
            return made if device == "meta" else made.normal_(std=cols**-0.5)

        self.weights = weights or {
            name: [weight(*shape) for _ in range(1 if name == "head" else self.layers)]
            for name, shape in self.shapes.items()
        }
        self.norm = torch.ones(hidden, dtype=BF16, device=device)
        self.hidden = weight(tokens, hidden)
        self.buffers = {
            "qkv": weight(tokens, qkv), "o": weight(tokens, hidden), "gate_up": weight(tokens, inner),
            "down": weight(tokens, hidden), "head": weight(tokens, config.vocab_size),
        }  # fmt: skip

    def bytes_of(self, name: str) -> int:
        rows, cols = self.shapes[name]
        return 2 * rows * cols * len(self.weights[name])

    def arguments(self, name: str, hidden: torch.Tensor) -> dict[str, Any]:
        buffers = self.buffers
        norm = {"norm_weight": self.norm, "norm_eps": 1e-5}
        return {
            "qkv": {"x": hidden, **norm},
            "o": {"x": buffers["qkv"][:, : self.q], "residual": hidden},
            "gate_up": {"x": buffers["o"], **norm, "swiglu": True},
            "down": {"x": buffers["gate_up"], "residual": buffers["o"]},
            "head": {"x": hidden, **norm},
        }[name] | {"out": buffers[name]}

    def alone(self, name: str, plan: LinearPlan) -> None:
        arguments = self.arguments(name, self.hidden)
        for weight in self.weights[name]:
            linear_planned(weight=weight, **arguments, plan=plan)

    def step(self, plans: dict[str, LinearPlan]) -> None:
        hidden = self.step_layers(plans)
        linear_planned(weight=self.weights["head"][0], **self.arguments("head", hidden), plan=plans["head"])

    def step_layers(self, plans: dict[str, LinearPlan]) -> torch.Tensor:
        hidden = self.hidden
        for layer in range(self.layers):
            for name in OPS[:-1]:
                linear_planned(weight=self.weights[name][layer], **self.arguments(name, hidden), plan=plans[name])
            hidden = self.buffers["down"]
        return hidden


def candidates(name: str, rows: int, cols: int, tokens: int) -> list[LinearPlan]:
    parts = 2 if name == "gate_up" else 1
    plans = []
    for block_k, warps in ((1024, 4), (2048, 4), (2048, 8), (1024, 2), (4096, 8)):
        if block_k > cols or cols % block_k:
            continue
        chunks = cols // block_k
        for block_n in (1, 2, 4, 8, 16):
            tile = block_n * parts * cols * 2
            chunk_registers = block_n * parts * block_k // (warps * 64)
            if not 4096 <= tile <= 65536 or chunk_registers > 64:
                continue
            early = {min(chunks, e) for e in (1, 2, 4, 8)}
            plans += [
                LinearPlan("gemv", block_n, block_k, warps, early=e) for e in sorted(early) if e * chunk_registers <= 64
            ]
            if chunks * chunk_registers <= 40 and tokens == 1:
                for programs in (2, 3, 4, 6, 8):
                    if programs * warps <= 24 and programs * tile <= 131072 and programs * tile >= 32768:
                        plans.append(LinearPlan("gemv", block_n, block_k, warps, programs_per_sm=programs))
    return plans


def label(plan: LinearPlan) -> str:
    return f"n{plan.block_n}k{plan.block_k}w{plan.num_warps}e{plan.early}p{plan.programs_per_sm}"


def nearly_best(path: Path, key: str, plans: list[LinearPlan], within: float) -> list[LinearPlan]:
    """Of `plans`, those that an earlier sweep found within a factor of its best; all, if it knows none."""
    cells = [json.loads(line) for line in path.read_text().splitlines()]
    times = {cell["id"]: min(cell["median"], cell["again"]) for cell in cells if "id" in cell}
    known = [times[f"{key}/{label(plan)}"] for plan in plans if f"{key}/{label(plan)}" in times]
    return [plan for plan in plans if not known or times.get(f"{key}/{label(plan)}", 0.0) <= within * min(known)]


def main(model: str, path: str, seconds: float, tokens: int, commit: str, earlier: str | None = None) -> None:
    config = SHAPES[model]
    shapes = Chain(replace(config, num_layers=1), tokens, "meta")
    plans = {name: candidates(name, *shapes.shapes[name], tokens) for name in OPS}
    if earlier is not None:
        for name in OPS:
            near = nearly_best(Path(earlier), f"{model}/{tokens}/{name}", plans[name], 1.03)
            plans[name] = near[:16]
    with aot.recording() as launches:
        for name in OPS:
            for plan in plans[name]:
                shapes.alone(name, plan)
    print(f"{len(launches)} kernels to compile", flush=True)
    aot.compile_everywhere(launches, (90,), 15)

    recorder = harness.Recorder(Path(path), seconds, commit)
    chain = Chain(config, tokens, "cuda")
    best: dict[str, list[tuple[float, LinearPlan]]] = {}
    for name in OPS:
        timed = []
        for plan in plans[name]:
            if recorder.late:
                break
            graph = harness.capture(lambda plan=plan, name=name: chain.alone(name, plan))
            timing = harness.time_graph(graph, replays=15)
            recorder.record(f"{model}/{tokens}/{name}/{label(plan)}", timing, num_bytes=chain.bytes_of(name))
            timed.append((min(timing.median, timing.again), plan))
        best[name] = sorted(timed, key=lambda pair: pair[0])
        for micros, plan in best[name][:6]:
            share = chain.bytes_of(name) / micros / 1e-6 / recorder.ceiling
            print(f"{name:8s} {label(plan):24s} {micros / len(chain.weights[name]):8.2f} us {share:.3f}", flush=True)

    total = sum(chain.bytes_of(name) for name in OPS)
    chosen = {name: best[name][0][1] for name in OPS}

    def whole(plans: dict[str, LinearPlan]) -> harness.Timing:
        return harness.time_graph(harness.capture(lambda: chain.step(plans)), replays=30)

    timing = whole(chosen)
    for sweep in range(2):
        for name in ("o", "qkv", "down", "gate_up", "head"):
            for _, plan in best[name][:8]:
                if plan == chosen[name] or recorder.late:
                    continue
                other = whole({**chosen, name: plan})
                if other.median < timing.median and other.again < timing.again:
                    timing, chosen = other, {**chosen, name: plan}
        print(
            f"chain after sweep {sweep}: {timing} share {total / timing.median / 1e-6 / recorder.ceiling:.4f}",
            flush=True,
        )
    facts = {name: label(plan) for name, plan in chosen.items()}
    recorder.record(f"{model}/{tokens}/chain", whole(chosen), num_bytes=total, plans=facts)
    print(facts, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:])
