"""Which parameters are accepted, what becomes of them, and what the refusals say."""

import dataclasses
import json
import math
import pickle
from typing import Any

import numpy as np
import pytest

from ostinato.runtime.sampling_params import MAX_LOGIT_BIASES, MAX_STOP_TOKEN_IDS, MAX_TOP_LOGPROBS, SamplingParams

LIMITS = {
    "temperature": (0.0, None),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "top_k": (-1, 2**31 - 1),
    "seed": (0, 2**64 - 1),
    "max_tokens": (1, 2**31 - 1),
    "min_tokens": (0, None),
    "top_logprobs": (0, MAX_TOP_LOGPROBS),
    "n": (1, 16384),
}
REALS = ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]
INTEGERS = [name for name in LIMITS if name not in REALS]
FLAGS = ["ignore_eos", "logprobs", "include_stop_str_in_output", "skip_special_tokens"]


def test_defaults_ask_for_plain_sampling() -> None:
    params = SamplingParams()
    assert not params.greedy
    assert dataclasses.asdict(params) == {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": None,
        "max_tokens": 16,
        "min_tokens": 0,
        "stop": (),
        "stop_token_ids": (),
        "ignore_eos": False,
        "logit_bias": {},
        "logprobs": False,
        "top_logprobs": 0,
        "n": 1,
        "include_stop_str_in_output": False,
        "skip_special_tokens": True,
        "logits_processors": (),
        "allowed_token_ids": None,
    }


@pytest.mark.parametrize("name", REALS)
@pytest.mark.parametrize(
    "value", [*json.loads("[NaN, Infinity, -Infinity, 1e400]"), 10**400, -3.0, -(10**400)], ids=str
)
def test_b53_a_number_that_is_none_or_out_of_range_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name} must be .*, got") as refusal:
        SamplingParams(**{name: value})
    assert repr(value) in str(refusal.value)


@pytest.mark.parametrize("name", REALS + INTEGERS)
@pytest.mark.parametrize("value", ["0.7", "1", True, False, [1], 1j, b"1"], ids=repr)
def test_b53_a_value_of_another_type_is_refused(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=rf"^{name} must be "):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", [1.0, 1.5, math.nan, math.inf], ids=str)
def test_b53_a_float_is_not_an_integer(name: str, value: float) -> None:
    with pytest.raises(TypeError, match=rf"^{name} must be an integer, got {value}"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", LIMITS)
def test_both_limits_are_accepted_and_named_when_passed(name: str) -> None:
    low, high = LIMITS[name]
    others = {"logprobs": True} if name == "top_logprobs" else {}
    for limit, beyond in ((low, low - 1), (high, None if high is None else high + 1)):
        if limit is None:
            continue
        assert getattr(SamplingParams(**{name: limit}, **others), name) == limit
        with pytest.raises(ValueError, match=name) as refusal:
            SamplingParams(**{name: beyond}, **others)
        shown = f"{limit:g}" if name in REALS else str(limit)
        assert str(beyond) in str(refusal.value)
        assert shown in str(refusal.value)


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("value", [0, 1, "true", None], ids=repr)
def test_a_flag_is_true_or_false(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=rf"^{name} must be True or False, got"):
        SamplingParams(**{name: value})


def test_vllm_s_number_of_logprobs_is_answered_with_our_spelling() -> None:
    with pytest.raises(TypeError, match="give logprobs=True, top_logprobs=5"):
        SamplingParams(logprobs=5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="top_logprobs=5 needs logprobs=True"):
        SamplingParams(top_logprobs=5)


def test_numbers_of_other_libraries_become_python_s() -> None:
    params = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(4), top_p=1)
    assert (params.temperature, params.top_k, params.top_p) == (0.5, 4, 1.0)
    assert [type(value) for value in (params.temperature, params.top_k, params.top_p)] == [float, int, float]
    assert math.copysign(1, SamplingParams(temperature=-0.0).temperature) == 1


@pytest.mark.parametrize(
    ("stop", "expected"),
    [("end", ("end",)), (["a", "b"], ("a", "b")), ([], ()), ((), ()), (None, ()), (["\U0001f642"], ("\U0001f642",))],
    ids=repr,
)
def test_b56_stop_strings(stop: Any, expected: tuple[str, ...]) -> None:
    assert SamplingParams(stop=stop).stop == expected


@pytest.mark.parametrize("stop", ["", [""], ["a", ""], "\ud83d", ["a", "b\udc00"]], ids=ascii)
def test_b56_b55_an_empty_or_broken_stop_string_is_refused(stop: Any) -> None:
    with pytest.raises(ValueError, match=r"^stop: a stop string ") as refusal:
        SamplingParams(stop=stop)
    str(refusal.value).encode()


