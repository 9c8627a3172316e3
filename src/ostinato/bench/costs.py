"""`ostinato bench cost`: what graphs take of start-up time and memory, and which KV cache is left."""

import gc
import time
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Literal

import torch

from ..model import Decoder
from ..runtime import Engine, EngineConfig
from ..runtime.graph_ledger import GraphLedger
from .errors import BenchError
from .output import Column, Report, Table
from .subject import TAPE, place

COST_MODES: tuple[Literal["off", "piecewise", "whole"], ...] = ("off", "piecewise", "whole")
"""`off` comes first: the others are compared with it."""


@dataclass(frozen=True)
class BucketCost:
    """All graphs of one batch size; see `LedgerEntry`."""

    batch_size: int
    graphs: int
    nodes: int | None
    pool_bytes: int
    driver_bytes: int
    output_bytes: int
    warm_up_seconds: float
    capture_seconds: float

    @property
    def bytes(self) -> int:
        return self.pool_bytes + max(0, self.driver_bytes) + self.output_bytes

    @property
    def seconds(self) -> float:
        return self.warm_up_seconds + self.capture_seconds


@dataclass(frozen=True)
class CostCell:
    """An engine as it stands once it has started.

    Attributes:
        start_seconds: of the engine, kernels compiled and weights loaded before.
        captures_seconds: of that, the graphs: warm-ups, captures, and the self-test.
        graph_bytes, buffer_bytes: of the ledger.
        ledger_tokens: KV of so many tokens would have taken the same.
        kv_tokens, sequences: what the KV cache holds; sequences are of the context that was asked for.
        fewer_tokens, fewer_sequences: than with graphs off.
    """

    mode: str
    start_seconds: float
    captures_seconds: float
    graph_bytes: int
    buffer_bytes: int
    ledger_tokens: int
    kv_tokens: int
    sequences: int
    fewer_tokens: int
    fewer_sequences: int
    buckets: list[BucketCost]


@dataclass(frozen=True)
class CostResult:
    """Attributes:
    first_seconds: the first start in this process, with graphs, kernels compiled or fetched from a cache on the way;
        None on a CPU, which compiles nothing.
    """

    device: torch.device
    dtype: str
    context: int
    config: EngineConfig
    first_seconds: float | None
    cells: list[CostCell]


def measure(decoder: Decoder, context: int, config: EngineConfig) -> CostResult:
    """Start an engine in each mode.

    Args:
        context: tokens of a sequence, for counting how many fit.
        config: without `graphs`.

    Raises:
        BenchError: buckets were left out, so that the others' cost is not that of the list.
    """
    first = _start(decoder, replace(config, graphs="whole"))[0] if decoder.device.type == "cuda" else None
    cells: list[CostCell] = []
    for mode in COST_MODES:
        seconds, engine = _start(decoder, replace(config, graphs=mode))
        cells.append(_cell(engine, mode, seconds, decoder, context, config.block_size, cells[0] if cells else None))
        del engine
    return CostResult(decoder.device, str(decoder.dtype).removeprefix("torch."), context, config, first, cells)


def _start(decoder: Decoder, config: EngineConfig) -> tuple[float, Engine]:
    gc.collect()  # of the engine before
    if decoder.device.type == "cuda":
        torch.cuda.empty_cache()
    started = time.perf_counter()
    engine = Engine(decoder, config, tokenizer=None, eos_token_ids=())
    return time.perf_counter() - started, engine


def _cell(
    engine: Engine, mode: str, seconds: float, decoder: Decoder, context: int, block_size: int, off: CostCell | None
) -> CostCell:
    report = engine.graph_report()
    if report.missing:
        raise BenchError(f"{mode}: graphs are missing: {'; '.join(report.missing)}")
    ledger = report.ledger or GraphLedger()
    blocks = engine.kv_plan.num_usable_blocks
    tokens, sequences = blocks * block_size, blocks // -(-context // block_size)
    return CostCell(
        mode=mode,
        start_seconds=seconds,
        captures_seconds=report.seconds,
        graph_bytes=ledger.graph_bytes,
        buffer_bytes=ledger.buffer_bytes,
        ledger_tokens=(ledger.graph_bytes + ledger.buffer_bytes) // decoder.config.kv_bytes_per_token(decoder.dtype),
        kv_tokens=tokens,
        sequences=sequences,
        fewer_tokens=off.kv_tokens - tokens if off else 0,
        fewer_sequences=off.sequences - sequences if off else 0,
        buckets=_buckets(ledger),
    )


