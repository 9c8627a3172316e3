"""What graphs there are, what they did, and what a batch would meet: for people and for programs."""

from dataclasses import dataclass, field
from typing import Any

from .decode_runner import DecodeRunner
from .graph_dispatch import Batch, Chunk
from .graph_ledger import GraphLedger
from .graph_reason import Path, Reason


@dataclass(frozen=True)
class GraphReport:
    """A snapshot; `str()` of it is a page to read.

    Attributes:
        path: how steps without an eager piece run.
        capture: "startup", "lazy", or "off".
        sizes: batch sizes of the buckets.
        coverage: for each greedy batch size 1 … max, the chunks it runs as.
        missing: a sentence for each bucket that has no graph.
        counts: chunks by reason.
        prompt_sizes: tokens of the buckets of prompts.
        prompts: batches of prompts by what decided how they ran.
        region_replays: how often each of the regions that there are now has replayed.
        eager_decodes: decode chunks that ran eagerly though nobody asked for it.
        num_bytes, seconds: what the captures at start took.
        start_seconds: of each phase of the engine's start.
        ledger: what each graph cost; None where graphs are off.
        batches: how many decode steps had each number of sequences.
        replay_milliseconds: of a step that replayed graphs of each size, on average.
    """

    path: Path
    capture: str
    sizes: tuple[int, ...]
    coverage: dict[int, tuple[Chunk, ...]]
    missing: tuple[str, ...]
    counts: dict[str, int]
    eager_decodes: int
    num_padding_rows: int
    wasted_milliseconds: float
    num_bytes: int
    seconds: float
    start_seconds: dict[str, float] = field(default_factory=dict)
    ledger: GraphLedger | None = None
    batches: dict[int, int] = field(default_factory=dict)
    replay_milliseconds: dict[int, float] = field(default_factory=dict)
    region_replays: dict[str, int] = field(default_factory=dict)
    prompt_sizes: tuple[int, ...] = ()
    prompts: dict[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As JSON would have it; coverage as (buckets, path, reason) of each batch size."""
        return {
            "path": self.path.value,
            "capture": self.capture,
            "sizes": list(self.sizes),
            "coverage": {str(size): [_chunk_dict(chunk) for chunk in chunks] for size, chunks in self.coverage.items()},
            "missing": list(self.missing),
            "counts": self.counts,
            "eager_decodes": self.eager_decodes,
            "num_padding_rows": self.num_padding_rows,
            "wasted_milliseconds": self.wasted_milliseconds,
            "num_bytes": self.num_bytes,
            "seconds": self.seconds,
            "start_seconds": self.start_seconds,
            "ledger": None if self.ledger is None else self.ledger.to_dict(),
            "batches": {str(size): count for size, count in self.batches.items()},
            "replay_milliseconds": {str(size): ms for size, ms in self.replay_milliseconds.items()},
            "region_replays": self.region_replays,
            "prompt_sizes": list(self.prompt_sizes),
            "prompts": self.prompts,
        }

    def __str__(self) -> str:
        lines = [f"decode steps: {self.path.value}, captured at {self.capture}"]
        if self.sizes:
            lines.append(f"buckets: {', '.join(map(str, self.sizes))}; {self.num_bytes / 2**20:.1f} MiB")
            lines.append("start: " + ", ".join(f"{name} {took:.2f} s" for name, took in self.start_seconds.items()))
        if self.ledger is not None and self.ledger.entries:
            lines += ["", *self.ledger.lines()]
        lines += ["", "batch size      runs as", *_coverage_lines(self.coverage)]
        if self.missing:
            lines += ["", "missing:", *(f"  {one}" for one in self.missing)]
        lines += ["", "counts:", *(f"  {count:8d}  {reason}" for reason, count in self.counts.items())]
        lines += ["replays by region:", *(f"  {count:8d}  {name}" for name, count in self.region_replays.items())]
        if self.prompt_sizes:
            lines.append(f"prompts, with buckets of {', '.join(map(str, self.prompt_sizes))} tokens:")
            lines += [f"  {count:8d}  {reason}" for reason, count in self.prompts.items()]
        lines.append(f"padding rows: {self.num_padding_rows}; wasted: {self.wasted_milliseconds:.1f} ms")
        return "\n".join(lines)


def graph_report(runner: DecodeRunner, max_num_seqs: int) -> GraphReport:
    """Of one engine, now."""
    counters, graphs, summary, policy = runner.counters, runner.graphs, runner.summary, runner.policy
    return GraphReport(
        path=policy.path,
        capture="off" if graphs is None else "startup" if policy.lazy_steps is None else "lazy",
        sizes=graphs.settings.sizes if graphs is not None else (),
        coverage=coverage(runner, max_num_seqs),
        missing=tuple(graphs.drops()) if graphs is not None else (),
        counts={reason.name: count for reason, count in sorted(counters.by_reason.items())},
        eager_decodes=counters.num_eager_decodes,
        num_padding_rows=counters.num_padding_rows,
        wasted_milliseconds=1000 * counters.wasted_seconds,
        num_bytes=summary.num_bytes if summary is not None else 0,
        seconds=summary.seconds if summary is not None else 0.0,
        start_seconds=dict(runner.phases.seconds),
        ledger=graphs.ledger if graphs is not None else None,
        batches=dict(sorted(counters.batches.items())),
        replay_milliseconds={size: 1000 * seconds for size, seconds in counters.replay_seconds.items()},
        prompt_sizes=graphs.settings.prompt_sizes if graphs is not None else (),
        prompts={reason.name: count for reason, count in sorted(counters.prompts.items())},
        region_replays={region.name: region.counts[Reason.PIECEWISE] for region in graphs.regions} if graphs else {},
    )


def coverage(runner: DecodeRunner, max_num_seqs: int) -> dict[int, tuple[Chunk, ...]]:
    """What a greedy batch of each size 1 … max runs as."""
    road = runner.greedy_road
    return {size: tuple(runner.decide(Batch(size, road))) for size in range(1, max_num_seqs + 1)}


def coverage_lines(runner: DecodeRunner, max_num_seqs: int) -> list[str]:
    """The coverage as a table; neighbours that meet the same share a line."""
    return _coverage_lines(coverage(runner, max_num_seqs))


def _coverage_lines(covered: dict[int, tuple[Chunk, ...]]) -> list[str]:
    lines: list[tuple[int, int, str]] = []
    for size, chunks in covered.items():
        names = " + ".join("exact rows" if chunk.key is None else f"bucket {chunk.key.bs}" for chunk in chunks)
        text = f"{chunks[0].path.value}: {names} ({chunks[0].reason.value})"
        if lines and lines[-1][2] == text:
            lines[-1] = (lines[-1][0], size, text)
        else:
            lines.append((size, size, text))
    return [f"{first if first == last else f'{first} - {last}':>10}      {text}" for first, last, text in lines]


def _chunk_dict(chunk: Chunk) -> dict[str, Any]:
    return {
        "rows": [chunk.start, chunk.stop],
        "bucket": None if chunk.key is None else chunk.key.bs,
        "path": chunk.path.value,
        "reason": chunk.reason.name,
    }
