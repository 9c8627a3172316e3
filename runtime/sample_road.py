"""What a row or a batch needs on the way from logits to tokens."""

from dataclasses import dataclass, fields

from ..kernels import SampleSteps
from .sampling_params import SamplingParams


@dataclass(frozen=True)
class SampleRoad(SampleSteps):
    """The operations that a row or a batch needs, masks of allowed tokens and log-probabilities included."""

    masks: bool = False
    logprobs: bool = False
    num_top_logprobs: int = 0

    def __str__(self) -> str:
        """A short name for tables: what is done beside taking the most probable token."""
        names = [one.name for one in fields(self) if getattr(self, one.name)]
        if len(names) == len(fields(self)):
            return "everything"
        return "+".join(names) or "greedy"

    def covers(self, other: "SampleRoad") -> bool:
        """Whether this road does all that another one does."""
        return self | other == self

    def __or__(self, other: "SampleRoad") -> "SampleRoad":
        return SampleRoad(*(max(getattr(self, one.name), getattr(other, one.name)) for one in fields(self)))


def road_of(params: SamplingParams, vocab_size: int, bans: bool) -> SampleRoad:
    random = not params.greedy
    return SampleRoad(
        random=random,
        top_k=random and 0 < params.top_k < vocab_size,
        top_p=random and params.top_p < 1,
        min_p=random and params.min_p > 0,
        penalties=(params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1.0, 0.0, 0.0),
        biases=bool(params.logit_bias),
        bans=bans,
        masks=params.allowed_token_ids is not None,
        logprobs=params.logprobs,
        num_top_logprobs=params.top_logprobs,
    )
