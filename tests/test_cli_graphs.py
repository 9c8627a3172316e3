"""--graphs, --capture, --capture-sizes and --enforce-eager."""

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


def test_sizes_come_from_the_option_or_a_file(cli: Cli, chat_model: Path, tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text('{"capture_sizes": [2]}')
    for sizes in ("2", tmp_path / "list.json"):
        run = cli(*ARGUMENTS, "-m", chat_model, "-n", 3, "--json", "--graphs", "whole", "--capture-sizes", sizes)
        assert run.code == 0
        assert "graphs: whole, 2 sizes up to 3" in run.err
    run = cli(*ARGUMENTS, "-m", chat_model, "--capture-sizes", "1,0")
    assert (run.code, "at least 1, got 0" in run.err) == (2, True)


def test_captures_may_be_late(cli: Cli, chat_model: Path) -> None:
    runs = [
        cli(*ARGUMENTS, "-m", chat_model, "--graphs", "whole", "--capture", when) for when in ("lazy", "startup", "off")
    ]
    assert [run.code for run in runs] == [0, 0, 2]
    assert runs[0].out == runs[1].out
    assert "graphs: whole, captured when used" in runs[0].err
    assert "graphs: whole, size 1, in " in runs[1].err
    assert "--capture" in runs[2].err


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
