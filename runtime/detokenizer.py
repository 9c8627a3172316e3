"""Token ids to text, one token at a time."""

import codecs
import re
from typing import Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

_MAX_BYTE_RUN = 64
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenDecoder(Protocol):
    """What the runtime needs of a tokenizer."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids whose tokens are markers, not text."""

    def id_to_token(self, token_id: int, /) -> str | None:
        """The token as the vocabulary spells it; None for any integer that is no token."""

    def decode(self, ids: list[int], /, skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence; undecodable bytes become U+FFFD."""


class StreamDetokenizer:
    """The text of one growing sequence, piece by piece.

    Whatever the ids, the pieces from `push` and `flush` add up to `tokenizer.decode(all ids)`, no piece is ever taken
    back, and none ends inside a character. A push costs at most two decodes of a few tokens, at any length.

    Two things can make text already decoded wrong later, and are held back until they cannot:

    - An unfinished UTF-8 character. It decodes to one U+FFFD at the end of the text (the practice of "maximal
      subparts", Unicode 3.9), so that a U+FFFD at the end waits for the next token, and nothing else does.
    - A run of byte-fallback tokens (`<0x0A>`). Their decoder replaces *every* byte of a run that as a whole is not
      UTF-8, the well-formed characters in it too, so the run waits for the first other token. A run is shown as soon
      as it is broken beyond repair; one of 64 valid bytes is shown too and taken for closed, as an endless row of
      such characters must not stall a stream. (Only there can the sum differ: if bytes that follow spoil the run.)

    The decoder may treat the start of a text differently (Metaspace strips a space); any other token it must decode
    by itself, as byte-level, Metaspace and byte-fallback decoders do. So a few tokens already shown stay in front of
    the new one, and what they decode to is subtracted.

    `texts` remembers what ordinary tokens add, which spares their decodes. The streams of one tokenizer may share it.
    """

    def __init__(
        self, tokenizer: TokenDecoder, *, skip_special_tokens: bool = True, texts: dict[int, str] | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped_ids = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._skip_special_tokens = skip_special_tokens
        self._texts = {} if texts is None else texts
        self._context: list[int] = []  # the last tokens decoded, none only at the start
        self._num_held = 0  # characters at the end of the context's text that have not been returned
        self._run: list[int] = []  # byte-fallback tokens held back; they follow the context
        self._run_is_broken = False  # then its bytes are shown one by one, and none is held
        self._utf8 = codecs.getincrementaldecoder("utf-8")()

    def push(self, token_id: int) -> str:
        """Adds a token and returns the text that is now certain, possibly none."""
        if token_id in self._skipped_ids:
            return ""
        if self._context and not (self._num_held or self._run or self._run_is_broken) and token_id in self._texts:
            self._context = [token_id]
            return self._texts[token_id]
        token = self._tokenizer.id_to_token(token_id)
        if not token:
            return ""
        byte = self._fallback_byte(token_id, token)
        if byte is not None:
            return self._push_byte(token_id, byte)
        closed = self._close_run()
        is_separate = bool(self._context) and self._num_held == 0
        text = self._decode_next([token_id], hold_unfinished=True)
        if is_separate and self._num_held == 0:  # begins and ends between characters: the same text anywhere else
            self._texts[token_id] = text
        return closed + text

    def flush(self) -> str:
        """Returns what was held back. The sequence is over: nothing is pushed after this."""
        return self._close_run() + self._decode_next([], hold_unfinished=False)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)

    def _decode_next(self, ids: list[int], *, hold_unfinished: bool) -> str:
        """Returns what `ids`, behind the context, add to the text; they become the context."""
        start = len(self._decode(self._context)) - self._num_held
        ids = self._context + ids
        text = self._decode(ids)
        end = max(start, len(text) - (hold_unfinished and text.endswith(REPLACEMENT)))
        self._num_held = len(text) - end
        # An unfinished character has at most 3 bytes, so the last 3 tokens hold it. They may begin inside another
        # one: then the start of their text is not the text's, but its end is.
        self._context = ids[-3:] if self._num_held else ids[-1:]
        return text[start:end]

    def _fallback_byte(self, token_id: int, token: str) -> int | None:
        spelling = _BYTE_TOKEN.fullmatch(token)
        if spelling is None or self._decode([token_id]) == token:  # a decoder without byte fallback takes it literally
            return None
        return int(spelling[1], 16)

    def _push_byte(self, token_id: int, byte: int) -> str:
        if self._run_is_broken:
            return REPLACEMENT
        self._run.append(token_id)
        try:
            character = self._utf8.decode(bytes([byte]))
        except UnicodeDecodeError:
            self._run_is_broken = True
            return self._replace_run()
        if not character or len(self._run) < _MAX_BYTE_RUN:
            return ""
        # To the decoder the bytes to come continue this run, so the context must be a whole character.
        last_character = self._run[-len(character.encode()) :]
        text = self._close_run()
        self._context = last_character
        return text

    def _close_run(self) -> str:
        """Ends the run of byte tokens and returns its text; one cut off inside a character is replaced."""
        self._run_is_broken = False
        if not self._run:
            return ""
        if self._utf8.getstate()[0]:
            return self._replace_run()
        run, self._run = self._run, []
        return self._decode_next(run, hold_unfinished=False)

    def _replace_run(self) -> str:
        text = self._decode_next([], hold_unfinished=False) + REPLACEMENT * len(self._run)
        self._context = self._run[-1:]
        self._run = []
        self._utf8.reset()
        return text
