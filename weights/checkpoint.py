"""What the loader needs to know of a checkpoint, whatever its file format."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..model.config import ModelConfig

if TYPE_CHECKING:
    from .tokenizer import Tokenizer


class CheckpointError(ValueError):
    """A checkpoint that is damaged, incomplete, of a kind that is not supported, or not what its config says."""


@dataclass(frozen=True)
class TensorInfo:
    """What a header tells about a stored tensor.

    `dtype` is that of the tensor that `Checkpoint.tensors` yields, `nbytes` its size in that dtype.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int


class Checkpoint(ABC):
    """A model on disk: its configuration, what its headers promise, and its tensors one by one.

    Opening a checkpoint reads headers only and raises CheckpointError if they do not agree with each other.
    """

    path: Path
    format: str
    config: ModelConfig
    generation_config: dict[str, Any]

    @abstractmethod
    def tensor_info(self) -> dict[str, TensorInfo]:
        """Every stored tensor under its Hugging Face name, in the order of the names."""

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each stored tensor once, on the CPU, under its Hugging Face name.

        A tensor is only valid until the next one is asked for; keeping it keeps its memory.
        """

    @abstractmethod
    def load_tokenizer(self) -> Tokenizer | None:
        """The tokenizer that lies beside the weights; None if there is none."""

    @property
    def default_dtype(self) -> torch.dtype:
        """The dtype to load in when the caller names none.

        What the config names; else the dtype of the first tensor by name, which is the output head or the embedding:
        the order in the file would give the float32 norms of a half-precision checkpoint.
        """
        if self.config.dtype is not None:
            return self.config.dtype
        for info in self.tensor_info().values():
            return info.dtype
        raise CheckpointError(f"{self.path}: holds no tensors and its config names no dtype")


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a Hugging Face folder with safetensors weights, or a single `.gguf` file.

    Raises:
        CheckpointError: nothing there, or something that is not a sound checkpoint.
        UnsupportedModelError: the config asks for what the model folder cannot do.
    """
    if path.is_dir():
        from .safetensors_checkpoint import SafetensorsCheckpoint

        return SafetensorsCheckpoint(path)
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file or folder")
    if path.suffix != ".gguf":
        raise CheckpointError(f"{path}: expected a folder with config.json and safetensors, or a .gguf file")
    from .gguf_checkpoint import GGUFCheckpoint

    return GGUFCheckpoint(path)


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that must hold an object; CheckpointError names the file otherwise."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, not {type(value).__name__}")
    return value


def shorten(items: Sequence[str], limit: int = 12) -> str:
    """The items as one line of an error message, which says how many it leaves out."""
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more
