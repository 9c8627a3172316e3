"""Philox4x32-10 random bits: a pure function of a key and a counter, so the same everywhere.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011); the constants, rounds and
known answers are those of the Random123 library and of `tl.philox`, which produces the same words in a kernel.

A random word belongs to (request seed, sample index, position, vocabulary id):

    key     = (seed mod 2**32, seed div 2**32)
    counter = (vocabulary id div 4, position, sample index, 0);    word = vocabulary id mod 4

No state is kept and torch's generators are never touched.
"""

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_NUM_ROUNDS = 10


def philox4x32_ref(
    c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, k0: Tensor, k1: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten Philox rounds over broadcastable int64 tensors that hold 32-bit words (0 ... 2**32 - 1).

    A product of two such words needs 64 bits; int64 multiplication wraps, so its bit pattern is the unsigned product.
    The low halves stay unmasked between rounds: they only meet an exclusive-or that is masked afterwards.
    """
    for _ in range(_NUM_ROUNDS):
        product0, product1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0 = ((product1 >> 32) ^ (c1 ^ k0)) & _MASK
        c2 = ((product0 >> 32) ^ (c3 ^ k1)) & _MASK
        c1, c3 = product1, product0
        k0, k1 = (k0 + _WEYL_0) & _MASK, (k1 + _WEYL_1) & _MASK
    return c0, c1 & _MASK, c2, c3 & _MASK


def random_bits_ref(seeds: Tensor, sample_indices: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Random words for whole vocabulary rows: [num_rows, vocab_size] int64 in 0 ... 2**32 - 1.

    seeds:          [num_rows] int64, the bit pattern of an unsigned 64-bit seed
    sample_indices: [num_rows] int64, which of a request's `n` samples
    positions:      [num_rows] int64, position of the token whose logits are sampled from
    """
    groups = torch.arange((vocab_size + 3) // 4, device=seeds.device)
    words = philox4x32_ref(
        groups[None, :],
        positions[:, None] & _MASK,
        sample_indices[:, None] & _MASK,
        torch.zeros_like(positions)[:, None],
        seeds[:, None] & _MASK,
        (seeds[:, None] >> 32) & _MASK,
    )
    return torch.stack(words, dim=-1).flatten(1)[:, :vocab_size]


def exponential_ref(bits: Tensor) -> Tensor:
    """Standard exponential variates, float32, strictly positive and finite, from 32-bit words of the same shape.

    u = (bits + 1/2) / 2**32 in float32, e = -log1p(-u). The winner of an exponential race has a small e, and there u
    has a step of 2**-32 and log1p keeps it. At the other end u is held below 1, which bounds e by 24 ln 2 = 16.6.
    """
    uniform = (bits.to(torch.float32) + 0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_()
