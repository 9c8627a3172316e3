"""Temperature, top-k, top-p, min-p, and the draw.

All of it is a pure function of a row's logits and numbers: no generator, no data-dependent shape, no read back to the
host. A row gets the same token alone and in any batch, and a filter passed for the sake of other rows changes nothing
for a row that has it off.
"""

import torch
from torch import Tensor

from .argmax import greedy_ref
from .ordering import ordered_int32_ref
from .philox import exponential_ref, random_bits_ref

_FLOAT = torch.finfo(torch.float32)
_MASS_SCALE = 2.0**40


def _heaviest_prefix(ordered: Tensor, mass: Tensor, target: Tensor) -> Tensor:
    """Whether each token is in the shortest prefix that reaches a mass, in the order (larger value, then lower id).

    The border value is found digit by digit from histograms of mass: each digit is the largest from which upwards the
    target is reached. All in integers, so no order of summation matters; 2.5 to 5 times as fast as a sort on a CPU.

    Args:
        ordered: `[num_rows, vocab_size]` int32, in the order of the values.
        mass: `[num_rows, vocab_size]` int64 >= 0; equal values have equal mass, but for a tail of them that has 0.
        target: `[num_rows, 1]` int64, from 1 to the row's mass.
    """
    place = ordered ^ -(2**31)
    border, above, remaining = torch.zeros_like(target), torch.zeros_like(target), mass
    for shift, num_digits in ((21, 2048), (10, 2048), (0, 1024)):
        digit = ((place >> shift) & (num_digits - 1)).to(torch.int64)
        histogram = mass.new_zeros(mass.shape[0], num_digits).scatter_add_(1, digit, remaining)
        reached = above + histogram.flip(1).cumsum(1).flip(1)
        chosen = ((reached >= target).sum(1, keepdim=True) - 1).clamp(min=0)
        above = reached.gather(1, chosen) - histogram.gather(1, chosen)
        remaining = remaining.masked_fill(digit != chosen, 0)
        border = border | (chosen << shift)
    border_value = (border - 2**31).to(torch.int32)
    before = above + remaining.cumsum(1) - remaining
    return (ordered > border_value) | ((ordered == border_value) & (before < target))


def filter_ref(
    values: Tensor, weights: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None
) -> Tensor:
    """Which tokens may be drawn: `[num_rows, vocab_size]` bool, the greedy one always among them.

    Tokens stand in one order, larger value first, then lower id, which decides every tie. Mass is counted in fixed
    point, 40 bits after the point.

    Args:
        values: `[num_rows, vocab_size]` float32 without NaN.
        weights: `[num_rows, vocab_size]` float32, probabilities relative to the largest, whose weight is 1.
        top_k: `[num_rows]` int64, keeps the first k tokens; k < 1 or k >= vocab_size is off.
        top_p: `[num_rows]` float32, keeps the shortest prefix that holds at least the share p of the mass that top_k
            left; p >= 1 is off, p = 0 keeps one token.
        min_p: `[num_rows]` float32, keeps what has weight >= min_p; 0 is off.
        Each of the three may be None when every row has it off.
    """
    ordered = ordered_int32_ref(values)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if top_k is not None:
        k = torch.where(top_k >= 1, top_k, values.shape[-1]).clamp(max=values.shape[-1])
        keep = _heaviest_prefix(ordered, torch.ones_like(ordered, dtype=torch.int64), k[:, None])
    if top_p is not None:
        mass = (weights * _MASS_SCALE).to(torch.int64) * keep
        target = torch.ceil(top_p[:, None].double() * mass.sum(1, keepdim=True)).to(torch.int64).clamp(min=1)
        keep &= _heaviest_prefix(ordered, mass, target) | (top_p >= 1)[:, None]
    if min_p is not None:
        keep &= weights >= min_p[:, None]
    return keep


def sample_ref(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    seeds: Tensor,
    sample_indices: Tensor,
    positions: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Draw one token a row.

    The draw is an exponential race: with weights `w = exp((logit - max) / temperature)` and independent standard
    exponentials e, the first of the arrival times e / w is that of token i with probability `w[i] / sum(w)`. It is
    taken as argmax(w / e), the winner of Gumbel-max with one logarithm less; an exact tie goes to the lowest id.

    Args:
        logits: `[num_rows, vocab_size]`, any float dtype; NaN is never drawn, -inf has probability 0.
        temperature: `[num_rows]` float32; 0 is greedy whatever the other numbers are.
        top_k, top_p, min_p: see `filter_ref`.
        seeds, sample_indices, positions: see `random_bits_ref`.
        out: `[num_rows]` int64, written and returned when given.
    """
    values = torch.nan_to_num(logits.float(), nan=-torch.inf, posinf=_FLOAT.max, neginf=-torch.inf)
    largest = values.amax(-1, keepdim=True).clamp(min=_FLOAT.min)
    weights = ((values - largest) / temperature.clamp(_FLOAT.tiny, _FLOAT.max)[:, None]).exp_()
    race = weights / exponential_ref(random_bits_ref(seeds, sample_indices, positions, logits.shape[-1]))
    if top_k is not None or top_p is not None or min_p is not None:
        race *= filter_ref(values, weights, top_k, top_p, min_p)
    return torch.where(temperature > 0, race.argmax(-1), greedy_ref(logits), out=out)


sample = sample_ref
