"""What an engine is told, and how much KV cache follows from it."""

from dataclasses import dataclass

import torch

from ..kernels import FIRST_BLOCK
from ..model import ModelConfig

BLOCK_SIZES = (16, 32, 64, 128)


@dataclass(frozen=True)
class EngineConfig:
    """Sizes of an engine; all are limits, none changes a token.

    Attributes:
        max_num_seqs: sequences that decode side by side.
        max_model_len: tokens of a sequence, prompt and output together; None: as many as model and memory admit.
        max_num_batched_tokens: prompt tokens computed in one step; longer prompts take several.
        block_size: tokens a KV block holds, one of 16, 32, 64, 128.
        kv_cache_memory_bytes: bytes for the KV cache; None: 4 GiB on a CPU, on a GPU what `gpu_memory_utilization`
            leaves beside the weights. Never more than `max_num_seqs` full sequences can use.
        gpu_memory_utilization: share of the GPU's memory that the process may use, above 0 and up to 1.

    Raises:
        ValueError: a value outside these limits.
    """

    max_num_seqs: int = 32
    max_model_len: int | None = None
    max_num_batched_tokens: int = 2048
    block_size: int = 32
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_model_len", "max_num_batched_tokens", "kv_cache_memory_bytes"):
            value = getattr(self, name)
            optional = name in ("max_model_len", "kv_cache_memory_bytes")
            if not (value is None and optional) and (type(value) is not int or value < 1):
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        if type(self.block_size) is not int or self.block_size not in BLOCK_SIZES:
            raise ValueError(f"block_size must be one of {BLOCK_SIZES}, got {self.block_size!r}")
        if type(self.gpu_memory_utilization) not in (int, float) or not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(
                f"gpu_memory_utilization must be above 0 and at most 1, got {self.gpu_memory_utilization!r}"
            )


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
