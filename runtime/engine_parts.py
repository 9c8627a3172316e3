"""What an engine is made of, and how much of the device's memory each part may take."""

import torch

from ..kernels import FIRST_BLOCK
from ..model import Decoder, KVCache
from .config import EngineConfig, KVPlan
from .decode_graphs import DecodeGraphs, GraphSettings
from .decode_pieces import DecodePieces
from .graph_backend import GraphBackend
from .graph_buckets import capture_sizes
from .graph_ledger import MemoryParts
from .graph_reason import Path
from .graph_rehearsal import rehearse
from .graph_start import DecodePolicy
from .interventions import Hooks
from .memory import memory_for
from .model_runner import ModelRunner
from .rank_agreement import GraphsRequiredError, graphs_required
from .sampler import Sampler
from .step_state import StepState

CPU_KV_CACHE_BYTES = 4 << 30

PROMPT_SIZES = (16, 32, 64, 96, 128, 192, 256, 384, 512)
"""What prompts are padded to on a GPU unless told otherwise. Longer ones keep it busy while the host launches."""


def rehearsed_memory(model: Decoder, config: EngineConfig, plan: KVPlan, backend: GraphBackend) -> MemoryParts | None:
    """What everything but the KV cache will take; None where the cache's size does not depend on it."""
    policy, _ = graph_plan(config, model.device)
    captures = policy.path is not Path.EAGER and not policy.forced and policy.lazy_steps is None
    if model.device.type != "cuda" or config.kv_cache_memory_bytes is not None or not captures:
        return None
    least = KVPlan(FIRST_BLOCK + 2, plan.max_model_len)  # one live row, with one block to read
    return rehearse(lambda: build_runner(model, config, least, Hooks(model.config.num_layers), backend), backend)


def build_runner(
    model: Decoder,
    config: EngineConfig,
    plan: KVPlan,
    hooks: Hooks,
    backend: GraphBackend,
    kv_cache: KVCache | None = None,
) -> tuple[ModelRunner, int]:
    """What runs the steps, nothing captured yet, and the bytes that its KV cache took of the device, if the allocator
    held nothing spare."""
    before = allocator_bytes(model.device)
    block_bytes = model.config.kv_bytes_per_token(model.dtype) * config.block_size
    if kv_cache is None:
        with memory_for(
            f"a KV cache of {plan.num_blocks * block_bytes} bytes ({plan.num_blocks} blocks of {config.block_size} "
            f"tokens, max_num_seqs {config.max_num_seqs}, max_model_len {plan.max_model_len}) on {model.device}",
            "lower max_model_len (--max-model-len), max_num_seqs, kv_cache_memory_bytes or gpu_memory_utilization",
        ):
            kv_cache = KVCache.allocate(
                model.config, plan.num_blocks, config.block_size, dtype=model.dtype, device=model.device
            )
    assert (kv_cache.num_blocks, kv_cache.block_size) == (plan.num_blocks, config.block_size), "it is as planned"
    kv_bytes = allocator_bytes(model.device) - before
    state = StepState(config.max_num_seqs, -(-plan.max_model_len // config.block_size), model.device)
    sampler = Sampler(config.max_num_seqs, model.config.vocab_size, device=model.device)
    policy, settings = graph_plan(config, model.device)
    graphs = None
    if policy.path is not Path.EAGER:
        pieces = DecodePieces(model, kv_cache, state, sampler)
        graphs = DecodeGraphs(pieces, backend, settings)
    runner = ModelRunner(model, kv_cache, state, sampler, hooks=hooks, policy=policy, graphs=graphs)
    return runner, kv_bytes


def graph_plan(config: EngineConfig, device: torch.device) -> tuple[DecodePolicy, GraphSettings]:
    """What a config means for decode steps on a device.

    Raises:
        GraphsRequiredError: graphs are required, and "auto" means none here.
    """
    mode, required = config.graphs, graphs_required(config.require_graphs)
    if mode == "auto":
        mode = "whole" if device.type == "cuda" or config.enable_decode_graphs else "off"
        if required and mode == "off":
            raise GraphsRequiredError(f'CUDA graphs are required, but graphs="auto" means none on {device}')
    policy = DecodePolicy(
        path={"off": Path.EAGER, "whole": Path.WHOLE, "piecewise": Path.PIECEWISE}[mode],
        forced=config.enable_decode_graphs is False,
        lazy_steps=max(1, config.graph_warmup_steps) if config.capture == "lazy" else None,
        prompt_lazy_steps=max(1, config.graph_warmup_steps),
        required=required,
        self_test=device.type == "cuda" if config.graph_self_test is None else config.graph_self_test,
    )
    settings = GraphSettings(
        sizes=capture_sizes(config.capture_sizes, config.max_num_seqs),
        caps_batch_size=config.split_large_batches,
        budget_bytes=config.graph_memory_bytes,
        prompt_sizes=prompt_sizes(config, device),
    )
    return policy, settings


def prompt_sizes(config: EngineConfig, device: torch.device) -> tuple[int, ...]:
    """The token counts that prompts are padded to for their graphs."""
    if config.prompt_capture_sizes is not None:
        return config.prompt_capture_sizes
    most = min(config.max_num_batched_tokens, config.max_model_len or config.max_num_batched_tokens)
    return tuple(size for size in PROMPT_SIZES if size <= most) if device.type == "cuda" else ()


def kv_cache_bytes(config: EngineConfig, device: torch.device) -> int:
    """Bytes that the KV cache may take on a device where the weights are loaded already."""
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes
    if device.type != "cuda":
        return CPU_KV_CACHE_BYTES
    free, total = torch.cuda.mem_get_info(device)
    return max(0, free - int(total * (1 - config.gpu_memory_utilization)))


def allocator_bytes(device: torch.device) -> int:
    """Bytes of a GPU that torch's allocator holds; 0 for a CPU."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
