"""`ostinato bench capture-list`: lists of capture sizes compared under a distribution of batch sizes, and the best."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..runtime.capture_list import Budget, Distribution, best_sizes, mean_cost, per_batch_waste, token_waste
from ..runtime.graph_buckets import LIST_KEY, capture_sizes
from .arrivals import Arrival
from .output import Column, Report

Objective = Literal["rows", "per-batch", "ms"]


@dataclass(frozen=True)
class Traffic:
    """Batch sizes, and what is known of the graphs that served them.

    Attributes:
        source: where this comes from, in words.
        batches: weight of each batch size.
        replay_ms: milliseconds of a step, by size; of some sizes.
        graph_bytes, capture_seconds: of the graphs of a size; of some sizes.
    """

    source: str
    batches: Distribution
    replay_ms: Mapping[int, float] = field(default_factory=dict)
    graph_bytes: Mapping[int, float] = field(default_factory=dict)
    capture_seconds: Mapping[int, float] = field(default_factory=dict)


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


def read_traffic(path: Path) -> Traffic:
    """Traffic from a file: `json.dump(llm.graph_report().to_dict(), file)`, or the same of `llm.batch_histogram()`.

    Raises:
        ValueError: the file is neither.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: must hold an object of batch sizes and counts, got {found!r}")
    batches = numbers(found.get("batches", found), path)
    if not batches or sum(batches.values()) <= 0:
        raise ValueError(f"{path}: counts no decode step")
    ledger = found.get("ledger") or {}
    graph_bytes: dict[int, float] = {}
    seconds: dict[int, float] = {}
    for entry in ledger.get("entries", ()):
        size = entry["batch_size"]
        held = entry["pool_bytes"] + max(0, entry["driver_bytes"]) + entry["output_bytes"]
        graph_bytes[size] = graph_bytes.get(size, 0) + held
        seconds[size] = seconds.get(size, 0.0) + entry["warm_up_seconds"] + entry["capture_seconds"]
    return Traffic(str(path), batches, numbers(found.get("replay_milliseconds", {}), path), graph_bytes, seconds)


def normal_traffic(center: float, deviation: float, largest: int) -> Traffic:
    """P(b) ∝ exp(-(b - center)² / (2·deviation²)) on 1 … largest."""
    if not deviation > 0:
        raise ValueError(f"a deviation must be above 0, got {deviation}")
    weights = {b: math.exp(-((b - center) ** 2) / (2 * deviation**2)) for b in range(1, largest + 1)}
    if sum(weights.values()) <= 0:
        raise ValueError(f"a center of {center} is too far from 1 … {largest}")
    return Traffic(f"normal around {center:g}, deviation {deviation:g}", weights)


def read_trace(path: Path) -> list[Arrival]:
    """Arrivals from a file, `[[second, output tokens], …]`, in order of time.

    Raises:
        ValueError: the file holds something else, or nothing.
    """
    try:
        found = [(float(second), int(tokens)) for second, tokens in json.loads(path.read_text(encoding="utf-8"))]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: must hold arrivals, such as [[0.5, 120], [0.7, 64]]: {error}") from error
    if not found or any(second < 0 or tokens < 1 for second, tokens in found):
        raise ValueError(f"{path}: arrivals must be at least one, at 0 s or later, of at least 1 token")
    return sorted(found, key=lambda arrival: arrival[0])


def numbers(found: Any, path: Path) -> dict[int, float]:
    """An object of sizes and numbers, as JSON has it, such as `{"8": 0.9}`; sorted."""
    try:
        parsed = {int(size): float(value) for size, value in found.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f'{path}: must hold sizes and numbers, such as {{"8": 12}}, got {found!r}') from error
    if any(size < 1 or not math.isfinite(value) or value < 0 for size, value in parsed.items()):
        raise ValueError(f"{path}: sizes must be at least 1 and numbers at least 0, got {found!r}")
    return dict(sorted(parsed.items()))


def spread(known: Mapping[int, float], largest: int, *, what: str, beyond: bool = False) -> dict[int, float] | None:
    """A value for each size 1 … `largest`: on a line between known ones, below the first one as that one.

    Args:
        beyond: above the last known size, as that one; else that is an error.

    Raises:
        ValueError: the known sizes end below `largest`.
    """
    if not known:
        return None
    sizes = sorted(known)
    if sizes[-1] < largest and not beyond:
        raise ValueError(f"{what} are known up to batch size {sizes[-1]}, but are needed up to {largest}")
    values, right = {}, 0
    for size in range(1, largest + 1):
        while right < len(sizes) - 1 and sizes[right] < size:
            right += 1
        left = max(0, right - 1) if size < sizes[right] else right
        low, high = sizes[left], sizes[right]
        share = (size - low) / (high - low) if low < size < high else float(size >= high)
        values[size] = known[low] + share * (known[high] - known[low])
    return values


