"""`ostinato report`: the committed pages are what the results and the code give."""

import hashlib
import re
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
    """The picture itself differs between versions of matplotlib, the digest at its end does not."""
    [source] = (report.ROOT / "bench" / "results").glob(f"h200-{plot.stem}.json*")
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    assert plot.read_text().endswith(f"<!-- {digest} -->\n"), "run: ostinato report"


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
    assert "made are README.md, docs/kernels.md" in cli("report", "docs/graphs.md").err
    monkeypatch.setattr(report, "ROOT", tmp_path)
    run = cli("report", "README.md")
    assert (run.code, run.out) == (2, "")
    assert "is no checkout" in run.err
