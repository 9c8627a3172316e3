"""The parts of docs/kernels.md on projections."""

import itertools
from collections.abc import Iterator
from typing import Any

from records import TITLES, environment, rate, runs

MODELS = tuple(TITLES)
OPS = ("qkv", "o", "gate_up", "down", "head")

TRIED = """
## Tried and not kept

One token; times are of the chain of all layers and the head of Llama-3.1-8B, in the same run as the one they are
compared with. The records are in `bench/results/h200-tried.jsonl`.

- *The last programs of a projection ask the L2 for the first megabytes of the next one's weight* (bulk prefetch): with
  0, 1, 2, 4, 8 and 16 MB 3455, 3481, 3491, 3506, 3575 and 3693 µs. Llama-3.2-1B gained 1 % with 2 MB (617 to 611 µs)
  and lost from 4 MB on.
- *A program asks the L2 for its own next tile before it waits* (`prefetch.global.L2`): loops over tiles came out 13 µs
  faster to 18 µs slower, which is what the run drifted by anyway; programs of one tile lost 28 to 70 µs. At 8 and 32
  tokens, with 1, 2 and 4 KB of every row, 3964 µs became 4006, 4179 and 4501, and 4088 became 4169, 4267 and 4502.
- *Tiles of the loop through shared memory* (`tl.range(num_stages=...)`, asynchronous copies two to four tiles ahead, 64
  to 123 registers): 3453 µs became 3471 with such a head, and 3690 to 4230 with any other projection so.
- *Partials of the greedy token in the head's epilogue*, one launch behind it in place of two: with the plan that is
  best for it 0.4 and 0.5 µs faster than what ships (119.5 and 231.2 µs for the two models), with the plans that are
  best for the head alone 2 to 27 µs slower. Two launches are kept: they serve every number of tokens, and two timings
  of one version differ by as much.

What bounds the 8B chain is not known. Its projections take 1 to 2 µs each beyond their bytes, whatever the bandwidth:
on a card with a ceiling of 4.564 TB/s it took 3474 and 3486 µs (94.6 and 94.2 %, some loops with the prefetch above),
on one with 4.660 TB/s 3445 µs (93.5 %). On the latter, replays come in lengths near 3432, 3455 and 3478 µs for very
different plans, as if something waited for a tick of 22.7 µs.
"""

FORMS = """
### Forms of the tensor-core kernel

Time over that of cuBLAS' bare product (`F.linear`); ours is with norm, activation and residual. 16 layers, the best
plan of each form. *Tile*: 32 to 128 features and a pipeline of asynchronous copies, all warps on the same columns;
*slices*: 16 or 32 features, each warp with columns of its own. *Through registers*: weights are loaded into registers
two or three chunks ahead and stored to shared memory for the matrix instruction. *Straight*: weights are loaded in the
layout of the matrix instruction's operands (32 columns in an order that makes a lane's sixteen bytes its operands),
with no shared memory and no barrier.

The first two ship, with two changes since: 8 tokens are 16 columns of a tile, not 8, which cost the qkv of the 8B
2.5 µs, and a share of K is one stretch of it, not every second or fourth chunk. *Straight* reads 64 bytes of a row at a
time; even at one token it took 58.3 µs for gate_up of the 8B, where the dot-free kernel took 53.0 in the same run.

A loop over tiles within one pipeline gains with slices and many tiles (gate_up of the 8B at 8 tokens: 57.0 µs, with a
program a tile 59.3), and loses with tiles for all warps.
"""


RING = """
*Weights through a ring in shared memory* were tried too, in Gluon: a program or two on a multiprocessor walk over the
tiles, fill the ring before the wait on the previous kernel, and let the next kernel in when they have asked for their
last weights, so that its ring fills in turn. Alone only o and down of the 8B came out faster, and the layers together
by what the last line says: little for a kernel in a second language, which the interpreter does not know, so it does
not ship. 16 tokens, 16 layers, µs, the plans of then.
"""


def one_token() -> Iterator[str]:
    header, cells = runs("h200-linear")
    yield f"\n## Projections, one token\n\nbf16. {environment(header)}"
    for model in MODELS:
        yield f"\n{TITLES[model]}:\n"
        yield "| projection | µs | GB/s | share |\n|---|---|---|---|"
        for op in OPS:
            cell = cells[f"{model}/1/{op}"]
            yield f"| {op} | {cell['median'] / cell['count']:.2f} | {rate(cell)} |"
        cell = cells[f"{model}/1/chain"]
        yield f"| **chain of all layers and the head, no attention** | {cell['median']:.1f} | {rate(cell)} |"
        head, both = (cells[f"{model}/1/{op}-again"]["median"] for op in ("head", "head+greedy"))
        yield f"\nThe greedy choice adds {both - head:.1f} µs to the head."
    header, cells = runs("h200-linear-ring")
    before, qkv, late, both = (cells[f"llama-3.1-8b/1/chain/{step}"] for step in ("before", "qkv", "norm-late", "both"))
    ceiling = header["read_ceiling"] / 1e12
    yield f"\nThe share of the 8B's chain depends on the card. On one with a ceiling of {ceiling:.3f} TB/s it took"
    yield f"{before['median']:.1f} µs, {100 * before['share']:.2f} %, before qkv and down had their plans of now, and"
    yield f"{both['median']:.1f} µs, {100 * both['share']:.2f} %, with them and a gate_up that sums the norm last"
    yield f"(alone worth {qkv['median'] - late['median']:.1f} µs, not kept)."


