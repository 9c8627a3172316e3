"""The part of docs/kernels.md on projections of 64 to 256 tokens."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from projections import Chain, label, planned
from records import TITLES, environment, runs

from ostinato.model import SHAPES

TOKENS = (64, 128, 256)

TEXT = """
From 33 tokens on a norm is a kernel of its own, so the operands of the product are taken as they lie in memory. *Tiles*
(`kernels/_linear_tile.py`) have tokens as rows and 64 to 128 features as columns of Hopper's matrix instruction; a
pipeline of three to six chunks is filled by the tensor memory accelerator. Gate and up rows of a feature are loaded as
one operand, so that one instruction has both and the activation is applied to sums in registers. The residual is added
there, too, or by the merge of shares of K. Devices and shapes without a measured plan go to cuBLAS above 64 tokens.

*Tile* is the best of a sweep (`bench/linear_wide.py`), with its plan: m tokens, n features (n gates and n ups), chunks
of k, w warps, s stages, x shares of K. *cuBLAS* is that road of `linear`, where norm and SwiGLU are our kernels and
the residual is the product's addend, in place. What ships is in bold. The *product alone* is cuBLAS' without any
neighbour.
"""
LAYERS = """
All of a layer but attention, beside cuBLAS and fused neighbours: `F.linear`, our SwiGLU, and one kernel for a residual
add and the norm after it. Several layers in one graph, microseconds of one; timed twice.

| model | tokens | ships, µs | again | cuBLAS and neighbours, µs | again | ratio |
|---|---|---|---|---|---|---|"""
WHY = """
### What decides

A weight is read once and is multiplied by every token: 1 FLOP for each of its bytes and each token. The card does about
175 in the time of a byte, so up to 128 tokens the weights are most of the time, cuBLAS' product comes near to reading
them at full speed, and a tile gains by what it spares:

- *gate_up*: cuBLAS' result is written, read by SwiGLU and written again, 4 to 9 µs at the 8B. A tile has the activation
  in its registers, and no faster product is needed for it to win.
- *o and down*: what a step reads before them (attention's output, the activation) is small, and the residual costs
  cuBLAS nothing in place. At 64 tokens tiles win by more loads under way; at 128 they are level alone and win within a
  layer, where programmatic dependent launch lets them in while the kernel before them drains. cuBLAS' kernels are
  launched plainly and wait, and those of theirs that share out K begin with a memset.
- *qkv*: nothing to spare but the norm, which is a kernel for both. cuBLAS keeps it from 128 tokens on.

A plan needs 96 to 132 programs, or two for each multiprocessor; one more means a second wave. Where the features give
fewer, K is shared out, which costs the merge 1 to 2 µs. How far ahead of its wait a program asks the L2 for weights
makes no more than 1 % alone.
"""


def wide() -> Iterator[str]:
    header, cells = runs("h200-linear-wide")
    yield f"\n## Projections, 64 to 256 tokens\n\nbf16. {environment(header)}\n{TEXT}"
    yield "| model | tokens | projection | tile | µs | cuBLAS, µs | product alone, µs |\n|---|---|---|---|---|---|---|"
    for (model, title), tokens in itertools.product(TITLES.items(), TOKENS):
        for op, plan in ships(model, tokens).items():
            if f"{model}/{tokens}/{op}/blas" in cells:
                yield f"| {title} | {tokens} | {op} | {roads(cells, f'{model}/{tokens}/{op}', plan)} |"
    yield LAYERS
    for (model, title), tokens in itertools.product(TITLES.items(), TOKENS):
        plans = {op: plan for op, plan in ships(model, tokens).items() if op != "head"}
        layers = [cells.get(f"{model}/{tokens}/layers-{kind}", {}) for kind in ("neighbours", "best", "ships")]
        same = [cell for cell in layers if cell.get("plans") == plans]
        if same:
            ours, theirs = ([cell[go] / cell["layers"] for go in ("median", "again")] for cell in (same[0], layers[0]))
            times = " | ".join(f"{time:.2f}" for time in (*ours, *theirs))
            yield f"| {title} | {tokens} | {times} | {ours[0] / theirs[0]:.3f} |"
    yield WHY


def ships(model: str, tokens: int) -> dict[str, str]:
    chain = Chain(replace(SHAPES[model], num_layers=1), tokens, "meta")
    return {op: label(plan) for op, plan in planned(chain).items()}


def roads(cells: dict[str, dict[str, Any]], key: str, shipped: str) -> str:
    """The tile that ships or the best one, cuBLAS, and which of them ships."""
    tried = [cell for name, cell in cells.items() if name.startswith(f"{key}/") and cell.get("road")]
    ships, blas = cells[f"{key}/{shipped}"], cells[f"{key}/blas"]
    tile = min((cell for cell in tried if cell is not blas), key=micros, default=None) if ships is blas else ships
    texts = [f"**{micros(cell):.2f}**" if cell is ships else f"{micros(cell):.2f}" for cell in (tile, blas) if cell]
    name = tile["id"].removeprefix(f"{key}/").partition("e")[0] if tile else ""
    return f"{name} | {' | '.join(texts if tile else ['', *texts])} | {micros(cells[f'{key}/cublas']):.2f}"


def micros(cell: dict[str, Any]) -> float:
    return float(min(cell["median"], cell["again"]) / cell["count"])
