"""The demo model, a real checkpoint, gives the tokens that transformers gives with the same weights in float32.

`data/smollm2_reference.json` holds 64 greedy tokens of transformers for each of ten prompts, once with the weights as
the GGUF file holds them and once with the weights rounded to bfloat16, and the gaps between the two best logits.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from ostinato import LLM, EngineConfig, SamplingParams
from ostinato.runtime.sampler import Sampler
from ostinato.weights import open_checkpoint

pytestmark = pytest.mark.demo

REFERENCE = json.loads((Path(__file__).parent / "data" / "smollm2_reference.json").read_text())
CONFIG = EngineConfig(max_num_seqs=8, max_model_len=2048)


@pytest.fixture(scope="module")
def gguf_llm(demo_path: Path) -> LLM:
    return LLM(demo_path, device="cpu", dtype="float32", config=CONFIG)


@pytest.fixture(scope="module")
def bfloat16_folder(demo_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The demo model as a Hugging Face folder with its weights rounded to bfloat16."""
    folder = tmp_path_factory.mktemp("smollm2")
    checkpoint = open_checkpoint(demo_path)
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in checkpoint.tensors()}, folder / "model.safetensors")
    config = checkpoint.config
    hf = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rotary.theta,
        "max_position_embeddings": config.max_position,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(hf))
    yield folder
    (folder / "model.safetensors").unlink()


def greedy(llm: LLM, entries: list[dict[str, Any]]) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=64)
    short, long = (
        entries[:-1],
        entries[-1:],
    )  # apart, as a batch reads its caches as far as the longest sequence reaches
    outputs = llm.generate([e["prompt_ids"] for e in short], params) + llm.generate(long[0]["prompt_ids"], params)
    return [output.outputs[0].token_ids for output in outputs]


def test_greedy_tokens_from_the_gguf(gguf_llm: LLM) -> None:
    entries = REFERENCE["greedy_float32_weights"]
    assert greedy(gguf_llm, entries) == [entry["output_ids"] for entry in entries]


def test_greedy_tokens_from_a_folder(bfloat16_folder: Path) -> None:
    """Stored in bfloat16, computed in float32: an explicit dtype wins over that of the checkpoint."""
    llm = LLM(bfloat16_folder, device="cpu", dtype="float32", config=CONFIG)
    entries = REFERENCE["greedy_bfloat16_weights"]
    assert greedy(llm, entries) == [entry["output_ids"] for entry in entries]


def test_chats_and_texts_become_the_reference_prompts(gguf_llm: LLM) -> None:
    for entry in REFERENCE["greedy_float32_weights"]:
        ids = gguf_llm.encode_chat(entry["messages"]) if "messages" in entry else gguf_llm.encode(entry["text"])
        assert ids == entry["prompt_ids"], entry["name"]


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", ["whole", "piecewise", "off"])
def test_greedy_tokens_on_cuda(demo_path: Path, graphs: str) -> None:
    llm = LLM(demo_path, device="cuda", dtype="float32", config=replace(CONFIG, graphs=graphs))
    entries = REFERENCE["greedy_float32_weights"]
    assert greedy(llm, entries) == [entry["output_ids"] for entry in entries]


# Every token judged by the reference. A token is right if the reference samples it behind the tokens in front of it, or
# would, were its logit higher by as much as logits may be off. That is the rule for near-ties, whichever parameters.

SAMPLED = SamplingParams(
    temperature=0.9, top_k=200, top_p=0.95, min_p=0.001, repetition_penalty=1.1, frequency_penalty=0.2, seed=7,
    max_tokens=16, min_tokens=12,
)  # fmt: skip


