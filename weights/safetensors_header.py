"""The header of a safetensors file, checked as a whole against itself and the size of the file.

Format: https://huggingface.co/docs/safetensors. 8 bytes of header length, the header (a JSON object that gives dtype,
shape and the range of bytes of every tensor), the tensors' bytes. Here every byte after the header belongs to exactly
one tensor, as in the library; but the library does not say which tensor is at fault, and lets a name be given twice.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .files import IS_LFS_POINTER, LFS_POINTER, CheckpointError, open_regular, parse_json_object

MAX_HEADER_BYTES = 100_000_000
"""The library's own limit."""

MAX_DIMENSIONS = 8
MAX_SIZE = 2**63 - 1

ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
"""Bytes of an element; of other dtypes the sizes are not checked, as they cannot be loaded."""


@dataclass(frozen=True)
class StoredTensor:
    """What a header says of a tensor: `start` and `end` count from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Every tensor of a file, in the order of their bytes.

    No more is read than the header, and no more than the file has.

    Raises:
        CheckpointError: no regular file, or a header that does not describe it. The message has the tensor, what is
            said of it and what would be right.
    """
    with open_regular(file) as opened:
        size = os.fstat(opened.fileno()).st_size
        try:
            length = _header_length(opened.read(8), size)
            header = opened.read(length)
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise CheckpointError(f"{file}: is truncated or not a safetensors file ({size} bytes): {error}") from error
    described = parse_json_object(header, f"{file}: its header")
    metadata = described.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{file}: __metadata__ must map names to texts, not {metadata!r}")
    try:
        tensors = {name: _tensor(name, entry) for name, entry in described.items()}
        tensors = dict(sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end, item[0])))
        _check_tiling(tensors, size - 8 - length)
    except ValueError as error:
        raise CheckpointError(f"{file}: is truncated or damaged ({size} bytes): {error}") from error
    return tensors


def _header_length(prefix: bytes, size: int) -> int:
    if len(prefix) < 8:
        raise ValueError("the length of the header alone takes 8")
    if prefix == LFS_POINTER[:8]:
        raise ValueError(IS_LFS_POINTER)
    length: int = struct.unpack("<Q", prefix)[0]
    if length > size - 8:
        raise ValueError(f"its header would have {length} bytes, and {size - 8} are left")
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"its header would have {length} bytes, above the limit of {MAX_HEADER_BYTES}")
    return length


def _tensor(name: str, entry: Any) -> StoredTensor:
    if not isinstance(entry, Mapping) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise ValueError(f"tensor {name} is not described by dtype, shape and data_offsets, but as {entry!r}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str):
        raise ValueError(f"tensor {name} has the dtype {dtype!r}, which is no name")
    if not _are_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        raise ValueError(
            f"tensor {name} has the shape {shape!r}: not up to {MAX_DIMENSIONS} sizes from 0 to {MAX_SIZE}"
        )
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"tensor {name} has the data_offsets {offsets!r}: not a first byte and a last one after it")
    start, end = offsets
    nbytes = math.prod(shape) * ITEM_BYTES.get(dtype, 0)
    if dtype in ITEM_BYTES and nbytes != end - start:
        raise ValueError(
            f"tensor {name}: {dtype} of shape {shape} takes {nbytes} bytes, but data_offsets {offsets} "
            f"hold {end - start}"
        )
    return StoredTensor(dtype, tuple(shape), start, end)


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size <= MAX_SIZE for size in value)


def _check_tiling(tensors: Mapping[str, StoredTensor], nbytes: int) -> None:
    position, before = 0, "the header"
    for name, tensor in tensors.items():
        if tensor.end > nbytes:
            raise ValueError(f"tensor {name} ends at byte {tensor.end} of the data, which has {nbytes}")
        if tensor.start < position:
            raise ValueError(f"tensor {name} begins at byte {tensor.start} of the data, inside {before}")
        if tensor.start > position:
            raise ValueError(
                f"bytes {position} to {tensor.start} of the data, between {before} and {name}, belong to no tensor"
            )
        position, before = tensor.end, name
    if position != nbytes:
        raise ValueError(f"{nbytes - position} bytes after {before} belong to no tensor")
