"""The families of models that the one decoder computes: a table of how each differs from Llama.

The table is all that the config reader, the name table of the loader and `docs/models.md` know of a family.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

RotaryKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]
ROTARY_KINDS: tuple[RotaryKind, ...] = get_args(RotaryKind)

QKNorm = Literal["head", "projection"]
WindowLayers = Literal["all", "upper", "unrotated"]


@dataclass(frozen=True)
class Family:
    """A class of Hugging Face models.

    Attributes:
        name: `model_type` of its configs; `ModelConfig.architecture`.
        hf_class: what its configs have in `architectures`.
        difference: from Llama, in one line for people.
        keys: config keys that it reads and not every family does.
        absent: what its Hugging Face config class takes for a key that is not there.
        rotary_kinds: those that it can have.
        qkv_bias: q, k and v always have biases, and the output projection never does.
        qk_norm: queries and keys are normed head by head, or over the whole projection.
        post_norms: the results of attention and MLP are normed, and not their inputs.
        fused: q, k and v are stored as one tensor, and so are gate and up.
        window: which layers a sliding window is for, unless `layer_types` says so; None: it has no window.
        gguf: its `general.architecture` in GGUF files; None: such files are not read.
    """

    name: str
    hf_class: str
    difference: str
    keys: frozenset[str] = frozenset()
    absent: Mapping[str, Any] = field(default_factory=dict)
    rotary_kinds: tuple[RotaryKind, ...] = ROTARY_KINDS
    qkv_bias: bool = False
    qk_norm: QKNorm | None = None
    post_norms: bool = False
    fused: bool = False
    window: WindowLayers | None = None
    gguf: str | None = None


_SWITCHED_WINDOW = frozenset({"sliding_window", "use_sliding_window", "layer_types"})

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family(
            name="llama",
            hf_class="LlamaForCausalLM",
            difference="the measure of the others: Llama 2 and 3.x, SmolLM2, TinyLlama and all that use the class",
            keys=frozenset({"attention_bias", "mlp_bias"}),
            gguf="llama",
        ),
        Family(
            name="mistral",
            hf_class="MistralForCausalLM",
            difference="a sliding window in every layer, unless `sliding_window` is null",
            keys=frozenset({"sliding_window"}),
            absent={"sliding_window": 4096, "num_key_value_heads": 8, "max_position_embeddings": 131072},
            window="all",
            gguf="llama",
        ),
        Family(
            name="qwen2",
            hf_class="Qwen2ForCausalLM",
            difference="biases of q, k and v, with no key that says so; a window in the upper layers, if switched on",
            keys=_SWITCHED_WINDOW | {"max_window_layers"},
            absent={
                "sliding_window": 4096,
                "max_window_layers": 28,
                "num_key_value_heads": 32,
                "max_position_embeddings": 32768,
            },
            qkv_bias=True,
            window="upper",
            gguf="qwen2",
        ),
        Family(
            name="qwen3",
            hf_class="Qwen3ForCausalLM",
            difference="a norm of each query and key head; a window in the upper layers, if switched on",
            keys=_SWITCHED_WINDOW | {"max_window_layers", "attention_bias"},
            absent={
                "head_dim": 128,
                "sliding_window": 4096,
                "max_window_layers": 28,
                "num_key_value_heads": 32,
                "max_position_embeddings": 32768,
            },
            qk_norm="head",
            window="upper",
            gguf="qwen3",
        ),
        Family(
            name="phi3",
            hf_class="Phi3ForCausalLM",
            difference="q, k, v stored as one tensor, gate and up as another; part of a head may stay unrotated; a "
            "window in every layer, if there is one",
            keys=frozenset({"sliding_window", "partial_rotary_factor"}),
            absent={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096},
            rotary_kinds=("default", "longrope"),
            fused=True,
            window="all",
        ),
        Family(
            name="smollm3",
            hf_class="SmolLM3ForCausalLM",
            difference="every fourth layer, or those that `no_rope_layers` has a 0 for, is not rotated; a window in "
            "these, if switched on; tied embeddings unless the config says otherwise",
            keys=_SWITCHED_WINDOW | {"no_rope_layers", "no_rope_layer_interval", "attention_bias", "mlp_bias"},
            absent={
                "rope_theta": 2000000.0,
                "tie_word_embeddings": True,
                "no_rope_layer_interval": 4,
                "num_key_value_heads": 4,
                "max_position_embeddings": 32768,
            },
            window="unrotated",
        ),
        Family(
            name="granite",
            hf_class="GraniteForCausalLM",
            difference="multipliers of embeddings, attention scores and what layers add; a divisor of the logits",
            keys=frozenset(
                {
                    "attention_bias",
                    "mlp_bias",
                    "embedding_multiplier",
                    "attention_multiplier",
                    "residual_multiplier",
                    "logits_scaling",
                }
            ),
            absent={"attention_multiplier": 1.0},
        ),
        Family(
            name="olmo2",
            hf_class="Olmo2ForCausalLM",
            difference="attention and MLP are normed behind and not in front; a norm over all queries of a token, and "
            "one over all keys",
            keys=frozenset({"attention_bias"}),
            absent={"rms_norm_eps": 1e-5},
            qk_norm="projection",
            post_norms=True,
        ),
    )
}

FAMILY_OF_CLASS: dict[str, Family] = {family.hf_class: family for family in FAMILIES.values()}

NULL_IS_A_VALUE = ("sliding_window", "num_key_value_heads", "head_dim")
"""Keys whose null is an answer: no window, one KV head for each query head, hidden_size / num_attention_heads. Any
other null counts as absent."""


@dataclass(frozen=True)
class Guard:
    """A config key that would change the computation.

    Attributes:
        neutral: values, beside null, under which it does not.
        why: what a family that does not read the key lacks.
    """

    neutral: tuple[Any, ...]
    why: str


GUARDS: dict[str, Guard] = {
    "hidden_act": Guard(("silu", "swish"), "the MLP is SwiGLU"),
    "partial_rotary_factor": Guard((1.0,), "its whole heads are rotated"),
    "sliding_window": Guard((), "it has no window; one that `use_sliding_window` turns off is passed over"),
    "use_sliding_window": Guard((False,), "it has no switch for a window"),
    "no_rope_layers": Guard((), "all its layers are rotated"),
    "use_qk_norm": Guard((False,), "its norms follow from the family"),
    "qk_norm": Guard((False,), "its norms follow from the family"),
    "embedding_multiplier": Guard((1.0,), "it scales no embeddings"),
    "attention_multiplier": Guard((), "it scales scores by 1 / sqrt(head_dim)"),
    "residual_multiplier": Guard((1.0,), "it scales no residuals"),
    "logits_scaling": Guard((1.0,), "it scales no logits"),
    "logit_scale": Guard((1.0,), "no family here scales logits so"),
    "final_logit_softcapping": Guard((), "no family here caps logits"),
    "attn_logit_softcapping": Guard((), "no family here caps scores"),
    "num_local_experts": Guard((0, 1), "no mixture of experts is built"),
    "num_experts": Guard((0, 1), "no mixture of experts is built"),
    "quantization_config": Guard((), "no quantised safetensors are read"),
    "is_encoder_decoder": Guard((False,), "only decoders are built"),
}
"""Checked for every family that does not read the key. What a checkpoint's tensors would give away, such as a bias,
needs no entry."""
