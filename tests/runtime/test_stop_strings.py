"""Stop strings: found wherever the text is cut, nothing of them shown, nothing else withheld."""

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.runtime import stop_strings
from ostinato.runtime.stop_strings import StopStringMatcher

TEXT = st.text("ab", max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4).map(tuple)


def expected(text: str, stops: tuple[str, ...], include_stop: bool) -> tuple[str, str | None]:
    """The rule, spelled out: the first end of any stop string, and of those that end there the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end if include_stop else end - len(longest)], longest
    return text, None


def run(pieces: list[str], stops: tuple[str, ...], include_stop: bool = False) -> tuple[list[str], str | None]:
    """What each piece releases, then what the flush does; and the match."""
    matcher = StopStringMatcher(stops, include_stop)
    released, matched = [], None
    for piece in pieces:
        text, matched = matcher.push(piece)
        released.append(text)
    return [*released, matcher.flush()], matched


def chunkings(text: str) -> Iterator[list[str]]:
    for cuts in range(2 ** max(len(text) - 1, 0)):
        pieces = [text[:1]]
        for index, char in enumerate(text[1:]):
            if cuts >> index & 1:
                pieces.append(char)
            else:
                pieces[-1] += char
        yield pieces


@pytest.mark.parametrize(
    ("pieces", "stops", "released", "matched"),
    [
        (["The quick br", "own", " fox"], ("own fox",), ["The quick br", "", "", ""], "own fox"),
        (["one STOP two"], ("STOP",), ["one ", ""], "STOP"),
        (["own f", "ish", "!"], ("own fox",), ["", "own fish", "!", ""], None),
        (["xab", "c"], ("abc", "ab"), ["x", "", ""], "ab"),
        (["xa", "bc"], ("abc", "c"), ["x", "", ""], "abc"),
        (["abc"], ("abcd", "bc"), ["a", ""], "bc"),
        (["end own", " f"], ("own fox",), ["end ", "", "own f"], None),
        (["aab", "aab", "aac"], ("aabaac",), ["", "aab", "", ""], "aabaac"),
        (["a", "\n", "\n", "b"], ("\n\n",), ["a", "", "", "", ""], "\n\n"),
        (["a", "b"], (), ["a", "b", ""], None),
    ],
    ids=[
        "across-pieces",
        "inside-a-piece",
        "false-start",
        "prefix-of-another",
        "suffix-of-another",
        "inside-an-unfinished-one",
        "held-at-the-end",
        "overlapping-start",
        "after-the-match",
        "no-stops",
    ],
)
def test_b19_examples(pieces: list[str], stops: tuple[str, ...], released: list[str], matched: str | None) -> None:
    """B19"""
    assert run(pieces, stops) == (released, matched)


@pytest.mark.parametrize("include_stop", [False, True], ids=["excluded", "included"])
@pytest.mark.parametrize(
    ("text", "stops"),
    [
        ("brown fox", ("own fox",)),
        ("own fish", ("own fox", "ish!")),
        ("xabcd", ("abcd", "bc", "ab")),
        ("xabxabc", ("abc", "xabc")),
        ("aabaabaac", ("aabaac",)),
        ("aaaaab", ("aab", "aaaab")),
        ("na🙂b好", ("🙂b", "b好")),
    ],
)
def test_b19_every_chunking(text: str, stops: tuple[str, ...], include_stop: bool) -> None:
    """B19: the text is the same for all 2^(n - 1) ways to cut it, and for any order of the stop strings."""
    for pieces in chunkings(text):
        for order in (stops, stops[::-1]):
            released, matched = run(pieces, order, include_stop)
            assert ("".join(released), matched) == expected(text, stops, include_stop), pieces


@settings(derandomize=True, deadline=None)
@given(text=TEXT, stops=STOPS, include_stop=st.booleans(), data=st.data())
def test_b19_rule(text: str, stops: tuple[str, ...], include_stop: bool, data: st.DataObject) -> None:
    """B19"""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    released, matched = run(pieces, stops, include_stop)
    assert ("".join(released), matched) == expected(text, stops, include_stop)


@settings(derandomize=True, deadline=None)
@given(text=TEXT, stops=STOPS, include_stop=st.booleans())
def test_b19_holds_back_no_more_than_it_must(text: str, stops: tuple[str, ...], include_stop: bool) -> None:
    """B19: what is held is the longest end of the text that is a proper prefix of a stop string."""
    matcher = StopStringMatcher(stops, include_stop)
    released = ""
    for end in range(1, len(text) + 1):
        new, matched = matcher.push(text[end - 1])
        released += new
        if matched is not None:
            break
        starts = [start for start in range(end) if any(s.startswith(text[start:end]) for s in stops)]
        assert released == (text[:end] if include_stop else text[: min(starts, default=end)])


def test_pass_over_early_matches() -> None:
    """B28: a stop string that is complete too early is text; one that only begins early still counts."""
    matcher = StopStringMatcher(("aba",))
    assert matcher.push("xaba", may_match=False) == ("xab", None)
    assert matcher.push("ba") == ("", "aba")


def test_empty_stop_string() -> None:
    with pytest.raises(ValueError, match=r"at least 1 character, got \('a', ''\)"):
        StopStringMatcher(("a", ""))


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("a" * 2000 + "b", "a" * 6000),
        ("a" * 2000 + "b", ("a" * 1999 + "c") * 3),
        (("a" * 43 + "b") * 45 + "c", ("a" * 43 + "b") * 136),
    ],
    ids=["always-almost", "falls-back-far", "nested-periods"],
)
def test_b20_work_is_linear(stop: str, text: str) -> None:
    """B20, counted in lines of code run: a long stop string makes no character dearer."""
    matcher = StopStringMatcher((stop,))
    num_lines = 0

    def count(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal num_lines
        if frame.f_code.co_filename != stop_strings.__file__:
            return None
        num_lines += event == "line"
        return count

    previous = sys.gettrace()
    sys.settrace(count)
    try:
        for char in text:
            matcher.push(char)
    finally:
        sys.settrace(previous)
    # A push is some ten lines, a step of the matching four; falling back is paid for by the characters matched before.
    assert num_lines < 40 * len(text)
