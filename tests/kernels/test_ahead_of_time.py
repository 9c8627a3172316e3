"""Every kernel, as the launchers would launch it, compiled for devices that are not here."""

import ast
import importlib.util
import itertools
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from ostinato import kernels
from ostinato.kernels._linear_call import LinearCall
from ostinato.kernels._linear_plan import LinearPlan
from ostinato.kernels.linear import linear_planned
from ostinato.model import SHAPES

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "bench"
STATIC = {"weight_ptr", "norm_weight_ptr"}  # what a kernel may read before its wait


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCH / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


aot = load("aot")


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def decode_step(model: str, batch: int, architecture: int) -> list[Any]:
    """The launches of one layer's decode step with everything around it, and of what serves a longer prompt."""
    from ostinato.model import AttentionMetadata, Decoder, KVCache

    config = replace(SHAPES[model], num_layers=1)
    decoder = Decoder(config, dtype=torch.bfloat16, device="meta")
    cache = KVCache.allocate(config, 10, 16, dtype=torch.bfloat16, device="meta")
    ids, lens = meta(batch, dtype=torch.int64), meta(batch, dtype=torch.int32)
    metadata = AttentionMetadata(meta(batch, 128, dtype=torch.int32), lens)
    with aot.recording(architecture) as launches:
        pre = decoder.preamble(ids, ids, metadata, 16)
        logits = decoder.head(decoder.blocks(pre.hidden, pre, metadata, cache))
        sampled = kernels.greedy(logits, vocab_limit=config.vocab_size - 7)
        kernels.commit(sampled, ids, ids, lens, meta(4, batch, dtype=torch.int64), meta(1, dtype=torch.int64))
        kernels.update_rows(meta(1, 132, dtype=torch.int64), ids, ids, lens, metadata.block_tables)
        qkv = meta(batch, (config.num_heads + 2 * config.num_kv_heads) * config.head_dim)
        q = kernels.rotary_kv_write(qkv, pre.cos, pre.sin, pre.slot_mapping, cache.k[0], cache.v[0])
        kernels.attention_decode(q, cache.k[0], cache.v[0], metadata.block_tables, lens, 0.1)
        kernels.rms_norm(pre.hidden, decoder.norm_weight, 1e-5)
        kernels.add_rms_norm(pre.hidden, pre.hidden, decoder.norm_weight, 1e-5)
        kernels.swiglu(meta(batch, 2 * config.intermediate_size))
        kernels.residual_add(pre.hidden, pre.hidden, scale=0.5, norm_weight=decoder.norm_weight, norm_eps=1e-5)
    return launches


