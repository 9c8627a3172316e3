"""Headers of safetensors files: what the library writes is read, what does not describe its file is refused by name."""

import json
import math
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save, save_file

from ostinato.weights import CheckpointError
from ostinato.weights.safetensors_header import ITEM_BYTES, MAX_HEADER_BYTES, StoredTensor, read_header

A, B = torch.arange(6.0).view(2, 3), torch.ones(3, dtype=torch.bfloat16)
WHOLE = save({"a": A, "b": B})


def entry(start: int = 0, end: int = 4, **changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [1], "data_offsets": [start, end], **changes}


def write(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    """`header` is written as it is if it is text, else as JSON; `length` replaces what the file says of it."""
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    file = path / "a.safetensors"
    file.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return file


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (2, 3, 4)], ids=str)
def test_what_the_library_writes(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensors = {"x": torch.zeros(shape).to(dtype), "a": A, "b": B}
    save_file(tensors, tmp_path / "a.safetensors", metadata={"format": "pt"})
    stored = read_header(tmp_path / "a.safetensors")
    assert {name: tensor.shape for name, tensor in stored.items()} == {n: tuple(t.shape) for n, t in tensors.items()}
    assert {name: tensor.end - tensor.start for name, tensor in stored.items()} == {
        name: tensor.nbytes for name, tensor in tensors.items()
    }


def test_file_with_metadata_and_no_tensors(tmp_path: Path) -> None:
    """B04: that is a whole file, of nothing."""
    save_file({}, tmp_path / "a.safetensors", metadata={"format": "pt"})
    assert read_header(tmp_path / "a.safetensors") == {}


def test_padded_header(tmp_path: Path) -> None:
    file = write(tmp_path, json.dumps({"a": entry()}) + " " * 9, b"1234")
    assert read_header(file) == {"a": StoredTensor("F32", (1,), 0, 4)}


@settings(max_examples=60, derandomize=True)
@given(size=st.integers(0, len(WHOLE) + 64).filter(lambda size: size != len(WHOLE)))
def test_any_other_size_is_refused(tmp_path_factory: pytest.TempPathFactory, size: int) -> None:
    """B04: 8 + header length + largest end == file size; a zero-byte file is the extreme."""
    file = tmp_path_factory.getbasetemp() / "cut.safetensors"
    file.write_bytes(WHOLE[:size].ljust(size, b"\0"))
    with pytest.raises(CheckpointError, match=rf"cut\.safetensors: is truncated or .* \({size} bytes\): "):
        read_header(file)


TWICE = '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "a": {"dtype": "F16", "shape": [2]}}'
BAD: dict[str, tuple[Any, bytes, int | None, str]] = {
    "length-beyond-file": ("{}", b"", 2**40, f"its header would have {2**40} bytes, and 2 are left"),
    "largest-length": ("{}", b"", 2**64 - 1, f"its header would have {2**64 - 1} bytes, and 2 are left"),
    "no-json": ("not json", b"", None, "its header: is not valid JSON"),
    "cut-json": ('{"a": {"dtype"', b"", None, "its header: is not valid JSON"),
    "list": ("[1]", b"", None, "its header: must hold a JSON object, not list"),
    "deep": ('{"a": ' + "[" * 5000 + "]" * 5000 + "}", b"", None, "its header: .* nests deeper than 64"),
    "name-twice": (TWICE, b"1234", None, "its header: gives 'a' twice"),
    "metadata-list": ({"__metadata__": [1]}, b"", None, r"__metadata__ must map names to texts, not \[1\]"),
    "metadata-number": ({"__metadata__": {"a": 1}}, b"", None, "__metadata__ must map names to texts"),
    "no-shape": ({"a": {"dtype": "F32", "data_offsets": [0, 4]}}, b"1234", None, "tensor a is not described by"),
    "entry-is-a-number": ({"a": 4}, b"1234", None, "tensor a is not described by .* but as 4"),
    "dtype-is-a-number": ({"a": entry(dtype=3)}, b"1234", None, "tensor a has the dtype 3"),
    "negative": ({"a": entry(shape=[-1])}, b"1234", None, r"tensor a has the shape \[-1\]"),
    "fraction": ({"a": entry(shape=[1.0])}, b"1234", None, r"tensor a has the shape \[1\.0\]"),
    "truth-value": ({"a": entry(shape=[True])}, b"1234", None, r"tensor a has the shape \[True\]"),
    "huge-size": ({"a": entry(shape=[2**63])}, b"1234", None, f"tensor a has the shape .*{2**63}"),
    "overflow": ({"a": entry(shape=[2**33, 2**33])}, b"1234", None, f"takes {2**68} bytes, but .* hold 4"),
    "many-dimensions": ({"a": entry(shape=[1] * 9)}, b"1234", None, "tensor a has the shape .* not up to 8 sizes"),
    "offsets-reversed": ({"a": entry(4, 0)}, b"1234", None, r"tensor a has the data_offsets \[4, 0\]"),
    "one-offset": ({"a": entry(data_offsets=[4])}, b"1234", None, r"tensor a has the data_offsets \[4\]"),
    "too-many-bytes": ({"a": entry(0, 8)}, b"8 bytes.", None, r"tensor a: F32 .* takes 4 bytes, .*\[0, 8\] hold 8"),
    "beyond-the-end": ({"a": entry(), "b": entry(4, 8)}, b"1234", None, "tensor b ends at byte 8 .*, which has 4"),
    "far-beyond": ({"a": entry(2**62, 2**62 + 4)}, b"1234", None, f"tensor a ends at byte {2**62 + 4}"),
    "hole": ({"a": entry(4, 8)}, b"8 bytes.", None, "bytes 0 to 4 of the data, between the header and a, belong"),
    "overlap": ({"a": entry(), "b": entry(2, 6)}, b"123456", None, "tensor b begins at byte 2 .* inside a"),
    "same-bytes": ({"a": entry(), "b": entry()}, b"1234", None, "tensor b begins at byte 0 .* inside a"),
    "rest": ({"a": entry()}, b"12345", None, "1 bytes after a belong to no tensor"),
    "gguf": ("", b"GGUF" * 20, int.from_bytes(b"GGUFGGUF", "little"), "its header would have"),
}


@pytest.mark.parametrize(("header", "data", "length", "complaint"), BAD.values(), ids=BAD)
def test_malformed_header(tmp_path: Path, header: Any, data: bytes, length: int | None, complaint: str) -> None:
    """B04: a header that does not describe its file. What the library refuses we refuse, and say which tensor it is."""
    with pytest.raises(CheckpointError, match=rf"a\.safetensors: .*{complaint}"):
        read_header(write(tmp_path, header, data, length))


def test_git_lfs_pointer(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(CheckpointError, match=r"Git LFS pointer.*git lfs pull"):
        read_header(tmp_path / "a.safetensors")


def test_a_header_above_the_limit_is_not_read(tmp_path: Path) -> None:
    with open(tmp_path / "a.safetensors", "wb") as file:
        file.write(struct.pack("<Q", 10**10))
        file.truncate(10**11)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=f"would have {10**10} bytes, above the limit of {MAX_HEADER_BYTES}"):
        read_header(tmp_path / "a.safetensors")
    assert tracemalloc.get_traced_memory()[1] < 10**6
    tracemalloc.stop()


def test_a_name_is_shown_on_one_line(tmp_path: Path) -> None:
    name = "a\n\x1b[2J" + "x" * 10**5
    with pytest.raises(CheckpointError) as caught:
        read_header(write(tmp_path, {name: entry(shape=[-1])}, b"1234"))
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 3000


def test_bytes_of_an_element() -> None:
    sizes = {"F64": torch.float64, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "U8": torch.uint8}
    assert all(ITEM_BYTES[name] == dtype.itemsize for name, dtype in sizes.items())


@settings(max_examples=150, derandomize=True, deadline=None)
@given(data=st.data())
def test_what_we_accept_the_library_accepts(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """B04: a change anywhere in a sound file is refused, or both read the same."""
    content = bytearray(WHOLE)
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    file = tmp_path_factory.getbasetemp() / "changed.safetensors"
    file.write_bytes(content)
    try:
        stored = read_header(file)
    except CheckpointError:
        return
    unknown = {tensor.dtype for tensor in stored.values()} - ITEM_BYTES.keys()
    if not unknown:
        with safe_open(file, framework="pt") as opened:
            assert set(opened.keys()) == set(stored)
            for name, tensor in stored.items():
                assert tuple(opened.get_slice(name).get_shape()) == tensor.shape
                assert math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype] == tensor.end - tensor.start
