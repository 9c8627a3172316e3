"""Temperature, top-k, top-p, min-p, and the draw.

All of it is a pure function of a row's logits and parameters: no generator, no data-dependent shape, no read back to
the host. A row therefore gets the same token alone, in any batch, and with `num_candidates` larger than it needs.
"""

import torch
from torch import Tensor

from .argmax import greedy_ref
from .ordering import ordering_keys_ref
from .philox import exponential_ref, random_bits_ref

_FLOAT = torch.finfo(torch.float32)
_MASS_SCALE = 2.0**40
_EVERYTHING = -(2**63)


def filter_ref(
    logits: Tensor, weights: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, *, num_candidates: int
) -> Tensor:
    """Which tokens may be drawn: [num_rows, vocab] bool, at least the greedy one in each row.

    logits:  [num_rows, vocab] float32 without NaN; their order (larger first, then lower id) decides every tie
    weights: [num_rows, vocab] float32, probabilities relative to the largest, whose weight is 1
    top_k:   [num_rows] int64, the first k tokens of that order; k < 1 or k >= vocab is off
    top_p:   [num_rows] float32, the shortest prefix of those whose share of their mass is >= p; p >= 1 is off
    min_p:   [num_rows] float32, of those the ones with weight >= min_p; 0 is off
    num_candidates: how many tokens to put in order. At least each row's k, and the whole vocabulary when a row has
        top_p without top_k; more changes nothing.

    Mass is summed in fixed point (40 bits after the point), so the border does not depend on the order of summation.
    """
    vocab_size = logits.shape[-1]
    keys = ordering_keys_ref(logits)
    ordered, ids = keys.topk(num_candidates) if num_candidates < vocab_size else keys.sort(descending=True)
    rank = torch.arange(ordered.shape[-1], device=logits.device)
    has_k = (top_k >= 1) & (top_k < vocab_size)
    has_p = top_p < 1

    inside = rank < torch.where(has_k, top_k, vocab_size)[:, None]
    mass = (weights.gather(1, ids) * _MASS_SCALE).to(torch.int64) * inside
    up_to = mass.cumsum(-1)
    target = top_p.double() * up_to[:, -1]
    inside &= ((up_to - mass).double() < target[:, None]) | ~has_p[:, None]
    last = (inside.sum(-1, keepdim=True) - 1).clamp(min=0)
    border = torch.where((has_k | has_p)[:, None], ordered.gather(1, last), _EVERYTHING)
    return (keys >= border) & (weights >= min_p[:, None])


def sample_ref(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    sample_indices: Tensor,
    positions: Tensor,
    *,
    num_candidates: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Draw one token a row: [num_rows] int64.

    logits:      [num_rows, vocab] any float dtype; NaN is never drawn, -inf has probability 0
    temperature: [num_rows] float32; 0 (or what float32 rounds to 0) is greedy whatever the other parameters are
    top_k, top_p, min_p: see `filter_ref`
    seeds, sample_indices, positions: see `random_bits_ref`
    num_candidates: see `filter_ref`; 0 skips the filters and is for batches where no row has one

    The draw is an exponential race: with weights w = exp((logits - max) / temperature) and independent standard
    exponentials e, the first of the arrival times e / w belongs to token i with probability w[i] / sum(w). It is taken
    as argmax(w / e), the same winner as Gumbel-max with one logarithm less; an exact tie goes to the lowest id.
    """
    values = torch.nan_to_num(logits.float(), nan=-torch.inf, posinf=_FLOAT.max, neginf=-torch.inf)
    largest = values.amax(-1, keepdim=True).clamp(min=_FLOAT.min)
    weights = ((values - largest) / temperature.clamp(_FLOAT.tiny, _FLOAT.max)[:, None]).exp_()
    if num_candidates:
        weights = weights * filter_ref(values, weights, top_k, top_p, min_p, num_candidates=num_candidates)
    race = weights / exponential_ref(random_bits_ref(seeds, sample_indices, positions, logits.shape[-1]))
    return torch.where(temperature > 0, race.argmax(-1), greedy_ref(logits), out=out)
