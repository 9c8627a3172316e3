"""Text to token ids and back, with the chat template and the stop ids that belong to a tokenizer."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from .chat_template import ChatTemplate


class Tokenizer:
    """Wraps a tokenizer of the `tokenizers` library.

    Special tokens spelled out in a text (`<|im_start|>`, `<s>`) become their ids, as in transformers.

    Args:
        backend: taken over; its truncation and padding are switched off.
        special_tokens: texts by their Hugging Face names: `bos_token`, `eos_token`, `unk_token`, `pad_token`, ...
            Chat templates see them under these names.
        eos_token_ids: ids that end a text, beside that of `eos_token`.
        chat_template: Jinja source.

    Attributes:
        bos_token, bos_token_id: both None where the vocabulary has no such token.
        eos_token_ids: each id once, that of `eos_token` first.
        special_ids: what `decode` leaves out.
        vocab_size: one more than the highest id.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        eos_token_ids: Sequence[int] = (),
        chat_template: str | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template
        self.bos_token_id = self._special_id("bos_token")
        self.bos_token = None if self.bos_token_id is None else self._special_tokens["bos_token"]
        eos = self._special_id("eos_token")
        self.eos_token_ids = tuple(dict.fromkeys([*([] if eos is None else [eos]), *eos_token_ids]))
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self._adds_bos = self.bos_token_id is not None and backend.encode("").ids[:1] == [self.bos_token_id]

    @classmethod
    def from_folder(cls, path: Path) -> "Tokenizer | None":
        """The tokenizer of a Hugging Face folder, None if it has none: see `folder_tokenizer`."""
        from .folder_tokenizer import folder_tokenizer

        return folder_tokenizer(path)

    @property
    def kind(self) -> str:
        """The algorithm that splits a text: BPE, Unigram, WordPiece or WordLevel."""
        return type(self._backend.model).__name__

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            add_special_tokens: put around it what the tokenizer says, usually BOS in front. A text that begins with the
                BOS token already gets no second one.

        Raises:
            ValueError: the text holds half of a surrogate pair, which is no character.
        """
        if not isinstance(text, str):
            raise TypeError(f"text to encode must be a string, not {type(text).__name__}")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            found = text[error.start]
            raise ValueError(f"text holds a lone surrogate {found!r} at position {error.start}") from error
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        if add_special_tokens and self._adds_bos and ids[1:2] == [self.bos_token_id]:
            return ids[1:]
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids. Ids that the vocabulary does not have give nothing; spaces are never cleaned up."""
        known = [index for index in ids if 0 <= index < self.vocab_size]
        return str(self._backend.decode(known, skip_special_tokens=skip_special_tokens))

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it (`Ġthe`, `▁the`, `<0x0A>`); None for any integer that is no token."""
        if not 0 <= token_id < self.vocab_size:
            return None
        token: str | None = self._backend.id_to_token(token_id)
        return token

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The conversation as one text, ending in the opening of the assistant's turn if so asked.

        Messages and variables: `ChatTemplate.render`.

        Raises:
            ValueError: no chat template, a message that is not understood, or an error raised by the template.
        """
        if self.chat_template is None:
            raise ValueError("this model has no chat template; give it a plain prompt instead of messages")
        variables = {**self._special_tokens, **variables}
        return self._compiled_template.render(messages, add_generation_prompt=add_generation_prompt, **variables)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Token ids of the conversation. BOS is there exactly if the template writes it."""
        text = self.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, **variables)
        return self.encode(text, add_special_tokens=False)

    @cached_property
    def _compiled_template(self) -> ChatTemplate:
        assert self.chat_template is not None, "checked by the caller"
        return ChatTemplate(self.chat_template)

    def _special_id(self, name: str) -> int | None:
        token = self._special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)
