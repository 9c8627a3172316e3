"""Small files of a checkpoint: regular, of a sensible size, JSON that is one object; else one line says why not."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ostinato.weights import CheckpointError
from ostinato.weights.files import (
    MAX_DEPTH,
    MAX_MESSAGE,
    list_folder,
    open_regular,
    read_file,
    read_json_object,
    read_text,
    shorten,
)

pytestmark = pytest.mark.usefixtures("no_hang")


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_json_object(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\xff", b"{'a': 1}", b"{}{}"], ids=repr)
def test_json_that_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.json").write_bytes(content)
    assert "a.json: is not valid JSON: " in refusal(tmp_path / "a.json")


@pytest.mark.parametrize("content", ["[]", "null", "3", '"a"'])
def test_json_that_is_no_object(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.json").write_text(content)
    assert "a.json: must hold a JSON object, not " in refusal(tmp_path / "a.json")


@pytest.mark.parametrize("depth", [MAX_DEPTH, 900, 100_000])
@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_json_that_nests_without_end(tmp_path: Path, opening: str, depth: int) -> None:
    """What the parser survives would end it later, where the value is shown."""
    closing = "]" if opening == "[" else "}"
    (tmp_path / "a.json").write_text('{"a": ' + opening * depth + "1" + closing * depth + "}")
    assert f"a.json: is not valid JSON for a checkpoint: it nests deeper than {MAX_DEPTH}" in refusal(
        tmp_path / "a.json"
    )


def test_json_that_nests_as_deep_as_it_may(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": ' + "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1) + "}")
    assert read_json_object(tmp_path / "a.json")


def test_a_number_of_many_digits(tmp_path: Path) -> None:
    """Python refuses to parse it, since that would take time without bounds."""
    (tmp_path / "a.json").write_text('{"vocab_size": ' + "9" * 100_000 + "}")
    assert "a.json: is not valid JSON: Exceeds the limit" in refusal(tmp_path / "a.json")


@pytest.mark.parametrize("place", ['{"a": 1, "b": 2, "a": 3}', '{"b": [{"a": 1, "a": null}]}'], ids=["top", "inside"])
def test_a_key_given_twice(tmp_path: Path, place: str) -> None:
    """Parsers do not agree on which of the two counts."""
    (tmp_path / "a.json").write_text(place)
    assert "a.json: gives 'a' twice, with different values" in refusal(tmp_path / "a.json")


def test_a_key_given_twice_alike(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": [1], "a": [1]}')
    assert read_json_object(tmp_path / "a.json") == {"a": [1]}


def test_json_with_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert read_json_object(tmp_path / "a.json") == {"a": 1}


def test_text_is_utf_8(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbf\xc3\xa9")
    assert read_text(tmp_path / "a") == "é"
    (tmp_path / "a").write_bytes(b"caf\xe9")
    with pytest.raises(CheckpointError, match=r"a: is not UTF-8 text: .* at byte 3"):
        read_text(tmp_path / "a")


def _make_odd(kind: str, path: Path) -> Path:
    match kind:
        case "link-to-nowhere":
            path.symlink_to("nowhere")
        case "link-to-itself":
            path.symlink_to(path)
        case "links-in-a-circle":
            path.symlink_to(path.with_name("other"))
            path.with_name("other").symlink_to(path)
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "endless-device":
            path.symlink_to("/dev/zero")
        case "inside-a-file":
            path.write_text("{}")
            path /= "a.json"
    return path


ODD_FILES = {
    "absent": "No such file",
    "link-to-nowhere": "it is a link to nowhere, which is not there",
    "link-to-itself": "Too many levels of symbolic links",
    "links-in-a-circle": "Too many levels of symbolic links",
    "folder": "Is a directory",
    "pipe": "it is not a regular file",
    "endless-device": "it is not a regular file",
    "inside-a-file": "Not a directory",
}


@pytest.mark.parametrize("kind", ODD_FILES)
def test_what_is_no_regular_file(tmp_path: Path, kind: str) -> None:
    path = _make_odd(kind, tmp_path / "a.json")
    message = refusal(path)
    assert message.startswith(f"{path}: cannot be read: ")
    assert ODD_FILES[kind] in message


def test_a_name_that_is_none() -> None:
    with pytest.raises(CheckpointError, match="cannot be read: embedded null"):
        read_json_object(Path("a\0b"))


def test_a_link_to_a_file_is_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    (tmp_path / "b.json").symlink_to("a.json")
    assert read_json_object(tmp_path / "b.json") == {}


def test_a_file_of_any_size_is_not_read(tmp_path: Path) -> None:
    """It is sparse: to read it would take memory, not disk."""
    with open(tmp_path / "a.json", "wb") as file:
        file.truncate(10**12)
    assert "a.json: has 1000000000000 bytes, above the limit of " in refusal(tmp_path / "a.json")
    with pytest.raises(CheckpointError, match="has 1000000000000 bytes, above the limit of 5"):
        read_file(tmp_path / "a.json", limit=5)


def test_what_may_not_be_read(unprivileged: Path) -> None:
    (unprivileged / "a.json").write_text("{}")
    (unprivileged / "a.json").chmod(0)
    assert refusal(unprivileged / "a.json").endswith("a.json: cannot be read: Permission denied")
    unprivileged.chmod(0o311)
    with pytest.raises(CheckpointError, match="cannot be read: Permission denied"):
        list_folder(unprivileged)
    unprivileged.chmod(0o755)


def test_a_folder_lists_what_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("nowhere")
    assert list_folder(tmp_path) == {"a"}


def test_opened_files_are_closed_again(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(CheckpointError):
            open_regular(tmp_path / "pipe")
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b[31mb\x07", r"a\x1b[31mb\x07"),
        ("two\nlines\r\n", r"two lines\r "),
        ("half \ud83d", r"half \ud83d"),
        ("\u202eright", r"\u202eright"),
        ("é🙂", "é🙂"),
    ],
)
def test_messages_are_one_line_for_a_terminal(text: str, shown: str) -> None:
    assert str(CheckpointError(text)) == shown


def test_messages_keep_both_ends() -> None:
    message = str(CheckpointError("begin" + "x" * 10**6 + "end"))
    assert len(message) <= MAX_MESSAGE + 10
    assert message.startswith("begin")
    assert message.endswith("end")


def test_shorten() -> None:
    assert shorten(["a", "b"], limit=2) == "a, b"
    assert shorten(["a", "b", "c", "d"], limit=2) == "a, b and 2 more"


@pytest.mark.parametrize("value", [{"a": None}, {"a": [1.5, True, "é"]}, {}], ids=repr)
def test_json_comes_back(tmp_path: Path, value: dict[str, Any]) -> None:
    (tmp_path / "a.json").write_text(json.dumps(value))
    assert read_json_object(tmp_path / "a.json") == value