@pytest.mark.parametrize("stop", [1, [1], ["a", None], {"a": 1}], ids=repr)
def test_stop_must_be_strings(stop: Any) -> None:
    with pytest.raises(TypeError, match=r"^stop must be a string or a list of strings"):
        SamplingParams(stop=stop)


def test_b53_stop_token_ids() -> None:
    assert SamplingParams(stop_token_ids=[3, np.int64(2)]).stop_token_ids == (3, 2)
    assert SamplingParams(stop_token_ids=None).stop_token_ids == ()  # type: ignore[arg-type]
    for wrong in (3, "3", ["3"], [1.5], [True], {3}):
        with pytest.raises(TypeError, match=r"^stop_token_ids"):
            SamplingParams(stop_token_ids=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"stop_token_ids must be in 0 \.\.\. \d+, got -1"):
        SamplingParams(stop_token_ids=[-1])
    with pytest.raises(ValueError, match=f"at most {MAX_STOP_TOKEN_IDS} ids, got {MAX_STOP_TOKEN_IDS + 1}"):
        SamplingParams(stop_token_ids=range(MAX_STOP_TOKEN_IDS + 1))


def test_b26_logit_bias_takes_json_s_string_keys() -> None:
    assert SamplingParams(logit_bias={"5": -100, 7: 100.0}).logit_bias == {5: -100.0, 7: 100.0}  # type: ignore[dict-item]
    assert SamplingParams(logit_bias={}).logit_bias == {}
    assert SamplingParams(logit_bias=None).logit_bias == {}  # type: ignore[arg-type]


def test_logit_bias_is_a_copy() -> None:
    given = {5: 1.0}
    params = SamplingParams(logit_bias=given)
    given[6] = math.nan
    assert params.logit_bias == {5: 1.0}


@pytest.mark.parametrize(
    ("logit_bias", "named"),
    [
        ({"abc": 1}, "'abc'"),
        ({"-1": 1}, "'-1'"),
        ({"1.5": 1}, "'1.5'"),
        ({"": 1}, "''"),
        ({"9" * 5000: 1}, "'9999"),
        ({"\u0663": 1}, "\u0663"),
        ({-1: 1}, "-1"),
        ({5: 101}, "101"),
        ({5: -100.5}, "-100.5"),
        ({"5": math.nan}, "nan"),
        ({5: math.inf}, "inf"),
        ({5: 1, "5": 2}, "5"),
        ({i: 0 for i in range(MAX_LOGIT_BIASES + 1)}, str(MAX_LOGIT_BIASES)),
    ],
    ids=lambda value: ascii(value)[:20],
)
def test_b26_a_bad_key_or_value_of_logit_bias_is_named(logit_bias: Any, named: str) -> None:
    with pytest.raises(ValueError, match=r"^logit_bias") as refusal:
        SamplingParams(logit_bias=logit_bias)
    assert named in str(refusal.value)


@pytest.mark.parametrize("logit_bias", [{5: "1"}, {5: True}, {True: 1}, {1.0: 1}, {None: 1}, [5], "5"], ids=repr)
def test_b26_a_key_or_value_of_another_type_is_refused(logit_bias: Any) -> None:
    with pytest.raises(TypeError, match=r"^logit_bias"):
        SamplingParams(logit_bias=logit_bias)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"logit_bias": {"191222": 1.0}}, r"logit_bias: token id 191222 is not in the vocabulary, 0 \.\.\. 127"),
        ({"logit_bias": {128: 1.0}}, "logit_bias: token id 128 "),
        ({"stop_token_ids": [0, 128]}, "stop_token_ids: token id 128 "),
    ],
    ids=["logit_bias", "logit_bias at the size", "stop_token_ids"],
)
def test_b26_ids_outside_the_vocabulary(params: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**params).check_vocab(128)
    SamplingParams(logit_bias={127: 1.0, 0: -1.0}, stop_token_ids=[127, 0]).check_vocab(128)


def test_min_tokens_may_not_exceed_max_tokens() -> None:
    assert SamplingParams(min_tokens=5, max_tokens=5).min_tokens == 5
    assert SamplingParams(min_tokens=500, max_tokens=None).max_tokens is None
    with pytest.raises(ValueError, match="min_tokens must be at most max_tokens, got 6 > 5"):
        SamplingParams(min_tokens=6, max_tokens=5)


def test_params_are_immutable_comparable_and_travel() -> None:
    params = SamplingParams(temperature=0.5, stop=["a"], logit_bias={"3": 1.0})  # type: ignore[dict-item]
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 0.0  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(params)) == params
    assert dataclasses.replace(params, temperature=0.0).greedy
    with pytest.raises(ValueError, match="top_p"):
        dataclasses.replace(params, top_p=2.0)
