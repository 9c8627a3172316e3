import random

import torch

from ostinato.kernels import commit_ref

POISON = -(2**62)


def test_many_steps_equal_a_plain_simulation(device: str) -> None:
    """Live rows take their token and advance by one, dead ones stay; the ring wraps and keeps everything else."""
    draw = random.Random(0)
    num_rows, depth, width = 5, 3, 8
    token_ids, positions = [7] * num_rows, [10, 0, 3, 0, 99]
    seq_lens = [11, 0, 4, 0, 100]
    ring = [[POISON] * width for _ in range(depth)]
    tensors = [torch.tensor(x, device=device) for x in (token_ids, positions)]
    tensors += [torch.tensor(seq_lens, dtype=torch.int32, device=device), torch.tensor(ring, device=device)]
    step = torch.zeros(1, dtype=torch.int64, device=device)

    for index in range(2 * depth + 1):
        sampled = [draw.randrange(1000) for _ in range(num_rows)]
        commit_ref(torch.tensor(sampled, device=device), *tensors, step)
        for row in range(num_rows):
            if seq_lens[row] > 0:
                token_ids[row] = sampled[row]
                positions[row] += 1
                seq_lens[row] += 1
        ring[index % depth][:num_rows] = sampled
        assert [tensor.tolist() for tensor in tensors] == [token_ids, positions, seq_lens, ring]
        assert step.tolist() == [index + 1]

    assert [tensor.dtype for tensor in tensors] == [torch.int64, torch.int64, torch.int32, torch.int64]


def test_a_bucket_of_dead_rows_only_turns_the_ring() -> None:
    zeros, lens = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)
    token_ids, positions, ring, step = zeros.clone(), zeros.clone(), zeros.repeat(3, 1), torch.tensor([4])
    commit_ref(torch.tensor([5, 6]), token_ids, positions, lens, ring, step)
    assert [token_ids.tolist(), positions.tolist(), lens.tolist()] == [[0, 0], [0, 0], [0, 0]]
    assert ring.tolist() == [[0, 0], [5, 6], [0, 0]]
    assert step.tolist() == [5]


def test_state_may_be_slices_of_the_largest_bucket() -> None:
    """B38: rows past the bucket do not move."""
    token_ids, positions, lens = torch.zeros(4, dtype=torch.int64), torch.arange(4), torch.arange(1, 5).int()
    ring, step = torch.zeros(3, 4, dtype=torch.int64), torch.tensor([2])
    commit_ref(torch.tensor([8, 9]), token_ids[:2], positions[:2], lens[:2], ring, step)
    assert token_ids.tolist() == [8, 9, 0, 0]
    assert positions.tolist() == [1, 2, 2, 3]
    assert lens.tolist() == [2, 3, 3, 4]
    assert ring.tolist() == [[0] * 4, [0] * 4, [8, 9, 0, 0]]


def test_sampled_tokens_may_be_the_tokens_themselves() -> None:
    """A sampler that writes in place: the rows hold their token already."""
    token_ids, positions, lens = torch.tensor([3, 4]), torch.zeros(2, dtype=torch.int64), torch.tensor([1, 0]).int()
    ring, step = torch.zeros(3, 2, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    commit_ref(token_ids, token_ids, positions, lens, ring, step)
    assert token_ids.tolist() == [3, 4]
    assert positions.tolist() == [1, 0]
    assert ring[0].tolist() == [3, 4]
