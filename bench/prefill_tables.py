"""The tables on prompts in docs/kernels.md, out of the records of bench/prefill.py."""

from collections.abc import Iterator
from typing import Any

from records import TITLES, environment, runs

Cells = dict[str, dict[str, Any]]
HEAD_DIM = {"1b": 64, "8b": 128}
INTRODUCTION = """
A tile is rows, each a query head of a token, and keys; a plan is rows and keys of a tile, warps, stages, shares. Keys
lie in KV blocks of 16 tokens in any order. *Flash* is `scaled_dot_product_attention` with that backend on dense keys
and values.

| prompt | head_dim | plan | µs | TFLOP/s | flash, µs | flash / ours |
|---|---|---|---|---|---|---|"""
LAYOUTS = """
TFLOP/s for the last 1,024 of 8,192 tokens, the others cached; for the whole of them; and for these with KV blocks of
128 tokens, in any order and side by side:

| head_dim | chunk | whole | blocks of 128 | blocks of 128 in order |
|---|---|---|---|---|"""
VERIFICATION = """
### A few queries a sequence

Eight sequences with 1,024 keys. One query is decode attention. *With rotation* is with that and the KV write: in the
same kernel for one query, else in one before it.

| head_dim | queries | plan | µs | of one query | with rotation, µs | of one query |
|---|---|---|---|---|---|---|"""
PROMPTS = """
### Whole prompts

From token ids to the logits behind the last token, random weights, launched one by one. *Host* is how long launching
takes; beside it the same launches in one graph. *Share* is of the rate of a product of 8192 x 8192 matrices in the same
process.

| model | tokens | ms | host, ms | one graph, ms | TFLOP/s | share |
|---|---|---|---|---|---|---|"""

THROUGH_AN_ENGINE = """
### Prompts through an engine

One prompt at a time, launched one by one and in one graph (`docs/graphs.md`, "Prompts"), in turns in one process.
*Logits*: from the scheduled prompt to its logits on the device; *host*: how long of it the host is busy; *token*: from
the request to its first token on the host, sampling and scheduling included. {environment}

| model | tokens | one by one: logits, ms | host | token | one graph: logits, ms | host | token |
|---|---|---|---|---|---|---|---|"""


def prefill() -> Iterator[str]:
    header, cells = runs("h200-prefill")
    yield f"\n## Prefill attention\n\nbf16, 32 query and 8 KV heads. {environment(header)}"
    yield INTRODUCTION
    for name, cell in shipped(cells, "dense").items():
        flash = cells[f"{name}/sdpa"]["median"]
        speed = f"{plan(cell)} | {cell['median']:.1f} | {rate(cell)} | {flash:.1f} | {flash / cell['median']:.2f}"
        yield f"| {numbers(name)[0]} | {head_dim(name)} | {speed} |"
    yield LAYOUTS
    for name, cell in shipped(cells, "context").items():
        whole = name.replace("context", "dense").rsplit(":", 1)[0]
        others = [shipped(cells, whole)[whole], cells[f"{whole}/b128"], cells[f"{whole}/b128-in-order"]]
        yield f"| {head_dim(name)} | {' | '.join(rate(c) for c in (cell, *others))} |"
    yield VERIFICATION
    yield from verification(cells)
    yield PROMPTS
    for name, cell in cells.items():
        if name.startswith("model/"):
            model, tokens = name.removeprefix("model/").split(":")
            times = " | ".join(f"{cell[key] / 1e3:.2f}" for key in ("median", "host", "graph"))
            share = 100 * cell["flops"] / cell["median"] * 1e6 / cell["matmul"]
            yield f"| {TITLES[model]} | {tokens} | {times} | {rate(cell)} | {share:.1f} % |"
    yield from through_an_engine()


def through_an_engine() -> Iterator[str]:
    header, cells = runs("h200-prompts")
    yield THROUGH_AN_ENGINE.format(environment=environment(header))
    prompts = {name.rsplit("/", 1)[0] for name in cells}
    for name in sorted(prompts, key=lambda name: (list(TITLES).index(name.split(":")[0]), numbers(name))):
        model, tokens = name.split(":")
        both = [cells[f"{name}/{way}"][key] / 1e3 for way in ("eager", "graph") for key in ("logits", "host", "median")]
        yield f"| {TITLES[model]} | {tokens} | {' | '.join(f'{time:.2f}' for time in both)} |"


def verification(cells: Cells) -> Iterator[str]:
    for head, size in HEAD_DIM.items():
        alone, fused = (cells[f"verify/{head}:8:1/{kind}"]["median"] for kind in ("decode", "fused"))
        yield f"| {size} | 1 | | {alone:.2f} | | {fused:.2f} | |"
        for name, cell in shipped(cells, f"verify/{head}:").items():
            time, rotary = cell["median"], cells[f"{name}/rotary"]["median"]
            ratios = f"{time:.2f} | {time / alone:.2f} | {rotary:.2f} | {rotary / fused:.2f}"
            yield f"| {size} | {numbers(name)[1]} | {plan(cell)} | {ratios} |"


def shipped(cells: Cells, prefix: str) -> Cells:
    """The records of the plan that shipped when it ran, by the name of their cell, in order of size."""
    chosen = {name.rsplit("/", 1)[0]: cell for name, cell in cells.items() if cell.get("ships")}
    names = sorted(
        (name for name in chosen if name.startswith(prefix)), key=lambda name: (head_dim(name), numbers(name))
    )
    return {name: chosen[name] for name in names}


def plan(cell: dict[str, Any]) -> str:
    return str(cell["id"].rsplit("/", 1)[1])


def rate(cell: dict[str, Any]) -> str:
    """TFLOP/s."""
    return f"{cell['flops'] / cell['median'] / 1e6:.0f}"


def head_dim(name: str) -> int:
    return HEAD_DIM[name.split("/")[1].split(":")[0]]


def numbers(name: str) -> list[int]:
    return [int(number) for number in name.split(":")[1:]]
