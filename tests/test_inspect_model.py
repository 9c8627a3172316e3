"""`ostinato inspect`: the facts of a model are those of the loaded one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato import LLM
from ostinato.model import SHAPES, ModelConfig, RotaryConfig

Cli = Callable[..., Any]

TINY = ModelConfig("llama", 50, 16, 24, 1, 2, 1, 8, 1e-5, RotaryConfig("linear", 1e4, 8, 2.0), 64, dtype=torch.float16,
                   eos_token_ids=(3,), attention_bias=True, output_bias=True, sliding_window=9)  # fmt: skip


@pytest.fixture
def tiny_shape(monkeypatch: pytest.MonkeyPatch) -> ModelConfig:
    """A shape of the name `tiny`."""
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    return TINY


def test_folder(cli: Cli, write_chat_model: Callable[..., Path], tmp_path: Path) -> None:
    dtypes = (torch.float32, torch.bfloat16)
    path = write_chat_model(
        tmp_path / "m", dtypes=dtypes, dtype=..., eos_token_id=[10, 11], generation_config={"eos_token_id": 20}
    )
    facts = cli("inspect", path, "--json").json()
    llm = LLM(path)
    config = llm.model_config
    assert facts["num_parameters"] == config.num_parameters == sum(p.numel() for p in llm._model.parameters())
    assert llm.load_report is not None
    assert facts["loaded_bytes"] == llm.load_report.nbytes
    assert set(facts["stored"]) == {"bfloat16", "float32"}
    assert facts["stored"]["float32"] == {"tensors": 5, "bytes": 5 * 24 * 4}
    assert facts["stored_bytes"] == (config.num_parameters - 5 * 24) * 2 + 5 * 24 * 4
    assert (facts["format"], facts["dtype"]) == ("safetensors", "bfloat16")
    assert facts["kv_bytes_per_token"] == 2 * 2 * 1 * 10 * 2
    assert {token["id"] for token in facts["stop_tokens"]} == llm.eos_token_ids
    assert facts["tokenizer"] == {
        "kind": "BPE", "vocab_size": 104, "num_special_tokens": 2, "bos_token": {"id": 0, "token": "<s>"},
        "eos_tokens": [{"id": 1, "token": "</s>"}], "chat_template": True,
    }  # fmt: skip


def test_text_has_the_facts(cli: Cli, chat_model: Path) -> None:
    result = cli("inspect", chat_model)
    assert (result.code, result.err) == (0, "")
    for fact in (str(chat_model), "llama", "safetensors", "3 query, 1 key/value, of 10", "104", "theta 10000",
                 "160 tokens", "1 </s>", "with chat template", "float32"):  # fmt: skip
        assert fact in result.out


def test_without_weights(cli: Cli, chat_model: Path, tmp_path: Path) -> None:
    """As after a look at a model on the hub, of which only the small files are fetched."""
    for file in chat_model.iterdir():
        if file.suffix == ".json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    here, there = (cli("inspect", path, "--json").json() for path in (tmp_path, chat_model))
    unknown = {"model", "path", "format", "stored", "stored_bytes"}
    assert {name for name in there if here[name] != there[name]} == unknown
    assert here["stored"] is None
    assert "weights are not downloaded" in cli("inspect", tmp_path).out


def test_shape(cli: Cli, tiny_shape: ModelConfig) -> None:
    facts = cli("inspect", "tiny", "--load-format", "dummy", "--json").json()
    assert facts["num_parameters"] == tiny_shape.num_parameters
    assert facts["rotary"] == {"kind": "linear", "theta": 1e4, "rotary_dim": 8, "factor": 2.0}
    text = cli("inspect", "tiny", "--load-format", "dummy").out
    assert "attention biases, sliding window 9" in text
    for name in ("llama-3.2-1b", "qwen3-8b"):
        assert cli("inspect", name, "--load-format", "dummy").code == 0


@pytest.mark.demo
def test_demo(cli: Cli, demo_path: Path) -> None:
    """Bytes and formats are those in the file, not those after dequantising."""
    facts = cli("inspect", "--json").json()
    assert (facts["path"], facts["format"]) == (str(demo_path), "gguf")
    assert facts["num_parameters"] == SHAPES["smollm2-135m"].num_parameters
    assert 0 < demo_path.stat().st_size - facts["stored_bytes"] < 5e6, "the rest is metadata"
    assert set(facts["stored"]) == {"Q4_1", "Q8_0", "F32"}
    assert facts["stop_tokens"] == [{"id": 2, "token": "<|im_end|>"}]
