"""Why a step ran the way it did: a closed list."""

from enum import StrEnum


class Path(StrEnum):
    """How rows of a step are run."""

    WHOLE = "whole"
    PIECEWISE = "piecewise"
    EAGER = "eager"


class Reason(StrEnum):
    """Of every step, or of every part of a step that is split."""

    WHOLE = "one graph from preamble to commit"
    PIECEWISE = "piecewise is what the engine is told to do"
    HOOK = "piecewise around a hook on hidden states"
    LOGITS_PROCESSOR = "piecewise around a logits processor"
    PROMPT = "a prompt in one graph, from its tokens to its logits"
    SPLIT = "several replays: the batch is larger than the largest graph"

    OFF = "graphs are off"
    FORCED = "eager on request, on the rows a graph would run"
    PREFILL = "prompts run eagerly"
    PROMPT_TOO_LONG = "the prompt is longer than the largest graph of prompts"
    PROMPT_IN_PARTS = "a part of a longer prompt"
    PROMPTS_TOGETHER = "several prompts in one batch"
    PROMPT_HOOK = "a hook on hidden states sees prompts, too"
    WARMUP = "the bucket's graph is captured after a few eager steps"
    OVER_LARGEST = "larger than the largest graph, and the buckets are told not to cap the batch"
    NO_BUCKET = "no bucket fits"
    CAPTURE_FAILED = "the bucket's capture failed"
    RANK_DISAGREED = "another rank has no graph for the bucket"
    OVER_BUDGET = "the bucket's graph did not fit the memory for graphs"
    REPLAY_FAILED = "a replay of the bucket failed"
    ALIASED = "the bucket's graph may overwrite what must last"
    SELF_TEST_FAILED = "the bucket's replay did not compute what its Python computes"


DROPPED = frozenset(
    (
        Reason.CAPTURE_FAILED,
        Reason.RANK_DISAGREED,
        Reason.OVER_BUDGET,
        Reason.REPLAY_FAILED,
        Reason.ALIASED,
        Reason.SELF_TEST_FAILED,
    )
)
"""Reasons for which a bucket can be missing."""

REPLAYS = frozenset(
    (
        Reason.WHOLE,
        Reason.PIECEWISE,
        Reason.HOOK,
        Reason.LOGITS_PROCESSOR,
        Reason.SPLIT,
        Reason.PROMPT,
    )
)
"""Reasons of what replays."""
