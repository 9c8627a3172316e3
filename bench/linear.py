"""The projections of a decode step: the chain at one token, cuBLAS at more, and the greedy choice behind the head.

    python bench/linear.py MODEL OUT.jsonl SECONDS COMMIT

Times are of graphs over the weights of all layers, so nothing is served from the L2. `bare` is a projection without its
norm, which is what cuBLAS computes too; the rest includes norm, activation and residual.
"""

import sys
from dataclasses import replace
from pathlib import Path

import aot
import harness
import torch
import torch.nn.functional as F
from sweep_gemv import OPS, Chain, label
from sweep_tensor import label as tensor_label

from ostinato.kernels import greedy
from ostinato.kernels._linear_plan import LinearPlan, linear_plan
from ostinato.kernels.linear import linear_planned
from ostinato.model import SHAPES

BATCHES = (8, 16, 32)


def planned(chain: Chain) -> dict[str, LinearPlan]:
    return {
        name: linear_plan(
            chain.tokens,
            *chain.shapes[name],
            swiglu=name == "gate_up",
            element_size=2,
            device_name="NVIDIA H200",
            shared_memory=232448,
        )
        for name in OPS
    }


def alternatives(chain: Chain, name: str) -> list[LinearPlan]:
    """Plans worth another look beside the one in the table."""
    rows, cols = chain.shapes[name]
    if chain.tokens == 1:
        close = {
            "qkv": ((4, 2048, 4, 1, 0), (4, 1024, 2, 2, 0), (4, 1024, 4, 4, 0), (4, 4096, 8, 1, 2)),
            "o": ((4, 1024, 2, 2, 0), (8, 1024, 4, 2, 0), (2, 2048, 4, 1, 4), (2, 1024, 4, 1, 4)),
            "gate_up": ((4, 1024, 2, 1, 0), (8, 1024, 4, 1, 0), (2, 2048, 4, 2, 0), (4, 4096, 8, 1, 0)),
            "down": ((1, 1024, 4, 1, 4), (2, 2048, 8, 1, 2), (1, 2048, 8, 1, 2), (2, 2048, 8, 7, 0)),
            "head": ((2, 1024, 2, 1, 0), (2, 4096, 8, 1, 0), (2, 2048, 8, 2, 0)),
        }[name]
        return [LinearPlan("gemv", n, k, w, early=e, programs_per_sm=p) for n, k, w, e, p in close if k <= cols]
    apart = name not in ("o", "down")
    shapes = ((64, 128, 4, 4), (64, 128, 4, 6), (64, 128, 4, 3), (64, 64, 4, 6)) if chain.tokens > 8 else ()
    splits = (1,) if name in ("gate_up", "head") else (2, 4) if rows <= 4096 else (1, 2)
    parts, block_m = 2 if name == "gate_up" else 1, 16 if chain.tokens <= 16 else 32
    return [
        LinearPlan("tensor", n, k, w, norm_apart=apart, num_stages=s, split_k=x)
        for n, k, w, s in shapes
        for x in splits
        if ((n * parts + block_m) * (s + 1) * k * 2) <= 220000
    ]


def main(model: str, path: str, seconds: float, commit: str) -> None:
    config = SHAPES[model]
    small = replace(config, num_layers=1)
    with aot.recording() as launches:
        for tokens in (1, *BATCHES):
            made = Chain(small, tokens, "meta")
            made.step(planned(made))
            made.step(dict.fromkeys(OPS, LinearPlan("blas")))
            for name in OPS:
                for plan in alternatives(made, name):
                    made.alone(name, plan)
    unique = list({launch.key: launch for launch in launches}.values())
    print(f"{len(unique)} kernels to compile", flush=True)
    aot.compile_everywhere(unique, (90,), 15)
    recorder = harness.Recorder(Path(path), seconds, commit)

    chain = Chain(config, 1, "cuda")
    one_token(model, chain, recorder)
    for tokens in BATCHES:
        if not recorder.late:
            some_tokens(model, Chain(config, tokens, "cuda", weights=chain.weights), recorder)


