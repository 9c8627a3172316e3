"""`ostinato bench cost`: the ledger by batch size, and what is left for the KV cache."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato import EngineConfig
from ostinato.bench import costs
from ostinato.bench.errors import BenchError
from ostinato.bench.schema import SCHEMAS, check
from ostinato.bench.subject import load_decoder

Cli = Callable[..., Any]


def test_the_tables_and_the_document(cli: Cli, chat_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "cost.png"
    command = ("bench", "cost", "-m", chat_model, "--context", 40, "--max-num-seqs", 2, "--plot", plot)
    document = cli(*command, "--json").json()
    check(document, SCHEMAS["cost"])
    off, piecewise, whole = document["cells"]
    assert [cell["mode"] for cell in document["cells"]] == ["off", "piecewise", "whole"]
    assert (off["graph_bytes"], off["buckets"], off["fewer_tokens"]) == (0, [], 0)
    for cell in (piecewise, whole):
        assert [bucket["batch_size"] for bucket in cell["buckets"]] == [1, 2]
        assert cell["graph_bytes"] == sum(b["pool_bytes"] + b["output_bytes"] for b in cell["buckets"]) > 0
        assert cell["sequences"] == off["sequences"] == 2, "a fixed KV cache"
        assert 0 < cell["captures_seconds"] <= cell["start_seconds"]
    assert piecewise["buckets"][0]["graphs"] > whole["buckets"][0]["graphs"]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_list_that_was_not_captured_has_no_cost(chat_model: Path) -> None:
    decoder = load_decoder(str(chat_model), None, torch.device("cpu"), "auto")
    config = EngineConfig(max_num_seqs=1, max_model_len=32, kv_cache_memory_bytes=1 << 20)
    with pytest.raises(BenchError, match="graphs are missing"):
        costs.measure(decoder, 32, replace(config, graph_memory_bytes=1))


def test_sequences_are_counted_in_blocks(chat_model: Path) -> None:
    """A cache that a graph makes one block smaller loses the sequence that needed it."""
    decoder = load_decoder(str(chat_model), None, torch.device("cpu"), "auto")
    block = 16 * decoder.config.kv_bytes_per_token(decoder.dtype)
    config = EngineConfig(
        max_num_seqs=4, max_model_len=40, block_size=16, kv_cache_memory_bytes=(2 + 7) * block, graphs="off"
    )
    seconds, engine = costs._start(decoder, config)
    cell = costs._cell(engine, "off", seconds, decoder, 40, 16, None)
    assert (cell.kv_tokens, cell.sequences) == (7 * 16, 2)
    assert costs._cell(engine, "off", seconds, decoder, 40, 16, replace(cell, sequences=3)).fewer_sequences == 1
