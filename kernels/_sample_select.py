"""The border of top-k and top-p in three launches, with no sort: count, collect, resolve.

Bins of distance from the largest value take the place of a radix sort's first digits. Counts of the bins say which one
holds the border of top-k, and between which two that of top-p lies, since a bin's mass is known to within its width.
Only what is in those bins is listed; all that is above them is summed, exactly. One program then finds the border among
the listed keys bit by bit. A row whose list does not fit, or for which the bins were misjudged, is searched whole: the
same result, later.
"""

from typing import no_type_check

from ._sample_values import clamped, distance_bins, mass_of, ordering_keys, row_extent, row_values, weights_of
from ._triton import tl, triton

NUM_SUMS = 8  # int64 a row: mass above k's bin and above p's, listed, k's bin, k left in it, p's bins, the border


@triton.jit
@no_type_check
def row_filters(reals_ptr, integers_ptr, row, vocab_size, TOP_K: tl.constexpr, TOP_P: tl.constexpr):
    """(temperature, k, p) of a row; k = 0 and p = 1 are off, and with temperature 0 both are."""
    temperature = tl.load(reals_ptr + row * 6)
    k = tl.load(integers_ptr + row * 4) * TOP_K
    p = tl.load(reals_ptr + row * 6 + 1)
    p = tl.where((temperature > 0) & (p < 1.0) & TOP_P, p, 1.0)
    return temperature, tl.where((temperature > 0) & (k >= 1) & (k < vocab_size), k, 0), p


