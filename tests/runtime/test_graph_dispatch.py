"""What happens to a batch, and why, over tables of buckets; no tensors."""

import itertools

import pytest

from ostinato.runtime.graph_buckets import BucketKey, CudaGraphConfig
from ostinato.runtime.graph_counters import GraphCounters
from ostinato.runtime.graph_dispatch import Batch, BucketView, Chunk, Dispatcher
from ostinato.runtime.graph_reason import DROPPED, REPLAYS, Path, Reason
from ostinato.runtime.inference_graph_capture import StepMode

SIZES = (1, 2, 4, 8, 64)


def dispatcher(
    path: Path = Path.WHOLE,
    *,
    missing: dict[int, Reason] | None = None,
    caps: bool = True,
    forced: bool = False,
    modes: dict[int, StepMode] | None = None,
    captured: tuple[int, ...] = SIZES,
) -> Dispatcher:
    view = BucketView(
        [CudaGraphConfig("decode", SIZES, caps_batch_size=caps)],
        lambda key: (missing or {}).get(key.bs),
        lambda key: key.bs in captured,
        lambda key: (modes or {}).get(key.bs),
    )
    return Dispatcher(path, forced, {Path.WHOLE: view, Path.PIECEWISE: view})


def shape(chunks: list[Chunk]) -> list[tuple[int, int | None, Path, Reason]]:
    return [(c.num_rows, None if c.key is None else c.key.bs, c.path, c.reason) for c in chunks]


def test_seventy_is_sixty_four_and_eight() -> None:
    chunks = dispatcher().decide(Batch(70))
    assert shape(chunks) == [(64, 64, Path.WHOLE, Reason.SPLIT), (6, 8, Path.WHOLE, Reason.SPLIT)]
    assert [(c.start, c.stop, c.num_padding_rows) for c in chunks] == [(0, 64, 0), (64, 70, 2)]


def test_buckets_that_do_not_cap_leave_a_large_batch_whole_and_eager() -> None:
    assert shape(dispatcher(caps=False).decide(Batch(70))) == [(70, None, Path.EAGER, Reason.OVER_LARGEST)]


@pytest.mark.parametrize("features", list(itertools.product([False, True], repeat=2)))
@pytest.mark.parametrize("path", [Path.WHOLE, Path.PIECEWISE])
def test_eager_pieces_make_a_step_piecewise(path: Path, features: tuple[bool, bool]) -> None:
    batch = Batch(3, None, *features)
    [chunk] = dispatcher(path).decide(batch)
    reasons = [r for r, on in zip((Reason.HOOK, Reason.LOGITS_PROCESSOR), features, strict=True) if on]
    usual = Reason.WHOLE if path is Path.WHOLE else Reason.PIECEWISE
    assert (chunk.path, chunk.reason) == ((Path.PIECEWISE, reasons[0]) if reasons else (path, usual))
    assert chunk.key == BucketKey("decode", None, 4, 4)


@pytest.mark.parametrize("reason", sorted(DROPPED))
def test_a_missing_bucket_gives_way_to_the_next_larger(reason: Reason) -> None:
    assert shape(dispatcher(missing={4: reason}).decide(Batch(3))) == [(3, 8, Path.WHOLE, Reason.WHOLE)]


@pytest.mark.parametrize("reason", sorted(DROPPED))
def test_a_missing_largest_bucket_splits_the_batch(reason: Reason) -> None:
    chunks = dispatcher(missing={64: reason}).decide(Batch(20))
    assert shape(chunks) == [(8, 8, Path.WHOLE, Reason.SPLIT)] * 2 + [(4, 4, Path.WHOLE, Reason.SPLIT)]


@pytest.mark.parametrize("reason", sorted(DROPPED))
def test_without_any_bucket_the_reason_is_that_of_the_tightest(reason: Reason) -> None:
    missing = {size: Reason.OVER_BUDGET for size in SIZES} | {4: reason}
    assert shape(dispatcher(missing=missing).decide(Batch(3))) == [(3, 4, Path.EAGER, reason)]


def test_off_and_forced() -> None:
    assert shape(Dispatcher(Path.EAGER, False, {}).decide(Batch(3))) == [(3, None, Path.EAGER, Reason.OFF)]
    assert shape(dispatcher(forced=True).decide(Batch(3))) == [(3, 4, Path.EAGER, Reason.FORCED)]


def test_what_no_config_samples_has_no_bucket() -> None:
    assert shape(dispatcher().decide(Batch(3, "unknown"))) == [(3, None, Path.EAGER, Reason.NO_BUCKET)]


def test_lazy_buckets_warm_up_capture_and_replay() -> None:
    modes = {1: StepMode.WARMUP, 2: StepMode.CAPTURE, 4: StepMode.REPLAY}
    decide = dispatcher(modes=modes, captured=(4,)).decide
    assert shape(decide(Batch(1))) == [(1, 1, Path.EAGER, Reason.WARMUP)]
    assert [(c.path, c.capture) for c in decide(Batch(2))] == [(Path.WHOLE, True)]
    assert [(c.path, c.capture) for c in decide(Batch(4))] == [(Path.WHOLE, False)]


def test_a_bucket_without_a_graph_is_captured_before_it_replays() -> None:
    decide = dispatcher(captured=(1, 4)).decide
    assert [decide(Batch(size))[0].capture for size in (1, 2, 4, 8)] == [False, True, False, True]


@pytest.mark.parametrize("num_rows", range(1, 140))
def test_chunks_cover_the_batch_without_gaps(num_rows: int) -> None:
    chunks = dispatcher().decide(Batch(num_rows))
    assert [c.start for c in chunks] == [0, *(c.stop for c in chunks[:-1])]
    assert chunks[-1].stop == num_rows
    assert all(c.key is not None and c.key.bs >= c.num_rows for c in chunks)
    assert all(c.reason in REPLAYS for c in chunks)


def test_counters_and_the_warning(caplog: pytest.LogCaptureFixture) -> None:
    counters = GraphCounters()
    replay = Chunk(0, 3, Path.WHOLE, Reason.WHOLE, BucketKey("decode", None, 4, 4))
    eager = Chunk(0, 3, Path.EAGER, Reason.CAPTURE_FAILED, BucketKey("decode", None, 4, 4))
    for _ in range(99):
        counters.count(replay, 0.004)
    counters.count(Chunk(0, 1, Path.EAGER, Reason.PREFILL), 1.0)
    counters.count(eager, 0.012)
    assert [record.message for record in caplog.records] == ["decode steps run eager: the bucket's capture failed"], (
        "1 of 100 is not above 1 %"
    )
    caplog.clear()
    assert counters.num_padding_rows == 100
    assert counters.wasted_seconds == pytest.approx(99 * 0.001 + 0.003 + 0.008)
    counters.count(eager, 0.012)
    counters.count(eager, 0.012)
    assert [record.message for record in caplog.records] == [
        "2.0 % of decode steps run without a graph: {'CAPTURE_FAILED': 2}"
    ]
    assert counters.num_decodes == 102
    assert counters.num_eager_decodes == 3
