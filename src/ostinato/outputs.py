"""What a request gives back."""

from dataclasses import dataclass

from .runtime import RequestError, TokenLogprobs


@dataclass(frozen=True)
class CompletionOutput:
    """One sample of a request.

    Attributes:
        index: 0 .. n - 1.
        text: without special tokens and without what ended it, unless the parameters say otherwise.
        token_ids: everything generated, an end id included.
        logprobs: one entry a token when asked for, else None.
        finish_reason: "stop" (an end id, a stop id or a stop string), "length", "abort", or "error".
        stop_reason: the stop id or stop string that ended it; None at an end id of the model.
        error: of a sample that ended in one, of its own logits processor, say; text and tokens are those before it.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: str
    stop_reason: int | str | None
    error: RequestError | None = None


@dataclass(frozen=True)
class RequestMetrics:
    """Counts and seconds of a request, over all of its samples.

    Attributes:
        num_samples: how many there are.
        time_to_first_token: from the call to the first token of any sample, waiting included; 0 without a token.
        prefill_seconds: from the start of the prompt's computation to the first token.
        decode_seconds: from the first token to the last.
    """

    prompt_tokens: int
    generated_tokens: int
    num_samples: int
    time_to_first_token: float
    prefill_seconds: float
    decode_seconds: float

    @property
    def prompt_tokens_per_second(self) -> float:
        return self.prompt_tokens / self.prefill_seconds if self.prefill_seconds > 0 else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        """Of the tokens after each sample's first one."""
        decoded = self.generated_tokens - self.num_samples
        return decoded / self.decode_seconds if self.decode_seconds > 0 else 0.0


@dataclass(frozen=True)
class RequestOutput:
    """A request's prompt and its samples; `prompt` is None when token ids were given."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics


@dataclass(frozen=True)
class StreamDelta:
    """News of one sample: the text and tokens since the last delta; the last one has a finish_reason."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
