"""The state that decode steps read and advance, owned by the device: one set, whatever is replayed over it."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels import SINK_BLOCK, commit, update_rows
from .staging_ring import StagingRing

_ENTRIES = 4
"""Depth of the two rings between host and device: a host one or two steps ahead never touches an entry in use."""


@dataclass(frozen=True)
class RowUpdate:
    """What the host wants a row to be: `token_id` is fed next, at `position`, seeing `seq_len` keys."""

    row: int
    token_id: int
    position: int
    seq_len: int
    blocks: list[int]


class StepState:
    """`max_num_seqs` rows of decode state; live rows are the leading ones.

    The host changes single rows, in stream order, through `write_rows`, `move_row` and `clear_rows`; a step advances
    the live rows through `commit`. Whole arrays are never overwritten, so a host that runs ahead of the device cannot
    undo what a step in flight has done.

    Attributes:
        token_ids, positions: `[max_num_seqs]` int64, the token each row is fed next and its position.
        seq_lens: `[max_num_seqs]` int32, keys visible in the next step; 0 marks a dead row.
        block_tables: `[max_num_seqs, max_blocks_per_seq]` int32; columns not in use name the sink block.
        num_changes: how often the host has changed rows.
    """

    def __init__(self, max_num_seqs: int, max_blocks_per_seq: int, device: torch.device) -> None:
        self.token_ids = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self.positions = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self.seq_lens = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        self.block_tables = torch.full((max_num_seqs, max_blocks_per_seq), SINK_BLOCK, dtype=torch.int32, device=device)
        self._device = device
        # On a GPU the ring of sampled tokens is host memory which the commit writes to: reading a step takes no copy,
        # and no wait for later steps.
        self._sampled = torch.zeros(_ENTRIES, max_num_seqs, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._done = [torch.cuda.Event() for _ in range(_ENTRIES)] if device.type == "cuda" else []
        self._step = torch.zeros(1, dtype=torch.int64, device=device)
        self._num_commits = 0
        self.num_changes = 0
        shape = (max_num_seqs, 4 + max_blocks_per_seq)
        self._staging = StagingRing(shape, torch.int64, device, _ENTRIES)

    def write_rows(self, updates: list[RowUpdate]) -> None:
        """Make rows what the updates say; at most one update a row."""
        if not updates:
            return
        self.num_changes += 1
        width = self.block_tables.shape[1]
        records = [
            [u.row, u.token_id, u.position, u.seq_len, *u.blocks, *[SINK_BLOCK] * (width - len(u.blocks))]
            for u in updates
        ]
        staged = self._staging.put(torch.tensor(records, dtype=torch.int64))
        update_rows(staged, self.token_ids, self.positions, self.seq_lens, self.block_tables)

    def clear_rows(self, rows: list[int]) -> None:
        """Retire rows: length 0, every table column the sink. Must come before their blocks are given back."""
        self.write_rows([RowUpdate(row, 0, 0, 0, []) for row in rows])

    def move_row(self, source: int, target: int) -> None:
        """Copy row `source` over row `target`, on the device: the host may not know yet what `source` holds."""
        self.num_changes += 1
        for tensor in self.row_tensors():
            tensor[target].copy_(tensor[source])

    def row_tensors(self) -> list[Tensor]:
        """All that the device knows of each row, `[max_num_seqs, …]`."""
        return [self.token_ids, self.positions, self.seq_lens, self.block_tables]

    def device_tensors(self) -> list[Tensor]:
        """All that steps read and write on the device; the ring of sampled tokens is the host's."""
        return [*self.row_tensors(), self._step]

    def commit(self, sampled: Tensor) -> int:
        """End a step over the first `len(sampled)` rows; returns the step's number, for `read`."""
        self.commit_rows(sampled)
        return self.count_commit()

    def commit_rows(self, sampled: Tensor) -> None:
        """The device's part of `commit`, which can be recorded."""
        n = sampled.shape[0]
        commit(sampled, self.token_ids[:n], self.positions[:n], self.seq_lens[:n], self._sampled, self._step)

    def count_commit(self) -> int:
        """The host's part of `commit`, due whenever the device's has been run or replayed."""
        if self._done:
            self._done[self._num_commits % _ENTRIES].record(torch.cuda.current_stream(self._device))
        self._num_commits += 1
        return self._num_commits - 1

    def kill_rows(self, start: int, stop: int) -> None:
        """Make rows dead without the host's staging: length 0, every table column the sink."""
        self.num_changes += 1
        for tensor in (self.token_ids, self.positions, self.seq_lens):
            tensor[start:stop].zero_()
        self.block_tables[start:stop].fill_(SINK_BLOCK)

    def reset(self) -> None:
        """Every row is dead, and host and device count the same steps again, wherever a step was left."""
        self.kill_rows(0, len(self.seq_lens))
        self._step.fill_(self._num_commits)

    @contextlib.contextmanager
    def at_rest(self) -> Iterator[None]:
        """Within the body every row is dead and writes to the sink; what the body commits is undone at its end.

        The ring of sampled tokens is not kept: all steps before must have been read.
        """
        tensors = self.device_tensors()
        saved = [tensor.clone() for tensor in tensors]
        self.kill_rows(0, len(self.seq_lens))
        try:
            yield
        finally:
            for tensor, before in zip(tensors, saved, strict=True):
                tensor.copy_(before)

    def read(self, step: int, num_rows: int) -> list[int]:
        """The tokens that a recent step sampled for its first rows; waits for that step."""
        assert max(0, self._num_commits - _ENTRIES) <= step < self._num_commits, (
            "a step is read while the ring still holds it"
        )
        if self._done:
            self._done[step % _ENTRIES].synchronize()
        return self._sampled[step % _ENTRIES, :num_rows].tolist()