def _objective(kind: Objective | None, replay_ms: Mapping[int, float]) -> Objective:
    """What is minimised: milliseconds where they are known, else rows."""
    if kind == "ms" and not replay_ms:
        raise ValueError("--minimise ms needs measured replay times: a graph report, or --replay-ms")
    return kind or ("ms" if replay_ms else "rows")


def compare(
    traffic: Traffic,
    largest: int,
    *,
    count: int | None = None,
    memory_bytes: int | None = None,
    capture_seconds: float | None = None,
    forced: Iterable[int] = (),
    others: Mapping[str, Iterable[int]] | None = None,
    minimise: Objective | None = None,
    kv_fraction: float | Callable[[int], float] = 1.0,
) -> tuple[Objective, list[ListCost]]:
    """The default list, powers of two, and others, with the best one of its budget, which comes last.

    Args:
        largest: `max_num_seqs`.
        count, memory_bytes, capture_seconds: the budget, at most one; None of them: as many as the default list has.

    Raises:
        ValueError: two budgets, one whose cost by size is not known, or one that the forced sizes exceed.
    """
    if [count, memory_bytes, capture_seconds].count(None) < 2:
        raise ValueError("a list has one budget: a number of sizes, bytes, or seconds")
    objective = _objective(minimise, traffic.replay_ms)
    replay = spread(traffic.replay_ms, largest, what="replay times")
    held = spread(traffic.graph_bytes, largest, what="bytes of graphs", beyond=True)
    seconds = spread(traffic.capture_seconds, largest, what="seconds of captures", beyond=True)
    default = capture_sizes(None, largest)
    if memory_bytes is not None:
        budget = Budget(memory_bytes, _whole(held, 1, "what graphs take", "--graph-mb"))
    elif capture_seconds is not None:
        budget = Budget(round(1e6 * capture_seconds), _whole(seconds, 1e6, "what captures take", "--capture-ms"))
    else:
        budget = Budget(len(default) if count is None else count)
    best = best_sizes(
        traffic.batches,
        budget,
        forced=forced,
        largest=largest,
        cost=replay if objective == "ms" else None,
        per_batch=objective == "per-batch",
    )
    lists = {"default": default, "powers of two": capture_sizes([1 << n for n in range(largest.bit_length())], largest)}
    lists |= {name: capture_sizes(sizes, largest) for name, sizes in (others or {}).items()}
    lists["best"] = best
    every = mean_cost(traffic.batches, range(1, largest + 1), replay) if replay else None

    def cost(name: str, sizes: Sequence[int]) -> ListCost:
        mean = mean_cost(traffic.batches, sizes, replay) if replay else None
        return ListCost(
            name,
            list(sizes),
            token_waste(traffic.batches, sizes),
            per_batch_waste(traffic.batches, sizes, kv_fraction),
            mean,
            mean - every if mean is not None and every is not None else None,
            sum(held[size] for size in sizes) if held else None,
            sum(seconds[size] for size in sizes) if seconds else None,
        )

    return objective, [cost(name, sizes) for name, sizes in lists.items()]


def _whole(costs: Mapping[int, float] | None, scale: float, what: str, option: str) -> dict[int, int]:
    if costs is None:
        raise ValueError(f"{what} is not known: give a graph report with a ledger, or {option}")
    return {size: max(1, math.ceil(scale * cost - 1e-6)) for size, cost in costs.items()}


def report(traffic: Traffic, objective: Objective, costs: Sequence[ListCost], kv_fraction: str) -> Report:
    """The comparison, to be shown."""
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
    notes = [
        "padding of all rows: token measure, Σ P(b)·(next(b) - b) / Σ P(b)·next(b)",
        f"padding a step: per-b measure, Σ P(b)·(next(b) - b)/b·KV_fraction; KV_fraction {kv_fraction}",
        f"best: {','.join(map(str, costs[-1].sizes))}",
    ]
    document = {
        "command": "capture-list",
        "version": 1,
        "source": traffic.source,
        "minimised": objective,
        "batches": {str(batch): weight for batch, weight in traffic.batches.items()},
        "lists": [asdict(one) for one in costs],
    }
    return Report(f"capture lists, batches of {traffic.source}, least {objective}", columns, rows, notes, document)


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
