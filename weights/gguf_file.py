"""A GGUF file: its metadata, and where and how each tensor is stored.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The `gguf` package knows the block formats; its own
reader makes an array of every string, which takes seconds where this takes a tenth of one.
"""

import math
import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from .files import CheckpointError, open_regular

VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
CHUNK_ELEMENTS = 1 << 16
"""Elements dequantised at a time, a multiple of every block size: two to four times faster than a whole tensor in one
call, since all temporaries stay in the cache."""

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class GGUFTensor:
    """How a tensor is stored.

    Attributes:
        kind: GGML's name of the block format, such as `F16` or `Q4_K`.
        shape: outermost dimension first, as torch has it (the file writes it the other way round).
        nbytes: bytes in the file.
        start: position in the file.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    nbytes: int
    start: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        """What `GGUFFile.read` gives: the stored dtype, and float32, which holds every value exactly, for blocks."""
        return _PLAIN.get(self.kind, torch.float32)

    @property
    def is_quantised(self) -> bool:
        return self.kind not in _PLAIN


class GGUFFile:
    """The header of a file, read and checked on construction; the tensors' bytes are read when asked for.

    Attributes:
        metadata: the file's key-value pairs; arrays are lists.
        tensors: by the names in the file, in the file's order.

    Raises:
        CheckpointError: the `gguf` package is missing; the file is none of GGUF, or of another version or byte order,
            or truncated or damaged; a tensor is in a format that cannot be dequantised.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._gguf = _import_gguf(path)
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size < 8:
                raise CheckpointError(f"{path}: is not a GGUF file: it has {size} bytes")
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        with data:
            header = _HeaderReader(path, data)
            self.version = header.version()
            num_tensors, num_pairs = header.number("Q"), header.number("Q")
            self.metadata = header.metadata(num_pairs)
            described = [header.tensor() for _ in range(num_tensors)]
            alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
            if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
                raise CheckpointError(f"{path}: general.alignment {alignment!r} is not a power of two")
            data_start = -(-header.position // alignment) * alignment
        self.tensors: dict[str, GGUFTensor] = {}
        for name, shape, kind, offset in described:
            if name in self.tensors:
                raise CheckpointError(f"{path}: lists tensor {name} twice")
            if offset % alignment:
                raise CheckpointError(f"{path}: tensor {name} begins at {offset}, not a multiple of {alignment}")
            self.tensors[name] = self._checked(name, shape, kind, data_start + offset, size)
        in_order = sorted(self.tensors.values(), key=lambda tensor: (tensor.start, tensor.name))
        for before, after in pairwise(in_order):
            if after.start < before.start + before.nbytes:
                raise CheckpointError(
                    f"{path}: tensor {after.name} begins at byte {after.start}, inside tensor {before.name}, "
                    f"which ends at {before.start + before.nbytes}"
                )

    def _checked(self, name: str, shape: tuple[int, ...], kind_number: int, start: int, size: int) -> GGUFTensor:
        try:
            kind = self._gguf.GGMLQuantizationType(kind_number)
        except ValueError:
            raise CheckpointError(f"{self.path}: tensor {name} has the unknown GGML type {kind_number}") from None
        if not 0 < len(shape) <= MAX_DIMENSIONS or 0 in shape:
            raise CheckpointError(f"{self.path}: tensor {name} has the senseless shape {list(shape)}")
        block_size, block_nbytes = self._gguf.GGML_QUANT_SIZES[kind]
        if shape[-1] % block_size:
            raise CheckpointError(
                f"{self.path}: tensor {name} has rows of {shape[-1]}, not a multiple of {kind.name}'s {block_size}"
            )
        if kind.name not in _PLAIN and not _can_dequantise(self._gguf, kind, block_nbytes):
            raise CheckpointError(
                f"{self.path}: tensor {name} is stored as {kind.name}, which the gguf package cannot dequantise"
            )
        nbytes = math.prod(shape) // block_size * block_nbytes
        if start + nbytes > size:
            raise CheckpointError(f"{self.path}: is truncated: tensor {name} ends at byte {start + nbytes} of {size}")
        return GGUFTensor(name, kind.name, shape, nbytes, start)

    def read(self, tensor: GGUFTensor) -> torch.Tensor:
        """The tensor in its `shape` and `dtype`, in memory of its own."""
        import numpy as np

        with open_regular(self.path) as file:
            file.seek(tensor.start)
            if not tensor.is_quantised:
                stored = np.fromfile(file, np.uint8, tensor.nbytes)
                return torch.from_numpy(stored).view(tensor.dtype).view(tensor.shape)
            kind = self._gguf.GGMLQuantizationType[tensor.kind]
            values = np.empty(tensor.num_elements, np.float32)
            for start in range(0, tensor.num_elements, CHUNK_ELEMENTS):
                chunk = values[start : start + CHUNK_ELEMENTS]
                stored = np.fromfile(file, np.uint8, tensor.nbytes * chunk.size // tensor.num_elements)
                chunk[:] = self._gguf.quants.dequantize(stored.reshape(1, -1), kind)[0]
        return torch.from_numpy(values).view(tensor.shape)


def _import_gguf(path: Path) -> ModuleType:
    try:
        import gguf
        import gguf.quants
    except ImportError as error:
        message = f"{path}: reading GGUF files needs the gguf package: pip install 'ostinato[gguf]'"
        raise CheckpointError(message) from error
    return gguf


def _can_dequantise(gguf: ModuleType, kind: Any, block_nbytes: int) -> bool:
    import numpy as np

    try:
        gguf.quants.dequantize(np.zeros((1, block_nbytes), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


class _HeaderReader:
    """Reads a header front to back; whatever goes past the end of the file is an error."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.position = 0
        self._data = data

    def version(self) -> int:
        if self._data[:4] != b"GGUF":
            raise CheckpointError(f"{self.path}: is not a GGUF file: it begins with {self._data[:4]!r}")
        self.position = 4
        version = int(self.number("I"))
        if version and not version & 0xFFFF:
            raise CheckpointError(f"{self.path}: is a big-endian GGUF file; only little-endian ones can be read")
        if version not in VERSIONS:
            supported = " and ".join(map(str, VERSIONS))
            raise CheckpointError(f"{self.path}: has GGUF version {version}; supported: {supported}")
        return version

    def metadata(self, count: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for _ in range(count):
            key = self.string()
            if key in metadata:
                raise CheckpointError(f"{self.path}: lists the key {key} twice")
            metadata[key] = self._value(key, self.number("I"))
        return metadata

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, number of the GGML type, offset into the data."""
        name = self.string()
        num_dimensions = self.number("I")
        if num_dimensions > MAX_DIMENSIONS:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} has {num_dimensions} dimensions, above {MAX_DIMENSIONS}"
            )
        shape = tuple(self.number("Q") for _ in range(num_dimensions))[::-1]
        return name, shape, self.number("I"), self.number("Q")

    def number(self, form: str) -> Any:
        start = self._advance(struct.calcsize(form))
        return struct.unpack_from(f"<{form}", self._data, start)[0]

    def string(self) -> str:
        length = self.number("Q")
        start = self._advance(length)
        try:
            return self._data[start : start + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path}: has a text at byte {start} that is not UTF-8") from error

    def _value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind != _ARRAY:
            raise CheckpointError(f"{self.path}: {key} has the unknown value type {kind}")
        item, count = self.number("I"), self.number("Q")
        if item == _STRING:
            return list(self._strings(count))
        if item not in _SCALARS:
            raise CheckpointError(f"{self.path}: {key} is an array of the value type {item}, which cannot be read")
        form = _SCALARS[item]
        start = self._advance(count * struct.calcsize(form))
        return list(struct.unpack_from(f"<{count}{form}", self._data, start))

    def _strings(self, count: int) -> Iterator[str]:
        for _ in range(count):
            yield self.string()

    def _advance(self, nbytes: int) -> int:
        """Step over the next bytes; where they start."""
        start, end = self.position, self.position + nbytes
        if end > len(self._data):
            raise CheckpointError(f"{self.path}: is truncated or damaged: its header runs past byte {len(self._data)}")
        self.position = end
        return start
