"""The text of a sequence, from its tokens to its end."""

import pytest

from ostinato.runtime.text_stream import TextStream

EOS = 0


class Pieces:
    """A tokenizer whose tokens are given byte strings; id 0 is a special token, `</s>`."""

    special_ids = frozenset({EOS})

    def __init__(self, *pieces: bytes | str) -> None:
        self.pieces = [b"</s>", *(piece.encode() if isinstance(piece, str) else piece for piece in pieces)]

    def id_to_token(self, token_id: int, /) -> str | None:
        return repr(self.pieces[token_id]) if 0 <= token_id < len(self.pieces) else None

    def decode(self, ids: list[int], /, skip_special_tokens: bool = True) -> str:
        kept = [self.pieces[i] for i in ids if not (skip_special_tokens and i in self.special_ids)]
        return b"".join(kept).decode("utf-8", errors="replace")


def run(stream: TextStream, num_tokens: int) -> tuple[list[str], str | None]:
    """Push tokens 1, 2, …; what each gave, up to a match."""
    texts = []
    for token_id in range(1, num_tokens + 1):
        text, stop = stream.push(token_id)
        texts.append(text)
        if stop is not None:
            return texts, stop
    return texts, None


def test_b19_stop_string_over_three_tokens() -> None:
    """B19"""
    stream = TextStream(Pieces("The quick br", "own", " fox", " jumps"), stop=("own fox",))
    assert run(stream, 4) == (["The quick br", "", ""], "own fox")
    assert stream.text == "The quick br"
    assert stream.finish() == ("", None)


def test_b19_stop_string_included() -> None:
    """B19: nothing is held back, and what follows in the same token is dropped."""
    stream = TextStream(Pieces("br", "own", " fox!"), stop=("own fox",), include_stop_str_in_output=True)
    assert run(stream, 3) == (["br", "own", " fox"], "own fox")
    assert stream.text == "brown fox"


def test_b19_eos_releases_held_text() -> None:
    """B19, B11: and its own text does not appear."""
    stream = TextStream(Pieces("a", "own f"), stop=("own fox",))
    assert run(stream, 2) == (["a", ""], None)
    assert stream.push(EOS, is_stop_token=True) == ("own f", None)
    assert stream.text == "aown f"


@pytest.mark.parametrize("skip_special_tokens", [True, False], ids=["skipped", "shown"])
@pytest.mark.parametrize("include", [True, False], ids=["stop-included", "stop-excluded"])
@pytest.mark.parametrize("token_id", [EOS, 2], ids=["special", "ordinary"])
def test_b11_text_of_a_stop_token(token_id: int, include: bool, skip_special_tokens: bool) -> None:
    """B11: not in the output, whatever token ends it and whatever is asked for strings and special tokens."""
    stream = TextStream(Pieces("a", "b"), include_stop_str_in_output=include, skip_special_tokens=skip_special_tokens)
    stream.push(1)
    assert stream.push(token_id, is_stop_token=True) == ("", None)
    assert stream.text == "a"


@pytest.mark.parametrize("skip_special_tokens", [True, False], ids=["skipped", "shown"])
def test_b28_ignored_eos(skip_special_tokens: bool) -> None:
    """B28: with ignore_eos it is a token like any special one."""
    stream = TextStream(Pieces("a"), skip_special_tokens=skip_special_tokens)
    assert [stream.push(token_id)[0] for token_id in (1, EOS, 1)] == ["a", "" if skip_special_tokens else "</s>", "a"]


@pytest.mark.parametrize(
    ("min_tokens", "text", "stop"),
    [(0, "a ", "STOP"), (2, "a ", "STOP"), (3, "a STOP b ", "STOP"), (5, "a STOP b ", "STOP"), (6, None, None)],
)
def test_b28_stop_string_and_min_tokens(min_tokens: int, text: str | None, stop: str | None) -> None:
    """B28: a stop string complete at token 2, and another that spans tokens 4 and 5, where its end counts."""
    pieces = ("a ", "STOP", " b ", "ST", "OP", " c")
    stream = TextStream(Pieces(*pieces), stop=("STOP",), min_tokens=min_tokens)
    assert run(stream, 6)[1] == stop
    stream.finish()
    assert stream.text == ("".join(pieces) if text is None else text)


def test_unfinished_character_at_the_end() -> None:
    """B15: cut off by the length limit, its bytes are not lost."""
    stream = TextStream(Pieces("a", b"\xf0\x9f"))
    assert run(stream, 2) == (["a", ""], None)
    assert stream.finish() == ("�", None)
    assert stream.finish() == ("", None)
    assert stream.text == "a�"


def test_held_character_completes_a_stop_string() -> None:
    stream = TextStream(Pieces("a", b"\xf0\x9f"), stop=("a�",))
    run(stream, 2)
    assert stream.finish() == ("", "a�")
    assert stream.text == ""


def test_without_a_tokenizer() -> None:
    stream = TextStream(None)
    assert [stream.push(5), stream.push(10**9), stream.push(EOS, is_stop_token=True)] == [("", None)] * 3
    assert stream.text == ""
    with pytest.raises(ValueError, match=r"need a tokenizer.*\('x',\)"):
        TextStream(None, stop=("x",))


def test_nothing_follows_the_end() -> None:
    stream = TextStream(Pieces("a"), stop=("a",))
    stream.push(1)
    with pytest.raises(AssertionError, match="after the end"):
        stream.push(1)
