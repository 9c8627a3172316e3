"""The demo model, a real checkpoint, gives the tokens that transformers gives with the same weights in float32.

`data/smollm2_reference.json` holds 64 greedy tokens of transformers for each of ten prompts, once with the weights as
the GGUF file holds them and once with the weights rounded to bfloat16, and the gaps between the two best logits.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ostinato import LLM, EngineConfig, SamplingParams
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
