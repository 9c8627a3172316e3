"""Rows of the batch brought to the front and back."""

import torch

from ostinato.kernels import SINK_BLOCK
from ostinato.runtime.row_window import rows_in_front
from ostinato.runtime.step_state import RowUpdate, StepState


class NoRows:
    """A sampler that knows nothing of rows."""

    def row_tensors(self) -> list[torch.Tensor]:
        return []


def test_later_rows_come_to_the_front_padding_is_dead_and_all_go_back() -> None:
    """A later part that does not fill its bucket: a row of the first part must not run again as padding."""
    state = StepState(4, 2, torch.device("cpu"))
    state.write_rows([RowUpdate(row, 10 + row, row, row + 1, [5 + row]) for row in range(4)])
    before = [tensor.clone() for tensor in state.row_tensors()]
    with rows_in_front(state, NoRows(), 2, 3, 2):  # type: ignore[arg-type]
        assert (state.token_ids[0].item(), state.block_tables[0].tolist()) == (12, [7, SINK_BLOCK])
        assert (state.seq_lens[1].item(), state.block_tables[1].tolist()) == (0, [SINK_BLOCK] * 2)
        state.token_ids[0] = 50
    before[0][2] = 50
    assert all(torch.equal(now, then) for now, then in zip(state.row_tensors(), before, strict=True))
