"""What the sampling kernels compute from a stretch of one row: adjusted values, weights, keys, bins, random variates.

A row's numbers lie in one piece, in the columns that `sample_rows.py` names: reals are temperature, top_p, min_p,
repetition, presence, frequency; integers are top_k, seed, sample index, free position.

The kernels are compiled without fused multiply-adds, so that each finds the same bits for a value as the others do.
"""

from typing import no_type_check

from ._triton import tl, triton

ID_BITS = 18  # vocabularies to 256k; the kernels spell it out
GROUP = 64  # neighbours whose largest value is kept; the kernels spell it out
NUM_BINS = 256  # of distance from the largest value; the kernels spell it out


@triton.jit
@no_type_check
def wide_load(row_ptr, first, vocab_size, BLOCK: tl.constexpr):
    """BLOCK logits of a row from id `first` on in float32, -inf outside; with no mask where none is needed."""
    ids = first + tl.arange(0, BLOCK)
    if first + BLOCK <= vocab_size:
        values = tl.load(row_ptr + ids).to(tl.float32)
    else:
        values = tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    return values


@triton.jit
@no_type_check
def row_values(
    logits_ptr, stride, slot, row, position, first, vocab_size,
    reals_ptr, integers_ptr, bias_ids_ptr, biases_ptr, banned_ids_ptr, is_banned_ptr, in_prompt_ptr, counts_ptr,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, BANS: tl.constexpr, PENALTIES: tl.constexpr,
):  # fmt: skip
    """BLOCK float32 values of a row from id `first` on, biased, penalised, banned; NaN and what is outside are -inf."""
    return adjusted(
        wide_load(logits_ptr + slot * stride, first, vocab_size, BLOCK), first + tl.arange(0, BLOCK), first,
        first + BLOCK, row, position, vocab_size, reals_ptr, integers_ptr, bias_ids_ptr, biases_ptr, banned_ids_ptr,
        is_banned_ptr, in_prompt_ptr, counts_ptr, WIDTH, BANS, PENALTIES,
    )  # fmt: skip


@triton.jit
@no_type_check
def adjusted(
    values, ids, first, stop, row, position, vocab_size,
    reals_ptr, integers_ptr, bias_ids_ptr, biases_ptr, banned_ids_ptr, is_banned_ptr, in_prompt_ptr, counts_ptr,
    WIDTH: tl.constexpr, BANS: tl.constexpr, PENALTIES: tl.constexpr,
):  # fmt: skip
    """The values of some ids of a row from `first` up to `stop`; NaN and what is outside the vocabulary are -inf.

    Lists of ids ascend, what is unused in front, so that a stretch's entries lie together. WIDTH is the number of
    biases, or 0 for none, and BANS that of banned ids.
    """
    inside = ids < vocab_size
    if WIDTH > 0:
        last = row * WIDTH + WIDTH - 1
        if (tl.load(bias_ids_ptr + last) > 0) | (tl.load(biases_ptr + last) != 0.0):
            entry = tl.arange(0, WIDTH)
            listed = tl.load(bias_ids_ptr + row * WIDTH + entry)
            unused = (listed == 0) & (tl.load(biases_ptr + row * WIDTH + entry) == 0.0)
            start = tl.sum(((listed < first) | unused).to(tl.int32), 0)
            end = tl.sum((listed < stop).to(tl.int32), 0)
            for i in range(start, end):
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
            ban_end = tl.sum((banned < stop).to(tl.int32), 0)
            for j in range(ban_start, ban_end):
                values = tl.where(ids == tl.load(banned_ids_ptr + row * BANS + j), float("-inf"), values)
    return tl.where((values == values) & inside, values, float("-inf"))


@triton.jit
@no_type_check
def clamped(values):
    """Without +inf, which a difference of values could not bear."""
    return tl.minimum(values, 3.4028234663852886e38)


