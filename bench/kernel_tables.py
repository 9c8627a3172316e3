"""docs/kernels.md out of the records in bench/results.

python bench/kernel_tables.py > docs/kernels.md
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
TITLES = {"llama-3.2-1b": "Llama-3.2-1B", "llama-3.1-8b": "Llama-3.1-8B"}
OPS = ("qkv", "o", "gate_up", "down", "head")

INTRODUCTION = """\
# Kernels

Every op is one file in `kernels/` with a launcher, a reference in torch of the same signature, and the Triton kernel.
CUDA tensors go to the kernel, CPU tensors to the reference. All of them can be imported and used alone:

```python
from ostinato.kernels import linear

y = linear(x, weight, norm_weight=norm, norm_eps=1e-5, swiglu=True)
```

| op | file | what one launch does |
|---|---|---|
| `embedding` | `kernels/embedding.py` | rows of a table by token id |
| `rotary_rows` | `kernels/rotary_rows.py` | rows of both rotary tables by position |
| `slot_mapping` | `kernels/slot_mapping.py` | where new keys and values go |
| `rms_norm`, `add_rms_norm` | `kernels/rms_norm.py` | norm of rows or heads, after a residual add if wanted |
| `residual_add` | `kernels/residual_add.py` | what a layer adds, normed or scaled, for the families that do that |
| `linear` | `kernels/linear.py` | norm, projection, bias, SwiGLU, residual; plans in `kernels/_linear_plan.py` |
| `rotary_kv_write` | `kernels/rotary_kv_write.py` | q/k norm, rotation, keys and values into the paged cache |
| `rotary_attention_decode` | `kernels/attention_decode.py` | the same and attention; a second launch merges shares |
| `attention_decode` | `kernels/attention_decode.py` | attention alone |
| `swiglu` | `kernels/swiglu.py` | the activation where it is not fused |
| `greedy` | `kernels/argmax.py` | the greedy token, in two launches |
| `commit` | `kernels/commit.py` | the end of a step |
| `update_rows` | `kernels/update_rows.py` | host changes between steps |

A layer of a decode step is five or six launches: `linear` (norm and qkv), `rotary_attention_decode` (one, or two with
the merge), `linear` (o and residual), `linear` (norm, gate and up, SwiGLU), `linear` (down and residual). All of them
use programmatic dependent launch: a kernel is let in while its predecessor drains, asks for its first weights, and only
then waits. The KV cache is `[num_blocks, num_kv_heads, block_size, head_dim]`.

## How it was measured

Graph replays timed with events, the median of many; every graph runs over the weights or caches of many layers, so that
nothing is served from the L2. *Share* is (bytes that must move) / time over the read ceiling, which is measured first
in the same process by streaming 4 GB. The records are in `bench/results/`; this page is made from them by
`bench/kernel_tables.py`. Projections and attention were timed with several plans each, the fastest is shown, and
the plans were adjusted afterwards: a run of what ships may come out lower. The whole steps ran what ships.
"""


def runs(name: str) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The header and the cells of one file of records."""
    lines = [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text().splitlines()]
    cells = {line["id"]: line for line in lines if "id" in line}
    return next(line for line in lines if "read_ceiling" in line), cells


def environment(header: dict[str, Any]) -> str:
    return (
        f"{header['device']}, torch {header['torch']}, Triton {header['triton']}, {header['date'][:10]}; "
        f"read ceiling {header['read_ceiling'] / 1e12:.3f} TB/s."
    )


def rate(cell: dict[str, Any]) -> str:
    return f"{cell['bytes'] / cell['median'] / 1e3:.0f} | {100 * cell['share']:.1f} %"


def one_token() -> Iterator[str]:
    yield "\n## Projections, one token\n"
    for name, model in (("h200-linear-1b", "llama-3.2-1b"), ("h200-linear-8b", "llama-3.1-8b")):
        header, cells = runs(name)
        yield f"\n{TITLES[model]}, bf16. {environment(header)}\n"
        yield "| projection | µs | GB/s | share |\n|---|---|---|---|"
        for op in OPS:
            cell = cells[f"{model}/1/{op}"]
            yield f"| {op} | {cell['median'] / cell['count']:.2f} | {rate(cell)} |"
        cell = cells[f"{model}/1/chain"]
        yield f"| **chain of all layers and the head, no attention** | {cell['median']:.1f} | {rate(cell)} |"
        head, both = (cells[f"{model}/1/{op}-again"]["median"] for op in ("head", "head+greedy"))
        yield f"\nThe greedy choice adds {both - head:.1f} µs to the head."


