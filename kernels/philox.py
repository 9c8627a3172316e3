"""Philox4x32-10 random bits: a pure function of a key and a counter, so the same everywhere.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). Constants, rounds and known
answers are those of the Random123 library and of `tl.philox`, which produces the same words in a kernel.

A random word belongs to (request seed, sample index, position, vocabulary id):

    key     = (seed mod 2**32, seed div 2**32)
    counter = (vocabulary id div 4, position, sample index, 0);    word = vocabulary id mod 4

No state is kept, and torch's generators are never touched.
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
    """Ten Philox rounds over int64 tensors that hold 32-bit words, 0 ... 2**32 - 1.

    A product of two such words needs 64 bits; int64 multiplication wraps, so its bit pattern is the unsigned product.
    The low halves stay unmasked between rounds: they only meet an exclusive-or that is masked afterwards. Buffers
    change places instead of being made anew, which on a CPU would cost more than the arithmetic.

    Args:
        c0, c1, c2, c3: counter words, of one shape.
        k0, k1: key words, broadcast to that shape.
    """
    c0, c1, c2, c3 = c0.clone(), c1.clone(), c2.clone(), c3.clone()
    product0, product1 = torch.empty_like(c0), torch.empty_like(c0)
    for _ in range(_NUM_ROUNDS):
        torch.mul(c0, _MULTIPLIER_0, out=product0)
        torch.mul(c2, _MULTIPLIER_1, out=product1)
        torch.bitwise_right_shift(product1, 32, out=c0).bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(_MASK)
        torch.bitwise_right_shift(product0, 32, out=c2).bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(_MASK)
        c1, product1 = product1, c1
        c3, product0 = product0, c3
        k0, k1 = (k0 + _WEYL_0) & _MASK, (k1 + _WEYL_1) & _MASK
    return c0, c1.bitwise_and_(_MASK), c2, c3.bitwise_and_(_MASK)


def random_bits_ref(seeds: Tensor, sample_indices: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Random words for whole vocabulary rows, `[num_rows, vocab_size]` int64 in 0 ... 2**32 - 1.

    Args:
        seeds: `[num_rows]` int64, the bit patterns of unsigned 64-bit seeds.
        sample_indices: `[num_rows]` int64, which of a request's `n` samples.
        positions: `[num_rows]` int64, the position of the token whose logits are drawn from.
    """
    num_groups = (vocab_size + 3) // 4
    group = torch.arange(num_groups, device=seeds.device).repeat(len(seeds), 1)
    position, sample_index = (words[:, None] & _MASK for words in (positions, sample_indices))
    words = philox4x32_ref(
        group,
        position.repeat(1, num_groups),
        sample_index.repeat(1, num_groups),
        torch.zeros_like(group),
        seeds[:, None] & _MASK,
        (seeds[:, None] >> 32) & _MASK,
    )
    return torch.stack(words, dim=-1).flatten(1)[:, :vocab_size]


def exponential_ref(bits: Tensor) -> Tensor:
    """Standard exponential variates, float32, positive and finite, from 32-bit words of the same shape.

    `u = (bits + 1/2) / 2**32`, `e = -log1p(-u)`. The winner of a race has a small e, and there u has a step of 2**-32
    and log1p keeps it. At the other end u is held below 1, which bounds e by 24 ln 2 = 16.6.
    """
    uniform = (bits.to(torch.float32) + 0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_()
