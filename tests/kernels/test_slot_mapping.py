from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ostinato.kernels import SINK_BLOCK, slot_mapping_ref

BLOCK_SIZE = 4


def expected_slot(position: int, table: list[int]) -> int:
    column = position // BLOCK_SIZE
    block = table[column] if column < len(table) else SINK_BLOCK
    return block * BLOCK_SIZE + position % BLOCK_SIZE


def test_decode_takes_each_position_through_its_own_table(device: str) -> None:
    tables = [[7, 3, 9], [2, 8, 4], [1, 1, 1]]
    for positions in ([0, 3, 0], [4, 7, 0], [8, 11, 5]):
        slots = slot_mapping_ref(
            torch.tensor(positions, device=device), torch.tensor(tables, dtype=torch.int32, device=device), BLOCK_SIZE
        )
        assert slots.dtype == torch.int64
        assert slots.tolist() == [expected_slot(p, t) for p, t in zip(positions, tables, strict=True)]


@pytest.mark.parametrize("position", [12, 13, 100, 2**40])
def test_a_position_past_the_table_goes_to_the_sink(position: int, device: str) -> None:
    tables = torch.tensor([[7, 3, 9], [2, 8, 4]], dtype=torch.int32, device=device)
    slots = slot_mapping_ref(torch.tensor([position, 1], device=device), tables, BLOCK_SIZE)
    assert slots.tolist() == [SINK_BLOCK * BLOCK_SIZE + position % BLOCK_SIZE, 2 * BLOCK_SIZE + 1]


@pytest.mark.parametrize(
    "counts", [[5], [1, 1, 1], [3, 0, 2], [0, 0, 4], [4, 0, 0], [0, 2, 0, 3, 0]], ids=lambda counts: f"queries {counts}"
)
@pytest.mark.parametrize("num_padding", [0, 3])
def test_prefill_knows_the_sequence_of_each_token(counts: list[int], num_padding: int, device: str) -> None:
    """B37: sequences without a query are passed over, and padding tokens reach the sink whatever their position."""
    tables = [[10 * seq + column + 2 for column in range(3)] for seq in range(len(counts))]
    starts = [5 - seq for seq in range(len(counts))]
    positions = [start + i for start, count in zip(starts, counts, strict=True) for i in range(count)]
    owners = [seq for seq, count in enumerate(counts) for _ in range(count)]
    expected = [expected_slot(p, tables[seq]) for p, seq in zip(positions, owners, strict=True)]
    padding = list(range(num_padding))
    slots = slot_mapping_ref(
        torch.tensor(positions + padding, device=device),
        torch.tensor(tables, dtype=torch.int32, device=device),
        BLOCK_SIZE,
        cu_seqlens_q=torch.tensor([0, *counts], device=device).cumsum(0).to(torch.int32),
    )
    assert slots.tolist() == expected + [SINK_BLOCK * BLOCK_SIZE + p for p in padding]


def test_slots_beyond_32_bits() -> None:
    """B44: the slot of a block id near 2**31 is past 2**31, and positive."""
    tables = torch.tensor([[2**31 - 1]], dtype=torch.int32)
    assert slot_mapping_ref(torch.tensor([15]), tables, 16).tolist() == [(2**31 - 1) * 16 + 15]


def test_out_may_be_a_strided_view(nan_poison: Callable[..., Tensor]) -> None:
    positions, tables = torch.tensor([0, 5, 99]), torch.tensor([[2, 3], [4, 5], [6, 7]], dtype=torch.int32)
    buffer = nan_poison(6, dtype=torch.int64)
    out = buffer[::2]
    assert slot_mapping_ref(positions, tables, BLOCK_SIZE, out=out) is out
    assert torch.equal(out, slot_mapping_ref(positions, tables, BLOCK_SIZE))
    assert (buffer[1::2] == torch.iinfo(torch.int64).min).all()


def test_tables_may_be_a_slice_of_wider_ones() -> None:
    """B48: the columns in use of the device's whole table."""
    wide = torch.tensor([[2, 3, -7], [4, 5, -7]], dtype=torch.int32)
    slots = slot_mapping_ref(torch.tensor([6, 8]), wide[:, :2], BLOCK_SIZE)
    assert slots.tolist() == [3 * BLOCK_SIZE + 2, SINK_BLOCK * BLOCK_SIZE]
