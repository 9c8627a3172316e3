"""The tokenizer of a Hugging Face folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from .checkpoint import CheckpointError, read_json_object
from .tokenizer import Tokenizer

OTHER_FILES = (
    "tokenizer.model",
    "spiece.model",
    "tekken.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
"""Files that show that a folder means to bring a tokenizer; without `tokenizer.json` they are not enough."""


def folder_tokenizer(path: Path) -> Tokenizer | None:
    """Read `tokenizer.json`, and the files beside it where they are.

    `tokenizer_config.json` and `special_tokens_map.json` name the special tokens and may add tokens. What is put around
    a text is for `tokenizer.json` alone to say: as in transformers 5, `add_bos_token` and `add_eos_token` beside it are
    passed over. The chat template is `chat_template.jinja`, else the config's `chat_template`: a string, or several
    with names, of which `default` or the only one counts.

    Returns:
        None when there are no tokenizer files at all.

    Raises:
        CheckpointError: there is a tokenizer, but no `tokenizer.json`; or a file is damaged.
    """
    file = path / "tokenizer.json"
    if not file.is_file():
        found = [name for name in OTHER_FILES if (path / name).is_file()]
        if not found:
            return None
        raise CheckpointError(
            f"{path}: has {', '.join(found)} but no tokenizer.json, the only kind of tokenizer that can be read; "
            "transformers writes one: AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more special
        raise CheckpointError(f"{file}: is not a tokenizer that can be read: {error}") from error
    config = _read_optional(path / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:  # a config that has it is complete, and a map beside it only a leftover
        config |= _read_optional(path / "special_tokens_map.json")
    special_tokens = _special_tokens(config)
    try:
        _add_tokens(backend, config, special_tokens)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: tokenizer_config.json adds tokens in an unknown form: {error}") from error
    backend.encode_special_tokens = bool(config.get("split_special_tokens"))
    return Tokenizer(backend, special_tokens=special_tokens, chat_template=_chat_template(path, config))


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and the like; each is written as a text, or as an object with the text as its `content`."""
    named = {name: value for name, value in config.items() if name.endswith("_token")}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in named.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _add_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any], special_tokens: Mapping[str, str]) -> None:
    """Give the backend the tokens that only the config has; those that it knows as added tokens stay as they are."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    numbered = sorted((config.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0]))
    listed = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    specials = [*(config[name] for name in special_tokens), *(listed.values() if isinstance(listed, dict) else listed)]
    for token in [_added_token(value) for _, value in numbered] + [_added_token(v, special=True) for v in specials]:
        if token.content not in known:
            known.add(token.content)
            backend.add_tokens([token])


def _added_token(value: str | dict[str, Any], special: bool = False) -> AddedToken:
    if isinstance(value, str):
        return AddedToken(value, special=special, normalized=not special)
    fields = {name: value[name] for name in ("lstrip", "rstrip", "single_word", "normalized") if name in value}
    return AddedToken(value["content"], special=special or bool(value.get("special")), **fields)


def _chat_template(path: Path, config: Mapping[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{file}: is not UTF-8 text: {error.reason} at byte {error.start}") from error
    template = config.get("chat_template")
    if isinstance(template, list) and all(isinstance(entry, dict) for entry in template):
        template = {entry.get("name"): entry.get("template") for entry in template}
    if isinstance(template, dict):
        template = template.get("default", next(iter(template.values())) if len(template) == 1 else None)
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"{path / 'tokenizer_config.json'}: chat_template must be a text, not {template!r}")
    return template
