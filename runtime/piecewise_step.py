"""A decode step piece by piece: preamble, regions, and the places between them where users' code runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ..model.decoder import Preamble
from .decode_pieces import BLOCKS_IN, BLOCKS_OUT, DecodePieces, block_spans
from .graph_buckets import BucketKey
from .piecewise_output import PiecewiseOutput
from .piecewise_runner import PiecewiseCudaGraphRunner
from .sample_road import SampleRoad
from .static_buffers import StaticBuffers


@dataclass(frozen=True, eq=False)
class _Piece:
    """A piece of a step on one bucket: the preamble, a region, or a place where users' code may come in.

    Attributes:
        values: what it reads, or what users see there.
        layer: of a hook; None for all else.
        is_logits: the place of logits processors and masks.
        region: what replays; None for the preamble and for places.
    """

    values: Tensor
    layer: int | None = None
    is_logits: bool = False
    region: PiecewiseCudaGraphRunner | None = None
    inputs: Mapping[str, Tensor] = field(default_factory=dict)


class PiecewiseStep:
    """Runs steps over the regions that there are now.

    Args:
        samples: the last region, for each kind of sampling.
        before_replay: called with the bucket before a region of it replays; raises if it must not.
    """

    def __init__(
        self,
        pieces: DecodePieces,
        buffers: StaticBuffers,
        head: PiecewiseCudaGraphRunner,
        samples: Mapping[SampleRoad, PiecewiseCudaGraphRunner],
        before_replay: Callable[[BucketKey], None],
    ) -> None:
        self._pieces = pieces
        self._buffers = buffers
        self._head = head
        self._samples = samples
        self._before_replay = before_replay
        self._blocks: Sequence[PiecewiseCudaGraphRunner] = ()
        self._cuts: tuple[int, ...] = ()
        self._steps: dict[BucketKey, list[_Piece]] = {}

    def cut(self, blocks: Sequence[PiecewiseCudaGraphRunner], cuts: tuple[int, ...]) -> None:
        """From now on the blocks are these regions, cut in front of these layers."""
        self._blocks, self._cuts, self._steps = blocks, cuts, {}

    def run(
        self,
        key: BucketKey,
        num_rows: int,
        *,
        eager: bool,
        at_layer: Callable[[int, Tensor], None],
        at_logits: Callable[[Tensor], None] | None,
        replay_failed: Callable[[Exception], None],
        begun: int = 0,
    ) -> dict[str, Tensor]:
        """A step on a bucket, piece by piece.

        A region whose replay fails has its inputs still, since none writes to them: it runs eagerly, and so do those
        after it. What ran before, users' code above all, does not run again.

        Args:
            eager: run the Python of the regions, on the same buffers.
            at_layer: called with (layer, hidden states of the real rows) at each cut.
            at_logits: called with the logits of the real rows; None: nobody wants them.
            replay_failed: called with what a replay raised; may raise itself, where no step may be eager.
            begun: pieces that `begin` has run.
        """
        output = PiecewiseOutput({}, num_rows)
        for piece in self._step_of(key)[begun:]:
            if piece.layer is not None:
                at_layer(piece.layer, piece.values[:num_rows])
            elif piece.region is None and piece.is_logits:
                if at_logits is not None:
                    at_logits(piece.values[:num_rows])
            elif piece.region is None:
                self._run_preamble(key)
            else:
                if not eager:
                    try:
                        self._before_replay(key)
                        output = piece.region.run_in_place(region_key(piece.region, key), num_rows)
                        continue
                    except Exception as error:
                        replay_failed(error)
                        eager = True
                output = piece.region.run_eager(piece.inputs, key.bs, num_rows)
        return {name: output.get_view(name) for name in output}  # type: ignore[misc]

    def begin(self, key: BucketKey, num_rows: int, replay_failed: Callable[[Exception], object]) -> int:
        """Run a step up to the first place where users' code may come in; returns how many pieces that were.

        Nothing is committed by them, so that the step may as well be run from its start: keys and values go to the
        same places again. 0 if a replay failed.
        """
        for done, piece in enumerate(self._step_of(key)):
            if piece.layer is not None or piece.is_logits:
                return done
            if piece.region is None:
                self._run_preamble(key)
                continue
            try:
                piece.region.run_in_place(region_key(piece.region, key), num_rows)
            except Exception as error:
                replay_failed(error)
                return 0
        raise AssertionError("logits come before the end of a step")

    def _run_preamble(self, key: BucketKey) -> None:
        get = self._buffers.get
        names = (BLOCKS_IN, "preamble.cos", "preamble.sin", "preamble.slot_mapping")
        self._pieces.preamble(key.bs, out=Preamble(*(get(name, key.bs) for name in names)))

    def _step_of(self, key: BucketKey) -> "list[_Piece]":
        """The pieces of a step on a bucket as the blocks are cut now."""
        if key not in self._steps:
            self._steps[key] = self._make_step(key)
        return self._steps[key]

    def _make_step(self, key: BucketKey) -> "list[_Piece]":
        get, num_layers = self._buffers.get, self._pieces.num_layers
        hidden, logits = get(BLOCKS_IN, key.bs), get("sample.logits", key.bs)
        context = {name: get(f"preamble.{name}", key.bs) for name in ("cos", "sin", "slot_mapping")}
        step = [_Piece(hidden)]
        for region, span in zip(self._blocks, block_spans(num_layers, self._cuts), strict=True):
            if span[0] in self._cuts:
                step.append(_Piece(hidden, layer=span[0]))
            step.append(_Piece(hidden, region=region, inputs={"hidden": hidden, **context}))
            hidden = get(span[3], key.bs)
        if num_layers in self._cuts:
            step.append(_Piece(hidden, layer=num_layers))
        assert hidden is get(BLOCKS_OUT, key.bs), "the last region ends in the head's input"
        assert isinstance(key.cg_key_info, SampleRoad), "decode buckets are keyed by what sampling needs"
        sample = self._samples[key.cg_key_info]
        step.append(_Piece(hidden, region=self._head, inputs={"hidden": hidden}))
        step.append(_Piece(logits, is_logits=True))
        step.append(_Piece(logits, region=sample, inputs={"logits": logits}))
        return step


def region_key(region: PiecewiseCudaGraphRunner, key: BucketKey) -> BucketKey:
    """A region's own key for a decode bucket: regions are named by label and know nothing of sampling."""
    return BucketKey(region.label, None, key.bs, key.num_tokens)
