"""Which batch sizes decode steps would have under a stream of requests: a simulation, no model."""

import heapq
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

Arrival = tuple[float, int]
"""Seconds at which a request comes, and the tokens that it will be answered with."""


def poisson_arrivals(rate: float, mean_tokens: float, count: int, seed: int) -> Iterator[Arrival]:
    """`count` requests at `rate` a second, independent of each other; lengths are exponential with a mean.

    Raises:
        ValueError: a rate or mean that is not above 0.
    """
    if rate <= 0 or mean_tokens <= 0:
        raise ValueError(f"a rate and a mean of tokens must be above 0, got {rate} and {mean_tokens}")
    draw, now = random.Random(seed), 0.0
    for _ in range(count):
        now += draw.expovariate(rate)
        yield now, max(1, round(draw.expovariate(1 / mean_tokens)))


def simulate(arrivals: Iterable[Arrival], step_seconds: Callable[[int], float], max_num_seqs: int) -> dict[int, int]:
    """How many decode steps have each batch size, where requests join at the next step, and wait while all rows are
    taken. The time of prompts is not part of it.

    Args:
        arrivals: in order of time.
        step_seconds: of a batch.
    """
    waiting = iter(arrivals)
    following = next(waiting, None)
    ends: list[int] = []  # a heap of the steps after which sequences end
    batches: Counter[int] = Counter()
    now, step = 0.0, 0
    while ends or following is not None:
        if not ends and following is not None:
            now = max(now, following[0])
        while following is not None and following[0] <= now and len(ends) < max_num_seqs:
            heapq.heappush(ends, step + following[1])
            following = next(waiting, None)
        batches[len(ends)] += 1
        now += step_seconds(len(ends))
        step += 1
        while ends and ends[0] <= step:
            heapq.heappop(ends)
    return dict(sorted(batches.items()))
