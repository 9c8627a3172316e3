"""A Hugging Face folder: config.json and one safetensors file, or several with an index.

File format: https://huggingface.co/docs/safetensors. The library itself checks on opening that a file is whole
(8 + header length + largest end offset == file size) and that its header leaves no hole and no overlap.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..model.config import ModelConfig
from .checkpoint import Checkpoint, CheckpointError, TensorInfo, read_json_object, shorten
from .tokenizer import Tokenizer

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

# What GPTQ, AWQ, FP8, compressed-tensors, bitsandbytes and MLX store beside or instead of a plain weight.
QUANTIZED_NAME = re.compile(
    r"\.(qweight|qzeros|scales|biases|g_idx|(weight|input|output|k|v)_scale(_inv|_2)?|(weight|input)_zero_point"
    r"|weight_(packed|shape|g_idx|global_scale)|SCB|absmax|quant_map|nested_\w+|quant_state\.\w+)$"
)

# Mapped pages count as resident, so the map is dropped and made anew after this much has been read.
MAP_BYTES = 16 * 2**20


class SafetensorsCheckpoint(Checkpoint):
    """A folder with config.json and safetensors weights; everything but the weights' bytes is read on construction."""

    format = "safetensors"

    def __init__(self, path: Path) -> None:
        self.path = path
        config = read_json_object(path / "config.json")
        _refuse_quantized(path / "config.json", config)
        self.config = ModelConfig.from_hf(config)
        generation_config = path / "generation_config.json"
        self.generation_config = read_json_object(generation_config) if generation_config.is_file() else {}
        self._files = _read_files(path)
        merged = {name: info for stored in self._files.values() for name, info in stored.items()}
        self._tensor_info = dict(sorted(merged.items()))

    def tensor_info(self) -> dict[str, TensorInfo]:
        return dict(self._tensor_info)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each tensor once, file by file, by name (the order in which the library writes), as a view of the map.

        At most MAP_BYTES or one tensor, whichever is larger, of the file is resident at a time.
        """
        for file, stored in self._files.items():
            for names in _runs(stored):
                with safe_open(file, framework="pt") as opened:
                    for name in names:
                        yield name, opened.get_tensor(name)

    def load_tokenizer(self) -> Tokenizer | None:
        return Tokenizer.from_folder(self.path)


def _runs(stored: dict[str, TensorInfo]) -> Iterator[list[str]]:
    """Cut the names into runs of at most MAP_BYTES; a larger tensor is a run of its own."""
    run: list[str] = []
    nbytes = 0
    for name, info in stored.items():
        if run and nbytes + info.nbytes > MAP_BYTES:
            yield run
            run, nbytes = [], 0
        run.append(name)
        nbytes += info.nbytes
    if run:
        yield run


def _refuse_quantized(path: Path, config: dict[str, Any]) -> None:
    for key in ("quantization_config", "compression_config"):
        quantization = config.get(key)
        if quantization is None:
            continue
        method = quantization.get("quant_method", "unnamed") if isinstance(quantization, dict) else quantization
        raise CheckpointError(
            f"{path}: {key} asks for the method {method!r}; quantised checkpoints are not supported, "
            f"only plain {', '.join(DTYPES)} weights"
        )


def _read_files(folder: Path) -> dict[Path, dict[str, TensorInfo]]:
    """Headers of all files of the checkpoint, checked against the index and against each other.

    As in transformers, `model.safetensors` wins over an index that does not name it.
    """
    files = sorted(file for file in folder.glob("*.safetensors") if file.is_file())
    has_index = (folder / INDEX_FILE).is_file()
    if has_index:
        weight_map = _read_weight_map(folder / INDEX_FILE)
        if not (folder / SINGLE_FILE).is_file() or SINGLE_FILE in weight_map.values():
            return _read_shards(folder, weight_map)
    if (folder / SINGLE_FILE).is_file():
        files = [folder / SINGLE_FILE]
    if not files:
        raise CheckpointError(f"{folder}: holds no .safetensors file{_other_weights(folder)}")
    if len(files) > 1:
        names = shorten([file.name for file in files])
        raise CheckpointError(f"{folder}: holds several safetensors files but no {INDEX_FILE}: {names}")
    return {files[0]: _read_header(files[0])}


def _other_weights(folder: Path) -> str:
    pickled = sorted(file.name for suffix in ("bin", "pt", "pth") for file in folder.glob(f"*.{suffix}"))
    if not pickled:
        return ""
    return f", only pickled weights, which are not read ({shorten(pickled, 3)}): convert them to safetensors"


def _read_weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: has no weight_map object that names any tensor")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file.endswith(".safetensors") or Path(file).name != file:
            raise CheckpointError(f"{index}: assigns {name} to {file!r}, which is not a .safetensors file beside it")
    return weight_map


def _read_shards(folder: Path, weight_map: dict[str, str]) -> dict[Path, dict[str, TensorInfo]]:
    shards = sorted(set(weight_map.values()))
    absent = [shard for shard in shards if not (folder / shard).is_file()]
    if absent:
        raise CheckpointError(
            f"{folder}: {INDEX_FILE} names files that are not there, so the download or copy is incomplete: "
            f"{shorten(absent)}"
        )
    headers = {shard: _read_header(folder / shard) for shard in shards}
    faults = [
        f"{name} is assigned to {shard}, which lacks it"
        for name, shard in weight_map.items()
        if name not in headers[shard]
    ]
    for shard, stored in headers.items():
        for name in stored:
            assigned = weight_map.get(name)
            if assigned is None:
                faults.append(f"{name} in {shard} is not in the index")
            elif assigned != shard:
                faults.append(f"{name} is stored in {shard} too, though assigned to {assigned}")
    if faults:
        raise CheckpointError(f"{folder}: {INDEX_FILE} and its files disagree: {shorten(faults)}")
    return {folder / shard: stored for shard, stored in headers.items()}


def _read_header(file: Path) -> dict[str, TensorInfo]:
    """Names, dtypes and shapes of one file by name; refuses what is damaged or quantised."""
    info: dict[str, TensorInfo] = {}
    quantized, unloadable = [], []
    try:
        with safe_open(file, framework="pt") as opened:
            names = opened.keys()
            for name in names:
                view = opened.get_slice(name)
                shape = tuple(view.get_shape())
                dtype = DTYPES.get(view.get_dtype())
                if QUANTIZED_NAME.search(name):
                    quantized.append(name)
                elif dtype is None:
                    unloadable.append(f"{name} is {view.get_dtype()}")
                else:
                    info[name] = TensorInfo(dtype, shape, math.prod(shape) * dtype.itemsize)
    except (SafetensorError, OSError) as error:
        size = file.stat().st_size
        raise CheckpointError(f"{file}: is truncated or not a safetensors file ({size} bytes): {error}") from error
    if quantized:
        raise CheckpointError(f"{file}: holds tensors of a quantised checkpoint, not supported: {shorten(quantized)}")
    if unloadable:
        raise CheckpointError(f"{file}: only {', '.join(DTYPES)} weights can be loaded: {shorten(unloadable)}")
    return info
