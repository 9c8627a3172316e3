"""A tiny model on disk, for the tests of loading, and circumstances in which files cannot be read."""

import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ostinato.model import ModelConfig
from ostinato.weights.names import name_table


@pytest.fixture(scope="session")
def tiny_config() -> Callable[..., dict[str, Any]]:
    """`tiny_config(**changes)`: contents of a config.json; a change to `...` leaves the key out."""

    def make(**changes: Any) -> dict[str, Any]:
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": 40,
            "hidden_size": 12,
            "intermediate_size": 20,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 6,
            "max_position_embeddings": 64,
            "tie_word_embeddings": False,
            **changes,
        }
        return {key: value for key, value in config.items() if value is not ...}

    return make


@pytest.fixture(scope="session")
def tiny_tensors() -> Callable[..., dict[str, torch.Tensor]]:
    """`tiny_tensors(config, dtype)`: every tensor that the config asks for, under its stored name, no two alike."""

    def make(config: dict[str, Any], dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        table = name_table(ModelConfig.from_hf({key: v for key, v in config.items() if key != "quantization_config"}))
        return {name: torch.randn(rows.shape, generator=generator).to(dtype) for name, rows in table.items()}

    return make


@pytest.fixture(scope="session")
def write_folder() -> Callable[..., Path]:
    """`write_folder(path, config, tensors)`: a Hugging Face folder.

    `tensors` is one dict for a single file, or dicts by file name, for which an index is written; `weight_map` replaces
    what the index says.
    """

    def write(
        path: Path,
        config: Mapping[str, Any],
        tensors: Mapping[str, Any],
        weight_map: Mapping[str, Any] | None = None,
    ) -> Path:
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps(config))
        shards: Any = {"model.safetensors": tensors}
        if any(isinstance(value, dict) for value in tensors.values()):
            shards = tensors
            if weight_map is None:
                weight_map = {name: file for file, stored in shards.items() for name in stored}
        if weight_map is not None:
            (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        for file, stored in shards.items():
            save_file(stored, path / file)
        return path

    return write


@pytest.fixture
def no_hang() -> Iterator[None]:
    """What waits for ever, such as for a pipe's other end, fails after 20 seconds."""

    def give_up(*_: object) -> None:
        raise TimeoutError("the test hangs")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def unprivileged() -> Iterator[Path]:
    """An empty folder, and no more rights in it than its mode gives: root, as which CI runs, may read everything."""
    import ostinato.weights.safetensors_checkpoint  # noqa: F401 (what is imported later may not be readable)

    folder = Path(tempfile.mkdtemp())  # not `tmp_path`, which other users cannot reach
    is_root = os.geteuid() == 0
    if is_root:
        os.chown(folder, 65534, 65534)
        os.seteuid(65534)
    try:
        yield folder
    finally:
        if is_root:
            os.seteuid(0)
        folder.chmod(0o700)
        shutil.rmtree(folder)
