"""Whole models of real sizes on a GPU, from prompt to tokens; the weights are random."""

import gc
from collections.abc import Iterator

import pytest
import torch

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
