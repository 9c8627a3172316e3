"""The ends of the sampling chain: the first look at each row, the race for a token, and the choice."""

from typing import no_type_check

from ._sample_values import (
    clamped,
    exponentials,
    ordering_keys,
    random_words,
    row_largest,
    row_values,
    weights_of,
)
from ._triton import tl, triton


@triton.jit(do_not_specialize=["vocab_size", "num_chunks"])
@no_type_check
def scan_kernel(
    logits_ptr, stride, rows_ptr, positions_ptr, vocab_size, num_chunks,
    reals_ptr, integers_ptr, bias_ids_ptr, biases_ptr, banned_ids_ptr, is_banned_ptr, in_prompt_ptr, counts_ptr,
    values_ptr, ids_ptr, lows_ptr, maxima_ptr, histogram_ptr, sums_ptr,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, BANS: tl.constexpr, PENALTIES: tl.constexpr, FILTERS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A program finds the extremes of one stretch of a row and the maxima of its groups of 64 neighbours.

    The first program of a row empties what the row counts in.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    slot = tl.program_id(1).to(tl.int64)
    chunk = tl.program_id(0)
    row = tl.load(rows_ptr + slot)
    first = chunk * BLOCK
    ids = first + tl.arange(0, BLOCK)
    values = row_values(
        logits_ptr, stride, slot, row, tl.load(positions_ptr + slot), first, vocab_size, reals_ptr, integers_ptr,
        bias_ids_ptr, biases_ptr, banned_ids_ptr, is_banned_ptr, in_prompt_ptr, counts_ptr,
        BLOCK, WIDTH, BANS, PENALTIES,
    )  # fmt: skip
    largest = tl.max(values, 0)
    winner = tl.min(tl.where((values == largest) & (ids < vocab_size), ids, 2147483647), 0)
    tl.store(values_ptr + slot * num_chunks + chunk, largest)
    tl.store(ids_ptr + slot * num_chunks + chunk, winner)
    if FILTERS:
        low = tl.min(tl.where(values > float("-inf"), clamped(values), float("inf")), 0)
        tl.store(lows_ptr + slot * num_chunks + chunk, low)
        maxima = tl.max(tl.reshape(clamped(values), (BLOCK // 64, 64)), 1)
        tl.store(maxima_ptr + (slot * num_chunks + chunk) * (BLOCK // 64) + tl.arange(0, BLOCK // 64), maxima)
        if chunk == 0:
            tl.store(histogram_ptr + slot * 256 + tl.arange(0, 256), tl.zeros((256,), tl.int32))
            tl.store(sums_ptr + slot * 8 + tl.arange(0, 8), tl.zeros((8,), tl.int64))


@triton.jit(do_not_specialize=["vocab_size", "num_chunks"])
@no_type_check
def race_kernel(
    logits_ptr, stride, rows_ptr, positions_ptr, vocab_size, num_chunks,
    reals_ptr, integers_ptr, bias_ids_ptr, biases_ptr, banned_ids_ptr, is_banned_ptr, in_prompt_ptr, counts_ptr,
    values_ptr, sums_ptr, race_values_ptr, race_ids_ptr,
    BLOCK: tl.constexpr, CHUNKS: tl.constexpr, WIDTH: tl.constexpr, BANS: tl.constexpr, PENALTIES: tl.constexpr,
    FILTERS: tl.constexpr, MIN_P: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program finds the winners of some stretches of a row; random bits only where a token may be drawn."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    slot = tl.program_id(1).to(tl.int64)
    row = tl.load(rows_ptr + slot)
    temperature = tl.load(reals_ptr + row * 6)
    border = row * 0 - 562949953421312
    if FILTERS:
        border = tl.load(sums_ptr + slot * 8 + 7)
    if (temperature > 0) & (border < 1125899906842624):
        position = tl.load(positions_ptr + slot)
        largest = row_largest(values_ptr, slot, num_chunks, CHUNKS)
        seed, sample_index = tl.load(integers_ptr + row * 4 + 1), tl.load(integers_ptr + row * 4 + 2)
        for chunk in range(tl.program_id(0), num_chunks, tl.num_programs(0)):
            first = chunk * BLOCK
            ids = first + tl.arange(0, BLOCK)
            values = clamped(row_values(
                logits_ptr, stride, slot, row, position, first, vocab_size, reals_ptr, integers_ptr,
                bias_ids_ptr, biases_ptr, banned_ids_ptr, is_banned_ptr, in_prompt_ptr, counts_ptr,
                BLOCK, WIDTH, BANS, PENALTIES,
            ))  # fmt: skip
            weights = weights_of(largest - values, temperature)
            kept = (ids < vocab_size) & (weights > 0)
            if FILTERS:
                kept = kept & (ordering_keys(values, ids) >= border)
            if MIN_P:
                kept = kept & (weights >= tl.load(reals_ptr + row * 6 + 2))
            best = temperature * 0.0
            winner = first + row.to(tl.int32) * 0
            if tl.max(kept.to(tl.int32), 0) > 0:
                groups = first // 4 + tl.arange(0, BLOCK // 4)
                word0, word1, word2, word3 = random_words(seed, sample_index, position, groups)
                bits = tl.interleave(tl.interleave(word0, word2), tl.interleave(word1, word3))
                race = tl.where(kept, weights / exponentials(bits), 0.0)
                best = tl.max(race, 0)
                winner = tl.min(tl.where((race == best) & (ids < vocab_size), ids, 2147483647), 0)
            tl.store(race_values_ptr + slot * num_chunks + chunk, best)
            tl.store(race_ids_ptr + slot * num_chunks + chunk, winner)


@triton.jit(do_not_specialize=["vocab_size", "num_chunks"])
@no_type_check
def choose_kernel(
    rows_ptr, vocab_size, num_chunks, reals_ptr, counts_ptr,
    values_ptr, ids_ptr, sums_ptr, race_values_ptr, race_ids_ptr, out_ptr,
    CHUNKS: tl.constexpr, PENALTIES: tl.constexpr, RANDOM: tl.constexpr, FILTERS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program takes the token of one row, the greedy one or the winner of the race, and counts it."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    slot = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + slot)
    chunk = tl.arange(0, CHUNKS)
    inside = chunk < num_chunks
    place = slot * num_chunks + chunk
    values = tl.load(values_ptr + place, mask=inside, other=float("-inf"))
    ids = tl.load(ids_ptr + place, mask=inside, other=2147483647)
    border = row * 0
    if FILTERS:
        border = tl.load(sums_ptr + slot * 8 + 7)
    if RANDOM:  # noqa: SIM102 (the inner condition is the device's)
        if (tl.load(reals_ptr + row * 6) > 0) & (border < 1125899906842624):
            values = tl.load(race_values_ptr + place, mask=inside, other=float("-inf"))
            ids = tl.load(race_ids_ptr + place, mask=inside, other=2147483647)
    token = tl.min(tl.where(values == tl.max(values, 0), ids, 2147483647), 0).to(tl.int64)
    token = tl.where(border < 1125899906842624, token, border - 1125899906842624)
    tl.store(out_ptr + slot, token)
    if PENALTIES:
        count = counts_ptr + row * vocab_size + token
        tl.store(count, tl.load(count) + 1)
