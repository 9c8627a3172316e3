"""The class LLM: what it takes, what it gives, and that neither batch nor streaming changes a token."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ostinato import LLM, CompletionOutput, EngineConfig, RequestOutput, SamplingParams
from ostinato.model import ModelConfig, RotaryConfig

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
SEEDED = SamplingParams(temperature=0.8, max_tokens=8, seed=42)
EOS = 1


@pytest.fixture(scope="module")
def llm(chat_model: Path) -> LLM:
    return LLM(chat_model, device="cpu", config=EngineConfig(max_num_seqs=4, block_size=16))


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.token_ids for request in outputs for output in request.outputs]


def streamed(llm: LLM, prompt: str | list[int], params: SamplingParams) -> list[tuple[str, list[int], str | None]]:
    """Text, token ids and finish reason of each sample, put together from a stream."""
    samples: list[tuple[str, list[int], str | None]] = [("", [], None)] * params.n
    for delta in llm.stream(prompt, params):
        text, ids, reason = samples[delta.index]
        assert reason is None, "nothing comes after a finish reason"
        assert delta.token_ids, "a delta brings tokens"
        samples[delta.index] = (text + delta.text, ids + delta.token_ids, delta.finish_reason)
    return samples


def generated(llm: LLM, prompt: str | list[int], params: SamplingParams) -> list[tuple[str, list[int], str | None]]:
    [request] = llm.generate(prompt, params)
    return [(output.text, output.token_ids, output.finish_reason) for output in request.outputs]


def test_forms_of_a_prompt(llm: LLM) -> None:
    """A text is its ids, alone or in a list, and a list keeps its order."""
    assert llm.tokenizer is not None
    ids = {text: llm.tokenizer.encode(text) for text in ("first", "second one")}
    alone = {text: tokens(llm.generate(text, GREEDY)) for text in ids}
    for text in ids:
        of_numpy = [np.int64(token_id) for token_id in ids[text]]
        forms: list[Any] = [ids[text], tuple(ids[text]), of_numpy, [text], [ids[text]]]
        for prompt in forms:
            results = llm.generate(prompt, GREEDY)
            assert tokens(results) == alone[text]
            assert {type(token_id) for token_id in results[0].prompt_token_ids} == {int}
    results = llm.generate(["first", ids["second one"], "first"], GREEDY)
    assert tokens(results) == alone["first"] + alone["second one"] + alone["first"]
    assert [result.prompt for result in results] == ["first", None, "first"]
    assert [result.prompt_token_ids for result in results] == [ids["first"], ids["second one"], ids["first"]]
    assert llm.generate([], GREEDY) == []


def test_params_for_each_prompt(llm: LLM) -> None:
    params = [GREEDY, SEEDED, SamplingParams(temperature=0.0, max_tokens=3)]
    together = llm.generate(["a", "b", "c"], params)
    assert tokens(together) == [tokens(llm.generate(*pair))[0] for pair in zip("abc", params, strict=True)]
    with pytest.raises(ValueError, match=r"prompts and SamplingParams .* 2 and 3"):
        llm.generate(["a", "b"], params)


def test_defaults_are_those_of_sampling_params(llm: LLM) -> None:
    [result] = llm.generate("a")
    assert SamplingParams().max_tokens == 16
    assert len(result.outputs[0].token_ids) <= 16


@pytest.mark.parametrize(
    "params",
    [
        pytest.param(GREEDY, id="greedy"),
        pytest.param(SEEDED, id="seeded"),
        pytest.param(SamplingParams(seed=1, max_tokens=40), id="long"),
        pytest.param(SamplingParams(seed=1, max_tokens=10, n=6), id="more-samples-than-rows"),
        pytest.param(SamplingParams(seed=3, max_tokens=40, stop=["e", "d\n"]), id="stop-strings"),
        pytest.param(SamplingParams(seed=3, max_tokens=40, stop="[", include_stop_str_in_output=True), id="shown-stop"),
        pytest.param(SamplingParams(seed=3, max_tokens=40, stop_token_ids=[60]), id="stop-id"),
        pytest.param(SamplingParams(seed=3, max_tokens=9, logit_bias={EOS: 5.0}, n=4), id="eos"),
        pytest.param(SamplingParams(seed=3, max_tokens=9, skip_special_tokens=False, ignore_eos=True), id="specials"),
        pytest.param(SamplingParams(temperature=0.0, logit_bias={100: 100.0}, max_tokens=5), id="broken-character"),
        pytest.param(SamplingParams(seed=3, max_tokens=20, frequency_penalty=1.0, top_k=20, top_p=0.9), id="penalty"),
        pytest.param(SamplingParams(seed=3, max_tokens=None), id="until-the-context-is-full"),
    ],
)
def test_stream_gives_what_generate_gives(llm: LLM, params: SamplingParams) -> None:
    """B15, B19: text, tokens and finish reason, whatever is held back on the way."""
    assert streamed(llm, "Hello", params) == generated(llm, "Hello", params)


@pytest.mark.parametrize("order", ["in-turns", "one-after-the-other", "second-first"])
def test_two_streams(llm: LLM, order: str) -> None:
    """Each gives what it gives alone, even where the reading of the other has already computed all of it."""
    prompts = ("one", "two prompts")
    alone = [streamed(llm, prompt, SEEDED)[0][1] for prompt in prompts]
    streams = [llm.stream(prompt, SEEDED) for prompt in prompts]
    read: list[list[int]] = [list(next(stream).token_ids) for stream in streams]
    if order == "in-turns":
        for _ in range(SEEDED.max_tokens or 0):
            for ids, stream in zip(read, streams, strict=True):
                delta = next(stream, None)
                ids += delta.token_ids if delta is not None else []
    for index in (1, 0) if order == "second-first" else (0, 1):
        for delta in streams[index]:
            read[index] += delta.token_ids
    assert read == alone


def test_n_samples(llm: LLM) -> None:
    """B22: different random streams that repeat, each one the same whatever n is."""
    four = tokens(llm.generate("a", SamplingParams(seed=7, max_tokens=8, n=4)))
    assert len({tuple(ids) for ids in four}) == 4
    assert tokens(llm.generate("a", SamplingParams(seed=7, max_tokens=8, n=4))) == four
    assert tokens(llm.generate("a", SamplingParams(seed=7, max_tokens=8, n=2))) == four[:2]
    assert [output.index for output in llm.generate("a", SamplingParams(n=3))[0].outputs] == [0, 1, 2]


@pytest.mark.parametrize("seed", [0, 42, 2**63, 2**64 - 1])
def test_a_seed_does_not_depend_on_the_neighbours(llm: LLM, seed: int) -> None:
    """B22: alone, beside unseeded and greedy rows, in any place, admitted late, and streamed."""
    params = SamplingParams(temperature=0.8, max_tokens=8, seed=seed)
    state = torch.get_rng_state()
    [alone] = tokens(llm.generate("mine", params))
    others = [SamplingParams(max_tokens=5), GREEDY, SamplingParams(seed=1, max_tokens=12), SamplingParams(top_k=3)]
    for place in (0, 2, 4):  # in place 4 it waits for one of the four rows
        prompts = [f"neighbour {index}" for index in range(len(others))]
        prompts.insert(place, "mine")
        each = [*others[:place], params, *others[place:]]
        assert tokens(llm.generate(prompts, each))[place] == alone
    other = llm.stream("neighbour", SamplingParams(max_tokens=60, ignore_eos=True))
    next(other)
    assert streamed(llm, "mine", params)[0][1] == alone
    other.close()
    assert torch.equal(torch.get_rng_state(), state), "torch's own generator is not touched"


def test_unseeded_requests_differ(llm: LLM) -> None:
    runs = tokens(llm.generate(["a"] * 4, SamplingParams(max_tokens=12, ignore_eos=True)))
    assert len({tuple(ids) for ids in runs}) == 4


@pytest.mark.parametrize("params", [GREEDY, SEEDED, SamplingParams(temperature=0.0, logit_bias={5: 100.0})],
                         ids=["greedy", "seeded", "biased"])  # fmt: skip
def test_logprobs(llm: LLM, params: SamplingParams) -> None:
    """They are the model's: the same for each way of drawing, and they sum to 1 over the vocabulary."""
    fields = {name: getattr(params, name) for name in ("temperature", "seed", "max_tokens", "logit_bias")}
    [request] = llm.generate("Hello", SamplingParams(**fields, logprobs=True, top_logprobs=5))
    [plain] = llm.generate("Hello", params)
    output = request.outputs[0]
    assert output.token_ids == plain.outputs[0].token_ids
    assert plain.outputs[0].logprobs is None
    assert output.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids)
    context = list(request.prompt_token_ids)
    for token_id, entry in zip(output.token_ids, output.logprobs, strict=True):
        values = [logprob for _, logprob in entry.top]
        assert len(values) == 5
        assert values == sorted(values, reverse=True)
        assert sum(map(math.exp, values)) <= 1 + 1e-6
        assert entry.logprob <= values[0]
        assert dict(entry.top).get(token_id, entry.logprob) == entry.logprob
        # The same token as the first one after its context. fp32 logits of size 10, computed in another batch shape.
        [again] = llm.generate(context, SamplingParams(temperature=0.0, max_tokens=1, logprobs=True, top_logprobs=5))
        assert again.outputs[0].logprobs is not None
        first = again.outputs[0].logprobs[0]
        assert [other for other, _ in first.top] == [other for other, _ in entry.top]
        assert [logprob for _, logprob in first.top] == pytest.approx(values, abs=1e-4)
        context.append(token_id)


