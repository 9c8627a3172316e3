"""The architecture as numbers: a Hugging Face config translated once, into frozen dataclasses."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

RotaryKind = Literal["default", "linear", "llama3"]
ROTARY_KINDS: tuple[RotaryKind, ...] = ("default", "linear", "llama3")

ARCHITECTURES = {"LlamaForCausalLM": "llama"}
"""Supported classes of Hugging Face configs, and the name of each here."""

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

MAX_LAYERS = 4096
"""Far more than any model has: a config that says more must not have its layers counted one by one."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "partial_rotary_factor": (1.0,),
    "sliding_window": (),
    "use_sliding_window": (False,),
    "layer_types": (),
    "no_rope_layers": (),
    "use_qk_norm": (False,),
    "qk_norm": (False,),
    "logit_scale": (1.0,),
    "logits_scaling": (1.0,),
    "embedding_multiplier": (1.0,),
    "attention_multiplier": (),
    "residual_multiplier": (1.0,),
    "final_logit_softcapping": (),
    "attn_logit_softcapping": (),
    "num_local_experts": (0, 1),
    "num_experts": (0, 1),
    "quantization_config": (),
    "is_encoder_decoder": (False,),
}
"""Keys that would change the computation, with the values (beside null) under which they do not."""


class UnsupportedModelError(ValueError):
    """The config asks for something that this engine does not compute."""


