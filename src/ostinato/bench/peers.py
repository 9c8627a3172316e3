"""`ostinato bench peers`: decode steps of other engines beside Ostinato's, taking turns in one process.

Shapes and random weights are the same for all, and so are the keys and values that a sequence begins with, where a peer
takes them. A peer that is missing or fails is a row that says so.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..model import Decoder
from ..runtime.graph_reason import Reason
from .errors import BenchError
from .modes import check_mode, make_subject, place
from .output import Column, Report
from .peer_work import Peer, PeerModel, Work, timed
from .subject import TAPE, Subject
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


def _torch(decoder: Decoder, batch: int, length: int) -> PeerModel:
    from .peer_torch import TorchModel

    return TorchModel(decoder)


def _transformers(decoder: Decoder, batch: int, length: int) -> PeerModel:
    from .peer_transformers import TransformersModel

    return TransformersModel(decoder, compiled=False)


def _compiled(decoder: Decoder, batch: int, length: int) -> PeerModel:
    from .peer_transformers import TransformersModel

    return TransformersModel(decoder, compiled=True)


def _vllm(decoder: Decoder, batch: int, length: int) -> PeerModel:
    from .peer_vllm import VllmModel

    return VllmModel(decoder, batch, length)


MakePeer = Callable[[Decoder, int, int], PeerModel]
OURS = "ostinato"
PEERS: Mapping[str, MakePeer] = {
    "torch": _torch,
    "transformers": _transformers,
    "transformers-compiled": _compiled,
    "vllm": _vllm,
}
"""How each is made, for a largest batch and a longest sequence."""


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
    kind = "missing" if isinstance(error, ImportError) else f"failed: {type(error).__name__}"
    return f"{kind}: {' '.join(str(error).split())[:300]}"


def measure(
    decoder: Decoder,
    cells: Sequence[tuple[int, int]],
    peers: Sequence[str],
    *,
    rounds: int,
    steps: int,
    ceiling: float | None = None,
) -> PeersResult:
    """Ostinato and the peers at each batch size and context.

    Args:
        cells: (batch, context).
        rounds, steps: turns of each peer, and steps of a turn.

    Raises:
        BenchError: Ostinato itself did not run whole, or failed.
    """
    ceiling = ceiling or read_ceiling(decoder.device)
    room = WARM_STEPS + rounds * steps + 8
    batch, length = max(batch for batch, _ in cells), max(context for _, context in cells) + room
    every = {OURS: _Turns(_Ostinato())} | {name: _Turns() for name in peers}
    for name in peers:
        every[name].attempt(partial(_open, every[name], PEERS[name], decoder, batch, length))
    found = []
    for batch, context in cells:
        found += _cell(decoder, batch, context, every, room, rounds, steps, ceiling)
    return PeersResult(decoder.device, str(decoder.dtype).removeprefix("torch."), ceiling, found)


def _open(one: _Turns, make: MakePeer, decoder: Decoder, batch: int, length: int) -> None:
    one.model = make(decoder, batch, length)


def _cell(
    decoder: Decoder,
    batch: int,
    context: int,
    models: Mapping[str, _Turns],
    room: int,
    rounds: int,
    steps: int,
    ceiling: float,
) -> list[PeerCell]:
    work = Work(decoder, make_subject(decoder, batch, context, "whole", room), batch, context, room)
    every = {name: _Turns(model=one.model, error=one.error) for name, one in models.items()}

    def prepare(one: _Turns) -> None:
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
        one.times.append(one.peer.run(steps))

    for one in every.values():  # before Ostinato's first step, which moves the cache on
        one.attempt(partial(prepare, one))
    for action in (warm, *[take_turn] * rounds):
        for one in every.values():
            one.attempt(partial(action, one))
    if every[OURS].error is not None:
        raise BenchError(f"batch {batch}, context {context}: {OURS} {every[OURS].error}")
    num_bytes = step_bytes(decoder.config, [context + room // 2] * batch, decoder.dtype.itemsize)
    ours = statistics.median(every[OURS].times)
    return [_summary(name, one, batch, context, ours, num_bytes / ceiling) for name, one in every.items()]


def _summary(name: str, one: _Turns, batch: int, context: int, ours: float, floor_seconds: float) -> PeerCell:
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


def report(result: PeersResult, model: str) -> Report:
    """The peers side by side, to be shown."""
    columns = [
        Column("batch", "d"),
        Column("context", "d"),
        Column("engine"),
        Column("version"),
        Column("ms a step", ".3f"),
        Column("least", ".3f"),
        Column("most", ".3f"),
        Column("tok/s", ".1f"),
        Column("share of ceiling", ".1%"),
        Column("times ours", ".2f"),
        Column("same first tokens", "d"),
    ]
    rows = [
        (
            cell.batch,
            cell.context,
            cell.peer,
            cell.version,
            cell.median_ms,
            cell.least_ms,
            cell.most_ms,
            cell.tokens_per_second,
            cell.ceiling_share,
            cell.times_ours,
            cell.same_first_tokens,
        )
        for cell in result.cells
    ]
    where = place(result.device, model, result.dtype)
    notes = [
        f"{where['device']}, torch {where['torch']}; read ceiling {result.read_ceiling / 1e9:.1f} GB/s",
        "the same weights; ostinato: whole, with its tokens on the host after each step; torch and transformers: the "
        "same keys and values, tokens stay on the device; vllm: its own, difference of two generations",
    ]
    for peer, error in dict.fromkeys((cell.peer, cell.error) for cell in result.cells if cell.error is not None):
        at = [f"{c.batch} x {c.context}" for c in result.cells if (c.peer, c.error) == (peer, error)]
        notes.append(f"{peer} {error} (batch x context {', '.join(at)})")
    if result.device.type != "cuda":
        notes.insert(0, TAPE)
    document = {
        "command": "peers",
        "version": 1,
        "where": where,
        "read_ceiling": result.read_ceiling,
        "cells": [asdict(cell) for cell in result.cells],
    }
    return Report(f"decode steps of {model}, {result.dtype}, greedy", columns, rows, notes, document)


def plot(result: PeersResult, path: Path) -> None:
    """Milliseconds of a step over the batch size, a line for each engine and context."""
    from .output import figure

    label = "" if result.device.type == "cuda" else "\n(tape on a CPU, no CUDA graphs)"
    timed_cells = [cell for cell in result.cells if cell.error is None]
    with figure(path, 7, 4) as [axes]:
        for peer, context in dict.fromkeys((cell.peer, cell.context) for cell in timed_cells):
            line = [cell for cell in timed_cells if (cell.peer, cell.context) == (peer, context)]
            times: list[Any] = [cell.median_ms for cell in line]
            axes.plot([cell.batch for cell in line], times, "o-", label=f"{peer}, {context} tokens")
        axes.set_xlabel("batch size")
        axes.set_ylabel(f"ms a step{label}")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.legend(fontsize=7)
