"""A tokenizer from the metadata of a GGUF file.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, section "Tokenizer".
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from .files import CheckpointError
from .tokenizer import Tokenizer, library_errors

WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Llama 3 and Qwen 2 cut a text into words; they differ in how many digits stay together."""


@dataclass(frozen=True)
class WordKind:
    """How a byte-level vocabulary expects a text to be cut before its merges apply (`tokenizer.ggml.pre`).

    Attributes:
        pattern: a regular expression for the pieces; empty for GPT-2's own, which the library has built in.
        split_digits: every digit on its own, before anything else.
        ignore_merges: a word that is a token is taken whole, even if no merges lead to it.
        compose: normalise to NFC first.
        add_bos: put BOS in front of a text unless the file says otherwise.
    """

    pattern: str = ""
    split_digits: bool = False
    ignore_merges: bool = False
    compose: bool = False
    add_bos: bool = False


_LLAMA_3 = WordKind(WORDS.format(digits="{1,3}"), ignore_merges=True, add_bos=True)
WORD_KINDS = {
    "gpt-2": WordKind(),
    "default": WordKind(),
    "smollm": WordKind(split_digits=True),
    "llama-bpe": _LLAMA_3,
    "llama3": _LLAMA_3,
    "llama-v3": _LLAMA_3,
    "qwen2": WordKind(WORDS.format(digits=""), compose=True),
}
"""By `tokenizer.ggml.pre`. `default`, as files are marked that do not say, is taken to be GPT-2's."""


MAX_PIECE_LENGTH = 256
"""Characters of a SentencePiece piece: its merges take its length squared, and real pieces have fewer than 50."""


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def gguf_tokenizer(metadata: Mapping[str, Any], path: Path) -> Tokenizer | None:
    """The tokenizer that `tokenizer.*` describes.

    Two models are built: `gpt2` (byte-level BPE, of the kinds in `WORD_KINDS`) and `llama` (SentencePiece BPE with byte
    fallback). Control tokens become special tokens, user-defined ones are found whole in a text but kept when decoding.
    The ends of text are the eos, eot and eom ids.

    Args:
        path: of the file, for error messages.

    Returns:
        None if the file has no tokenizer.

    Raises:
        CheckpointError: a model or kind that is not supported (the message lists those that are), or metadata that are
            missing or do not agree.
    """
    values = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in metadata.items()
        if key.startswith("tokenizer.ggml.")
    }
    model = values.get("model", "none")
    if model in ("none", "no_vocab"):
        return None
    if model not in ("gpt2", "llama"):
        raise CheckpointError(f"{path}: tokenizer model {model!r} is not supported; supported: gpt2, llama")
    needed = ("tokens", "merges") if model == "gpt2" else ("tokens", "scores", "token_type")
    missing = [f"tokenizer.ggml.{key}" for key in needed if not isinstance(values.get(key), list)]
    if missing:
        raise CheckpointError(f"{path}: a tokenizer of model {model!r} needs {', '.join(missing)}")
    chat_templates = {
        key.removeprefix("tokenizer.chat_template").removeprefix(".") or "default": value
        for key, value in metadata.items()
        if key == "tokenizer.chat_template" or key.startswith("tokenizer.chat_template.")
    }
    for name, template in chat_templates.items():
        if not isinstance(template, str):
            raise CheckpointError(f"{path}: tokenizer.chat_template must be a text, not {template!r} ({name})")
    vocabulary = _Vocabulary.from_values(values, path)
    special_tokens = {
        f"{name}_token": vocabulary.tokens[index]
        for name, key in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items()
        if (index := vocabulary.index(f"{key}_token_id", values)) is not None
    }
    word_kind = _word_kind(values, path) if model == "gpt2" else None
    add_bos = values.get("add_bos_token", word_kind is None or word_kind.add_bos)
    with library_errors(f"{path}: its tokenizer cannot be built"):
        if word_kind is not None:
            backend = _byte_level(vocabulary, values["merges"], word_kind)
        else:
            backend = _sentence_piece(vocabulary, values)
        backend.add_special_tokens(vocabulary.added(special=True))
        backend.add_tokens(vocabulary.added(special=False))
        backend.post_processor = _around(
            backend,
            special_tokens.get("bos_token") if add_bos else None,
            special_tokens.get("eos_token") if values.get("add_eos_token", False) else None,
        )
    ends = [vocabulary.index(f"{name}_token_id", values) for name in ("eos", "eot", "eom")]
    return Tokenizer(
        backend,
        special_tokens=special_tokens,
        eos_token_ids=[index for index in ends if index is not None],
        chat_templates=chat_templates,
    )


