"""The projections of a decode step as they ship: the chain at one token, cuBLAS at more, and the greedy choice.

    python bench/linear.py OUT.jsonl SECONDS COMMIT MODEL[,MODEL...]

Times are of graphs over the weights of all layers, so nothing is served from the L2. `bare` is a projection without its
norm, which is what cuBLAS computes too; the rest includes norm, activation and residual. Every figure is of the plan
that `linear` takes by itself, but at the crossovers, where each road is timed; other plans are for
`sweep_linear.py`, and more than 32 tokens for `linear_wide.py`.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import aot
import harness
import torch
import torch.nn.functional as F
from projections import BLAS, OPS, Chain, label, planned

from ostinato.kernels import greedy
from ostinato.kernels._linear_call import LinearCall
from ostinato.kernels._linear_plan import TABLES, LinearPlan, gemv_by_rule
from ostinato.kernels.linear import linear_planned
from ostinato.model import SHAPES

BATCHES = (8, 16, 32)
CROSSOVERS = (2, 3, 4)


def roads(chain: Chain, name: str) -> dict[str, LinearPlan]:
    """What could serve a number of tokens at which one road gives way to another."""
    rows, columns = chain.shapes[name]
    return {
        "gemv": gemv_by_rule(chain.tokens, columns, 2 if name == "gate_up" else 1),
        "tensor": TABLES["NVIDIA H200"][8][rows, columns],
    }


def launch_all(models: list[str]) -> None:
    """Everything that `measure` launches, on tensors without data."""
    for model in models:
        for tokens in (1, *BATCHES, *CROSSOVERS):
            chain = Chain(replace(SHAPES[model], num_layers=1), tokens, "meta")
            plans = planned(chain)
            chain.step(plans)
            if tokens == 1:
                greedy(chain.buffers["head"])
            for name in OPS:
                if tokens in BATCHES:
                    bare(chain, name, plans[name])
                if tokens > 1:
                    chain.alone(name, BLAS)
                if tokens in CROSSOVERS:
                    for plan in roads(chain, name).values():
                        chain.alone(name, plan)


def bare(chain: Chain, name: str, plan: LinearPlan) -> None:
    arguments = chain.arguments(name, chain.hidden)
    kept = {key: value for key, value in arguments.items() if key not in ("norm_weight", "norm_eps")}
    for weight in chain.weights[name]:
        linear_planned(LinearCall(weight=weight, **kept), plan)


def time(run: Callable[[], object], replays: int) -> harness.Timing:
    return harness.time_graph(harness.capture(run), replays=replays)


def measure(models: list[str], recorder: harness.Recorder) -> None:
    """Crossovers last: they are what a short lease can do without."""
    for part, batches in ((some_tokens, BATCHES), (crossover, CROSSOVERS)):
        for model in models:
            chain = Chain(SHAPES[model], 1, "cuda")
            if part is some_tokens:
                one_token(model, chain, recorder)
            for tokens in batches:
                if not recorder.late:
                    part(model, Chain(SHAPES[model], tokens, "cuda", weights=chain.weights), recorder)
            del chain
            torch.cuda.empty_cache()


def one_token(model: str, chain: Chain, recorder: harness.Recorder) -> None:
    plans, total = planned(chain), sum(chain.bytes_of(name) for name in OPS)
    timing = time(lambda: chain.step(plans), 60)
    facts = {name: label(plan) for name, plan in plans.items()}
    recorder.record(f"{model}/1/chain", timing, num_bytes=total, plans=facts)
    print(f"{model} chain {timing}, share {total / timing.median / 1e-6 / recorder.ceiling:.4f} {facts}", flush=True)
    for name in OPS:
        timing = time(lambda name=name: chain.alone(name, plans[name]), 20)  # type: ignore[misc]
        recorder.record(f"{model}/1/{name}", timing, num_bytes=chain.bytes_of(name), count=len(chain.weights[name]))

    out = torch.empty(1, dtype=torch.int64, device="cuda")

    def head_and_greedy() -> None:
        chain.alone("head", plans["head"])
        greedy(chain.buffers["head"], out=out)

    for name, run in (("head", lambda: chain.alone("head", plans["head"])), ("head+greedy", head_and_greedy)):
        timing = time(run, 40)
        recorder.record(f"{model}/1/{name}-again", timing, num_bytes=chain.bytes_of("head"))
        print(f"{model} {name} {timing.median:.2f} us", flush=True)


def some_tokens(model: str, chain: Chain, recorder: harness.Recorder) -> None:
    tokens, plans = chain.tokens, planned(chain)
    for name in OPS:
        count, x = len(chain.weights[name]), chain.arguments(name, chain.hidden)["x"]

        def blas(name: str = name, x: torch.Tensor = x) -> None:
            for weight in chain.weights[name]:
                F.linear(x, weight)

        times = {}
        for kind, run in (
            ("all", lambda name=name: chain.alone(name, plans[name])),
            ("bare", lambda name=name: bare(chain, name, plans[name])),
            ("cublas", blas),
        ):
            timing = time(run, 10)
            recorder.record(f"{model}/{tokens}/{name}/{kind}", timing, num_bytes=chain.bytes_of(name), count=count,
                            plan=label(plans[name]))  # fmt: skip
            times[kind] = timing.median / count
        ratios = ", ".join(f"{times[kind] / times['cublas']:.3f}" for kind in ("all", "bare"))
        print(f"{model} {tokens:3d} {name:8s} {label(plans[name]):20s} {times} {ratios}", flush=True)
    total = sum(chain.bytes_of(name) for name in OPS)
    medians = {}
    for kind, some in (("ours", plans), ("blas", dict.fromkeys(OPS, BLAS))):
        for part, step in (("chain", chain.step), ("layers", chain.step_layers)):
            timing = time(lambda step=step, some=some: step(some), 15)  # type: ignore[misc]
            moved = total - (chain.bytes_of("head") if part == "layers" else 0)
            facts = {name: label(plan) for name, plan in some.items()}
            recorder.record(f"{model}/{tokens}/{part}-{kind}", timing, num_bytes=moved, plans=facts)
            medians[part, kind] = timing.median
    print(
        f"{model} {tokens:3d} chain {medians['chain', 'ours']:.1f} us, "
        f"{medians['chain', 'ours'] / medians['chain', 'blas']:.3f} of cuBLAS with our neighbours; "
        f"layers alone {medians['layers', 'ours'] / medians['layers', 'blas']:.3f}",
        flush=True,
    )


def crossover(model: str, chain: Chain, recorder: harness.Recorder) -> None:
    """Every projection with all its neighbours, by each road."""
    plans = planned(chain)
    for name in OPS:
        count, times = len(chain.weights[name]), {}
        for road, plan in {"ships": plans[name], **roads(chain, name)}.items():
            timing = time(lambda name=name, plan=plan: chain.alone(name, plan), 6)  # type: ignore[misc]
            recorder.record(f"{model}/{chain.tokens}/{name}/{road}", timing, num_bytes=chain.bytes_of(name),
                            count=count, plan=label(plan), road=plan.road)  # fmt: skip
            times[road] = round(timing.median / count, 2)
        print(f"{model} {chain.tokens:3d} {name:8s} {plans[name].road} {times}", flush=True)


def main(path: str, seconds: float, commit: str, models: list[str]) -> None:
    with aot.recording() as launches:
        launch_all(models)
    unique = list({launch.key: launch for launch in launches}.values())
    print(f"{len(unique)} kernels to compile", flush=True)
    aot.compile_everywhere(unique, (90,), 15)
    measure(models, harness.Recorder(Path(path), seconds, commit))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), sys.argv[3], sys.argv[4].split(","))
