"""The keys and values of all layers, in blocks."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels import FIRST_BLOCK, SINK_BLOCK, kv_cache_shape
from .config import ModelConfig


@dataclass(frozen=True)
class KVCache:
    """One pair of caches per layer.

    Attributes:
        k, v: per layer `[num_blocks, num_kv_heads, block_size, head_dim]`.
        block_size: tokens a block holds.
    """

    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]
    block_size: int

    @classmethod
    def allocate(
        cls, config: ModelConfig, num_blocks: int, block_size: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> "KVCache":
        """A cache of `num_blocks` blocks, the two reserved ones included; only the sink block is initialised."""
        assert num_blocks >= FIRST_BLOCK, "a cache holds at least the reserved blocks"
        shape = kv_cache_shape(num_blocks, block_size, config.num_kv_heads, config.head_dim)
        k = tuple(torch.empty(shape, dtype=dtype, device=device) for _ in range(config.num_layers))
        v = tuple(torch.empty(shape, dtype=dtype, device=device) for _ in range(config.num_layers))
        for cache in (*k, *v):
            cache[SINK_BLOCK].zero_()
        return cls(k, v, block_size)

    @property
    def num_blocks(self) -> int:
        return self.k[0].shape[0]
