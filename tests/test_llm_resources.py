"""Requests of LLM leave nothing behind, whatever becomes of them; what cannot be served is refused at once, alone."""

from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from ostinato import LLM, EngineConfig, RequestError, SamplingParams, StreamDelta

EOS = 1
BLOCK = 16
ENDLESS = SamplingParams(seed=4, max_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(chat_model: Path) -> LLM:
    config = EngineConfig(max_num_seqs=3, block_size=BLOCK, max_num_batched_tokens=32)
    return LLM(chat_model, device="cpu", config=config)


def num_free(llm: LLM) -> int:
    return llm._engine._scheduler._allocator.num_free


def assert_drained(llm: LLM) -> None:
    scheduler = llm._engine._scheduler
    assert not scheduler.has_work
    assert num_free(llm) == llm._engine.kv_plan.num_usable_blocks


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("num_read", [0, 1, 7])
@pytest.mark.parametrize("how", ["close", "drop"])
def test_a_closed_stream_frees_everything(llm: LLM, num_read: int, n: int, how: str) -> None:
    """B52: before it began, in the middle, with samples that wait; closing again does no harm."""
    stream = llm.stream("some prompt", SamplingParams(seed=4, max_tokens=60, ignore_eos=True, n=n))
    for _ in range(num_read):
        next(stream)
    assert num_read == 0 or num_free(llm) < llm._engine.kv_plan.num_usable_blocks
    if how == "close":
        stream.close()
        stream.close()
    del stream
    assert_drained(llm)


def test_a_stream_closed_while_it_waits_or_is_read_in(llm: LLM) -> None:
    """B52: the streams beside it give the same tokens as without it."""
    alone = [delta.token_ids for delta in llm.stream("kept", ENDLESS)]
    kept = llm.stream("kept", ENDLESS)
    read = [next(kept).token_ids]
    crowd = [llm.stream("x" * 90, ENDLESS) for _ in range(4)]  # three chunks each, and more than there are rows
    for stream in crowd[:3]:
        # The step inside brings the kept stream forward too; only one delta is asked of each.
        next(stream)
    waiting = llm.stream("waits", SamplingParams(seed=4, max_tokens=60, n=3))
    started: Generator[StreamDelta] = crowd[3]
    for stream in (waiting, started, *crowd):
        stream.close()
    read += [delta.token_ids for delta in kept]
    assert [token_id for ids in read for token_id in ids] == [token_id for ids in alone for token_id in ids]
    assert_drained(llm)


def test_an_exception_in_the_middle_frees_everything(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C, say: the next request is served as if nothing had been."""
    before = llm.generate("next", ENDLESS)[0].outputs
    step, count = llm._engine.step, iter(range(100))

    def interrupted() -> None:
        if next(count) == 5:
            raise KeyboardInterrupt
        step()

    monkeypatch.setattr(llm._engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b", "c", "d"], ENDLESS)
    monkeypatch.undo()
    assert_drained(llm)
    assert llm.generate("next", ENDLESS)[0].outputs == before


@pytest.mark.parametrize(
    "error", [RuntimeError("no step"), KeyboardInterrupt()], ids=lambda error: type(error).__name__
)
def test_a_stream_that_anothers_failure_ends_says_so(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """Each of its samples has one last delta, without tokens and with a reason; a failure is raised after it."""
    bystander = llm.stream("kept", SamplingParams(seed=4, max_tokens=60, ignore_eos=True, n=2))
    next(bystander), next(bystander)

    def fail(batch: object, **more: object) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(llm._engine._runner, "run", fail)
        with pytest.raises(type(error)):
            llm.generate("another", ENDLESS)
    assert_drained(llm)
    if isinstance(error, KeyboardInterrupt):
        last = [(delta.index, delta.token_ids, delta.finish_reason) for delta in bystander]
        assert last == [(0, [], "abort"), (1, [], "abort")]
    else:
        assert [next(bystander), next(bystander)] == [StreamDelta(index, "", [], "error") for index in range(2)]
        with pytest.raises(RequestError, match="a step that this request was in raised RuntimeError: no step"):
            next(bystander)


@pytest.mark.parametrize("prompts", [None, 3, {"a": 1}, {1, 2}, iter(["a"])], ids=lambda value: type(value).__name__)
def test_what_is_no_list_of_prompts(llm: LLM, prompts: Any) -> None:
    with pytest.raises(TypeError, match="prompts must be a text, a list of token ids, or a list of either"):
        llm.generate(prompts)


BAD: dict[str, tuple[Any, Any, str]] = {
    "empty-text": ("", None, "empty"),
    "empty-ids": ([[]], None, "empty"),
    "negative-id": ([5, -1], None, "-1 .*103"),
    "id-beyond": ([5, 104], None, "104 .*103"),
    "float-id": ([5, 1.5], None, "1.5"),
    "bool-id": ([5, True], None, "True"),
    "number": ([5.0], None, "5.0"),
    "none": ([None], None, "None"),
    "bytes": ([b"text"], None, "b'text'"),
    "lone-surrogate": ("a\ud83d", None, "surrogate"),
    "prompt-is-the-context": ([5] * 160, None, "160 .*160"),
    "prompt-and-output": ([5] * 150, SamplingParams(max_tokens=11), "150 .*11 .*160"),
    "min-tokens": ([5] * 158, SamplingParams(max_tokens=None, min_tokens=3), "3 .*2 "),
    "stop-id-beyond": ("a", SamplingParams(stop_token_ids=[104]), "104 .*103"),
    "bias-beyond": ("a", SamplingParams(logit_bias={104: 1.0}), "104 .*103"),
    "params": ("a", {"temperature": 0}, "temperature"),
    "params-in-a-list": ("a", [{"temperature": 0}], "temperature"),
}


@pytest.mark.parametrize(("prompt", "params", "message"), BAD.values(), ids=BAD)
def test_a_bad_request_is_refused_before_anything_is_computed(
    llm: LLM, prompt: Any, params: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B53, B55, B56: alone, in a stream, and among good ones; the engine then serves the next one."""
    with monkeypatch.context() as patched:
        patched.setattr(llm._engine, "step", lambda: pytest.fail("something was computed"))
        with pytest.raises((ValueError, TypeError), match=message) as caught:
            llm.generate(prompt, params)
        assert "\n" not in str(caught.value)
        single = prompt[0] if isinstance(prompt, list) and not isinstance(prompt[0], int) else prompt
        if not isinstance(params, list):
            with pytest.raises((ValueError, TypeError), match=message):
                llm.stream(single, params)
            with pytest.raises((ValueError, TypeError), match=message):
                llm.generate(["good", single], [SamplingParams(), params])
        assert_drained(llm)
    assert len(llm.generate("next", ENDLESS)[0].outputs[0].token_ids) == 60


def test_the_longest_requests_that_fit(llm: LLM) -> None:
    """B33, B56: at the limit they are served."""
    for num_prompt, max_tokens in ((159, 1), (159, None), (100, 60), (1, 159)):
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        [result] = llm.generate([[5] * num_prompt], params)
        assert len(result.outputs[0].token_ids) == (max_tokens or 160 - num_prompt)
    assert_drained(llm)


@pytest.mark.parametrize("num_blocks", [1, 4])
def test_a_small_cache_lowers_the_limit(chat_model: Path, num_blocks: int) -> None:
    """B33: what can never fit is refused with both numbers; what fits is served, and what waits gets its turn."""
    bytes_per_token = 2 * 2 * 10 * 4  # K and V, 2 layers, 1 head of 10 elements, fp32
    cache = (num_blocks + 2) * BLOCK * bytes_per_token  # two blocks are reserved
    limit = num_blocks * BLOCK
    llm = LLM(chat_model, device="cpu", config=EngineConfig(block_size=BLOCK, kv_cache_memory_bytes=cache))
    assert llm.max_model_len == limit
    with pytest.raises(ValueError, match=rf"{limit + 1} .*{limit} tokens"):
        llm.generate([[5] * (limit + 1)])
    results = llm.generate([[5] * 5] * 6, SamplingParams(max_tokens=limit - 5, seed=1, ignore_eos=True))
    assert all(result.outputs == results[0].outputs for result in results)
    assert_drained(llm)
    with pytest.raises(ValueError, match=rf"{limit + 1} .*{cache} bytes .*{limit} tokens"):
        LLM(chat_model, config=EngineConfig(block_size=BLOCK, kv_cache_memory_bytes=cache, max_model_len=limit + 1))


def test_many_requests_of_all_fates(llm: LLM) -> None:
    """B32: by end id, stop id, stop string, length; left at every stage; refused; at the borders of blocks."""

    def refused(ids: list[int]) -> None:
        with pytest.raises(ValueError, match="-1"):
            llm.generate([ids, [-1]])

    biases: dict[str, Any] = {"temperature": 0.0, "max_tokens": 4}
    fates: list[Callable[[list[int]], object]] = [
        lambda ids: llm.generate([ids], SamplingParams(**biases, logit_bias={EOS: 100})),
        lambda ids: llm.generate([ids], SamplingParams(**biases, logit_bias={36: 100}, stop="AA")),
        lambda ids: llm.generate([ids], SamplingParams(**biases, logit_bias={36: 100}, stop_token_ids=[36])),
        lambda ids: llm.generate([ids, ids, ids, ids], SamplingParams(max_tokens=2, ignore_eos=True)),
        lambda ids: next(llm.stream(ids, ENDLESS)),
        lambda ids: llm.stream(ids, ENDLESS).close(),
        lambda ids: [next(stream) for stream in [llm.stream(ids, SamplingParams(max_tokens=20, n=5))]],
        refused,
    ]
    for _ in range(3):
        for length in (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, 3 * BLOCK - 4):
            for fate in fates:
                fate([5] * length)
        assert_drained(llm)
