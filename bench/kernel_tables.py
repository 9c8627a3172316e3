"""docs/kernels.md out of the records in bench/results: `ostinato report` writes what this prints."""

from collections.abc import Iterator

from linear_tables import crossovers, one_token, some_tokens, tried
from linear_wide_tables import wide
from prefill_tables import prefill
from records import TITLES, environment, rate, runs

# Cells of bench/sweep_attention.py: the plan that ships (a test compares), and the head size.
ATTENTION = {
    "1b-1x1k": ("n64w4s1x16", 64),
    "1b-4x1k": ("n64w4s1x16", 64),
    "1b-8x1k": ("n64w4s4x8", 64),
    "1b-16x1k": ("n64w4s4x4", 64),
    "1b-32x1k": ("n64w2s4x2", 64),
    "1b-1x8k": ("n64w4s1x64", 64),
    "1b-1x32k": ("n64w4s1x64", 64),
    "1b-32x8k": ("n64w2s4x2", 64),
    "8b-1x1k": ("n64w8s1x16", 128),
    "8b-8x1k": ("n32w2s4x8", 128),
    "8b-32x1k": ("n32w2s4x2", 128),
    "8b-1x32k": ("n64w8s1x32", 128),
    "8b-32x8k": ("n32w2s4x2", 128),
}
# Whole steps in h200-attention-steps: the plans of both earlier kernels, of this one on its way, and as it ships.
STEPS = [
    ("llama-3.2-1b", 1, ("on64w4s8x16", "vn32w1s1x32", "rn64w4s1x16", "n64w4s1x32")),
    ("llama-3.2-1b", 8, ("on64w4s8x4", "", "tn64w4s4x8", "n64w4s4x8")),
    ("llama-3.2-1b", 32, ("on128w4s8x1", "", "tn64w2s4x2", "")),
    ("llama-3.1-8b", 1, ("on64w4s4x16", "vn16w1s1x64", "rn64w8s1x16", "n64w8s1x32")),
    ("llama-3.1-8b", 8, ("on64w4s8x4", "", "tn32w2s4x8", "n32w2s4x8")),
]
SAMPLING = {
    "greedy": "greedy",
    "temperature": "temperature",
    "top_p": "temperature, top_p",
    "top_k_top_p": "temperature, top_k, top_p",
    "everything": "all operations",
    "logprobs": "`logprobs`",
    "mask": "`token_bitmask`, half of the tokens allowed",
    "all": "`token_bitmask`, all of them allowed",
}

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
| `attention_prefill` | `kernels/attention_prefill.py` | the same for any number of queries a sequence, causal |
| `swiglu` | `kernels/swiglu.py` | the activation where it is not fused |
| `greedy` | `kernels/argmax.py` | the greedy token, in two launches |
| `token_bitmask` | `kernels/token_bitmask.py` | minus infinity to the logits that a row's mask leaves out |
| `sample_rows` | `kernels/sample_rows.py` | tokens of rows of any kind, in two to nine launches |
| `logprobs` | `kernels/logprobs.py` | log-probabilities of given and most probable tokens, in two launches |
| `commit` | `kernels/commit.py` | the end of a step |
| `update_rows` | `kernels/update_rows.py` | host changes between steps |

A layer of a decode step is five or six launches: `linear` (norm and qkv), `rotary_attention_decode` (one, or two with
the merge), `linear` (o and residual), `linear` (norm, gate and up, SwiGLU), `linear` (down and residual). All of them
use programmatic dependent launch: a kernel is let in while its predecessor drains, asks for its first weights, and only
then waits. The KV cache is `[num_blocks, num_kv_heads, block_size, head_dim]`.

A layer of a prompt has `rotary_kv_write` and `attention_prefill` in the middle. Above some tens of tokens `rms_norm` is
a launch of its own; where cuBLAS does the product, `swiglu` is one, too, and the residual is the product's addend, in
place, as a layer's residual stream stays in one buffer. These kernels are launched one by one, so that the host's time
counts: a launch that comes again does not ask its tensors again (`kernels/_launch.py`).

