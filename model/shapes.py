"""Named shapes of well-known models, for running with random weights and without downloads.

The numbers are those of the published config files.
"""

import torch

from .config import ModelConfig, RotaryConfig


def _llama3(hidden_size: int, intermediate_size: int, num_layers: int, num_heads: int, head_dim: int, *, factor: float,
            tied: bool) -> ModelConfig:  # fmt: skip
    return ModelConfig(
        architecture="llama",
        vocab_size=128256,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=8,
        head_dim=head_dim,
        norm_eps=1e-5,
        rotary=RotaryConfig("llama3", 500000.0, head_dim, factor=factor),
        max_position=131072,
        tie_embeddings=tied,
        dtype=torch.bfloat16,
        eos_token_ids=(128001, 128008, 128009),
        bos_token_id=128000,
    )


SHAPES: dict[str, ModelConfig] = {
    "smollm2-135m": ModelConfig(
        architecture="llama",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        norm_eps=1e-5,
        rotary=RotaryConfig("default", 100000.0, 64),
        max_position=8192,
        tie_embeddings=True,
        dtype=torch.bfloat16,
        eos_token_ids=(2,),
        bos_token_id=1,
    ),
    "llama-3.2-1b": _llama3(2048, 8192, 16, 32, 64, factor=32.0, tied=True),
    "llama-3.2-3b": _llama3(3072, 8192, 28, 24, 128, factor=32.0, tied=True),
    "llama-3.1-8b": _llama3(4096, 14336, 32, 32, 128, factor=8.0, tied=False),
    "qwen3-8b": ModelConfig(
        architecture="qwen3",
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        norm_eps=1e-6,
        rotary=RotaryConfig("default", 1000000.0, 128),
        max_position=40960,
        qk_norm="head",
        dtype=torch.bfloat16,
        eos_token_ids=(151645,),
        bos_token_id=151643,
    ),
}
