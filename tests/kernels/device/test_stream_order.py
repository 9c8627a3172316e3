"""Kernels in their streams: recorded and replayed with changed inputs, and overlapping a slow producer."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor

from ostinato import kernels as k
from ostinato.kernels import _triton
from ostinato.kernels._attention_plan import AttentionPlan, PrefillPlan
from ostinato.kernels._linear_call import LinearCall
from ostinato.kernels._linear_plan import LinearPlan
from ostinato.kernels._triton import tl, triton
from ostinato.kernels.linear import linear_planned

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
PLANS = {
    "registers": AttentionPlan(64, 4, 1, 1),
    "registers-shares": AttentionPlan(64, 4, 1, 16),
    "pipeline": AttentionPlan(128, 4, 4, 1),
    "pipeline-shares": AttentionPlan(64, 4, 4, 8),
}


@triton.jit
def _late_copy_kernel(source_ptr, out_ptr, size, SPINS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """A producer as slow as it can be: lets its successor in at once, and writes long after."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wasted = index.to(tl.float32)
    for _ in range(SPINS):
        wasted = tl.sqrt(wasted + 1.0)
    values = tl.load(source_ptr + index, mask=index < size)
    tl.store(out_ptr + index, values, mask=(index < size) & (wasted > 0.0))


def late_copy(source: Tensor, out: Tensor) -> None:
    pdl = _triton.has_pdl(source.device)
    _late_copy_kernel[(triton.cdiv(source.numel(), 256),)](
        source, out, source.numel(), SPINS=2000, BLOCK=256, PDL=pdl, launch_pdl=pdl
    )


def cuda(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape).to("cuda", dtype)


def weights(*shape: int) -> Tensor:
    return cuda(*shape) * shape[-1] ** -0.5


def linear_case(tokens: int, plan: LinearPlan, swiglu: bool) -> tuple[Callable[[], Tensor], Callable[[Tensor], Tensor]]:
    weight, norm, residual = weights(512, 1024), cuda(1024), cuda(tokens, 256 if swiglu else 512)
    return lambda: cuda(tokens, 1024), lambda x: linear_planned(
        LinearCall(x, weight, norm_weight=norm, norm_eps=1e-5, swiglu=swiglu, residual=residual), plan
    )


