"""The graphs of an engine's decode steps: the whole-step runner, the regions, and how they are captured and re-cut."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..kernels import SINK_BLOCK
from ..model.decoder import Preamble
from .bucket_capture import Capturer, CaptureSummary, Progress
from .cuda_graph_runner import CudaGraphRunner
from .decode_pieces import (
    BLOCKS_OUT,
    GRAPH_ROADS,
    WALK,
    DecodePieces,
    WholeDecode,
    block_region,
    block_spans,
    decode_configs,
    head_region,
    sample_region,
)
from .graph_backend import GraphBackend
from .graph_buckets import BucketKey
from .graph_reason import Path, Reason
from .piecewise_output import PiecewiseOutput
from .piecewise_runner import PiecewiseCudaGraphRunner
from .sampler import SampleRoad
from .static_buffers import GraphResources, StaticBuffers

logger = logging.getLogger(__name__)


class DecodeSteps:
    """The declare → plan → commit road of decode steps: rows live on the device, and the host plans nothing."""

    def open_rows(self, rids: Sequence[int]) -> None:
        """A dead row of the step state needs no storage."""

    def reset_rows(self, rids: Sequence[int], free: bool) -> None:
        """A dead row does not advance, so it is at rest."""

    def declare(self, graph_walk: str, rows: Any, metadata: Any) -> None:
        """Block tables and lengths are on the device already."""

    def plan(self, step: Any, target: Any) -> None:
        """Kernels read lengths on the device."""

    def commit(self, step: Any) -> None:
        """The last piece of the step commits, on the device."""


@dataclass(frozen=True)
class GraphSettings:
    """What `EngineConfig` says of graphs, resolved for a device.

    Attributes:
        sizes: batch sizes to capture.
    """

    sizes: tuple[int, ...]
    caps_batch_size: bool = True
    budget_bytes: int | None = None
    comm_group: Any = None
    enable_nvtx: bool = False


class DecodeGraphs:
    """Everything that replays decode steps of one engine: one pool, one set of buffers.

    Claims are made here, for the whole-step runner and for all regions, whichever of them is captured first.
    """

    def __init__(self, pieces: DecodePieces, backend: GraphBackend, settings: GraphSettings) -> None:
        self.settings = settings
        self.backend = backend
        self.configs = decode_configs(settings.sizes, settings.caps_batch_size)
        self.pieces = pieces
        self._device = backend.device
        self.resources = GraphResources(backend, backend.new_pool(), StaticBuffers(backend.device))
        self._capturer = Capturer(backend, backend.device, settings.comm_group, settings.budget_bytes)
        buffers, sizes = self.resources.buffers, settings.sizes
        self.whole = CudaGraphRunner(
            "decode",
            WholeDecode(pieces, buffers, sizes, caps_batch_size=settings.caps_batch_size),
            self.resources,
            DecodeSteps(),
            backend.device,
            None,
            settings.comm_group,
            1,
            settings.enable_nvtx,
        )
        self.head = self._region("head", head_region(pieces, buffers, sizes))
        self.samples = {
            road: self._region(f"sample.{index}", sample_region(pieces, buffers, sizes, road))
            for index, road in enumerate(GRAPH_ROADS)
        }
        self.blocks: list[PiecewiseCudaGraphRunner] = []
        self.cuts: tuple[int, ...] = ()
        self._failed: dict[tuple[Path, BucketKey], tuple[Reason, str]] = {}
        self._set_cuts(())
        for runner in self.runners:
            runner.prepare_for_capture()
        pieces.sampler.claim_counts()
        buffers.seal()

    @property
    def regions(self) -> list[PiecewiseCudaGraphRunner]:
        return [*self.blocks, self.head, *self.samples.values()]

    @property
    def runners(self) -> "list[CudaGraphRunner | PiecewiseCudaGraphRunner]":
        return [self.whole, *self.regions]

    def capture_path(self, path: Path, progress: Progress | None = None) -> CaptureSummary:
        """Warm up and capture every bucket of a path."""
        with self._at_rest():
            return self._capturer.capture(self._of(path), progress=progress)

    def warm_up(self, path: Path) -> None:
        """Only run every bucket eagerly, so that late captures find everything compiled and claimed."""
        with self._at_rest():
            self._capturer.warm_up(self._of(path))

    def capture_bucket(self, path: Path, key: BucketKey) -> bool:
        """Capture one bucket of a path between two steps; False if that failed."""
        pairs = [(runner, runner_key(runner, key)) for runner in self._of(path, key)]
        todo = [(runner, own) for runner, own in pairs if not runner.has(own) and own not in runner.drop_reasons]
        if todo:
            with self._at_rest():
                for runner, own in todo:
                    self._capturer.capture_one(runner, own)
        return self.missing(path, key) is None

    def has(self, path: Path, key: BucketKey) -> bool:
        """Whether every graph of a bucket of a path is there."""
        return path is not Path.EAGER and all(runner.has(runner_key(runner, key)) for runner in self._of(path, key))

    def missing(self, path: Path, key: BucketKey, cuts: Sequence[int] | None = None) -> Reason | None:
        """Why a bucket of a path is not there; of a piecewise step, the first region's reason.

        Args:
            cuts: as it will be once the blocks are cut there: new regions miss nothing yet.
        """
        runners = self._of(path, key)
        if path is Path.PIECEWISE and cuts is not None and self.would_recut(cuts):
            labels = {_label(span) for span in block_spans(self.pieces.num_layers, cuts)}
            gone = [id(runner) for runner in self.blocks if runner.label not in labels]
            runners = [runner for runner in runners if id(runner) not in gone]
        elif (path, key) in self._failed:
            return self._failed[path, key][0]
        for runner in runners:
            reason = runner.drop_reasons.get(runner_key(runner, key))
            if reason is not None:
                return reason[0]
        return None

    @property
    def state(self) -> tuple[object, ...]:
        """What changes whenever `missing` may answer otherwise than before."""
        regions = tuple((runner.label, len(runner.drop_reasons)) for runner in self.regions)
        return len(self.whole.drop_reasons), regions, len(self._failed)

    def drops(self) -> list[str]:
        """Each missing bucket in a sentence."""
        lines = [
            f"{runner.name} at batch size {key.bs}: {reason.value} ({detail})"
            for runner in self.runners
            for key, (reason, detail) in runner.drop_reasons.items()
        ]
        lines += [
            f"{path} at batch size {key.bs}: {reason.value} ({detail})"
            for (path, key), (reason, detail) in self._failed.items()
        ]
        return lines

    def fail(self, path: Path, key: BucketKey, detail: str) -> None:
        """A replay failed: the bucket is not used any more, nor another kind of sampling behind the same regions."""
        same = [k for config in self.configs for k in config.bucket_keys() if k.bs == key.bs]
        for one in same if path is Path.PIECEWISE else [key]:
            self._failed[path, one] = (Reason.REPLAY_FAILED, detail)
        logger.error(
            "%s: the graph for batch size %d failed to replay: %s (%s)",
            path,
            key.bs,
            detail,
            self.backend.memory_state(),
        )

    def recut(self, cuts: Sequence[int]) -> bool:
        """Cut the block stack in front of these layers, between two steps; True if that made new regions.

        Buffers are those that were claimed at start-up. Graphs of regions that are gone are forgotten.
        """
        if not self.would_recut(cuts):
            return False
        self._set_cuts(tuple(sorted(set(cuts))))
        return True

    def would_recut(self, cuts: Sequence[int]) -> bool:
        """Whether these cuts differ from those that are made."""
        return tuple(cuts) != self.cuts and tuple(sorted(set(cuts))) != self.cuts

    def _set_cuts(self, cuts: tuple[int, ...]) -> None:
        before = {runner.label: runner for runner in self.blocks}
        blocks = []
        for span in block_spans(self.pieces.num_layers, cuts):
            runner = before.pop(_label(span), None)
            if runner is None:
                region = block_region(self.pieces, self.resources.buffers, self.settings.sizes, span)
                runner = self._region(_label(span), region)
                runner.prepare_for_capture()
            blocks.append(runner)
        self._failed = {at: why for at, why in self._failed.items() if at[0] is not Path.PIECEWISE}
        self.blocks, self.cuts = blocks, cuts  # together: Ctrl-C may come before or after
        for runner in before.values():
            runner.release_graphs()

    def _of(self, path: Path, key: BucketKey | None = None) -> "list[CudaGraphRunner | PiecewiseCudaGraphRunner]":
        """The runners of a path, or of one bucket of it."""
        if path is Path.WHOLE:
            return [self.whole]
        return [*(self.regions if key is None else self.regions_of(key))]

    def regions_of(self, key: BucketKey) -> list[PiecewiseCudaGraphRunner]:
        """The regions of a piecewise step of this bucket, in order."""
        road = key.cg_key_info
        assert isinstance(road, SampleRoad), "decode buckets are keyed by what sampling needs"
        return [*self.blocks, self.head, self.samples[road]]

    # Running a bucket

    def run_whole(
        self, key: BucketKey, num_rows: int, *, eager: bool, replay_failed: Callable[[Exception], None]
    ) -> dict[str, Tensor]:
        """A step on a bucket, in one graph or by its Python; returns its outputs, padding rows included.

        Args:
            replay_failed: as for `run_piecewise`.
        """
        if not eager:
            try:
                lease = self.whole.lease(key)
                outputs = self.whole.run_forward(lease, {})
                self.whole.release(lease, num_rows)
                return outputs
            except Exception as error:
                replay_failed(error)
        return self.whole.run_eager(key, {})

    def run_piecewise(
        self,
        key: BucketKey,
        num_rows: int,
        *,
        eager: bool,
        at_layer: Callable[[int, Tensor], None],
        at_logits: Callable[[Tensor], None],
        replay_failed: Callable[[Exception], None],
    ) -> dict[str, Tensor]:
        """A step on a bucket, region by region.

        A region whose replay fails has its inputs still, since none writes to them: it runs eagerly, and so do those
        after it. What ran before, users' code above all, does not run again.

        Args:
            eager: run the Python of the regions, on the same buffers.
            at_layer: called with (layer, hidden states of the real rows) at each cut.
            at_logits: called with the logits of the real rows.
            replay_failed: called with what a replay raised; may raise itself, where no step may be eager.
        """
        get, pieces = self.resources.buffers.get, self.pieces
        names = ("blocks.in", "preamble.cos", "preamble.sin", "preamble.slot_mapping")
        preamble = pieces.preamble(key.bs, out=Preamble(*(get(name, key.bs) for name in names)))
        context = {"cos": preamble.cos, "sin": preamble.sin, "slot_mapping": preamble.slot_mapping}

        def run(region: PiecewiseCudaGraphRunner, inputs: dict[str, Tensor]) -> PiecewiseOutput:
            nonlocal eager
            if not eager:
                try:
                    return region.run(inputs, real_bs=num_rows)
                except Exception as error:
                    replay_failed(error)
                    eager = True
            return region.run_eager(inputs, key.bs, num_rows)

        hidden, layer = preamble.hidden, 0
        for region, span in zip(self.blocks, block_spans(pieces.num_layers, self.cuts), strict=True):
            layer = span[0]
            if layer in self.cuts:
                at_layer(layer, hidden[:num_rows])
            run(region, {"hidden": hidden, **context})
            hidden = get(span[3], key.bs)
        if pieces.num_layers in self.cuts:
            at_layer(pieces.num_layers, hidden[:num_rows])
        assert hidden.data_ptr() == get(BLOCKS_OUT, key.bs).data_ptr(), "the last region ends in the head's input"
        run(self.head, {"hidden": hidden})
        logits = get("sample.logits", key.bs)
        at_logits(logits[:num_rows])
        assert isinstance(key.cg_key_info, SampleRoad), "decode buckets are keyed by what sampling needs"
        sampled = run(self.samples[key.cg_key_info], {"logits": logits})
        views = {name: sampled.get_view(name) for name in sampled}
        return {name: view for name, view in views.items() if view is not None}

    def _region(self, label: str, config: Any) -> PiecewiseCudaGraphRunner:
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
    def _at_rest(self) -> Iterator[None]:
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


def _label(span: tuple[int, int, str, str]) -> str:
    return f"blocks[{span[0]}:{span[1]}] {span[2]} -> {span[3]}"


def runner_key(runner: CudaGraphRunner | PiecewiseCudaGraphRunner, key: BucketKey) -> BucketKey:
    """The runner's own key for a decode bucket: regions are named by label and know nothing of sampling."""
    if isinstance(runner, CudaGraphRunner):
        return key
    return BucketKey(runner.label, None, key.bs, key.num_tokens)
