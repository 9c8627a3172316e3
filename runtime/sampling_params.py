"""What one request asks of sampling and stopping."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from torch import Tensor

LogitsProcessor = Callable[[Sequence[int], Sequence[int], "Tensor"], "Tensor | None"]
AllowedTokens = Callable[[Sequence[int], Sequence[int]], "Sequence[int] | Tensor"]

MAX_LOGIT_BIASES = 1024
MAX_STOP_TOKEN_IDS = 64
MAX_TOP_LOGPROBS = 20
MAX_SAMPLES = 16384
_MAX_INT = 2**31 - 1


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of one request; names and defaults follow vLLM and the OpenAI API.

    temperature:         >= 0; 0 is greedy, whatever the parameters below are
    top_k:               draw from the k most probable tokens; 0 and -1 (and a k of the vocabulary size or more): all
    top_p:               0 ... 1, draw from the fewest tokens that hold this share of the probability; 0 keeps one
    min_p:               0 ... 1, draw only from tokens at least this probable, relative to the most probable one
    repetition_penalty:  0.01 ... 100, on tokens of prompt and output, once each; 1 is off
    presence_penalty:    -2 ... 2, once for each token in the output
    frequency_penalty:   -2 ... 2, for each time a token is in the output
    seed:                0 ... 2**64 - 1; None: one is drawn when the request arrives
    max_tokens:          most tokens to generate, at least 1; None: until the context is full
    min_tokens:          nothing ends the output before so many generated tokens
    stop:                a string or several, that end the output; none may be empty
    stop_token_ids:      token ids that end the output besides the model's end ids, also under ignore_eos
    ignore_eos:          do not stop at the model's end ids
    logit_bias:          token id -> -100 ... 100, added to the logit; JSON's string keys are accepted
    logprobs:            report the log-probability of each generated token
    top_logprobs:        0 ... 20, also those of the most probable tokens; needs logprobs=True. vLLM's `logprobs=k` is
                         `logprobs=True, top_logprobs=k` here, the spelling of OpenAI's chat API
    n:                   1 ... 16384 samples of the prompt; each has its own random stream, numbered from 0
    include_stop_str_in_output, skip_special_tokens: form of the text
    logits_processors:   functions (prompt ids, output ids, logits) -> None or new logits, run in Python before the
                         penalties; `logits` is the row `[vocab_size]` and may be changed in place
    allowed_token_ids:   only these may be generated: a list of ids, or a function (prompt ids, output ids) -> ids or a
                         bool mask `[vocab_size]`, called before each token; behind logits processors

    Log-probabilities are those of the model, before penalties, biases, temperature and filters (but after logits
    processors and allowed tokens, which change what the model says). Raises TypeError or
    ValueError that name the field, the value and the limit. `check_vocab` does the checks that need a vocabulary.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: bool = False
    top_logprobs: int = 0
    n: int = 1
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logits_processors: Sequence[LogitsProcessor] = ()
    allowed_token_ids: Sequence[int] | AllowedTokens | None = None

    def __post_init__(self) -> None:
        checked = {
            "temperature": _real("temperature", self.temperature, 0.0, math.inf),
            "top_k": _integer("top_k", self.top_k, -1, _MAX_INT),
            "top_p": _real("top_p", self.top_p, 0.0, 1.0),
            "min_p": _real("min_p", self.min_p, 0.0, 1.0),
            "repetition_penalty": _real("repetition_penalty", self.repetition_penalty, 0.01, 100.0),
            "presence_penalty": _real("presence_penalty", self.presence_penalty, -2.0, 2.0),
            "frequency_penalty": _real("frequency_penalty", self.frequency_penalty, -2.0, 2.0),
            "seed": None if self.seed is None else _integer("seed", self.seed, 0, 2**64 - 1),
            "max_tokens": None if self.max_tokens is None else _integer("max_tokens", self.max_tokens, 1, _MAX_INT),
            "min_tokens": _integer("min_tokens", self.min_tokens, 0, _MAX_INT),
            "stop": _stop_strings(self.stop),
            "stop_token_ids": _stop_token_ids(self.stop_token_ids),
            "logit_bias": _logit_bias(self.logit_bias),
            "top_logprobs": _integer("top_logprobs", self.top_logprobs, 0, MAX_TOP_LOGPROBS),
            "n": _integer("n", self.n, 1, MAX_SAMPLES),
            "logits_processors": _logits_processors(self.logits_processors),
            "allowed_token_ids": _allowed_token_ids(self.allowed_token_ids),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        for name in ("ignore_eos", "logprobs", "include_stop_str_in_output", "skip_special_tokens"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                hint = f"; for alternatives give logprobs=True, top_logprobs={value!r}" if name == "logprobs" else ""
                raise TypeError(f"{name} must be True or False, got {value!r}{hint}")
        if self.top_logprobs and not self.logprobs:
            raise ValueError(f"top_logprobs={self.top_logprobs} needs logprobs=True")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens must be at most max_tokens, got {self.min_tokens} > {self.max_tokens}")

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature == 0

    def check_vocab(self, vocab_size: int) -> None:
        """Raise ValueError for a token id in logit_bias, stop_token_ids or allowed_token_ids outside the vocabulary."""
        allowed = () if self.allowed_token_ids is None or callable(self.allowed_token_ids) else self.allowed_token_ids
        for name, ids in (
            ("logit_bias", self.logit_bias),
            ("stop_token_ids", self.stop_token_ids),
            ("allowed_token_ids", allowed),
        ):
            for token_id in ids:
                if not (0 <= token_id < vocab_size):
                    raise ValueError(f"{name}: token id {token_id} is not in the vocabulary, 0 ... {vocab_size - 1}")


def _real(name: str, value: Any, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not (low <= number <= high) or not math.isfinite(number):
        limits = f"at least {low:g} and finite" if high == math.inf else f"in {low:g} ... {high:g}"
        raise ValueError(f"{name} must be {limits}, got {value!r}")
    return number + 0.0  # turns -0.0 into 0.0


def _integer(name: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if not (low <= int(value) <= high):
        raise ValueError(f"{name} must be in {low} ... {high}, got {value!r}")
    return int(value)


def _stop_strings(stop: Any) -> tuple[str, ...]:
    strings = () if stop is None else (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, Sequence) or not all(isinstance(s, str) for s in strings):
        raise TypeError(f"stop must be a string or a list of strings, got {stop!r}")
    for string in strings:
        if not string:
            raise ValueError(f"stop: a stop string needs at least 1 character, got {string!r}")
        if any("\ud800" <= character <= "\udfff" for character in string):
            raise ValueError(f"stop: a stop string must be valid Unicode, got a lone surrogate in {string!r}")
    return tuple(strings)


def _stop_token_ids(ids: Any) -> tuple[int, ...]:
    if ids is None:
        return ()
    if isinstance(ids, str | bytes) or not isinstance(ids, Sequence):
        raise TypeError(f"stop_token_ids must be a list of token ids, got {ids!r}")
    if len(ids) > MAX_STOP_TOKEN_IDS:
        raise ValueError(f"stop_token_ids: at most {MAX_STOP_TOKEN_IDS} ids, got {len(ids)}")
    return tuple(_integer("stop_token_ids", token_id, 0, _MAX_INT) for token_id in ids)


def _logits_processors(processors: Any) -> tuple[LogitsProcessor, ...]:
    if not isinstance(processors, Sequence) or not all(callable(processor) for processor in processors):
        raise TypeError(f"logits_processors must be a list of functions, got {processors!r}")
    return tuple(processors)


def _allowed_token_ids(allowed: Any) -> tuple[int, ...] | AllowedTokens | None:
    if allowed is None or callable(allowed):
        return cast("AllowedTokens | None", allowed)
    if isinstance(allowed, str | bytes) or not isinstance(allowed, Sequence):
        raise TypeError(f"allowed_token_ids must be a list of token ids or a function, got {allowed!r}")
    if not allowed:
        raise ValueError(f"allowed_token_ids: at least 1 id, got {allowed!r}")
    return tuple(_integer("allowed_token_ids", token_id, 0, _MAX_INT) for token_id in allowed)


def _logit_bias(biases: Any) -> dict[int, float]:
    if biases is None:
        return {}
    if not isinstance(biases, Mapping):
        raise TypeError(f"logit_bias must map token ids to biases, got {biases!r}")
    if len(biases) > MAX_LOGIT_BIASES:
        raise ValueError(f"logit_bias: at most {MAX_LOGIT_BIASES} tokens, got {len(biases)}")
    checked: dict[int, float] = {}
    for key, value in biases.items():
        number = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10 else key
        if isinstance(number, str):
            raise ValueError(f"logit_bias: a key must be a token id, 0 ... {_MAX_INT}, got {key!r}")
        token_id = _integer("logit_bias key", number, 0, _MAX_INT)
        if token_id in checked:
            raise ValueError(f"logit_bias: token id {token_id} is given twice")
        checked[token_id] = _real(f"logit_bias[{key!r}]", value, -100.0, 100.0)
    return checked