def some_tokens() -> Iterator[str]:
    header, cells = runs("h200-linear")
    yield f"\n## Projections, 8 to 32 tokens\n\nbf16. {environment(header)}"
    yield "*All* is with norm, activation and residual, *bare* without the norm, cuBLAS the product alone (`F.linear`)."
    yield "*Bare* can be slower than *all*: without the norm's launch between them one product's programs come in early"
    yield "beside the last of the one before."
    for model in MODELS:
        yield f"\n{TITLES[model]}:\n"
        yield "| tokens | projection | all, µs | bare, µs | cuBLAS, µs | all / cuBLAS | bare / cuBLAS |"
        yield "|---|---|---|---|---|---|---|"
        for tokens in (8, 16, 32):
            rows = {op: kinds(cells, f"{model}/{tokens}/{op}") for op in OPS}
            rows["**the four of a layer**"] = [sum(times) for times in zip(*(rows[op] for op in OPS[:-1]), strict=True)]
            for name, (whole, bare, theirs) in rows.items():
                ratios = f"{whole / theirs:.3f} | {bare / theirs:.3f}"
                yield f"| {tokens} | {name} | {whole:.2f} | {bare:.2f} | {theirs:.2f} | {ratios} |"
            for part, words in (("layers", "all layers"), ("chain", "all layers and the head")):
                ours, blas = (cells[f"{model}/{tokens}/{part}-{kind}"]["median"] for kind in ("ours", "blas"))
                yield (
                    f"| {tokens} | **{words}** | {ours:.1f} | | {blas:.1f} with our neighbours | {ours / blas:.3f} | |"
                )


def kinds(cells: dict[str, dict[str, Any]], key: str) -> list[float]:
    """Microseconds of a projection with its neighbours, without its norm, and by cuBLAS."""
    times = [cells[f"{key}/{kind}"] for kind in ("all", "bare", "cublas")]
    return [cell["median"] / cell["count"] for cell in times]


def crossovers() -> Iterator[str]:
    header, cells = runs("h200-linear")
    yield f"\n## Where one road gives way to another\n\nWith norm, activation and residual. {environment(header)}"
    yield "The fastest is in bold. The dot-free kernel is cut by its rule, or as it ships: for two tokens at qkv"
    yield "(and at the head of the 8B when this was measured).\n"
    yield "| model | tokens | projection | dot-free, µs | tensor cores, µs |\n|---|---|---|---|---|"
    for model in MODELS:
        for tokens in (2, 3, 4):
            for op in OPS:
                yield f"| {TITLES[model]} | {tokens} | {op} | {roads(cells, f'{model}/{tokens}/{op}')} |"


def roads(cells: dict[str, dict[str, Any]], key: str) -> str:
    """The best time of each road."""
    tried = [cell for name, cell in cells.items() if name.startswith(f"{key}/")]
    best = min(cell["median"] for cell in tried)
    texts = []
    for road in ("gemv", "tensor"):
        times = [cell["median"] for cell in tried if cell["road"] == road]
        text = f"{min(times) / tried[0]['count']:.2f}" if times else ""
        texts.append(f"**{text}**" if times and min(times) == best else text)
    return " | ".join(texts)


def forms() -> Iterator[str]:
    """The best plan of each form of the tensor-core kernel, over cuBLAS in the same run."""
    yield FORMS
    (header, cells), (later_header, later) = runs("h200-linear-forms"), runs("h200-linear-direct")
    yield f"The first three: {environment(header)} The last: {environment(later_header)}\n"
    yield "| model | tokens | projection | tile | slices | through registers | straight |"
    yield "|---|---|---|---|---|---|---|"
    for model, tokens, op in itertools.product(MODELS, (8, 32), OPS[:-1]):
        key, ratios = f"{model}/{tokens}/{op}", []
        for some, form in ((cells, "tile"), (cells, "slices"), (cells, "registers"), (later, "direct")):
            cell, blas = some.get(f"{key}/{form}"), some[f"{key}/cublas"]
            ratios.append(f"{cell['median'] / blas['median']:.3f}" if cell else "")
        yield f"| {TITLES[model]} | {tokens} | {op} | {' | '.join(ratios)} |"


def ring() -> Iterator[str]:
    """The ring beside what shipped then, and cuBLAS' bare product; for the layers cuBLAS with our neighbours."""
    header, cells = runs("h200-linear-ring")
    key = "llama-3.1-8b/16"
    yield f"{RING}{environment(header)}\n"
    yield f"| {TITLES['llama-3.1-8b']} | ring | tensor cores | cuBLAS |\n|---|---|---|---|"
    for op in OPS[:-1]:
        some = [cells[f"{key}/{op}/{kind}"] for kind in ("ring", "ships", "cublas")]
        yield f"| {op} | " + " | ".join(f"{cell['median'] / cell['count']:.2f}" for cell in some) + " |"
    layers = [cells[f"{key}/layers/{kind}"]["median"] for kind in ("rings", "ships", "blas")]
    yield f"| the layers, rings but for qkv | {' | '.join(f'{micros:.0f}' for micros in layers)} |"


def tried() -> Iterator[str]:
    yield TRIED
    header, cells = runs("h200-head")
    yield f"\nThe head and the greedy token, one token, µs. {environment(header)}\n"
    yield "| hidden size | plan | head alone | two launches behind it | partials in its epilogue, one launch |"
    yield "|---|---|---|---|---|"
    for key, cell in cells.items():
        _, hidden, plan, kind = key.split("/")
        if kind == "alone":
            times = (cell, cells[f"head/{hidden}/{plan}/apart"], cells[f"head/{hidden}/{plan}/fused"])
            columns = " | ".join(f"{min(c['median'], c['again']):.2f}" for c in times)
            yield f"| {hidden} | {plan} | {columns} |"
    yield from forms()
    yield from ring()
