"""Random bits against Random123's known answers and Philox written in Python's integers; exponentials from them."""

import math

import pytest
import torch

from ostinato.kernels.philox import exponential_ref, philox4x32_ref, random_bits_ref

ONES = 0xFFFFFFFF


def tensor(*values: int) -> torch.Tensor:
    """int64, an unsigned 64-bit value by its bit pattern."""
    return torch.tensor([v - 2**64 if v >= 2**63 else v for v in values])


def philox_in_python(counter: list[int], key: list[int]) -> list[int]:
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = product1 >> 32 ^ c1 ^ k0, product1 & ONES, product0 >> 32 ^ c3 ^ k1, product0 & ONES
        k0, k1 = (k0 + 0x9E3779B9) & ONES, (k1 + 0xBB67AE85) & ONES
    return [c0, c1, c2, c3]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([ONES] * 4, [ONES] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
    ids=["zeros", "ones", "digits of pi"],
)
@pytest.mark.parametrize("size", [1, 7, 1000], ids=lambda size: f"{size} counters")
def test_known_answers_of_random123(counter: list[int], key: list[int], expected: list[int], size: int) -> None:
    words = [tensor(*[word] * size) for word in counter + key]
    assert [word.tolist() for word in philox4x32_ref(*words)] == [[word] * size for word in expected]
    assert philox_in_python(counter, key) == expected


@pytest.mark.parametrize("vocab_size", [1, 3, 4, 1021])
def test_bits_are_those_of_the_documented_key_and_counter(vocab_size: int) -> None:
    seeds = [0, 42, 2**32, 2**63, 2**64 - 1]
    sample_indices, positions = [0, 3, 0, 1, 2**31 - 1], [0, 1, 8191, 2**20, 2**31 - 1]
    bits = random_bits_ref(tensor(*seeds), tensor(*sample_indices), tensor(*positions), vocab_size)
    assert bits.shape == (5, vocab_size)
    for row, (seed, index, position) in enumerate(zip(seeds, sample_indices, positions, strict=True)):
        for token_id in {0, vocab_size // 2, vocab_size - 1}:
            words = philox_in_python([token_id // 4, position, index, 0], [seed & ONES, seed >> 32])
            assert bits[row, token_id] == words[token_id % 4]


def test_bits_depend_on_every_part_of_the_key_and_on_nothing_else() -> None:
    torch_state = torch.get_rng_state()
    one = random_bits_ref(tensor(42), tensor(0), tensor(7), 100)
    assert torch.equal(one, random_bits_ref(tensor(42), tensor(0), tensor(7), 1000)[:, :100])
    assert torch.equal(one[0], random_bits_ref(tensor(1, 2, 42), tensor(5, 6, 0), tensor(8, 9, 7), 100)[2])
    others = [(43, 0, 7), (42 + 2**32, 0, 7), (42 + 2**63, 0, 7), (42, 1, 7), (42, 0, 8), (42, 7, 0)]
    rows = [one[0]] + [random_bits_ref(tensor(s), tensor(i), tensor(p), 100)[0] for s, i, p in others]
    # Two independent rows of 100 words agree in one place with probability 100 / 2**32.
    assert all((a != b).all() for n, a in enumerate(rows) for b in rows[:n])
    assert torch.equal(torch_state, torch.get_rng_state())


def test_bits_are_uniform_in_every_lane_and_at_both_ends_of_the_word() -> None:
    bits = random_bits_ref(tensor(1), tensor(0), tensor(0), 400_000).view(-1, 4)
    for nibble in (bits >> 28, bits & 15):
        for lane in range(4):
            counts = torch.bincount(nibble[:, lane], minlength=16).double()
            chi_squared = float(((counts - 6250) ** 2 / 6250).sum())
            assert chi_squared < 37.7  # the 99.9 % point for 15 degrees of freedom


def test_exponentials_are_positive_and_finite_at_the_extremes() -> None:
    bits = tensor(0, 1, 2, 2**24 - 1, 2**24, 2**31, 2**32 - 2**7, 2**32 - 2, 2**32 - 1)
    exponentials = exponential_ref(bits)
    assert exponentials.dtype == torch.float32
    assert (exponentials > 0).all()
    assert (exponentials.diff() >= 0).all()
    assert exponentials[-1].item() == pytest.approx(24 * math.log(2))


def test_exponentials_keep_their_resolution_where_a_race_is_won() -> None:
    bits = torch.arange(1000)
    exact = -torch.log1p(-(bits.double() + 0.5) * 2.0**-32)
    # Three float32 operations, each within a few units of 2**-24.
    torch.testing.assert_close(exponential_ref(bits).double(), exact, rtol=5e-7, atol=0)


def test_exponentials_have_mean_one_and_variance_one() -> None:
    exponentials = exponential_ref(random_bits_ref(tensor(3), tensor(0), tensor(0), 1_000_000)).double()
    # Standard errors: 1e-3 for the mean, sqrt(8) * 1e-3 for the variance.
    assert exponentials.mean().item() == pytest.approx(1, abs=4e-3)
    assert exponentials.var().item() == pytest.approx(1, abs=12e-3)