@triton.jit(do_not_specialize=["vocab_size", "num_chunks"])
@no_type_check
def count_kernel(
    logits_ptr, stride, rows_ptr, positions_ptr, vocab_size, num_chunks,
    reals_ptr, integers_ptr, bias_ids_ptr, biases_ptr, banned_ids_ptr, is_banned_ptr, in_prompt_ptr, counts_ptr,
    values_ptr, lows_ptr, histogram_ptr,
    BLOCK: tl.constexpr, CHUNKS: tl.constexpr, WIDTH: tl.constexpr, BANS: tl.constexpr, PENALTIES: tl.constexpr,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program adds one stretch of a row to the counts of the row's bins."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    slot = tl.program_id(1).to(tl.int64)
    row = tl.load(rows_ptr + slot)
    _, k, p = row_filters(reals_ptr, integers_ptr, row, vocab_size, TOP_K, TOP_P)
    if (k > 0) | (p < 1.0):
        first = tl.program_id(0) * BLOCK
        values = clamped(row_values(
            logits_ptr, stride, slot, row, tl.load(positions_ptr + slot), first, vocab_size, reals_ptr, integers_ptr,
            bias_ids_ptr, biases_ptr, banned_ids_ptr, is_banned_ptr, in_prompt_ptr, counts_ptr,
            BLOCK, WIDTH, BANS, PENALTIES,
        ))  # fmt: skip
        largest, scale = row_extent(values_ptr, lows_ptr, slot, num_chunks, CHUNKS)
        inside = first + tl.arange(0, BLOCK) < vocab_size
        counts = tl.histogram(distance_bins(values, largest, scale), 1024, mask=inside)
        place = histogram_ptr + slot * 1024 + tl.arange(0, 1024)
        tl.atomic_add(place, counts, mask=counts > 0, sem="relaxed")


@triton.jit(do_not_specialize=["vocab_size", "num_chunks"])
@no_type_check
def collect_kernel(
    logits_ptr, stride, rows_ptr, positions_ptr, vocab_size, num_chunks,
    reals_ptr, integers_ptr, bias_ids_ptr, biases_ptr, banned_ids_ptr, is_banned_ptr, in_prompt_ptr, counts_ptr,
    values_ptr, lows_ptr, histogram_ptr, sums_ptr, listed_values_ptr, listed_ids_ptr,
    BLOCK: tl.constexpr, CHUNKS: tl.constexpr, CAPACITY: tl.constexpr, WIDTH: tl.constexpr, BANS: tl.constexpr,
    PENALTIES: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program lists what one stretch of a row has in the bins of the borders, and sums what it has above them.

    The order of the list is open; all that is made of it are integer sums.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    slot = tl.program_id(1).to(tl.int64)
    row = tl.load(rows_ptr + slot)
    temperature, k, p = row_filters(reals_ptr, integers_ptr, row, vocab_size, TOP_K, TOP_P)
    if (k > 0) | (p < 1.0):
        largest, scale = row_extent(values_ptr, lows_ptr, slot, num_chunks, CHUNKS)
        bin_ = tl.arange(0, 1024)
        counts = tl.load(histogram_ptr + slot * 1024 + bin_)
        upto = tl.cumsum(counts, 0)
        k_bin = tl.where(k > 0, tl.sum((upto < k).to(tl.int32), 0), 1024)
        k_left = k - tl.sum(tl.where(bin_ < k_bin, counts, 0), 0)
        kept = tl.where(bin_ < k_bin, counts, tl.where(bin_ == k_bin, k_left.to(tl.int32), 0)).to(tl.float32)
        heavy = kept * weights_of(bin_.to(tl.float32) / scale, temperature)
        light = tl.where(bin_ < 1023, kept * weights_of((bin_ + 1).to(tl.float32) / scale, temperature), 0.0)
        # The border's bin is the first with mass up to it >= p * all, that is (1 - p) * up to it >= p * below it.
        heavy_below = tl.cumsum(heavy, 0, reverse=True) - heavy
        light_below = tl.cumsum(light, 0, reverse=True) - light
        p_first = tl.sum(((1.0 - p) * tl.cumsum(heavy, 0) * 1.001 < p * light_below).to(tl.int32), 0)
        p_last = tl.sum(((1.0 - p) * tl.cumsum(light, 0) < p * heavy_below * 1.001).to(tl.int32), 0)
        p_first = tl.where(p < 1.0, p_first, 1024)
        p_last = tl.where(p < 1.0, p_last, -1)

        first = tl.program_id(0) * BLOCK
        ids = first + tl.arange(0, BLOCK)
        values = clamped(row_values(
            logits_ptr, stride, slot, row, tl.load(positions_ptr + slot), first, vocab_size, reals_ptr, integers_ptr,
            bias_ids_ptr, biases_ptr, banned_ids_ptr, is_banned_ptr, in_prompt_ptr, counts_ptr,
            BLOCK, WIDTH, BANS, PENALTIES,
        ))  # fmt: skip
        bins = distance_bins(values, largest, scale)
        mass = mass_of(weights_of(largest - values, temperature))
        sums = sums_ptr + slot * 8
        if p < 1.0:
            tl.atomic_add(sums, tl.sum(tl.where(bins < k_bin, mass, 0), 0), sem="relaxed")
            tl.atomic_add(sums + 1, tl.sum(tl.where(bins < p_first, mass, 0), 0), sem="relaxed")
        chosen = (ids < vocab_size) & ((bins == k_bin) | ((bins >= p_first) & (bins <= p_last)))
        number = tl.sum(chosen.to(tl.int32), 0)
        if number > 0:
            place = tl.atomic_add(sums + 2, number.to(tl.int64), sem="relaxed") + tl.cumsum(chosen.to(tl.int32), 0) - 1
            fits = chosen & (place < CAPACITY)
            tl.store(listed_values_ptr + slot * CAPACITY + place, values, mask=fits)
            tl.store(listed_ids_ptr + slot * CAPACITY + place, ids, mask=fits)
        if first == 0:
            tl.store(sums + 3, k_bin.to(tl.int64))
            tl.store(sums + 4, k_left.to(tl.int64))
            tl.store(sums + 5, p_first.to(tl.int64))
            tl.store(sums + 6, p_last.to(tl.int64))


@triton.jit
@no_type_check
def heaviest_border(keys, mass, inside, target):
    """The largest key from which upwards the keys inside hold the target, which all of them do hold."""
    mass = tl.where(inside, mass, 0)
    low = tl.min(tl.where(inside, keys, 562949953421311), 0)
    high = tl.max(tl.where(inside, keys, -562949953421312), 0)
    while low < high:
        middle = low + (high - low + 1) // 2
        reached = tl.sum(tl.where(keys >= middle, mass, 0), 0) >= target
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle - 1)
    return low


@triton.jit
@no_type_check
def mass_from(
    threshold, of_counts, largest, temperature,
    logits_ptr, stride, slot, row, position, vocab_size, reals_ptr, integers_ptr,
    bias_ids_ptr, biases_ptr, banned_ids_ptr, is_banned_ptr, in_prompt_ptr, counts_ptr,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, BANS: tl.constexpr, PENALTIES: tl.constexpr,
):  # fmt: skip
    """The mass, or the number, of a row's tokens whose key is at least `threshold`."""
    total = threshold * 0
    for first in range(0, vocab_size, BLOCK):
        values = clamped(row_values(
            logits_ptr, stride, slot, row, position, first, vocab_size, reals_ptr, integers_ptr,
            bias_ids_ptr, biases_ptr, banned_ids_ptr, is_banned_ptr, in_prompt_ptr, counts_ptr,
            BLOCK, WIDTH, BANS, PENALTIES,
        ))  # fmt: skip
        ids = first + tl.arange(0, BLOCK)
        mass = tl.where(of_counts, 1, mass_of(weights_of(largest - values, temperature)))
        total += tl.sum(tl.where((ids < vocab_size) & (ordering_keys(values, ids) >= threshold), mass, 0), 0)
    return total


@triton.jit(do_not_specialize=["vocab_size", "num_chunks"])
@no_type_check
def resolve_kernel(
    logits_ptr, stride, rows_ptr, positions_ptr, vocab_size, num_chunks,
    reals_ptr, integers_ptr, bias_ids_ptr, biases_ptr, banned_ids_ptr, is_banned_ptr, in_prompt_ptr, counts_ptr,
    values_ptr, lows_ptr, sums_ptr, listed_values_ptr, listed_ids_ptr,
    BLOCK: tl.constexpr, CHUNKS: tl.constexpr, CAPACITY: tl.constexpr, WIDTH: tl.constexpr, BANS: tl.constexpr,
    PENALTIES: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program finds the least key that may be drawn in one row; -2**49 keeps all."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    slot = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + slot)
    temperature, k, p = row_filters(reals_ptr, integers_ptr, row, vocab_size, TOP_K, TOP_P)
    sums = sums_ptr + slot * 8
    border = k * 0 - 562949953421312
    if (k > 0) | (p < 1.0):
        largest, scale = row_extent(values_ptr, lows_ptr, slot, num_chunks, CHUNKS)
        listed = tl.load(sums + 2)
        found = listed < 0
        if listed <= CAPACITY:
            place = tl.arange(0, CAPACITY)
            present = place < listed
            values = tl.load(listed_values_ptr + slot * CAPACITY + place, mask=present, other=float("-inf"))
            ids = tl.load(listed_ids_ptr + slot * CAPACITY + place, mask=present, other=0)
            keys = ordering_keys(values, ids)
            bins = distance_bins(values, largest, scale)
            at_k = present & (bins == tl.load(sums + 3))
            if k > 0:
                border = heaviest_border(keys, at_k.to(tl.int64), at_k, tl.load(sums + 4))
            found = listed >= 0
            if p < 1.0:
                mass = mass_of(weights_of(largest - values, temperature))
                present = present & (keys >= border)
                total = tl.load(sums) + tl.sum(tl.where(at_k & present, mass, 0), 0)
                target = tl.maximum(tl.ceil(p.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)
                target -= tl.load(sums + 1)
                between = present & (bins >= tl.load(sums + 5)) & (bins <= tl.load(sums + 6))
                found = (total == 0) | ((target > 0) & (tl.sum(tl.where(between, mass, 0), 0) >= target))
                if found:
                    border = heaviest_border(keys, mass, between, target)
        if found == 0:
            position = tl.load(positions_ptr + slot)
            border = k * 0 - 562949953421312
            for of_p in range(0, 2):
                target = k
                active = k > 0
                if of_p == 1:
                    total = mass_from(
                        border, False, largest, temperature, logits_ptr, stride, slot, row, position, vocab_size,
                        reals_ptr, integers_ptr, bias_ids_ptr, biases_ptr, banned_ids_ptr, is_banned_ptr,
                        in_prompt_ptr, counts_ptr, BLOCK, WIDTH, BANS, PENALTIES,
                    )  # fmt: skip
                    target = tl.maximum(tl.ceil(p.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)
                    active = p < 1.0
                if active:
                    low = border
                    high = k * 0 + 562949953421311
                    while low < high:
                        middle = low + (high - low + 1) // 2
                        reached = mass_from(
                            middle, of_p == 0, largest, temperature, logits_ptr, stride, slot, row, position,
                            vocab_size, reals_ptr, integers_ptr, bias_ids_ptr, biases_ptr, banned_ids_ptr,
                            is_banned_ptr, in_prompt_ptr, counts_ptr, BLOCK, WIDTH, BANS, PENALTIES,
                        ) >= target  # fmt: skip
                        low = tl.where(reached, middle, low)
                        high = tl.where(reached, high, middle - 1)
                    border = low
    tl.store(sums + 7, border)
