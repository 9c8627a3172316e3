"""The tokenizer of a Hugging Face folder."""

import logging
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from .files import CheckpointError, list_folder, read_file, read_json_object, read_optional, read_text, shorten
from .tokenizer import Tokenizer, library_errors

logger = logging.getLogger(__name__)

TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_FOLDER = "additional_chat_templates"
OLD_TEMPLATE_FILE = "chat_template.json"

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


def folder_tokenizer(path: Path, vocab_size: int | None = None) -> Tokenizer | None:
    """Read `tokenizer.json`, and the files beside it where they are.

    `tokenizer_config.json` and `special_tokens_map.json` name the special tokens and may add tokens. What is put around
    a text is for `tokenizer.json` alone to say: as in transformers 5, `add_bos_token` and `add_eos_token` beside it are
    passed over.

    Chat templates are `chat_template.jinja` and, by name, `additional_chat_templates/*.jinja`; else the config's
    `chat_template`, a text or several with names; else that of `chat_template.json`.

    Args:
        vocab_size: of the model, which the tokenizer must fit; None: not known.

    Returns:
        None when there are no tokenizer files at all.

    Raises:
        CheckpointError: there is a tokenizer, but no `tokenizer.json`; a file is damaged; or the tokenizer is another
            model's: `Tokenizer.check_vocabulary`.
    """
    names = list_folder(path)
    file = path / "tokenizer.json"
    if file.name not in names:
        found = [name for name in OTHER_FILES if name in names]
        if not found:
            return None
        raise CheckpointError(
            f"{path}: has {', '.join(found)} but no tokenizer.json, the only kind of tokenizer that can be read; "
            "transformers writes one: AutoTokenizer.from_pretrained(...).save_pretrained(...). "
            "For token ids none is needed: skip_tokenizer_init"
        )
    data = read_file(file)
    with library_errors(f"{file}: is not a tokenizer that can be read"):
        backend = tokenizers.Tokenizer.from_buffer(data)
    config = read_optional(path, "tokenizer_config.json", names)
    if "added_tokens_decoder" not in config:  # a config that has it is complete, and a map beside it only a leftover
        config |= read_optional(path, "special_tokens_map.json", names)
    special_tokens = _special_tokens(config, path)
    with library_errors(f"{path}: tokenizer_config.json adds tokens in an unknown form"):
        _add_tokens(backend, config, special_tokens)
        moved = _moved_tokens(backend, config)
    if moved:
        logger.warning(f"{path}: tokenizer_config.json numbers tokens otherwise than tokenizer.json: {shorten(moved)}")
    backend.encode_special_tokens = bool(config.get("split_special_tokens"))
    chat_templates = _chat_templates(path, names, config)
    with library_errors(f"{file}: is not a tokenizer that can be used"):
        tokenizer = Tokenizer(backend, special_tokens=special_tokens, chat_templates=chat_templates)
    if vocab_size is not None:
        tokenizer.check_vocabulary(vocab_size, path)
    return tokenizer


def _special_tokens(config: Mapping[str, Any], path: Path) -> dict[str, str]:
    """`bos_token` and the like; each is written as a text, or as an object with the text as its `content`."""
    named = {name: value for name, value in config.items() if name.endswith("_token")}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in named.items()}
    for name in ("bos_token", "eos_token"):
        if named.get(name) is not None and not isinstance(texts[name], str):
            raise CheckpointError(f"{path}: the tokenizer's {name} must be a text or null, not {named[name]!r}")
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


def _moved_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> list[str]:
    """Tokens that have another id than the config says. As in transformers, the backend's stands."""
    numbered = (config.get("added_tokens_decoder") or {}).items()
    said = {_added_token(value).content: int(number) for number, value in numbered}
    ids = {content: backend.token_to_id(content) for content in said}
    return [
        f"{content!r} is {ids[content]}, not {number}" for content, number in said.items() if ids[content] != number
    ]


def _added_token(value: str | dict[str, Any], special: bool = False) -> AddedToken:
    if isinstance(value, str):
        return AddedToken(value, special=special, normalized=not special)
    fields = {name: value[name] for name in ("lstrip", "rstrip", "single_word", "normalized") if name in value}
    return AddedToken(value["content"], special=special or bool(value.get("special")), **fields)


def _chat_templates(path: Path, names: Set[str], config: Mapping[str, Any]) -> dict[str, str]:
    templates = {"default": read_text(path / TEMPLATE_FILE)} if TEMPLATE_FILE in names else {}
    if TEMPLATE_FOLDER in names:
        folder = path / TEMPLATE_FOLDER
        files = sorted(name for name in list_folder(folder) if name.endswith(".jinja"))
        templates |= {name.removesuffix(".jinja"): read_text(folder / name) for name in files}
    if templates:
        return templates
    source, written = path / "tokenizer_config.json", config.get("chat_template")
    if written is None and OLD_TEMPLATE_FILE in names:
        source = path / OLD_TEMPLATE_FILE
        written = read_json_object(source).get("chat_template")
    if isinstance(written, list) and all(isinstance(entry, dict) for entry in written):
        written = {entry.get("name"): entry.get("template") for entry in written}
    if isinstance(written, str):
        written = {"default": written}
    found = {} if written is None else written
    if not isinstance(found, dict) or not all(isinstance(text, str) for pair in found.items() for text in pair):
        raise CheckpointError(f"{source}: chat_template must be a text, or texts by name, not {written!r}")
    return found
