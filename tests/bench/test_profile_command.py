"""`ostinato bench profile`: launches are counted and asserted, kernels and gaps come from the trace."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ostinato.bench import profiles
from ostinato.bench.errors import BenchError
from ostinato.bench.schema import SCHEMAS, check
from ostinato.bench.timeline import STEP_RANGE, Span, busy, gaps, layer_of, read_steps

Cli = Callable[..., Any]


def event(cat: str, name: str, start: float, length: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": length, "args": args}


def step_events(at: float, number: int, *, launch: str = "cudaGraphLaunch") -> list[dict[str, Any]]:
    """A step that launches a graph of two layers, whose kernels run after the host's call."""
    kernels = ["embed", "linear", "attend", "linear", "attend", "void at::native::commit<int, 4>(int*)"]
    return [
        event("user_annotation", STEP_RANGE, at, 40),
        event("cuda_runtime", launch, at + 5, 6, correlation=number),
        event("cuda_runtime", "cudaEventSynchronize", at + 12, 25, correlation=number + 1),
        *(
            event("kernel", name, at + 50 + 10 * i, 8, correlation=number, device=0, stream=7)
            for i, name in enumerate(kernels)
        ),
    ]


@pytest.fixture
def trace(tmp_path: Path) -> Callable[..., Path]:
    def write(*events: list[dict[str, Any]]) -> Path:
        path = tmp_path / "trace.json"
        path.write_text(json.dumps({"traceEvents": [one for some in events for one in some]}))
        return path

    return write


def test_kernels_belong_to_the_step_that_launched_them(trace: Callable[..., Path]) -> None:
    """Also where they run after the call; kernels of other work belong to none."""
    other = event("kernel", "other", 0, 5, correlation=99)
    steps = read_steps(trace(step_events(0, 10), step_events(100, 20), [other]), on_gpu=True)
    assert [[len(s.graphs), len(s.launches), len(s.copies), len(s.kernels)] for s in steps] == [[1, 0, 0, 6]] * 2
    profiles.check_launches(steps, 2, 1, "whole")
    cell = profiles.summarise(steps, 3, 20, "whole", 1.0, num_layers=2)
    assert (cell.graph_launches, cell.kernel_launches, cell.kernels) == (1, 0, 6)
    assert cell.layer == ["linear", "attend"]
    assert cell.busy_us == 48
    assert cell.idle_us == pytest.approx((2 * 5 * 2 + 42) / 2)
    assert cell.between_us == 21
    assert (cell.largest_gap_us, cell.largest_gap_after, cell.largest_gap_before) == (42, "at::native::commit", "embed")
    assert [(time.name, time.count, time.us) for time in cell.by_kernel][:2] == [("linear", 2, 16), ("attend", 2, 16)]
    assert cell.gaps[0] == profiles.GapPlace("at::native::commit", "embed", 0.5, 21)


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([step_events(0, 1)], "holds 1 of 2 steps"),
        ([step_events(0, 1), step_events(100, 2, launch="cuLaunchKernelEx")], "step 1 launched 0 graphs and 1 kernels"),
        (
            [
                step_events(0, 1),
                step_events(100, 3),
                [event("cuda_runtime", "cudaLaunchKernel", 120, 1, correlation=9)],
            ],
            "step 1 launched 1 graphs and 1 kernels .cudaLaunchKernel.; it must be none",
        ),
        ([step_events(0, 1), step_events(100, 3)[:3]], "no kernel of step 1"),
    ],
    ids=["a step missing", "eager", "a kernel beside the graph", "no kernels"],
)
def test_other_launches_end_it(trace: Callable[..., Path], events: list[Any], message: str) -> None:
    with pytest.raises(BenchError, match=message):
        profiles.check_launches(read_steps(trace(*events), on_gpu=True), 2, 1, "whole")


def test_gaps_of_kernels_that_overlap() -> None:
    """Under programmatic launches a kernel begins before the one before has ended, and may end before it."""
    kernels = [Span("a", 0, 10), Span("b", 2, 5), Span("c", 8, 12), Span("d", 15, 16)]
    assert [(gap.length, gap.after, gap.before) for gap in gaps(kernels)] == [(3, "c", "d")]
    assert busy(kernels) == 13
    assert gaps([]) == []
    assert busy([]) == 0


@pytest.mark.parametrize(
    ("names", "layers", "layer"),
    [("eababc", 2, "ab"), ("eabab", 3, ""), ("abcabcabch", 3, "abc"), ("aaaa", 2, "aa"), ("", 2, "")],
)
def test_a_layer_is_what_repeats(names: str, layers: int, layer: str) -> None:
    assert "".join(layer_of(names, layers)) == layer


def test_the_table_the_document_and_the_traces(cli: Cli, chat_model: Path, tmp_path: Path) -> None:
    """A whole step on a tape: one replay, and no operator that Python calls."""
    pytest.importorskip("matplotlib")
    command = ("bench", "profile", "-m", chat_model, "--context", 8, "--steps", 2)
    plot = tmp_path / "profile.png"
    document = cli(*command, "--json", "--trace", tmp_path / "traces", "--plot", plot).json()
    check(document, SCHEMAS["profile"])
    piecewise, whole, eager = document["cells"]
    assert [cell["mode"] for cell in document["cells"]] == ["piecewise", "whole", "eager"]
    assert [cell["graph_launches"] for cell in document["cells"]] == [3, 1, 0]
    assert whole["kernel_launches"] == 0
    assert 0 < piecewise["kernel_launches"] < eager["kernel_launches"] == eager["kernels"]
    assert "no CUDA graphs" in document["where"]["graphs"]
    assert sorted(path.name for path in (tmp_path / "traces").iterdir()) == [
        "eager-1-8.json",
        "piecewise-1-8.json",
        "whole-1-8.json",
    ]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_step_that_is_forced_to_be_eager_ends_it(cli: Cli, chat_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(profiles.MODES, "whole", profiles.MODES["eager"])  # type: ignore[index]
    run = cli("bench", "profile", "-m", chat_model, "--context", 8, "--steps", 1, "--mode", "whole")
    assert (run.code, run.out) == (1, "")
    assert "whole: step 0 launched 0 graphs" in run.err
