"""A Hugging Face folder: config.json and one safetensors file, or several with an index.

Headers are read and checked by `safetensors_header`, the tensors' bytes by the library, which maps the files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from .checkpoint import Checkpoint, TensorInfo, model_config
from .files import CheckpointError, list_folder, read_json_object, read_optional, shorten
from .folder_tokenizer import folder_tokenizer
from .safetensors_header import read_header
from .tokenizer import Tokenizer

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

# What GPTQ, AWQ, FP8, compressed-tensors, bitsandbytes and MLX store beside or instead of a plain weight.
QUANTIZED_NAME = re.compile(
    r"\.(qweight|qzeros|scales|biases|g_idx|(weight|input|output|k|v)_scale(_inv|_2)?|(weight|input)_zero_point"
    r"|weight_(packed|shape|g_idx|global_scale)|SCB|absmax|quant_map|nested_\w+|quant_state\.\w+)$"
)

ONE_OF_SEVERAL = re.compile(r"-\d+-of-(\d+)\.safetensors$")
"""A shard's name, with the number of shards."""

QUANTIZED_FILES = frozenset({"quantize_config.json", "quant_config.json", "hf_quant_config.json"})
"""Where GPTQ, AWQ and ModelOpt wrote what is now `quantization_config`."""

# Mapped pages count as resident, so the map is dropped and made anew after this much has been read.
MAP_BYTES = 16 * 2**20


class SafetensorsCheckpoint(Checkpoint):
    """A folder with config.json and safetensors weights; everything but the weights' bytes is read on construction.

    Nothing in the folder is executed: code, `auto_map` and pickled files are passed over.
    """

    format = "safetensors"

    def __init__(self, path: Path) -> None:
        self.path = path
        names = list_folder(path)
        config = read_json_object(path / "config.json")
        _refuse_quantized(path, config, names)
        self.config = model_config(config, path / "config.json")
        self.generation_config = read_optional(path, "generation_config.json", names)
        self._files = _read_files(path, names)
        merged = {name: info for stored in self._files.values() for name, info in stored.items()}
        self._tensor_info = dict(sorted(merged.items()))

    def tensor_info(self) -> dict[str, TensorInfo]:
        return dict(self._tensor_info)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each tensor once, file by file, in the order of their bytes, as a view of the map.

        At most MAP_BYTES or one tensor, whichever is larger, of the file is resident at a time.
        """
        for file, stored in self._files.items():
            for names in _runs(stored):
                try:
                    opened: Any = safe_open(file, framework="pt")
                except (SafetensorError, OSError) as error:
                    raise CheckpointError(f"{file}: cannot be read any more: {error}") from error
                with opened:
                    for name in names:
                        yield name, opened.get_tensor(name)

    def load_tokenizer(self) -> Tokenizer | None:
        return folder_tokenizer(self.path, self.config.vocab_size)


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


def _refuse_quantized(folder: Path, config: Mapping[str, Any], names: Set[str]) -> None:
    for key in ("quantization_config", "compression_config", "quantization"):
        quantization = config.get(key)
        if quantization is None:
            continue
        method = quantization.get("quant_method", "unnamed") if isinstance(quantization, dict) else quantization
        raise CheckpointError(
            f"{folder / 'config.json'}: {key} asks for the method {method!r}; quantised checkpoints are not supported, "
            f"only plain {', '.join(DTYPES)} weights"
        )
    for name in sorted(names & QUANTIZED_FILES):
        raise CheckpointError(f"{folder / name}: belongs to a quantised checkpoint; these are not supported")


def _read_files(folder: Path, names: Set[str]) -> dict[Path, dict[str, TensorInfo]]:
    """Headers of all files of the checkpoint, checked against the index and against each other.

    There must be one set of weights and nothing beside it: engines do not agree on which of two wins. An index of files
    that are all gone is passed over if there is `model.safetensors`; saving over a larger model leaves one.
    """
    if "adapter_config.json" in names:
        raise CheckpointError(
            f"{folder}: adapter_config.json says that an adapter (LoRA) belongs to the weights; merge it first"
        )
    files = {name for name in names if name.endswith(".safetensors") and not name.startswith((".", "consolidated"))}
    weight_map = _read_weight_map(folder / INDEX_FILE) if INDEX_FILE in names else {}
    shards = set(weight_map.values())
    if SINGLE_FILE in files and not shards & files:
        weight_map, shards = {}, {SINGLE_FILE}
    absent = sorted(shards - files)
    if absent:
        raise CheckpointError(
            f"{folder}: {INDEX_FILE} names files that are not there, so the download or copy is incomplete: "
            f"{shorten(absent)}"
        )
    if not files:
        raise CheckpointError(f"{folder}: holds no .safetensors file{_other_weights(names)}")
    if not shards and len(files) > 1:
        listed = shorten(sorted(files))
        raise CheckpointError(f"{folder}: holds several safetensors files but no {INDEX_FILE}: {listed}")
    lone = ONE_OF_SEVERAL.search(next(iter(files)))
    if not shards and lone is not None and int(lone[1]) > 1:
        raise CheckpointError(f"{folder}: holds {lone.string} without the other shards and {INDEX_FILE}")
    stray = sorted(files - (shards or files))
    if stray:
        wanted = f"the files that {INDEX_FILE} names" if weight_map else SINGLE_FILE
        raise CheckpointError(
            f"{folder}: holds {shorten(stray)} beside {wanted}; two sets of weights, or a leftover: "
            "take away what does not belong to the model"
        )
    headers = {file: _read_tensors(folder / file) for file in sorted(files)}
    if weight_map:
        _check_index(folder, weight_map, headers)
    return {folder / file: stored for file, stored in headers.items()}


def _other_weights(names: Set[str]) -> str:
    pickled = sorted(name for name in names if name.endswith((".bin", ".pt", ".pth")))
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


def _check_index(folder: Path, weight_map: Mapping[str, str], headers: Mapping[str, Mapping[str, TensorInfo]]) -> None:
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


def _read_tensors(file: Path) -> dict[str, TensorInfo]:
    """Dtypes and shapes of one file, in the order of the bytes; refuses what is damaged, quantised or no weight."""
    stored = read_header(file)
    quantized = [name for name in stored if QUANTIZED_NAME.search(name)]
    if quantized:
        raise CheckpointError(f"{file}: holds tensors of a quantised checkpoint, not supported: {shorten(quantized)}")
    unloadable = [f"{name} is {tensor.dtype}" for name, tensor in stored.items() if tensor.dtype not in DTYPES]
    if unloadable:
        raise CheckpointError(f"{file}: only {', '.join(DTYPES)} weights can be loaded: {shorten(unloadable)}")
    return {
        name: TensorInfo(DTYPES[tensor.dtype], tensor.shape, tensor.end - tensor.start)
        for name, tensor in stored.items()
    }
