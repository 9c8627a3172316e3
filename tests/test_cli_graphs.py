"""--graphs and --enforce-eager."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

Cli = Callable[..., Any]
ARGUMENTS = ("generate", "--max-tokens", "4", "--max-model-len", "40", "hello")


def test_every_mode_gives_the_same_text(cli: Cli, chat_model: Path) -> None:
    runs = [
        cli(*ARGUMENTS, "-m", chat_model, *more)
        for more in ([], ["--graphs", "off"], ["--graphs", "whole"], ["--graphs", "piecewise"], ["--enforce-eager"])
    ]
    assert [run.code for run in runs] == [0] * 5
    assert len({run.out for run in runs}) == 1


@pytest.mark.parametrize("graphs", ["whole", "piecewise"])
def test_contradictions_are_refused(cli: Cli, chat_model: Path, graphs: str) -> None:
    run = cli(*ARGUMENTS, "-m", chat_model, "--enforce-eager", "--graphs", graphs)
    assert run.code == 2
    assert f"--enforce-eager contradicts --graphs {graphs}" in run.err
    assert cli(*ARGUMENTS, "--graphs", "some").code == 2


@pytest.mark.parametrize(
    ("device", "capture", "eager", "expected"),
    [
        ("cpu", "off", 0, ""),
        ("cuda", "startup", 0, ""),
        ("cuda", "off", 0, " · WITHOUT CUDA GRAPHS: slow"),
        ("cuda", "startup", 3, " · 3 eager steps"),
    ],
)
def test_a_gpu_without_graphs_is_mentioned(device: str, capture: str, eager: int, expected: str) -> None:
    from ostinato.terminal import eager_warning

    report = SimpleNamespace(capture=capture, eager_decodes=eager)
    llm: Any = SimpleNamespace(device=SimpleNamespace(type=device), graph_report=lambda: report)
    assert eager_warning(llm) == expected
