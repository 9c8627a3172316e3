"""Attention with many queries a sequence, and whole prompts: every plan worth trying, checked, timed, and compared.

    python bench/prefill.py OUT.jsonl SECONDS COMMIT [CELL,...]

dense/SHAPE:TOKENS         one prompt; beside it `scaled_dot_product_attention` (flash) on dense keys and values
context/SHAPE:TOKENS:NEW   the last NEW tokens of it
verify/SHAPE:BATCH:QUERIES few queries each over 1024 keys; 1 is decode attention, fused with rotation and KV write
model/NAME:TOKENS          a whole prompt of a model with random weights, as the engine runs it

A record's id is CELL/PLAN, CELL/bBLOCK[-in-order] for the plan that ships with other KV blocks, or CELL/sdpa. Time is
that of one layer.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from typing import Any
from unittest import mock

import aot
import harness
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ostinato.kernels import (
    attention_decode,
    attention_prefill,
    attention_prefill_ref,
    kv_cache_shape,
    rotary_attention_decode,
    rotary_kv_write,
)
from ostinato.kernels._attention_plan import PrefillPlan, prefill_plan
from ostinato.model import SHAPES, AttentionMetadata, Decoder, KVCache

MODULE = sys.modules["ostinato.kernels.attention_prefill"]
BF16, KEYS = torch.bfloat16, 1024
HEADS = {"1b": (32, 8, 64), "8b": (32, 8, 128)}  # query heads, KV heads, head_dim
CELLS = [
    *(f"dense/{shape}:{tokens}" for shape in HEADS for tokens in (1024, 2048, 4096, 8192)),
    *(f"context/{shape}:8192:1024" for shape in HEADS),
    *(f"verify/{shape}:8:{queries}" for shape in HEADS for queries in (1, 2, 4, 8, 16)),
    "model/llama-3.2-1b:128",
    "model/llama-3.2-1b:2048",
    "model/llama-3.1-8b:2048",
]
# rows and keys of a tile, warps, stages, shares; the plan that ships is tried anyway
CANDIDATES: dict[str, list[tuple[int, int, int, int, int]]] = {
    "verify/1b:8:4": [(16, 64, 2, 4, 8), (16, 64, 4, 4, 4)],
    "verify/8b:8:4": [(16, 32, 4, 4, 8), (16, 64, 8, 3, 4), (16, 64, 4, 4, 4), (16, 32, 2, 4, 8)],
    "verify/1b:8:16": [(64, 64, 4, 4, 4)],
}  # fmt: skip


class Layers:
    """`layers` caches with `seqs` sequences of `keys` keys, the newest `queries` of which are asked for."""

    def __init__(
        self, shape: str, seqs: int, keys: int, queries: int, layers: int, device: str, block: int = 16,
        in_order: bool = False,
    ) -> None:  # fmt: skip
        self.heads, self.kv_heads, self.head_dim = HEADS[shape]
        self.seqs, self.keys, self.queries = seqs, keys, queries
        columns = -(-keys // block)

        def make(*sizes: int, dtype: torch.dtype = BF16) -> Tensor:
            made = torch.empty(*sizes, dtype=dtype, device=device)
            return made if device == "meta" else made.normal_()

        cache = kv_cache_shape(2 + seqs * columns, block, self.kv_heads, self.head_dim)
        self.caches = [(make(*cache), make(*cache)) for _ in range(layers)]
        order = torch.arange(seqs * columns) if in_order else torch.randperm(seqs * columns)
        table = order.view(seqs, columns) + 2
        self.table = table.to(device, torch.int32)
        self.lens = torch.full((seqs,), keys, dtype=torch.int32, device=device)
        self.offsets = (torch.arange(seqs + 1) * queries).to(device, torch.int32)
        self.slots = (table[:, -1] * block + (keys - 1) % block).to(device)
        self.q = make(seqs * queries, self.heads, self.head_dim)
        self.out = torch.empty_like(self.q)
        self.qkv = make(seqs, (self.heads + 2 * self.kv_heads) * self.head_dim)
        angle = make(seqs, self.head_dim // 2, dtype=torch.float32)
        self.cos, self.sin = angle.cos(), angle.sin()
        self.scale = self.head_dim**-0.5
        self.num_bytes = seqs * keys * self.kv_heads * self.head_dim * 2 * 2
        # Products of visible pairs of query and key.
        self.flops = 4.0 * seqs * self.heads * self.head_dim * queries * (keys - (queries - 1) / 2)

    def prefill(self) -> None:
        for k, v in self.caches:
            attention_prefill(self.q, k, v, self.table, self.lens, self.offsets, self.scale, out=self.out)

    def decode(self) -> None:
        for k, v in self.caches:
            attention_decode(self.q, k, v, self.table, self.lens, self.scale, out=self.out)

    def fused_decode(self) -> None:
        for k, v in self.caches:
            rotary_attention_decode(
                self.qkv, self.cos, self.sin, self.slots, k, v, self.table, self.lens, self.scale, out=self.out
            )

    def rotary_prefill(self) -> None:
        """The same rotation and write as a decode has, of every token."""
        qkv, cos, sin = (x.repeat_interleave(self.queries, 0) for x in (self.qkv, self.cos, self.sin))
        back = torch.arange(self.queries - 1, -1, -1, device=self.slots.device).repeat(self.seqs)
        self.many = (qkv, cos, sin, self.slots.repeat_interleave(self.queries) - back)

    def rotary_and_prefill(self) -> None:
        for k, v in self.caches:
            rotary_kv_write(*self.many, k, v, out=self.q)
            attention_prefill(self.q, k, v, self.table, self.lens, self.offsets, self.scale, out=self.out)

    def deviation(self) -> float:
        """Of the first layer against float32, relative in the norm; of the last 256 queries of a sequence."""
        last = min(self.queries, 256)
        k, v = self.caches[0]
        self.out.fill_(float("nan"))
        attention_prefill(self.q, k, v, self.table, self.lens, self.offsets, self.scale, out=self.out)
        q, out = (x.view(self.seqs, self.queries, self.heads, -1)[:, -last:].flatten(0, 1) for x in (self.q, self.out))
        offsets = torch.arange(self.seqs + 1, device=q.device, dtype=torch.int32) * last
        truth = attention_prefill_ref(q.float(), k.float(), v.float(), self.table, self.lens, offsets, self.scale)
        return float((out.float() - truth).norm() / truth.norm())


class Prompt:
    """A whole prompt of one sequence through a model: from token ids to the logits behind its last token."""

    def __init__(self, model: str, tokens: int, device: str) -> None:
        config = SHAPES[model]
        self.decoder = Decoder(config, dtype=BF16, device=device)
        if device != "meta":
            for parameter in self.decoder.parameters():
                parameter.normal_(std=parameter.shape[-1] ** -0.5) if parameter.dim() > 1 else parameter.fill_(1.0)
        blocks = -(-tokens // 16)
        self.cache = KVCache.allocate(config, 2 + blocks, 16, dtype=BF16, device=device)
        self.metadata = AttentionMetadata(
            (torch.randperm(blocks)[None] + 2).to(device, torch.int32),
            torch.tensor([tokens], dtype=torch.int32).to(device),
            torch.tensor([0, tokens], dtype=torch.int32).to(device),
        )
        self.token_ids, self.positions = (torch.arange(tokens).to(device) for _ in range(2))
        weights = sum(p.numel() for layer in self.decoder.layers for p in layer.parameters() if p.dim() > 1)
        pairs = tokens * (tokens + 1) / 2
        self.flops = 2.0 * tokens * weights + 4.0 * pairs * config.num_layers * config.num_heads * config.head_dim
        self.flops += 2.0 * config.vocab_size * config.hidden_size

    def run(self) -> Tensor:
        preamble = self.decoder.preamble(self.token_ids, self.positions, self.metadata, 16)
        hidden = self.decoder.blocks(preamble.hidden, preamble, self.metadata, self.cache)
        return self.decoder.head(hidden[-1:])


def parts(cell: str) -> tuple[str, str, list[int]]:
    """Kind, shape and numbers of a cell: `dense/8b:1024`."""
    kind, rest = cell.split("/")
    shape, *numbers = rest.split(":")
    return kind, shape, [int(number) for number in numbers]


def layers_of(cell: str, device: str, **options: Any) -> Layers:
    kind, shape, numbers = parts(cell)
    if kind == "verify":
        layers = 1 if device == "meta" else {"1b": 24, "8b": 12}[shape]
        return Layers(shape, numbers[0], KEYS, numbers[1], layers, device, **options)
    tokens, new = numbers[0], numbers[-1]
    return Layers(shape, 1, tokens, new, 1 if device == "meta" else max(1, 8192 // tokens), device, **options)


def shipped(layers: Layers) -> PrefillPlan:
    """The plan that the launcher would take on an H200."""
    sizes = (layers.seqs * layers.queries, layers.seqs, layers.kv_heads, layers.heads // layers.kv_heads)
    return prefill_plan(*sizes, layers.head_dim, 2, layers.keys, 132, 232448)


def candidates(cell: str, layers: Layers) -> list[PrefillPlan]:
    return list(dict.fromkeys([shipped(layers), *(PrefillPlan(*numbers) for numbers in CANDIDATES.get(cell, []))]))


def label(plan: PrefillPlan) -> str:
    return "m{}n{}w{}s{}x{}".format(*astuple(plan))


@contextmanager
def planned(plan: PrefillPlan) -> Iterator[None]:
    with mock.patch.object(MODULE, "prefill_plan", return_value=plan):
        yield


def launches(cells: list[str]) -> list[aot.Launch]:
    with aot.recording() as noted:
        for cell in cells:
            if cell.startswith("model/"):
                Prompt(parts(cell)[1], parts(cell)[2][0], "meta").run()
                continue
            layers = layers_of(cell, "meta")
            for plan in candidates(cell, layers):
                with planned(plan):
                    layers.prefill()
            for options in LAYOUTS if cell.endswith(":8192") else []:
                with planned(shipped(layers)):
                    layers_of(cell, "meta", **options).prefill()
            layers.rotary_prefill()
            layers.rotary_and_prefill()
            if cell.startswith("verify/"):
                decode = layers_of(cell.rsplit(":", 1)[0] + ":1", "meta")
                decode.decode()
                decode.fused_decode()
    return list({launch.key: launch for launch in noted}.values())


LAYOUTS = [{"block": 128}, {"block": 128, "in_order": True}]


def one(timing: harness.Timing, count: int) -> harness.Timing:
    return harness.Timing(*(value / count for value in vars(timing).values()))


def measure_attention(cell: str, recorder: harness.Recorder) -> None:
    kind, _, _ = parts(cell)
    layers = layers_of(cell, "cuda")
    count = len(layers.caches)

    def record(name: str, step: Callable[[], object], **facts: object) -> float:
        timing = one(harness.time_graph(harness.capture(step), replays=16), count)
        recorder.record(f"{cell}/{name}", timing, num_bytes=layers.num_bytes, flops=layers.flops, **facts)
        return timing.median

    times = {}
    if kind == "verify" and layers.queries == 1:
        times = {"decode": record("decode", layers.decode), "fused": record("fused", layers.fused_decode)}
    else:
        for plan in candidates(cell, layers):
            with planned(plan):
                deviation = layers.deviation()
                ships = plan == shipped(layers)
                times[label(plan)] = record(label(plan), layers.prefill, deviation=deviation, ships=ships)
            if not deviation < 8e-3:
                print(f"{cell} {label(plan)} is wrong: {deviation}", flush=True)
    ours = times[label(shipped(layers))] if kind != "verify" or layers.queries > 1 else times["fused"]
    if kind == "verify" and layers.queries > 1:
        layers.rotary_prefill()
        times["with rotary"] = record("rotary", layers.rotary_and_prefill)
    if kind == "dense":
        times["sdpa"] = record("sdpa", dense(layers))
    if cell.endswith(":8192"):
        for options in LAYOUTS:
            name = f"b{options['block']}{'-in-order' * options.get('in_order', False)}"
            layers = layers_of(cell, "cuda", **options)
            times[name] = record(name, layers.prefill)
    best = "  ".join(f"{name} {micros:.1f}" for name, micros in sorted(times.items(), key=lambda item: item[1]))
    print(f"{cell:20s} {layers.flops / ours / 1e6:6.1f} TFLOP/s | {best}", flush=True)


def dense(layers: Layers) -> Callable[[], object]:
    """Flash attention of torch over dense keys and values of the same shape."""
    q = layers.q.transpose(0, 1)[None].contiguous()
    k, v = (torch.randn(1, layers.kv_heads, layers.keys, layers.head_dim, device="cuda").bfloat16() for _ in "kv")

    def run() -> None:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            for _ in layers.caches:
                F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=layers.scale, enable_gqa=True)

    return run


def measure_model(cell: str, recorder: harness.Recorder, matmul: float) -> None:
    _, model, (tokens,) = parts(cell)
    prompt = Prompt(model, tokens, "cuda")
    for _ in range(3):
        prompt.run()
    torch.cuda.synchronize()
    walls, hosts = [], []
    for _ in range(15):
        start = time.perf_counter()
        logits = prompt.run()
        hosts.append(1e6 * (time.perf_counter() - start))
        torch.cuda.synchronize()
        walls.append(1e6 * (time.perf_counter() - start))
    assert logits.isfinite().all()
    walls.sort()
    timing = harness.Timing(walls[7], walls[1], walls[-2], walls[7])
    graph = harness.time_graph(harness.capture(prompt.run), replays=8)
    rate = prompt.flops / timing.median / 1e-6
    facts = {"flops": prompt.flops, "matmul": matmul, "host": sorted(hosts)[7], "graph": graph.median}
    recorder.record(cell, timing, **facts)
    print(
        f"{cell:24s} {timing.median / 1e3:.2f} ms, {rate / 1e12:.0f} TFLOP/s, {rate / matmul:.3f} of a matmul; "
        f"the host takes {facts['host'] / 1e3:.2f} ms, one graph {graph.median / 1e3:.2f} ms", flush=True,
    )  # fmt: skip


def matmul_rate(size: int = 8192) -> float:
    a, b = (torch.randn(size, size, device="cuda").bfloat16() for _ in "ab")
    timing = harness.time_graph(harness.capture(lambda: a @ b.t()), replays=16)
    return 2.0 * size**3 / timing.median / 1e-6


def main(path: str, seconds: float, commit: str, cells: list[str]) -> None:
    noted = launches(cells)
    print(f"{len(noted)} kernels to compile", flush=True)
    aot.compile_everywhere(noted, (90,), 15)
    recorder = harness.Recorder(Path(path), seconds, commit)
    matmul = matmul_rate()
    print(f"8192 x 8192 x 8192: {matmul / 1e12:.0f} TFLOP/s", flush=True)
    for cell in cells:
        if recorder.late:
            print("deadline: the rest is for the next run", flush=True)
            break
        if any(name == cell or name.startswith(f"{cell}/") for name in recorder.done):
            continue
        if cell.startswith("model/"):
            measure_model(cell, recorder, matmul)
        else:
            measure_attention(cell, recorder)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), sys.argv[3], sys.argv[4].split(",") if len(sys.argv) > 4 else CELLS)
