"""What all checkpoints share: opening, and the dtype to load in."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato.model import ModelConfig
from ostinato.weights import Checkpoint, CheckpointError, TensorInfo, open_checkpoint


class Headers(Checkpoint):
    """A checkpoint that is all headers."""

    def __init__(self, config: ModelConfig, dtypes: dict[str, torch.dtype]) -> None:
        self.path, self.format, self.config, self.generation_config = Path("toy"), "toy", config, {}
        self._info = {name: TensorInfo(dtype, (1,), dtype.itemsize) for name, dtype in dtypes.items()}

    def tensor_info(self) -> dict[str, TensorInfo]:
        return self._info

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        raise AssertionError("headers suffice")

    def load_tokenizer(self) -> None:
        return None


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"torch_dtype": "float16"}, torch.float16),
        ({"dtype": "bfloat16", "torch_dtype": "float32"}, torch.bfloat16),
        ({"dtype": None, "torch_dtype": "bfloat16"}, torch.bfloat16),
        ({"dtype": "auto"}, torch.float16),
        ({"dtype": None, "torch_dtype": None}, torch.float16),
        ({}, torch.float16),
    ],
    ids=["dtype", "torch_dtype", "both", "null-dtype", "auto", "null", "neither"],
)
def test_default_dtype(tiny_config: Callable[..., dict[str, Any]], keys: dict[str, Any], expected: torch.dtype) -> None:
    """B13: `dtype` beats `torch_dtype`; nothing given is the dtype of the first tensor, not that of float32 norms."""
    stored = {"lm_head.weight": torch.float16, "model.layers.0.input_layernorm.weight": torch.float32}
    assert Headers(ModelConfig.from_hf(tiny_config(**keys)), stored).default_dtype == expected


def test_default_dtype_of_nothing(tiny_config: Callable[..., dict[str, Any]]) -> None:
    with pytest.raises(CheckpointError, match="toy: holds no tensors"):
        _ = Headers(ModelConfig.from_hf(tiny_config()), {}).default_dtype


def test_open_what_is_not_there(tmp_path: Path) -> None:
    for absent in (tmp_path / "absent", str(tmp_path / "absent")):
        with pytest.raises(CheckpointError, match="absent: no such file or folder"):
            open_checkpoint(absent)


def test_open_another_kind_of_file(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"model\.bin: expected a folder .* or a \.gguf file"):
        open_checkpoint(tmp_path / "model.bin")