## Sampling

`sample_rows` does biases, penalties, bans, temperature, top-k, top-p, min-p and the draw. `bench/sampling.py` times it
and `logprobs` beside their references.

| launch | programs | what it leaves behind |
|---|---|---|
| scan | stretch, row | largest value, its first id, least finite value, the largest of every 64 neighbours |
| least | row | a value that k of these reach, or 64 without top-k; for top-k the tokens that reach it, listed |
| collect | stretches, row | without top-k, the tokens that reach it, listed, their mass, and all mass |
| count | stretches, row | how many tokens lie in each of 256 bins of distance from the row's largest value |
| plan | row | the bins where a border may be |
| collect | stretches, row | the tokens in these bins, listed; the exact mass above them |
| resolve | row | the token, drawn from the first list; or the least (value, id) that may be drawn |
| race | stretches, row | the first to arrive of what may be drawn |
| choose | row | the token, and its count |

Greedy batches need the first and the last, unfiltered ones also the race. A row that needs less than its batch leaves
at once. No launch stores adjusted logits: each computes them anew from the logits, which the L2 holds, so that the
workspace is 44 KB a row and not half a megabyte. The list of a row's biases or bans ascends; a stretch finds its part
by counting, and looks at no other entry.

*Few tokens.* At least k tokens reach the k-th largest of any maxima, so the first list has the k first. Where it has no
more than 256 tokens, and for top-p without top-k the mass that is wanted, one program ranks it, each token against
each, and draws: the row is done, and count, plan, collect and race only look at it and leave. Others go all the way.

*Ties and borders.* Tokens stand in one order, larger value first, then lower id, as a key of 50 bits. Mass is an
integer of 40 bits after the point, so that no order of summation matters, neither within a program nor among atomics.
For rows of more tokens bins take the place of a radix search's upper digits: counts give top-k's bin exactly, and bound
the mass of every other, which leaves a few bins for the border of top-p. The rest of the digits are found bit by bit
among the listed keys, in one program and with exact sums. If these show that the border is not in the list, or if more
than 4,096 tokens lie where it may be (a long tie, or hardly any difference between logits), the program searches the
whole row instead: the same token, some milliseconds later by estimate.

*Equality with the reference.* The random bits are the same. `exp` and division are the device's own, so a token can
differ where two race times, or a mass and the border of top-p or min-p, are within 1e-5 of each other, relative.

*Allowed tokens* are a bit each, 32 in a word, a row of words for each row of the batch (16 KB at 128k tokens).
`token_bitmask` runs right behind the head, in place, so that penalties, filters and log-probabilities all see what it
left. It reads and writes back whole vectors of logits, of stretches of 2,048 that lack a token; a stretch whose 64
words are all ones is left at once, so that a row without a mask costs hardly more than the launch. Graphs of greedy
batches do not have it; all others do.

*Log-probabilities* are of the logits as the model gave them, or as a mask left them. The first launch leaves the sum
of exponentials of every stretch and the first token of every 64 neighbours, by the order above; the k first tokens are
in the k groups whose own first comes first, so the second launch looks for k groups and then for k tokens among theirs.

## How it was measured

