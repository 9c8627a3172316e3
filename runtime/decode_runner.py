"""Runs decode steps: asks the dispatcher, replays or runs the pieces, counts, and explains."""

import logging
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from torch import Tensor

from .bucket_capture import CaptureSummary, Progress
from .decode_graphs import DecodeGraphs
from .decode_pieces import DecodePieces
from .eager_step import hook_rows, run_rows
from .graph_buckets import BucketKey
from .graph_counters import EXPECTED_EAGER, GraphCounters
from .graph_dispatch import Batch, BucketView, Chunk, Dispatcher
from .graph_reason import REPLAYS, Path, Reason
from .graph_start import DecodePolicy, start_graphs
from .inference_graph_capture import StepMode
from .interventions import Hooks, edit_logits, has_logits_processor
from .late_captures import LateCaptures
from .phases import Phases
from .rank_agreement import GraphsRequiredError
from .row_window import rows_in_front
from .sample_road import SampleRoad
from .sampler import SampledTokens
from .sampling_params import SamplingParams
from .sequence import Sequence
from .token_masks import ask_for_masks, has_mask_function

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DecodeResult:
    """Tokens of consecutive rows."""

    token_ids: list[int]
    sampled: SampledTokens


@dataclass(frozen=True)
class Launched:
    """Consecutive rows of a step that the device has been given, and not yet been waited for.

    Attributes:
        chunk: the rows, and how they run.
        number: of the step, for `StepState.read`.
        time: `time.perf_counter()` seconds when the host began with it.
    """

    chunk: Chunk
    number: int
    sampled: SampledTokens
    time: float


@dataclass(frozen=True)
class Begun:
    """A step of which the device was given the first pieces, good for as long as what it depends on is as it was."""

    pieces: int
    at: tuple[object, ...]


