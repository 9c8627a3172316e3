"""Whole models of real sizes on a GPU, from prompt to tokens; the weights are random."""

import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import ostinato.kernels
from ostinato import LLM, EngineConfig, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = [list(range(start, start + 40 + start)) for start in range(8)]


@pytest.fixture(autouse=True)
def _give_memory_back() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.empty_cache()


def tokens(shape: str, graphs: str) -> list[list[int]]:
    """Greedy tokens of one sequence alone, and of eight together."""
    config = EngineConfig(
        max_num_seqs=8,
        max_model_len=256,
        kv_cache_memory_bytes=2**30,
        graphs=graphs,  # type: ignore[arg-type]
        capture_sizes=(1, 8),
        prompt_capture_sizes=(),
    )
    llm = LLM(shape, device="cuda", dtype="bfloat16", load_format="dummy", config=config)
    outputs = [*llm.generate(PROMPTS[0], GREEDY), *llm.generate(PROMPTS, GREEDY)]
    assert llm.graph_report().eager_decodes == 0 or graphs == "off"
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ["llama-3.2-1b", "llama-3.1-8b"])
def test_greedy_tokens_eager_and_in_one_graph(shape: str) -> None:
    """Replays give the bits of eager steps on the same rows; these are the rows of a bucket, and prompts have none."""
    eager = tokens(shape, "off")
    gc.collect()
    assert [len(ids) for ids in eager] == [12] * 9
    assert len({tuple(ids) for ids in eager[1:]}) == 8
    assert tokens(shape, "whole") == eager


def references_in(work: Callable[[], object]) -> set[str]:
    """The references, by name, that run while something is done, called under whatever name."""
    kernels, found = str(Path(ostinato.kernels.__file__).parent), set[str]()

    def note(frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_name.endswith("_ref") and code.co_filename.startswith(kernels):
            found.add(code.co_name)

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found


EVERYTHING = SamplingParams(
    temperature=0.8, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.1,
    frequency_penalty=0.1, seed=3, max_tokens=6, min_tokens=4, stop_token_ids=[7, 9], logit_bias={11: 2.0, 13: -3.0},
    logprobs=True, top_logprobs=5, n=2,
)  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", ["whole", "off"])
def test_no_reference_runs_on_a_gpu(graphs: str) -> None:
    """Neither at start, with its captures, nor for prompts, alone and together, nor for any sampling parameter."""
    config = EngineConfig(
        max_num_seqs=4,
        max_model_len=256,
        kv_cache_memory_bytes=2**30,
        graphs=graphs,  # type: ignore[arg-type]
        capture_sizes=(1, 4),
        graph_warmup_steps=1,
    )
    masked = SamplingParams(max_tokens=4, seed=1, allowed_token_ids=range(0, 4096, 2), repetition_penalty=1.2)

    def work() -> None:
        llm = LLM("llama-3.2-1b", device="cuda", dtype="bfloat16", load_format="dummy", config=config)
        for params in (GREEDY, EVERYTHING, masked):
            llm.generate(PROMPTS[0], params)
        llm.generate(PROMPTS, [GREEDY, EVERYTHING, masked, SamplingParams(max_tokens=8)] * 2)
        if graphs == "whole":
            assert llm.graph_report().prompts["PROMPT"] >= 1

    assert references_in(work) == set()


def test_a_reference_that_runs_is_seen() -> None:
    x, weight = torch.ones(2, 16), torch.ones(8, 16)
    called = references_in(lambda: ostinato.kernels.linear(x, weight, norm_weight=torch.ones(16)))
    assert called == {"linear_ref", "rms_norm_ref"}
