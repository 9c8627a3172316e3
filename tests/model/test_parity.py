"""Our decoder against transformers' Llama, on tiny random checkpoints that transformers wrote."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ostinato.model import Decoder, RotaryConfig
from ostinato.model.rotary import inverse_frequencies
from ostinato.weights import load_model, open_checkpoint

Error = Callable[[Tensor, Tensor], float]

VOCAB, PROMPT, STEPS = 128, 2010, 32
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
MODELS: dict[str, dict[str, Any]] = {
    "3 per KV head, default, biases": {"heads": (6, 2), "head_dim": 20, "hidden": 96, "biases": (True, True)},
    "7 per KV head, linear, tied, attention biases": {
        "heads": (7, 1),
        "head_dim": 24,
        "hidden": 112,
        "rope": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        "tied": True,
        "biases": (True, False),
    },
    "9 per KV head, llama3, MLP biases": {
        "heads": (9, 1),
        "head_dim": 12,
        "hidden": 72,
        "rope": LLAMA3,
        "biases": (False, True),
    },
    "1 per KV head, default, tied, no biases": {
        "heads": (4, 4),
        "head_dim": 10,
        "hidden": 64,
        "tied": True,
        "biases": (False, False),
    },
}


def random_llama(
    *,
    heads: tuple[int, int],
    head_dim: int,
    hidden: int,
    biases: tuple[bool, bool],
    rope: dict[str, Any] | None = None,
    tied: bool = False,
) -> LlamaForCausalLM:
    """Two layers whose weights keep the size of what goes through; norms off 1, biases of size 1: a miss is loud."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=2 * hidden + 8,
        num_hidden_layers=2,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        head_dim=head_dim,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        rope_parameters=rope or {"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=tied,
        attention_bias=biases[0],
        mlp_bias=biases[1],
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    assert head_dim != hidden // heads[0]
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.copy_(1 + 0.5 * torch.randn_like(parameter))
        elif name.endswith("bias") or "embed" in name:
            parameter.normal_()
        else:
            parameter.normal_(std=parameter.shape[1] ** -0.5)
    return model


class ExactRotary(nn.Module):
    """In place of transformers' rotary embedding, whose angles are float32: angles in float64, rounded at the end."""

    def __init__(self, rotary: RotaryConfig) -> None:
        super().__init__()
        self.frequencies = inverse_frequencies(rotary)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = (position_ids[..., None] * self.frequencies).repeat(1, 1, 2)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class ExactNorm(nn.Module):
    """In place of transformers' norm, which goes through float32 even in a float64 model."""

    def __init__(self, norm: LlamaRMSNorm) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt()


def with_exact_rotary(model: LlamaForCausalLM, rotary: RotaryConfig) -> LlamaForCausalLM:
    model = deepcopy(model)
    model.model.rotary_emb = ExactRotary(rotary)
    return model


def in_float64(model: LlamaForCausalLM, rotary: RotaryConfig) -> LlamaForCausalLM:
    """The truth: the same (maybe rounded) weights, float64 throughout."""
    model = with_exact_rotary(model, rotary).double()
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, LlamaRMSNorm):
                setattr(module, name, ExactNorm(child))
    return model


def load(model: LlamaForCausalLM, folder: Path) -> Decoder:
    model.save_pretrained(folder)
    decoder, report = load_model(open_checkpoint(folder))
    assert report.dtype == model.dtype
    return decoder


def generate(player: Callable[..., Any], decoder: Decoder, ids: Tensor) -> tuple[Tensor, Tensor]:
    """A prefill and 32 greedy steps of ours: the logits of every position, and prompt and generated tokens together."""
    playing = player(decoder, 1, len(ids) + STEPS, 16)
    logits, tokens = playing.prefill([ids.tolist()]), ids.tolist()
    for _ in range(STEPS):
        tokens.append(int(logits[-1][-1].argmax()))
        logits.append(playing.decode(tokens[-1:]))
    return torch.cat(logits), torch.tensor(tokens)


def logits_of(model: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    return model(tokens[None], use_cache=False).logits[0]


@pytest.mark.parametrize("shape", MODELS.values(), ids=MODELS)
def test_float32_logits_and_greedy_tokens(
    shape: dict[str, Any], tmp_path: Path, player: Callable[..., Any], relative_error: Error
) -> None:
    """B06, B07, B08, B09: a prompt beyond position 2000 and 32 tokens; each position on its own is within 1e-5.

    Most of that difference is transformers' own: its angles are float32, and their error grows with the position
    (1e-5 at 8000, 2e-4 at 130000). Beside exact angles the two are within 2e-6, a few roundings.
    """
    model = random_llama(**shape)
    decoder = load(model, tmp_path)
    ours, tokens = generate(player, decoder, torch.randint(VOCAB, (PROMPT,)))
    theirs = logits_of(model, tokens)
    # By induction over the steps: transformers, fed what we fed, would have gone on with the same token each time.
    assert torch.equal(theirs[PROMPT - 1 : -1].argmax(-1), tokens[PROMPT:])
    assert relative_error(ours[:PROMPT], theirs[:PROMPT]) <= 1e-5
    assert max(map(relative_error, ours, theirs)) <= 1e-5
    exact = logits_of(with_exact_rotary(model, decoder.config.rotary), tokens)
    assert max(map(relative_error, ours, exact)) <= 2e-6


@pytest.mark.parametrize("shape", MODELS.values(), ids=MODELS)
def test_bfloat16_is_as_near_to_the_truth_as_transformers(
    shape: dict[str, Any], tmp_path: Path, player: Callable[..., Any], relative_error: Error
) -> None:
    """The 1.5x rule: both run the same bf16 weights on the same tokens, and are measured against the float64 run."""
    model = random_llama(**shape).bfloat16()
    decoder = load(model, tmp_path)
    ours, tokens = generate(player, decoder, torch.randint(VOCAB, (200,)))
    theirs, truth = logits_of(model, tokens), logits_of(in_float64(model, decoder.config.rotary), tokens)
    for part in (slice(0, 200), slice(200, None)):
        assert relative_error(ours[part], truth[part]) <= 1.5 * relative_error(theirs[part], truth[part])
