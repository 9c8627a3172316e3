"""Every kernel that an engine's decode steps need, compiled before anything is measured."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import aot
import torch

from ostinato.model import SHAPES, Decoder, KVCache
from ostinato.runtime import EngineConfig
from ostinato.runtime.decode_pieces import GRAPH_ROADS, DecodePieces
from ostinato.runtime.sampler import Sampler
from ostinato.runtime.step_state import RowUpdate, StepState

META = torch.device("meta")


def compile_decode(steps: Iterable[tuple[str, EngineConfig, Sequence[int]]]) -> dict[str, Any]:
    """Compile for an H200, in 15 processes, what steps of (model, engine, sizes) launch, with each kind of sampling.

    CUDA must not be in use yet. Returns the number of kernels and the seconds, to be told beside what is measured.
    """
    started = time.perf_counter()
    launches = launches_of(steps)
    aot.compile_everywhere(launches, (90,), 15)
    return {"kernels": len(launches), "compile_seconds": round(time.perf_counter() - started, 2)}


def launches_of(steps: Iterable[tuple[str, EngineConfig, Sequence[int]]]) -> list[aot.Launch]:
    """What steps of (model, engine, sizes) launch, each machine code once."""
    with aot.recording() as launches, torch.inference_mode():
        for model, engine, sizes in steps:
            _launch(model, engine, sizes)
    return list({launch.key: launch for launch in launches}.values())


def _launch(model: str, engine: EngineConfig, sizes: Sequence[int]) -> None:
    """On tensors without data, with one layer: the others launch the same."""
    config, dtype, block_size = replace(SHAPES[model], num_layers=1), torch.bfloat16, engine.block_size
    assert engine.max_model_len is not None, "attention is planned for the longest context"
    kv_cache = KVCache.allocate(config, 64, block_size, dtype=dtype, device=META)
    state = StepState(engine.max_num_seqs, -(-engine.max_model_len // block_size), META)
    sampler = Sampler(engine.max_num_seqs, config.vocab_size, device=META)
    pieces = DecodePieces(Decoder(config, dtype=dtype, device=META), kv_cache, state, sampler)
    for size in sizes:
        for road in GRAPH_ROADS:
            pieces.run(size, road)
    state.write_rows([RowUpdate(0, 0, 0, 1, [2])])
