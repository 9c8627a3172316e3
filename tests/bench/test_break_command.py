"""`ostinato bench break`, and the table that its page begins with; `tests/test_report.py` compares the page."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato import EngineConfig
from ostinato.bench import breaks
from ostinato.bench.breaks import BREAKS, PLAIN, measure, refusals
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
    monkeypatch.setattr(breaks, "BREAKS", chosen)
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


def test_a_plot_without_times_is_refused_before_a_model_is_read(cli: Cli) -> None:
    run = cli("bench", "break", "--model", "./none", "--steps", 0, "--plot", "times.png")
    assert (run.code, run.out) == (2, "")
    assert "give --steps above 0" in run.err


def test_another_reason_than_the_features_ends_it(chat_model: Path) -> None:
    decoder = load_decoder(str(chat_model), None, torch.device("cpu"), "auto")
    with pytest.raises(BenchError, match=r"should have run as HOOK, but ran as \{'WHOLE': 2\}"):
        measure(decoder, 8, 0, [replace(PLAIN, name="a hook that is none", reason=Reason.HOOK)])
