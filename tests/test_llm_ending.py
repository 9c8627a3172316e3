"""What ends an output of LLM, and what it then says and shows."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ostinato import LLM, CompletionOutput, SamplingParams

EOS = 1  # of the tokenizer
CONFIG_EOS, GENERATION_EOS = 10, 20  # of config.json and generation_config.json
LETTER = 70  # ends nothing


@pytest.fixture(scope="module")
def llm(write_chat_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """Ends at 1, 10 and 20."""
    path = tmp_path_factory.mktemp("models") / "three-ends"
    return LLM(write_chat_model(path, eos_token_id=CONFIG_EOS, generation_config={"eos_token_id": GENERATION_EOS}))


def always(token_id: int, **changes: Any) -> SamplingParams:
    """Params under which the model prefers one token for ever; where that is banned, LETTER."""
    return SamplingParams(temperature=0.0, logit_bias={token_id: 100.0, LETTER: 50.0}, **{"max_tokens": 5, **changes})


def complete(llm: LLM, params: SamplingParams, prompt: str = "a longer prompt than min_tokens") -> CompletionOutput:
    return llm.generate(prompt, params)[0].outputs[0]


def end_of(output: CompletionOutput) -> tuple[int, str, int | str | None]:
    return len(output.token_ids), output.finish_reason, output.stop_reason


FORMS: dict[str, Callable[[list[int]], object]] = {
    "absent": lambda ids: ...,
    "null": lambda ids: None,
    "int": lambda ids: ids[0],
    "list": lambda ids: ids,
    "empty-list": lambda ids: [],
}


@pytest.mark.parametrize("in_generation_config", [*FORMS, "no-file"])
@pytest.mark.parametrize("in_config", FORMS)
def test_end_ids_of_all_sources(
    write_chat_model: Callable[..., Path], tmp_path: Path, in_config: str, in_generation_config: str
) -> None:
    """B11: the union of config, generation config and tokenizer, in every shape that JSON files have them."""
    config_value = FORMS[in_config]([10, 11, 12])
    generation_config = None
    if in_generation_config != "no-file":
        value = FORMS[in_generation_config]([20, 21])
        generation_config = {} if value is ... else {"eos_token_id": value}
    named = {"int": 1, "list": 3}.get(in_config, 0), {"int": 1, "list": 2}.get(in_generation_config, 0)
    expected = {EOS, *[10, 11, 12][: named[0]], *[20, 21][: named[1]]}
    llm = LLM(write_chat_model(tmp_path / "m", eos_token_id=config_value, generation_config=generation_config))
    assert llm.eos_token_ids == expected
    for token_id in expected:
        output = complete(llm, always(token_id))
        assert (output.token_ids, output.text) == ([token_id], "")
        assert end_of(output) == (1, "stop", None)
    assert end_of(complete(llm, always(13))) == (5, "length", None)


@pytest.mark.parametrize("value", ["2", 2.0, [1, "2"], True, -1, {"id": 2}], ids=repr)
def test_end_ids_that_are_none(write_chat_model: Callable[..., Path], tmp_path: Path, value: object) -> None:
    with pytest.raises(ValueError, match="eos_token_id"):
        LLM(write_chat_model(tmp_path / "m", generation_config={"eos_token_id": value}))


def test_end_ids_beyond_the_vocabulary(write_chat_model: Callable[..., Path], tmp_path: Path) -> None:
    """They cannot come up, so they are no reason to fail, not even where end ids are banned."""
    llm = LLM(write_chat_model(tmp_path / "m", eos_token_id=[10, 5000], generation_config={"eos_token_id": 104}))
    assert llm.eos_token_ids == {EOS, 10}
    assert end_of(complete(llm, always(10, min_tokens=3))) == (4, "stop", None)


@pytest.mark.parametrize("token_id", [EOS, CONFIG_EOS, GENERATION_EOS])
class TestEndIds:
    """B28, for each of the end ids."""

    def test_ignored(self, llm: LLM, token_id: int) -> None:
        output = complete(llm, always(token_id, ignore_eos=True))
        assert output.token_ids == [token_id] * 5
        assert end_of(output) == (5, "length", None)

    def test_explicit_while_ignored(self, llm: LLM, token_id: int) -> None:
        output = complete(llm, always(token_id, ignore_eos=True, stop_token_ids=[50, token_id]))
        assert end_of(output) == (1, "stop", token_id)
        assert output.text == ""

    def test_not_before_min_tokens(self, llm: LLM, token_id: int) -> None:
        """Counted in generated tokens; the end id is then the next one."""
        output = complete(llm, always(token_id, min_tokens=3))
        assert output.token_ids == [LETTER] * 3 + [token_id]
        assert end_of(output) == (4, "stop", None)

    def test_min_tokens_is_max_tokens(self, llm: LLM, token_id: int) -> None:
        assert end_of(complete(llm, always(token_id, min_tokens=5))) == (5, "length", None)

    def test_min_tokens_while_ignored(self, llm: LLM, token_id: int) -> None:
        assert complete(llm, always(token_id, min_tokens=3, ignore_eos=True)).token_ids == [token_id] * 5

    def test_on_the_last_token(self, llm: LLM, token_id: int) -> None:
        """B54: the end id decides, not the limit."""
        assert end_of(complete(llm, always(token_id, max_tokens=1))) == (1, "stop", None)
        assert end_of(complete(llm, always(token_id, min_tokens=4))) == (5, "stop", None)


def test_stop_ids_with_min_tokens(llm: LLM) -> None:
    """B28: a stop id is banned as an end id is."""
    output = complete(llm, always(40, stop_token_ids=[40], min_tokens=2, ignore_eos=True))
    assert output.token_ids == [LETTER, LETTER, 40]
    assert end_of(output) == (3, "stop", 40)


def test_only_ends_are_banned(llm: LLM) -> None:
    """B28: no placeholder id masks the last of the vocabulary, nor any other."""
    last = llm.model_config.vocab_size - 1
    for token_id in (0, 2, last):
        assert complete(llm, always(token_id, min_tokens=5, stop_token_ids=[50])).token_ids == [token_id] * 5


@pytest.mark.parametrize(("min_tokens", "expected"), [(0, 2), (2, 2), (3, 3), (4, 4)])
def test_stop_string_with_min_tokens(llm: LLM, min_tokens: int, expected: int) -> None:
    """B28: "AA" could match at token 2; under min_tokens it matches where it is allowed to end first."""
    output = complete(llm, always(36, stop="AA", min_tokens=min_tokens))
    assert end_of(output) == (expected, "stop", "AA")
    assert output.text == "A" * (expected - 2)


@pytest.mark.parametrize("shown", [False, True], ids=["cut", "shown"])
def test_stop_string(llm: LLM, shown: bool) -> None:
    """The text ends before or after the string, wherever it lies; of several strings the first one found wins."""
    params = SamplingParams(temperature=0.9, seed=5, max_tokens=40, ignore_eos=True)
    whole = complete(llm, params)
    for start, length in itertools.product((0, 7, 20), (1, 3)):
        stop = whole.text[start : start + length]
        found = whole.text.index(stop)
        fields: dict[str, Any] = {"temperature": 0.9, "seed": 5, "max_tokens": 40, "ignore_eos": True}
        output = complete(llm, SamplingParams(**fields, stop=["never", stop], include_stop_str_in_output=shown))
        assert output.text == whole.text[: found + (length if shown else 0)]
        assert output.token_ids == whole.token_ids[: len(output.token_ids)]
        assert end_of(output)[1:] == ("stop", stop)


def test_length(llm: LLM) -> None:
    for max_tokens in (1, 2, 5):
        assert end_of(complete(llm, always(LETTER, max_tokens=max_tokens))) == (max_tokens, "length", None)
    output = complete(llm, always(LETTER, max_tokens=None), prompt="abc")
    assert end_of(output) == (llm.max_model_len - 3, "length", None)
