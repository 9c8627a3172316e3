"""The part of docs/kernels.md on projections of 64 to 256 tokens."""

from collections.abc import Iterator
from typing import Any

from records import TITLES, environment, runs

TOKENS = (64, 128, 256)
LAYER_OPS = ("qkv", "o", "gate_up", "down")

TEXT = """
From 33 tokens on a norm is a kernel of its own, and so the operands of the product are taken as they lie in memory.
*Tiles* (`kernels/_linear_tile.py`) have tokens as rows and 64 to 256 features as columns of Hopper's matrix
instruction; a pipeline of three to six chunks is filled by the tensor memory accelerator. Gate and up rows of a feature
are loaded as one operand, so that one instruction has both and the activation is applied to sums in registers. The
residual is added there, too, or by the merge of shares of K. Of its weights a program asks the L2 for the first chunks
before it waits for the previous kernel, which is a norm or attention and leaves the memory idle.
"""

WHY = """
### What decides

A weight is read once, and is multiplied by every token: 2 FLOP a byte for each. The card has about 200 FLOP in the time
of a byte, so up to 128 tokens the weights are most of the time, and a kernel wins by keeping more of them under way and
by what it does not launch. The same holds for cuBLAS, which is why its bare product is hard to beat by itself: what
tiles gain is the activation, the residual and the copy before a product that adds to it. Where few programs exist for
132 multiprocessors they are shared out over K, and the merge takes 1 to 2 µs: this is what small projections lose by.
At 256 tokens products are bound by arithmetic, programs have more of it than fits a wave, and cuBLAS wins where its
tiles fill the last wave better.
"""


def wide() -> Iterator[str]:
    header, cells = runs("h200-linear-wide")
    yield f"\n## Projections, 64 to 256 tokens\n\nbf16. {environment(header)}\n{TEXT}"
    yield "*Ships* is what `linear` does by itself, with norm, activation and residual. *cuBLAS* has the same by"
    yield "`F.linear` and our kernels for a norm, SwiGLU and a residual add (for a layer: a residual add and the norm"
    yield "behind it in one), in one graph.\n"
    yield "| model | tokens | projection | road | ships, µs | cuBLAS, µs | ships / cuBLAS | bare product, µs |"
    yield "|---|---|---|---|---|---|---|---|"
    for model, title in TITLES.items():
        for tokens in TOKENS:
            for op in (*LAYER_OPS, "head"):
                if f"{model}/{tokens}/{op}/cublas" in cells:
                    yield f"| {title} | {tokens} | {op} | {projection(cells, f'{model}/{tokens}/{op}')} |"
            ours, theirs = (cells[f"{model}/{tokens}/layers-{kind}"] for kind in ("ships", "neighbours"))
            layer, base = (cell["median"] / cell["layers"] for cell in (ours, theirs))
            yield f"| {title} | {tokens} | **layer** | | {layer:.2f} | {base:.2f} | {layer / base:.3f} | |"
    yield WHY
    yield from sweep()


def projection(cells: dict[str, dict[str, Any]], key: str) -> str:
    (ships,) = [cell for name, cell in cells.items() if name.startswith(f"{key}/") and cell.get("ships")]
    ours, theirs, bare = (micros(cell) for cell in (ships, cells[f"{key}/neighbours"], cells[f"{key}/cublas"]))
    road = "cuBLAS" if ships["road"] == "blas" else ships["id"].removeprefix(f"{key}/")
    return f"{road} | {ours:.2f} | {theirs:.2f} | {ours / theirs:.3f} | {bare:.2f}"


def micros(cell: dict[str, Any]) -> float:
    return float(min(cell["median"], cell["again"]) / cell["count"])


def sweep() -> Iterator[str]:
    """The best of each road in the sweep that the plans are from."""
    header, cells = runs("h200-linear-wide-sweep")
    yield f"The best tile of a sweep and the road by cuBLAS, the faster in bold. {environment(header)}\n"
    yield "| model | tokens | projection | tile | µs | cuBLAS, µs |\n|---|---|---|---|---|---|"
    for model, title in TITLES.items():
        for tokens in TOKENS:
            for op in (*LAYER_OPS, "head"):
                key = f"{model}/{tokens}/{op}"
                tiles = [cell for name, cell in cells.items() if name.startswith(f"{key}/m")]
                if tiles:
                    best = min(tiles, key=micros)
                    times = micros(best), micros(cells[f"{key}/blas"])
                    texts = [f"**{time:.2f}**" if time == min(times) else f"{time:.2f}" for time in times]
                    plan = best["id"].removeprefix(f"{key}/")
                    yield f"| {title} | {tokens} | {op} | {plan} | {' | '.join(texts)} |"
