"""`ostinato bench kernels`: what each part of a decode step takes by itself, over the weights of all layers."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..kernels import commit
from ..model import Decoder
from ..model.decoder import Layer
from .mode_subjects import make_subject
from .output import Column, Report
from .subject import TAPE, Subject, place
from .timing import capture, read_ceiling, time_graph
from .traffic import kv_bytes, step_bytes

REPLAYS = 20
ROOM = 64
"""For the steps that the replays of the whole one are."""


@dataclass(frozen=True)
class Part:
    """A part of a step.

    Attributes:
        run: all its calls of a step, or of several where it is a small one.
        calls: in a run.
        num_bytes: that a run must move, weights, keys and values; 0 where it is only activations.
        in_step: calls that a step has.
    """

    name: str
    run: Callable[[], object]
    calls: int
    num_bytes: int
    in_step: int


@dataclass(frozen=True)
class KernelCell:
    """One part, or the whole step; microseconds are of one call.

    Attributes:
        calls: in a step.
        step_us: of all of them.
        num_bytes: that one call must move; 0: activations alone, and so no share.
        ceiling_share: of the read ceiling.
    """

    name: str
    calls: int
    us: float
    p10_us: float
    p90_us: float
    step_us: float
    num_bytes: int
    bytes_per_second: float | None
    ceiling_share: float | None


@dataclass(frozen=True)
class KernelsResult:
    """Attributes:
    read_ceiling: bytes a second.
    """

    device: torch.device
    dtype: str
    batch: int
    context: int
    read_ceiling: float
    cells: list[KernelCell]


def measure(decoder: Decoder, batch: int, context: int, ceiling: float | None = None) -> KernelsResult:
    """Each part in a graph of its own, then the step as the engine replays it, all back to back.

    Args:
        ceiling: bytes a second; None: measured here.
    """
    device = decoder.device
    ceiling = ceiling or read_ceiling(device)
    subject = make_subject(decoder, batch, context, "whole", room=ROOM)
    cells = []
    for part in parts(subject, decoder):
        timing = time_graph(capture(part.run, device), device, replays=REPLAYS)
        cells.append(_cell(part, timing.median, timing.p10, timing.p90, ceiling))
    graphs = subject.engine.decode_runner.graphs
    assert graphs is not None, "a whole step has a graph"
    [slot, *_] = graphs.whole.slots(graphs.configs[0].bucket_keys()[0])
    timing = time_graph(slot.graph, device, replays=REPLAYS)
    num_bytes = step_bytes(decoder.config, [context + ROOM // 2] * batch, decoder.dtype.itemsize)
    whole = Part("the whole step, one graph", slot.graph.replay, 1, num_bytes, 1)
    cells.append(_cell(whole, timing.median, timing.p10, timing.p90, ceiling))
    return KernelsResult(device, str(decoder.dtype).removeprefix("torch."), batch, context, ceiling, cells)


@torch.inference_mode()
def parts(subject: Subject, decoder: Decoder) -> list[Part]:
    """A greedy step in parts, in order."""
    config, pieces, batch = decoder.config, subject.pieces, subject.batch
    count, item, state = config.num_layers, decoder.dtype.itemsize, pieces.state
    layers = [layer for layer in decoder.layers if isinstance(layer, Layer)]
    metadata, cache = pieces.metadata(batch), pieces.kv_cache
    road = subject.engine.decode_runner.greedy_road
    pre = pieces.preamble(batch)
    hidden = torch.randn_like(pre.hidden)
    stream = hidden.clone()
    qkv = layers[0].project_qkv(hidden)
    attended = layers[0].attend(qkv, pre, metadata, cache.k[0], cache.v[0])
    inner = layers[0].project_gate_up(hidden)
    logits = decoder.head(hidden)
    # Not the engine's own rows, which would move on.
    token_ids, positions, seq_lens = (
        tensor[:batch].clone() for tensor in (state.token_ids, state.positions, state.seq_lens)
    )
    ring, step = state.token_ids.new_zeros(4, batch), state.token_ids.new_zeros(1)

    def small(name: str, run: Callable[[], object]) -> Part:
        return Part(name, lambda: [run() for _ in range(count)], count, 0, 1)

    def of_layers(name: str, run: Callable[[int, Layer], object], num_bytes: int) -> Part:
        return Part(name, lambda: [run(i, layer) for i, layer in enumerate(layers)], count, num_bytes, count)

    def weights(*names: str) -> int:
        return sum(getattr(layer, f"{name}_weight").numel() * item for layer in layers for name in names)

    head_weight = decoder.embed_weight if config.tie_embeddings else decoder.head_weight
    assert isinstance(head_weight, torch.Tensor), "a head has a weight"
    keys = kv_bytes(config, [subject.context] * batch, item)
    return [
        small("preamble", lambda: pieces.preamble(batch)),
        of_layers("norm, qkv", lambda _, layer: layer.project_qkv(hidden), weights("qkv")),
        of_layers(
            "rotation, KV write, attention",
            lambda i, layer: layer.attend(qkv, pre, metadata, cache.k[i], cache.v[i]),
            keys,
        ),
        of_layers("o, residual", lambda _, layer: layer.add_attention(attended, stream, stream), weights("o")),
        of_layers("norm, gate and up, SwiGLU", lambda _, layer: layer.project_gate_up(hidden), weights("gate_up")),
        of_layers("down, residual", lambda _, layer: layer.add_mlp(inner, stream, stream), weights("down")),
        Part("norm, head", lambda: decoder.head(hidden, out=logits), 1, head_weight.numel() * item, 1),
        small("greedy", lambda: pieces.sample(logits, road)),
        small("commit", lambda: commit(token_ids, token_ids, positions, seq_lens, ring, step)),
    ]


def _cell(part: Part, median: float, p10: float, p90: float, ceiling: float) -> KernelCell:
    us = median / part.calls
    rate = part.num_bytes / (median * 1e-6) if part.num_bytes else None
    return KernelCell(
        name=part.name,
        calls=part.in_step,
        us=us,
        p10_us=p10 / part.calls,
        p90_us=p90 / part.calls,
        step_us=us * part.in_step,
        num_bytes=part.num_bytes // part.calls,
        bytes_per_second=rate,
        ceiling_share=None if rate is None else rate / ceiling,
    )


def report(result: KernelsResult, model: str) -> Report:
    """The parts, their sum, and the step that they make."""
    columns = [
        Column("part"),
        Column("calls a step", "d"),
        Column("µs a call", ".2f"),
        Column("p10", ".2f"),
        Column("p90", ".2f"),
        Column("µs a step", ".1f"),
        Column("MB a call", ".2f"),
        Column("GB/s", ".0f"),
        Column("share of ceiling", ".1%"),
    ]
    rows: list[Sequence[Any]] = [
        (
            cell.name,
            cell.calls,
            cell.us,
            cell.p10_us,
            cell.p90_us,
            cell.step_us,
            cell.num_bytes / 1e6 or None,
            None if cell.bytes_per_second is None else cell.bytes_per_second / 1e9,
            cell.ceiling_share,
        )
        for cell in result.cells
    ]
    total = sum(cell.step_us for cell in result.cells[:-1])
    rows.insert(-1, ("all parts, each by itself", None, None, None, None, total, None, None, None))
    where = place(result.device, model, result.dtype)
    notes = [
        f"{where['device']}, torch {where['torch']}; read ceiling {result.read_ceiling / 1e9:.1f} GB/s",
        "each part in a graph over all layers, so that no weight or key is in a cache for having been there a moment "
        "ago; preamble, greedy and commit are called over and over, and are warm",
    ]
    if result.device.type != "cuda":
        notes.insert(0, TAPE)
    document = {
        "command": "kernels",
        "version": 1,
        "where": where,
        "batch": result.batch,
        "context": result.context,
        "read_ceiling": result.read_ceiling,
        "cells": [asdict(cell) for cell in result.cells],
    }
    title = f"parts of a decode step of {model}, {result.dtype}, batch {result.batch}, {result.context} tokens each"
    return Report(title, columns, rows, notes, document)


def plot(result: KernelsResult, path: Path) -> None:
    """Microseconds of a step by part, beside what their bytes would take at the read ceiling."""
    from .output import figure

    label = "" if result.device.type == "cuda" else " (tape on a CPU, no CUDA graphs)"
    cells = result.cells[:-1][::-1]
    with figure(path, 8, 4) as [axes]:
        names = [cell.name for cell in cells]
        axes.barh(names, [cell.step_us for cell in cells], color="tab:blue", label="measured")
        floor = [1e6 * cell.calls * cell.num_bytes / result.read_ceiling for cell in cells]
        axes.barh(names, floor, color="tab:cyan", height=0.4, label="bytes at the ceiling")
        axes.set_xlabel(f"µs a step{label}")
        axes.legend(fontsize=7)