def test_metrics(llm: LLM) -> None:
    [request] = llm.generate("Hello", SamplingParams(seed=1, n=3, max_tokens=6, ignore_eos=True))
    metrics = request.metrics
    assert (metrics.prompt_tokens, metrics.generated_tokens, metrics.num_samples) == (5, 18, 3)
    assert 0 < metrics.prefill_seconds <= metrics.time_to_first_token
    assert metrics.prompt_tokens_per_second == pytest.approx(5 / metrics.prefill_seconds)
    assert metrics.decode_tokens_per_second == pytest.approx(15 / metrics.decode_seconds)
    assert llm.generate("a", SamplingParams(max_tokens=1))[0].metrics.decode_tokens_per_second == 0


def test_chat(llm: LLM) -> None:
    """B18: the template's ids as they are, BOS where the template writes it and nowhere else."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert llm.tokenizer is not None
    expected = llm.tokenizer.encode("<s>system\nBe brief.</s>\n<s>user\nHi</s>\n<s>assistant\n", False)
    reply = llm.chat(messages, GREEDY)
    assert reply.prompt_token_ids == llm.encode_chat(messages) == expected
    assert reply.outputs == llm.generate(expected, GREEDY)[0].outputs
    with pytest.raises(ValueError, match="messages"):
        llm.chat([], GREEDY)


def test_chat_without_template_or_tokenizer(write_chat_model: Callable[..., Path], tmp_path: Path) -> None:
    message = [{"role": "user", "content": "Hi"}]
    plain = LLM(write_chat_model(tmp_path / "plain", chat_template=False))
    with pytest.raises(ValueError, match="no chat template"):
        plain.chat(message)
    bare = LLM(write_chat_model(tmp_path / "bare", tokenizer=False))
    with pytest.raises(ValueError, match="no chat template"):
        bare.chat(message)
    with pytest.raises(ValueError, match="no tokenizer: give the prompt as token ids"):
        bare.generate("text")
    with pytest.raises(ValueError, match=r"stop strings need a tokenizer.*'x'"):
        bare.generate([5], SamplingParams(stop="x"))
    output: CompletionOutput = bare.generate([5, 6], GREEDY)[0].outputs[0]
    assert (output.text, len(output.token_ids)) == ("", 8)


@pytest.mark.parametrize("load_as", ["auto", "float32", torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("keys", "norms", "weights", "expected"),
    [
        pytest.param({"dtype": "float16"}, torch.float16, torch.float16, torch.float16, id="fp16"),
        pytest.param({"dtype": "bfloat16"}, torch.bfloat16, torch.bfloat16, torch.bfloat16, id="bf16"),
        pytest.param({"dtype": "float32"}, torch.float32, torch.float32, torch.float32, id="fp32"),
        pytest.param({"dtype": "bfloat16", "torch_dtype": "float16"}, torch.float32, torch.float32, torch.bfloat16,
                     id="dtype-beats-torch_dtype"),
        pytest.param({"dtype": ..., "torch_dtype": "float16"}, torch.float32, torch.float32, torch.float16,
                     id="torch_dtype"),
        pytest.param({"dtype": ...}, torch.float32, torch.float16, torch.float16, id="neither-and-fp32-norms"),
        pytest.param({"dtype": None}, torch.float32, torch.bfloat16, torch.bfloat16, id="null"),
    ],
)  # fmt: skip
def test_dtypes(
    write_chat_model: Callable[..., Path],
    tmp_path: Path,
    keys: dict[str, object],
    norms: torch.dtype,
    weights: torch.dtype,
    expected: torch.dtype,
    load_as: str | torch.dtype,
) -> None:
    """B13: one reported dtype, that of the config or the first tensor unless overridden, and finite logits on a CPU."""
    llm = LLM(write_chat_model(tmp_path / "model", dtypes=(norms, weights), **keys), device="cpu", dtype=load_as)
    asked = {"auto": expected, "float32": torch.float32}.get(str(load_as), load_as)
    assert llm.load_report is not None
    assert llm.dtype == llm.load_report.dtype == asked
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=True, top_logprobs=20)
    logprobs = llm.generate("Hello", params)[0].outputs[0].logprobs
    assert logprobs is not None
    assert all(math.isfinite(value) for entry in logprobs for _, value in entry.top)


TINY = ModelConfig("llama", 50, 16, 24, 1, 2, 1, 8, 1e-5, RotaryConfig("default", 1e4, 8), 64, eos_token_ids=(3,))


def test_dummy_weights() -> None:
    """Seeded, of a config or a named shape, without a tokenizer."""
    first, again, other = (LLM(TINY, load_format="dummy", device="cpu", seed=seed) for seed in (0, 0, 1))
    assert (first.dtype, first.tokenizer, first.load_report) == (torch.float32, None, None)
    assert first.eos_token_ids == {3}
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    assert tokens(first.generate([[1, 2]], params)) == tokens(again.generate([[1, 2]], params))
    assert tokens(first.generate([[1, 2]], params)) != tokens(other.generate([[1, 2]], params))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param({"device": "tpu"}, "'tpu'.*supported: cpu, cuda", id="no-such-device"),
        pytest.param({"device": "meta"}, "'meta'.*supported: cpu, cuda", id="meta"),
        pytest.param({"device": "cuda:99"}, "'cuda:99'", id="cuda-not-there"),
        pytest.param({"dtype": "float64"}, "float64.*float32, float16, bfloat16", id="dtype-name"),
        pytest.param({"dtype": torch.int8}, "int8.*float32, float16, bfloat16", id="dtype"),
        pytest.param({"load_format": "pickle"}, "'pickle'", id="load-format"),
        pytest.param({"load_format": "auto"}, 'load_format="dummy"', id="config-without-weights"),
        pytest.param({"model": "gpt-5"}, "'gpt-5'.*llama-3.2-1b", id="no-such-shape"),
        pytest.param({"revision": "main"}, "'main'", id="revision-of-a-shape"),
        pytest.param({"config": EngineConfig(max_model_len=65)}, "65.*64", id="longer-than-the-model"),
        pytest.param({"config": EngineConfig(kv_cache_memory_bytes=100)}, "100 bytes", id="cache-of-no-block"),
    ],
)
def test_what_cannot_be_made(arguments: dict[str, object], message: str) -> None:
    """B51: one sentence with the value and the limit."""
    with pytest.raises(ValueError, match=message) as caught:
        LLM(**{"model": TINY, "load_format": "dummy", "device": "cpu", **arguments})  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_what_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere"):
        LLM(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"]}))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ValueError, match="GPT2LMHeadModel"):
        LLM(tmp_path)
