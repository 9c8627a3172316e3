"""On a GPU, in bfloat16: logits no further from the truth than 1.5 times as far as those of transformers."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato.model import SHAPES, Decoder, ModelConfig
from ostinato.weights import dummy_model, load_model, open_checkpoint
from ostinato.weights.names import name_table

PROMPT, STEPS = 40, 6
# Every road of a projection: dot-free, tensor cores with each number of columns, cuBLAS.
BATCHES = (1, 3, 24, 70)
BF16 = torch.bfloat16


def llama(config: ModelConfig, decoder: Decoder, dtype: torch.dtype) -> Any:
    """transformers' model with the decoder's weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    rotary = config.rotary
    scaling = {
        "rope_type": rotary.kind,
        "factor": rotary.factor,
        "low_freq_factor": rotary.low_freq_factor,
        "high_freq_factor": rotary.high_freq_factor,
        "original_max_position_embeddings": rotary.original_max_position,
    }
    made = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position,
        rms_norm_eps=config.norm_eps,
        rope_theta=rotary.theta,
        rope_scaling=scaling if rotary.kind == "llama3" else None,
        tie_word_embeddings=config.tie_embeddings,
    )
    with torch.device(decoder.device):
        model = LlamaForCausalLM(made).to(dtype).eval().requires_grad_(False)
    ours, theirs = decoder.state_dict(), model.state_dict()
    for name, rows in name_table(config).items():
        theirs[name].copy_(ours[rows.parameter][rows.start : rows.start + rows.shape[0]])
    return model


def last_logits(model: Any, ids: Tensor) -> Tensor:
    """`[num_seqs, STEPS, vocab_size]` float32, of the last positions."""
    parts = [model(part, use_cache=False, logits_to_keep=STEPS).logits.float() for part in ids.split(16)]
    return torch.cat(parts)


def assert_near_enough(config: ModelConfig, decoder: Decoder, player: Callable[..., Any]) -> None:
    device = decoder.device
    ids = torch.randint(config.vocab_size, (max(BATCHES), PROMPT + STEPS))
    exact = last_logits(llama(config, decoder, torch.float32), ids.to(device))
    theirs = last_logits(llama(config, decoder, BF16), ids.to(device))
    for batch in BATCHES:
        # One sequence alone may come out at twice the distance of another, so that many of them are needed.
        groups = ids[: max(batch, 24)].split(batch)
        logits = torch.cat([decoded(player(decoder, batch, PROMPT + STEPS, 16), group) for group in groups])
        truth, peer = exact[: len(logits)], theirs[: len(logits)]
        distance, allowed = (logits - truth).norm() / truth.norm(), 1.5 * (peer - truth).norm() / truth.norm()
        print(f"batches of {batch}: {distance:.3e} off, allowed {allowed:.3e}")
        assert distance <= allowed


def decoded(playing: Any, ids: Tensor) -> Tensor:
    """`[num_seqs, STEPS, vocab_size]` float32: the prompts are prefilled, and each further token is one decode step."""
    playing.prefill(ids[:, :PROMPT].tolist())
    return torch.stack([playing.decode(ids[:, PROMPT + step].tolist()) for step in range(STEPS)], 1).float()


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "layers"), [("llama-3.2-1b", 16), ("llama-3.1-8b", 3)])
def test_random_weights(shape: str, layers: int, player: Callable[..., Any]) -> None:
    pytest.importorskip("transformers")
    config = replace(SHAPES[shape], num_layers=layers)
    assert_near_enough(config, dummy_model(config, dtype=BF16, device="cuda"), player)


@pytest.mark.gpu
@pytest.mark.demo
def test_a_real_checkpoint(demo_path: Path, player: Callable[..., Any]) -> None:
    pytest.importorskip("transformers")
    checkpoint = open_checkpoint(demo_path)
    decoder, _ = load_model(checkpoint, dtype=BF16, device="cuda")
    assert_near_enough(checkpoint.config, decoder, player)
