"""What the loader needs to know of a checkpoint, whatever its file format."""

from __future__ import annotations

import stat
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..model.config import ModelConfig, UnsupportedModelError
from .files import CheckpointError, one_line, shorten

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

__all__ = ["Checkpoint", "CheckpointError", "TensorInfo", "model_config", "open_checkpoint", "shorten"]


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


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a Hugging Face folder with safetensors weights, or a single `.gguf` file.

    Raises:
        CheckpointError: nothing there, or something that is not a sound checkpoint.
        UnsupportedModelError: the config asks for what the model folder cannot do.
    """
    path = Path(path)
    try:
        mode = path.stat().st_mode
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file or folder") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {getattr(error, 'strerror', error)}") from error
    if stat.S_ISDIR(mode):
        from .safetensors_checkpoint import SafetensorsCheckpoint

        return SafetensorsCheckpoint(path)
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"{path}: is neither a folder nor a regular file")
    if path.suffix != ".gguf":
        raise CheckpointError(f"{path}: expected a folder with config.json and safetensors, or a .gguf file")
    from .gguf_checkpoint import GGUFCheckpoint

    return GGUFCheckpoint(path)


def model_config(config: Mapping[str, Any], source: Path) -> ModelConfig:
    """`ModelConfig.from_hf`, with the file in front of what it complains of."""
    try:
        return ModelConfig.from_hf(config)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(one_line(f"{source}: {error}")) from error