def prompts(model: str, seqs: int, queries: int, architecture: int) -> list[Any]:
    """The launches of attention and its rotation in a layer, for `queries` tokens of each sequence."""
    config, num_tokens = SHAPES[model], seqs * queries
    caches = [meta(10, config.num_kv_heads, 16, config.head_dim) for _ in "kv"]
    qkv = meta(num_tokens, (config.num_heads + 2 * config.num_kv_heads) * config.head_dim)
    tables, lens, offsets = (meta(*size, dtype=torch.int32) for size in ((seqs, 128), (seqs,), (seqs + 1,)))
    angle, slots = meta(num_tokens, config.head_dim // 2, dtype=torch.float32), meta(num_tokens, dtype=torch.int64)
    with aot.recording(architecture) as launches:
        q = kernels.rotary_kv_write(qkv, angle, angle, slots, *caches)
        kernels.attention_prefill(q, *caches, tables, lens, offsets, 0.1, window=config.sliding_window)
    return launches


def sampling(batch: int, steps: kernels.SampleSteps, architecture: int) -> list[Any]:
    """The launches from logits to tokens and their log-probabilities."""
    floats, ids, flags, vocab = torch.float32, torch.int64, torch.bool, 128256
    numbers = meta(256, 6, dtype=floats), meta(256, 4, dtype=ids)
    lists = (meta(256, 1024, dtype=ids), meta(256, 1024, dtype=floats), meta(256, 128, dtype=ids))
    counts = meta(256, vocab, dtype=flags), meta(256, vocab, dtype=torch.int32)
    state = kernels.SamplingRows(*numbers, *lists, meta(256, 128, dtype=flags), *counts)
    rows, workspace = meta(batch, dtype=ids), kernels.SampleWorkspace(256, vocab, device="meta")
    with aot.recording(architecture) as launches:
        kernels.token_bitmask(meta(batch, vocab), rows, meta(256, vocab // 32, dtype=torch.int32))
        kernels.sample_rows(meta(batch, vocab), rows, rows, state, steps, workspace=workspace)
        kernels.logprobs(meta(batch, vocab), rows, 20)
    return launches


def tiles(architecture: int) -> list[Any]:
    """The road of `linear` that only a table takes: by descriptors, or by pointers where there are none."""
    plan = LinearPlan("tile", 32, 64, early=3, num_stages=3, norm_apart=True, block_m=64)
    with aot.recording(architecture) as launches:
        for swiglu, inputs in itertools.product((False, True), (512, 520)):
            linear_planned(LinearCall(meta(100, inputs), meta(256, inputs), swiglu=swiglu), plan)
    return launches


FILTERED = kernels.SampleSteps(random=True, top_k=True, top_p=True)
EVERYTHING = kernels.SampleSteps(True, True, True, True, True, True, True)
SAMPLING = {90: (32, EVERYTHING), 80: (1, FILTERED), 100: (1, FILTERED)}

# Batches on either side of every road, tile and table; the H200's tables hold for 90 alone, the rest is rules.
CONFIGURATIONS = {
    90: [
        *[(model, batch) for model in ("llama-3.2-1b", "llama-3.1-8b") for batch in (1, 2, 8, 16, 32, 64, 128, 256)],
        *[("smollm2-135m", batch) for batch in (1, 8, 64)],
        ("llama-3.2-3b", 2),
        ("qwen3-8b", 1),
        ("qwen3-8b", 16),
    ],
    80: [("smollm2-135m", 1), ("llama-3.2-1b", 8), ("llama-3.1-8b", 1), ("llama-3.1-8b", 33)],
    100: [("smollm2-135m", 1), ("llama-3.2-1b", 8), ("llama-3.1-8b", 1), ("llama-3.1-8b", 33)],
}
# A long prompt, and a few queries of each of eight sequences.
PROMPTS = {
    90: [("smollm2-135m", 1, 600), ("llama-3.1-8b", 1, 600), ("llama-3.1-8b", 8, 4), ("llama-3.2-1b", 8, 16)],
    80: [("llama-3.1-8b", 1, 600), ("llama-3.1-8b", 8, 4)],
    100: [("llama-3.1-8b", 1, 600), ("llama-3.1-8b", 8, 4)],
}


@pytest.fixture(scope="module", params=CONFIGURATIONS, ids="sm_{}".format)
def compiled(request: pytest.FixtureRequest) -> list[tuple[Any, Any]]:
    architecture = request.param
    launches = [launch for case in CONFIGURATIONS[architecture] for launch in decode_step(*case, architecture)]
    launches += [launch for case in PROMPTS[architecture] for launch in prompts(*case, architecture)]
    launches += sampling(*SAMPLING[architecture], architecture) + tiles(architecture)
    unique = list({launch.key: launch for launch in launches}.values())
    results = aot.compile_everywhere(unique, (architecture,), len(os.sched_getaffinity(0)))
    return list(zip(unique, results, strict=True))


def test_every_kernel_of_the_package_is_among_them(compiled: list[tuple[Any, Any]]) -> None:
    """A kernel is what may wait for the one before; what has no such switch is called by one."""
    kernels_of_files = {
        function.name
        for path in (ROOT / "kernels").glob("*.py")
        for function in ast.parse(path.read_text()).body
        if isinstance(function, ast.FunctionDef) and "PDL" in [argument.arg for argument in function.args.args]
    }
    assert kernels_of_files
    assert kernels_of_files == {launch.name for launch, _ in compiled}


def test_compiles_without_spills(compiled: list[tuple[Any, Any]], record_property: Any) -> None:
    report = [
        f"{launch.name:28s} {result.registers:4d} registers {result.shared:7d} B shared {result.stack:4d} B spilled"
        for launch, result in compiled
    ]
    record_property("resources", "\n".join(report))
    print("\n".join(report))
    assert not [line for line in report if not line.endswith("   0 B spilled")]


def test_waits_before_anything_of_its_predecessor(compiled: list[tuple[Any, Any]]) -> None:
    """Invariant 14, read off the PTX: the wait is unconditional, and before it only weights are read."""
    for launch, result in compiled:
        if dict(launch.options)["launch_pdl"]:
            assert_waits_first(launch, result.ptx)


def assert_waits_first(launch: Any, ptx: str) -> None:
    names = [name for name, kind in launch.signature if kind != "constexpr"]
    origins: dict[str, set[str]] = {}
    body = ptx[ptx.index("// %bb.0") if "// %bb.0" in ptx else ptx.index("{") :]
    for line in body.splitlines():
        code = line.split("//")[0].strip()
        if code.startswith("griddepcontrol.wait"):
            return
        assert not re.match(r"@\S+\s+griddepcontrol.wait", code), f"{launch.name} waits on a condition"
        assert not re.search(r"\b(bra|ret|exit)\b", code), f"{launch.name} may leave before its wait: {code}"
        assert not re.search(r"\b(st\.global|atom|red\.|cp\.async)", code), (
            f"{launch.name} acts before its wait: {code}"
        )
        match = re.match(r"(?:@\S+\s+)?(\S+)\s+(.*)", code)
        if match is None:
            continue
        operation, operands = match.groups()
        registers = re.findall(r"%\w+", operands)
        parameters = {names[int(n)] for n in re.findall(r"_param_(\d+)", operands) if int(n) < len(names)}
        reached = parameters.union(*(origins.get(register, set()) for register in registers))
        if re.match(r"ld\.global|prefetch\.global", operation):
            sources = {name for name in reached if name.endswith("_ptr")}
            assert sources <= STATIC, f"{launch.name} reads {sources - STATIC} before its wait"
            assert sources, f"{launch.name} reads before its wait, from where the test cannot tell: {code}"
        if registers and not operation.startswith("setp"):
            for register in registers[: (operands.count("{") and len(registers) - 1) or 1]:
                origins[register] = origins.get(register, set()) | reached
    raise AssertionError(f"{launch.name} is launched with programmatic dependent launch and never waits")


def test_the_order_test_sees_an_early_read() -> None:
    (launch,) = [launch for launch in decode_step("smollm2-135m", 1, 90) if launch.name == "_commit_kernel"]
    ptx = aot.compile_launch(launch, 90).ptx
    assert_waits_first(launch, ptx)
    with pytest.raises(AssertionError, match="before its wait"):
        assert_waits_first(launch, re.sub(r"griddepcontrol\.wait;", "", ptx, count=1))
