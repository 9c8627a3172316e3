import torch

from ostinato.kernels import (
    FIRST_BLOCK,
    SINK_BLOCK,
    attention_decode_ref,
    kv_cache_shape,
    rotary_kv_write_ref,
    slot_mapping_ref,
)


def test_the_reserved_blocks_come_first() -> None:
    """Block 0 is a canary, the sink is positive, and blocks are handed out after both."""
    assert SINK_BLOCK == 1
    assert FIRST_BLOCK == 2


def test_shape() -> None:
    assert kv_cache_shape(num_blocks=7, block_size=16, num_kv_heads=3, head_dim=80) == (7, 3, 16, 80)


def test_slots_writes_and_reads_mean_the_same_place() -> None:
    """Tokens written one by one through their slots are what attention reads through the table, in order.

    The keys are all equal, so that the answer is the plain mean of the values 1, 2, 3, ... written so far.
    """
    block_size, tables = 3, torch.tensor([[5, 2, 4], [6, 3, 7]], dtype=torch.int32)
    caches = [torch.full(kv_cache_shape(8, block_size, 1, 2), float("nan"), dtype=torch.float64) for _ in "kv"]
    still = torch.ones(2, 1), torch.zeros(2, 1)
    for position in range(9):
        slots = slot_mapping_ref(torch.tensor([position] * 2), tables, block_size)
        qkv = torch.tensor([[1.0, 1.0, 1.0, 1.0, position + 1.0, -position - 1.0]] * 2, dtype=torch.float64)
        q = rotary_kv_write_ref(qkv, *still, slots, *caches)
        lens = torch.tensor([position + 1] * 2, dtype=torch.int32)
        answer = attention_decode_ref(q, *caches, tables, lens, 1.0)
        mean = (position + 2) / 2
        torch.testing.assert_close(answer, torch.tensor([[[mean, -mean]]] * 2, dtype=torch.float64))
    for cache in caches:
        assert cache[: SINK_BLOCK + 1].isnan().all()
