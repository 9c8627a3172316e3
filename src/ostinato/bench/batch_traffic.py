"""Where batch sizes come from, and what is known of the graphs that serve them: files, and distributions made up."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..runtime.capture_list import Distribution
from .arrivals import Arrival


@dataclass(frozen=True)
class Traffic:
    """Batch sizes, and what is known of the graphs that served them.

    Attributes:
        source: where this comes from, in words.
        batches: weight of each batch size.
        replay_ms: milliseconds of a step, by size; of some sizes.
        padding_ms: of one whose rows are padding but one, which reads no keys for them; empty: as `replay_ms`.
        timed: where those come from, in words.
        graph_bytes, capture_seconds: of the graphs of a size; of some sizes.
    """

    source: str
    batches: Distribution
    replay_ms: Mapping[int, float] = field(default_factory=dict)
    padding_ms: Mapping[int, float] = field(default_factory=dict)
    timed: str | None = None
    graph_bytes: Mapping[int, float] = field(default_factory=dict)
    capture_seconds: Mapping[int, float] = field(default_factory=dict)


class Times(NamedTuple):
    """What a `Traffic` knows of replays."""

    replay_ms: Mapping[int, float]
    padding_ms: Mapping[int, float]
    timed: str


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
    times = numbers(found.get("replay_milliseconds", {}), path)
    return Traffic(str(path), batches, times, {}, "the same run" if times else None, graph_bytes, seconds)


def read_times(path: Path) -> Times:
    """Milliseconds of a replay: `{"8": 0.9, …}`, or what `bench/bucket_times.py` writes.

    Raises:
        ValueError: the file holds something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: is not JSON: {error}") from error
    if not isinstance(found, dict) or "replay_ms" not in found:
        return Times(numbers(found, path), {}, str(path))
    said = f"{found['device']}, {found['model']}, {found['context']} keys a sequence, commit {found['commit']}"
    return Times(numbers(found["replay_ms"], path), numbers(found["padding_ms"], path), said)


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
