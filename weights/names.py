"""Which stored tensor fills which rows of which parameter.

Names on the left are those of the Hugging Face implementation of the family, names on the right those of `Decoder`.
Projections that read the same input are kept fused, one below the other: q | k | v and gate | up. Most families store
them apart.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..model import FAMILIES, ModelConfig
from .checkpoint import CheckpointError, TensorInfo, shorten

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

# Buffers that older checkpoints carry and that follow from the config.
IGNORED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


@dataclass(frozen=True)
class Rows:
    """Where a stored tensor of the given shape belongs: rows `start .. start + shape[0] - 1` of a parameter."""

    parameter: str
    start: int
    shape: tuple[int, ...]


def name_table(config: ModelConfig) -> dict[str, Rows]:
    """Every name that a checkpoint of this config must hold. Each row of each parameter has exactly one source."""
    hidden, inner, q_size, kv_size = config.hidden_size, config.intermediate_size, config.q_size, config.kv_size
    qkv, gate_up = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}, {"gate_proj": inner, "up_proj": inner}
    if FAMILIES[config.architecture].fused:
        qkv, gate_up = {"qkv_proj": q_size + 2 * kv_size}, {"gate_up_proj": 2 * inner}
    q_norm, k_norm = config.qk_norm_sizes
    table = {EMBEDDING: Rows("embed_weight", 0, (config.vocab_size, hidden))}

    def linear(source: str, target: str, outputs: Mapping[str, int], inputs: int, has_bias: bool) -> None:
        start = 0
        for name, size in outputs.items():
            table[f"{source}.{name}.weight"] = Rows(f"{target}_weight", start, (size, inputs))
            if has_bias:
                table[f"{source}.{name}.bias"] = Rows(f"{target}_bias", start, (size,))
            start += size

    def norm(source: str, target: str, size: int) -> None:
        table[f"{source}.weight"] = Rows(f"{target}_weight", 0, (size,))

    for i in range(config.num_layers):
        source, target = f"model.layers.{i}", f"layers.{i}"
        attention, mlp = f"{source}.self_attn", f"{source}.mlp"
        linear(attention, f"{target}.qkv", qkv, hidden, config.attention_bias)
        if config.qk_norm:
            norm(f"{attention}.q_norm", f"{target}.q_norm", q_norm)
            norm(f"{attention}.k_norm", f"{target}.k_norm", k_norm)
        linear(attention, f"{target}.o", {"o_proj": hidden}, q_size, config.output_bias)
        linear(mlp, f"{target}.gate_up", gate_up, hidden, config.mlp_bias)
        linear(mlp, f"{target}.down", {"down_proj": hidden}, inner, config.mlp_bias)
        if config.post_norms:
            norm(f"{source}.post_attention_layernorm", f"{target}.o_norm", hidden)
            norm(f"{source}.post_feedforward_layernorm", f"{target}.down_norm", hidden)
        else:
            norm(f"{source}.input_layernorm", f"{target}.input_norm", hidden)
            norm(f"{source}.post_attention_layernorm", f"{target}.post_norm", hidden)

    norm("model.norm", "norm", hidden)
    if not config.tie_embeddings:
        table[HEAD] = Rows("head_weight", 0, (config.vocab_size, hidden))
    return table


class NameMismatchError(CheckpointError):
    """The names or shapes of a checkpoint are not those of its config; lists all faults, found from headers alone.

    Attributes:
        missing: names not stored, of parameters of which nothing is stored.
        unexpected: names stored that nothing asks for.
        half_merged: names not stored, of fused parameters of which another part is stored.
        misshaped: names stored in another shape than the config implies.
    """

    def __init__(
        self,
        path: object,
        missing: list[str],
        unexpected: list[str],
        half_merged: dict[str, str],
        misshaped: dict[str, str],
    ) -> None:
        self.missing, self.unexpected = missing, unexpected
        self.half_merged, self.misshaped = list(half_merged), list(misshaped)
        faults = {
            "missing": missing,
            "unexpected": unexpected,
            "half-merged": [f"{name} ({why})" for name, why in half_merged.items()],
            "mis-shaped": [f"{name} ({why})" for name, why in misshaped.items()],
        }
        listed = "; ".join(f"{kind}: {shorten(names)}" for kind, names in faults.items() if names)
        hint = ""
        if HEAD in missing:
            hint = " (the config does not tie the head to the embedding, so the head must be stored)"
        super().__init__(f"{path}: the tensors stored are not those of the config: {listed}{hint}")


def match_names(config: ModelConfig, stored: Mapping[str, TensorInfo], path: object) -> dict[str, Rows]:
    """Assign every stored tensor of a checkpoint to its rows, ignored buffers aside.

    A head that is stored although it is tied is assigned to the rows of the embedding, as a second source, which must
    be equal, or as the only one: of a shared tensor, `safetensors.torch.save_model` keeps the name that sorts first.

    Raises:
        NameMismatchError: any name is missing, unexpected or mis-shaped; `path` is what the message starts with.
    """
    table = name_table(config)
    if config.tie_embeddings and HEAD in stored:
        table[HEAD] = table[EMBEDDING]
        if EMBEDDING not in stored:
            del table[EMBEDDING]
    present = {rows.parameter for name, rows in table.items() if name in stored}
    absent = {name: rows.parameter for name, rows in table.items() if name not in stored}
    missing = [name for name, parameter in absent.items() if parameter not in present]
    half_merged = {name: f"{parameter} lacks it" for name, parameter in absent.items() if parameter in present}
    unexpected = [name for name in stored if name not in table and not IGNORED.fullmatch(name)]
    misshaped = {
        name: f"{list(stored[name].shape)} instead of {list(rows.shape)}"
        for name, rows in table.items()
        if name in stored and stored[name].shape != rows.shape
    }
    if missing or unexpected or half_merged or misshaped:
        raise NameMismatchError(path, missing, unexpected, half_merged, misshaped)
    return table
