import torch
from torch import Tensor

from ostinato.kernels import SINK_BLOCK, update_rows_ref

State = tuple[Tensor, Tensor, Tensor, Tensor]


def state(device: str = "cpu") -> State:
    """token_ids, positions, seq_lens and block_tables of six rows, every entry different."""
    token_ids, positions = torch.arange(6) + 100, torch.arange(6) + 200
    seq_lens, tables = (torch.arange(6) + 300).int(), (torch.arange(18).view(6, 3) + 400).int()
    return token_ids.to(device), positions.to(device), seq_lens.to(device), tables.to(device)


def lists(tensors: State) -> list[list[object]]:
    return [tensor.tolist() for tensor in tensors]


def test_writes_the_named_rows_and_no_others(device: str) -> None:
    updates = [[5, 1, 2, 3, 7, 8, 9], [0, 4, 5, 6, 2, 3, 4]]
    tensors = state(device)
    expected = lists(tensors)
    for row, token_id, position, seq_len, *table in updates:
        for column, value in zip(expected, (token_id, position, seq_len, table), strict=True):
            column[row] = value

    update_rows_ref(torch.tensor(updates, device=device), *tensors)

    assert lists(tensors) == expected
    assert [tensor.dtype for tensor in tensors] == [torch.int64, torch.int64, torch.int32, torch.int32]


def test_no_update_changes_nothing() -> None:
    tensors = state()
    update_rows_ref(torch.empty(0, 7, dtype=torch.int64), *tensors)
    assert lists(tensors) == lists(state())


def test_updates_and_state_may_be_views() -> None:
    """B48: an entry of a ring of updates, and state that is a slice of larger tensors."""
    ring = torch.full((2, 4, 7), -1)
    ring[1, :2] = torch.tensor([[1, 11, 12, 13, 14, 15, 16], [0, 21, 22, 23, 24, 25, 26]])
    ids, positions, lens = torch.zeros(8, dtype=torch.int64), torch.zeros(4, 2, dtype=torch.int64), torch.zeros(6).int()
    tables = torch.zeros(4, 5).int()
    update_rows_ref(ring[1, :2], ids[::2], positions[:, 1], lens[2:], tables[:, 1:4])
    assert ids.tolist() == [21, 0, 11, 0, 0, 0, 0, 0]
    assert positions.tolist() == [[0, 22], [0, 12], [0, 0], [0, 0]]
    assert lens.tolist() == [0, 0, 23, 13, 0, 0]
    assert tables.tolist() == [[0, 24, 25, 26, 0], [0, 14, 15, 16, 0], [0] * 5, [0] * 5]


def test_a_row_can_be_retired_to_the_sink() -> None:
    tensors = state()
    update_rows_ref(torch.tensor([[3, 0, 0, 0, *[SINK_BLOCK] * 3]]), *tensors)
    token_ids, positions, seq_lens, tables = tensors
    assert [token_ids[3], positions[3], seq_lens[3]] == [0, 0, 0]
    assert tables[3].tolist() == [SINK_BLOCK] * 3
