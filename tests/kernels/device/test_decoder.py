"""What the families do differently, through the kernels: whole decode steps against the same weights in float64.

The interpreter would take minutes for them; there the ops are tested one by one.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato.kernels import FIRST_BLOCK
from ostinato.model import AttentionMetadata, Decoder, KVCache, ModelConfig, RotaryConfig

FAMILIES: dict[str, dict[str, Any]] = {
    "norms behind, q/k norm of the whole, multipliers": {
        "qk_norm": "projection",
        "post_norms": True,
        "embedding_multiplier": 3.0,
        "attention_scale": 0.2,
        "residual_multiplier": 0.4,
        "logits_divisor": 7.0,
    },
    "layers that differ, part of a head rotated, head norms": {
        "attention_bias": True,
        "qk_norm": "head",
        "sliding_window": 6,
        "full_layers": (0,),
        "unrotated_layers": (1,),
        "rotary": RotaryConfig("default", 10000.0, 12),
    },
    "no layer rotated": {"unrotated_layers": (0, 1)},
}


def steps(decoder: Decoder, ids: list[list[int]]) -> Tensor:
    """Logits of every sequence's tokens, all by decode steps: `[steps, num_seqs, vocab_size]`."""
    config, device, num_seqs = decoder.config, decoder.device, len(ids)
    cache = KVCache.allocate(config, FIRST_BLOCK + num_seqs, 16, dtype=decoder.dtype, device=device)
    tables = FIRST_BLOCK + torch.arange(num_seqs, dtype=torch.int32, device=device)[:, None]
    logits = []
    for position, tokens in enumerate(zip(*ids, strict=True)):
        metadata = AttentionMetadata(tables, torch.full((num_seqs,), position + 1, dtype=torch.int32, device=device))
        at = torch.full((num_seqs,), position, device=device)
        preamble = decoder.preamble(torch.tensor(tokens, device=device), at, metadata, 16)
        logits.append(decoder.head(decoder.blocks(preamble.hidden, preamble, metadata, cache)))
    return torch.stack(logits)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fields", FAMILIES.values(), ids=FAMILIES)
def test_decode(fields: dict[str, Any], dtype: torch.dtype) -> None:
    config = ModelConfig(
        **{
            "architecture": "llama",
            "vocab_size": 50,
            "hidden_size": 32,
            "intermediate_size": 40,
            "num_layers": 2,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 16,
            "norm_eps": 1e-5,
            "rotary": RotaryConfig("default", 10000.0, 16),
            "max_position": 16,
        }
        | fields
    )
    decoder = Decoder(config, dtype=dtype, device="cuda")
    exact = Decoder(config, dtype=torch.float64, device="cuda")
    for parameter, same in zip(decoder.parameters(), exact.parameters(), strict=True):
        numbers = torch.randn(parameter.shape)
        parameter.copy_(numbers if parameter.dim() == 1 else numbers / parameter.shape[1] ** 0.5)
        same.copy_(parameter)
    ids = torch.randint(50, (2, 8)).tolist()
    actual, truth = steps(decoder, ids).double(), steps(exact, ids)
    # Roundings of two layers; a wrong rotation, window or norm is off by a tenth and more.
    bound = {torch.float32: 1e-5, torch.bfloat16: 4e-2}[dtype]
    assert (actual - truth).norm() <= bound * truth.norm()
