"""What a row or a batch needs on the way from logits to tokens."""

from dataclasses import dataclass, fields

from .sampling_params import SamplingParams


@dataclass(frozen=True)
class SampleRoad:
    """The operations that a row or a batch needs; one that is left out would have changed nothing."""

    random: bool = False
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False
    penalties: bool = False
    biases: bool = False
    bans: bool = False
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
        return SampleRoad(
            random=self.random or other.random,
            top_k=self.top_k or other.top_k,
            top_p=self.top_p or other.top_p,
            min_p=self.min_p or other.min_p,
            penalties=self.penalties or other.penalties,
            biases=self.biases or other.biases,
            bans=self.bans or other.bans,
            logprobs=self.logprobs or other.logprobs,
            num_top_logprobs=max(self.num_top_logprobs, other.num_top_logprobs),
        )


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
        logprobs=params.logprobs,
        num_top_logprobs=params.top_logprobs,
    )
