"""`ostinato bench peers`: decode steps of other engines beside Ostinato's, taking turns in one process.

Shapes and random weights are the same for all, and so are the keys and values that a sequence begins with, where a peer
takes them. A peer that is missing or fails is a row that says so.
"""

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from .. import __version__
from ..model import Decoder
from ..runtime.graph_reason import Reason
from .errors import BenchError
from .mode_subjects import check_mode, make_subject
from .peer_work import Demand, Peer, PeerModel, Work, timed
from .subject import Subject
from .timing import read_ceiling
from .traffic import step_bytes

WARM_STEPS = 4
"""Whose first tokens are compared before anything is timed."""


class _Ostinato:
    """The engine's own loop, whole steps, tokens on the host."""

    version = __version__

    def at(self, work: Work) -> "_OstinatoPeer":
        return _OstinatoPeer(work.subject)


class _OstinatoPeer:
    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._before = subject.counts()

    def run(self, count: int) -> float:
        milliseconds = timed(self._subject.engine.step, count, self._subject.wait)
        check_mode(dict(self._subject.counts() - self._before), Reason.WHOLE, "ostinato")
        return milliseconds

    def first_tokens(self) -> list[int]:
        return [row[1] for row in self._subject.tokens()]


def _torch(decoder: Decoder, demand: Demand) -> PeerModel:
    from .peer_torch import TorchModel

    return TorchModel(decoder)


def _transformers(decoder: Decoder, demand: Demand) -> PeerModel:
    from .peer_transformers import TransformersModel

    return TransformersModel(decoder, compiled=False)


def _compiled(decoder: Decoder, demand: Demand) -> PeerModel:
    from .peer_transformers import TransformersModel

    return TransformersModel(decoder, compiled=True)


def _vllm(decoder: Decoder, demand: Demand) -> PeerModel:
    from .peer_vllm import VllmModel

    return VllmModel(decoder, demand)


OURS = "ostinato"
PEERS: Mapping[str, Callable[[Decoder, Demand], PeerModel]] = {
    "torch": _torch,
    "transformers": _transformers,
    "transformers-compiled": _compiled,
    "vllm": _vllm,
}
"""How each is made, once for all that is asked for."""


@dataclass(frozen=True)
class PeerCell:
    """A peer at one batch size and context.

    Attributes:
        median_ms, least_ms, most_ms: of a step, over turns; None where there is an error.
        times_ours: the median over Ostinato's; above 1 is slower.
        same_first_tokens: rows whose first token is Ostinato's; None where keys and values are the peer's own.
        error: why there are no times.
    """

    batch: int
    context: int
    peer: str
    version: str | None = None
    median_ms: float | None = None
    least_ms: float | None = None
    most_ms: float | None = None
    tokens_per_second: float | None = None
    ceiling_share: float | None = None
    times_ours: float | None = None
    same_first_tokens: int | None = None
    error: str | None = None


@dataclass(frozen=True)
class PeersResult:
    """Attributes:
    read_ceiling: bytes a second.
    """

    device: torch.device
    dtype: str
    read_ceiling: float
    cells: list[PeerCell]


class Late(Exception):
    """The time for measuring is over."""


class Deadline:
    """After some seconds, or never."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._end = math.inf if seconds is None else time.monotonic() + seconds

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self._end

    def check(self) -> None:
        """Raises Late where it is over."""
        if self.is_over:
            raise Late(f"not measured: the time limit of {self._seconds:.3g} s was over")


@dataclass
class _Turns:
    """What is known of a peer while it is measured."""

    model: PeerModel | None = None
    peer: Peer | None = None
    same: int | None = None
    times: list[float] = field(default_factory=list)
    error: str | None = None

    def attempt(self, action: Callable[[], None]) -> None:
        """Do something of a peer's; what goes wrong is written down."""
        if self.error is None:
            try:
                action()
            except Exception as error:  # a peer's failure is a result
                self.peer = None
                self.error = say(error)


def say(error: Exception) -> str:
    """An error in one line."""
    if isinstance(error, Late):
        return str(error)
    kind = "missing" if isinstance(error, ImportError) else f"failed: {type(error).__name__}"
    return f"{kind}: {' '.join(str(error).split())[:600]}"


