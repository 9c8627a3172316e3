"""Which cut of the tensor-core projection is fastest, against cuBLAS, alone and in the chain of a model.

    python bench/sweep_tensor.py MODEL OUT.jsonl SECONDS TOKENS[,TOKENS...] COMMIT

cuBLAS times are of the bare product through `F.linear`, ours include norm, activation and residual.
"""

import sys
from dataclasses import replace
from pathlib import Path

import aot
import harness
import torch.nn.functional as F
from sweep_gemv import OPS, Chain

from ostinato.kernels._linear_plan import LinearPlan
from ostinato.model import SHAPES

BLAS = LinearPlan("blas")


def candidates(name: str, rows: int, cols: int, tokens: int) -> list[LinearPlan]:
    parts = 2 if name == "gate_up" else 1
    block_m = 16 if tokens <= 16 else 32 if tokens <= 32 else 64
    plans = []
    for block_n, block_k, warps, depths in (
        (32, 128, 4, (4,)), (64, 64, 4, (6,)), (64, 128, 4, (3, 4, 6)), (64, 128, 8, (4,)), (128, 64, 4, (4, 6)),
        (128, 64, 8, (4,)), (128, 128, 8, (3, 4)),
    ):  # fmt: skip
        for stages in depths:
            for split in (1, 2, 4, 8):
                programs = rows // parts // block_n * split
                shared = (stages * (block_n * parts + block_m) * block_k + block_m * block_k) * 2
                if cols % (block_k * split) or cols // split < 2 * block_k or not 96 <= programs <= 132 * 16:
                    continue
                if split > 1 and (programs > 132 * 2 or name in ("gate_up", "head")):
                    continue
                resident = min(2, -(-programs // 132))
                if not 40000 <= shared * resident <= 225000 or shared > 225000:
                    continue
                plan = LinearPlan("tensor", block_n, block_k, warps, num_stages=stages, split_k=split)
                plans.append(replace(plan, norm_apart=name in ("qkv", "gate_up", "head")))
                if name in ("qkv", "gate_up") and block_n == 64:
                    plans.append(plan)
    return plans


def label(plan: LinearPlan) -> str:
    return f"n{plan.block_n}k{plan.block_k}w{plan.num_warps}s{plan.num_stages}x{plan.split_k}{'a' * plan.norm_apart}"


def main(model: str, path: str, seconds: float, batches: list[int], commit: str) -> None:
    config = SHAPES[model]
    layers = min(config.num_layers, 16)
    shapes = Chain(replace(config, num_layers=1), max(batches), "meta")
    plans = {t: {name: candidates(name, *shapes.shapes[name], t) for name in OPS} for t in batches}
    with aot.recording() as launches:
        for tokens in batches:
            made = Chain(replace(config, num_layers=1), tokens, "meta")
            for name in OPS:
                for plan in plans[tokens][name]:
                    made.alone(name, plan)
    unique = list({launch.key: launch for launch in launches}.values())
    print(f"{len(unique)} kernels to compile", flush=True)
    aot.compile_everywhere(unique, (90,), 15)

    recorder = harness.Recorder(Path(path), seconds, commit)
    weights = None
    for tokens in batches:
        chain = Chain(config, tokens, "cuda", layers, weights)
        weights = chain.weights
        chosen, sum_ours, sum_blas = {}, 0.0, 0.0
        for name in OPS:
            x = chain.arguments(name, chain.hidden)["x"]

            def blas(name: str = name, x: object = x, chain: Chain = chain) -> None:
                for weight in chain.weights[name]:
                    F.linear(x, weight)

            timing = harness.time_graph(harness.capture(blas), replays=10)
            recorder.record(f"{model}/{tokens}/{name}/cublas", timing, num_bytes=chain.bytes_of(name))
            base = min(timing.median, timing.again)
            timed = []
            for plan in plans[tokens][name]:
                if recorder.late:
                    break
                graph = harness.capture(lambda plan=plan, name=name, chain=chain: chain.alone(name, plan))
                timing = harness.time_graph(graph, replays=10)
                recorder.record(f"{model}/{tokens}/{name}/{label(plan)}", timing, num_bytes=chain.bytes_of(name))
                timed.append((min(timing.median, timing.again), plan))
            if not timed:
                continue
            timed.sort(key=lambda pair: pair[0])
            count = len(chain.weights[name])
            print(
                f"{tokens:3d} {name:8s} cublas {base / count:7.2f} us |",
                "  ".join(f"{label(p)} {t / count:.2f} ({t / base:.2f})" for t, p in timed[:4]),
                f"share {chain.bytes_of(name) / timed[0][0] / 1e-6 / recorder.ceiling:.3f}",
                flush=True,
            )
            chosen[name] = timed[0][1]
            sum_ours += timed[0][0] / count
            sum_blas += base / count
        if len(chosen) < len(OPS):
            break
        total = sum(chain.bytes_of(name) for name in OPS)
        results = {}
        for kind, picked in (("ours", chosen), ("blas", dict.fromkeys(OPS, BLAS))):
            graph = harness.capture(lambda picked=picked, chain=chain: chain.step(picked))
            timing = results[kind] = harness.time_graph(graph, replays=20)
            facts = {name: label(plan) for name, plan in picked.items()}
            recorder.record(f"{model}/{tokens}/chain-{kind}", timing, num_bytes=total, plans=facts, layers=layers)
        print(
            f"{tokens:3d} sum {sum_ours / sum_blas:.3f} of cublas; chain {results['ours'].median:.1f} us,",
            f"{results['ours'].median / results['blas'].median:.3f} of cuBLAS with our neighbours,",
            f"share {total / results['ours'].median / 1e-6 / recorder.ceiling:.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), [int(t) for t in sys.argv[4].split(",")], sys.argv[5])