def one_token(model: str, chain: Chain, recorder: harness.Recorder) -> None:
    total = sum(chain.bytes_of(name) for name in OPS)

    def whole(plans: dict[str, LinearPlan], replays: int = 25) -> harness.Timing:
        return harness.time_graph(harness.capture(lambda: chain.step(plans)), replays=replays)

    chosen = planned(chain)
    best = whole(chosen)
    for name in ("o", "down", "qkv", "gate_up", "head"):
        for plan in alternatives(chain, name):
            timing = whole({**chosen, name: plan})
            if timing.median < best.median and timing.again < best.again:
                best, chosen = timing, {**chosen, name: plan}
    timing = whole(chosen, 60)
    facts = {name: label(plan) for name, plan in chosen.items()}
    recorder.record(f"{model}/1/chain", timing, num_bytes=total, plans=facts)
    print(f"{model} chain {timing}, share {total / timing.median / 1e-6 / recorder.ceiling:.4f} {facts}", flush=True)
    for name in OPS:
        timing = harness.time_graph(harness.capture(lambda name=name: chain.alone(name, chosen[name])), replays=20)
        recorder.record(f"{model}/1/{name}", timing, num_bytes=chain.bytes_of(name), count=len(chain.weights[name]))

    out = torch.empty(1, dtype=torch.int64, device="cuda")

    def head_and_greedy() -> None:
        chain.alone("head", chosen["head"])
        greedy(chain.buffers["head"], out=out)

    for name, run in (("head", lambda: chain.alone("head", chosen["head"])), ("head+greedy", head_and_greedy)):
        timing = harness.time_graph(harness.capture(run), replays=40)
        recorder.record(f"{model}/1/{name}-again", timing, num_bytes=chain.bytes_of("head"))
        print(f"{model} {name} {timing.median:.2f} us", flush=True)


def some_tokens(model: str, chain: Chain, recorder: harness.Recorder) -> None:
    tokens, chosen = chain.tokens, planned(chain)
    for name in OPS:
        count, arguments = len(chain.weights[name]), chain.arguments(name, chain.hidden)

        def blas(name: str = name, x: torch.Tensor = arguments["x"]) -> None:
            for weight in chain.weights[name]:
                F.linear(x, weight)

        def bare(name: str = name, arguments: dict[str, object] = arguments) -> None:
            kept = {key: value for key, value in arguments.items() if key not in ("norm_weight", "norm_eps")}
            for weight in chain.weights[name]:
                linear_planned(weight=weight, **kept, plan=chosen[name])

        times = {}
        for plan in dict.fromkeys((chosen[name], *alternatives(chain, name))):
            graph = harness.capture(lambda name=name, plan=plan: chain.alone(name, plan))
            timing = harness.time_graph(graph, replays=10)
            recorder.record(f"{model}/{tokens}/{name}/{tensor_label(plan)}", timing, num_bytes=chain.bytes_of(name),
                            count=count)  # fmt: skip
            times[plan] = min(timing.median, timing.again) / count
        chosen[name] = min(times, key=lambda plan: times[plan])
        results = {}
        for kind, run in (("cublas", blas), ("bare", bare)):
            timing = harness.time_graph(harness.capture(run), replays=10)
            recorder.record(f"{model}/{tokens}/{name}/{kind}", timing, num_bytes=chain.bytes_of(name), count=count,
                            plan=tensor_label(chosen[name]))  # fmt: skip
            results[kind] = min(timing.median, timing.again) / count
        ours = times[chosen[name]]
        print(
            f"{tokens:3d} {name:8s} {tensor_label(chosen[name]):20s} {ours:7.2f} us, "
            f"bare {results['bare']:.2f}, cublas {results['cublas']:.2f}: "
            f"{ours / results['cublas']:.3f}, {results['bare'] / results['cublas']:.3f}",
            flush=True,
        )
    total = sum(chain.bytes_of(name) for name in OPS)
    medians = {}
    for kind, plans in (("ours", chosen), ("blas", dict.fromkeys(OPS, LinearPlan("blas")))):
        for part in ("chain", "layers"):
            run = chain.step if part == "chain" else chain.step_layers
            timing = harness.time_graph(harness.capture(lambda run=run, plans=plans: run(plans)), replays=15)
            moved = total - (chain.bytes_of("head") if part == "layers" else 0)
            facts = {name: tensor_label(plan) for name, plan in plans.items()}
            recorder.record(f"{model}/{tokens}/{part}-{kind}", timing, num_bytes=moved, plans=facts)
            medians[part, kind] = timing.median
    print(
        f"{tokens:3d} chain {medians['chain', 'ours']:.1f} us, "
        f"{medians['chain', 'ours'] / medians['chain', 'blas']:.3f} of cuBLAS with our neighbours; "
        f"layers alone {medians['layers', 'ours'] / medians['layers', 'blas']:.3f}",
        flush=True,
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4])