class Contest:
    """Ostinato and its peers, each started once for all cells.

    Args:
        cells: (batch, context).
        peers: names of PEERS.
        rounds, steps: turns of each, and steps of a turn.
        seconds: after which nothing more is begun, from now; what is left are rows that say so.
    """

    def __init__(
        self,
        decoder: Decoder,
        cells: Sequence[tuple[int, int]],
        peers: Sequence[str],
        *,
        rounds: int,
        steps: int,
        seconds: float | None = None,
    ) -> None:
        self._decoder, self._cells, self._rounds, self._steps = decoder, cells, rounds, steps
        self._deadline = Deadline(seconds)
        self._room = room_of(rounds, steps)
        self._every = {OURS: _Turns(_Ostinato())} | {name: _Turns() for name in peers}
        demand = Demand(cells, self._room)
        for name in peers:
            self._every[name].attempt(partial(self._open, name, demand))

    def _open(self, name: str, demand: Demand) -> None:
        self._deadline.check()
        self._every[name].model = PEERS[name](self._decoder, demand)

    def measure(
        self, *, ceiling: float | None = None, keep: Callable[[PeersResult], None] = lambda result: None
    ) -> PeersResult:
        """Every cell, in order.

        Args:
            ceiling: bytes a second; None: measured here.
            keep: is given what is known after each cell.

        Raises:
            BenchError: Ostinato itself did not run whole, or failed.
        """
        decoder = self._decoder
        ceiling = ceiling or read_ceiling(decoder.device)
        result = PeersResult(decoder.device, str(decoder.dtype).removeprefix("torch."), ceiling, [])
        for batch, context in self._cells:
            result.cells.extend(self._cell(batch, context, ceiling))
            keep(result)
            gc.collect()
            if decoder.device.type == "cuda":
                torch.cuda.empty_cache()  # a peer may have an allocator of its own
        return result

    def _cell(self, batch: int, context: int, ceiling: float) -> list[PeerCell]:
        decoder, room = self._decoder, self._room
        every = {name: _Turns(model=one.model, error=one.error) for name, one in self._every.items()}
        if self._deadline.is_over:
            for one in every.values():
                one.attempt(self._deadline.check)
            return [_summary(name, one, batch, context) for name, one in every.items()]
        work = Work(decoder, make_subject(decoder, batch, context, "whole", room), batch, context, room)

        def prepare(one: _Turns) -> None:  # before Ostinato's first step, which moves the cache on
            assert one.model is not None, "a peer without a model has an error"
            one.peer = one.model.at(work)

        def warm(one: _Turns) -> None:
            assert one.peer is not None, "it has been prepared"
            one.peer.run(WARM_STEPS)
            first = one.peer.first_tokens()
            ours = work.subject.tokens()
            one.same = None if first is None else sum(a == row[1] for a, row in zip(first, ours, strict=True))

        def take_turn(one: _Turns) -> None:
            assert one.peer is not None, "it has been prepared"
            one.times.append(one.peer.run(self._steps))

        for action in (prepare, warm, *[take_turn] * self._rounds):
            for name, one in every.items():
                if action is not take_turn and name != OURS:
                    one.attempt(self._deadline.check)
                one.attempt(partial(action, one))
        if every[OURS].error is not None:
            raise BenchError(f"batch {batch}, context {context}: {OURS} {every[OURS].error}")
        num_bytes = step_bytes(decoder.config, [context + room // 2] * batch, decoder.dtype.itemsize)
        ours = statistics.median(every[OURS].times)
        return [_summary(name, one, batch, context, ours, num_bytes / ceiling) for name, one in every.items()]


def room_of(rounds: int, steps: int) -> int:
    """Tokens that a sequence may get, and more than it does."""
    return WARM_STEPS + rounds * steps + 8


def _summary(
    name: str, one: _Turns, batch: int, context: int, ours: float = 0.0, floor_seconds: float = 0.0
) -> PeerCell:
    version = one.model.version if one.model is not None else None
    if one.error is not None:
        return PeerCell(batch, context, name, version, error=one.error)
    median = statistics.median(one.times)
    return PeerCell(
        batch,
        context,
        name,
        version,
        median_ms=median,
        least_ms=min(one.times),
        most_ms=max(one.times),
        tokens_per_second=1e3 * batch / median,
        ceiling_share=1e3 * floor_seconds / median,
        times_ours=median / ours,
        same_first_tokens=one.same,
    )