@dataclass(frozen=True)
class RotaryConfig:
    """Rotary position embedding.

    Attributes:
        kind: how `theta`'s frequencies are scaled for long contexts.
        theta: base of the frequencies.
        rotary_dim: leading elements of a head that are rotated.
        factor: `linear`, `llama3`: the context is this many times longer than in pre-training.
        low_freq_factor, high_freq_factor, original_max_position: `llama3` only.
    """

    kind: RotaryKind
    theta: float
    rotary_dim: int
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True)
class ModelConfig:
    """Everything the decoder is built from.

    Attributes:
        max_position: positions that the model was made for; no sequence grows longer.
        qk_norm: per-head norm of queries and keys before the rotation.
        sliding_window: keys a token sees at most, its own included; None for all.
        dtype: what the config names for its weights, None if nothing.
        eos_token_ids, bos_token_id: as the config has them; tokenizer and generation config may add more.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rotary: RotaryConfig
    max_position: int
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    sliding_window: int | None = None
    dtype: torch.dtype | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModelError(
                f"num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads {self.num_kv_heads}"
            )
        if self.rotary.rotary_dim % 2 or not 0 < self.rotary.rotary_dim <= self.head_dim:
            raise UnsupportedModelError(
                f"rotary dimension {self.rotary.rotary_dim} is not an even number from 2 to head_dim {self.head_dim}"
            )

    @property
    def num_parameters(self) -> int:
        """Stored parameters; a tied head counts once."""
        heads = self.num_heads + 2 * self.num_kv_heads
        attention = (heads + self.num_heads) * self.head_dim * self.hidden_size
        attention += (heads * self.head_dim + self.hidden_size) * self.attention_bias + 2 * self.head_dim * self.qk_norm
        mlp = 3 * self.hidden_size * self.intermediate_size
        mlp += (2 * self.intermediate_size + self.hidden_size) * self.mlp_bias
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return embeddings + self.num_layers * (attention + mlp + 2 * self.hidden_size) + self.hidden_size

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes that one token takes in the KV cache, over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype.itemsize

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "ModelConfig":
        """Translate the contents of a `config.json`.

        A key that is null counts as absent. Keys that would change the computation in a way that is not built here are
        refused by name; keys that are only notes (who made it, how it was trained) are passed over.

        Raises:
            UnsupportedModelError: another architecture, a key or value that is not supported, a missing or senseless
                size. The message names the key, the value and what is supported.
        """
        reader = _Reader({key: value for key, value in config.items() if value is not None})
        architecture = reader.architecture()
        reader.refuse_unsupported()
        hidden_size = reader.size("hidden_size")
        num_heads = reader.size("num_attention_heads")
        if "head_dim" not in reader.config and hidden_size % num_heads:
            raise UnsupportedModelError(
                f"without head_dim, hidden_size {hidden_size} must be a multiple of num_attention_heads {num_heads}"
            )
        head_dim = reader.size("head_dim", hidden_size // num_heads)
        max_position = reader.size("max_position_embeddings", 2048)
        return cls(
            architecture=architecture,
            vocab_size=reader.size("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=reader.size("intermediate_size"),
            num_layers=reader.size("num_hidden_layers", limit=MAX_LAYERS),
            num_heads=num_heads,
            num_kv_heads=reader.size("num_key_value_heads", num_heads),
            head_dim=head_dim,
            norm_eps=reader.positive("rms_norm_eps", 1e-6),
            rotary=reader.rotary(head_dim, max_position),
            max_position=max_position,
            attention_bias=reader.flag("attention_bias"),
            mlp_bias=reader.flag("mlp_bias"),
            tie_embeddings=reader.flag("tie_word_embeddings"),
            dtype=reader.dtype(),
            eos_token_ids=reader.token_ids("eos_token_id"),
            bos_token_id=next(iter(reader.token_ids("bos_token_id")), None),
        )


@dataclass(frozen=True)
class _Reader:
    """Typed access to a config dict, with errors that name the key."""

    config: Mapping[str, Any]

    def architecture(self) -> str:
        names = self.config.get("architectures") or []
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise UnsupportedModelError(f"architectures must be a list of names, not {names!r}")
        if not names and self.config.get("model_type") in ARCHITECTURES.values():
            return str(self.config["model_type"])
        for name in names:
            if name in ARCHITECTURES:
                return ARCHITECTURES[name]
        found = ", ".join(names) or f"model_type {self.config.get('model_type')!r}"
        raise UnsupportedModelError(f"architecture {found} is not supported; supported: {', '.join(ARCHITECTURES)}")

    def refuse_unsupported(self) -> None:
        for key, accepted in NEUTRAL.items():
            value = self.config.get(key)
            if key == "sliding_window" and self.config.get("use_sliding_window") is False:
                continue  # a size that is switched off
            if key == "layer_types" and isinstance(value, list) and set(value) <= {"full_attention"}:
                continue
            if value is not None and value not in accepted:
                allowed = " or ".join((*map(repr, accepted), "null"))
                raise UnsupportedModelError(f"config key {key} = {value!r} is not supported; supported: {allowed}")

    def size(self, key: str, default: int | None = None, *, limit: int = 2**31 - 1) -> int:
        value = self.config.get(key, default)
        if value is None:
            raise UnsupportedModelError(f"config key {key} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= limit:
            raise UnsupportedModelError(f"config key {key} = {value!r} is not a whole number from 1 to {limit}")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.config.get(key, default)
        if value is None:
            raise UnsupportedModelError(f"config key {key} is missing")
        # A whole number too large for a float compares as such, and would overflow below.
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= sys.float_info.max:
            raise UnsupportedModelError(f"config key {key} = {value!r} is not a positive finite number")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.config.get(key, False)
        if not isinstance(value, bool):
            raise UnsupportedModelError(f"config key {key} = {value!r} is neither true nor false")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        value = self.config.get(key, [])
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < 2**31 for i in ids):
            raise UnsupportedModelError(f"config key {key} = {value!r} is not a token id or a list of them")
        return tuple(dict.fromkeys(ids))

    def dtype(self) -> torch.dtype | None:
        name = self.config.get("dtype", self.config.get("torch_dtype", "auto"))
        if name == "auto":
            return None
        name = str(name).removeprefix("torch.")
        if name not in DTYPES:
            raise UnsupportedModelError(f"weights of dtype {name!r} are not supported; supported: {', '.join(DTYPES)}")
        return DTYPES[name]

    def rotary(self, head_dim: int, max_position: int) -> RotaryConfig:
        """Both spellings: `rope_parameters` (with the theta inside), and `rope_theta` beside `rope_scaling`.

        The nested theta wins where both are given.
        """
        rope = _Reader(self._rope_parameters())
        if rope.positive("partial_rotary_factor", 1.0) != 1.0:
            raise UnsupportedModelError(
                f"config key partial_rotary_factor = {rope.config['partial_rotary_factor']!r} is not supported; "
                "supported: 1.0 or null"
            )
        kind = rope.config.get("rope_type", "default")
        if kind not in ROTARY_KINDS:
            raise UnsupportedModelError(f"rope_type {kind!r} is not supported; supported: {', '.join(ROTARY_KINDS)}")
        theta = rope.positive("rope_theta", self.positive("rope_theta", 10000.0))
        if kind == "default":
            return RotaryConfig(kind, theta, head_dim)
        factor = rope.positive("factor")
        if kind == "linear":
            return RotaryConfig(kind, theta, head_dim, factor)
        low, high = rope.positive("low_freq_factor"), rope.positive("high_freq_factor")
        if not low < high:
            raise UnsupportedModelError(f"low_freq_factor {low} is not below high_freq_factor {high}")
        # As in transformers: the top-level length beats the nested one, and `max_position` stands in for both.
        nested = rope.size("original_max_position_embeddings", max_position)
        original = self.size("original_max_position_embeddings", nested)
        return RotaryConfig(kind, theta, head_dim, factor, low, high, original)

    def _rope_parameters(self) -> dict[str, Any]:
        """`rope_scaling` and `rope_parameters` as one, nulls dropped, `type` under its newer name `rope_type`."""
        merged: dict[str, Any] = {}
        for key in ("rope_scaling", "rope_parameters"):
            block = self.config.get(key, {})
            if not isinstance(block, dict):
                raise UnsupportedModelError(f"config key {key} = {block!r} is not an object")
            for name, value in block.items():
                if isinstance(value, dict):
                    raise UnsupportedModelError(
                        f"config key {key} by layer type ({', '.join(map(str, block))}) is not supported; "
                        "supported: one block for all layers"
                    )
                name = "rope_type" if name == "type" else name
                if value is None:
                    continue
                if name in merged and merged[name] != value:
                    raise UnsupportedModelError(f"{name} is given twice: {merged[name]!r} and {value!r}")
                merged[name] = value
        return merged
