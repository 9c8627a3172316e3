"""Which tokens of a row top-k and top-p leave, with no sort.

At first for few of them: the k-th largest of the maxima of groups is no larger than the k-th largest token, so what is
not below it is listed; the list has the first k, or it has the mass that top-p wants, or the row is not one of few
tokens. One program ranks those and draws.

Other rows are counted by bins of distance from the largest value, which take the place of a radix sort's first digits.
The counts say which bin holds the border of top-k, and between which two that of top-p lies, since a bin's mass is
known to within its width. Only what is in those bins is listed; all that is above them is summed, exactly. One program
then finds the border among the listed keys bit by bit. A row whose list does not fit, or for which the bins were
misjudged, is searched whole: the same result, later.
"""

from typing import no_type_check

from ._sample_values import (
    adjusted,
    clamped,
    distance_bins,
    exponentials,
    ids_of_keys,
    mass_of,
    ordered_int32,
    ordering_keys,
    random_words,
    row_largest,
    row_scale,
    row_values,
    values_of_keys,
    weights_of,
)
from ._triton import tl, triton

# int64 a row. For few tokens: all mass, mass listed, tokens listed, the least ordered value to list. From the plan on:
# mass above k's bin and above p's, tokens listed, k's bin, k left in it, p's bins; where k's bin is -1, few tokens are
# listed as they were. At last the result: the least key that may be drawn, or 2**50 and the token drawn.
NUM_SUMS = 8


@triton.jit
@no_type_check
def row_filters(reals_ptr, integers_ptr, row, vocab_size, TOP_K: tl.constexpr, TOP_P: tl.constexpr):
    """(temperature, k, p) of a row; k = 0 and p = 1 are off, and with temperature 0 both are."""
    temperature = tl.load(reals_ptr + row * 6)
    k = tl.load(integers_ptr + row * 4) * TOP_K
    p = tl.load(reals_ptr + row * 6 + 1)
    p = tl.where((temperature > 0) & (p < 1.0) & TOP_P, p, 1.0)
    return temperature, tl.where((temperature > 0) & (k >= 1) & (k < vocab_size), k, 0), p


