"""`ostinato bench peers`: other engines compute the same, take turns, and are named where they cannot."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato.bench import peers
from ostinato.bench.cli import Peer
from ostinato.bench.errors import BenchError
from ostinato.bench.modes import MODES
from ostinato.bench.peer_transformers import hf_config
from ostinato.bench.peer_work import Work
from ostinato.bench.schema import SCHEMAS, check
from ostinato.bench.subject import load_decoder
from ostinato.model import SHAPES, Decoder, ModelConfig

Cli = Callable[..., Any]


@pytest.fixture(scope="module")
def decoder(chat_model: Path) -> Decoder:
    return load_decoder(str(chat_model), None, torch.device("cpu"), "float32")


def test_every_peer_has_a_name_on_the_command_line() -> None:
    assert [one.value for one in Peer] == list(peers.PEERS)


def test_the_table_and_the_document(
    cli: Cli, chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32 all engines give the same first tokens; what cannot be imported is a row that says so."""
    pytest.importorskip("matplotlib")
    pytest.importorskip("transformers")
    monkeypatch.setattr(peers, "read_ceiling", lambda device: 1e9)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)  # compiling takes a minute on a CPU
    monkeypatch.setitem(sys.modules, "vllm", None)
    plot = tmp_path / "peers.png"
    command = ("bench", "peers", "-m", chat_model, "--dtype", "float32", "--batch", 2, "--context", 20)
    document = cli(*command, "--rounds", 2, "--steps", 1, "--json", "--plot", plot).json()
    check(document, SCHEMAS["peers"])
    assert [cell["peer"] for cell in document["cells"]] == [peers.OURS, *peers.PEERS]
    for cell in document["cells"]:
        if cell["peer"] == "vllm":
            assert cell["error"].startswith("missing: ")
            assert cell["median_ms"] is None
        else:
            assert (cell["error"], cell["same_first_tokens"]) == (None, 2)
            assert 0 < cell["least_ms"] <= cell["median_ms"] <= cell["most_ms"]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_peer_that_fails_is_named_and_the_others_go_on(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        version = "1"

        def at(self, work: Work) -> Any:
            return self

        def run(self, count: int) -> float:
            raise MemoryError("no room\nfor it")

    monkeypatch.setitem(peers.PEERS, "vllm", lambda *_: Failing())  # type: ignore[index]
    result = peers.measure(decoder, [(1, 20)], ["vllm", "torch"], rounds=1, steps=1, ceiling=1e9)
    ours, failing, torch_alone = result.cells
    assert failing.error == "failed: MemoryError: no room for it"
    assert ours.times_ours == 1.0
    assert torch_alone.error is None
    assert "vllm failed: MemoryError: no room for it (batch x context 1 x 20)" in peers.report(result, "a model").notes


def test_ostinato_must_run_whole(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODES, "whole", MODES["eager"])  # type: ignore[index]
    with pytest.raises(BenchError, match=r"batch 1, context 20: ostinato failed: BenchError: .* ran as .*FORCED"):
        peers.measure(decoder, [(1, 20)], [], rounds=1, steps=1, ceiling=1e9)


@pytest.mark.parametrize("shape", ["llama-3.2-1b", "qwen3-8b"])
def test_the_config_of_transformers_is_the_same_model(shape: str) -> None:
    pytest.importorskip("transformers")
    config = SHAPES[shape]
    again = ModelConfig.from_hf({**hf_config(config).to_dict(), "dtype": "bfloat16"})
    assert (again.rotary, again.num_parameters) == (config.rotary, config.num_parameters)
    assert (again.norm_eps, again.tie_embeddings, again.max_position, again.qk_norm) == (
        config.norm_eps,
        config.tie_embeddings,
        config.max_position,
        config.qk_norm,
    )


def test_other_families_are_refused() -> None:
    pytest.importorskip("transformers")
    config = ModelConfig.from_hf(
        {
            **hf_config(SHAPES["llama-3.2-1b"]).to_dict(),
            "architectures": ["MistralForCausalLM"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        }
    )
    with pytest.raises(ValueError, match="not mistral"):
        hf_config(config)