@dataclass(frozen=True)
class _Vocabulary:
    """Tokens in the order of their ids, and the type of each."""

    tokens: list[str]
    types: list[int]
    path: Path

    @classmethod
    def from_values(cls, values: Mapping[str, Any], path: Path) -> "_Vocabulary":
        tokens = values["tokens"]
        types = values.get("token_type", [TokenType.NORMAL] * len(tokens))
        for key, other in {"token_type": types, "scores": values.get("scores", tokens)}.items():
            if not isinstance(other, list):
                raise CheckpointError(f"{path}: tokenizer.ggml.{key} must be an array, not {other!r}")
            if len(other) != len(tokens):
                raise CheckpointError(f"{path}: {len(tokens)} tokens, but {len(other)} entries in tokenizer.ggml.{key}")
        twice = [token for token, count in Counter(tokens).items() if count > 1]
        if twice:
            raise CheckpointError(f"{path}: tokens listed twice: {', '.join(map(repr, twice[:5]))}")
        return cls(tokens, types, path)

    def ids(self) -> dict[str, int]:
        return {token: index for index, token in enumerate(self.tokens)}

    def added(self, special: bool) -> list[AddedToken]:
        """Tokens that are found whole in a text, before anything else is done to it."""
        wanted = (TokenType.CONTROL, TokenType.UNKNOWN) if special else (TokenType.USER_DEFINED,)
        return [
            AddedToken(token, special=special, normalized=False)
            for token, kind in zip(self.tokens, self.types, strict=True)
            if kind in wanted
        ]

    def index(self, key: str, values: Mapping[str, Any]) -> int | None:
        index = values.get(key)
        if index is None:
            return None
        if not isinstance(index, int) or not 0 <= index < len(self.tokens):
            raise CheckpointError(f"{self.path}: tokenizer.ggml.{key} {index!r}: there are {len(self.tokens)} tokens")
        return index


def _word_kind(values: Mapping[str, Any], path: Path) -> WordKind:
    name = values.get("pre", "default")
    if not isinstance(name, str) or name not in WORD_KINDS:
        raise CheckpointError(f"{path}: pre-tokenizer {name!r} is not supported; supported: {', '.join(WORD_KINDS)}")
    return WORD_KINDS[name]


def _around(backend: tokenizers.Tokenizer, before: str | None, after: str | None) -> processors.PostProcessor:
    """Puts these tokens around a text when special tokens are asked for."""
    single = [piece for piece in (before, "$A", after) if piece is not None]
    special_tokens = [(token, backend.token_to_id(token)) for token in {*single} - {"$A"}]
    return processors.TemplateProcessing(single=single, special_tokens=special_tokens)


def _byte_level(vocabulary: _Vocabulary, merges: list[str], kind: WordKind) -> tokenizers.Tokenizer:
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    backend = tokenizers.Tokenizer(models.BPE(vocabulary.ids(), pairs, ignore_merges=kind.ignore_merges))
    steps: list[pre_tokenizers.PreTokenizer] = []
    if kind.split_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if kind.pattern:
        steps.append(pre_tokenizers.Split(Regex(kind.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not kind.pattern))
    if kind.compose:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentence_piece(vocabulary: _Vocabulary, values: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """BPE whose merges are those pairs of pieces that make a piece, best score first; bytes for what no piece covers.

    As in SentencePiece, a space stands before every stretch of text (`add_space_prefix`), also after a special token,
    and a text's own leading space is kept beside it.
    """
    unknown = vocabulary.index("unknown_token_id", values)
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocabulary.ids(),
            merges=_merges_from_scores(vocabulary, values["scores"]),
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    add_space_prefix = values.get("add_space_prefix", True)
    replace = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if add_space_prefix else replace
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if add_space_prefix else steps)
    return backend


def _merges_from_scores(vocabulary: _Vocabulary, scores: list[float]) -> list[tuple[str, str]]:
    """Every way to make a normal piece of two others, in falling order of its score; among those of one piece, the
    shorter left part first."""
    score = {
        token: value
        for token, kind, value in zip(vocabulary.tokens, vocabulary.types, scores, strict=True)
        if kind == TokenType.NORMAL
    }
    longest = max(map(len, score), default=0)
    if longest > MAX_PIECE_LENGTH:
        raise ValueError(f"a piece has {longest} characters, the limit is {MAX_PIECE_LENGTH}")
    pieces = sorted((piece for piece in score if len(piece) > 1), key=lambda piece: -score[piece])
    return [
        (piece[:cut], piece[cut:])
        for piece in pieces
        for cut in range(1, len(piece))
        if piece[:cut] in score and piece[cut:] in score
    ]
