"""What an engine is told, and how much KV cache follows from it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from ..kernels import FIRST_BLOCK
from ..model import ModelConfig
from .graph_buckets import capture_sizes

BLOCK_SIZES = (16, 32, 64, 128)
GRAPH_MODES = ("auto", "whole", "piecewise", "off")
CAPTURE_MODES = ("startup", "lazy")


@dataclass(frozen=True)
class EngineConfig:
    """Sizes of an engine, and its graphs; none changes a token but at near-ties, or `max_model_len` with longrope.

    Attributes:
        max_num_seqs: sequences that decode side by side.
        max_model_len: tokens of a sequence, prompt and output together; None: as many as model and memory admit.
        max_num_batched_tokens: prompt tokens computed in one step; longer prompts take several.
        block_size: tokens a KV block holds, one of 16, 32, 64, 128.
        kv_cache_memory_bytes: bytes for the KV cache; None: 4 GiB on a CPU, on a GPU what `gpu_memory_utilization`
            leaves beside the weights. Never more than `max_num_seqs` full sequences can use.
        gpu_memory_utilization: share of the GPU's memory that the process may use, above 0 and up to 1.
        graphs: how decode steps run: "whole" (one graph), "piecewise" (one for the blocks, one for the head, one for
            sampling), "off" (eagerly), or "auto": "whole" on a GPU, "off" on a CPU. With graphs, a step with a hook, a
            logits processor is piecewise around it.
        capture: "startup", or "lazy": each bucket once it has been used for `graph_warmup_steps` steps.
        capture_sizes: batch sizes to capture, or a file of them, as `ostinato bench capture-list` writes it, which is
            read here; `max_num_seqs` is always one of them. None: 1, 2, 4, 8, then every multiple of 8 up to 256, of
            16 up to 512, of 32 up to 1024 and so on.
        prompt_capture_sizes: tokens that a prompt which comes alone is padded to, so that it replays one graph; each is
            captured once `graph_warmup_steps` prompts have been of its size, whatever `capture` says. An empty tuple:
            prompts run eagerly. None: 16 to 512 on a GPU, an empty tuple on a CPU. Without effect where graphs are off.
        graph_warmup_steps: eager steps of a bucket before a lazy capture, at least 1.
        enable_decode_graphs: None follows `graphs`; False runs eagerly what the graphs would run, on the same padded
            rows; True with `graphs="off"` is an error.
        split_large_batches: a batch above the largest graph is run as several replays; False: eagerly.
        graph_memory_bytes: for all graphs together; buckets that do not fit are left out. None: no limit.
        graph_self_test: compare every graph with its Python, bit for bit, once it is captured, and do without those
            that differ; None: on a GPU.
        run_ahead: start a decode step that replays a graph before the tokens of the one before are looked at, which
            hides the host's work; None: on a GPU.
        require_graphs: missing graphs are an error at start, so is "auto" where it means none, and an eager decode step
            is one later.

    Raises:
        ValueError: a value outside these limits.
        OSError: a list of capture sizes that cannot be read.
    """

    max_num_seqs: int = 32
    max_model_len: int | None = None
    max_num_batched_tokens: int = 2048
    block_size: int = 32
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    graphs: Literal["auto", "whole", "piecewise", "off"] = "auto"
    capture: Literal["startup", "lazy"] = "startup"
    capture_sizes: tuple[int, ...] | str | Path | None = None
    prompt_capture_sizes: tuple[int, ...] | None = None
    graph_warmup_steps: int = 3
    enable_decode_graphs: bool | None = None
    split_large_batches: bool = True
    graph_memory_bytes: int | None = None
    graph_self_test: bool | None = None
    run_ahead: bool | None = None
    require_graphs: bool = False

    def __post_init__(self) -> None:
        for name, optional in (
            ("max_num_seqs", False),
            ("max_model_len", True),
            ("max_num_batched_tokens", False),
            ("kv_cache_memory_bytes", True),
            ("graph_memory_bytes", True),
        ):
            value = getattr(self, name)
            if not (value is None and optional) and (type(value) is not int or value < 1):
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        if type(self.block_size) is not int or self.block_size not in BLOCK_SIZES:
            raise ValueError(f"block_size must be one of {BLOCK_SIZES}, got {self.block_size!r}")
        if type(self.gpu_memory_utilization) not in (int, float) or not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(
                f"gpu_memory_utilization must be above 0 and at most 1, got {self.gpu_memory_utilization!r}"
            )
        for name, optional in (
            ("enable_decode_graphs", True),
            ("graph_self_test", True),
            ("run_ahead", True),
            ("split_large_batches", False),
            ("require_graphs", False),
        ):
            value = getattr(self, name)
            if not isinstance(value, bool) and not (value is None and optional):
                raise ValueError(f"{name} must be True or False, got {value!r}")
        for name, choices in (("graphs", GRAPH_MODES), ("capture", CAPTURE_MODES)):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {choices}, got {getattr(self, name)!r}")
        if type(self.graph_warmup_steps) is not int or self.graph_warmup_steps < 0:
            raise ValueError(f"graph_warmup_steps must be a whole number, got {self.graph_warmup_steps!r}")
        if self.enable_decode_graphs and self.graphs == "off":
            raise ValueError('enable_decode_graphs=True contradicts graphs="off"')
        if self.require_graphs and (self.graphs == "off" or self.enable_decode_graphs is False):
            raise ValueError("require_graphs=True contradicts graphs that are off")
        if self.prompt_capture_sizes is not None:
            for size in self.prompt_capture_sizes:
                if type(size) is not int or size < 1:
                    raise ValueError(f"prompt_capture_sizes must be whole numbers of at least 1, got {size!r}")
            object.__setattr__(self, "prompt_capture_sizes", tuple(sorted(set(self.prompt_capture_sizes))))
        if self.capture_sizes is not None:
            object.__setattr__(self, "capture_sizes", capture_sizes(self.capture_sizes, self.max_num_seqs))


@dataclass(frozen=True)
class KVPlan:
    """How many KV blocks are allocated (the reserved ones included), and how long a sequence may become."""

    num_blocks: int
    max_model_len: int

    @property
    def num_usable_blocks(self) -> int:
        return self.num_blocks - FIRST_BLOCK


def plan_kv_cache(engine: EngineConfig, model: ModelConfig, dtype: torch.dtype, available_bytes: int) -> KVPlan:
    """Size the KV cache for `available_bytes`, so that a sequence of the planned length always fits.

    A `max_model_len` that nobody asked for shrinks to what fits.

    Raises:
        ValueError: `max_model_len` was asked for and is above the model's `max_position` or does not fit; or not even
            one block fits. The message has both numbers.
    """
    if engine.max_model_len is not None and engine.max_model_len > model.max_position:
        raise ValueError(
            f"max_model_len {engine.max_model_len} is above the model's limit of {model.max_position} tokens"
        )
    wanted = engine.max_model_len or model.max_position
    block_bytes = model.kv_bytes_per_token(dtype) * engine.block_size
    affordable = available_bytes // block_bytes - FIRST_BLOCK
    if affordable < 1:
        raise ValueError(
            f"{available_bytes} bytes of KV cache hold no block of {engine.block_size} tokens: "
            f"{(FIRST_BLOCK + 1) * block_bytes} bytes are the least"
        )
    reach = affordable * engine.block_size
    if engine.max_model_len is not None and wanted > reach:
        raise ValueError(
            f"max_model_len {wanted} does not fit: {available_bytes} bytes of KV cache hold {reach} tokens"
        )
    max_model_len = min(wanted, reach)
    useful = engine.max_num_seqs * -(-max_model_len // engine.block_size)
    return KVPlan(min(affordable, useful) + FIRST_BLOCK, max_model_len)
