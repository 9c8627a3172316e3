"""Code that users bring along and that fails: it ends its own request; a hook, which is everybody's, ends the step."""

import itertools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato import LLM, EngineConfig, HookError, HookRow, NotEnoughMemoryError, RequestError, SamplingParams

MODES = ["off", "whole", "piecewise"]
PROMPTS = ["first", "second one", "third", "4"]
LONG: dict[str, Any] = {"temperature": 0.8, "seed": 3, "max_tokens": 7, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm_of(chat_model: Path) -> Callable[[str], LLM]:
    made: dict[str, LLM] = {}

    def get(graphs: str) -> LLM:
        if graphs not in made:
            config = EngineConfig(max_num_seqs=3, block_size=16, graphs=graphs, capture_sizes=(3,))  # type: ignore[arg-type]
            made[graphs] = LLM(chat_model, device="cpu", config=config)
        return made[graphs]

    return get


def fails_at(number: int, error: BaseException) -> Callable[[Sequence[int], Sequence[int], Tensor], None]:
    """A logits processor that spoils its row and fails for output token `number`."""

    def picky(prompt_ids: Sequence[int], output_ids: Sequence[int], logits: Tensor) -> None:
        if len(output_ids) == number:
            logits.fill_(torch.nan)
            raise error

    return picky


def assert_drained(llm: LLM) -> None:
    scheduler = llm._engine._scheduler
    assert not scheduler.has_work
    assert scheduler._allocator.num_free == llm._engine.kv_plan.num_usable_blocks


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [output.token_ids for request in outputs for output in request.outputs]


@pytest.mark.parametrize("graphs", MODES)
@pytest.mark.parametrize("at", [0, 3])
def test_a_failing_processor_ends_its_own_request(
    llm_of: Callable[[str], LLM], graphs: str, at: int, caplog: pytest.LogCaptureFixture
) -> None:
    """At its prompt and while it decodes. The others have the tokens that they have without it; no block is lost."""
    llm = llm_of(graphs)
    plain = SamplingParams(**LONG)
    alone = tokens(llm.generate(PROMPTS, plain))
    error = KeyError("of the user")
    bad = SamplingParams(**LONG, logits_processors=[fails_at(at, error)])
    with caplog.at_level(logging.ERROR, "ostinato"):
        results = llm.generate(PROMPTS, [plain, bad, plain, plain])
    [failed] = results[1].outputs
    assert failed.finish_reason == "error"
    assert failed.token_ids == alone[1][:at]
    assert isinstance(failed.error, RequestError)
    message = f"the logits processor picky, for output token {at}, raised KeyError: 'of the user'"
    assert str(failed.error) == message
    assert failed.error.__cause__ is error
    assert caplog.messages == [f"prompt 1, sample 0: {message}"]
    assert results[1].metrics.time_to_first_token >= 0
    others = results[:1] + results[2:]
    assert tokens(others) == [alone[0], *alone[2:]]
    assert all(output.error is None and output.finish_reason == "length" for r in others for output in r.outputs)
    assert_drained(llm)
    assert tokens(llm.generate(PROMPTS, plain)) == alone


def test_an_error_of_a_prompt_given_alone_is_raised(llm_of: Callable[[str], LLM]) -> None:
    """There is no other output that would be lost with it."""
    llm = llm_of("off")
    bad = SamplingParams(**LONG, allowed_token_ids=lambda prompt_ids, output_ids: [5] if len(output_ids) < 2 else 1 / 0)
    for prompt in ("alone", [5, 6, 7]):
        with pytest.raises(RequestError, match=r"^allowed_token_ids, for output token 2, raised ZeroDivisionError"):
            llm.generate(prompt, bad)
    with pytest.raises(RequestError):
        llm.chat([{"role": "user", "content": "hello"}], bad)
    assert_drained(llm)


@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_raises_after_its_last_delta(llm_of: Callable[[str], LLM], n: int) -> None:
    """A stream beside it goes on."""
    llm = llm_of("piecewise")
    alone = [token for delta in llm.stream("kept", SamplingParams(**LONG)) for token in delta.token_ids]
    kept, read = llm.stream("kept", SamplingParams(**LONG)), []
    failing = llm.stream("fails", SamplingParams(**LONG, n=n, logits_processors=[fails_at(2, ValueError("no"))]))
    read += next(kept).token_ids
    deltas = list(itertools.islice(failing, 3 * n))
    with pytest.raises(RequestError, match=r"raised ValueError: no$"):
        next(failing)
    assert sum(len(delta.token_ids) for delta in deltas) == 2 * n
    assert (deltas[-1].finish_reason, deltas[-1].token_ids) == ("error", [])
    read += [token for delta in kept for token in delta.token_ids]
    assert read == alone
    assert_drained(llm)


def test_a_tokenizer_that_fails_ends_its_own_request(
    llm_of: Callable[[str], LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = llm_of("off")
    good, bad = [SamplingParams(temperature=0.0, max_tokens=4, allowed_token_ids=[token]) for token in (40, 41)]
    llm._engine._token_texts.clear()
    decode = llm.tokenizer.decode  # type: ignore[union-attr]

    def picky(ids: Sequence[int], **options: Any) -> str:
        if 41 in ids:
            raise UnicodeError("no text for 41")
        return decode(ids, **options)

    with monkeypatch.context() as patched:
        patched.setattr(llm.tokenizer, "decode", picky)
        first, second = (result.outputs[0] for result in llm.generate(["a", "b"], [good, bad]))
    assert (first.token_ids, first.finish_reason) == ([40] * 4, "length")
    assert (second.token_ids, second.finish_reason) == ([], "error")
    assert str(second.error) == "the tokenizer, for output token 41, raised UnicodeError: no text for 41"
    assert_drained(llm)


def test_processors_cannot_change_what_the_engine_remembers(llm_of: Callable[[str], LLM]) -> None:
    seen: list[tuple[Any, Any]] = []

    def meddling(prompt_ids: Any, output_ids: Any, logits: Tensor) -> None:
        seen.append((prompt_ids, output_ids))
        for ids in (prompt_ids, output_ids):
            with pytest.raises((AttributeError, TypeError)):
                ids.append(5)

    prompt = [5, 6, 7]
    [result] = llm_of("off").generate([prompt], SamplingParams(**LONG, logits_processors=[meddling]))
    assert result.prompt_token_ids == prompt
    assert seen == [((5, 6, 7), tuple(result.outputs[0].token_ids[:number])) for number in range(7)]


@pytest.mark.parametrize("graphs", MODES)
@pytest.mark.parametrize("stage", ["prompt", "decode", "where"])
def test_a_failing_hook_ends_the_step_with_its_name(llm_of: Callable[[str], LLM], graphs: str, stage: str) -> None:
    """Those under way end, the stream of another reader by an error that names the hook; the engine serves on."""
    llm = llm_of(graphs)
    plain = SamplingParams(**LONG)
    alone = tokens(llm.generate(PROMPTS, plain))
    other = llm.stream("other", plain)
    next(other)

    def check(row: HookRow) -> bool:
        if (stage == "prompt") == (not row.output_ids):
            raise IndexError("of the hook")
        return True

    def steer(hidden: Tensor, rows: Sequence[HookRow]) -> None:
        if stage != "where":
            check(rows[0])

    handle = llm.hook(1, steer, where=check if stage == "where" else None)
    message = r"the hook steer at layer 1 raised IndexError: of the hook$"
    with pytest.raises(HookError, match=message) as caught:
        llm.generate(PROMPTS, plain)
    assert isinstance(caught.value.__cause__, IndexError)
    assert next(other).finish_reason == "error"
    with pytest.raises(RequestError, match=message):
        next(other)
    assert_drained(llm)
    handle.remove()
    assert tokens(llm.generate(PROMPTS, plain)) == alone
    assert llm.graph_report().missing == ()


@pytest.mark.parametrize("graphs", MODES)
def test_ctrl_c_in_a_processor_is_ctrl_c(llm_of: Callable[[str], LLM], graphs: str) -> None:
    llm = llm_of(graphs)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, SamplingParams(**LONG, logits_processors=[fails_at(2, KeyboardInterrupt())]))
    assert_drained(llm)


def test_the_engine_cannot_be_called_out_of_its_own_step(llm_of: Callable[[str], LLM]) -> None:
    """And a stream that is dropped there ends when the step does."""
    llm = llm_of("off")
    dropped = [llm.stream("dropped", SamplingParams(**LONG))]
    next(dropped[0])

    def nested(prompt_ids: Sequence[int], output_ids: Sequence[int], logits: Tensor) -> None:
        dropped.clear()
        llm.generate("inner", SamplingParams(**LONG))

    with pytest.raises(RequestError, match="cannot generate out of its own step"):
        llm.generate("outer", SamplingParams(**LONG, logits_processors=[nested]))
    assert_drained(llm)


def test_min_tokens_needs_an_allowed_token_that_ends_nothing(llm_of: Callable[[str], LLM]) -> None:
    """A list that cannot work is refused; a function that leaves only end ids fails its own request, there."""
    llm = llm_of("off")
    [eos] = llm.eos_token_ids
    with pytest.raises(ValueError, match=rf"min_tokens 2 holds off every token of allowed_token_ids \[{eos}, 50\]"):
        llm.generate("a", SamplingParams(min_tokens=2, allowed_token_ids=[eos, 50], stop_token_ids=[50]))
    ends = SamplingParams(min_tokens=2, allowed_token_ids=lambda prompt, output: [eos] if output else [40])
    with pytest.raises(RequestError, match="for output token 1, raised ValueError: min_tokens 2 holds off every token"):
        llm.generate("a", ends)
    served = [
        SamplingParams(temperature=0.0, max_tokens=4, min_tokens=2, allowed_token_ids=[eos, 40], logit_bias={eos: 50}),
        SamplingParams(max_tokens=4, min_tokens=2, allowed_token_ids=[eos], ignore_eos=True),
        SamplingParams(max_tokens=4, allowed_token_ids=[eos]),
    ]
    assert tokens(llm.generate(["a", "b", "c"], served)) == [[40, 40, eos], [eos] * 4, [eos]]


OUT = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.\nmore lines")
HOST = RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory: you tried to ...")


@pytest.mark.parametrize("error", [OUT, HOST, MemoryError()], ids=["device", "host", "python"])
@pytest.mark.parametrize(
    ("where", "message"),
    [
        (
            "ostinato.llm.load_model",
            r"not enough memory for \d+ bytes of weights \(\d+ parameters in float32\) on cpu: ",
        ),
        (
            "ostinato.runtime.engine_parts.KVCache.allocate",
            r"KV cache of 107520 bytes \(42 blocks of 16 .*--max-model-len",
        ),
        (
            "ostinato.runtime.engine_parts.Sampler",
            r"rows, buffers and graphs of 4 sequences on cpu: lower max_num_seqs",
        ),
    ],
    ids=["weights", "cache", "rest"],
)
def test_memory_that_runs_out_says_for_what(
    chat_model: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, where: str, message: str
) -> None:
    def full(*args: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(where, full)
    with pytest.raises(NotEnoughMemoryError, match=message) as caught:
        LLM(chat_model, device="cpu", config=EngineConfig(max_num_seqs=4, block_size=16))
    assert caught.value.__cause__ is error
    assert "\n" not in str(caught.value)