def _buckets(ledger: GraphLedger) -> list[BucketCost]:
    found = []
    for size in sorted({entry.batch_size for entry in ledger.entries}):
        entries = [entry for entry in ledger.entries if entry.batch_size == size]
        nodes = [entry.counts.nodes for entry in entries]
        found.append(
            BucketCost(
                batch_size=size,
                graphs=len(entries),
                nodes=None if None in nodes else sum(n for n in nodes if n is not None),
                pool_bytes=sum(entry.pool_bytes for entry in entries),
                driver_bytes=sum(entry.driver_bytes for entry in entries),
                output_bytes=sum(entry.output_bytes for entry in entries),
                warm_up_seconds=sum(entry.warm_up_seconds for entry in entries),
                capture_seconds=sum(entry.capture_seconds for entry in entries),
            )
        )
    return found


def report(result: CostResult, model: str) -> Report:
    """The modes side by side, and under them what each batch size costs."""
    columns = [
        Column("graphs"),
        Column("start, s", ".2f"),
        Column("of it captures, s", ".2f"),
        Column("graphs, MB", ".1f"),
        Column("buffers, MB", ".1f"),
        Column("both, as KV tokens", ","),
        Column("KV tokens", ","),
        Column(f"sequences of {result.context}", ","),
        Column("fewer tokens", ","),
        Column("fewer sequences", ","),
    ]
    rows = [
        (
            cell.mode,
            cell.start_seconds,
            cell.captures_seconds,
            cell.graph_bytes / 1e6,
            cell.buffer_bytes / 1e6,
            cell.ledger_tokens,
            cell.kv_tokens,
            cell.sequences,
            cell.fewer_tokens,
            cell.fewer_sequences,
        )
        for cell in result.cells
    ]
    where = place(result.device, model, result.dtype)
    notes = [f"{where['device']}, torch {where['torch']}; weights were loaded before"]
    if result.first_seconds is not None:
        notes.append(f"the first start in this process, which compiled, took {result.first_seconds:.2f} s with graphs")
    if result.device.type != "cuda":
        notes.insert(0, f"{TAPE}. The KV cache has a fixed size here")
    document = {
        "command": "cost",
        "version": 1,
        "where": where,
        "context": result.context,
        "max_num_seqs": result.config.max_num_seqs,
        "first_seconds": result.first_seconds,
        "cells": [asdict(cell) for cell in result.cells],
    }
    title = f"what graphs cost: {model}, {result.dtype}, up to {result.config.max_num_seqs} sequences"
    return Report(title, columns, rows, notes, document, [_details(cell) for cell in result.cells if cell.buckets])


def _details(cell: CostCell) -> Table:
    columns = [
        Column("batch size", "d"),
        Column("graphs", "d"),
        Column("nodes", "d"),
        Column("pool, MB", ".2f"),
        Column("driver, MB", ".2f"),
        Column("outputs, MB", ".2f"),
        Column("warm-up, s", ".3f"),
        Column("capture, s", ".3f"),
    ]
    rows = [
        (
            one.batch_size,
            one.graphs,
            one.nodes,
            one.pool_bytes / 1e6,
            one.driver_bytes / 1e6,
            one.output_bytes / 1e6,
            one.warm_up_seconds,
            one.capture_seconds,
        )
        for one in cell.buckets
    ]
    return Table(f"{cell.mode}, by batch size; a pool grows with its largest graph alone", columns, rows)


def plot(result: CostResult, path: Path) -> None:
    """Memory and time of the graphs of each batch size, added up from the largest one, which is captured first."""
    from .output import figure

    label = "" if result.device.type == "cuda" else "\n(tape on a CPU, no CUDA graphs)"
    with figure(path, 10, 4, 2) as [memory, seconds]:
        for cell in result.cells:
            buckets = cell.buckets[::-1]
            counts = range(1, len(buckets) + 1)
            memory.plot(counts, [n / 1e6 for n in accumulate(b.bytes for b in buckets)], "o-", label=cell.mode)
            seconds.plot(counts, list(accumulate(b.seconds for b in buckets)), "o-", label=cell.mode)
        memory.set_ylabel(f"graph memory, MB{label}")
        seconds.set_ylabel(f"warm-up and capture, s{label}")
        for axes in (memory, seconds):
            axes.set_xlabel("batch sizes captured, largest first")
            axes.set_ylim(bottom=0)
            axes.legend(fontsize=7)
