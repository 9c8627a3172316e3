"""The device's rows: written, moved, cleared and advanced, and a ring that hands tokens to the host."""

import random
from typing import Any

import pytest
import torch

from ostinato.kernels import SINK_BLOCK
from ostinato.runtime.step_state import RowUpdate, StepState

NUM_ROWS, WIDTH = 6, 4
DEAD = (0, 0, 0, [SINK_BLOCK] * WIDTH)


def make(device: str = "cpu") -> StepState:
    return StepState(NUM_ROWS, WIDTH, torch.device(device))


def rows(state: StepState) -> list[Any]:
    columns = (state.token_ids, state.positions, state.seq_lens, state.block_tables)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def update(row: int, num_blocks: int = 2) -> RowUpdate:
    first = 10 * (row + 1)
    return RowUpdate(row, row + 40, row + 20, row + 21, list(range(first, first + num_blocks)))


def written(row: int, num_blocks: int = 2) -> Any:
    one = update(row, num_blocks)
    return one.token_id, one.position, one.seq_len, one.blocks + [SINK_BLOCK] * (WIDTH - num_blocks)


def commit(state: StepState, *token_ids: int) -> int:
    return state.commit(torch.tensor(token_ids, device=state.token_ids.device))


def test_all_rows_are_dead_at_first(device: str) -> None:
    """B38, invariant 9: the sink stands in every column."""
    state = make(device)
    assert rows(state) == [DEAD] * NUM_ROWS
    assert [state.token_ids.dtype, state.positions.dtype] == [torch.int64] * 2
    assert [state.seq_lens.dtype, state.block_tables.dtype] == [torch.int32] * 2


@pytest.mark.parametrize("num_blocks", range(WIDTH + 1))
def test_a_written_row_is_its_update_and_the_sink(device: str, num_blocks: int) -> None:
    state = make(device)
    state.write_rows([update(4, num_blocks), update(1, num_blocks)])
    expected = [DEAD] * NUM_ROWS
    expected[4], expected[1] = written(4, num_blocks), written(1, num_blocks)
    assert rows(state) == expected


def test_a_second_write_leaves_nothing_of_the_first(device: str) -> None:
    """B38: least of all blocks of a longer table."""
    state = make(device)
    state.write_rows([RowUpdate(2, 9, 9, 9, [5, 6, 7, 8])])
    state.write_rows([RowUpdate(2, 1, 2, 3, [4])])
    assert rows(state)[2] == (1, 2, 3, [4, SINK_BLOCK, SINK_BLOCK, SINK_BLOCK])


def test_no_update_is_no_write(device: str) -> None:
    state = make(device)
    state.write_rows([])
    assert rows(state) == [DEAD] * NUM_ROWS


def test_a_cleared_row_is_a_dead_row(device: str) -> None:
    """B38"""
    state = make(device)
    state.write_rows([update(row) for row in range(NUM_ROWS)])
    state.clear_rows([5, 2])
    assert rows(state) == [DEAD if row in (2, 5) else written(row) for row in range(NUM_ROWS)]


def test_a_move_copies_a_row_as_the_device_has_it(device: str) -> None:
    """After steps of which the host has read nothing."""
    state = make(device)
    state.write_rows([update(0), update(1), update(2)])
    commit(state, 7, 8, 9)
    state.move_row(2, 0)
    moved = (9, 23, 24, written(2)[3])
    assert rows(state)[:3] == [moved, (8, 22, 23, written(1)[3]), moved]


def test_commit_advances_live_rows_of_the_step_and_no_others(device: str) -> None:
    """B38: a dead row inside the step and live rows outside stay as they are."""
    state = make(device)
    state.write_rows([update(row) for row in (0, 1, 3, 5)])
    commit(state, 7, 8, 9, 6)
    stepped = [(token, row + 21, row + 22, written(row)[3]) for row, token in ((0, 7), (1, 8), (3, 6))]
    assert rows(state) == [stepped[0], stepped[1], DEAD, stepped[2], DEAD, written(5)]


def test_a_row_that_died_does_not_advance_until_it_is_written_again(device: str) -> None:
    """B38"""
    state = make(device)
    state.write_rows([update(0), update(1)])
    state.clear_rows([1])
    for _ in range(7):
        commit(state, 3, 3)
    assert rows(state)[1] == DEAD
    state.write_rows([update(1)])
    commit(state, 3, 5)
    assert rows(state)[1] == (5, 22, 23, written(1)[3])


def test_the_ring_keeps_the_last_steps_while_the_device_runs_ahead(device: str) -> None:
    """Invariant 8: the three steps before the newest can still be read; an older one or one to come cannot."""
    state = make(device)
    state.write_rows([update(row) for row in range(NUM_ROWS)])
    draw = random.Random(0)
    steps: list[list[int]] = []
    with pytest.raises(AssertionError, match="ring"):
        state.read(0, 1)
    with pytest.raises(AssertionError, match="ring"):
        state.read(-1, 1)
    for number in range(11):
        steps.append([draw.randrange(100) for _ in range(draw.randint(1, NUM_ROWS))])
        assert commit(state, *steps[-1]) == number
        for recent in range(max(0, number - 3), number + 1):
            assert state.read(recent, len(steps[recent])) == steps[recent]
        with pytest.raises(AssertionError, match="ring"):
            state.read(number + 1, 1)
        if number >= 4:
            with pytest.raises(AssertionError, match="ring"):
                state.read(number - 4, 1)


def test_writes_in_a_row_do_not_overtake_each_other(device: str) -> None:
    """More writes than the staging ring has entries, with nothing that waits between them."""
    state = make(device)
    for token in range(50):
        state.write_rows([RowUpdate(row, 100 * token + row, token, token + 1, [token + 2]) for row in range(NUM_ROWS)])
        commit(state, *([token] * NUM_ROWS))
    state.write_rows([update(3)])
    ends = [(49, 50, 51, [51, SINK_BLOCK, SINK_BLOCK, SINK_BLOCK])] * NUM_ROWS
    ends[3] = written(3)
    assert rows(state) == ends


@pytest.mark.gpu
def test_the_host_may_be_steps_ahead_of_the_device() -> None:
    """Invariant 6: updates queued behind a busy stream are applied as they were when queued."""
    state = make("cuda")
    torch.cuda._sleep(200_000_000)
    for token in range(4):
        state.write_rows([RowUpdate(row, token, 10 * token, 10 * token + 1, [token + 2]) for row in range(4)])
    commit(state, *range(50, 56))
    assert rows(state)[:4] == [(50 + row, 31, 32, [5] + [SINK_BLOCK] * 3) for row in range(4)]
