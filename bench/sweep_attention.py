"""Decode attention with rotation and KV write: every plan worth trying, checked against the reference and timed.

    python bench/sweep_attention.py OUT.jsonl SECONDS COMMIT [CELL,...]

A cell is one graph over many layers with caches of their own. A record's id is CELL/PLAN; of the plan that ships there
is also CELL/PLAN/apart, with the rotation and the KV write in a kernel of their own.
"""

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import aot
import harness
import torch

from ostinato.kernels import (
    attention_decode,
    kv_cache_shape,
    rotary_attention_decode,
    rotary_attention_decode_ref,
    rotary_kv_write,
)
from ostinato.kernels._attention_plan import AttentionPlan, attention_plan

MODULE = sys.modules["ostinato.kernels.attention_decode"]
BF16 = torch.bfloat16

# name: sequences, keys each, query heads, KV heads, head_dim, KV block, layers
CELLS = {
    "1b-1x1k": (1, 1024, 32, 8, 64, 16, 64),
    "1b-4x1k": (4, 1024, 32, 8, 64, 16, 32),
    "1b-8x1k": (8, 1024, 32, 8, 64, 16, 24),
    "1b-16x1k": (16, 1024, 32, 8, 64, 16, 12),
    "1b-32x1k": (32, 1024, 32, 8, 64, 16, 8),
    "1b-1x8k": (1, 8192, 32, 8, 64, 16, 24),
    "1b-1x32k": (1, 32768, 32, 8, 64, 16, 8),
    "1b-32x8k": (32, 8192, 32, 8, 64, 16, 3),
    "8b-1x1k": (1, 1024, 32, 8, 128, 16, 32),
    "8b-8x1k": (8, 1024, 32, 8, 128, 16, 12),
    "8b-32x1k": (32, 1024, 32, 8, 128, 16, 6),
    "8b-1x32k": (1, 32768, 32, 8, 128, 16, 6),
    "8b-32x8k": (32, 8192, 32, 8, 128, 16, 2),
}

# keys of a tile, warps, stages, shares; the plan that ships is tried anyway
CANDIDATES = {
    "1b-1x1k": [(64, 4, 1, 16), (64, 2, 1, 16), (128, 8, 1, 8), (128, 4, 1, 8), (32, 4, 1, 32), (64, 4, 3, 16)],
    "1b-4x1k": [(64, 4, 1, 16), (64, 4, 1, 8), (128, 8, 1, 8), (64, 4, 4, 16)],
    "1b-8x1k": [(64, 4, 1, 8), (64, 4, 1, 4), (128, 8, 1, 4), (128, 4, 1, 8), (64, 4, 4, 8), (64, 4, 4, 4)],
    "1b-16x1k": [(64, 4, 1, 4), (128, 8, 1, 2), (64, 4, 4, 4), (128, 4, 4, 2)],
    "1b-32x1k": [(64, 4, 1, 2), (128, 8, 1, 1), (128, 4, 4, 1), (64, 2, 4, 2)],
    "1b-1x8k": [(64, 4, 1, 64), (128, 8, 1, 32), (128, 8, 1, 64), (64, 4, 4, 64), (128, 4, 4, 32)],
    "1b-1x32k": [(64, 4, 1, 64), (128, 8, 1, 32), (128, 8, 1, 64), (64, 2, 1, 64), (128, 4, 4, 32), (64, 2, 4, 64)],
    "1b-32x8k": [(128, 4, 4, 1), (64, 2, 4, 2), (64, 4, 1, 1), (64, 4, 1, 2), (128, 8, 1, 1)],
    "8b-1x1k": [(64, 8, 1, 16), (64, 4, 1, 16), (32, 4, 1, 32), (128, 8, 1, 8), (64, 4, 3, 16)],
    "8b-8x1k": [(64, 8, 1, 4), (64, 8, 1, 8), (64, 4, 1, 8), (32, 4, 1, 8), (32, 2, 4, 8), (64, 4, 4, 4)],
    "8b-32x1k": [(64, 8, 1, 1), (64, 8, 1, 2), (64, 4, 4, 1), (32, 2, 4, 2)],
    "8b-1x32k": [(64, 8, 1, 64), (64, 4, 1, 64), (32, 4, 1, 64), (64, 8, 1, 32), (64, 4, 4, 32), (32, 2, 4, 64)],
    "8b-32x8k": [(64, 4, 4, 1), (32, 2, 4, 2), (64, 8, 1, 1), (64, 4, 1, 2)],
}


