"""The modes that decode steps are measured in, and the cells of a matrix for which there are memory and time."""

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..model import Decoder, KVCache
from ..runtime import EngineConfig, SamplingParams
from ..runtime.graph_reason import Reason
from .errors import BenchError
from .subject import Subject

SPARE_BYTES = 4 << 30
"""Of a GPU, for graphs and whatever else is not the KV cache of a cell."""

BLOCK_SIZE = 16
"""Tokens of a KV block."""

MODES: Mapping[str, tuple[dict[str, Any], Reason]] = {
    "piecewise": ({"graphs": "piecewise"}, Reason.PIECEWISE),
    "whole": ({"graphs": "whole"}, Reason.WHOLE),
    "eager": ({"graphs": "whole", "enable_decode_graphs": False}, Reason.FORCED),
    "lazy": ({"graphs": "whole", "capture": "lazy"}, Reason.WHOLE),
}
"""Of each mode, what an engine is told, and the reason that its steps must give; eager is the graphs' own Python."""


@dataclass(frozen=True)
class LeftOut:
    """A cell that was asked for and not measured."""

    batch: int
    context: int
    why: str


def affordable(
    decoder: Decoder,
    cells: Sequence[tuple[int, int]],
    room: int,
    seconds: float | None,
    left_out: list[LeftOut],
) -> Iterator[tuple[int, int]]:
    """The cells whose KV cache fits and that begin in time; the others are named in `left_out`."""
    began = time.perf_counter()
    for batch, context in cells:
        needed, free = _kv_bytes(decoder, batch, context, room), free_bytes(decoder.device)
        if free is not None and needed + SPARE_BYTES > free:
            why = f"does not fit: keys and values take {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free"
        elif seconds is not None and time.perf_counter() - began >= seconds:
            why = f"not measured: the time limit of {seconds:.3g} s was over"
        else:
            yield batch, context
            continue
        left_out.append(LeftOut(batch, context, why))


def free_bytes(device: torch.device) -> int | None:
    """Of a GPU, once what nobody holds is given back; None for a CPU."""
    gc.collect()
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def make_subject(
    decoder: Decoder,
    batch: int,
    context: int,
    mode: str,
    room: int,
    params: Sequence[SamplingParams] | None = None,
    kv_cache: KVCache | None = None,
    **options: Any,
) -> Subject:
    """An engine in a mode, about to decode; `options` go beyond the mode's own."""
    sizes = {
        "max_num_seqs": batch,
        "max_model_len": _length(context, room),
        "block_size": BLOCK_SIZE,
        "kv_cache_memory_bytes": _kv_bytes(decoder, batch, context, room),
        "capture_sizes": (batch,),
    }
    config = EngineConfig(**{**sizes, **MODES[mode][0], **options})
    return Subject(decoder, config, batch, context, room, params, kv_cache)


def _length(context: int, room: int) -> int:
    return context + room + 1


def _kv_bytes(decoder: Decoder, batch: int, context: int, room: int) -> int:
    blocks = batch * -(-_length(context, room) // BLOCK_SIZE) + 4
    return blocks * BLOCK_SIZE * decoder.config.kv_bytes_per_token(decoder.dtype)


def check_mode(ran: Mapping[Reason, int], wanted: Reason, what: str) -> None:
    """Raises BenchError unless all steps gave one reason."""
    others = {reason.name: count for reason, count in ran.items() if reason is not wanted}
    if others or not ran.get(wanted):
        raise BenchError(f"{what}: steps should have run as {wanted.name}, but ran as {others or 'none'}")


def graphs_per_step(subject: Subject, mode: str) -> int:
    """Replays that a step is made of."""
    graphs = subject.engine.decode_runner.graphs
    assert graphs is not None, "every mode knows the buckets"
    if mode == "piecewise":
        return len(graphs.regions_of(graphs.configs[0].bucket_keys()[0]))
    return 0 if mode == "eager" else 1