@triton.jit
@no_type_check
def mass_target(p, total):
    return tl.maximum(tl.ceil(p.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)


@triton.jit
@no_type_check
def is_of_few(sums_ptr, k, p, FEW: tl.constexpr):
    """Whether all tokens that a row may draw are listed, before the plan."""
    total, mass, listed = tl.load(sums_ptr), tl.load(sums_ptr + 1), tl.load(sums_ptr + 2)
    return (listed <= FEW) & tl.where(k > 0, listed >= k, mass >= mass_target(p, total))


@triton.jit(do_not_specialize=["vocab_size", "num_groups"])
@no_type_check
def least_kernel(
    logits_ptr, stride, rows_ptr, positions_ptr, vocab_size, num_groups,
    reals_ptr, integers_ptr, bias_ids_ptr, biases_ptr, banned_ids_ptr, is_banned_ptr, in_prompt_ptr, counts_ptr,
    maxima_ptr, sums_ptr, listed_ptr,
    GROUPS: tl.constexpr, CAPACITY: tl.constexpr, FEW: tl.constexpr, WIDTH: tl.constexpr, BANS: tl.constexpr,
    PENALTIES: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program finds the least value to list of one row, which more groups than wanted may reach.

    With top-k it lists what reaches it at once: the numbers of those groups take the place of the maxima.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    slot = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + slot)
    _, k, p = row_filters(reals_ptr, integers_ptr, row, vocab_size, TOP_K, TOP_P)
    if (k > 0) | (p < 1.0):
        group = tl.arange(0, GROUPS)
        inside = group < num_groups
        maxima_ptr += slot * num_groups
        maxima = tl.load(maxima_ptr + group, mask=inside, other=float("-inf"))
        ordered = tl.where(inside, ordered_int32(maxima), -2147483648)
        wanted = tl.where(k > 0, k, FEW // 4)
        low = tl.min(tl.where(inside, ordered, 2147483647), 0).to(tl.int64)
        high = tl.max(ordered, 0).to(tl.int64)
        number = wanted * 0 + num_groups
        while (low < high) & (number > wanted + wanted // 4):
            middle = low + (high - low + 1) // 2
            reached = tl.sum((ordered >= middle.to(tl.int32)).to(tl.int32), 0).to(tl.int64)
            high = tl.where(reached >= wanted, high, middle - 1)
            low = tl.where(reached >= wanted, middle, low)
            number = tl.where(reached >= wanted, reached, number)
        sums = sums_ptr + slot * 8
        tl.store(sums + 3, low)
        if (k > 0) & (k <= FEW) & (number <= FEW):
            reaches = ordered >= low.to(tl.int32)
            tl.store(maxima_ptr + tl.cumsum(reaches.to(tl.int32), 0) - 1, group.to(tl.float32), mask=reaches)
            tl.debug_barrier()
            position = tl.load(positions_ptr + slot)
            listed = row.to(tl.int32) * 0
            for start in range(0, number.to(tl.int32), 32):
                member = start + tl.arange(0, 32)
                groups = tl.load(maxima_ptr + member, mask=member < number, other=8192.0).to(tl.int32)
                ids = tl.reshape(groups[:, None] * 64 + tl.arange(0, 64)[None, :], (2048,))
                values = tl.load(logits_ptr + slot * stride + ids, mask=ids < vocab_size, other=float("-inf"))
                values = clamped(adjusted(
                    values.to(tl.float32), ids, 0, vocab_size, row, position, vocab_size, reals_ptr, integers_ptr,
                    bias_ids_ptr, biases_ptr, banned_ids_ptr, is_banned_ptr, in_prompt_ptr, counts_ptr,
                    WIDTH, BANS, PENALTIES,
                ))  # fmt: skip
                chosen = (ids < vocab_size) & (ordered_int32(values) >= low.to(tl.int32))
                place = listed + tl.cumsum(chosen.to(tl.int32), 0) - 1
                fits = chosen & (place < CAPACITY)
                tl.store(listed_ptr + slot * CAPACITY + place, ordering_keys(values, ids), mask=fits)
                listed += tl.sum(chosen.to(tl.int32), 0)
            tl.store(sums + 2, listed.to(tl.int64))


@triton.jit(do_not_specialize=["vocab_size", "num_chunks"])
@no_type_check
def count_kernel(
    logits_ptr, stride, rows_ptr, positions_ptr, vocab_size, num_chunks,
    reals_ptr, integers_ptr, bias_ids_ptr, biases_ptr, banned_ids_ptr, is_banned_ptr, in_prompt_ptr, counts_ptr,
    values_ptr, lows_ptr, histogram_ptr, sums_ptr,
    BLOCK: tl.constexpr, CHUNKS: tl.constexpr, FEW: tl.constexpr, WIDTH: tl.constexpr, BANS: tl.constexpr,
    PENALTIES: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program adds some stretches of a row to the counts of the row's bins."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    slot = tl.program_id(1).to(tl.int64)
    row = tl.load(rows_ptr + slot)
    temperature, k, p = row_filters(reals_ptr, integers_ptr, row, vocab_size, TOP_K, TOP_P)
    if ((k > 0) | (p < 1.0)) & (is_of_few(sums_ptr + slot * 8, k, p, FEW) == 0):
        position = tl.load(positions_ptr + slot)
        largest = row_largest(values_ptr, slot, num_chunks, CHUNKS)
        scale = row_scale(lows_ptr, slot, num_chunks, largest, temperature, k, p, vocab_size, CHUNKS)
        counts = tl.zeros((256,), tl.int32)
        for chunk in range(tl.program_id(0), num_chunks, tl.num_programs(0)):
            first = chunk * BLOCK
            values = clamped(row_values(
                logits_ptr, stride, slot, row, position, first, vocab_size, reals_ptr, integers_ptr,
                bias_ids_ptr, biases_ptr, banned_ids_ptr, is_banned_ptr, in_prompt_ptr, counts_ptr,
                BLOCK, WIDTH, BANS, PENALTIES,
            ))  # fmt: skip
            inside = first + tl.arange(0, BLOCK) < vocab_size
            counts += tl.histogram(distance_bins(values, largest, scale), 256, mask=inside)
        place = histogram_ptr + slot * 256 + tl.arange(0, 256)
        tl.atomic_add(place, counts, mask=counts > 0, sem="relaxed")


@triton.jit(do_not_specialize=["vocab_size", "num_chunks"])
@no_type_check
def plan_kernel(
    rows_ptr, vocab_size, num_chunks, reals_ptr, integers_ptr, values_ptr, lows_ptr, histogram_ptr, sums_ptr,
    CHUNKS: tl.constexpr, FEW: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program finds the bins of one row's borders."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    slot = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + slot)
    temperature, k, p = row_filters(reals_ptr, integers_ptr, row, vocab_size, TOP_K, TOP_P)
    sums = sums_ptr + slot * 8
    if (k > 0) | (p < 1.0):
        if is_of_few(sums, k, p, FEW):
            tl.store(sums + 3, k * 0 - 1)
        else:
            bin_ = tl.arange(0, 256)
            counts = tl.load(histogram_ptr + slot * 256 + bin_)
            upto = tl.cumsum(counts, 0)
            k_bin = tl.where(k > 0, tl.sum((upto < k).to(tl.int32), 0), 256)
            k_left = k - tl.sum(tl.where(bin_ < k_bin, counts, 0), 0)
            p_first = k_bin * 0 + 256
            p_last = k_bin * 0 - 1
            if p < 1.0:
                largest = row_largest(values_ptr, slot, num_chunks, CHUNKS)
                scale = row_scale(lows_ptr, slot, num_chunks, largest, temperature, k, p, vocab_size, CHUNKS)
                kept = tl.where(bin_ < k_bin, counts, tl.where(bin_ == k_bin, k_left.to(tl.int32), 0)).to(tl.float32)
                heavy = kept * weights_of(bin_.to(tl.float32) / scale, temperature)
                light = tl.where(bin_ < 255, kept * weights_of((bin_ + 1).to(tl.float32) / scale, temperature), 0.0)
                # The border's bin is the first with mass up to it >= p * all: (1 - p) * up to it >= p * below it.
                heavy_below = tl.cumsum(heavy, 0, reverse=True) - heavy
                light_below = tl.cumsum(light, 0, reverse=True) - light
                p_first = tl.sum(((1.0 - p) * tl.cumsum(heavy, 0) * 1.001 < p * light_below).to(tl.int32), 0)
                p_last = tl.sum(((1.0 - p) * tl.cumsum(light, 0) < p * heavy_below * 1.001).to(tl.int32), 0)
            tl.store(sums + tl.arange(0, 4), tl.where(tl.arange(0, 4) == 3, k_bin, 0).to(tl.int64))
            tl.store(sums + 4, k_left.to(tl.int64))
            tl.store(sums + 5, p_first.to(tl.int64))
            tl.store(sums + 6, p_last.to(tl.int64))


@triton.jit(do_not_specialize=["vocab_size", "num_chunks"])
@no_type_check
def collect_kernel(
    logits_ptr, stride, rows_ptr, positions_ptr, vocab_size, num_chunks,
    reals_ptr, integers_ptr, bias_ids_ptr, biases_ptr, banned_ids_ptr, is_banned_ptr, in_prompt_ptr, counts_ptr,
    values_ptr, lows_ptr, sums_ptr, listed_ptr,
    BLOCK: tl.constexpr, CHUNKS: tl.constexpr, CAPACITY: tl.constexpr, BY_BINS: tl.constexpr, WIDTH: tl.constexpr,
    BANS: tl.constexpr, PENALTIES: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program lists what some stretches of a row have in the bins of the plan, and sums the mass above them.

    Not by bins, for rows without top-k, it lists what is not below the least value to list, and sums its mass and all.
    The order of the list is open; all that is made of it are integer sums.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    slot = tl.program_id(1).to(tl.int64)
    row = tl.load(rows_ptr + slot)
    temperature, k, p = row_filters(reals_ptr, integers_ptr, row, vocab_size, TOP_K, TOP_P)
    sums = sums_ptr + slot * 8
    least = tl.load(sums + 3)  # value, or k's bin
    summed = p < 1.0
    active = ((k > 0) | summed) & (least >= 0)
    if not BY_BINS:
        active = (k == 0) & summed
    if active:
        position = tl.load(positions_ptr + slot)
        largest = row_largest(values_ptr, slot, num_chunks, CHUNKS)
        scale = row_scale(lows_ptr, slot, num_chunks, largest, temperature, k, p, vocab_size, CHUNKS)
        p_first, p_last = tl.load(sums + 5), tl.load(sums + 6)
        for chunk in range(tl.program_id(0), num_chunks, tl.num_programs(0)):
            first = chunk * BLOCK
            ids = first + tl.arange(0, BLOCK)
            inside = ids < vocab_size
            values = clamped(row_values(
                logits_ptr, stride, slot, row, position, first, vocab_size, reals_ptr, integers_ptr,
                bias_ids_ptr, biases_ptr, banned_ids_ptr, is_banned_ptr, in_prompt_ptr, counts_ptr,
                BLOCK, WIDTH, BANS, PENALTIES,
            ))  # fmt: skip
            if BY_BINS:
                bins = distance_bins(values, largest, scale)
                chosen = inside & ((bins == least) | ((bins >= p_first) & (bins <= p_last)))
                above, above_p = bins < least, bins < p_first
            else:
                chosen = inside & (ordered_int32(values) >= least)
                above, above_p = inside, chosen
            if summed:
                mass = mass_of(weights_of(largest - values, temperature))
                tl.atomic_add(sums, tl.sum(tl.where(above, mass, 0), 0), sem="relaxed")
                tl.atomic_add(sums + 1, tl.sum(tl.where(above_p, mass, 0), 0), sem="relaxed")
            number = tl.sum(chosen.to(tl.int32), 0)
            if number > 0:
                place = tl.atomic_add(sums + 2, number.to(tl.int64), sem="relaxed").to(tl.int32)
                place += tl.cumsum(chosen.to(tl.int32), 0) - 1
                fits = chosen & (place < CAPACITY)
                tl.store(listed_ptr + slot * CAPACITY + place, ordering_keys(values, ids), mask=fits)


@triton.jit
@no_type_check
def draw_of_few(
    keys_ptr, listed, largest, temperature, k, p, total, least_weight, seed, sample_index, position, FEW: tl.constexpr
):
    """The token drawn from a list with all that may be drawn; each is ranked by counting those before it.

    A sum counts the tokens in its upper bits, and their mass in the lower 50.
    """
    place = tl.arange(0, FEW)
    present = place < listed
    keys = tl.load(keys_ptr + place, mask=present, other=-562949953421312)
    before = tl.zeros((FEW,), tl.int64)
    for start in range(0, listed, 32):
        other_place = start + tl.arange(0, 32)
        others = tl.load(keys_ptr + other_place, mask=other_place < listed, other=-562949953421312)
        other_mass = mass_of(weights_of(largest - values_of_keys(others), temperature)) + 1125899906842624
        before += tl.sum(tl.where(others[None, :] > keys[:, None], other_mass[None, :], 0), 1)
    weights = tl.where(present, weights_of(largest - values_of_keys(keys), temperature), 0.0)
    kept = present & ((k == 0) | ((before >> 50) < k))
    total = tl.where(k > 0, tl.sum(tl.where(kept, mass_of(weights), 0), 0), total)
    kept = kept & ((before & 1125899906842623) < tl.where(p < 1.0, mass_target(p, total), 1125899906842624))
    kept = kept & (weights > 0) & (weights >= least_weight)
    ids = ids_of_keys(keys)
    word0, word1, word2, word3 = random_words(seed, sample_index, position, ids // 4)
    bits = tl.where(ids % 2 == 0, tl.where(ids % 4 == 0, word0, word2), tl.where(ids % 4 == 1, word1, word3))
    race = tl.where(kept, weights / exponentials(bits), 0.0)
    best = tl.max(race, 0)
    return tl.where(best > 0, tl.min(tl.where(kept & (race == best), ids, 2147483647), 0), 0)


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
    values_ptr, lows_ptr, sums_ptr, listed_ptr,
    BLOCK: tl.constexpr, CHUNKS: tl.constexpr, CAPACITY: tl.constexpr, FEW: tl.constexpr, WIDTH: tl.constexpr,
    BANS: tl.constexpr, PENALTIES: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A program finds the least key that may be drawn in one row, or draws; -2**49 keeps all."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    slot = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + slot)
    temperature, k, p = row_filters(reals_ptr, integers_ptr, row, vocab_size, TOP_K, TOP_P)
    sums = sums_ptr + slot * 8
    listed_ptr += slot * CAPACITY
    border = k * 0 - 562949953421312
    if (k > 0) | (p < 1.0):
        largest = row_largest(values_ptr, slot, num_chunks, CHUNKS)
        position = tl.load(positions_ptr + slot)
        listed = tl.load(sums + 2)
        k_bin = tl.load(sums + 3)
        found = k_bin < 0
        if found:
            seed, sample_index = tl.load(integers_ptr + row * 4 + 1), tl.load(integers_ptr + row * 4 + 2)
            least_weight = tl.load(reals_ptr + row * 6 + 2) * MIN_P
            token = draw_of_few(
                listed_ptr, listed.to(tl.int32), largest, temperature, k, p, tl.load(sums), least_weight,
                seed, sample_index, position, FEW,
            )  # fmt: skip
            border = token.to(tl.int64) + 1125899906842624
        elif listed <= CAPACITY:
            scale = row_scale(lows_ptr, slot, num_chunks, largest, temperature, k, p, vocab_size, CHUNKS)
            place = tl.arange(0, CAPACITY)
            present = place < listed
            keys = tl.load(listed_ptr + place, mask=present, other=-562949953421312)
            values = values_of_keys(keys)
            bins = distance_bins(values, largest, scale)
            at_k = present & (bins == k_bin)
            if k > 0:
                border = heaviest_border(keys, at_k.to(tl.int64), at_k, tl.load(sums + 4))
            found = listed >= 0
            if p < 1.0:
                mass = mass_of(weights_of(largest - values, temperature))
                present = present & (keys >= border)
                total = tl.load(sums) + tl.sum(tl.where(at_k & present, mass, 0), 0)
                target = mass_target(p, total) - tl.load(sums + 1)
                between = present & (bins >= tl.load(sums + 5)) & (bins <= tl.load(sums + 6))
                found = (total == 0) | ((target > 0) & (tl.sum(tl.where(between, mass, 0), 0) >= target))
                if found:
                    border = heaviest_border(keys, mass, between, target)
        if found == 0:
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
                    target = mass_target(p, total)
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
