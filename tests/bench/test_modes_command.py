"""`ostinato bench modes`: tokens are compared, modes are asserted, and faults end it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato.bench import mode_subjects, modes
from ostinato.bench.errors import BenchError
from ostinato.bench.schema import SCHEMAS, check
from ostinato.bench.subject import Subject, load_decoder
from ostinato.model import Decoder
from ostinato.runtime.graph_reason import Reason

Cli = Callable[..., Any]
FEW = ("--rounds", 2, "--steps", 2)


@pytest.fixture(scope="module")
def decoder(chat_model: Path) -> Decoder:
    return load_decoder(str(chat_model), None, torch.device("cpu"), "auto")


def test_the_table_and_the_document(
    cli: Cli, chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cells come by size whatever the order; the file holds what was printed."""
    monkeypatch.setattr(modes, "read_ceiling", lambda device: 1e9)
    file = tmp_path / "new" / "modes.json"
    command = ("bench", "modes", "-m", chat_model, "--batch", "2,1", "--context", "20", *FEW)
    document = cli(*command, "--json", "--out", file).json()
    check(document, SCHEMAS["modes"])
    assert json.loads(file.read_text()) == document
    assert [cell["prefill_ms"] is None for cell in document["cells"]] == [True] * 3 + [False] * 3, "once a context"
    assert [(cell["batch"], cell["mode"]) for cell in document["cells"]] == [
        (batch, mode) for batch in (1, 2) for mode in ("piecewise", "whole", "eager")
    ]
    assert [cell["graphs_per_step"] for cell in document["cells"]] == [3, 1, 0] * 2
    assert all(cell["p10_ms"] <= cell["median_ms"] <= cell["p90_ms"] for cell in document["cells"])
    assert document["cells"][2]["speedup_over_eager"] == 1.0
    assert "no CUDA graphs" in document["where"]["graphs"]
    run = cli("bench", "modes", "-m", chat_model, "--batch", 1, "--mode", "whole", "--mode", "lazy", *FEW)
    assert (run.code, run.err) == (0, "")
    assert "TAPE ON A CPU" in run.out
    assert "speed-up" not in run.out, "there is nothing to compare with"


def test_planted_faults_end_it(cli: Cli, chat_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unequal tokens, and a mode whose graphs are gone: exit code 1 and one line, nothing on stdout."""
    command = ("bench", "modes", "-m", chat_model, "--batch", 2, "--context", "20", *FEW)
    monkeypatch.setattr(modes, "read_ceiling", lambda device: 1e9)
    tokens = Subject.tokens
    with monkeypatch.context() as patch:
        patch.setattr(Subject, "tokens", lambda self: [[row[0], id(self), *row[2:]] for row in tokens(self)])
        run = cli(*command)
    assert (run.code, run.out) == (1, "")
    assert "piecewise and whole give other tokens: row 0, token 1" in run.err
    with monkeypatch.context() as patch:
        patch.setitem(mode_subjects.MODES, "whole", ({"graphs": "whole", "graph_memory_bytes": 1}, Reason.WHOLE))
        run = cli(*command)
    assert (run.code, run.out) == (1, "")
    assert "whole: steps should have run as WHOLE, but ran as {'OVER_BUDGET': 6}" in run.err


def test_cells_that_do_not_fit_or_come_too_late_are_named(
    cli: Cli, chat_model: Path, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are measured, and the exit code is 0."""
    monkeypatch.setattr(mode_subjects, "free_bytes", lambda device: mode_subjects.SPARE_BYTES + 10**6)
    left_out: list[mode_subjects.LeftOut] = []
    assert list(mode_subjects.affordable(decoder, [(1, 20), (4, 10**6)], 5, None, left_out)) == [(1, 20)]
    assert [(one.batch, one.context) for one in left_out] == [(4, 10**6)]
    assert left_out[0].why.startswith("does not fit: keys and values take")
    monkeypatch.setattr(modes, "read_ceiling", lambda device: 1e9)
    run = cli("bench", "modes", "-m", chat_model, "--batch", 3, "--context", 20, "--seconds", 0)
    assert run.code == 0
    assert "batch 3, context 20: not measured: the time limit of 0 s was over" in run.out


def test_modes_write_to_one_cache(decoder: Decoder) -> None:
    first, second = (mode_subjects.make_subject(decoder, 1, 8, "eager", 4) for _ in range(2))
    shared = mode_subjects.make_subject(decoder, 1, 8, "eager", 4, kv_cache=first.kv_cache)
    assert shared.kv_cache is first.kv_cache is not second.kv_cache


def test_a_mode_without_steps_is_no_mode() -> None:
    with pytest.raises(BenchError, match="ran as none"):
        mode_subjects.check_mode({}, Reason.WHOLE, "whole")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--batch", "0"), "--batch must be whole numbers"),
        (("--batch", "1;2"), "--batch must be whole numbers"),
        (("--shape", "none"), "not a named shape"),
        (("--shape", "llama-3.2-1b", "-m", "x"), "not both"),
        (("--dtype", "int8"), "not supported"),
        (("--mode", "graph"), "graph"),
    ],
    ids=lambda value: "-".join(value).replace("--", "") if isinstance(value, tuple) else "",
)
def test_mistakes_are_refused(cli: Cli, arguments: tuple[str, ...], message: str) -> None:
    run = cli("bench", "modes", *arguments)
    assert (run.code, run.out) == (2, "")
    assert message in run.err


def test_a_plot_is_drawn(tmp_path: Path, decoder: Decoder) -> None:
    pytest.importorskip("matplotlib")
    result = modes.measure(decoder, [(1, 20)], ["whole", "eager"], rounds=1, steps=2, ceiling=1e9)
    modes.plot(result, tmp_path / "modes.png")
    assert (tmp_path / "modes.png").read_bytes().startswith(b"\x89PNG")


def test_the_document_is_json(decoder: Decoder) -> None:
    result = modes.measure(decoder, [(1, 20)], ["whole"], rounds=1, steps=2, ceiling=1e9)
    assert json.loads(modes.report(result, "a model").json())["cells"][0]["speedup_over_eager"] is None
