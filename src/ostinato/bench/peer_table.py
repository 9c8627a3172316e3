"""How `ostinato bench peers` shows engines side by side."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from .output import Column, Report
from .peers import PeersResult
from .subject import TAPE, place


def report(result: PeersResult, model: str) -> Report:
    """The peers side by side, to be shown."""
    columns = [
        Column("batch", "d"),
        Column("context", "d"),
        Column("engine"),
        Column("version"),
        Column("ms a step", ".3f"),
        Column("least", ".3f"),
        Column("most", ".3f"),
        Column("tok/s", ".1f"),
        Column("share of ceiling", ".1%"),
        Column("times ours", ".2f"),
        Column("same first tokens", "d"),
    ]
    rows = [
        (
            cell.batch,
            cell.context,
            cell.peer,
            cell.version,
            cell.median_ms,
            cell.least_ms,
            cell.most_ms,
            cell.tokens_per_second,
            cell.ceiling_share,
            cell.times_ours,
            cell.same_first_tokens,
        )
        for cell in result.cells
    ]
    where = place(result.device, model, result.dtype)
    notes = [
        f"{where['device']}, torch {where['torch']}; read ceiling {result.read_ceiling / 1e9:.1f} GB/s",
        "the same shapes; ostinato: whole, with its tokens on the host after each step; torch and transformers: the "
        "same weights, keys and values, tokens stay on the device; vllm: its own, the difference of two generations",
    ]
    for peer, error in dict.fromkeys((cell.peer, cell.error) for cell in result.cells if cell.error is not None):
        at = [f"{c.batch} x {c.context}" for c in result.cells if (c.peer, c.error) == (peer, error)]
        notes.append(f"{peer} {error} (batch x context {', '.join(at)})")
    if result.device.type != "cuda":
        notes.insert(0, TAPE)
    document = {
        "command": "peers",
        "version": 1,
        "where": where,
        "read_ceiling": result.read_ceiling,
        "cells": [asdict(cell) for cell in result.cells],
    }
    return Report(f"decode steps of {model}, {result.dtype}, greedy", columns, rows, notes, document)


def plot(result: PeersResult, path: Path) -> None:
    """Milliseconds of a step over the batch size, a line for each engine and context."""
    from .output import figure

    label = "" if result.device.type == "cuda" else "\n(tape on a CPU, no CUDA graphs)"
    timed_cells = [cell for cell in result.cells if cell.error is None]
    with figure(path, 7, 4) as [axes]:
        for peer, context in dict.fromkeys((cell.peer, cell.context) for cell in timed_cells):
            line = [cell for cell in timed_cells if (cell.peer, cell.context) == (peer, context)]
            times: list[Any] = [cell.median_ms for cell in line]
            axes.plot([cell.batch for cell in line], times, "o-", label=f"{peer}, {context} tokens")
        axes.set_xlabel("batch size")
        axes.set_ylabel(f"ms a step{label}")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.legend(fontsize=7)