Graph replays timed with events, the median of many; every graph runs over the weights or caches of many layers, so that
nothing is served from the L2. *Share* is (bytes that must move) / time over the read ceiling, which is measured first
in the same process by streaming 4 GB; it differs by 2 % between two cards of this kind. The records are in
`bench/results/`; this page is made from them by `bench/kernel_tables.py`. The figures of projections are one run of the
plans that shipped then, and so are those of attention, from a run that timed other plans beside them
(`bench/sweep_attention.py`). The whole steps ran what shipped then.
"""


def attention() -> Iterator[str]:
    yield "\n## Decode attention with rotation and KV write\n"
    header, cells = runs("h200-attention")
    yield f"One layer with the plan that ships, bf16, 32 query and 8 KV heads. {environment(header)}"
    yield "*Fused* rotates and writes in the attention kernel, *apart* in one of its own (where it was timed with this"
    yield "plan); both are with the merge, where keys are shared out. A plan is keys of a tile, warps, stages (with 1"
    yield "through registers), shares.\n"
    yield "| sequences x keys | head_dim | plan | fused, µs | apart, µs | GB/s | share |"
    yield "|---|---|---|---|---|---|---|"
    for name, (plan, head_dim) in ATTENTION.items():
        fused, apart = cells[f"{name}/{plan}"], cells.get(f"{name}/{plan}/apart")
        other = f"{apart['median'] / apart['layers']:.2f}" if apart else ""
        size = name.split("-")[1].replace("x", " x ")
        yield f"| {size} | {head_dim} | {plan} | {fused['median'] / fused['layers']:.2f} | {other} | {rate(fused)} |"
    yield from merges()
    yield from attention_in_steps()


def merges() -> Iterator[str]:
    header, cells = runs("h200-attention-merge")
    yield "\n### Merging the shares: in a second launch, or by the last program to arrive\n"
    yield f"An earlier state of the same kernel, one layer, bf16. {environment(header)}"
    yield "The last arriver (barrier, acquire-release atomic, all partial sums past the L1 in index order) lost with"
    yield "every plan but one, which is not the best of its cell, and is not built.\n"
    yield "| sequences x keys | head_dim | plan | second launch, µs | last arriver, µs |\n|---|---|---|---|---|"
    for key, cell in cells.items():
        name, plan, kind = key.split("/")
        if kind == "second-launch":
            last = cells[f"{name}/{plan}/last-arriver"]
            head_dim = {"1b": 64, "8b": 128}[name.split("-")[0]]
            size = name.split("-")[1].replace("x", " x ")
            times = " | ".join(f"{one['median'] / one['layers']:.2f}" for one in (cell, last))
            yield f"| {size} | {head_dim} | {plan} | {times} |"


def attention_in_steps() -> Iterator[str]:
    yield "\n### Within a whole step\n"
    header, cells = runs("h200-attention-steps")
    yield f"About 1k keys a sequence, one graph, milliseconds. {environment(header)}"
    yield "*Earlier* are the two kernels that this one replaced, *new* is a state of it from the same run; the last"
    yield "column, as it ships, is from a run beside a lower ceiling (4.563 TB/s).\n"
    yield "| model | batch | earlier, tensor cores | earlier, vector | new | as it ships |\n|---|---|---|---|---|---|"
    for model, batch, plans in STEPS:
        times = [f"{cells[f'step/{model}/{batch}/{plan}']['median'] / 1e3:.3f}" if plan else "" for plan in plans]
        yield f"| {TITLES[model]} | {batch} | {' | '.join(times)} |"


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


def sampling() -> Iterator[str]:
    yield "\n## From logits to tokens\n"
    header, cells = runs("h200-sampling")
    yield f"A vocabulary of 128,256, bf16, normal logits of deviation 2.5, one graph. {environment(header)}"
    yield "Temperature 0.8, top_k 50, top_p 0.9; top_p alone leaves some thousand of these logits. *Reference* is what"
    yield "the kernels replaced, torch operations, in a graph, too. Log-probabilities are with 20 alternatives.\n"
    yield "| work | rows | µs | reference, µs |\n|---|---|---|---|"
    for key, cell in cells.items():
        work, rows = key.removeprefix("sampling/").split(":")
        yield f"| {SAMPLING[work]} | {rows} | {cell['median']:.1f} | {cell['reference']:.0f} |"


def page() -> str:
    parts = (one_token(), some_tokens(), crossovers(), wide(), attention(), prefill(), sampling(), steps(), tried())
    return "\n".join([INTRODUCTION, *(line for part in parts for line in part), ""])


if __name__ == "__main__":
    print(page(), end="")
