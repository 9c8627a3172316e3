"""A decode step piece by piece: its regions, the order of its pieces, and how they run."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..model.decoder import Preamble
from .decode_pieces import (
    BLOCKS_IN,
    BLOCKS_OUT,
    GRAPH_ROADS,
    LOGITS,
    DecodePieces,
    block_region,
    block_spans,
    head_region,
    sample_region,
)
from .graph_buckets import BucketKey
from .piecewise_config import PiecewiseConfig
from .piecewise_output import PiecewiseOutput
from .piecewise_runner import PiecewiseCudaGraphRunner
from .sample_road import SampleRoad
from .static_buffers import StaticBuffers


@dataclass(frozen=True, eq=False)
class Piece:
    """A piece of a step: a region, an eager piece of the engine's own, or a place where users' code may come in.

    Attributes:
        region: replays.
        eager: runs in Python, called with the rows of the bucket, over claimed buffers. A step that was begun ahead may
            start anew, so it may run twice for one token: it must leave alone what outlives the step.
        sees: at a place for users' code, the buffer that it is given.
        layer: the hooks of that place; None: it is for logits processors.
    """

    region: PiecewiseCudaGraphRunner | None = None
    eager: Callable[[int], None] | None = None
    sees: str | None = None
    layer: int | None = None


class PiecewiseStep:
    """The regions that there are now, and steps over them. All that captures, checks and counts regions asks here.

    Args:
        sizes: batch sizes to capture.
        make: makes the runner of a region from its label.
        before_replay: called with the bucket before a region of it replays; raises if it must not.
    """

    def __init__(
        self,
        pieces: DecodePieces,
        buffers: StaticBuffers,
        sizes: Sequence[int],
        make: Callable[[str, PiecewiseConfig], PiecewiseCudaGraphRunner],
        before_replay: Callable[[BucketKey], None],
    ) -> None:
        self._pieces = pieces
        self._buffers = buffers
        self._sizes = sizes
        self._make = make
        self._before_replay = before_replay
        self.head = make("head", head_region(pieces, buffers, sizes))
        self.samples = {
            road: make(f"sample.{index}", sample_region(pieces, buffers, sizes, road))
            for index, road in enumerate(GRAPH_ROADS)
        }
        self.blocks: list[PiecewiseCudaGraphRunner] = []
        self.cuts: tuple[int, ...] = ()
        self._orders: dict[SampleRoad, list[Piece]] = {}
        self.cut(())

    def _order(self, road: SampleRoad) -> Iterator[Piece]:
        """A step that samples in this way, in order: the one list of what it consists of."""
        yield Piece(eager=self._run_preamble)
        for region, (start, _, source, _) in zip(self.blocks, self._spans(self.cuts), strict=True):
            if start in self.cuts:
                yield Piece(sees=source, layer=start)
            yield Piece(region=region)
        if self._pieces.num_layers in self.cuts:
            yield Piece(sees=BLOCKS_OUT, layer=self._pieces.num_layers)
        yield Piece(region=self.head)
        yield Piece(sees=LOGITS)
        yield Piece(region=self.samples[road])

    def order(self, key: BucketKey) -> list[Piece]:
        """The pieces of a step on a bucket."""
        road = key.cg_key_info
        assert isinstance(road, SampleRoad), "decode buckets are keyed by what sampling needs"
        if road not in self._orders:
            self._orders[road] = list(self._order(road))
        return self._orders[road]

    def cut(self, cuts: tuple[int, ...]) -> list[PiecewiseCudaGraphRunner]:
        """Cut the blocks in front of these layers, in ascending order; returns the regions that are gone."""
        before = {region.label: region for region in self.blocks}
        blocks = []
        for span in self._spans(cuts):
            region = before.pop(_label(span), None)
            if region is None:
                region = self._make(_label(span), block_region(self._pieces, self._buffers, self._sizes, span))
                region.prepare_for_capture()
            blocks.append(region)
        orders: dict[SampleRoad, list[Piece]] = {}
        self.blocks, self.cuts, self._orders = blocks, cuts, orders  # together: Ctrl-C may come before or after
        return list(before.values())

    def kept(self, cuts: Sequence[int]) -> tuple[list[PiecewiseCudaGraphRunner], bool]:
        """Of the block regions, those that such a cut would keep, and whether it would make others."""
        labels = {_label(span) for span in self._spans(cuts)}
        kept = [region for region in self.blocks if region.label in labels]
        return kept, len(kept) < len(labels)

    def _spans(self, cuts: Sequence[int]) -> list[tuple[int, int, str, str]]:
        return block_spans(self._pieces.num_layers, cuts)

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

        A region whose replay fails has its inputs still, since none writes to them, but for the mask of allowed tokens,
        which changes nothing a second time: it runs eagerly, and so do those after it. What ran before, users' code
        above all, does not run again.

        Args:
            eager: run the Python of the regions, on the same buffers.
            at_layer: called with (layer, hidden states of the real rows) at each cut.
            at_logits: called with the logits of the real rows; None: nobody wants them.
            replay_failed: called with what a replay raised; may raise itself, where no step may be eager.
            begun: pieces that `begin` has run.
        """
        output = PiecewiseOutput({}, num_rows)
        for piece in self.order(key)[begun:]:
            if piece.region is not None:
                if not eager:
                    try:
                        self._before_replay(key)
                        output = piece.region.run_in_place(region_key(piece.region, key), num_rows)
                        continue
                    except Exception as error:
                        replay_failed(error)
                        eager = True
                output = piece.region.run_eager_in_place(region_key(piece.region, key), num_rows)
            elif piece.eager is not None:
                piece.eager(key.bs)
            elif piece.layer is not None:
                at_layer(piece.layer, self._seen(piece, key, num_rows))
            elif at_logits is not None:
                at_logits(self._seen(piece, key, num_rows))
        return {name: output.get_view(name) for name in output}  # type: ignore[misc]

    def begin(self, key: BucketKey, num_rows: int, replay_failed: Callable[[Exception], object]) -> int:
        """Run a step up to the first place where users' code may come in; returns how many pieces that were.

        Nothing is committed by them, so that the step may as well be run from its start: keys and values go to the
        same places again. 0 if a replay failed.
        """
        for done, piece in enumerate(self.order(key)):
            if piece.region is not None:
                try:
                    piece.region.run_in_place(region_key(piece.region, key), num_rows)
                except Exception as error:
                    replay_failed(error)
                    return 0
            elif piece.eager is not None:
                piece.eager(key.bs)
            else:
                return done
        raise AssertionError("logits come before the end of a step")

    def _run_preamble(self, rows: int) -> None:
        names = (BLOCKS_IN, "preamble.cos", "preamble.sin", "preamble.slot_mapping")
        self._pieces.preamble(rows, out=Preamble(*(self._buffers.get(name, rows) for name in names)))

    def _seen(self, piece: Piece, key: BucketKey, num_rows: int) -> Tensor:
        assert piece.sees is not None, "users' code is given a buffer"
        return self._buffers.get(piece.sees, key.bs)[:num_rows]


def region_key(region: PiecewiseCudaGraphRunner, key: BucketKey) -> BucketKey:
    """A region's own key for a decode bucket: regions are named by label and know nothing of sampling."""
    return BucketKey(region.label, None, key.bs, key.num_tokens)


def _label(span: tuple[int, int, str, str]) -> str:
    start, stop, source, target = span
    return f"blocks[{start}:{stop}] {source} -> {target}"