class DecodeRunner:
    """One object for all decode steps of an engine.

    Args:
        graphs: None where graphs are off.
    """

    def __init__(self, pieces: DecodePieces, hooks: Hooks, policy: DecodePolicy, graphs: DecodeGraphs | None) -> None:
        assert (graphs is None) == (policy.path is Path.EAGER), "graphs are there unless they are off"
        self.counters = GraphCounters()
        self.summary: CaptureSummary | None = None
        self.phases = Phases()
        self.policy = policy
        self.graphs = graphs
        self._pieces = pieces
        self._hooks = hooks
        self._late = LateCaptures(graphs, policy.lazy_steps, policy.self_test) if graphs is not None else None
        self._decided: dict[Batch, list[Chunk]] = {}
        self._decided_at: tuple[object, ...] = ()
        self._last_finish = 0.0
        self._begun: Begun | None = None
        self._sizes = graphs.settings.sizes if graphs is not None else ()
        views = {path: self._view(path) for path in (Path.WHOLE, Path.PIECEWISE)} if graphs is not None else {}
        self.dispatcher = Dispatcher(policy.path, policy.forced, views)

    def start(
        self, progress: Progress | None = None, phases: Phases | None = None, *, is_rehearsed: bool = False
    ) -> None:
        """Capture what is captured at start, and check it; else compile what a late capture will need.

        Args:
            phases: of the engine's start so far; these come behind.
            is_rehearsed: all captures have been made once before.

        Raises:
            GraphsRequiredError: graphs are required and some are missing; lists them all.
            RuntimeError: a tensor that must outlive replays lies where one may overwrite it.
        """
        self.phases = phases or Phases()
        if self.graphs is not None and not self.policy.forced:
            self.summary = start_graphs(self.graphs, self.policy, progress, self.phases, is_rehearsed)

    def batch_of(self, sequences: SequenceOf[Sequence]) -> Batch:
        """What the dispatcher looks at."""
        road = self._pieces.sampler.road(range(len(sequences)))
        return Batch(len(sequences), road, bool(self._hooks), has_logits_processor(sequences))

    @property
    def greedy_road(self) -> SampleRoad:
        return SampleRoad()

    def batch_of_params(self, params: SequenceOf[SamplingParams]) -> Batch:
        """The same for requests that decode side by side, from their parameters alone."""
        sampler, road = self._pieces.sampler, SampleRoad()
        for one in params:
            road |= sampler.road_of(one)
        return Batch(len(params), road, bool(self._hooks), any(one.logits_processors for one in params))

    def decide(self, batch: Batch) -> list[Chunk]:
        """The chunks that a step of this batch would run as, and why; changes nothing."""
        if self.graphs is None or self.policy.lazy_steps is not None:  # decided at once; or other at every step
            return self.dispatcher.decide(batch)
        state = self.graphs.state, self._hooks.layers
        if self._decided_at != state:
            self._decided_at = state
            self._decided.clear()
        if batch not in self._decided:
            self._decided[batch] = self.dispatcher.decide(batch)
        return list(self._decided[batch])

    def run(self, sequences: SequenceOf[Sequence], *, again: bool = False) -> list[DecodeResult]:
        """One token for each sequence; sequence `i` stands in row `i`.

        Args:
            again: the next step will most likely be of the same rows, and may be begun before the tokens are there.

        Raises:
            GraphsRequiredError: graphs are required, and part of the step would run eagerly.
        """
        if self._late is not None:
            self._late.recut(self._hooks.layers)
        ask_for_masks(self._pieces.sampler, sequences, range(len(sequences)))
        chunks = self.decide(self.batch_of(sequences))
        self.counters.count_batch(len(sequences), self._sizes)
        if len(chunks) > 1 or not again:
            return [self.finish(self._launch_chunk(chunk, sequences[chunk.start : chunk.stop])) for chunk in chunks]
        launched = self._launch_chunk(chunks[0], sequences)
        self._begin_next(launched.chunk, sequences)
        return [self.finish(launched)]

    def launch(self, sequences: SequenceOf[Sequence]) -> "Launched | None":
        """Hand the device a step whose tokens `finish` waits for, so that another can be launched before.

        None where the host has work within the step, or must see its outputs before the next one overwrites them: code
        of users, log-probabilities, parts of a split batch, a step without graph. `run` is for these.

        Raises:
            GraphsRequiredError: as `run`.
        """
        if self.graphs is None or self.graphs.would_recut(self._hooks.layers) or has_mask_function(sequences):
            return None
        batch = self.batch_of(sequences)
        if batch.eager_piece is not None or _wants_logprobs(batch):
            return None
        [first, *more] = self.decide(batch)
        if more or first.key is None or not self.graphs.has(first.path, first.key):
            return None
        self.counters.count_batch(len(sequences), self._sizes)
        return self._launch_chunk(first, sequences)

    def finish(self, launched: "Launched") -> DecodeResult:
        """The tokens of a step that was handed to the device."""
        tokens = self._pieces.state.read(launched.number, launched.chunk.num_rows)
        now = time.perf_counter()
        self.counters.count(launched.chunk, now - max(launched.time, self._last_finish))
        self._last_finish = now
        return DecodeResult(tokens, launched.sampled)

    def _launch_chunk(self, chunk: Chunk, sequences: SequenceOf[Sequence]) -> "Launched":
        now, key, state, sampler = time.perf_counter(), chunk.key, self._pieces.state, self._pieces.sampler
        begun, self._begun = self._begun, None  # of the very next step, or of none
        if key is None:
            self._check_allowed(chunk)
            sampled = run_rows(self._pieces, self._hooks, sequences)
            return Launched(chunk, state.count_commit(), sampled, now)
        planned = chunk.path if chunk.path is not Path.EAGER else self._path(sequences)
        chunk = self._ready(chunk)
        self._check_allowed(chunk)
        with rows_in_front(state, sampler, chunk.start, chunk.stop, key.bs):
            done, outputs = self._run_bucket(chunk, planned, sequences, begun)
            if self._late is not None:
                self._late.advance(planned, key)
            return Launched(done, state.count_commit(), _sampled(outputs, sequences), now)

    def _run_bucket(
        self, chunk: Chunk, path: Path, sequences: SequenceOf[Sequence], begun: Begun | None
    ) -> tuple[Chunk, dict[str, Tensor]]:
        """The outputs of a step on a bucket, and what it ran as: eagerly, where a replay failed."""
        assert self.graphs is not None, "a bucket belongs to graphs"
        assert chunk.key is not None, "a bucket has a key"
        done = chunk

        def replay_failed(error: Exception) -> None:
            nonlocal done
            done = self._after_failure(chunk, error)

        eager, num_rows = chunk.path is Path.EAGER, len(sequences)
        if path is Path.WHOLE:
            outputs = self.graphs.run_whole(chunk.key, num_rows, eager=eager, replay_failed=replay_failed)
            return done, outputs
        rows = hook_rows(sequences) if self._hooks else ()
        outputs = self.graphs.step.run(
            chunk.key,
            num_rows,
            eager=eager,
            at_layer=lambda layer, hidden: self._hooks.apply(layer, hidden, rows),
            at_logits=(lambda logits: edit_logits(logits, sequences)) if has_logits_processor(sequences) else None,
            replay_failed=replay_failed,
            begun=begun.pieces if begun is not None and begun.at == self._now(chunk) else 0,
        )
        return done, outputs

    def _begin_next(self, chunk: Chunk, sequences: SequenceOf[Sequence]) -> None:
        """Hand the device the pieces of the next step of these rows that come before users' code.

        The host may look at the tokens of the last step meanwhile. What is begun is used if the next step is of the
        same rows and none has changed; else that step starts anew.
        """
        if chunk.path is not Path.PIECEWISE or chunk.key is None:
            return
        assert self.graphs is not None, "a bucket belongs to graphs"
        pieces = self.graphs.step.begin(chunk.key, len(sequences), lambda error: self._after_failure(chunk, error))
        self._begun = Begun(pieces, self._now(chunk))

    def _now(self, chunk: Chunk) -> tuple[object, ...]:
        """What a step that has been begun depends on."""
        assert self.graphs is not None, "a bucket belongs to graphs"
        return chunk.key, chunk.num_rows, self.graphs.state, self._hooks.layers, self._pieces.state.num_changes

    # Late captures and failures

    def _ready(self, chunk: Chunk) -> Chunk:
        """The chunk, with its bucket captured; where that fails, it runs eagerly."""
        if chunk.path is Path.EAGER:
            return chunk
        assert self._late is not None, "a bucket belongs to graphs"
        assert chunk.key is not None, "a bucket has a key"
        return chunk if self._late.ready(chunk.path, chunk.key) else self._eager(chunk)

    def _after_failure(self, chunk: Chunk, error: Exception) -> Chunk:
        """A replay failed before it committed: the rest of the step runs eagerly, and the bucket from now on."""
        assert self.graphs is not None, "a bucket belongs to graphs"
        assert chunk.key is not None, "a bucket has a key"
        self.graphs.fail(chunk.path, chunk.key, f"{type(error).__name__}: {error}")
        eager = self._eager(chunk)
        self._check_allowed(eager)
        return eager

    def _eager(self, chunk: Chunk) -> Chunk:
        assert self.graphs is not None, "a bucket belongs to graphs"
        assert chunk.key is not None, "a bucket has a key"
        reason = self.graphs.missing(chunk.path, chunk.key)
        assert reason is not None, "a bucket that cannot replay has a reason"
        logger.warning("decode steps of batch size %d run eagerly: %s", chunk.key.bs, reason.value)
        return Chunk(chunk.start, chunk.stop, Path.EAGER, reason, chunk.key)

    def _check_allowed(self, chunk: Chunk) -> None:
        if self.policy.required and chunk.reason not in REPLAYS | EXPECTED_EAGER:
            raise GraphsRequiredError(
                f"CUDA graphs are required, but {chunk.num_rows} rows would run eagerly: {chunk.reason.value}"
            )

    def _path(self, sequences: SequenceOf[Sequence]) -> Path:
        """The path that the rows would take with a graph."""
        return Path.PIECEWISE if self.batch_of(sequences).eager_piece else self.policy.path

    def _view(self, path: Path) -> BucketView:
        graphs, late = self.graphs, self._late
        assert graphs is not None, "there are buckets where there are graphs"
        assert late is not None, "there are late captures where there are graphs"

        def step_mode(key: BucketKey) -> StepMode | None:
            return late.step_mode(path, key, self._hooks.layers)

        def missing(key: BucketKey) -> Reason | None:
            return graphs.missing(path, key, self._hooks.layers if path is Path.PIECEWISE else None)

        def captured(key: BucketKey) -> bool:
            return graphs.has(path, key, self._hooks.layers)

        return BucketView(graphs.configs, missing, captured, step_mode)


def _sampled(outputs: dict[str, Tensor], sequences: SequenceOf[Sequence]) -> SampledTokens:
    """The real rows of a step's outputs. Log-probabilities only where a row asked for them, whatever the bucket makes,
    and as copies: a split batch's next part overwrites them."""
    if not any(sequence.params.logprobs for sequence in sequences):
        return SampledTokens(outputs["token_ids"][: len(sequences)])
    return SampledTokens(**{name: tensor[: len(sequences)].clone() for name, tensor in outputs.items()})


def _wants_logprobs(batch: Batch) -> bool:
    return isinstance(batch.cg_key_info, SampleRoad) and batch.cg_key_info.logprobs