@triton.jit
@no_type_check
def row_largest(values_ptr, slot, num_chunks, CHUNKS: tl.constexpr):
    """A row's largest value, clamped to the finite ones."""
    chunk = tl.arange(0, CHUNKS)
    largest = tl.max(tl.load(values_ptr + slot * num_chunks + chunk, mask=chunk < num_chunks, other=float("-inf")), 0)
    return tl.maximum(clamped(largest), -3.4028234663852886e38)


@triton.jit
@no_type_check
def row_scale(lows_ptr, slot, num_chunks, largest, temperature, k, p, vocab_size, CHUNKS: tl.constexpr):
    """Bins to a unit of distance from a row's largest value.

    The bins reach to the row's least finite value, though not further than 32 below the largest, and without top_k only
    to where the rest has less than a tenth of the mass that top_p may leave out, were all tokens there.
    """
    chunk = tl.arange(0, CHUNKS)
    low = tl.min(tl.load(lows_ptr + slot * num_chunks + chunk, mask=chunk < num_chunks, other=float("inf")), 0)
    reach = tl.minimum(largest - low, 31.875)
    tail = tl.log(10.0 * vocab_size.to(tl.float32) / tl.maximum(1.0 - p, 1e-8)) * temperature
    reach = tl.where(k > 0, reach, tl.minimum(reach, tail))
    return 255.0 / tl.maximum(reach, 1e-6)


@triton.jit
@no_type_check
def distance_bins(values, largest, scale):
    """Bin 0 holds the largest value; no value is in a lower bin than a larger one."""
    return tl.minimum((largest - values) * scale, 255.0).to(tl.int32)


@triton.jit
@no_type_check
def weights_of(distance, temperature):
    """Probabilities relative to the largest, of values at some distance below it."""
    return tl.exp(distance * (-1.0 / tl.minimum(tl.maximum(temperature, 1.1754943508222875e-38), 8.507059173023462e37)))


@triton.jit
@no_type_check
def mass_of(weights):
    """Weights in fixed point, 40 bits after the point: sums in any order are equal."""
    return (weights * 1099511627776.0).to(tl.int64)


@triton.jit
@no_type_check
def ordered_int32(values):
    """int32 that compare as float32 do; see `ordered_int32_ref`."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
@no_type_check
def ordering_keys(values, ids):
    """int64 that sort by value, then lower id; see `ordering.py`. 32 bits of value over 18 of the id's complement."""
    return (ordered_int32(values).to(tl.int64) << 18) | (262143 - ids).to(tl.int64)


@triton.jit
@no_type_check
def values_of_keys(keys):
    """float32; that of -2**49, which is below all keys, is -inf."""
    ordered = (keys >> 18).to(tl.int32)
    values = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return tl.where(keys == -562949953421312, float("-inf"), values)


@triton.jit
@no_type_check
def ids_of_keys(keys):
    return 262143 - (keys & 262143).to(tl.int32)


@triton.jit
@no_type_check
def random_words(seed, sample_index, position, groups):
    """The four Philox words of each group of four ids; see `random_bits_ref`."""
    counter = groups.to(tl.uint32)
    return tl.philox_impl(
        counter,
        counter * 0 + position.to(tl.uint32),
        counter * 0 + sample_index.to(tl.uint32),
        counter * 0,
        counter * 0 + (seed & 0xFFFFFFFF).to(tl.uint32),
        counter * 0 + ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32),
    )


@triton.jit
@no_type_check
def exponentials(bits):
    """Standard exponential variates; see `exponential_ref`.

    Winners are small, and there `-log1p(-u)` is a series, below 6e-8 relative, as `1 - u` would round u away.
    """
    u = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.9999999403953552)
    series = u * (1 / 7) + 1 / 6
    series = tl.fma(series, u, 1 / 5)
    series = tl.fma(series, u, 1 / 4)
    series = tl.fma(series, u, 1 / 3)
    series = tl.fma(series, u, 1 / 2)
    series = tl.fma(series, u, 1.0)
    return tl.where(u < 0.125, u * series, -tl.log(1.0 - u))
