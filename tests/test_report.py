"""`ostinato report`: the committed pages are what the results and the code give."""

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ostinato import report

Cli = Callable[..., Any]
PLOTS = sorted((report.ROOT / "docs" / "plots").glob("*.svg"))


@pytest.mark.parametrize("page", report.PAGES)
def test_the_committed_page_is_what_is_made(page: str) -> None:
    committed = (report.ROOT / page).read_text(encoding="utf-8")
    assert report.make(page) == committed, f"run: ostinato report {page}"


@pytest.mark.parametrize("plot", PLOTS, ids=lambda plot: plot.stem)
def test_the_committed_plot_is_of_the_committed_results(plot: Path) -> None:
    """The picture itself differs between versions of matplotlib, the digest at its end does not.

    One of a command and a shape is of all results of the two.
    """
    command, _, shape = plot.stem.partition("-llama")
    pattern = f"h200-{command}*-llama{shape}*.json" if shape else f"h200-{command}.jsonl"
    sources = sorted((report.ROOT / "bench" / "results").glob(pattern))
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
    assert plot.read_text().endswith(f"<!-- {digest} -->\n"), "run: ostinato report"


def test_the_page_of_results_is_of_whatever_was_measured(tmp_path: Path) -> None:
    """Nothing, and then one run of each command that knows little; what is missing is named in both."""
    script = "import sys; sys.path.insert(0, 'bench'); import records; records.RESULTS = records.Path(sys.argv[1]); "
    script += "import result_tables; print(result_tables.page())"
    pages = []
    where = {"device": "a GPU", "graphs": "CUDA graphs", "torch": "2", "model": "llama-3.1-8b", "dtype": "bfloat16"}
    cell = {"batch": 1, "context": 1024, "median_ms": 2.0}
    mode = dict.fromkeys(
        ("p10_ms", "p90_ms", "tokens_per_second", "ceiling_share", "capture_seconds", "start_seconds"), 0.5
    )
    mode |= {
        **cell,
        "mode": "whole",
        "step_bytes": 1,
        "speedup_over_eager": None,
        "graphs_per_step": 1,
        "graph_bytes": 0,
    }
    peer = {**cell, "peer": "ostinato", "version": "1", "least_ms": 2.0, "most_ms": 2.0, "tokens_per_second": 500.0}
    peer |= {"ceiling_share": 0.5, "times_ours": 1.0, "same_first_tokens": 1, "error": None}
    late = {
        **dict.fromkeys(peer),
        "batch": 1,
        "context": 1024,
        "peer": "vllm",
        "error": "missing: No module named 'vllm'",
    }
    one = {"sizes": [1], "token_waste": 0.0, "per_batch_waste": 0.0, "wasted_milliseconds": 0.0}
    one |= {"graph_bytes": None, "capture_seconds": None}
    lists = [
        {**one, "name": name, "milliseconds": ms}
        for name, ms in (("default", 4.0), ("powers of two", 5.0), ("best", 3.0))
    ]
    documents: dict[str, Any] = {
        "modes": {
            "version": 2,
            "where": where,
            "read_ceiling": 1e12,
            "cells": [{**mode, "prefill_ms": None}],
            "left_out": [],
        },
        "peers": {"version": 1, "where": where, "read_ceiling": 1e12, "cells": [peer, late]},
        "capture-list": {
            "version": 1,
            "source": "x",
            "timed": "y",
            "minimised": "ms",
            "batches": {"1": 1},
            "lists": lists,
        },
    }
    for run in ({}, documents):
        (tmp_path / "commits.json").write_text("{}")
        for command, document in run.items():
            name = f"h200-{command}-llama-3.1-8b.json"
            (tmp_path / name).write_text(json.dumps({"command": command, **document}))
        made = subprocess.run(
            [sys.executable, "-c", script, tmp_path], cwd=report.ROOT, capture_output=True, text=True, check=True
        )
        pages.append(made.stdout)
    assert re.findall(r"^## (.*)$", pages[0], re.M) == ["In short", "Not measured"]
    assert "- modes, llama-3.1-8b, 1,024 tokens.\n" in pages[0]
    assert "What a tuned list saves" in pages[1]
    assert "saves 25.0 % of a step over the default list, 40.0 % over powers of two" in pages[1]
    assert "- vllm, llama-3.1-8b, 1 x 1,024: missing: No module named 'vllm'" in pages[1]
    assert "- modes, llama-3.1-8b, 1,024 tokens, batch 2, 4, 8, 16, 32, 64, 128." in pages[1]


def test_plots_that_pages_show_are_there() -> None:
    shown = set()
    for page in report.PAGES:
        shown |= set(re.findall(r"plots/([\w.-]+\.svg)\)", (report.ROOT / page).read_text(encoding="utf-8")))
    assert shown == {plot.name for plot in PLOTS}


def test_a_page_that_changed_is_named_and_written(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bench" / "results").mkdir(parents=True)
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(report, "draw", lambda: None)
    monkeypatch.setattr(report, "PAGES", {"page.md": ["-c", "print('new')"], "same.md": ["-c", "print('same')"]})
    (tmp_path / "page.md").write_text("old\n")
    (tmp_path / "same.md").write_text("same\n")
    assert (cli("report", "--check").code, (tmp_path / "page.md").read_text()) == (1, "old\n")
    run = cli("report")
    assert (run.code, run.out, (tmp_path / "page.md").read_text()) == (0, "page.md\n", "new\n")
    assert cli("report", "--check").code == 0


def test_mistakes_are_refused(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "made are README.md, docs/graphs.md" in cli("report", "docs/decisions.md").err
    monkeypatch.setattr(report, "ROOT", tmp_path)
    run = cli("report", "README.md")
    assert (run.code, run.out) == (2, "")
    assert "is no checkout" in run.err
