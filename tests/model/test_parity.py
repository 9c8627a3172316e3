"""Our decoder against transformers' models, on tiny random checkpoints that transformers wrote."""

from collections.abc import Callable, Iterable
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ostinato.model import Decoder, RotaryConfig
from ostinato.model.families import FAMILIES, ROTARY_KINDS
from ostinato.model.rotary import inverse_frequencies
from ostinato.weights import load_model, open_checkpoint

Error = Callable[[Tensor, Tensor], float]

VOCAB, PROMPT, STEPS = 128, 45, 32
GAP_AT, GAP = 20, 2000
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 1024}


def longrope(pairs: int, original: int) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + 0.1 * pair for pair in range(pairs)],
        "long_factor": [1.5 + 0.7 * pair for pair in range(pairs)],
        "original_max_position_embeddings": original,
    }


# Per model: the family, heads and KV heads, head_dim, hidden size, and keys of its config.
MODELS: dict[str, tuple[str, tuple[int, int], int, int, dict[str, Any]]] = {
    "llama, 3 per KV head, default, biases": ("llama", (6, 2), 20, 96, {"attention_bias": True, "mlp_bias": True}),
    "llama, 7 per KV head, linear, tied, attention biases": (
        "llama",
        (7, 1),
        24,
        112,
        {
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        },
    ),
    "llama, 9 per KV head, llama3, MLP biases": (
        "llama",
        (9, 1),
        12,
        72,
        {"mlp_bias": True, "rope_parameters": LLAMA3},
    ),
    "llama, longrope": ("llama", (4, 4), 10, 64, {"rope_parameters": longrope(5, 1000)}),
    "mistral, window shorter than the prompt": ("mistral", (6, 2), 14, 60, {"sliding_window": 7}),
    "mistral, window longer than all, dynamic": (
        "mistral",
        (4, 2),
        18,
        60,
        {
            "sliding_window": 1000,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        },
    ),
    "qwen2, window in the upper layer, yarn": (
        "qwen2",
        (6, 2),
        10,
        60,
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1, "rope_parameters": YARN},
    ),
    "qwen2, window switched off, tied": ("qwen2", (3, 1), 20, 60, {"sliding_window": 9, "tie_word_embeddings": True}),
    "qwen3, biases, yarn with magnitudes": (
        "qwen3",
        (4, 2),
        18,
        60,
        {
            "attention_bias": True,
            "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False, "beta_fast": 16},
        },
    ),
    "phi3, half of a head rotated, window": (
        "phi3",
        (6, 2),
        12,
        72,
        {
            "sliding_window": 11,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "phi3, longrope beyond the original length": (
        "phi3",
        (4, 4),
        16,
        64,
        {
            "original_max_position_embeddings": 1000,
            "rope_parameters": longrope(6, 1000) | {"partial_rotary_factor": 0.75},
        },
    ),
    "phi3, longrope within the original length": (
        "phi3",
        (4, 1),
        16,
        64,
        {"original_max_position_embeddings": 4096, "rope_parameters": longrope(8, 4096) | {"factor": 8.0}},
    ),
    "smollm3, window in the unrotated layer, linear": (
        "smollm3",
        (6, 2),
        10,
        60,
        {
            "no_rope_layers": [1, 0],
            "use_sliding_window": True,
            "sliding_window": 8,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
        },
    ),
    "smollm3, every second layer unrotated, biases": (
        "smollm3",
        (3, 3),
        20,
        60,
        {"no_rope_layer_interval": 2, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    ),
    "granite, all multipliers, biases": (
        "granite",
        (6, 2),
        10,
        60,
        {
            "embedding_multiplier": 6.0,
            "attention_multiplier": 0.17,
            "residual_multiplier": 0.22,
            "logits_scaling": 3.0,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "olmo2, llama3, biases": ("olmo2", (6, 2), 10, 60, {"attention_bias": True, "rope_parameters": LLAMA3}),
    "olmo2, one head per KV head": ("olmo2", (4, 4), 14, 56, {"rms_norm_eps": 1e-6}),
}
EVERY_MODEL = pytest.mark.parametrize("shape", MODELS.values(), ids=MODELS)


# Every rotary kind once.
LONG = (
    "llama, 3 per KV head, default, biases",
    "llama, 7 per KV head, linear, tied, attention biases",
    "llama, 9 per KV head, llama3, MLP biases",
    "llama, longrope",
    "mistral, window longer than all, dynamic",
    "qwen2, window in the upper layer, yarn",
)


def rotary_kinds(names: Iterable[str]) -> set[str]:
    return {MODELS[name][4].get("rope_parameters", {}).get("rope_type", "default") for name in names}


def test_every_family_and_rotary_kind_is_compared() -> None:
    assert {shape[0] for shape in MODELS.values()} == FAMILIES.keys()
    assert rotary_kinds(MODELS) == rotary_kinds(LONG) == set(ROTARY_KINDS)


def random_model(
    family: str, heads: tuple[int, int], head_dim: int, hidden: int, keys: dict[str, Any]
) -> PreTrainedModel:
    """Two layers whose weights keep the size of what goes through; norms off 1, biases of size 1: a miss is loud."""
    config = AutoConfig.for_model(
        family,
        **{
            "vocab_size": VOCAB,
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden + 8,
            "num_hidden_layers": 2,
            "num_attention_heads": heads[0],
            "num_key_value_heads": heads[1],
            # Classes without the key would only note it.
            **({"head_dim": head_dim} if head_dim * heads[0] != hidden else {}),
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "pad_token_id": None,
            "bos_token_id": None,
            "eos_token_id": None,
        }
        | deepcopy(keys),
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    assert type(model).__name__ == FAMILIES[family].hf_class
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
        self.rotary = rotary

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        frequencies = inverse_frequencies(self.rotary, 4096)
        angles = (position_ids[..., None] * frequencies).repeat(1, 1, 2)
        factor = self.rotary.attention_factor
        return (angles.cos() * factor).to(x.dtype), (angles.sin() * factor).to(x.dtype)


class ExactNorm(nn.Module):
    """In place of transformers' norms, which go through float32 even in a float64 model."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt()


def with_exact_rotary(model: PreTrainedModel, rotary: RotaryConfig) -> PreTrainedModel:
    model = deepcopy(model)
    model.model.rotary_emb = ExactRotary(rotary)
    return model


def in_float64(model: PreTrainedModel, rotary: RotaryConfig) -> PreTrainedModel:
    """The truth: the same (maybe rounded) weights, float64 throughout."""
    model = with_exact_rotary(model, rotary).double()
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                setattr(module, name, ExactNorm(child))
    return model


def in_bfloat16(model: PreTrainedModel) -> PreTrainedModel:
    """As `from_pretrained` would load it: a cast of the whole module would round the frequencies, too (B58)."""
    rotary = model.model.rotary_emb
    model.model.rotary_emb = nn.Identity()
    model.bfloat16()
    model.model.rotary_emb = rotary
    return model


def load(model: PreTrainedModel, folder: Path) -> Decoder:
    model.save_pretrained(folder)
    decoder, report = load_model(open_checkpoint(folder))
    assert report.dtype == model.dtype
    return decoder


def rotate_as(position: int) -> int:
    """Distances within each of the two parts of a sequence are small, and from one to the other above 2000."""
    return position if position < GAP_AT else position + GAP


def generate(
    player: Callable[..., Any], decoder: Decoder, ids: Tensor, place: Callable[[int], int] = rotate_as
) -> tuple[Tensor, Tensor]:
    """A prefill and 32 greedy steps of ours: the logits of every position, and prompt and generated tokens together."""
    playing = player(decoder, 1, len(ids) + STEPS, 16, place)
    logits, tokens = playing.prefill([ids.tolist()]), ids.tolist()
    for _ in range(STEPS):
        tokens.append(int(logits[-1][-1].argmax()))
        logits.append(playing.decode(tokens[-1:]))
    return torch.cat(logits), torch.tensor(tokens)


def logits_of(model: PreTrainedModel, tokens: Tensor, place: Callable[[int], int] = rotate_as) -> Tensor:
    positions = torch.tensor([[place(position) for position in range(len(tokens))]])
    # With a mask given, the gap is not taken for the border between two packed sequences.
    mask = torch.ones_like(positions)
    return model(tokens[None], position_ids=positions, attention_mask=mask, use_cache=False).logits[0]


@EVERY_MODEL
def test_float32_logits_and_greedy_tokens(
    shape: Any, tmp_path: Path, player: Callable[..., Any], relative_error: Error
) -> None:
    """B06, B07, B08, B09, B35: a prompt of 45 tokens and 32 greedy steps; each position on its own is within 1e-5.

    Then the same across a gap of 2000 positions, where transformers' angles, which are float32, are off by up to 1e-4:
    beside exact angles the two stay within 2e-6, a few roundings.
    """
    model = random_model(*shape)
    decoder, prompt = load(model, tmp_path), torch.randint(VOCAB, (PROMPT,))
    for place in (int, rotate_as):
        ours, tokens = generate(player, decoder, prompt, place)
        exact = with_exact_rotary(model, decoder.config.rotary)
        theirs = logits_of(exact if place is rotate_as or is_long(decoder.config.rotary) else model, tokens, place)
        # By induction over the steps: transformers, fed what we fed, would have gone on with the same token each time.
        assert torch.equal(theirs[PROMPT - 1 : -1].argmax(-1), tokens[PROMPT:])
        bound = 2e-6 if place is rotate_as else 1e-5
        assert relative_error(ours[:PROMPT], theirs[:PROMPT]) <= bound
        assert max(map(relative_error, ours, theirs)) <= bound


def is_long(rotary: RotaryConfig) -> bool:
    """Whether transformers would take its short factors for a short sequence, and we the long ones of the context."""
    return rotary.kind == "longrope" and rotary.original_max_position < 4096


@pytest.mark.parametrize("name", LONG)
def test_float32_logits_of_a_prompt_that_is_really_long(
    name: str, tmp_path: Path, player: Callable[..., Any], relative_error: Error
) -> None:
    """B06, B07: every rotary kind, without a gap: 2010 tokens, then 32 more, as transformers has them."""
    model = random_model(*MODELS[name])
    decoder = load(model, tmp_path)
    ours, tokens = generate(player, decoder, torch.randint(VOCAB, (2010,)), int)
    theirs = logits_of(model, tokens, int)
    assert torch.equal(theirs[2009:-1].argmax(-1), tokens[2010:])
    assert relative_error(ours[:2010], theirs[:2010]) <= 1e-5
    assert max(map(relative_error, ours[2010:], theirs[2010:])) <= 1e-5


@EVERY_MODEL
def test_bfloat16_is_as_near_to_the_truth_as_transformers(
    shape: Any, tmp_path: Path, player: Callable[..., Any], relative_error: Error, record_property: Any
) -> None:
    """The 1.5x rule: both run the same bf16 weights on the same tokens, and are measured against the float64 run."""
    model = in_bfloat16(random_model(*shape))
    decoder = load(model, tmp_path)
    ours, tokens = generate(player, decoder, torch.randint(VOCAB, (100,)))
    theirs, truth = logits_of(model, tokens), logits_of(in_float64(model, decoder.config.rotary), tokens)
    for part in (slice(0, 100), slice(100, None)):
        ratio = relative_error(ours[part], truth[part]) / relative_error(theirs[part], truth[part])
        record_property("error, in transformers' own", round(ratio, 3))
        assert ratio <= 1.5


@EVERY_MODEL
def test_prefill_tokens_one_by_one_and_chunks_agree(
    shape: Any, tmp_path: Path, player: Callable[..., Any], relative_error: Error
) -> None:
    """B60, per family, in float32: 40 tokens across two block borders and the gap."""
    decoder, ids = load(random_model(*shape), tmp_path), torch.randint(VOCAB, (40,)).tolist()
    [whole] = player(decoder, 1, 40, 16, rotate_as).prefill([ids])
    playing = player(decoder, 1, 40, 16, rotate_as)
    stepwise = torch.cat([playing.decode([token_id]) for token_id in ids])
    playing = player(decoder, 1, 40, 16, rotate_as)
    chunks = [playing.prefill([ids[start:stop]])[0] for start, stop in pairwise([*range(0, 40, 7), 40])]
    for other in (stepwise, torch.cat(chunks)):
        assert relative_error(other, whole) <= 2e-6
        assert torch.equal(other.argmax(-1), whole.argmax(-1))
