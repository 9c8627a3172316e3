"""The graphs of an engine's decode steps: the whole-step runner, the regions, and how they are captured and re-cut."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..kernels import SINK_BLOCK
from .bucket_capture import Capturer, CaptureSummary, Progress
from .cuda_graph_runner import CudaGraphRunner
from .decode_pieces import WALK, DecodePieces, DecodeSteps, WholeDecode, decode_configs
from .graph_addresses import Addresses
from .graph_backend import GraphBackend
from .graph_buckets import BucketKey
from .graph_ledger import GraphLedger
from .graph_reason import Path, Reason
from .piecewise_config import PiecewiseConfig
from .piecewise_runner import PiecewiseCudaGraphRunner
from .piecewise_step import PiecewiseStep, region_key
from .prompt_pieces import PROMPT_WALK, WholePrompt, prompt_inputs
from .static_buffers import GraphResources, StaticBuffers

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GraphSettings:
    """What `EngineConfig` says of graphs, resolved for a device.

    Attributes:
        sizes: batch sizes to capture.
        prompt_sizes: tokens that a prompt of one sequence is padded to, where it replays a graph; none: it never does.
    """

    sizes: tuple[int, ...]
    caps_batch_size: bool = True
    budget_bytes: int | None = None
    comm_group: Any = None
    enable_nvtx: bool = False
    prompt_sizes: tuple[int, ...] = ()


class DecodeGraphs:
    """Everything that replays steps of one engine: one pool, one set of buffers.

    Claims are made here, for the whole-step runner, all regions and prompts, whichever of them is captured first.
    """

    def __init__(self, pieces: DecodePieces, backend: GraphBackend, settings: GraphSettings) -> None:
        self.settings = settings
        self.backend = backend
        self.configs = decode_configs(settings.sizes, settings.caps_batch_size)
        self.pieces = pieces
        self._device = backend.device
        buffers, sizes = StaticBuffers(backend.device), settings.sizes
        self.resources = GraphResources(backend, backend.new_pool(), buffers)
        self._capturer = Capturer(backend, backend.device, settings.comm_group, settings.budget_bytes)
        self.whole = self._whole_runner(
            "decode", WholeDecode(pieces, buffers, sizes, caps_batch_size=settings.caps_batch_size)
        )
        self.prompts: CudaGraphRunner | None = None
        if settings.prompt_sizes:
            self.prompts = self._whole_runner("prefill", WholePrompt(pieces, buffers, settings.prompt_sizes))
        self.step = PiecewiseStep(
            pieces, buffers, sizes, self._region, lambda key: self.addresses.check(Path.PIECEWISE, key)
        )
        self._failed: dict[tuple[Path, BucketKey], tuple[Reason, str]] = {}
        self._whole_buckets: dict[tuple[Path, BucketKey], bool] = {}
        self._whole_buckets_at: tuple[object, ...] = ()
        for runner in self.runners:
            runner.prepare_for_capture()
        pieces.sampler.claim_counts()
        buffers.seal()
        self.addresses = Addresses(pieces, buffers)
        self.ledger.buffer_bytes = buffers.num_bytes

    @property
    def ledger(self) -> GraphLedger:
        """What the graphs that were captured cost."""
        return self._capturer.ledger

    def release(self) -> None:
        """Forget every graph; none may be in flight. Pool and buffers go with this object."""
        for runner in self.runners:
            runner.release_graphs()

    @property
    def regions(self) -> list[PiecewiseCudaGraphRunner]:
        """Those of all piecewise steps, each once."""
        keys = [key for config in self.configs for key in config.bucket_keys()[:1]]
        return list({id(region): region for key in keys for region in self.regions_of(key)}.values())

    def regions_of(self, key: BucketKey) -> list[PiecewiseCudaGraphRunner]:
        """The regions of a piecewise step of this bucket, in order."""
        return [piece.region for piece in self.step.order(key) if piece.region is not None]

    @property
    def runners(self) -> "list[CudaGraphRunner | PiecewiseCudaGraphRunner]":
        return [self.whole, *self.regions, *([self.prompts] if self.prompts is not None else [])]

    def capture_path(
        self, path: Path, progress: Progress | None = None, num_warmups: int | None = None
    ) -> CaptureSummary:
        """Warm up and capture every bucket of a path."""
        with self.at_rest():
            return self._capturer.capture(self._of(path), num_warmups=num_warmups, progress=progress)

    def warm_up(self, path: Path) -> None:
        """Only run every bucket eagerly, so that late captures find everything compiled and claimed."""
        with self.at_rest():
            self._capturer.warm_up(self._of(path))

    def capture_bucket(self, path: Path, key: BucketKey) -> bool:
        """Capture one bucket of a path between two steps; False if that failed."""
        pairs = [(runner, runner_key(runner, key)) for runner in self._of(path, key)]
        todo = [(runner, own) for runner, own in pairs if not runner.has(own) and own not in runner.drop_reasons]
        if todo:
            with self.at_rest():
                for runner, own in todo:
                    self._capturer.capture_one(runner, own)
        return self.missing(path, key) is None

    def has(self, path: Path, key: BucketKey, cuts: Sequence[int] | None = None) -> bool:
        """Whether every graph of a bucket of a path is there.

        Args:
            cuts: of a piecewise step, as it will be once the blocks are cut there.
        """
        if path is Path.PIECEWISE and cuts is not None and self.step.kept(cuts)[1]:
            return False
        if self._whole_buckets_at != self.state:
            self._whole_buckets, self._whole_buckets_at = {}, self.state
        at = path, key
        if at not in self._whole_buckets:
            runners = [] if path is Path.EAGER else self._of(path, key)
            self._whole_buckets[at] = (
                bool(runners) and at not in self._failed and all(one.has(runner_key(one, key)) for one in runners)
            )
        return self._whole_buckets[at]

    def missing(self, path: Path, key: BucketKey, cuts: Sequence[int] | None = None) -> Reason | None:
        """Why a bucket of a path is not there; of a piecewise step, the first region's reason.

        Args:
            cuts: as it will be once the blocks are cut there: new regions miss nothing yet.
        """
        runners = self._of(path, key)
        if path is Path.PIECEWISE and cuts is not None and self.would_recut(cuts):
            kept, _ = self.step.kept(cuts)
            runners = [runner for runner in runners if runner in kept or runner not in self.step.blocks]
        elif (path, key) in self._failed:
            return self._failed[path, key][0]
        for runner in runners:
            reason = runner.drop_reasons.get(runner_key(runner, key))
            if reason is not None:
                return reason[0]
        return None

    @property
    def state(self) -> tuple[object, ...]:
        """What changes whenever `missing` or `has` may answer otherwise than before."""
        return self.resources.changes.count, len(self._failed), self.step.cuts

    def drops(self) -> list[str]:
        """Each missing bucket in a sentence."""
        lines = [
            f"{runner.name} at {_size(key)}: {reason.value} ({detail})"
            for runner in self.runners
            for key, (reason, detail) in runner.drop_reasons.items()
        ]
        lines += [
            f"{path} at {_size(key)}: {reason.value} ({detail})"
            for (path, key), (reason, detail) in self._failed.items()
        ]
        return lines

    def fail(self, path: Path, key: BucketKey, detail: str, reason: Reason = Reason.REPLAY_FAILED) -> None:
        """The bucket is not used any more, nor another kind of sampling behind the same regions."""
        same = [k for config in self.configs for k in config.bucket_keys() if k.bs == key.bs]
        for one in same if path is Path.PIECEWISE else [key]:
            self._failed[path, one] = (reason, detail)
        logger.error(
            "%s: no more graph for %s: %s: %s (%s)",
            path,
            _size(key),
            reason.value,
            detail,
            self.backend.memory_state(),
        )

    def recut(self, cuts: Sequence[int]) -> bool:
        """Cut the block stack in front of these layers, between two steps; True if that made new regions.

        Buffers are those that were claimed at start-up. Graphs of regions that are gone are forgotten.
        """
        if not self.would_recut(cuts):
            return False
        self._failed = {at: why for at, why in self._failed.items() if at[0] is not Path.PIECEWISE}
        for runner in self.step.cut(tuple(sorted(set(cuts)))):
            runner.release_graphs()
        return True

    def would_recut(self, cuts: Sequence[int]) -> bool:
        """Whether these cuts differ from those that are made."""
        return tuple(cuts) != self.step.cuts and tuple(sorted(set(cuts))) != self.step.cuts

    def _of(self, path: Path, key: BucketKey | None = None) -> "list[CudaGraphRunner | PiecewiseCudaGraphRunner]":
        """The runners of a path, or of one bucket of it. A prompt's is whole, and captured for itself."""
        if key is not None and key.graph_walk == PROMPT_WALK:
            assert self.prompts is not None, "a bucket of prompts has a runner"
            return [self.prompts]
        if path is Path.WHOLE:
            return [self.whole]
        return [*(self.regions if key is None else self.regions_of(key))]

    # Running a bucket

    def run_whole(
        self, key: BucketKey, num_rows: int, *, eager: bool, replay_failed: Callable[[Exception], None]
    ) -> dict[str, Tensor]:
        """A step on a bucket, in one graph or by its Python; returns its outputs, padding rows included.

        Args:
            replay_failed: as for `PiecewiseStep.run`.
        """
        return self._run(self.whole, key, {}, num_rows, eager, replay_failed)

    def run_prompt(
        self,
        key: BucketKey,
        token_ids: Sequence[int],
        blocks: Sequence[int],
        *,
        eager: bool,
        replay_failed: Callable[[Exception], None],
    ) -> Tensor:
        """The logits behind a prompt, `[1, vocab_size]`; its keys and values go to `blocks`.

        Args:
            replay_failed: as for `PiecewiseStep.run`.
        """
        assert self.prompts is not None, "a bucket of prompts has a runner"
        inputs = prompt_inputs(key, token_ids, blocks, self.pieces.kv_cache.block_size)
        return self._run(self.prompts, key, inputs, 1, eager, replay_failed)["logits"]

    def _run(
        self,
        runner: CudaGraphRunner,
        key: BucketKey,
        inputs: dict[str, Tensor],
        num_rows: int,
        eager: bool,
        replay_failed: Callable[[Exception], None],
    ) -> dict[str, Tensor]:
        if not eager:
            try:
                self.addresses.check(Path.WHOLE, key)
                lease = runner.lease(key)
                outputs = runner.run_forward(lease, inputs)
                runner.release(lease, num_rows)
                return outputs
            except Exception as error:
                replay_failed(error)
        return runner.run_eager(key, inputs)

    def _whole_runner(self, name: str, submodule: WholeDecode | WholePrompt) -> CudaGraphRunner:
        return CudaGraphRunner(
            name,
            submodule,
            self.resources,
            DecodeSteps(),
            self._device,
            None,
            self.settings.comm_group,
            1,
            self.settings.enable_nvtx,
        )

    def _region(self, label: str, config: PiecewiseConfig) -> PiecewiseCudaGraphRunner:
        return PiecewiseCudaGraphRunner(
            label,
            config,
            self.resources,
            DecodeSteps(),
            self._device,
            None,
            1,
            self.settings.comm_group,
            WALK,
        )

    @contextlib.contextmanager
    def at_rest(self) -> Iterator[None]:
        """Whatever warm-ups and captures write goes to the sink, which is zeroed before and after."""
        with torch.inference_mode(), self.pieces.state.at_rest(), self.pieces.sampler.at_rest():
            self._zero_sink()
            try:
                yield
            finally:
                self._zero_sink()

    def _zero_sink(self) -> None:
        for cache in (*self.pieces.kv_cache.k, *self.pieces.kv_cache.v):
            cache[SINK_BLOCK].zero_()


def _size(key: BucketKey) -> str:
    return f"{key.num_tokens} tokens" if key.graph_walk == PROMPT_WALK else f"batch size {key.bs}"


def runner_key(runner: CudaGraphRunner | PiecewiseCudaGraphRunner, key: BucketKey) -> BucketKey:
    """The runner's own key for a decode bucket."""
    return key if isinstance(runner, CudaGraphRunner) else region_key(runner, key)
