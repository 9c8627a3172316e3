"""What the sampling kernels compute from a stretch of one row: adjusted values, weights, keys, bins, random variates.

A row's numbers lie in one piece, in the columns that `sample_rows.py` names: reals are temperature, top_p, min_p,
repetition, presence, frequency; integers are top_k, seed, sample index, free position.

The kernels are compiled without fused multiply-adds, so that each finds the same bits for a value as the others do.
"""

from typing import no_type_check

from ._triton import tl, triton

ID_BITS = 18  # vocabularies to 256k; the kernels spell it out
NUM_BINS = 1024  # of distance from the largest value


@triton.jit
@no_type_check
def row_values(
    logits_ptr, stride, slot, row, position, first, vocab_size,
    reals_ptr, integers_ptr, bias_ids_ptr, biases_ptr, banned_ids_ptr, is_banned_ptr, in_prompt_ptr, counts_ptr,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, BANS: tl.constexpr, PENALTIES: tl.constexpr,
):  # fmt: skip
    """BLOCK float32 values of a row from id `first` on, biased, penalised, banned; NaN and what is outside are -inf.

    Lists of ids ascend, what is unused in front, so that a stretch's entries lie together. WIDTH is the number of
    biases, or 0 for none, and BANS that of banned ids.
    """
    ids = first + tl.arange(0, BLOCK)
    inside = ids < vocab_size
    values = tl.load(logits_ptr + slot * stride + ids, mask=inside, other=float("-inf")).to(tl.float32)
    if WIDTH > 0:
        entry = tl.arange(0, WIDTH)
        listed = tl.load(bias_ids_ptr + row * WIDTH + entry)
        unused = (listed == 0) & (tl.load(biases_ptr + row * WIDTH + entry) == 0.0)
        start = tl.sum(((listed < first) | unused).to(tl.int32), 0)
        stop = tl.sum((listed < first + BLOCK).to(tl.int32), 0)
        for i in range(start, stop):
            bias = tl.load(biases_ptr + row * WIDTH + i)
            values = tl.where(ids == tl.load(bias_ids_ptr + row * WIDTH + i), values + bias, values)
    if PENALTIES:
        place = row * vocab_size + ids
        count = tl.load(counts_ptr + place, mask=inside, other=0)
        seen = (tl.load(in_prompt_ptr + place, mask=inside, other=0) != 0) | (count > 0)
        factor = tl.where(seen, tl.load(reals_ptr + row * 6 + 3), 1.0)
        values = tl.where(factor == 1.0, values, tl.where(values > 0, values / factor, values * factor))
        presence, frequency = tl.load(reals_ptr + row * 6 + 4), tl.load(reals_ptr + row * 6 + 5)
        values = values - (frequency * count.to(tl.float32) + presence * (count > 0).to(tl.float32))
    if BANS > 0:  # noqa: SIM102 (the inner condition is the device's)
        if position < tl.load(integers_ptr + row * 4 + 3):
            ban = tl.arange(0, BANS)
            banned = tl.load(banned_ids_ptr + row * BANS + ban)
            free = tl.load(is_banned_ptr + row * BANS + ban) == 0
            ban_start = tl.sum(((banned < first) | free).to(tl.int32), 0)
            ban_stop = tl.sum((banned < first + BLOCK).to(tl.int32), 0)
            for j in range(ban_start, ban_stop):
                values = tl.where(ids == tl.load(banned_ids_ptr + row * BANS + j), float("-inf"), values)
    return tl.where((values == values) & inside, values, float("-inf"))


@triton.jit
@no_type_check
def clamped(values):
    """Without +inf, which a difference of values could not bear."""
    return tl.minimum(values, 3.4028234663852886e38)


@triton.jit
@no_type_check
def row_extent(values_ptr, lows_ptr, slot, num_chunks, CHUNKS: tl.constexpr):
    """A row's largest value, clamped to the finite ones, and bins to a unit of distance from it."""
    chunk = tl.arange(0, CHUNKS)
    largest = tl.max(tl.load(values_ptr + slot * num_chunks + chunk, mask=chunk < num_chunks, other=float("-inf")), 0)
    low = tl.min(tl.load(lows_ptr + slot * num_chunks + chunk, mask=chunk < num_chunks, other=float("inf")), 0)
    largest = tl.maximum(clamped(largest), -3.4028234663852886e38)
    scale = 1023.0 / tl.maximum(largest - low, 1e-6)
    return largest, tl.maximum(scale, 16.0)


@triton.jit
@no_type_check
def distance_bins(values, largest, scale):
    """Bin 0 holds the largest value; no value is in a lower bin than a larger one."""
    return tl.minimum((largest - values) * scale, 1023.0).to(tl.int32)


@triton.jit
@no_type_check
def weights_of(distance, temperature):
    """Probabilities relative to the largest, of values at some distance below it."""
    return tl.exp(-distance / tl.minimum(tl.maximum(temperature, 1.1754943508222875e-38), 3.4028234663852886e38))


@triton.jit
@no_type_check
def mass_of(weights):
    """Weights in fixed point, 40 bits after the point: sums in any order are equal."""
    return (weights * 1099511627776.0).to(tl.int64)


@triton.jit
@no_type_check
def ordering_keys(values, ids):
    """int64 that sort by value, then lower id; see `ordering.py`. 32 bits of value over 18 of the id's complement."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 18) | (262143 - ids).to(tl.int64)


@triton.jit
@no_type_check
def exponentials(seed, sample_index, position, first, BLOCK: tl.constexpr):
    """Standard exponential variates of BLOCK ids from a multiple of four on; see `exponential_ref`.

    The logarithm near 1, where winners are, is a series: `-log1p(-u) = 2 atanh(u / (2 - u))`, below 4e-9 relative.
    """
    group = (first // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    word0, word1, word2, word3 = tl.philox_impl(
        group,
        group * 0 + position.to(tl.uint32),
        group * 0 + sample_index.to(tl.uint32),
        group * 0,
        group * 0 + (seed & 0xFFFFFFFF).to(tl.uint32),
        group * 0 + ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32),
    )
    bits = tl.interleave(tl.interleave(word0, word2), tl.interleave(word1, word3))
    u = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.9999999403953552)
    ratio = u / (2.0 - u)
    square = ratio * ratio
    series = 1.0 + square * (1 / 3 + square * (1 / 5 + square * (1 / 7 + square * (1 / 9))))
    return tl.where(u < 0.3, 2.0 * ratio * series, -tl.log(1.0 - u))