def attention_case(
    keys: int, plan: AttentionPlan, lengths: bool = False
) -> tuple[Callable[[], Tensor], Callable[[Tensor], Tensor]]:
    """Of the rows of qkv, or of the lengths: they too come out of the kernel before, at the start of a step."""
    blocks = -(-keys // 16)
    k_cache, v_cache = cuda(2 + 2 * blocks, 2, 16, 64), cuda(2 + 2 * blocks, 2, 16, 64)
    tables = (torch.randperm(2 * blocks).view(2, blocks) + 2).to("cuda", torch.int32)
    lens = torch.tensor([keys, keys // 3], dtype=torch.int32, device="cuda")
    slots = (tables.gather(1, ((lens - 1) // 16).long()[:, None])[:, 0] * 16 + (lens - 1) % 16).long()
    cos, sin = cuda(2, 32, dtype=torch.float32), cuda(2, 32, dtype=torch.float32)
    rows = cuda(2, 12 * 64)

    def attend(qkv: Tensor, lens: Tensor) -> Tensor:
        with mock.patch.object(sys.modules["ostinato.kernels.attention_decode"], "attention_plan", return_value=plan):
            return k.rotary_attention_decode(qkv, cos, sin, slots, k_cache, v_cache, tables, lens, 0.125)

    if lengths:
        return lambda: torch.randint(1, keys, (2,), dtype=torch.int32, device="cuda"), lambda x: attend(rows, x)
    return lambda: cuda(2, 12 * 64), lambda x: attend(x, lens)


def prefill_case(plan: PrefillPlan, lengths: bool) -> tuple[Callable[[], Tensor], Callable[[Tensor], Tensor]]:
    """Of the queries, or of the lengths: 20 tokens each of three sequences."""
    k_cache, v_cache = cuda(50, 2, 16, 64), cuda(50, 2, 16, 64)
    tables = (torch.randperm(48).view(3, 16) + 2).to("cuda", torch.int32)
    offsets = torch.tensor([0, 20, 40, 60], dtype=torch.int32, device="cuda")
    rows, lens = cuda(60, 8, 64), torch.tensor([250, 20, 99], dtype=torch.int32, device="cuda")

    def attend(q: Tensor, lens: Tensor) -> Tensor:
        with mock.patch.object(sys.modules["ostinato.kernels.attention_prefill"], "prefill_plan", return_value=plan):
            return k.attention_prefill(q, k_cache, v_cache, tables, lens, offsets, 0.125)

    if lengths:
        return lambda: torch.randint(20, 250, (3,), dtype=torch.int32, device="cuda"), lambda x: attend(rows, x)
    return lambda: cuda(60, 8, 64), lambda x: attend(x, lens)


def rotary_kv_write_case() -> tuple[Callable[[], Tensor], Callable[[Tensor], Tensor]]:
    cos, sin = cuda(2, 32, dtype=torch.float32), cuda(2, 32, dtype=torch.float32)
    k_cache, v_cache = cuda(3, 2, 16, 64), cuda(3, 2, 16, 64)
    slots = torch.tensor([17, 40], device="cuda")

    def write(qkv: Tensor) -> Tensor:
        q = k.rotary_kv_write(qkv, cos, sin, slots, k_cache, v_cache)
        return torch.cat([part.flatten() for part in (q, k_cache, v_cache)])

    return lambda: cuda(2, 12 * 64), write


def rotary_rows_case() -> tuple[Callable[[], Tensor], Callable[[Tensor], Tensor]]:
    cos, sin = cuda(100, 32, dtype=torch.float32), cuda(100, 32, dtype=torch.float32)
    return lambda: torch.randint(120, (7,), device="cuda"), lambda x: torch.cat(k.rotary_rows(x, cos, sin))


def slot_mapping_case(packed: bool) -> tuple[Callable[[], Tensor], Callable[[Tensor], Tensor]]:
    tables = torch.randint(2, 90, (3, 8), dtype=torch.int32, device="cuda")
    offsets = torch.tensor([0, 4, 5, 6], dtype=torch.int32, device="cuda") if packed else None
    draw = lambda: torch.randint(140, (7 if packed else 3,), device="cuda")  # noqa: E731
    return draw, lambda x: k.slot_mapping(x, tables, 16, cu_seqlens_q=offsets)


def stateful(
    draw: Callable[[], Tensor], op: Callable[..., None], *state: Tensor
) -> tuple[Callable[[], Tensor], Callable[[Tensor], Tensor]]:
    """An op that changes `state` in place: gives what it made of it, and puts it back."""
    saved = [tensor.clone() for tensor in state]

    def run(x: Tensor) -> Tensor:
        op(x, *state)
        result = torch.cat([tensor.flatten().long() for tensor in state])
        for tensor, before in zip(state, saved, strict=True):
            tensor.copy_(before)
        return result

    return draw, run


def step_state(rows: int) -> list[Tensor]:
    """token_ids, positions and seq_lens; every third row is dead."""
    index = torch.arange(rows, device="cuda")
    return [index + 100, index + 7, (index % 3 * 8).to(torch.int32)]


def commit_case() -> tuple[Callable[[], Tensor], Callable[[Tensor], Tensor]]:
    ring, step = torch.zeros(3, 9, dtype=torch.int64, device="cuda"), torch.tensor([4], device="cuda")
    return stateful(lambda: torch.randint(1000, (9,), device="cuda"), k.commit, *step_state(9), ring, step)


def update_rows_case() -> tuple[Callable[[], Tensor], Callable[[Tensor], Tensor]]:
    def draw() -> Tensor:
        updates = torch.randint(100, (3, 4 + 11))
        updates[:, 0] = torch.randperm(9)[:3]
        return updates.cuda()

    tables = torch.zeros(9, 11, dtype=torch.int32, device="cuda")
    return stateful(draw, k.update_rows, *step_state(9), tables)


def rms_norm_case() -> tuple[Callable[[], Tensor], Callable[[Tensor], Tensor]]:
    weight = cuda(1024)
    return lambda: cuda(5, 1024), lambda x: k.rms_norm(x, weight, 1e-5)


def add_rms_norm_case() -> tuple[Callable[[], Tensor], Callable[[Tensor], Tensor]]:
    residual, weight = cuda(5, 1024), cuda(1024)
    return lambda: cuda(5, 1024), lambda x: torch.cat(k.add_rms_norm(x, residual, weight, 1e-5))


def sample_rows_case(steps: k.SampleSteps) -> tuple[Callable[[], Tensor], Callable[[Tensor], Tensor]]:
    """A row for each road: greedy, few tokens, a flat one whose borders take the bins, one that no filter holds."""
    vocab, index = 20001, torch.arange(4, device="cuda")
    reals = torch.tensor([[0.0, 0.5, 0, 1, 0, 0], [0.8, 0.9, 0, 1, 0, 0], [9.0, 0.9, 0, 1, 0, 0], [1.0, 1, 0, 1, 0, 0]])
    integers = torch.tensor([[5, 1, 0, 0], [50, 2, 0, 0], [9000, 3, 1, 0], [0, 4, 0, 0]])
    lists = [torch.zeros(4, 1, dtype=kind, device="cuda") for kind in (torch.int64, torch.float32, torch.int64)]
    state = k.SamplingRows(reals.cuda(), integers.cuda(), *lists, torch.zeros(4, 1, dtype=torch.bool, device="cuda"))
    workspace = k.SampleWorkspace(4, vocab, device="cuda")
    return lambda: cuda(4, vocab), lambda x: k.sample_rows(x, index, index, state, steps, workspace=workspace)


def logprobs_case() -> tuple[Callable[[], Tensor], Callable[[Tensor], Tensor]]:
    index, workspace = torch.arange(4, device="cuda"), k.LogprobsWorkspace(4, 20001, device="cuda")

    def run(x: Tensor) -> Tensor:
        return torch.cat([one.flatten().double() for one in k.logprobs(x, index, 9, workspace=workspace)])

    return lambda: cuda(4, 20001), run


def token_bitmask_case(words: bool) -> tuple[Callable[[], Tensor], Callable[[Tensor], Tensor]]:
    """Of the logits, or of the words: they too are written in stream order."""
    index, vocab = torch.arange(4, device="cuda"), 20001

    def draw() -> Tensor:
        return k.pack_token_bitmask(torch.rand(4, vocab) < 0.5).cuda()

    if words:
        return stateful(draw, lambda x, logits: k.token_bitmask(logits, index, x), cuda(4, vocab))
    bitmask = draw()

    def run(x: Tensor) -> Tensor:
        k.token_bitmask(x, index, bitmask)
        return x.clone()

    return lambda: cuda(4, vocab), run


def residual_add_case() -> tuple[Callable[[], Tensor], Callable[[Tensor], Tensor]]:
    residual, weight = cuda(5, 1024), cuda(1024)
    return lambda: cuda(5, 1024), lambda x: k.residual_add(x, residual, scale=0.3, norm_weight=weight, norm_eps=1e-5)


def embedding_case() -> tuple[Callable[[], Tensor], Callable[[Tensor], Tensor]]:
    weight = cuda(100, 512)
    return lambda: torch.randint(100, (7,), device="cuda"), lambda ids: k.embedding(ids, weight)


def cases() -> Iterator[tuple[str, Callable[[], tuple[Callable[[], Tensor], Callable[[Tensor], Tensor]]]]]:
    gemv, loop = LinearPlan("gemv", 4, 1024, 4, early=1), LinearPlan("gemv", 1, 1024, 4, programs_per_sm=1)
    yield "gemv", lambda: linear_case(1, gemv, False)
    yield "gemv-swiglu-4", lambda: linear_case(4, gemv, True)
    yield "gemv-loop", lambda: linear_case(1, loop, False)
    tensor = LinearPlan("tensor", 64, 64, 4, num_stages=3)
    yield "tensor", lambda: linear_case(16, tensor, True)
    yield "tensor-split", lambda: linear_case(9, replace(tensor, split_k=4), False)
    yield "tensor-norm-apart", lambda: linear_case(9, replace(tensor, block_n=32, norm_apart=True), False)
    slices = LinearPlan("tensor", 16, 64, 4, num_stages=3, slices=4)
    yield "tensor-slices", lambda: linear_case(8, slices, False)
    yield "tensor-loop", lambda: linear_case(8, replace(slices, block_k=32, programs_per_sm=1, early=2), True)
    for name, plan in PLANS.items():
        yield f"attention-{name}", lambda plan=plan: attention_case(3000, plan)
        yield f"attention-{name}-lengths", lambda plan=plan: attention_case(1000, plan, lengths=True)
    for name, prefill in (("whole", PrefillPlan(64, 64, 4, 3, 1)), ("shares", PrefillPlan(16, 64, 2, 4, 4))):
        yield f"prefill-{name}", lambda plan=prefill: prefill_case(plan, lengths=False)
        yield f"prefill-{name}-lengths", lambda plan=prefill: prefill_case(plan, lengths=True)
    yield "rotary-kv-write", rotary_kv_write_case
    yield "rotary-rows", rotary_rows_case
    yield "slot-mapping", lambda: slot_mapping_case(packed=False)
    yield "slot-mapping-packed", lambda: slot_mapping_case(packed=True)
    yield "commit", commit_case
    yield "update-rows", update_rows_case
    yield "rms-norm", rms_norm_case
    yield "add-rms-norm", add_rms_norm_case
    yield "residual-add", residual_add_case
    yield "sample-rows", lambda: sample_rows_case(k.SampleSteps(random=True))
    yield "sample-rows-filtered", lambda: sample_rows_case(k.SampleSteps(random=True, top_k=True, top_p=True))
    yield "logprobs", logprobs_case
    yield "token-bitmask", lambda: token_bitmask_case(words=False)
    yield "token-bitmask-words", lambda: token_bitmask_case(words=True)
    yield "swiglu", lambda: (lambda: cuda(5, 1024), k.swiglu)
    yield "greedy", lambda: (lambda: cuda(3, 50000), k.greedy)
    yield "embedding", embedding_case


CASES = list(cases()) if torch.cuda.is_available() else []


@pytest.fixture(params=[make for _, make in CASES], ids=[name for name, _ in CASES])
def case(request: pytest.FixtureRequest) -> tuple[Callable[[], Tensor], Callable[[Tensor], Tensor]]:
    return request.param()


def test_replay_equals_launch(case: tuple[Callable[[], Tensor], Callable[[Tensor], Tensor]]) -> None:
    draw, op = case
    x = draw()
    for _ in range(2):
        op(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = op(x)
    for _ in range(3):
        x.copy_(draw())
        graph.replay()
        replayed = out.clone()
        assert torch.equal(replayed, op(x))


@pytest.mark.parametrize("recorded", [False, True], ids=["eager", "graph"])
def test_waits_for_a_slow_producer(
    case: tuple[Callable[[], Tensor], Callable[[Tensor], Tensor]], recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 14: with programmatic dependent launch and without it, the bits are the same."""
    draw, op = case
    source = draw()
    x = draw()

    def chain() -> Tensor:
        late_copy(source, x)
        out = op(x)
        late_copy(source, x)  # must not overtake the reader before it
        return out

    def run() -> Tensor:
        chain()
        torch.cuda.synchronize()
        if not recorded:
            source.copy_(truth_source)
            x.copy_(other)
            torch.cuda.synchronize()
            return chain().clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = chain()
        source.copy_(truth_source)
        x.copy_(other)
        graph.replay()
        return out.clone()

    truth_source, other = draw(), draw()
    overlapped = run()
    monkeypatch.setattr(_triton, "has_pdl", lambda device: False)
    assert torch.equal(overlapped, run())
    assert torch.equal(overlapped, op(truth_source))
