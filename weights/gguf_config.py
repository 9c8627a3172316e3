"""The Hugging Face config that a GGUF file's metadata and tensors amount to.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, section "Architecture".
"""

import math
import struct
from collections.abc import Sequence
from typing import Any

import torch

from ..model import FAMILIES
from ..model.config import DTYPES
from .checkpoint import CheckpointError
from .gguf_file import GGUFFile

ARCHITECTURES = {family.gguf: family.hf_class for family in FAMILIES.values() if family.gguf == family.name}
"""Values of `general.architecture` that can be read, and the Hugging Face class of each."""

ROPE_FACTORS = "rope_freqs.weight"
"""A tensor that is no weight: what each rotary frequency is divided by. It is how Llama 3's scaling is stored."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "attention.causal": (True,),
    "attention.sliding_window": (0,),
    "attention.scale": (0.0,),
    "embedding_scale": (1.0,),
    "residual_scale": (1.0,),
    "logit_scale": (1.0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_beta_fast": (32.0,),
    "rope.scaling.yarn_beta_slow": (1.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}
"""Keys (after the architecture's name) that would change the computation, with the values under which they do not."""


def hf_config(file: GGUFFile, rope_factors: torch.Tensor | None) -> dict[str, Any]:
    """A config in the form of `config.json`, for `ModelConfig.from_hf`.

    `dtype` is that of most of the stored weights, or float32 if any of them is quantised: then the weights are given in
    float32, which holds their values exactly. The head is tied if none is stored; biases are there if the first layer
    has them.

    Args:
        rope_factors: [head_dim / 2], contents of `ROPE_FACTORS` if the file has it.

    Raises:
        CheckpointError: an architecture or a key that is not supported, or a key that is missing.
    """
    reader = _Reader(file)
    if file.metadata.get("general.type", "model") != "model":
        raise CheckpointError(f"{file.path}: holds a {file.metadata['general.type']!r}, not a model")
    if file.metadata.get("split.count", 0) not in (0, 1):
        raise CheckpointError(
            f"{file.path}: is one of {file.metadata['split.count']} parts of a split model; "
            "join them with `llama-gguf-split --merge` of llama.cpp"
        )
    reader.refuse_unsupported()
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError(f"{file.path}: holds no tensor token_embd.weight")
    num_heads, hidden_size = reader.size("attention.head_count"), reader.size("embedding_length")
    head_dim = reader.size("attention.key_length", hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if reader.size(key, head_dim) != head_dim:
            raise CheckpointError(f"{file.path}: {key} {reader.size(key)} differs from the head size {head_dim}")
    theta = reader.real("rope.freq_base", 10000.0)
    tokenizer = {name: file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "eom")}
    return {
        "architectures": [ARCHITECTURES[reader.architecture]],
        "model_type": reader.architecture,
        "dtype": _main_dtype(file),
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": reader.size("feed_forward_length"),
        "num_hidden_layers": reader.size("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": reader.size("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "rms_norm_eps": reader.real("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": reader.size("context_length"),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(reader, rope_factors, theta, head_dim),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": tokenizer.pop("bos"),
        "eos_token_id": [index for index in tokenizer.values() if index is not None],
    }


class _Reader:
    """The metadata under an architecture's name, with errors that name the key."""

    def __init__(self, file: GGUFFile) -> None:
        self.path = file.path
        self.architecture = str(file.metadata.get("general.architecture"))
        if self.architecture not in ARCHITECTURES:
            supported = ", ".join(ARCHITECTURES)
            raise CheckpointError(
                f"{file.path}: architecture {self.architecture!r} is not supported; supported: {supported}"
            )
        prefix = f"{self.architecture}."
        self._values = {
            key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)
        }

    def refuse_unsupported(self) -> None:
        for key, accepted in NEUTRAL.items():
            value = self._values.get(key)
            if value is not None and value not in accepted:
                raise CheckpointError(f"{self.path}: {self.architecture}.{key} = {value!r} is not supported")

    def get(self, key: str, default: Any = None) -> Any:
        """A value; of one that is given per layer, the one that all layers share."""
        value = self._values.get(key, default)
        if value is None:
            raise CheckpointError(f"{self.path}: the key {self.architecture}.{key} is missing")
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise CheckpointError(f"{self.path}: {self.architecture}.{key} differs between layers: {value}")
            return value[0]
        return value

    def size(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise CheckpointError(f"{self.path}: {self.architecture}.{key} = {value!r} is not a positive whole number")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """A float32 of the file as the shortest decimal that stands for it: 1e-05, not 9.999999747378752e-06."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 3e38:
            raise CheckpointError(f"{self.path}: {self.architecture}.{key} = {value!r} is not a positive number")
        short = (float(f"{value:.{digits}g}") for digits in range(6, 10))
        return next((number for number in short if _same_float32(number, value)), float(value))


def _same_float32(a: float, b: float) -> bool:
    return struct.pack("<f", a) == struct.pack("<f", b)


def _main_dtype(file: GGUFFile) -> str:
    if any(tensor.is_quantised for tensor in file.tensors.values()):
        return "float32"
    sizes = dict.fromkeys(DTYPES, 0)
    for tensor in file.tensors.values():
        sizes[str(tensor.dtype).removeprefix("torch.")] += tensor.num_elements
    return max(sizes, key=sizes.__getitem__)


def _rope_scaling(
    reader: _Reader, rope_factors: torch.Tensor | None, theta: float, head_dim: int
) -> dict[str, Any] | None:
    kind = reader.get("rope.scaling.type", "none")
    factor = reader.real("rope.scaling.factor", reader.real("rope.scale_linear", 1.0))
    if rope_factors is not None:
        if kind != "none":
            raise CheckpointError(f"{reader.path}: has both {ROPE_FACTORS} and rope scaling of type {kind!r}")
        try:
            return llama3_scaling(rope_factors.flatten().tolist(), theta, head_dim)
        except (ValueError, ArithmeticError) as error:
            raise CheckpointError(f"{reader.path}: {ROPE_FACTORS} is not Llama 3's scaling: {error}") from error
    if kind == "none":
        kind = "linear" if factor != 1.0 else "default"
    if kind == "yarn":
        original = reader.size("rope.scaling.original_context_length")
        return {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original}
    if kind not in ("default", "linear"):
        raise CheckpointError(
            f"{reader.path}: {reader.architecture}.rope.scaling.type = {kind!r} is not supported; supported: none, "
            "linear, yarn"
        )
    return {"rope_type": kind, "factor": factor}


def llama3_scaling(factors: Sequence[float], theta: float, head_dim: int) -> dict[str, Any] | None:
    """Parameters of Llama 3's rotary scaling, found from what each frequency is divided by.

    With the factor F, the original context L and the bounds l < h, a frequency of wavelength w is divided by 1 if
    s = (L / w - l) / (h - l) is at least 1, by F if s is at most 0, and otherwise by 1 / ((1 - s) / F + s). All of this
    stays the same when L, l and h grow in proportion, so l = 1, its published value, is chosen. s is a straight line
    over 1 / w: two blended frequencies give L and h. Where only one is blended, h = 4 is taken, as published.

    Args:
        factors: [head_dim / 2], from the highest frequency to the lowest.

    Returns:
        The value of `rope_scaling`; None if nothing is scaled.

    Raises:
        ValueError: no such parameters give these factors to within 1e-5.
    """
    if len(factors) != head_dim // 2:
        raise ValueError(f"{len(factors)} factors for {head_dim // 2} frequencies")
    if not all(map(math.isfinite, factors)):
        raise ValueError(f"a frequency is divided by {next(f for f in factors if not math.isfinite(f))}")
    if all(factor == 1.0 for factor in factors):
        return None
    factor = max(factors)
    rates = [theta ** (-2 * i / head_dim) / (2 * math.pi) for i in range(len(factors))]
    blended = [
        (rate, (1 / divisor - 1 / factor) / (1 - 1 / factor))
        for rate, divisor in zip(rates, factors, strict=True)
        if 1.0 < divisor < factor
    ]
    if not blended:
        raise ValueError("no frequency lies between the scaled and the unscaled ones")
    (first_rate, first), (last_rate, last) = blended[0], blended[-1]
    high = 4.0
    if len(blended) > 1 and first > last and first_rate > last_rate:
        slope = (first - last) / (first_rate - last_rate)
        high = round(1 + 1 / (slope * first_rate - first), 4) if slope * first_rate > first else high
    original = round((1 + first * (high - 1)) / first_rate)
    for rate, divisor in zip(rates, factors, strict=True):
        smooth = min(1.0, max(0.0, (original * rate - 1) / (high - 1)))
        expected = 1 / ((1 - smooth) / factor + smooth)
        if not math.isclose(divisor, expected, rel_tol=1e-5):
            raise ValueError(f"a frequency is divided by {divisor}, where the others ask for {expected}")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
