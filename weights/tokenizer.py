"""Text to token ids and back, with the chat template and the stop ids that belong to a tokenizer."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers

from .chat_template import ChatTemplate
from .files import CheckpointError, shorten

logger = logging.getLogger(__name__)

LEAST_COVER = 0.9
"""Share of a model's ids that its tokenizer has at least; padding is a few per cent."""


class Tokenizer:
    """Wraps a tokenizer of the `tokenizers` library.

    Special tokens spelled out in a text (`<|im_start|>`, `<s>`) become their ids, as in transformers.

    Args:
        backend: taken over; its truncation and padding are switched off.
        special_tokens: texts by their Hugging Face names: `bos_token`, `eos_token`, `unk_token`, `pad_token`, ...
            Chat templates see them under these names.
        eos_token_ids: ids that end a text, beside that of `eos_token`.
        chat_templates: Jinja sources by name. The one for a chat is `default`, or the only one there is.

    Attributes:
        chat_templates: as given.
        chat_template: the source for a chat that names no other; None if there is none.
        bos_token, bos_token_id: both None where the vocabulary has no such token.
        eos_token_ids: each id once, that of `eos_token` first.
        special_ids: what `decode` leaves out.
        vocab_size: one more than the highest id.

    Raises:
        ValueError: the backend fails on the empty text.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        eos_token_ids: Sequence[int] = (),
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._special_tokens = dict(special_tokens or {})
        self.chat_templates = dict(chat_templates or {})
        only = next(iter(self.chat_templates.values())) if len(self.chat_templates) == 1 else None
        self.chat_template = self.chat_templates.get("default", only)
        self._compiled: dict[str, ChatTemplate] = {}
        self.bos_token_id = self._special_id("bos_token")
        self.bos_token = None if self.bos_token_id is None else self._special_tokens["bos_token"]
        eos = self._special_id("eos_token")
        self.eos_token_ids = tuple(dict.fromkeys([*([] if eos is None else [eos]), *eos_token_ids]))
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        with library_errors("the tokenizer cannot encode an empty text", ValueError):
            self._added_ids: list[int] = backend.encode("").ids
        self._adds_bos = self.bos_token_id is not None and self._added_ids[:1] == [self.bos_token_id]

    @classmethod
    def from_folder(cls, path: Path) -> "Tokenizer | None":
        """The tokenizer of a Hugging Face folder, None if it has none: see `folder_tokenizer`."""
        from .folder_tokenizer import folder_tokenizer

        return folder_tokenizer(path)

    def check_vocabulary(self, vocab_size: int, source: Path) -> None:
        """Compare with the vocabulary of the model, which has an embedding for each of the ids 0 ... vocab_size - 1.

        A model may have more ids: they are padding. Where they are many more, a warning says so. Added tokens beyond
        the model's ids are warned of and left alone, as long as no text needs them: fine-tuning tools add a padding
        token so.

        Raises:
            CheckpointError: an ordinary token, BOS, EOS or what is put around a text has no embedding. The message
                begins with `source`.
        """
        around = max(self._added_ids, default=-1)
        sizes = f"{source}: the tokenizer has {self.vocab_size} tokens and the model's vocab_size is {vocab_size}"
        if max(self.vocab_size, around + 1) <= vocab_size:
            if self.vocab_size < LEAST_COVER * vocab_size:
                logger.warning(f"{sizes}: is it the tokenizer of this model?")
            return
        ordinary = max(self._backend.get_vocab(with_added_tokens=False).values(), default=-1)
        named = {"bos_token": self.bos_token_id, "eos_token": max(self.eos_token_ids, default=None)}
        needed = {
            "its highest token": ordinary,
            **{f"its {name}": index for name, index in named.items() if index is not None},
            "what it puts around a text": around,
        }
        for what, index in needed.items():
            if index >= vocab_size:
                raise CheckpointError(
                    f"{sizes}: {what} {self.id_to_token(index)!r} has the id {index}, for which there is no embedding"
                )
        added = sorted(self._backend.get_added_tokens_decoder().items())
        beyond = [repr(token.content) for index, token in added if index >= vocab_size]
        logger.warning(f"{sizes}; prompts with one of these are refused: {shorten(beyond)}")

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
            ValueError: the text holds half of a surrogate pair, which is no character, or something that the tokenizer
                has no token for, not even an unknown one.
        """
        if not isinstance(text, str):
            raise TypeError(f"text to encode must be a string, not {type(text).__name__}")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            found = text[error.start]
            raise ValueError(f"text holds a lone surrogate {found!r} at position {error.start}") from error
        with library_errors("the tokenizer cannot encode this text", ValueError):
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
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        template: str | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The conversation as one text, ending in the opening of the assistant's turn if so asked.

        Messages and variables: `ChatTemplate.render`.

        Args:
            template: the name of one of `chat_templates`, or Jinja source. None: as in transformers `tool_use` if there
                are `tools` and it exists, else `chat_template`.

        Raises:
            ValueError: no chat template, a message that is not understood, or an error raised by the template.
        """
        source = self._template(template, variables.get("tools") is not None)
        if source not in self._compiled:
            self._compiled[source] = ChatTemplate(source)
        variables = {**self._special_tokens, **variables}
        return self._compiled[source].render(messages, add_generation_prompt=add_generation_prompt, **variables)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[int]:
        """Token ids of the conversation, of which `apply_chat_template` makes a text.

        BOS is there exactly if the template writes it.
        """
        return self.encode(self.apply_chat_template(messages, **variables), add_special_tokens=False)

    def _template(self, name: str | None, has_tools: bool) -> str:
        if name is None and has_tools and "tool_use" in self.chat_templates:
            name = "tool_use"
        if name is not None and "{" in name:
            return name
        if name is not None and name not in self.chat_templates:
            raise ValueError(f"no chat template is called {name!r}; there are: {shorten(sorted(self.chat_templates))}")
        if name is not None:
            return self.chat_templates[name]
        if self.chat_template is not None:
            return self.chat_template
        if self.chat_templates:
            names = shorten(sorted(self.chat_templates))
            raise ValueError(f"this model has no default chat template; name one of those that it has: {names}")
        raise ValueError("this model has no chat template; give it a plain prompt instead of messages")

    def _special_id(self, name: str) -> int | None:
        token = self._special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)


@contextmanager
def library_errors(message: str, kind: type[ValueError] = CheckpointError) -> Iterator[None]:
    """Turns what the `tokenizers` library raises into an error of `kind`, `message` in front.

    It raises nothing more special than Exception, and where its Rust code panics not even that.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise kind(f"{message}: {error or type(error).__name__}") from error
