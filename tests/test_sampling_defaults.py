"""Sampling defaults of a checkpoint: request, then generation_config.json, then built-in; reported, and switchable."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ostinato import LLM, EngineConfig, SamplingParams
from ostinato.sampling_defaults import FIELDS, NEUTRAL, SamplingDefaults
from ostinato.weights import CheckpointError

Cli = Callable[..., Any]
FILE = {
    "do_sample": True,
    "temperature": 0.7,
    "top_k": 20,
    "top_p": 0.8,
    "repetition_penalty": 1.05,
    "max_new_tokens": 9,
    "eos_token_id": [1],
    "pad_token_id": 0,
    "transformers_version": "5.0.0",
}
READ = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05, "max_tokens": 9}


@pytest.fixture(scope="module")
def model(write_chat_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("models") / "defaults", generation_config=FILE)


def load(model: Path, **options: Any) -> LLM:
    return LLM(model, device="cpu", config=EngineConfig(max_num_seqs=2, block_size=16), **options)


def read(**keys: Any) -> SamplingDefaults:
    return SamplingDefaults.from_config(keys, Path("m/generation_config.json"))


def test_keys_that_are_read() -> None:
    assert read(**FILE) == SamplingDefaults(READ)
    assert read() == read(temperature=None, top_k=None, eos_token_id=2) == SamplingDefaults()
    assert read(temperature=0.5, min_p=0.1).values == {"temperature": 0.5, "min_p": 0.1}


@pytest.mark.parametrize(("keys", "temperature"), [
    ({"do_sample": False}, 0.0),
    ({"do_sample": False, "temperature": 0.7}, 0.0),
    ({"do_sample": True}, 1.0),
    ({"do_sample": None}, 1.0),
    ({"temperature": 0.7}, 0.7),
])  # fmt: skip
def test_do_sample(keys: dict[str, Any], temperature: float) -> None:
    """Choose: a file that says not to sample is greedy; one that is silent is read as vLLM reads it."""
    assert read(**keys).params({}).temperature == temperature


def test_each_field_is_the_requests_then_the_files_then_built_in() -> None:
    defaults = read(temperature=0.7, top_p=0.8)
    params = defaults.params({"top_p": 0.5, "seed": 3}, {"temperature": 0.1, "top_p": 0.1, "top_k": 7})
    assert params == SamplingParams(temperature=0.7, top_p=0.5, top_k=7, seed=3)


@pytest.mark.parametrize(("key", "value", "complaint"), [
    ("temperature", "hot", "temperature must be a number, got 'hot'"),
    ("temperature", -1, "temperature must be at least 0 .*, got -1"),
    ("temperature", math.nan, "temperature .* got nan"),
    ("temperature", math.inf, "temperature .* got inf"),
    ("temperature", True, "temperature must be a number, got True"),
    ("top_p", 1.5, r"top_p must be in 0 \.\.\. 1, got 1\.5"),
    ("top_k", 2.5, r"top_k must be an integer, got 2\.5"),
    ("top_k", -7, "top_k must be in -1 .*, got -7"),
    ("min_p", [0.1], r"min_p must be a number, got \[0\.1\]"),
    ("repetition_penalty", 0, "repetition_penalty must be in .* got 0"),
    ("max_new_tokens", 0, "max_tokens must be in 1 .* got 0"),
    ("max_new_tokens", 10**30, "max_tokens must be in 1 "),
    ("do_sample", "no", "do_sample must be true or false, not 'no'"),
])  # fmt: skip
def test_senseless_values(key: str, value: Any, complaint: str) -> None:
    with pytest.raises(CheckpointError, match=rf"^m/generation_config\.json: {complaint}"):
        read(**{key: value})


def test_keys_that_are_not_read_are_told_of() -> None:
    assert read(num_beams=4, stop_strings=["\n"], early_stopping=True).unused == ("num_beams", "stop_strings")
    for key, values in NEUTRAL.items():
        assert key not in FIELDS
        assert not any(read(**{key: value}).unused for value in (*values, None))
        assert read(**{key: "other"}).unused == (key,)


def test_the_defaults_of_transformers_are_neutral() -> None:
    """What an older transformers wrote out although it was the default."""
    older = {"num_beams": 1, "typical_p": 1.0, "no_repeat_ngram_size": 0, "min_length": 0, "suppress_tokens": None,
             "temperature": 1.0, "top_k": 50, "top_p": 1.0, "length_penalty": 1.0, "num_beam_groups": 1}  # fmt: skip
    assert read(**older) == SamplingDefaults({"temperature": 1.0, "top_k": 50, "top_p": 1.0})


def test_requests_of_an_llm(model: Path) -> None:
    """Parameters that are given are taken as they are, as in vLLM; none at all are the checkpoint's."""
    llm = load(model)
    assert llm.sampling_defaults.values == READ
    assert llm.sampling_params() == SamplingParams(**READ)
    assert llm.sampling_params(temperature=0.0, seed=1) == SamplingParams(**READ | {"temperature": 0.0, "seed": 1})
    seeded = llm.sampling_params(seed=5)
    [explicit] = llm.generate("Hello", SamplingParams(temperature=0.0))
    assert len(explicit.outputs[0].token_ids) == 16, "SamplingParams' own max_tokens, not the checkpoint's 9"
    [default] = llm.generate("Hello")
    assert len(default.outputs[0].token_ids) <= 9
    assert llm.generate("Hello", seeded)[0].outputs == llm.generate(["Hello"], [seeded])[0].outputs
    both = llm.generate(["Hello", "Hello"], [None, SamplingParams(temperature=0.0, max_tokens=12)])
    assert len(both[0].outputs[0].token_ids) <= 9
    assert sum(len(delta.token_ids) for delta in llm.stream("Hello")) <= 9


