"""A small case of every kernel, for compute-sanitizer to watch.

    python bench/memcheck.py        compiles everything and runs it once; then, with the kernels in Triton's cache:
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 1 python bench/memcheck.py watched

Without torch's caching allocator every tensor is an allocation of its own, so that a kernel that leaves one is caught.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import aot
import torch

from ostinato import kernels
from ostinato.kernels._attention_plan import AttentionPlan, attention_plan
from ostinato.model import SHAPES, AttentionMetadata, Decoder, KVCache

BF16, KV_BLOCK, COLUMNS = torch.bfloat16, 16, 12
MODEL = replace(SHAPES["smollm2-135m"], num_layers=1, vocab_size=5000, max_position=KV_BLOCK * COLUMNS)
PLANS = [AttentionPlan(32, 4, 1, 4), AttentionPlan(64, 4, 1, 1), AttentionPlan(32, 4, 3, 4), AttentionPlan(64, 4, 4, 1)]


def cases(device: str) -> Iterator[str]:
    """Runs one case after the other and names it: the ops of decode steps, on either side of every road of `linear`.

    Lengths are odd, zero, and up to the last slot of the tables, whose every block is the cache's last for someone.
    """
    decoder = Decoder(MODEL, dtype=BF16, device=device)
    for parameter in decoder.parameters():
        if device != "meta":
            parameter.normal_(std=0.02)
    for batch in (1, 3, 9, 33):
        cache = KVCache.allocate(MODEL, 2 + batch * COLUMNS, KV_BLOCK, dtype=BF16, device=device)
        tables = (torch.arange(batch * COLUMNS).view(batch, COLUMNS) + 2).to(device, torch.int32)
        lens = torch.arange(MODEL.max_position, MODEL.max_position - batch, -1, dtype=torch.int32).to(device)
        lens[1::2] = 0
        ids, positions = torch.arange(batch).to(device), (lens.long() - 1).clamp(min=0)
        metadata = AttentionMetadata(tables, lens)
        for plan in [None, *PLANS]:
            choice = attention_plan if plan is None else lambda *_, plan=plan: plan
            with mock.patch.object(sys.modules["ostinato.kernels.attention_decode"], "attention_plan", choice):
                pre = decoder.preamble(ids, positions, metadata, KV_BLOCK)
                hidden = decoder.blocks(pre.hidden, pre, metadata, cache)
            yield f"blocks, {batch} rows, {plan or 'the plan that ships'}"
        sampled = kernels.greedy(decoder.head(hidden), vocab_limit=MODEL.vocab_size - 3)
        ring, count = (torch.zeros(*shape, dtype=torch.int64).to(device) for shape in ((3, batch), (1,)))
        kernels.commit(sampled, ids, positions, lens, ring, count)
        updates = torch.ones(1, 4 + COLUMNS, dtype=torch.int64)
        updates[:, 0] = batch - 1
        kernels.update_rows(updates.to(device), ids, positions, lens, tables)
        yield f"head and state, {batch} rows"
        offsets = torch.arange(batch + 1, dtype=torch.int32).to(device)
        kernels.slot_mapping(positions, tables, KV_BLOCK, cu_seqlens_q=offsets)
        kernels.rms_norm(hidden, decoder.norm_weight, 1e-5)
        kernels.add_rms_norm(hidden, pre.hidden, decoder.norm_weight, 1e-5)
        kernels.residual_add(hidden, pre.hidden, scale=0.5, norm_weight=decoder.norm_weight, norm_eps=1e-5)
        kernels.swiglu(torch.ones(batch, 2 * 77, dtype=BF16).to(device))
        qkv = torch.ones(batch, (MODEL.num_heads + 2 * MODEL.num_kv_heads) * MODEL.head_dim, dtype=BF16).to(device)
        q = kernels.rotary_kv_write(qkv, pre.cos, pre.sin, pre.slot_mapping, cache.k[0], cache.v[0])
        kernels.attention_decode(q, cache.k[0], cache.v[0], tables, lens, 0.1, window=50)
        few = torch.tensor([0, batch // 2, *[batch] * (batch - 1)], dtype=torch.int32).to(device)
        for which in (offsets, few):
            kernels.attention_prefill(q, cache.k[0], cache.v[0], tables, lens, which, 0.1)
        yield f"the rest, {batch} rows"
    yield from sampling(device)


def sampling(device: str) -> Iterator[str]:
    """Rows greedy and random, of few tokens and of many, with every list and count, at an odd vocabulary."""
    vocab, kinds = 5003, [(0.0, 0, 1.0), (0.8, 50, 0.9), (9.0, 4000, 0.9), (1.0, 0, 0.5), (1.0, 0, 1.0)]
    for num in (3, 5):
        reals = torch.tensor([[temperature, p, 0.0, 1.2, 0.1, 0.1] for temperature, _, p in kinds[:num]])
        integers = torch.tensor([[k, 7, 0, 10] for _, k, _ in kinds[:num]])
        ids, biases = (
            torch.tensor([[0, 0, 1, vocab - 1]] * num),
            torch.tensor([[kernels.UNUSED_BIAS] * 2 + [1.0] * 2] * num),
        )
        banned, prompt = torch.tensor([[False] + [True] * 3] * num), torch.ones(num, vocab, dtype=torch.bool)
        tensors = (reals, integers, ids, biases, ids, banned, prompt, torch.zeros(num, vocab, dtype=torch.int32))
        state, index = kernels.SamplingRows(*(tensor.to(device) for tensor in tensors)), torch.arange(num).to(device)
        logits = torch.randn(num, vocab).to(device, BF16)
        for steps in (kernels.SampleSteps(), kernels.SampleSteps(*[True] * 7)):
            kernels.sample_rows(logits, index, index, state, steps)
        for most in (0, 20):
            kernels.logprobs(logits, index, most)
        yield f"sampling, {num} rows"


def main() -> None:
    with aot.recording() as launches:
        count = len(list(cases("meta")))
    unique = list({launch.key: launch for launch in launches}.values())
    if "watched" not in sys.argv:
        aot.compile_everywhere(unique, (90,), 15)
    for name in cases("cuda"):
        torch.cuda.synchronize()
        print(name, flush=True)
    print(f"{count} cases, {len(unique)} kernels", flush=True)


if __name__ == "__main__":
    main()