def some_tokens() -> Iterator[str]:
    yield "\n## Projections, 8 to 32 tokens\n"
    yield "*All* is with norm, activation and residual, *bare* without the norm, cuBLAS the product alone (`F.linear`)."
    for name, model in (("h200-linear-1b", "llama-3.2-1b"), ("h200-linear-8b", "llama-3.1-8b")):
        header, cells = runs(name)
        yield f"\n{TITLES[model]}, bf16. {environment(header)}\n"
        yield "| tokens | projection | all, µs | bare, µs | cuBLAS, µs | all / cuBLAS | bare / cuBLAS |"
        yield "|---|---|---|---|---|---|---|"
        for tokens in (8, 16, 32):
            for op in OPS:
                key = f"{model}/{tokens}/{op}"
                blas, bare = cells[f"{key}/cublas"], cells[f"{key}/bare"]
                ours = cells[f"{key}/{bare['plan']}"]
                times = [min(cell["median"], cell["again"]) / cell["count"] for cell in (ours, bare, blas)]
                yield (
                    f"| {tokens} | {op} | {times[0]:.2f} | {times[1]:.2f} | {times[2]:.2f} "
                    f"| {times[0] / times[2]:.3f} | {times[1] / times[2]:.3f} |"
                )
            for part, words in (("layers", "all layers"), ("chain", "all layers and the head")):
                ours, blas = (cells[f"{model}/{tokens}/{part}-{kind}"]["median"] for kind in ("ours", "blas"))
                yield (
                    f"| {tokens} | **{words}** | {ours:.1f} | | {blas:.1f} with our neighbours | {ours / blas:.3f} | |"
                )


def attention() -> Iterator[str]:
    yield "\n## Decode attention with rotation and KV write\n"
    header, cells = runs("h200-attention")
    yield f"One layer, bf16. {environment(header)}"
    yield "*Fused* rotates and writes in the attention kernel, *apart* in one of its own; both are with the merge,"
    yield "where keys are shared out, and with the best plan that was tried.\n"
    yield "| sequences x keys | query / KV heads | head_dim | fused, µs | apart, µs | GB/s | share |"
    yield "|---|---|---|---|---|---|---|"
    shapes = {"1b": ("32 / 8", 64), "8b": ("32 / 8", 128)}
    names = list(dict.fromkeys(key.split("/")[0] for key in cells))
    for name in names:
        fused = [cell for key, cell in cells.items() if key.startswith(f"{name}/fused/")]
        apart = [cell for key, cell in cells.items() if key.startswith(f"{name}/split/")]
        if apart:
            best = min(fused, key=lambda cell: cell["median"])
            model, batch = name.split("-")[:2]
            heads, size = shapes[model]
            layers = best["layers"]
            yield (
                f"| {batch.replace('x', ' x ')} | {heads} | {size} | {best['median'] / layers:.2f} "
                f"| {apart[0]['median'] / layers:.2f} | {rate(best)} |"
            )


def steps() -> Iterator[str]:
    yield "\n## A whole greedy step\n"
    header, cells = runs("h200-step")
    yield f"From token ids to token ids, about 1k keys a sequence, bf16, random weights. {environment(header)}\n"
    yield "| model | batch | one graph, ms | share | eager, ms |\n|---|---|---|---|---|"
    for key, cell in cells.items():
        model, batch, *plan = key.removeprefix("step/").split(":")
        note = f" ({plan[0]} attention)" if plan else ""
        yield (
            f"| {TITLES[model]} | {batch}{note} | {cell['median'] / 1e3:.3f} | {100 * cell['share']:.1f} % "
            f"| {cell['eager'] / 1e3:.1f} |"
        )


def page() -> str:
    return "\n".join([INTRODUCTION, *one_token(), *some_tokens(), *attention(), *steps(), ""])


if __name__ == "__main__":
    print(page(), end="")
