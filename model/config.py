"""The architecture as numbers: a Hugging Face config translated once, into frozen dataclasses."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .config_layers import sliding_window, unrotated_layers
from .config_reader import DTYPES, ConfigReader, UnsupportedModelError, family_of
from .config_rotary import read_rotary
from .families import QKNorm
from .rotary import RotaryConfig

__all__ = ["DTYPES", "MAX_LAYERS", "ModelConfig", "RotaryConfig", "UnsupportedModelError"]

MAX_LAYERS = 4096
"""Far more than any model has: a config that says more must not have its layers counted one by one."""


@dataclass(frozen=True)
class ModelConfig:
    """Everything the decoder is built from.

    Attributes:
        architecture: a name in `FAMILIES`.
        max_position: positions that the model was made for; no sequence grows longer.
        attention_bias: biases of q, k and v.
        output_bias: a bias of attention's output projection.
        qk_norm: norms of queries and keys before the rotation, of each head or of the whole projection.
        post_norms: attention and MLP are normed behind, before they are added, and not in front.
        sliding_window: keys a token sees at most, its own included; None for all.
        full_layers: layers that see all keys in spite of the window.
        unrotated_layers: layers without rotary embedding.
        embedding_multiplier: of what the embedding gives.
        attention_scale: of scores; None for `head_dim ** -0.5`.
        residual_multiplier: of what attention and MLP add to the residual stream.
        logits_divisor: of what the head gives.
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
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: QKNorm | None = None
    post_norms: bool = False
    tie_embeddings: bool = False
    sliding_window: int | None = None
    full_layers: tuple[int, ...] = ()
    unrotated_layers: tuple[int, ...] = ()
    embedding_multiplier: float = 1.0
    attention_scale: float | None = None
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
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
    def q_size(self) -> int:
        """Elements of all query heads of a token."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Elements of all key heads of a token, or of all value heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def qk_norm_sizes(self) -> tuple[int, int]:
        """Elements of the norm weights of queries and of keys; 0 where there are none."""
        if self.qk_norm is None:
            return 0, 0
        return (self.head_dim, self.head_dim) if self.qk_norm == "head" else (self.q_size, self.kv_size)

    def window_of(self, layer: int) -> int | None:
        """Keys that a token sees at most in a layer; None for all."""
        return None if layer in self.full_layers else self.sliding_window

    @property
    def num_parameters(self) -> int:
        """Stored parameters; a tied head counts once."""
        qkv_size = self.q_size + 2 * self.kv_size
        attention = (qkv_size + self.q_size) * self.hidden_size + sum(self.qk_norm_sizes)
        attention += qkv_size * self.attention_bias + self.hidden_size * self.output_bias
        mlp = 3 * self.hidden_size * self.intermediate_size
        mlp += (2 * self.intermediate_size + self.hidden_size) * self.mlp_bias
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return embeddings + self.num_layers * (attention + mlp + 2 * self.hidden_size) + self.hidden_size

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes that one token takes in the KV cache, over all layers."""
        return 2 * self.num_layers * self.kv_size * dtype.itemsize

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "ModelConfig":
        """Translate the contents of a `config.json`, by the table of families (`model/families.py`).

        A key that is null counts as absent, but for `NULL_IS_A_VALUE`; an absent key has the value that the family's
        class assumes. Keys that would change the computation in a way that is not built for the family are refused by
        name; keys that are only notes (who made it, how it was trained) are passed over.

        Raises:
            UnsupportedModelError: another architecture, a key or value that is not supported, a missing or senseless
                size. The message names the key, the value and what is supported.
        """
        family = family_of(config)
        reader = ConfigReader.of_family(config, family)
        reader.refuse_unsupported(family)
        hidden_size = reader.size("hidden_size")
        num_heads = reader.size("num_attention_heads")
        if "head_dim" not in reader.config and hidden_size % num_heads:
            raise UnsupportedModelError(
                f"without head_dim, hidden_size {hidden_size} must be a multiple of num_attention_heads {num_heads}"
            )
        head_dim = reader.size("head_dim", hidden_size // num_heads)
        max_position = reader.size("max_position_embeddings", 2048)
        num_layers = reader.size("num_hidden_layers", limit=MAX_LAYERS)
        unrotated = unrotated_layers(reader, family, num_layers)
        window, full_layers = sliding_window(reader, family, num_layers, unrotated)
        attention_bias = "attention_bias" in family.keys and reader.flag("attention_bias")
        scale = reader.positive("attention_multiplier") if "attention_multiplier" in family.keys else None
        return cls(
            architecture=family.name,
            vocab_size=reader.size("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=reader.size("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=reader.size("num_key_value_heads", num_heads),
            head_dim=head_dim,
            norm_eps=reader.positive("rms_norm_eps", 1e-6),
            rotary=read_rotary(reader, family, head_dim, max_position),
            max_position=max_position,
            attention_bias=attention_bias or family.qkv_bias,
            output_bias=attention_bias,
            mlp_bias="mlp_bias" in family.keys and reader.flag("mlp_bias"),
            qk_norm=family.qk_norm,
            post_norms=family.post_norms,
            tie_embeddings=reader.flag("tie_word_embeddings"),
            sliding_window=window,
            full_layers=full_layers,
            unrotated_layers=unrotated,
            embedding_multiplier=reader.positive("embedding_multiplier", 1.0),
            attention_scale=scale,
            residual_multiplier=reader.positive("residual_multiplier", 1.0),
            logits_divisor=reader.positive("logits_scaling", 1.0),
            dtype=reader.dtype(),
            eos_token_ids=reader.token_ids("eos_token_id"),
            bos_token_id=next(iter(reader.token_ids("bos_token_id")), None),
        )
