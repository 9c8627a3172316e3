"""Which work comes next: prompts first, then a decode step for everybody who is through with the prompt."""

import time
from collections import deque
from dataclasses import dataclass

from .block_allocator import BlockAllocator
from .sequence import Sequence


@dataclass(frozen=True)
class PrefillChunk:
    """Prompt tokens `start .. stop - 1` of one sequence; the last chunk yields its first token."""

    sequence: Sequence
    start: int
    stop: int

    @property
    def is_last(self) -> bool:
        return self.stop == len(self.sequence.prompt_ids)


@dataclass(frozen=True)
class PrefillBatch:
    """Chunks of different sequences, computed together."""

    chunks: list[PrefillChunk]


@dataclass(frozen=True)
class DecodeBatch:
    """One token for each sequence; sequence `i` stands in row `i`."""

    sequences: list[Sequence]


@dataclass(frozen=True)
class RowMove:
    """What retiring a row took: `source` was copied over `target`, then `source` (now the last row) is cleared."""

    source: int
    target: int


class Scheduler:
    """Admits sequences first come, first served, and keeps the decoding ones in rows without gaps.

    A sequence is admitted once the blocks for its longest outcome are free, so it never has to be interrupted.

    Any method may be left in the middle by Ctrl-C. A sequence is always entered where it goes before it is taken from
    where it was, so that `admitted` misses none, and `reset` puts all in order.
    """

    def __init__(
        self, allocator: BlockAllocator, *, block_size: int, max_num_seqs: int, max_num_batched_tokens: int
    ) -> None:
        self.waiting: deque[Sequence] = deque()
        self.prefilling: list[Sequence] = []
        self.running: list[Sequence] = []
        self._leaving: list[Sequence] = []
        self._allocator = allocator
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.prefilling or self.running)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def schedule(self) -> PrefillBatch | DecodeBatch:
        """The next batch. Sequences whose prompt it completes get the rows after the running ones."""
        assert self.has_work, "a batch was asked for although no sequence is left"
        self._admit()
        if self.prefilling:
            return PrefillBatch(self._chunks())
        assert self.running, "the first waiting sequence fits into an idle engine"
        return DecodeBatch(list(self.running))

    def retire(self, sequence: Sequence) -> RowMove | None:
        """Take a sequence out, wherever it stands; tells which rows change if it had one.

        The row must be moved and cleared on the device before `release` gives the sequence's blocks to others.
        """
        self._leaving.append(sequence)
        if sequence.row is None:
            for queue in (self.prefilling, self.waiting):
                if sequence in queue:
                    queue.remove(sequence)
            return None
        move = RowMove(source=len(self.running) - 1, target=sequence.row)
        last = self.running[move.source]
        self.running[move.target] = last
        last.row = move.target
        self.running.pop()
        sequence.row = None
        return move

    def release(self, sequence: Sequence) -> None:
        """Give back the blocks of a retired sequence."""
        self._allocator.free(sequence.blocks)
        sequence.blocks = []
        self._leaving.remove(sequence)

    @property
    def admitted(self) -> list[Sequence]:
        """Whatever may hold blocks or a row, each once."""
        return list(dict.fromkeys([*self.prefilling, *self.running, *self._leaving]))

    def reset(self) -> None:
        """Keep those that wait, in their order, and drop the rest: all blocks are free then.

        The rows of the device must be cleared before. May itself be left in the middle and called again.
        """
        admitted = self.admitted
        self.waiting = deque(s for s in self.waiting if s not in admitted and not s.is_finished)
        self._allocator.reset()
        for sequence in admitted:
            sequence.blocks, sequence.row = [], None
        self.prefilling, self.running, self._leaving = [], [], []

    @property
    def decodes_next(self) -> bool:
        """Whether the next batch is a decode step of those that run now, unless one of them ends before."""
        return bool(self.running) and not self.prefilling and not self._has_room()

    def _has_room(self) -> bool:
        """Whether there is a sequence that waits, a row and the blocks for it."""
        if not self.waiting or len(self.prefilling) + len(self.running) >= self._max_num_seqs:
            return False
        return self._num_blocks(self.waiting[0]) <= self._allocator.num_free

    def _num_blocks(self, sequence: Sequence) -> int:
        return -(-sequence.max_len // self._block_size)

    def _admit(self) -> None:
        while self._has_room():
            sequence = self.waiting[0]
            self.prefilling.append(sequence)
            sequence.start_time = time.perf_counter()
            sequence.blocks = self._allocator.allocate(self._num_blocks(sequence))
            self.waiting.popleft()

    def _chunks(self) -> list[PrefillChunk]:
        chunks = []
        budget = self._max_num_batched_tokens
        for sequence in list(self.prefilling):
            start = sequence.num_computed
            stop = min(len(sequence.prompt_ids), start + budget)
            chunk = PrefillChunk(sequence, start, stop)
            chunks.append(chunk)
            if chunk.is_last:
                sequence.row = len(self.running)
                self.running.append(sequence)
                self.prefilling.remove(sequence)
            budget -= stop - start
            if not budget:
                break
        return chunks
