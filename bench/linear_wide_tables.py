"""The part of docs/kernels.md on projections of 64 to 256 tokens."""

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from projections import Chain, label, planned
from records import TITLES, environment, runs

from ostinato.model import SHAPES

TOKENS = (64, 128, 256)

TEXT = """
From 33 tokens on a norm is a kernel of its own, so the operands of the product are taken as they lie in memory. *Tiles*
(`kernels/_linear_tile.py`) have tokens as rows and 32 to 128 features as columns of Hopper's matrix instruction; a
pipeline of three to six chunks is filled by the tensor memory accelerator, by pointers where a device has none or rows
are not aligned. Gate and up rows of a feature are loaded as one operand, so that one instruction has both and the
activation is applied to sums in registers. The residual is added there, too, or by the merge of shares of K. Devices
and shapes without a measured plan go to cuBLAS above 64 tokens.

*Tile* is what ships or else the best of a sweep (`bench/linear_wide.py`): m tokens, n features (n gates and n ups),
chunks of k, w warps, s stages, x shares of K; down of the 1B at 64 tokens keeps the kernel for fewer tokens. *cuBLAS*
is that road of `linear`, where norm and SwiGLU are our kernels and the residual is the product's addend, in place. What
ships is in bold, chosen within all layers. The *product alone* is cuBLAS' without any neighbour.
"""
LAYERS = """
All of a layer but attention, beside cuBLAS and fused neighbours: `F.linear`, our SwiGLU, and one kernel for a residual
add and the norm after it. Several layers in one graph, microseconds of one; timed twice.

| model | tokens | ships, µs | again | cuBLAS and neighbours, µs | again | ratio |
|---|---|---|---|---|---|---|"""
WHY = """
### What decides

A weight is read once and multiplied by every token: one FLOP for each of its bytes and each token. The card does about
175 in the time of a byte, so up to 128 tokens the weights are most of the time, and cuBLAS' product alone reads them
about as fast as a tile does. A tile wins by what it spares:

- *gate_up*: cuBLAS' result is written, read by SwiGLU and written again, 4 to 8 µs more than the product alone. A tile
  has the activation in its registers, and need not be the faster product: at 256 tokens it is 2 to 8 µs slower. Alone
  it is then level for the 8B, and wins within the layers.
- *The 1B at 64 and 128 tokens*: products of 5 to 20 µs, of which launches and drains are a large part. A tile is let in
  while the kernel before it drains (programmatic dependent launch), and has asked the L2 for its first weights before
  it waits; without that a layer takes 50.1 µs in place of 48.8 at 128 tokens, 44.4 in place of 43.9 at 64. For the 8B
  and for 256 tokens it makes no difference. Kernels of cuBLAS are launched plainly.
- *o and down of the 8B*: at 64 tokens tiles are faster by themselves, at 128 level alone and kept for the same reason.
- *qkv of the 8B*: there is nothing to spare, the norm being a kernel on both roads, and cuBLAS keeps it. At 64 tokens
  the tile is faster alone and slower within the layers.
- *256 tokens*: arithmetic counts as much as reading, and cuBLAS' instructions run closer to the peak. It keeps what has
  no activation, but for down of the 1B, where 2,048 features are few programs and K is better shared out by four.

A plan has about one program for each of the 132 multiprocessors, or two; a few more would be another wave. Where the
features give fewer, K is shared out, and the merge costs 1 to 2 µs.

The 8B at 256 tokens was not steady: all of a layer on the road by cuBLAS took 194 to 198 µs in that run, where the sum
of its parts is 188, and the plan that ships took 195 to 203 while its gate_up asked the L2 early. Its ratio has an
uncertainty of some percent; the others agree within one.
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
        layers = [cells.get(f"{model}/{tokens}/layers-{kind}", {}) for kind in ("neighbours", "best", "late", "ships")]
        same = [cell for cell in layers[1:] if cell.get("plans") == plans]
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
    alike = [cell for cell in tried if cut(cell["id"]) == cut(f"{key}/{shipped}")]
    ships, blas = cells.get(f"{key}/{shipped}", alike[0]), cells[f"{key}/blas"]
    tile = min((cell for cell in tried if cell is not blas), key=micros, default=None) if ships is blas else ships
    texts = [f"**{micros(cell):.2f}**" if cell is ships else f"{micros(cell):.2f}" for cell in (tile, blas) if cell]
    name = cut(tile["id"].removeprefix(f"{key}/")) if tile else ""
    return f"{name} | {' | '.join(texts if tile else ['', *texts])} | {micros(cells[f'{key}/cublas']):.2f}"


def cut(name: str) -> str:
    """Without how much is asked for early, which alone makes no difference."""
    return re.sub(r"e\d+$", "", name)


def micros(cell: dict[str, Any]) -> float:
    return float(min(cell["median"], cell["again"]) / cell["count"])
