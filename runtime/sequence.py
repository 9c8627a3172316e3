"""One sequence on its way from prompt to finished output."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from .errors import RequestError
from .sampling_params import SamplingParams
from .text_stream import TextStream


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class TokenLogprobs(NamedTuple):
    """Of one generated token: its logprob, and the most likely tokens of the step as (id, logprob), best first."""

    logprob: float
    top: list[tuple[int, float]]


@dataclass(eq=False)
class Sequence:
    """A prompt, what was generated after it, and where the engine stands with it.

    Attributes:
        sample_index: which of a request's `n` samples this is; part of the random key.
        seed: drawn by the caller for requests without one.
        stop_ids: token ids that end it.
        max_tokens: tokens it may generate, resolved against the engine's limit.
        blocks: KV blocks it owns, enough for its longest outcome.
        num_computed: tokens whose keys and values are in the cache.
        row: its row while it decodes, None before and after.
        output_ids, output_texts: the tokens generated, and the text that each one made certain (often none yet).
        stop_reason: the stop id or stop string that ended it; None at an eos id.
        error: why it cannot go on; the engine ends it then.
        start_time, first_token_time, finish_time: `time.perf_counter()` seconds when it was admitted, had its first
            token, and ended; 0.0 until then.
    """

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    sample_index: int
    seed: int
    stop_ids: frozenset[int]
    max_tokens: int
    text_stream: TextStream
    output_ids: list[int] = field(default_factory=list)
    output_texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    row: int | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: RequestError | None = None
    start_time: float = 0.0
    first_token_time: float = 0.0
    finish_time: float = 0.0

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def max_len(self) -> int:
        return len(self.prompt_ids) + self.max_tokens
