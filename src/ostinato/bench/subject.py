"""What is measured: a model, and engines whose rows are about to decode."""

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

import torch

from ..llm import named_shape
from ..model import Decoder, KVCache
from ..model.config import DTYPES
from ..runtime import Engine, EngineConfig, SamplingParams
from ..runtime.decode_pieces import DecodePieces
from ..runtime.graph_reason import Reason
from ..runtime.sequence import Sequence
from ..runtime.step_state import RowUpdate
from ..weights import dummy_model, load_model, open_checkpoint, resolve

TAPE = "TAPE ON A CPU: operators that are run again one by one, no CUDA graphs; nothing here is about a GPU"


def load_decoder(model: str | None, shape: str | None, device: torch.device, dtype: str) -> Decoder:
    """A checkpoint's model, or one of a named shape with random weights.

    Raises:
        ValueError: both are given, or a dtype that is not supported.
    """
    if model is not None and shape is not None:
        raise ValueError("a model is a checkpoint (--model) or has random weights (--shape), not both")
    wanted = None if dtype == "auto" else DTYPES.get(dtype)
    if dtype != "auto" and wanted is None:
        raise ValueError(f"dtype {dtype!r} is not supported; supported: auto, {', '.join(DTYPES)}")
    if shape is not None:
        config = named_shape(shape)
        return dummy_model(config, dtype=wanted or config.dtype or torch.float32, device=device)
    return load_model(open_checkpoint(resolve(model)), dtype=wanted, device=device)[0]


def place(device: torch.device, model: str, dtype: str) -> dict[str, str]:
    """Where something was measured, and on what."""
    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "graphs": "CUDA graphs" if on_gpu else TAPE,
        "torch": torch.__version__,
        "model": model,
        "dtype": dtype,
    }


class Subject:
    """An engine with `batch` sequences that have `context` tokens each, and are about to decode.

    Their keys and values are made up, not computed, and are the same in every subject.

    Args:
        room: tokens that each may still get.
        kv_cache: of a subject of the same sizes, which takes turns with this one; None: its own.
    """

    def __init__(
        self,
        decoder: Decoder,
        config: EngineConfig,
        batch: int,
        context: int,
        room: int,
        params: Iterable[SamplingParams] | None = None,
        kv_cache: KVCache | None = None,
    ) -> None:
        self.batch, self.context = batch, context
        self._device = decoder.device
        started = time.perf_counter()
        self.engine = Engine(decoder, config, tokenizer=None, eos_token_ids=(), kv_cache=kv_cache)
        self.start_seconds = time.perf_counter() - started
        self.sequences: list[Sequence] = []
        self.restart(params or [SamplingParams(temperature=0.0)] * batch, room)

    def prefill(self) -> float:
        """End what is decoding, and compute one prompt of the context: milliseconds to its first token."""
        self._end()
        params, vocab = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True), self.engine.vocab_size
        self.engine.add(self.engine.create([7 * place % vocab for place in range(self.context)], params)[0])
        self.wait()
        started = time.perf_counter()
        while self.engine.has_work:
            self.engine.step()
        self.wait()
        return 1e3 * (time.perf_counter() - started)

    def _end(self) -> None:
        self.engine.abort(*self.sequences)
        self.engine.step()  # one that was launched ahead is waited for
        self.sequences = []

    def restart(self, params: Iterable[SamplingParams], room: int) -> None:
        """End what is decoding, and do for other requests what their prompts would do, but for computing them."""
        self._end()
        scheduler, runner, context = self.engine._scheduler, self.engine._runner, self.context
        for row, one in enumerate(params):
            limited = replace(one, max_tokens=room, ignore_eos=True)
            for sequence in self.engine.create([row % self.engine.vocab_size] * context, limited):
                self.engine.add(sequence)
        scheduler._admit()
        self.sequences = list(scheduler.prefilling)
        assert not scheduler.waiting, "the KV cache holds every row"
        for row, sequence in enumerate(self.sequences):
            sequence.row, sequence.num_computed = row, context
            sequence.output_ids.append(row % self.engine.vocab_size)
            sequence.output_texts.append("")
        scheduler.running, scheduler.prefilling = scheduler.prefilling, []
        generator = torch.Generator(self._device).manual_seed(0)
        for cache in (*self.kv_cache.k, *self.kv_cache.v):
            cache.normal_(generator=generator)
        with torch.inference_mode():
            updates = [
                RowUpdate(row, s.output_ids[0], context, context + 1, s.blocks) for row, s in enumerate(self.sequences)
            ]
            runner._state.write_rows(updates)
            for row, s in enumerate(self.sequences):
                runner._sampler.set_row(row, s.params, s.seed, s.prompt_ids, s.output_ids, sample_index=s.sample_index)

    def step(self, count: int) -> list[float]:
        """Decode so many tokens a sequence; milliseconds of each step but the first, tokens on the host."""
        self.wait()
        times = [time.perf_counter()]
        for _ in range(count):
            self.engine.step()
            times.append(time.perf_counter())
        self.wait()
        return [1e3 * (b - a) for a, b in pairwise(times)][1:]

    def tokens(self) -> list[list[int]]:
        return [list(sequence.output_ids) for sequence in self.sequences]

    def counts(self) -> Counter[Reason]:
        """Decode chunks by reason."""
        return Counter(self.engine.decode_runner.counters.by_reason)

    @property
    def pieces(self) -> DecodePieces:
        return self.engine._runner._pieces

    @property
    def kv_cache(self) -> KVCache:
        return self.pieces.kv_cache

    @property
    def on_gpu(self) -> bool:
        return self._device.type == "cuda"

    def wait(self) -> None:
        """Until the device has done everything."""
        if self.on_gpu:
            torch.cuda.synchronize(self._device)
