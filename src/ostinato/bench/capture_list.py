"""`ostinato bench capture-list`: lists of capture sizes compared under a distribution of batch sizes, and the best."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from ..runtime.capture_list import Budget, best_sizes, mean_cost, per_batch_waste, token_waste
from ..runtime.graph_buckets import LIST_KEY, capture_sizes
from .batch_traffic import Traffic, spread
from .output import Column, Report

Objective = Literal["rows", "per-batch", "ms"]


@dataclass(frozen=True)
class ListCost:
    """What a list costs under a distribution.

    Attributes:
        token_waste: of all rows computed, the share of padding: Σ P(b)·(next(b) - b) / Σ P(b)·next(b).
        per_batch_waste: Σ P(b)·(next(b) - b)/b·KV_fraction.
        milliseconds: of a step; `wasted_milliseconds` of it would go if each batch had a graph of its own.
        graph_bytes, capture_seconds: of all sizes together. None: not known.
    """

    name: str
    sizes: Sequence[int]
    token_waste: float
    per_batch_waste: float
    milliseconds: float | None
    wasted_milliseconds: float | None
    graph_bytes: float | None
    capture_seconds: float | None


def _objective(kind: Objective | None, replay_ms: Mapping[int, float]) -> Objective:
    """What is minimised: milliseconds where they are known, else rows."""
    if kind == "ms" and not replay_ms:
        raise ValueError("--minimise ms needs measured replay times: a graph report, or --replay-ms")
    return kind or ("ms" if replay_ms else "rows")


def compare(
    traffic: Traffic,
    largest: int,
    *,
    counts: Sequence[int] = (),
    memory_bytes: int | None = None,
    capture_seconds: float | None = None,
    forced: Iterable[int] = (),
    others: Mapping[str, Iterable[int]] | None = None,
    minimise: Objective | None = None,
    kv_fraction: float | Callable[[int], float] = 1.0,
) -> tuple[Objective, list[ListCost]]:
    """The default list, powers of two, and others, with the best one of its budget, which comes last.

    A step of b rows in a graph of n takes what n rows of padding take, and what b rows take beyond b of padding.

    Args:
        largest: `max_num_seqs`.
        counts, memory_bytes, capture_seconds: the budget, at most one kind; none: as many as the default list has.
            Of several counts each has its best list.

    Raises:
        ValueError: two budgets, one whose cost by size is not known, or one that the forced sizes exceed.
    """
    if [counts or None, memory_bytes, capture_seconds].count(None) < 2:
        raise ValueError("a list has one budget: a number of sizes, bytes, or seconds")
    objective = _objective(minimise, traffic.replay_ms)
    replay = spread(traffic.replay_ms, largest, what="replay times")
    padding = spread(traffic.padding_ms, largest, what="times of padding") or replay
    held = spread(traffic.graph_bytes, largest, what="bytes of graphs", beyond=True)
    seconds = spread(traffic.capture_seconds, largest, what="seconds of captures", beyond=True)
    default = capture_sizes(None, largest)
    if memory_bytes is not None:
        budgets = [Budget(memory_bytes, _whole(held, 1, "what graphs take", "--graph-mb"))]
    elif capture_seconds is not None:
        budgets = [Budget(round(1e6 * capture_seconds), _whole(seconds, 1e6, "what captures take", "--capture-ms"))]
    else:
        budgets = [Budget(count) for count in counts or (len(default),)]
    best = {
        f"best of {budget.total}" if len(budgets) > 1 else "best": best_sizes(
            traffic.batches,
            budget,
            forced=forced,
            largest=largest,
            cost=padding if objective == "ms" else None,
            per_batch=objective == "per-batch",
        )
        for budget in budgets
    }
    lists = {"default": default, "powers of two": capture_sizes([1 << n for n in range(largest.bit_length())], largest)}
    lists |= {name: capture_sizes(sizes, largest) for name, sizes in (others or {}).items()}
    lists |= best
    every = range(1, largest + 1)
    least = mean_cost(traffic.batches, every, replay) if replay else None

    def cost(name: str, sizes: Sequence[int]) -> ListCost:
        wasted = None
        if padding:
            wasted = mean_cost(traffic.batches, sizes, padding) - mean_cost(traffic.batches, every, padding)
        return ListCost(
            name,
            list(sizes),
            token_waste(traffic.batches, sizes),
            per_batch_waste(traffic.batches, sizes, kv_fraction),
            least + wasted if least is not None and wasted is not None else None,
            wasted,
            sum(held[size] for size in sizes) if held else None,
            sum(seconds[size] for size in sizes) if seconds else None,
        )

    return objective, [cost(name, sizes) for name, sizes in lists.items()]


def cut_short(given: Mapping[str, Iterable[int]], largest: int) -> list[str]:
    """What is said of lists with sizes above the largest batch, which take part without these."""
    above = {name: [size for size in sizes if size > largest] for name, sizes in given.items()}
    return [
        f"{name}: without {','.join(map(str, sizes))}, as by an engine for batches of up to {largest}; "
        f"--max-num-seqs {max(sizes)} keeps {'it' if len(sizes) == 1 else 'them'}"
        for name, sizes in above.items()
        if sizes
    ]


def _whole(costs: Mapping[int, float] | None, scale: float, what: str, option: str) -> dict[int, int]:
    if costs is None:
        raise ValueError(f"{what} is not known: give a graph report with a ledger, or {option}")
    return {size: max(1, math.ceil(scale * cost - 1e-6)) for size, cost in costs.items()}


def report(
    traffic: Traffic, objective: Objective, costs: Sequence[ListCost], kv_fraction: str, notes: Sequence[str] = ()
) -> Report:
    """The comparison, to be shown, with `notes` at the end."""
    columns = [
        Column("list"),
        Column("graphs", "d"),
        Column("padding of all rows", ".2%"),
        Column("padding a step", ".2%"),
        Column("ms a step", ".4f"),
        Column("of it padding, ms", ".4f"),
        Column("graph memory, MB", ".1f"),
        Column("capture, s", ".2f"),
    ]
    rows = [
        (
            one.name,
            len(one.sizes),
            one.token_waste,
            one.per_batch_waste,
            one.milliseconds,
            one.wasted_milliseconds,
            None if one.graph_bytes is None else one.graph_bytes / 1e6,
            one.capture_seconds,
        )
        for one in costs
    ]
    said = [
        "padding of all rows: token measure, Σ P(b)·(next(b) - b) / Σ P(b)·next(b)",
        f"padding a step: per-b measure, Σ P(b)·(next(b) - b)/b·KV_fraction; KV_fraction {kv_fraction}",
        f"best: {','.join(map(str, costs[-1].sizes))}",
    ]
    if traffic.timed is not None:
        said.append(f"milliseconds: {traffic.timed}; on a line between the sizes that were timed")
    document = {
        "command": "capture-list",
        "version": 1,
        "source": traffic.source,
        "timed": traffic.timed,
        "minimised": objective,
        "batches": {str(batch): weight for batch, weight in traffic.batches.items()},
        "lists": [asdict(one) for one in costs],
    }
    return Report(
        f"capture lists, batches of {traffic.source}, least {objective}", columns, rows, [*said, *notes], document
    )


def write_list(path: Path, traffic: Traffic, objective: Objective, best: ListCost) -> None:
    """A file for `EngineConfig(capture_sizes=…)`."""
    document = {
        LIST_KEY: list(best.sizes),
        "made_for": traffic.source,
        "minimised": objective,
        "token_waste": best.token_waste,
    }
    path.write_text(json.dumps(document) + "\n", encoding="utf-8")


def plot(costs: Sequence[ListCost], traffic: Traffic, path: Path) -> None:
    """Where the sizes of each list lie, over the distribution."""
    from .output import figure

    with figure(path, 8, 4) as [axes]:
        total, peak = sum(traffic.batches.values()), max(traffic.batches.values())
        axes.fill_between(list(traffic.batches), [w / peak for w in traffic.batches.values()], alpha=0.3, step="mid")
        heights = [-0.15 * (row + 1) for row in range(len(costs))]
        for height, one in zip(heights, costs, strict=True):
            axes.plot(one.sizes, [height] * len(one.sizes), "|", markersize=10)
        axes.set_yticks(
            [*heights, 0.0, 1.0],
            [*(f"{one.name}: {one.token_waste:.1%} padding" for one in costs), "0", f"{peak / total:.1%}"],
        )
        axes.set_xlabel("batch size")
        axes.set_ylabel("share of steps", loc="top")
