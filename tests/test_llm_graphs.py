"""Graphs through the public face: SmolLM2 with hooks, logits processors and masks, and a small model for the rest."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato import LLM, EngineConfig, HookError, HookRow, RequestError, SamplingParams
from ostinato.runtime import Reason

SIZES = (1, 2, 3)
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [output.token_ids for request in outputs for output in request.outputs]


@pytest.fixture(scope="module")
def small(chat_model: Path) -> Callable[[str], LLM]:
    made: dict[str, LLM] = {}

    def get(graphs: str) -> LLM:
        if graphs not in made:
            config = EngineConfig(max_num_seqs=3, block_size=16, graphs=graphs, capture_sizes=SIZES)  # type: ignore[arg-type]
            made[graphs] = LLM(chat_model, device="cpu", config=config)
        return made[graphs]

    return get


def counts(llm: LLM) -> dict[str, int]:
    return llm.graph_report().counts


@pytest.mark.parametrize("graphs", ["whole", "piecewise"])
def test_a_stream_and_a_batch_give_the_tokens_of_eager_decoding(small: Callable[[str], LLM], graphs: str) -> None:
    prompts, params = ["first", "second one", "third", "4"], SamplingParams(temperature=0.8, seed=1, max_tokens=9)
    eager = tokens(small("off").generate(prompts, params))
    assert tokens(small(graphs).generate(prompts, params)) == eager
    streamed = [token for delta in small(graphs).stream(prompts[1], params) for token in delta.token_ids]
    assert streamed == eager[1]


def test_explain_and_report(small: Callable[[str], LLM]) -> None:
    llm = small("whole")
    [chunk] = llm.explain([GREEDY, GREEDY])
    assert (chunk.path, chunk.reason.name, chunk.num_rows) == ("whole", "WHOLE", 2)
    assert chunk.key is not None
    assert chunk.key.bs == 2
    with pytest.raises(ValueError, match="at least 1"):
        llm.explain([])
    llm.generate("a", GREEDY)
    report = llm.graph_report()
    assert report.path == "whole"
    assert report.sizes == SIZES
    assert report.missing == ()
    assert report.counts["WHOLE"] >= 5
    assert report.eager_decodes == 0
    assert report.num_bytes > 0
    assert set(report.coverage) == {1, 2, 3}
    assert report.to_dict()["coverage"]["2"] == [{"rows": [0, 2], "bucket": 2, "path": "whole", "reason": "WHOLE"}]
    page = str(report)
    assert "2      whole: bucket 2 (one graph from preamble to commit)" in page
    assert "WHOLE" in page
    off = small("off").graph_report()
    assert off.capture == "off"
    assert "1 - 3      eager: exact rows (graphs are off)" in str(off)


def test_the_document_s_example_runs(small: Callable[[str], LLM], capsys: pytest.CaptureFixture[str]) -> None:
    """Of code inside a step, in docs/graphs.md."""
    page = (Path(__file__).resolve().parent.parent / "docs" / "graphs.md").read_text(encoding="utf-8")
    [code] = [block.partition("```")[0] for block in page.split("```python\n")[1:]]
    llm, before = small("whole"), small("whole").graph_report().counts
    known: dict[str, Any] = {"llm": llm, "SamplingParams": SamplingParams, "prompts": ["a", "b"], "direction": 0.5}
    exec(code, known)
    assert {token for row in tokens(known["outputs"]) for token in row} <= {3, 4, 5}
    assert llm.graph_report().counts["HOOK"] > before.get("HOOK", 0)
    assert "Reason.HOOK" in capsys.readouterr().out
    known["handle"].remove()


def test_capture_progress_is_told(chat_model: Path) -> None:
    seen: list[tuple[int, int]] = []
    config = EngineConfig(max_num_seqs=2, block_size=16, graphs="piecewise", capture_sizes=(2,))
    LLM(chat_model, device="cpu", config=config, capture_progress=lambda *done: seen.append(done))
    assert seen == [(n, 5) for n in range(1, 6)]


def test_auto_is_off_on_a_cpu(chat_model: Path) -> None:
    llm = LLM(chat_model, device="cpu", config=EngineConfig(max_num_seqs=1, block_size=16))
    assert llm.graph_report().path == "eager"
    forced = EngineConfig(max_num_seqs=1, block_size=16, enable_decode_graphs=True)
    assert LLM(chat_model, device="cpu", config=forced).graph_report().path == "whole"


@pytest.mark.parametrize("graphs", ["off", "whole", "piecewise"])
def test_hooks_see_every_token_once(small: Callable[[str], LLM], graphs: str) -> None:
    """Prompts and decode steps; the rows say whose hidden states they are."""
    llm, seen = small(graphs), []

    def watch(hidden: Tensor, rows: Sequence[HookRow]) -> None:
        assert hidden.shape == (rows[-1].stop, 24)
        seen.extend((tuple(row.prompt_ids), row.position + i) for row in rows for i in range(row.stop - row.start))

    handle = llm.hook(1, watch)
    try:
        llm.generate(["ab", "abc"], GREEDY)
    finally:
        handle.remove()
    assert llm.tokenizer is not None
    expected = []
    for text in ("ab", "abc"):
        ids = tuple(llm.tokenizer.encode(text))
        expected += [(ids, position) for position in range(len(ids) + 5)]
    assert sorted(seen) == sorted(expected)


@pytest.mark.parametrize("graphs", ["off", "whole"])
def test_a_hook_for_chosen_rows_leaves_the_others_alone(small: Callable[[str], LLM], graphs: str) -> None:
    llm = small(graphs)
    assert llm.tokenizer is not None
    chosen = llm.tokenizer.encode("change me")
    plain = tokens(llm.generate(["change me", "not me"], GREEDY))
    handle = llm.hook(1, lambda hidden, rows: -hidden, where=lambda row: list(row.prompt_ids) == chosen)
    try:
        steered = tokens(llm.generate(["change me", "not me"], GREEDY))
        alone = tokens(llm.generate(["change me"], GREEDY))
    finally:
        handle.remove()
    assert steered[1] == plain[1]
    assert steered[0] != plain[0]
    assert steered[0] == alone[0]
    assert tokens(llm.generate(["change me", "not me"], GREEDY)) == plain


@pytest.mark.parametrize("layer", [-1, 3, 1.0, None])
def test_a_hook_needs_a_layer_that_exists(small: Callable[[str], LLM], layer: Any) -> None:
    with pytest.raises(ValueError, match=r"in 0 \.\.\. 2, got"):
        small("off").hook(layer, lambda hidden, rows: None)


@pytest.mark.parametrize("result", [torch.zeros(1, 3), 5], ids=["shape", "number"])
def test_a_hook_that_returns_nonsense_is_told_so(small: Callable[[str], LLM], result: Any) -> None:
    llm = small("off")
    handle = llm.hook(0, lambda hidden, rows: result)
    try:
        with pytest.raises(HookError, match="layer 0 raised ValueError: a hook must return None or hidden states of"):
            llm.generate("a", GREEDY)
    finally:
        handle.remove()


def test_an_error_of_a_hook_is_not_a_failure_of_a_graph(small: Callable[[str], LLM]) -> None:
    llm = small("whole")

    def fail(hidden: Tensor, rows: Sequence[HookRow]) -> None:
        if rows[0].output_ids:
            raise KeyError("of the user")

    handle = llm.hook(1, fail)
    try:
        with pytest.raises(HookError, match="the hook fail at layer 1 raised KeyError: 'of the user'"):
            llm.generate("a", GREEDY)
    finally:
        handle.remove()
    assert llm.graph_report().missing == ()
    assert tokens(llm.generate("a", GREEDY)) == tokens(small("off").generate("a", GREEDY))


@pytest.mark.parametrize("graphs", ["off", "whole", "piecewise"])
def test_logits_processors_and_masks_decide_the_tokens(small: Callable[[str], LLM], graphs: str) -> None:
    """Beside a request without them, which keeps its tokens; and steps without them are whole again."""
    llm, calls = small(graphs), []

    def only_after(prompt_ids: Sequence[int], output_ids: Sequence[int], logits: Tensor) -> Tensor:
        calls.append(len(output_ids))
        forced = torch.full_like(logits, -100.0)
        forced[10 + len(output_ids)] = 0.0
        return forced

    plain = tokens(llm.generate("plain", GREEDY))[0]
    processed = SamplingParams(temperature=0.0, max_tokens=4, logits_processors=[only_after])
    masked = SamplingParams(temperature=1.0, seed=2, max_tokens=6, allowed_token_ids=[20, 21])
    growing = SamplingParams(temperature=0.0, max_tokens=4, allowed_token_ids=lambda prompt, out: [30 + len(out)])
    before = counts(llm)
    outputs = tokens(llm.generate(["p", "m", "plain"], [processed, masked, GREEDY]))
    assert outputs[0] == [10, 11, 12, 13]
    assert calls == [0, 1, 2, 3]
    assert set(outputs[1]) <= {20, 21}
    assert outputs[2] == plain
    assert tokens(llm.generate("g", growing))[0] == [30, 31, 32, 33]
    after = counts(llm)
    if graphs == "whole":
        changes = {name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name, 0)}
        assert changes == {"PREFILL": 2, "LOGITS_PROCESSOR": 3, "WHOLE": 5}
        start = counts(llm)["WHOLE"]
        llm.generate("plain", GREEDY)
        assert counts(llm)["WHOLE"] == start + 5


def test_what_masks_and_processors_must_be(small: Callable[[str], LLM]) -> None:
    llm = small("off")
    with pytest.raises(ValueError, match="allowed_token_ids: token id 500"):
        llm.generate("a", SamplingParams(allowed_token_ids=[500]))
    with pytest.raises(ValueError, match="at least 1"):
        SamplingParams(allowed_token_ids=[])
    with pytest.raises(TypeError, match="list of functions"):
        SamplingParams(logits_processors=[5])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="or a function"):
        SamplingParams(allowed_token_ids=5)  # type: ignore[arg-type]
    nothing = SamplingParams(allowed_token_ids=lambda prompt, out: torch.zeros(len(llm.encode("a")), dtype=torch.bool))
    with pytest.raises(RequestError, match="must allow at least 1"):
        llm.generate("a", nothing)
    for ids in ([-1], [llm.model_config.vocab_size]):
        outside = SamplingParams(allowed_token_ids=lambda prompt, out, ids=ids: ids)  # type: ignore[misc]
        with pytest.raises(RequestError, match=r"allowed_token_ids must be in 0 \.\.\. \d+, got"):
            llm.generate("a", outside)
    for result in (torch.zeros(3), [0.0]):
        wrong = SamplingParams(logits_processors=[lambda prompt, out, logits, result=result: result])  # type: ignore[misc]
        with pytest.raises(RequestError, match="a logits processor must return None or logits of shape"):
            llm.generate("a", wrong)


# The real model


@pytest.fixture(scope="module")
def smollm() -> Callable[..., LLM]:
    """SmolLM2 for up to 4 rows, its largest graph of 2."""
    made: dict[str, LLM] = {}

    def get(graphs: str, device: str = "cpu", **more: Any) -> LLM:
        name = f"{graphs} {device} {more}"
        if name not in made:
            sizes = {"max_num_seqs": 4, "max_model_len": 64, "capture_sizes": (1, 2)}
            config = EngineConfig(**sizes, graphs=graphs, **more)  # type: ignore[arg-type]
            made[name] = llm = LLM(device=device, dtype="float32", config=config)
            graphs_made = llm._engine.decode_runner.graphs
            for runner in (graphs_made.whole, *graphs_made.regions) if graphs_made is not None else ():
                for key in runner.bucket_keys():
                    if key.bs == 4:
                        runner.drop(key, Reason.OVER_BUDGET, "for a test")
        return made[name]

    return get


PROMPTS = ["The capital of France is", "One two three four"]
MORE_PROMPTS = [*PROMPTS, "A dog", "Why"]


@pytest.mark.demo
@pytest.mark.parametrize("num_prompts", [1, 2, 3, 4])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_smollm2_eager_on_bucket_is_piecewise_is_whole(
    smollm: Callable[..., LLM], device: str, num_prompts: int
) -> None:
    """For every size up to the largest bucket and two beyond."""
    # The kind of sampling that has log-probabilities is slow on a CPU: one size shows their bits.
    params = SamplingParams(temperature=0.0, max_tokens=3, logprobs=num_prompts == 3)
    runs = [
        [
            (output.token_ids, output.logprobs)
            for request in smollm(graphs, device, **more).generate(MORE_PROMPTS[:num_prompts], params)
            for output in request.outputs
        ]
        for graphs, more in (("whole", {"enable_decode_graphs": False}), ("whole", {}), ("piecewise", {}))
    ]
    assert runs[0] == runs[1] == runs[2]
    plain = smollm("off", device).generate(MORE_PROMPTS[:num_prompts], params)
    assert [token_ids for token_ids, _ in runs[0]] == tokens(plain)


@pytest.mark.demo
def test_smollm2_with_a_hook_a_processor_and_a_mask(smollm: Callable[[str], LLM]) -> None:
    """The same tokens as eagerly with the same eager pieces; the rest of each step replays; then steps are whole."""

    def push(hidden: Tensor, rows: Sequence[HookRow]) -> Tensor:
        return hidden * (1 + 0.9 * torch.sin(torch.arange(hidden.shape[1])))

    def no_paris(prompt_ids: Sequence[int], output_ids: Sequence[int], logits: Tensor) -> None:
        logits[logits.argmax()] -= 5.0

    processed = SamplingParams(temperature=0.0, max_tokens=6, logits_processors=[no_paris])
    even = SamplingParams(temperature=0.0, max_tokens=6, allowed_token_ids=range(0, 49152, 2))
    outputs: dict[str, list[Any]] = {}
    for graphs in ("off", "whole"):
        llm, found = smollm(graphs), []
        for layer in (0, 11, 30):
            handle = llm.hook(layer, push)
            found.append(tokens(llm.generate(PROMPTS, GREEDY)))
            handle.remove()
        found.append(tokens(llm.generate(PROMPTS, [processed, even])))
        before = counts(llm)
        found.append(tokens(llm.generate(PROMPTS, GREEDY)))
        if graphs == "whole":
            assert counts(llm)["WHOLE"] == before.get("WHOLE", 0) + 5
            assert before["HOOK"] == 15
            assert before["LOGITS_PROCESSOR"] == 5
            assert llm.graph_report().eager_decodes == 0
        outputs[graphs] = found
    assert outputs["whole"] == outputs["off"]
    assert len({str(one) for one in outputs["off"]}) == 5, "each of them did something"
    assert all(token % 2 == 0 for token in outputs["whole"][3][1])
