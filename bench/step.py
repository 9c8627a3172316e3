"""A whole greedy decode step, from token ids to token ids: eager, and in one graph.

    python bench/step.py OUT.jsonl SECONDS COMMIT MODEL:BATCH[:ATTENTION][,...]

Weights are random; every sequence has 1024 keys at the start, and grows by one a step. ATTENTION overrides the plan of
attention: n64w4s1x32 is 64 keys a tile, 4 warps, 1 stage, 32 shares.
"""

import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import aot
import harness
import torch

from ostinato.bench.traffic import step_bytes
from ostinato.kernels import commit, greedy
from ostinato.kernels._attention_plan import AttentionPlan, attention_plan
from ostinato.model import SHAPES, AttentionMetadata, Decoder, KVCache, ModelConfig

KEYS, ROOM, KV_BLOCK = 1024, 2048, 16
BF16 = torch.bfloat16


class Step:
    """Everything that one decode step reads and writes."""

    def __init__(self, config: ModelConfig, batch: int, device: str, decoder: Decoder | None = None) -> None:
        self.config, self.batch = config, batch
        self.decoder = decoder or Decoder(config, dtype=BF16, device=device)
        if decoder is None and device != "meta":
            for parameter in self.decoder.parameters():
                parameter.normal_(std=parameter.shape[-1] ** -0.5) if parameter.dim() > 1 else parameter.fill_(1.0)
        columns = ROOM // KV_BLOCK
        self.cache = KVCache.allocate(config, 2 + batch * columns, KV_BLOCK, dtype=BF16, device=device)
        if device != "meta":
            for cache in (*self.cache.k, *self.cache.v):
                cache.normal_()
        tables = (torch.randperm(batch * columns).view(batch, columns) + 2).to(device, torch.int32)
        self.seq_lens = torch.full((batch,), KEYS, dtype=torch.int32, device=device)
        self.metadata = AttentionMetadata(tables, self.seq_lens)
        self.positions = torch.full((batch,), KEYS - 1, device=device)
        self.token_ids = torch.arange(batch, device=device)
        self.ring = torch.zeros(4, batch, dtype=torch.int64, device=device)
        self.count = torch.zeros(1, dtype=torch.int64, device=device)
        self.logits = torch.empty(batch, config.vocab_size, dtype=BF16, device=device)
        self.sampled = torch.empty(batch, dtype=torch.int64, device=device)

    def run(self) -> None:
        pre = self.decoder.preamble(self.token_ids, self.positions, self.metadata, KV_BLOCK)
        hidden = self.decoder.blocks(pre.hidden, pre, self.metadata, self.cache)
        greedy(self.decoder.head(hidden, out=self.logits), out=self.sampled)
        commit(self.sampled, self.token_ids, self.positions, self.seq_lens, self.ring, self.count)


@contextmanager
def attention(name: str) -> Iterator[None]:
    """The plan of attention that the third part of a cell's name asks for, else the one that ships."""
    parts = name.split(":")
    numbers = re.fullmatch(r"n(\d+)w(\d+)s(\d+)x(\d+)", parts[2]) if len(parts) > 2 else None
    plan = (lambda *_: AttentionPlan(*map(int, numbers.groups()))) if numbers else attention_plan
    with mock.patch.object(sys.modules["ostinato.kernels.attention_decode"], "attention_plan", plan):
        yield


def launch_all(names: list[str]) -> None:
    """Everything that `measure` launches, on tensors without data."""
    for name in names:
        model, batch = name.split(":")[:2]
        with attention(name):
            Step(SHAPES[model], int(batch), "meta").run()


def measure(names: list[str], recorder: harness.Recorder) -> None:
    decoder = None
    for name in recorder.cells(names):
        model, batch = name.split(":")[:2]
        if decoder is not None and decoder.config != SHAPES[model]:
            decoder = None
        step = Step(SHAPES[model], int(batch), "cuda", decoder)
        decoder = step.decoder
        with attention(name):
            graph = harness.capture(step.run)
            start = time.perf_counter()
            for _ in range(10):
                step.run()
            torch.cuda.synchronize()
        eager = 1e5 * (time.perf_counter() - start)
        timing = harness.time_graph(graph, replays=40)
        keys = int(step.seq_lens[0])
        num_bytes = step_bytes(step.config, [(KEYS + keys) // 2] * step.batch)
        recorder.record(f"step/{name}", timing, num_bytes=num_bytes, eager=eager, keys=keys)
        share = num_bytes / timing.median / 1e-6 / recorder.ceiling
        assert step.logits.isfinite().all()
        print(f"{name:20s} graph {timing.median:8.1f} us, share {share:.3f}, eager {eager:8.1f} us", flush=True)
        del step, graph
        torch.cuda.empty_cache()


def main(path: str, seconds: float, commit_id: str, names: list[str]) -> None:
    with aot.recording() as launches:
        launch_all(names)
    unique = list({launch.key: launch for launch in launches}.values())
    aot.compile_everywhere(unique, (90,), 15)
    measure(names, harness.Recorder(Path(path), seconds, commit_id))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), sys.argv[3], sys.argv[4].split(","))
