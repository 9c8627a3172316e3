"""docs/feature-interactions.md, made from what an engine does: `ostinato report` writes what this prints."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..model import ModelConfig
from ..weights import dummy_model
from .break_features import sizes_of
from .breaks import BATCH, BreakCell, measure, refusals

HEAD = """# Features and graphs

What each feature does to the graphs of a decode step. This page is generated: `ostinato report` runs every feature of
`ostinato bench break` on a tiny model with random weights, on a CPU's tape, and writes down what its steps ran as;
`tests/test_report.py` compares. Reasons are those of `runtime/graph_reason.py`, and
`LLM.explain` tells them in advance. The first table has the twelve features that serving guides usually list, with the
verdict that such a guide gives ("elsewhere").
"""

COSTS = """
Costs are told by what is launched, since a tape has no times worth telling. `docs/results.md` has times on an H200, as
far as they were measured, and `ostinato bench break` measures them on your machine. "Ahead" is whether a step can be
launched before the tokens of the last one are looked at; where not, the host's work adds to each step.
"""


@dataclass(frozen=True)
class Interaction:
    """A row of the first table.

    Attributes:
        elsewhere: the verdict of a serving guide.
        ours: what happens here.
        shown_by: the break that shows it; or the option that is refused.
    """

    feature: str
    elsewhere: str
    ours: str
    shown_by: str


INTERACTIONS = (
    Interaction(
        "Paged attention",
        "yes (context length is data, not shape)",
        "yes: lengths and block tables lie on the device, grids follow from the bucket",
        "nothing: greedy requests",
    ),
    Interaction(
        "Continuous batching",
        "yes (with a capture list per batch size)",
        "yes: rows join and leave between steps; a batch is padded to the next size, or split above the largest",
        "a batch between two sizes",
    ),
    Interaction(
        "Prefix caching", "yes (block tables are data)", "not built: blocks are not shared", "enable_prefix_caching"
    ),
    Interaction(
        "Chunked prefill",
        "no for the prefill part; yes for the decode part",
        "chunks of prompts run eagerly, in steps of their own; decode steps between them replay as ever, and so does a "
        "short prompt in one piece (on a GPU, or with `prompt_capture_sizes`)",
        "PROMPT_IN_PARTS",
    ),
    Interaction("Multi-LoRA", "careful: some engines disable graphs", "not built", "enable_lora"),
    Interaction(
        "Speculative decoding", "careful: accepted counts complicate capture", "not built", "speculative_config"
    ),
    Interaction(
        "Guided decoding",
        "careful: the mask is often computed outside the graph",
        "yes, as `allowed_token_ids`: a bit for each token, applied in the graph; a list is packed once, a function "
        "asked on the host before each step; no grammar engine",
        "a function of allowed tokens",
    ),
    Interaction(
        "Python logits processors",
        "no",
        "yes: the step is cut between head and sampling, the processor runs there, both sides replay",
        "a Python logits processor",
    ),
    Interaction(
        "Per-request sampling",
        "yes (parameters in fixed buffers)",
        "yes: parameters, seeds and token counts are rows on the device",
        "penalties",
    ),
    Interaction("Tensor parallelism", "yes (NCCL can be captured)", "not built", "tensor_parallel_size"),
    Interaction("Pipeline parallelism", "careful: communication between stages", "not built", "pipeline_parallel_size"),
    Interaction(
        "Custom masks",
        "not in every guide's table",
        "of tokens: as guided decoding. Of attention: not built, no argument takes one; a window is the model's",
        "a list of allowed tokens",
    ),
)


def page(cells: Sequence[BreakCell]) -> str:
    """The document."""
    by_name, refused = {cell.name: cell for cell in cells}, refusals()
    rows = [["feature", "elsewhere", "here", "runs", "reason", "cost"]]
    for one in INTERACTIONS:
        cell = by_name.get(one.shown_by)
        if cell is not None:
            rows.append([one.feature, one.elsewhere, one.ours, cell.path, f"`{cell.reason}`", _cost(cell)])
        elif one.shown_by == "PROMPT_IN_PARTS":
            rows.append([one.feature, one.elsewhere, one.ours, "eager", "`PROMPT_IN_PARTS`", "none for decode steps"])
        else:
            said = f"`EngineConfig` {refused[one.shown_by]}"
            rows.append([one.feature, one.elsewhere, one.ours, "refused", said, "none"])
    second = [["switched on", "runs", "reason", "graphs a step", "padding rows", "ahead"]]
    for cell in cells:
        counts = [str(cell.graphs_per_step), str(cell.padding_rows), "yes" if cell.runs_ahead else "no"]
        second.append([cell.name, cell.path, f"`{cell.reason}`", *counts])
    sizes = " and ".join(map(str, sizes_of(BATCH)))
    one_by_one = f"## One by one\n\nBatches of {BATCH}, graphs of {sizes}.\n\n{_table(second)}\n"
    return f"{HEAD}\n{_table(rows)}\n{COSTS}\n{one_by_one}"


def make_page() -> str:
    """The document, from a run."""
    config = ModelConfig.from_hf(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 64,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 128,
        }
    )
    return page(measure(dummy_model(config, dtype=torch.float32, device="cpu"), batch=BATCH, context=8, steps=0).cells)


def _cost(cell: BreakCell) -> str:
    graphs = f"{cell.graphs_per_step} graph{'s' * (cell.graphs_per_step != 1)} a step"
    padding = f", {cell.padding_rows} row of padding" if cell.padding_rows else ""
    return f"{graphs}{padding}, {'launched ahead' if cell.runs_ahead else 'not launched ahead'}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


if __name__ == "__main__":
    print(make_page(), end="")