def test_a_default_length_fits_the_context(model: Path) -> None:
    """A prompt that leaves less than the checkpoint's max_new_tokens is no mistake of the user's."""
    llm = load(model)
    prompt = [5] * (llm.max_model_len - 4)
    [result] = llm.generate(prompt)
    assert 1 <= len(result.outputs[0].token_ids) <= 4
    with pytest.raises(ValueError, match="exceed the context"):
        llm.generate(prompt, llm.sampling_params())


@pytest.mark.parametrize("choice", ["builtin", "vllm"])
def test_switched_off(model: Path, choice: str) -> None:
    """The sampling defaults go, the ids that end an output stay."""
    llm = load(model, generation_config=choice)
    assert llm.sampling_params() == SamplingParams()
    assert llm.eos_token_ids == load(model).eos_token_ids


def test_those_of_another_folder(model: Path, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.25}')
    for choice in (tmp_path, str(tmp_path), tmp_path / "generation_config.json"):
        assert load(model, generation_config=choice).sampling_params() == SamplingParams(temperature=0.25)
    with pytest.raises(CheckpointError, match="nowhere: cannot be read: No such file"):
        load(model, generation_config=tmp_path / "nowhere")


def test_a_checkpoint_without_the_file(chat_model: Path) -> None:
    assert load(chat_model).sampling_params() == SamplingParams()


def test_a_bad_file_stops_the_load(write_chat_model: Callable[..., Path], tmp_path: Path) -> None:
    model = write_chat_model(tmp_path / "m", generation_config={"top_p": 7})
    with pytest.raises(CheckpointError, match=r"m/generation_config\.json: top_p must be in 0 \.\.\. 1, got 7"):
        load(model)
    assert load(model, generation_config="builtin").sampling_params() == SamplingParams()


def test_command_line(cli: Cli, model: Path) -> None:
    """An option, then the file, then the command's own; and a note where the file has its say."""
    first = cli("generate", "-m", model, "Hello", "--seed", 3, "--json")
    given = ["--temperature", 0.7, "--top-k", 20, "--top-p", 0.8, "--repetition-penalty", 1.05, "--max-tokens", 9]
    second = cli("generate", "-m", model, "Hello", "--seed", 3, "--json", "--generation-config", "builtin", *given)
    assert first.json()["outputs"] == second.json()["outputs"]
    assert "sampling defaults of the generation config: temperature 0.7, top_k 20, top_p 0.8" in first.err
    assert "sampling defaults" not in second.err
    greedy = cli("generate", "-m", model, "Hello", "--json", "--generation-config", "vllm").json()["outputs"]
    assert greedy != first.json()["outputs"]
    assert greedy == cli("generate", "-m", model, "Hello", "--json", "-t", 0, "--top-k", 0, "--top-p", 1,
                         "--repetition-penalty", 1, "--generation-config", "builtin").json()["outputs"]  # fmt: skip


def test_chat_of_the_command_line(cli: Cli, model: Path) -> None:
    given = ["--temperature", 0.7, "--top-k", 20, "--top-p", 0.8, "--repetition-penalty", 1.05, "--max-tokens", 9]
    first = cli("chat", "-m", model, "--seed", 3, stdin=b"Hi\n")
    assert (first.code, "sampling defaults of the generation config" in first.err) == (0, True)
    second = cli("chat", "-m", model, "--seed", 3, "--generation-config", "vllm", *given, stdin=b"Hi\n")
    assert first.out == second.out


def test_inspect(cli: Cli, model: Path, chat_model: Path, tmp_path: Path) -> None:
    assert cli("inspect", model, "--json").json()["sampling_defaults"] == READ
    assert (
        "sampling     temperature 0.7, top_k 20, top_p 0.8, repetition_penalty 1.05, max_tokens 9\n"
        in cli("inspect", model).out
    )
    assert "sampling     none\n" in cli("inspect", chat_model).out
    for file in model.iterdir():
        if file.suffix == ".json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps({"num_beams": 4}))
    assert "sampling     none; not used: num_beams\n" in cli("inspect", tmp_path).out
