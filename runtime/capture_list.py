"""Which batch sizes to capture: what a list wastes on padding under a distribution of batches, and the best list."""

import bisect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

BUDGET_PARTS = 4000
"""Into at most so many parts a budget of bytes is divided; costs that are no whole numbers of parts are rounded up."""

Distribution = Mapping[int, float]
"""Weight of each batch size, such as how many steps had it; weights need not add up to 1."""


def computed_rows(sizes: Sequence[int], batch: int) -> int:
    """Rows that a batch is computed as, `next(b)`: the smallest size that holds it.

    A batch above the largest size is several replays of that and one of what holds the rest.

    Args:
        sizes: sorted, not empty.
    """
    full, rest = divmod(batch, sizes[-1])
    return full * sizes[-1] + (sizes[bisect.bisect_left(sizes, rest)] if rest else 0)


def token_waste(weights: Distribution, sizes: Iterable[int]) -> float:
    """Of all rows that are computed, the share that is padding: `Σ P(b)·(next(b) - b) / Σ P(b)·next(b)`."""
    ordered = sorted(set(sizes))
    rows = sum(weight * computed_rows(ordered, batch) for batch, weight in weights.items())
    return sum(weight * (computed_rows(ordered, batch) - batch) for batch, weight in weights.items()) / rows


def per_batch_waste(
    weights: Distribution, sizes: Iterable[int], kv_fraction: float | Callable[[int], float] = 1.0
) -> float:
    """The mean over steps of what padding adds to each: `Σ P(b)·(next(b) - b)/b·KV_fraction`.

    Args:
        kv_fraction: share of a step's bytes that scale with the batch; a number, or a function of the batch.
    """
    ordered, total = sorted(set(sizes)), sum(weights.values())
    share = kv_fraction if callable(kv_fraction) else lambda _: kv_fraction
    return (
        sum(
            weight * (computed_rows(ordered, batch) - batch) / batch * share(batch) for batch, weight in weights.items()
        )
        / total
    )


@dataclass(frozen=True)
class StepBytes:
    """What a decode step reads.

    Attributes:
        weights: bytes whatever the batch is.
        kv_per_sequence: bytes of keys and values for each row.
    """

    weights: float
    kv_per_sequence: float

    def kv_fraction(self, batch: int) -> float:
        """The share of a step's bytes that scale with the batch."""
        return batch * self.kv_per_sequence / (self.weights + batch * self.kv_per_sequence)


def mean_cost(weights: Distribution, sizes: Iterable[int], cost: Mapping[int, float]) -> float:
    """The mean of what a step costs, in the unit of `cost`, such as the milliseconds of a replay of each size."""
    ordered, total = sorted(set(sizes)), 0.0
    for batch, weight in weights.items():
        full, rest = divmod(batch, ordered[-1])
        total += weight * (full * cost[ordered[-1]] + (cost[computed_rows(ordered, rest)] if rest else 0.0))
    return total / sum(weights.values())


@dataclass(frozen=True)
class Budget:
    """What a list may take.

    Attributes:
        total: of sizes, bytes or microseconds.
        per_size: what each size takes of it; None: 1, so that `total` is a number of sizes.
    """

    total: int
    per_size: Mapping[int, int] | None = None

    def in_parts(self, sizes: Iterable[int]) -> tuple[int, dict[int, int]]:
        """The budget and the cost of each size in the same part; costs are rounded up, so that a list always fits."""
        if self.per_size is None:
            costs = dict.fromkeys(sizes, 1)
            return min(self.total, len(costs)), costs
        costs = {size: self.per_size[size] for size in sizes}
        part = max(math.gcd(*costs.values()), -(-self.total // BUDGET_PARTS), 1)
        return self.total // part, {size: -(-cost // part) for size, cost in costs.items()}


def best_sizes(
    weights: Distribution,
    budget: Budget,
    *,
    forced: Iterable[int] = (),
    largest: int | None = None,
    cost: Mapping[int, float] | None = None,
    per_batch: bool = False,
) -> tuple[int, ...]:
    """The list that makes the mean cost of a step least, by a dynamic programme over its sizes in ascending order.

    `best[parts][j]` is the least cost of all batches up to `j` where `j` is the last size so far: its predecessor `i`
    leaves it the batches `i + 1 … j`, each at the cost of `j`.

    Args:
        weights: batch sizes from 1 on.
        forced: sizes that must be in the list.
        largest: the last size, always in the list; None: the largest batch.
        cost: of a step of each size 1 … `largest`; None: its rows, which makes `token_waste` least.
        per_batch: divide each step's cost by its batch, which makes `per_batch_waste` least (at a constant
            KV_fraction).

    Raises:
        ValueError: a batch or a forced size outside 1 … `largest`, or a budget that the forced sizes exceed.
    """
    last = max(weights) if largest is None else largest
    must = sorted({*forced, last})
    if min(weights) < 1 or max(weights) > last or must[0] < 1 or must[-1] > last:
        raise ValueError(f"batches and forced sizes must be in 1 … {last}, got {sorted({*weights, *must})}")
    total, parts = budget.in_parts(range(1, last + 1))
    mass = torch.zeros(last + 1, dtype=torch.float64)
    for batch, weight in weights.items():
        mass[batch] = weight / batch if per_batch else weight
    below = mass.cumsum(0)  # of all batches up to each
    best = torch.full((total + 1, last + 1), torch.inf, dtype=torch.float64)
    came_from = torch.zeros((total + 1, last + 1), dtype=torch.int64)
    best[:, 0] = 0.0
    for size in range(1, last + 1):
        first = max((one for one in must if one < size), default=0)  # a forced size is not passed over
        step = (below[size] - below[first:size]) * float(size if cost is None else cost[size])
        if parts[size] <= total:
            least, index = (best[: total + 1 - parts[size], first:size] + step).min(1)
            best[parts[size] :, size], came_from[parts[size] :, size] = least, index + first
    if not math.isfinite(float(best[total, last])):
        raise ValueError(f"a budget of {budget.total} has no room for the sizes {must}")
    # Of the lists that cost the same, the one that leaves most of the budget.
    left = int((best[:, last] <= best[total, last]).nonzero()[0])
    sizes, size = [], last
    while size:
        sizes.append(size)
        left, size = left - parts[size], int(came_from[left, size])
    return tuple(reversed(sizes))
