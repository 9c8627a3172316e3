"""What `ostinato bench peers` asks of an engine, and what it gives to all of them alike."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..model import Decoder
from .subject import Subject


@dataclass(frozen=True)
class Demand:
    """All that a peer will be asked for, so that one start serves it.

    Attributes:
        cells: (batch, context) of each.
        room: steps that may be asked for at each.
    """

    cells: Sequence[tuple[int, int]]
    room: int

    @property
    def batches(self) -> list[int]:
        return sorted({batch for batch, _ in self.cells})

    def reach(self, more: int) -> int:
        """The longest sequence, with `more` tokens beyond the room."""
        return max(context for _, context in self.cells) + self.room + more

    def kv_tokens(self, more: int, block: int) -> int:
        """Of the cell that keeps the most keys and values, in whole blocks, and those of one sequence to spare."""
        return max((batch + 1) * -(-(context + self.room + more) // block) * block for batch, context in self.cells)


@dataclass(frozen=True)
class Work:
    """What every peer does at one batch size and context.

    Attributes:
        subject: Ostinato's engine, whose keys, values and first tokens the others take.
        room: steps that may be asked for.
    """

    decoder: Decoder
    subject: Subject
    batch: int
    context: int
    room: int

    def keys_values(self, layer: int) -> tuple[Tensor, Tensor]:
        """Of the context, `[batch, num_kv_heads, context, head_dim]` each, keys rotated."""
        blocks = torch.tensor([sequence.blocks for sequence in self.subject.sequences], device=self.decoder.device)
        cache = self.subject.kv_cache
        keys, values = (
            one[layer][blocks].transpose(1, 2).flatten(2, 3)[:, :, : self.context] for one in (cache.k, cache.v)
        )
        return keys, values

    def token_ids(self) -> Tensor:
        """The tokens that the first step takes, `[batch, 1]`."""
        ids = [[sequence.output_ids[0]] for sequence in self.subject.sequences]
        return torch.tensor(ids, device=self.decoder.device)


class Peer(Protocol):
    """An engine about to decode."""

    def run(self, count: int) -> float:
        """Decode so many tokens a sequence; milliseconds of a step, from idle to idle."""

    def first_tokens(self) -> list[int] | None:
        """What the first step gave, a row each; None where keys and values are the peer's own."""


class PeerModel(Protocol):
    """A peer with its weights.

    Attributes:
        version: of what it is made of.
    """

    version: str

    def at(self, work: Work) -> Peer: ...


def timed(run: Callable[[], object], count: int, wait: Callable[[], None]) -> float:
    """Milliseconds of one of `count` runs, the device idle before and after."""
    wait()
    started = time.perf_counter()
    for _ in range(count):
        run()
    wait()
    return 1e3 * (time.perf_counter() - started) / count