class Layers:
    def __init__(
        self, seqs: int, keys: int, heads: int, kv_heads: int, head_dim: int, block_size: int, layers: int, device: str
    ) -> None:
        blocks = -(-keys // block_size)

        def make(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
            made = torch.empty(*shape, dtype=dtype, device=device)
            return made if device == "meta" or not dtype.is_floating_point else made.normal_()

        shape = kv_cache_shape(2 + seqs * blocks, block_size, kv_heads, head_dim)
        self.caches = [(make(*shape), make(*shape)) for _ in range(layers)]
        table = torch.randperm(seqs * blocks).view(seqs, blocks) + 2
        self.table = table.to(device, torch.int32)
        self.lens = torch.full((seqs,), keys, dtype=torch.int32, device=device)
        self.slots = (table[:, -1] * block_size + (keys - 1) % block_size).to(device)
        self.qkv = make(seqs, (heads + 2 * kv_heads) * head_dim)
        angle = make(seqs, head_dim // 2, dtype=torch.float32)
        self.cos, self.sin = angle.cos(), angle.sin()
        self.q, self.out = make(seqs, heads, head_dim), make(seqs, heads, head_dim)
        self.scale = head_dim**-0.5
        self.num_bytes = layers * seqs * keys * kv_heads * head_dim * 2 * 2

    def fused(self, layers: int | None = None) -> None:
        for k, v in self.caches[:layers]:
            rotary_attention_decode(
                self.qkv, self.cos, self.sin, self.slots, k, v, self.table, self.lens, self.scale, out=self.out
            )

    def apart(self) -> None:
        for k, v in self.caches:
            rotary_kv_write(self.qkv, self.cos, self.sin, self.slots, k, v, out=self.q)
            attention_decode(self.q, k, v, self.table, self.lens, self.scale, out=self.out)

    def truth(self) -> torch.Tensor:
        """The first layer's result out of the same inputs in float32."""
        k, v = (cache.float() for cache in self.caches[0])
        return rotary_attention_decode_ref(
            self.qkv.float(), self.cos, self.sin, self.slots, k, v, self.table, self.lens, self.scale
        )


def shipped(cell: str) -> AttentionPlan:
    """The plan that the launcher would take on an H200."""
    seqs, keys, _, kv_heads, head_dim, block_size, _ = CELLS[cell]
    return attention_plan(seqs, kv_heads, head_dim, 2, -(-keys // block_size) * block_size, 132, 232448)


def candidates(cell: str) -> list[AttentionPlan]:
    return list(dict.fromkeys([shipped(cell), *(AttentionPlan(*numbers) for numbers in CANDIDATES[cell])]))


def label(plan: AttentionPlan) -> str:
    return f"n{plan.block_n}w{plan.num_warps}s{plan.num_stages}x{plan.splits}"


def planned(plan: AttentionPlan) -> Any:
    return mock.patch.object(MODULE, "attention_plan", return_value=plan)


def launches(cells: list[str]) -> list[aot.Launch]:
    with aot.recording() as noted:
        for cell in cells:
            layers = Layers(*CELLS[cell][:-1], 1, "meta")
            for plan in candidates(cell):
                with planned(plan):
                    layers.fused()
            layers.apart()
    return list({launch.key: launch for launch in noted}.values())


def main(path: str, seconds: float, commit: str, cells: list[str]) -> None:
    aot.compile_everywhere(launches(cells), (90,), 15)
    recorder = harness.Recorder(Path(path), seconds, commit)
    for cell in cells:
        if recorder.late:
            break
        layers = Layers(*CELLS[cell], "cuda")
        count, truth = len(layers.caches), layers.truth()
        facts = {"num_bytes": layers.num_bytes, "layers": count}
        timed = []
        for plan in candidates(cell):
            if recorder.late or f"{cell}/{label(plan)}" in recorder.done:
                continue
            with planned(plan):
                timing = harness.time_graph(harness.capture(layers.fused), replays=16)
                layers.out.fill_(float("nan"))
                layers.fused(1)
            error = float((layers.out.float() - truth).norm() / truth.norm())
            recorder.record(f"{cell}/{label(plan)}", timing, error=error, **facts)
            timed.append((timing.median / count, label(plan)))
            if not error < 8e-3:
                print(f"{cell} {label(plan)} is wrong: {error}", flush=True)
        if not timed:
            continue
        with planned(shipped(cell)):
            apart = harness.time_graph(harness.capture(layers.apart), replays=16)
        recorder.record(f"{cell}/{label(shipped(cell))}/apart", apart, **facts)
        best = "  ".join(f"{name} {micros:.2f}" for micros, name in sorted(timed))
        share = layers.num_bytes / count / timed[0][0] / 1e-6 / recorder.ceiling
        print(
            f"{cell:9s} {timed[0][1]} {timed[0][0]:.2f} us {share:.3f}, apart {apart.median / count:.2f} | {best}",
            flush=True,
        )
        del layers, truth
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), sys.argv[3], sys.argv[4].split(",") if len(sys.argv) > 4 else list(CELLS))
