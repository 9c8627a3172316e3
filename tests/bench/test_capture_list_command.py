"""`ostinato bench capture-list`: where distributions come from, what is printed and written."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ostinato import LLM, EngineConfig, SamplingParams
from ostinato.bench.arrivals import TRAFFIC, poisson_arrivals, simulate
from ostinato.bench.batch_traffic import spread
from ostinato.bench.schema import SCHEMAS, check

Cli = Callable[..., Any]
COMMAND = ("bench", "capture-list")


def test_both_measures_are_named_and_the_list_can_be_used(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "list.json"
    run = cli(*COMMAND, "--normal", "41:8", "--sizes", 9, "--force", 1, "--list", "1,64", "--out", out)
    assert (run.code, run.err) == (0, "")
    assert "token measure" in run.out
    assert "per-b measure" in run.out
    rows = {line.split("  ")[0].strip(): line.split() for line in run.out.splitlines()}
    assert rows["default"][1:] == ["35", "7.87%", "8.91%"]
    assert rows["best"][1:3] == ["9", "5.46%"]
    assert rows["given 1"][2] == "3"
    sizes = EngineConfig(max_num_seqs=256, capture_sizes=out).capture_sizes
    assert sizes == (1, 32, 37, 41, 45, 50, 56, 68, 256)
    assert f"best: {','.join(map(str, sizes))}" in run.out
    again = cli(*COMMAND, "--normal", "41:8", "--sizes", 9, "--list", out, "--json").json()
    assert again["lists"][2]["sizes"] == list(sizes)


def test_an_engine_reports_what_the_command_takes(cli: Cli, chat_model: Path, tmp_path: Path) -> None:
    """Histogram, times, bytes and seconds of a run with graphs, on the tape, and a budget in each of them."""
    config = EngineConfig(max_num_seqs=3, block_size=16, graphs="whole", capture_sizes=(3,), run_ahead=True)
    llm = LLM(chat_model, device="cpu", config=config)
    llm.generate(["a", "bc", "d"], [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (3, 9, 9)])
    histogram = llm.batch_histogram()
    assert sum(batch * steps for batch, steps in histogram.items()) >= 2 + 8 + 8
    assert set(histogram) <= {2, 3}
    report, counts = tmp_path / "report.json", tmp_path / "histogram.json"
    report.write_text(json.dumps(llm.graph_report().to_dict()))
    counts.write_text(json.dumps(histogram))
    times = ("--replay-ms", tmp_path / "times.json")
    times[1].write_text(json.dumps({"1": 1.0, "3": 2.0}))

    document = cli(*COMMAND, "--from", report, *times, "--sizes", 1, "--json").json()
    check(document, SCHEMAS["capture-list"])
    assert document["minimised"] == "ms"
    assert document["batches"] == {str(batch): steps for batch, steps in histogram.items()}
    assert document["lists"][-1]["sizes"] == [3]
    steps = histogram[2] / sum(histogram.values())
    assert document["lists"][-1]["wasted_milliseconds"] == pytest.approx(0.5 * steps)
    assert document["lists"][0]["graph_bytes"] > 0
    assert document["lists"][0]["capture_seconds"] > 0
    document = cli(*COMMAND, "--from", counts, "--graph-memory", 20, "--graph-mb", 10, "--json").json()
    assert (document["minimised"], document["lists"][-1]["sizes"]) == ("rows", [2, 3])
    document = cli(*COMMAND, "--from", counts, "--capture-time", 0.19, "--capture-ms", 100, "--json").json()
    assert document["lists"][-1]["sizes"] == [3]


def test_simulated_arrivals(cli: Cli, tmp_path: Path) -> None:
    """Three at once and one late, two rows: the third waits; steps of a second."""
    arrivals = [(0.0, 2), (0.0, 3), (0.0, 1), (9.0, 2)]
    assert simulate(arrivals, lambda _: 1.0, 2) == {1: 2, 2: 3}
    (tmp_path / "trace.json").write_text(json.dumps(arrivals))
    trace = ("--trace", tmp_path / "trace.json", "--max-num-seqs", 2)
    assert cli(*COMMAND, *trace, "--step-ms", 1000, "--json").json()["batches"] == {"1": 2.0, "2": 3.0}

    drawn = list(poisson_arrivals(50.0, 20.0, 4000, seed=1))
    assert drawn == list(poisson_arrivals(50.0, 20.0, 4000, seed=1))
    batches = simulate(drawn, lambda _: 0.02, 256)
    # Little's law: 50 a second times 20 tokens of 20 ms each are 20 at a time; a quarter leaves room for the draw.
    assert sum(b * n for b, n in batches.items()) / sum(batches.values()) == pytest.approx(20, rel=0.25)
    assert sum(b * n for b, n in batches.items()) == sum(tokens for _, tokens in drawn)


@pytest.mark.parametrize(("name", "mean", "between"), [("steady", 41, 0.95), ("bursty", 24, 0.15), ("chat", 40, 0.75)])
def test_shapes_of_traffic_have_the_load_that_they_say(name: str, mean: float, between: float) -> None:
    """Whatever a step takes; `between` 20 and 60 lies at least that share of the steps, in chat four fifths."""
    shape = TRAFFIC[name]
    for seconds in (0.001, 0.02):

        def step(batch: int, seconds: float = seconds) -> float:
            return seconds * (1 + batch / 200)

        arrivals = list(shape.arrivals(step, 20_000, seed=3))
        assert arrivals == list(shape.arrivals(step, 20_000, seed=3))
        assert len(arrivals) == 20_000
        assert arrivals == sorted(arrivals, key=lambda arrival: arrival[0])
        batches = simulate(arrivals, step, 256)
        steps = sum(batches.values())
        assert sum(b * n for b, n in batches.items()) / steps == pytest.approx(mean, rel=0.15)
        share = sum(n for b, n in batches.items() if 20 <= b <= 60) / steps
        assert between < share
        assert (0.7 < share < 0.9) == (name == "chat")


def test_a_kind_of_traffic_with_times_of_full_and_of_padded_graphs(cli: Cli, tmp_path: Path) -> None:
    """Padding costs what empty rows take, not what full ones do; each number of graphs has its best list."""
    times = {
        "device": "a GPU", "model": "a model", "context": 64, "commit": "abc",
        "replay_ms": {"1": 1.0, "64": 7.3}, "padding_ms": {"1": 1.0, "64": 1.63},
    }  # fmt: skip
    (tmp_path / "times.json").write_text(json.dumps(times))
    command = ("--traffic", "steady", "--requests", 500, "--replay-ms", tmp_path / "times.json", "--max-num-seqs", 64)
    document = cli(*COMMAND, *command, "--sizes", 3, "--sizes", 9, "--json").json()
    check(document, SCHEMAS["capture-list"])
    assert document["timed"] == "a GPU, a model, 64 keys a sequence, commit abc"
    by_name = {one["name"]: one for one in document["lists"]}
    assert [len(by_name[name]["sizes"]) for name in ("best of 3", "best of 9")] == [3, 9]
    weights = {int(batch): steps for batch, steps in document["batches"].items()}
    total = sum(weights.values())
    padding = sum(
        steps * (min(size for size in by_name["default"]["sizes"] if size >= batch) - batch) / total
        for batch, steps in weights.items()
    )
    live = sum(batch * steps for batch, steps in weights.items()) / total
    assert by_name["default"]["wasted_milliseconds"] == pytest.approx(0.01 * padding)
    assert by_name["default"]["milliseconds"] == pytest.approx(1.0 + 0.1 * (live - 1) + 0.01 * padding)


def test_times_between_measured_sizes_lie_on_a_line() -> None:
    assert spread({2: 1.0, 4: 3.0, 5: 3.0}, 5, what="times") == {1: 1.0, 2: 1.0, 3: 2.0, 4: 3.0, 5: 3.0}
    assert spread({2: 1.0}, 3, what="bytes", beyond=True) == {1: 1.0, 2: 1.0, 3: 1.0}
    with pytest.raises(ValueError, match="up to batch size 2, but are needed up to 3"):
        spread({2: 1.0}, 3, what="times")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "one of --from, --normal, --trace, --rate and --traffic"),
        (("--normal", "41:8", "--rate", "3"), "one of --from, --normal, --trace, --rate and --traffic"),
        (("--normal", "41"), "a deviation must be above 0"),
        (("--rate", "0"), "must be above 0"),
        (("--normal", "41:8", "--sizes", "3", "--graph-memory", "9"), "one budget"),
        (("--normal", "41:8", "--graph-memory", "9"), "--graph-mb"),
        (("--normal", "41:8", "--sizes", "1", "--force", "1"), "no room for the sizes"),
        (("--normal", "41:8", "--minimise", "ms"), "--replay-ms"),
        (("--normal", "41:8", "--kv-gb", "1"), "need each other"),
        (("--from", "none.json"), "none.json"),
        (("--normal", "41:8", "--kv-fraction", "3"), "from 0 to 1, got 3"),
        (("--normal", "41:8", "--kv-fraction", "-1"), "from 0 to 1, got -1"),
        (("--normal", "41:8", "--plot", "lists.gif"), "--plot draws .png and .svg, not 'lists.gif'"),
    ],
    ids=lambda value: "-".join(value).replace("--", "") if isinstance(value, tuple) else "",
)
def test_mistakes_are_one_line(cli: Cli, arguments: tuple[str, ...], message: str) -> None:
    run = cli(*COMMAND, *arguments)
    assert (run.code, run.out) == (2, "")
    assert message in run.err
    assert len(run.err.splitlines()) == 1


def test_a_list_that_is_cut_short_is_named(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "h.json").write_text('{"3": 5, "20": 1}')
    command = (*COMMAND, "--from", tmp_path / "h.json", "--list", "4,16,48,64", "--list", "8,20")
    said = "given 1: without 48,64, as by an engine for batches of up to 20; --max-num-seqs 64 keeps them"
    run = cli(*command)
    assert (run.code, run.out.count(": without ")) == (0, 1)
    assert said in run.out
    assert ": without " not in cli(*command, "--max-num-seqs", 64).out


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"a": 1}', '{"0": 1}', '{"3": -1}', '{"3": 0}'])
def test_a_histogram_that_is_none_is_refused(cli: Cli, tmp_path: Path, text: str) -> None:
    (tmp_path / "h.json").write_text(text)
    run = cli(*COMMAND, "--from", tmp_path / "h.json")
    assert (run.code, run.out) == (2, "")
    assert "h.json: " in run.err


def test_a_document_that_differs_from_its_schema_is_refused(cli: Cli) -> None:
    document = cli(*COMMAND, "--normal", "4:1", "--max-num-seqs", 8, "--json").json()
    schema = json.loads(cli("bench", "schema", "capture-list").out)
    check(document, schema)
    for broken, place in (
        ({**document, "version": 2}, "$.version"),
        ({**document, "more": 1}, "$.more"),
        ({**document, "lists": [{}]}, r"$.lists\[0\].name"),
        ({**document, "batches": {"1": True}}, "$.batches.1"),
        ({key: value for key, value in document.items() if key != "source"}, "$.source"),
    ):
        with pytest.raises(ValueError, match=place.replace("$", r"\$")):
            check(broken, schema)


def test_a_plot_is_drawn_or_says_what_is_missing(cli: Cli, tmp_path: Path) -> None:
    run = cli(*COMMAND, "--normal", "4:1", "--max-num-seqs", 8, "--plot", tmp_path / "LISTS.PNG")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        assert run.code == 2
        assert "ostinato[bench]" in run.err
    else:
        assert run.code == 0
        assert (tmp_path / "LISTS.PNG").read_bytes().startswith(b"\x89PNG")
