"""Decode attention: which cut is fastest for a bucket, and what it reaches.

    python bench/sweep_attention.py OUT.jsonl SECONDS COMMIT

Each cell is one graph over many layers with caches of their own. `fused` is rotation, KV write and attention in one
kernel and the merge in another, `split` has the rotation and the write in a kernel of their own.
"""

import sys
from pathlib import Path
from unittest import mock

import aot
import harness
import torch

from ostinato.kernels import attention_decode, kv_cache_shape, rotary_attention_decode, rotary_kv_write
from ostinato.kernels._attention_plan import AttentionPlan, attention_plan, tensor_plan

MODULE = sys.modules["ostinato.kernels.attention_decode"]
BF16 = torch.bfloat16

# name: sequences, keys each, query heads, KV heads, head_dim, KV block, layers
CELLS = {
    "1b-1x1k": (1, 1024, 32, 8, 64, 16, 64),
    "8b-1x1k": (1, 1024, 32, 8, 128, 16, 32),
    "8b-32x8k": (32, 8192, 32, 8, 128, 16, 2),
    "1b-32x8k": (32, 8192, 32, 8, 64, 16, 3),
    "1b-1x32k": (1, 32768, 32, 8, 64, 16, 8),
    "8b-1x32k": (1, 32768, 32, 8, 128, 16, 6),
    "8b-32x1k": (32, 1024, 32, 8, 128, 16, 6),
    "1b-8x1k": (8, 1024, 32, 8, 64, 16, 16),
    "8b-32x8k-kv32": (32, 8192, 32, 8, 128, 32, 2),
    "8b-32x8k-kv64": (32, 8192, 32, 8, 128, 64, 2),
    "8b-32x8k-kv128": (32, 8192, 32, 8, 128, 128, 2),
    "1b-1x8k": (1, 8192, 32, 8, 64, 16, 16),
    "smollm2-1x1k": (1, 1024, 9, 3, 64, 16, 64),
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
        self.cos, self.sin = (make(seqs, head_dim // 2, dtype=torch.float32) for _ in range(2))
        self.q, self.out = make(seqs, heads, head_dim), make(seqs, heads, head_dim)
        self.scale = head_dim**-0.5
        self.num_bytes = layers * seqs * keys * kv_heads * head_dim * 2 * 2

    def fused(self) -> None:
        for k, v in self.caches:
            rotary_attention_decode(
                self.qkv, self.cos, self.sin, self.slots, k, v, self.table, self.lens, self.scale, out=self.out
            )

    def split(self) -> None:
        for k, v in self.caches:
            rotary_kv_write(self.qkv, self.cos, self.sin, self.slots, k, v, out=self.q)
            attention_decode(self.q, k, v, self.table, self.lens, self.scale, out=self.out)


def candidates(name: str) -> list[AttentionPlan]:
    seqs, keys, heads, kv_heads, head_dim, _, _ = CELLS[name]
    plans = [attention_plan(seqs, kv_heads, heads // kv_heads, head_dim, 2, keys, 132, 232448)]
    plans.append(tensor_plan(seqs, kv_heads, head_dim, 2, keys, 132, 232448))
    for block_n, warps, stages in ((64, 4, 8), (64, 4, 4), (128, 4, 8), (64, 2, 8)):
        if not 1024 * warps <= block_n * head_dim <= 2048 * warps:
            continue
        for over in (1, 2) if seqs > 1 else (4,):
            splits = 1
            while splits < min(64, over * 132 // (seqs * kv_heads), keys // block_n):
                splits *= 2
            plans.append(AttentionPlan(block_n, warps, stages, splits, 1))
    if seqs * keys <= 8192:
        for block_n, warps in ((32, 1), (16, 1), (64, 4), (32, 2)):
            splits = min(64, keys // block_n)
            plans.append(AttentionPlan(block_n, warps, 1, splits, 1, dot=False))
    return list(dict.fromkeys(plans))


def label(plan: AttentionPlan) -> str:
    return f"n{plan.block_n}w{plan.num_warps}s{plan.num_stages}x{plan.max_splits}{'' if plan.dot else 'v'}"


def main(path: str, seconds: float, commit: str) -> None:
    plans = {}
    with aot.recording() as launches:
        for name, (seqs, keys, heads, kv_heads, head_dim, block, _) in CELLS.items():
            layers = Layers(seqs, keys, heads, kv_heads, head_dim, block, 1, "meta")
            plans[name] = candidates(name)
            for index, plan in enumerate(plans[name]):
                with mock.patch.object(MODULE, "attention_plan", lambda *a, plan=plan: plan):
                    layers.fused()
                    if index == 0:
                        layers.split()
    unique = list({launch.key: launch for launch in launches}.values())
    print(f"{len(unique)} kernels to compile", flush=True)
    aot.compile_everywhere(unique, (90,), 15)

    recorder = harness.Recorder(Path(path), seconds, commit)
    for name in recorder.cells(CELLS):
        layers = Layers(*CELLS[name], "cuda")
        count = len(layers.caches)
        timed = []
        for plan in plans[name]:
            if recorder.late:
                break
            with mock.patch.object(MODULE, "attention_plan", lambda *a, plan=plan: plan):
                timing = harness.time_graph(harness.capture(layers.fused), replays=10)
            recorder.record(f"{name}/fused/{label(plan)}", timing, num_bytes=layers.num_bytes, layers=count)
            timed.append((min(timing.median, timing.again), plan))
        if not timed:
            break
        default = timed[0][0]
        timed.sort(key=lambda pair: pair[0])
        with mock.patch.object(MODULE, "attention_plan", lambda *a, plan=timed[0][1]: plan):
            apart = harness.time_graph(harness.capture(layers.split), replays=10)
        recorder.record(f"{name}/split/{label(timed[0][1])}", apart, num_bytes=layers.num_bytes, layers=count)
        share = layers.num_bytes / timed[0][0] / 1e-6 / recorder.ceiling
        best = "  ".join(f"{label(plan)} {micros / count:.2f}" for micros, plan in timed[:5])
        print(f"{name:16s} default {default / count:8.2f} us | {best}", flush=True)
        print(f"{name:16s} apart {apart.median / count:.2f} us, share {share:.3f}", flush=True)
        del layers
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), sys.argv[3])
