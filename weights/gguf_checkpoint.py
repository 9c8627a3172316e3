"""A GGUF file as a checkpoint: Hugging Face names and row order, weights dequantised."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from .checkpoint import Checkpoint, TensorInfo, model_config
from .files import CheckpointError
from .gguf_config import ROPE_FACTORS, hf_config
from .gguf_file import GGUFFile, GGUFTensor
from .gguf_tokenizer import gguf_tokenizer
from .tokenizer import Tokenizer

_MODEL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GGUFCheckpoint(Checkpoint):
    """A single `.gguf` file; everything but the weights' bytes is read on construction.

    Unquantised tensors are given as stored, quantised ones in float32, which holds each of their values exactly. So
    `default_dtype` is the stored dtype for an unquantised file and float32 for a quantised one.

    Raises:
        CheckpointError: `GGUFFile`, `hf_config`.
        UnsupportedModelError: `ModelConfig.from_hf`.
    """

    format = "gguf"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = GGUFFile(path)
        factors = self._file.tensors.get(ROPE_FACTORS)
        config = hf_config(self._file, None if factors is None else self._file.read(factors))
        self.config = model_config(config, path)
        self.generation_config: dict[str, Any] = {}
        weights: dict[str, GGUFTensor] = {}
        for tensor in self._file.tensors.values():
            name = hf_name(tensor.name)
            if name in weights:
                raise CheckpointError(f"{path}: {weights[name].name} and {tensor.name} are the same tensor, {name}")
            if tensor.name != ROPE_FACTORS:
                weights[name] = tensor
        self._weights = dict(sorted(weights.items()))
        for tensor in weights.values():
            if (heads := self._interleaved_heads(tensor)) and tensor.shape[0] % (2 * heads):
                raise CheckpointError(
                    f"{path}: {tensor.name} of shape {list(tensor.shape)} does not divide into {heads} heads"
                )

    def tensor_info(self) -> dict[str, TensorInfo]:
        return {
            name: TensorInfo(tensor.dtype, tensor.shape, tensor.num_elements * tensor.dtype.itemsize)
            for name, tensor in self._weights.items()
        }

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each tensor once, in the order in which they lie in the file."""
        for name, tensor in sorted(self._weights.items(), key=lambda item: item[1].start):
            values = self._file.read(tensor)
            if heads := self._interleaved_heads(tensor):
                values = undo_interleaving(values, heads)
            yield name, values

    def load_tokenizer(self) -> Tokenizer | None:
        tokenizer = gguf_tokenizer(self._file.metadata, self.path)
        if tokenizer is not None:
            tokenizer.check_vocabulary(self.config.vocab_size, self.path)
        return tokenizer

    def _interleaved_heads(self, tensor: GGUFTensor) -> int:
        """Heads whose rows the file has in another order than Hugging Face; 0 for other tensors.

        Only the llama architecture turns neighbours of a head; the others turn halves, as Hugging Face does.
        """
        if self.config.architecture != "llama":
            return 0
        kind = tensor.name.split(".")[-2:-1]
        return {"attn_q": self.config.num_heads, "attn_k": self.config.num_kv_heads}.get("".join(kind), 0)


def hf_name(name: str) -> str:
    """The Hugging Face name of a tensor; a name that is not known stays, for the loader to complain of."""
    stem, _, leaf = name.rpartition(".")
    if leaf not in ("weight", "bias"):
        return name
    if stem in _MODEL_NAMES:
        return f"{_MODEL_NAMES[stem]}.{leaf}"
    in_layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if in_layer is None or in_layer[2] not in _LAYER_NAMES:
        return name
    return f"model.layers.{in_layer[1]}.{_LAYER_NAMES[in_layer[2]]}.{leaf}"


def undo_interleaving(values: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Put the rows of a query or key projection, or its bias, back into Hugging Face's order.

    Rotary embedding turns pairs of elements of a head: neighbours (2 i, 2 i + 1) in the llama family of GGUF, and
    (i, i + D / 2) in Hugging Face. The conversion to GGUF moves the rows so that both compute the same.

    Args:
        values: [num_heads * D, ...] with D even.
    """
    half = values.shape[0] // (2 * num_heads)
    return values.view(num_heads, half, 2, -1).transpose(1, 2).reshape(values.shape)
