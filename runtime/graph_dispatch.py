"""What happens to a decode batch, and why: pure functions over which buckets there are."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from .graph_buckets import BucketKey, CudaGraphConfig, tightest_batched
from .graph_reason import Path, Reason
from .inference_graph_capture import StepMode


@dataclass(frozen=True)
class Batch:
    """Of a decode batch, what decides about its graph.

    Attributes:
        cg_key_info: what sampling needs.
        has_hook, has_logits_processor: which eager pieces run between the captured ones.
    """

    num_rows: int
    cg_key_info: Hashable = None
    has_hook: bool = False
    has_logits_processor: bool = False
    graph_walk: str = "decode"

    @property
    def eager_piece(self) -> Reason | None:
        """The first eager piece that the batch has."""
        if self.has_hook:
            return Reason.HOOK
        return Reason.LOGITS_PROCESSOR if self.has_logits_processor else None


@dataclass(frozen=True)
class Chunk:
    """Rows `start .. stop - 1` of a batch, and how they run.

    Attributes:
        key: the bucket that they are padded to, also where they run eagerly; None: they run as they are.
        capture: the bucket is captured right before, and replayed then.
    """

    start: int
    stop: int
    path: Path
    reason: Reason
    key: BucketKey | None = None
    capture: bool = False

    @property
    def num_rows(self) -> int:
        return self.stop - self.start

    @property
    def num_padding_rows(self) -> int:
        return 0 if self.key is None else self.key.bs - self.num_rows


@dataclass(frozen=True)
class BucketView:
    """What a dispatcher may know of the buckets of a path.

    Attributes:
        configs: all families; an earlier one is preferred.
        missing: why a bucket cannot be used, None if it can.
        captured: whether its graphs are there, or are made before it replays.
        step_mode: what the lazy machine of a bucket says; None where buckets are captured at start.
    """

    configs: Sequence[CudaGraphConfig]
    missing: Callable[[BucketKey], Reason | None]
    captured: Callable[[BucketKey], bool]
    step_mode: Callable[[BucketKey], StepMode | None]


class Dispatcher:
    """Chooses a path and buckets for each batch.

    Args:
        path: how batches run that need no eager piece; EAGER: graphs are off.
        forced: run the rows and buckets that graphs would run, eagerly.
        buckets: of each path.
    """

    def __init__(self, path: Path, forced: bool, buckets: dict[Path, BucketView]) -> None:
        self._path = path
        self._forced = forced
        self._buckets = buckets

    def decide(self, batch: Batch) -> list[Chunk]:
        """The chunks of a batch in order; one, unless it is larger than the largest graph."""
        if self._path is Path.EAGER:
            return [Chunk(0, batch.num_rows, Path.EAGER, Reason.OFF)]
        path = Path.PIECEWISE if batch.eager_piece else self._path
        view = self._buckets[path]
        usual = batch.eager_piece or (Reason.WHOLE if path is Path.WHOLE else Reason.PIECEWISE)
        there = [(key, config) for config in view.configs for key in config.bucket_keys() if view.missing(key) is None]
        whole = tightest_batched(there, batch.graph_walk, batch.num_rows, batch.cg_key_info)
        if whole is not None:
            return [self._chunk(0, batch.num_rows, whole, path, usual, view)]
        capping = [
            key
            for key, config in there
            if config.caps_batch_size and config.serves(batch.graph_walk, batch.cg_key_info)
        ]
        if not capping:
            return [self._without_bucket(batch, view)]
        chunks, start, largest = [], 0, max(key.bs for key in capping)
        while start < batch.num_rows:
            stop = min(start + largest, batch.num_rows)
            key = tightest_batched(there, batch.graph_walk, stop - start, batch.cg_key_info)
            assert key is not None, "what fills no more than the largest bucket fits one"
            chunks.append(self._chunk(start, stop, key, path, batch.eager_piece or Reason.SPLIT, view))
            start = stop
        return chunks

    def _chunk(self, start: int, stop: int, key: BucketKey, path: Path, reason: Reason, view: BucketView) -> Chunk:
        if self._forced:
            return Chunk(start, stop, Path.EAGER, Reason.FORCED, key)
        if view.step_mode(key) is StepMode.WARMUP:
            return Chunk(start, stop, Path.EAGER, Reason.WARMUP, key)
        return Chunk(start, stop, path, reason, key, capture=not view.captured(key))

    def _without_bucket(self, batch: Batch, view: BucketView) -> Chunk:
        """Eager: on the tightest bucket that should be there, else on the rows as they are."""
        every = [(key, config) for config in view.configs for key in config.bucket_keys()]
        key = tightest_batched(every, batch.graph_walk, batch.num_rows, batch.cg_key_info)
        if key is not None:
            return Chunk(0, batch.num_rows, Path.EAGER, view.missing(key) or Reason.NO_BUCKET, key)
        serving = [config for config in view.configs if config.serves(batch.graph_walk, batch.cg_key_info)]
        return Chunk(0, batch.num_rows, Path.EAGER, Reason.OVER_LARGEST if serving else Reason.NO_BUCKET)
