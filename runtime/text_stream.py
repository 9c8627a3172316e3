"""The text of one generated sequence: detokenised, and cut at a stop string."""

from .detokenizer import StreamDetokenizer, TokenDecoder
from .stop_strings import StopStringMatcher


class TextStream:
    """Takes a sequence's tokens and gives the text to show, the same in sum whether it is streamed or not.

    Both methods return (new text, the stop string that ended the text or None). Once there is one, or after a stop
    token or `finish`, the text is over and nothing may be pushed.

    A stop string counts when its last character appears with generated token number `min_tokens` (counted from 1) or
    a later one, wherever it begins; one that is complete before is ordinary text. The arguments are the fields of
    `SamplingParams` with these names, and `texts`, the memory that streams of one tokenizer may share.

    Without a tokenizer there is no text: every piece is empty. Raises ValueError for stop strings without a tokenizer
    and for an empty stop string.
    """

    def __init__(
        self,
        tokenizer: TokenDecoder | None,
        *,
        stop: tuple[str, ...] = (),
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        texts: dict[int, str] | None = None,
    ) -> None:
        if tokenizer is None and stop:
            raise ValueError(f"stop strings need a tokenizer, and this model has none: {stop!r}")
        self._detokenizer = (
            None
            if tokenizer is None
            else StreamDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens, texts=texts)
        )
        self._matcher = StopStringMatcher(stop, include_stop_str_in_output)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._pieces: list[str] = []
        self._is_over = False

    @property
    def text(self) -> str:
        """All text returned so far."""
        return "".join(self._pieces)

    def push(self, token_id: int, *, is_stop_token: bool = False) -> tuple[str, str | None]:
        """Adds a generated token. A stop token (eos or a stop id) adds no text of its own, and ends the text."""
        assert not self._is_over, "a token came after the end of its text"
        self._num_tokens += 1
        if is_stop_token:
            return self.finish()
        text = "" if self._detokenizer is None else self._detokenizer.push(token_id)
        return self._match(text, is_last=False)

    def finish(self) -> tuple[str, str | None]:
        """Ends the text where it is (length limit, abort) and returns what was held back; later calls return none.

        What the detokenizer held back can complete a stop string.
        """
        if self._is_over:
            return "", None
        text = "" if self._detokenizer is None else self._detokenizer.flush()
        return self._match(text, is_last=True)

    def _match(self, text: str, *, is_last: bool) -> tuple[str, str | None]:
        new, matched = self._matcher.push(text, may_match=self._num_tokens >= self._min_tokens)
        self._is_over = is_last or matched is not None
        if is_last:
            new += self._matcher.flush()
        self._pieces.append(new)
        return new, matched
