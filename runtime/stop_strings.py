"""Stop strings in a stream of text."""

from collections import deque


class _Stop:
    """One stop string, matched a character at a time.

    Knuth, Morris and Pratt 1977: `fallback[i]` is the length of the longest proper suffix of `text[: i + 1]` that is
    also a prefix of `text`, where matching goes on when the next character does not fit. Linear in text and pattern.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0
        self.fallback = [0]
        for char in text[1:]:
            self.fallback.append(self._next(self.fallback[-1], char))

    def _next(self, num_matched: int, char: str) -> int:
        while num_matched and self.text[num_matched] != char:
            num_matched = self.fallback[num_matched - 1]
        return num_matched + (self.text[num_matched] == char)

    def advance(self, char: str) -> bool:
        """Takes one character; True if the string is now complete. `num_matched` is always below its length."""
        self.num_matched = self._next(self.num_matched, char)
        if self.num_matched < len(self.text):
            return False
        self.num_matched = self.fallback[-1]
        return True


class StopStringMatcher:
    """Finds the first stop string in a text that comes in pieces, and releases the text before it.

    The stop string that is *complete* first wins; of several that end at the same character, the longest. (So of "ab"
    and "abc" always "ab".) The rule looks at no character after the match, hence the result does not depend on
    how the text is cut into pieces, and nothing is generated only to settle a match.

    Held back is the longest end of the text that is a proper prefix of some stop string, no more; nothing at all with
    `include_stop`, where a match does not take text away. Time is linear in the text, whatever the strings' lengths.

    Raises ValueError for an empty stop string.
    """

    def __init__(self, stops: tuple[str, ...], include_stop: bool = False) -> None:
        if "" in stops:
            raise ValueError(f"a stop string must have at least 1 character, got {stops!r}")
        self._stops = [_Stop(text) for text in stops]
        self._include_stop = include_stop
        self._held: deque[str] = deque()  # single characters: releasing some never copies the rest
        self._matched: str | None = None

    def push(self, text: str, *, may_match: bool = True) -> tuple[str, str | None]:
        """Adds text; returns (text released, the stop string that ended it or None).

        `may_match=False` lets pass the stop strings that are complete within this piece; one that only begins in it
        may still match later. After a match all further text is dropped.
        """
        if self._matched is not None:
            return "", self._matched
        if not self._stops:
            return text, None
        for index, char in enumerate(text):
            complete = [stop.text for stop in self._stops if stop.advance(char)]
            if complete and may_match:
                self._matched = max(complete, key=len)
                self._held.extend(text[: index + 1])
                released = self._release(keep=0 if self._include_stop else len(self._matched))
                self._held.clear()
                return released, self._matched
        self._held.extend(text)
        return self._release(keep=0 if self._include_stop else max(stop.num_matched for stop in self._stops)), None

    def flush(self) -> str:
        """Returns the text still held back: at the end of the text a prefix of a stop string is ordinary text."""
        return self._release(keep=0)

    def _release(self, *, keep: int) -> str:
        return "".join([self._held.popleft() for _ in range(len(self._held) - keep)])
