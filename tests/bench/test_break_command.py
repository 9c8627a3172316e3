"""`ostinato bench break`, and the table that its page begins with; `tests/test_report.py` compares the page."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato import EngineConfig
from ostinato.bench import break_features, mode_subjects
from ostinato.bench.break_features import BREAKS, PLAIN
from ostinato.bench.breaks import measure, refusals
from ostinato.bench.errors import BenchError
from ostinato.bench.interactions import INTERACTIONS
from ostinato.bench.schema import SCHEMAS, check
from ostinato.bench.subject import load_decoder
from ostinato.runtime.graph_reason import Reason

Cli = Callable[..., Any]


def test_all_twelve_features_have_a_row() -> None:
    assert [one.feature for one in INTERACTIONS] == [
        "Paged attention",
        "Continuous batching",
        "Prefix caching",
        "Chunked prefill",
        "Multi-LoRA",
        "Speculative decoding",
        "Guided decoding",
        "Python logits processors",
        "Per-request sampling",
        "Tensor parallelism",
        "Pipeline parallelism",
        "Custom masks",
    ]
    assert {one.shown_by for one in INTERACTIONS} <= {*(one.name for one in BREAKS), *refusals(), "PROMPT_IN_PARTS"}


@pytest.mark.parametrize("name", refusals())
def test_what_is_not_built_is_refused_by_name(name: str) -> None:
    with pytest.raises(TypeError, match=name):
        EngineConfig(**{name: 2})  # type: ignore[arg-type]


def test_the_table_and_the_document(cli: Cli, chat_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = [PLAIN, next(one for one in BREAKS if one.reason is Reason.SPLIT)]
    monkeypatch.setattr(break_features, "BREAKS", chosen)
    command = ("bench", "break", "-m", chat_model, "--context", 8, "--steps", 2)
    document = cli(*command, "--json").json()
    check(document, SCHEMAS["break"])
    plain, split = document["cells"]
    assert (plain["path"], plain["reason"], plain["graphs_per_step"], plain["runs_ahead"]) == (
        "whole",
        "WHOLE",
        1,
        True,
    )
    assert (split["path"], split["reason"], split["graphs_per_step"], split["runs_ahead"]) == (
        "whole",
        "SPLIT",
        2,
        False,
    )
    assert plain["cost"] > 0
    assert "enable_lora" in document["refused"]


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_every_feature_runs_at_any_batch(cli: Cli, chat_model: Path, tmp_path: Path, batch: int) -> None:
    """Or is named, where the batch is too small for it; what was switched on is no news, and is not logged."""
    out = tmp_path / "break.json"
    run = cli("bench", "break", "-m", chat_model, "--batch", batch, "--context", 8, "--steps", 0, "--out", out)
    document = json.loads(out.read_text())
    assert (run.code, run.err) == (0, "")
    assert (document["batch"], document["context"]) == (batch, 8)
    measured = [cell["name"] for cell in document["cells"]]
    assert measured == [one.name for one in BREAKS if one.least <= batch]
    assert all((one.name in run.out) for one in BREAKS)
    assert (f"not for a batch of {batch}: " in run.out) == (batch < 3)
    padding = {cell["name"]: cell["padding_rows"] for cell in document["cells"]}
    assert padding.get("a batch between two sizes", 1) == 1
    assert padding.get("a bucket that was dropped, a larger one left", batch - batch // 2) == batch - batch // 2


def test_a_cache_that_does_not_fit_is_named(chat_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = load_decoder(str(chat_model), None, torch.device("cpu"), "auto")
    monkeypatch.setattr(mode_subjects, "free_bytes", lambda device: 1 << 20)
    with pytest.raises(
        BenchError, match=r"batch 4, context 8: does not fit: keys and values take 0\.0 GB, 0\.0 GB are"
    ):
        measure(decoder, 4, 8, 0)


def test_a_plot_without_times_is_refused_before_a_model_is_read(cli: Cli) -> None:
    run = cli("bench", "break", "--model", "./none", "--steps", 0, "--plot", "times.png")
    assert (run.code, run.out) == (2, "")
    assert "give --steps above 0" in run.err


def test_another_reason_than_the_features_ends_it(chat_model: Path) -> None:
    decoder = load_decoder(str(chat_model), None, torch.device("cpu"), "auto")
    with pytest.raises(BenchError, match=r"should have run as HOOK, but ran as \{'WHOLE': 2\}"):
        measure(decoder, 4, 8, 0, [replace(PLAIN, name="a hook that is none", reason=Reason.HOOK)])
