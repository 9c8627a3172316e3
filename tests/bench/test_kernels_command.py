"""`ostinato bench kernels`, and what it and the other commands time with."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato.bench import modes, timing
from ostinato.bench.schema import SCHEMAS, check

Cli = Callable[..., Any]
CPU = torch.device("cpu")


def test_the_table_and_the_document(
    cli: Cli, chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(timing, "streaming_rate", lambda device: 1e9)
    plot = tmp_path / "kernels.png"
    out = tmp_path / "kernels.json"
    document = cli("bench", "kernels", "-m", chat_model, "--context", 20, "--json", "--out", out, "--plot", plot).json()
    check(document, SCHEMAS["kernels"])
    assert json.loads(out.read_text()) == document
    cells = {cell["name"]: cell for cell in document["cells"]}
    layers = cells["norm, qkv"]["calls"]
    assert layers == cells["rotation, KV write, attention"]["calls"] > 1
    assert cells["norm, head"]["calls"] == cells["the whole step, one graph"]["calls"] == 1
    weights = sum(cell["calls"] * cell["num_bytes"] for cell in document["cells"][:-1])
    assert weights == pytest.approx(cells["the whole step, one graph"]["num_bytes"], rel=0.1), "norms and later keys"
    assert all(cell["p10_us"] <= cell["us"] <= cell["p90_us"] for cell in document["cells"])
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_rate_is_bytes_a_second() -> None:
    assert 1e7 < timing.streaming_rate(CPU, 1 << 20) < 1e13


def test_a_void_ceiling_ends_a_command(cli: Cli, chat_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Someone else uses the memory: nothing that is measured then means anything."""
    monkeypatch.setattr(timing, "streaming_rate", lambda device: 1e9)
    monkeypatch.setitem(timing.LOWEST_CEILING, "cpu", 2e9)
    run = cli("bench", "modes", "-m", chat_model, "--batch", 1, "--context", 20)
    assert (run.code, run.out) == (1, "")
    assert "cpu: the read ceiling is 0.001 TB/s" in run.err
    assert "void" in run.err
    assert modes.read_ceiling is timing.read_ceiling


def test_a_capture_runs_again_without_its_python() -> None:
    calls, total = [], torch.zeros(3)

    def run() -> None:
        calls.append(None)
        total.add_(1)

    graph = timing.capture(run, CPU)
    assert (len(calls), total.tolist()) == (3, [2, 2, 2]), "two warm-ups, and a recording that computes nothing"
    measured = timing.time_graph(graph, CPU, replays=10, per_sample=2)
    assert total[0] == 2 + 2 * 10 * 2
    assert 0 < measured.p10 <= measured.median <= measured.p90
