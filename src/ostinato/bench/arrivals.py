"""Which batch sizes decode steps would have under a stream of requests: a simulation, no model."""

import heapq
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

Arrival = tuple[float, int]
"""Seconds at which a request comes, and the tokens that it will be answered with."""


@dataclass(frozen=True)
class TrafficShape:
    """Requests that come by chance, at a rate that goes through phases again and again.

    It is told in answers, not in seconds, and so means the same load for a fast model and a slow one.

    Attributes:
        what: in words.
        phases: (sequences that would be decoding at this rate for ever, how many mean answers the phase lasts).
        answers: (share of the requests, their mean tokens); lengths are exponential.
    """

    what: str
    phases: Sequence[tuple[int, float]]
    answers: Sequence[tuple[float, float]]

    @property
    def mean_tokens(self) -> float:
        return sum(share * tokens for share, tokens in self.answers)

    def arrivals(self, step_seconds: Callable[[int], float], count: int, seed: int) -> Iterator[Arrival]:
        """`count` requests for a model whose steps take so long at each batch size.

        By Little's law, a load of L sequences comes from L / (mean tokens * seconds of a step of L) requests a second.
        """
        draw, now = random.Random(seed), 0.0
        shares, means = zip(*self.answers, strict=True)
        for load, lasting in cycle(self.phases):
            answer = self.mean_tokens * step_seconds(load)
            end = now + lasting * answer
            while (later := now + draw.expovariate(load / answer)) < end:  # memoryless, so a phase may start anew
                if not count:
                    return
                count, now = count - 1, later
                [mean] = draw.choices(means, shares)
                yield now, max(1, round(draw.expovariate(1 / mean)))
            now = end


TRAFFIC: Mapping[str, TrafficShape] = {
    "steady": TrafficShape("a steady load of 41, answers of 200 tokens", [(41, 100.0)], [(1.0, 200.0)]),
    "bursty": TrafficShape(
        "a load of 6, and of 96 for a fifth of the answers' time, answers of 200 tokens",
        [(6, 12.0), (96, 3.0)],
        [(1.0, 200.0)],
    ),
    "chat": TrafficShape(
        "a load that rises from 15 to 65 and falls again, 7 of 10 answers of 80 tokens, the others of 480",
        [(15, 6.0), (28, 6.0), (40, 6.0), (52, 6.0), (65, 6.0), (52, 6.0), (40, 6.0), (28, 6.0)],
        [(0.7, 80.0), (0.3, 480.0)],
    ),
}


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
