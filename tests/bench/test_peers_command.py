"""`ostinato bench peers`: other engines compute the same, take turns, and are named where they cannot."""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ostinato.bench import peers
from ostinato.bench.cli import Peer
from ostinato.bench.errors import BenchError
from ostinato.bench.mode_subjects import MODES
from ostinato.bench.peer_table import report
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
    kept: list[int] = []
    contest = peers.Contest(decoder, [(1, 20), (2, 20)], ["vllm", "torch"], rounds=1, steps=1)
    result = contest.measure(ceiling=1e9, keep=lambda result: kept.append(len(result.cells)))
    assert kept == [3, 6]
    ours, failing, torch_alone = result.cells[:3]
    assert failing.error == "failed: MemoryError: no room for it"
    assert ours.times_ours == 1.0
    assert torch_alone.error is None
    assert "vllm failed: MemoryError: no room for it (batch x context 1 x 20, 2 x 20)" in report(result, "a").notes


def test_what_comes_too_late_is_a_row_that_says_so(decoder: Decoder) -> None:
    contest = peers.Contest(decoder, [(1, 20)], ["torch"], rounds=1, steps=1, seconds=0.0)
    errors = {cell.peer: cell.error for cell in contest.measure(ceiling=1e9).cells}
    assert errors == dict.fromkeys(("ostinato", "torch"), "not measured: the time limit of 0 s was over")


def test_vllm_is_started_once_for_all_cells(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in that has the names of vLLM 0.24."""
    pytest.importorskip("transformers")
    started: list[dict[str, Any]] = []
    asked: list[tuple[int, int]] = []

    class Vllm(SimpleNamespace):
        class LLM:
            def __init__(self, **options: Any) -> None:
                assert (Path(options["model"]) / "config.json").exists()
                started.append(options)
                torch.backends.cuda.enable_cudnn_sdp(False)  # as vLLM 0.24 does

            def generate(self, prompts: list[Any], params: Any, use_tqdm: bool) -> list[Any]:
                asked.append((len(prompts), params.max_tokens))
                time.sleep(1e-4 * params.max_tokens)
                output = SimpleNamespace(token_ids=[0] * params.max_tokens)
                return [SimpleNamespace(outputs=[output]) for _ in prompts]

    fake = Vllm(__version__="0.24.0", TokensPrompt=dict, SamplingParams=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "vllm", fake)
    cells = [(1, 20), (3, 20), (1, 100)]
    result = peers.Contest(decoder, cells, ["vllm"], rounds=2, steps=1).measure(ceiling=1e9)
    vllm = [cell for cell in result.cells if cell.peer == "vllm"]
    assert [(cell.error, cell.version, cell.same_first_tokens) for cell in vllm] == [(None, "0.24.0", None)] * 3
    assert all(cell.median_ms == pytest.approx(0.1, rel=0.5) for cell in vllm)
    [options] = started
    assert (options["max_num_seqs"], options["compilation_config"]) == (3, {"cudagraph_capture_sizes": [1, 3]})
    room = peers.WARM_STEPS + 2 + 8
    assert options["max_model_len"] == 100 + room + 104
    tokens = options["kv_cache_memory_bytes"] // decoder.config.kv_bytes_per_token(decoder.dtype)
    assert tokens >= max(batch * (context + room + 104) for batch, context in cells)
    assert asked == [(batch, count) for batch, _ in cells for count in (1, *[8, 104] * 3)]
    assert torch.backends.cuda.cudnn_sdp_enabled(), "it would take the torch baseline's attention away"


def test_ostinato_must_run_whole(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODES, "whole", MODES["eager"])  # type: ignore[index]
    with pytest.raises(BenchError, match=r"batch 1, context 20: ostinato failed: BenchError: .* ran as .*FORCED"):
        peers.Contest(decoder, [(1, 20)], [], rounds=1, steps=1).measure(ceiling=1e9)


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
