"""The small files of a checkpoint, read with care: they come from anywhere.

Only regular files of a sensible size are read (a pipe would never end, `/dev/zero` neither), JSON must be one object
that is not nested without end and says nothing twice, and whatever is wrong is a CheckpointError of one line.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Sequence, Set
from io import FileIO
from pathlib import Path
from typing import Any

MAX_FILE_BYTES = 256 * 2**20
"""Several times the largest tokenizer.json there is."""

MAX_DEPTH = 64
"""Levels of arrays and objects in a JSON file; a tokenizer.json has a dozen."""

LFS_POINTER = b"version https://git-lfs.github.com/"
IS_LFS_POINTER = "it is a Git LFS pointer, the file itself has not been fetched (`git lfs pull`)"

MAX_MESSAGE = 2000
"""Characters of an error message. A name in a hostile file may have a hundred million."""


class CheckpointError(ValueError):
    """A checkpoint that is damaged, incomplete, of a kind that is not supported, or not what its config says.

    The message is one line that can be shown on a terminal, whatever the names in the file are.
    """

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


def one_line(text: str) -> str:
    """The text with control characters spelled out, and without its middle if it is very long."""
    if len(text) > MAX_MESSAGE:
        text = f"{text[: MAX_MESSAGE - 500]} … {text[-500:]}"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else " " if c == "\n" else repr(c)[1:-1] for c in text)


def shorten(items: Sequence[str], limit: int = 12) -> str:
    """The items as one line of an error message, which says how many it leaves out."""
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more


def list_folder(folder: Path) -> frozenset[str]:
    """Names of what is in a folder, links that lead nowhere and files that may not be read included."""
    try:
        return frozenset(os.listdir(folder))
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read: {_reason(folder, error)}") from error


def open_regular(path: Path) -> FileIO:
    """Open a regular file for reading; CheckpointError for anything else, without waiting for a pipe's other end."""
    try:
        file = open(path, "rb", buffering=0, opener=_open_at_once)  # noqa: SIM115 (closed by the caller)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {_reason(path, error)}") from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise CheckpointError(f"{path}: cannot be read: it is not a regular file")
    return file


def read_file(path: Path, limit: int = MAX_FILE_BYTES) -> bytes:
    """All of a file of at most `limit` bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise CheckpointError(f"{path}: has {size} bytes, above the limit of {limit}")
        try:
            data = file.read(size)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {_reason(path, error)}") from error
    if data.startswith(LFS_POINTER):
        raise CheckpointError(f"{path}: {IS_LFS_POINTER}")
    return data


def read_text(path: Path) -> str:
    """All of a UTF-8 file."""
    try:
        return read_file(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: is not UTF-8 text: {error.reason} at byte {error.start}") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that must hold an object."""
    return parse_json_object(read_file(path), str(path))


def read_optional(folder: Path, name: str, names: Set[str]) -> dict[str, Any]:
    """`read_json_object` of a file in a folder that holds `names`; empty only if it is not one of them."""
    return read_json_object(folder / name) if name in names else {}


def parse_json_object(data: bytes, name: str) -> dict[str, Any]:
    """An object of JSON; errors begin with `name`. A key may be given twice only with the same value."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found and found[key] != value:
                raise CheckpointError(f"{name}: gives {key!r} twice, with different values")
            found[key] = value
        return found

    try:
        value = json.loads(data, object_pairs_hook=once)
        too_deep = _is_deeper(value, MAX_DEPTH)
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{name}: is not valid JSON: {error}") from error
    except RecursionError:
        too_deep = True
    if too_deep:
        raise CheckpointError(f"{name}: is not valid JSON for a checkpoint: it nests deeper than {MAX_DEPTH} levels")
    if not isinstance(value, dict):
        raise CheckpointError(f"{name}: must hold a JSON object, not {type(value).__name__}")
    return value


def _is_deeper(value: Any, levels: int) -> bool:
    """Whether arrays and objects are nested deeper than so many levels, found without recursion."""
    layer = [value]
    for _ in range(levels + 1):
        containers = [item for item in layer if isinstance(item, (dict, list))]
        if not containers:
            return False
        layer = [inner for item in containers for inner in (item.values() if isinstance(item, dict) else item)]
    return True


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _reason(path: Path, error: Exception) -> str:
    reason = str(getattr(error, "strerror", None) or error)
    if isinstance(error, FileNotFoundError) and os.path.islink(path):
        return f"it is a link to {os.readlink(path)}, which is not there"
    return reason