def misses(
    reference: LLM, prompts: list[list[int]], outputs: list[list[int]], params: SamplingParams, off: float
) -> tuple[int, list[str]]:
    """How many tokens are right by their near-ties alone, and those that are not right."""
    sampler = Sampler(1, reference.model_config.vocab_size, device="cpu")
    ends = reference._engine.eos_token_ids
    num_near_ties, wrong = 0, list[str]()

    def sampled(prompt: Sequence[int], given: Sequence[int], logits: Tensor) -> int:
        sampler.set_row(0, params, params.seed or 0, prompt, given, stop_token_ids=ends)
        return int(sampler.sample(logits[None], torch.tensor([len(prompt) + len(given) - 1])).token_ids)

    def judge(tokens: list[int], prompt: Sequence[int], given: Sequence[int], logits: Tensor) -> None:
        nonlocal num_near_ties
        chosen = tokens[len(given)]
        if sampled(prompt, given, logits) != chosen:
            raised = logits.clone()
            raised[chosen] += off
            if sampled(prompt, given, raised) == chosen:
                num_near_ties += 1
            else:
                wrong.append(f"token {len(given)} behind {len(prompt)}")
        logits.fill_(-torch.inf)
        logits[chosen] = 0.0  # and on with what is judged

    forced = SamplingParams(temperature=0.0, ignore_eos=True)
    each = [replace(forced, max_tokens=len(ids), logits_processors=[partial(judge, ids)]) for ids in outputs]
    again = reference.generate(prompts, each)
    assert [output.outputs[0].token_ids for output in again] == outputs
    return num_near_ties, wrong


@pytest.fixture(scope="module")
def bfloat16_reference(bfloat16_folder: Path) -> LLM:
    """The weights of bfloat16, computed with in float32."""
    return LLM(bfloat16_folder, device="cpu", dtype="float32", config=CONFIG)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "off", "most"), [("float32", 0.002, 1), ("bfloat16", 0.5, 8)])
@pytest.mark.parametrize("params", [replace(SAMPLED, temperature=0.0), SAMPLED], ids=["greedy", "seeded"])
def test_every_token_of_a_gpu_is_the_reference_s_or_a_near_tie(
    bfloat16_folder: Path, bfloat16_reference: LLM, params: SamplingParams, dtype: str, off: float, most: int
) -> None:
    """Prompts alone, so that they are recorded, and together; sampling and decode in graphs.

    `off`: float32 sums in another order; bfloat16 of logits around 16 has steps of 1/8, and 30 layers of roundings.
    `most`: of some 170 tokens; others are equal.
    """
    config = replace(CONFIG, graph_warmup_steps=1, kv_cache_memory_bytes=2**30)
    llm = LLM(bfloat16_folder, device="cuda", dtype=dtype, config=config)
    prompts = [entry["prompt_ids"] for entry in REFERENCE["greedy_bfloat16_weights"][:8]]
    outputs = [llm.generate(prompt, params)[0] for prompt in prompts[:3]] + llm.generate(prompts, params)
    report = llm.graph_report()
    assert report.eager_decodes == 0
    assert report.prompts["PROMPT"] >= 1
    tokens = [output.outputs[0].token_ids for output in outputs]
    num_near_ties, wrong = misses(bfloat16_reference, prompts[:3] + prompts, tokens, params, off)
    assert wrong == []
    assert num_near_ties <= most


@pytest.mark.parametrize("params", [replace(SAMPLED, temperature=0.0), SAMPLED], ids=["greedy", "seeded"])
def test_the_rule_takes_the_reference_s_tokens_and_no_other(gguf_llm: LLM, params: SamplingParams) -> None:
    prompt = REFERENCE["greedy_float32_weights"][5]["prompt_ids"]
    params = replace(params, max_tokens=5, min_tokens=0)
    [output] = gguf_llm.generate(prompt, params)
    ids = output.outputs[0].token_ids
    assert misses(gguf_llm, [prompt], [ids], params, 0.0) == (0, [])
    wrong = [*ids[:3], ids[3] + 1, *ids[4:]]
    assert "token 3 behind 18" in misses(gguf_llm, [prompt], [wrong], params, 0.5)[1]
