"""Tokenizers of Hugging Face folders give the ids and texts that transformers gives."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ostinato.weights import CheckpointError
from ostinato.weights.folder_tokenizer import folder_tokenizer
from ostinato.weights.tokenizer import Tokenizer, library_errors

CORPUS = [
    "the rain in the plain falls mainly on the train",
    "def fibonacci(n):\n\treturn n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)",
    "naïve café — “quotes” and 3.14 or 1,000",
] * 4
TEXTS = {
    "empty": "",
    "space": " ",
    "spaces": "  two  spaces ",
    "controls": "tabs\tand\nnewlines\r\n\n\n",
    "numbers": "1234567890 3.14 1,000",
    "accents": "naïve café — “quotes”",
    "cjk": "日本語とEnglishの混在",
    "emoji": "👩‍👩‍👧‍👦 🇫🇷 \u200bzero\u200dwidth",
    "specials": "<|user|>hi<|end|> <|end|><|user|>",
    "bos": "<s>text",
    "bos-twice": "<s><s>text",
    "bos-inside": "text <s> text",
    "bos-after-space": " <s>text",
    "unusual": "<unk>\x00�Å Å",
}
CHAT = "{{ bos_token }}{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}"
MESSAGES = [{"role": "user", "content": "rain on the train"}]


def byte_level() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    specials = ["<unk>", "<s>", "</s>", "<|user|>", "<|end|>"]
    backend.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=340, special_tokens=specials, initial_alphabet=alphabet, show_progress=False),
    )
    return backend


def digits_and_words() -> Backend:
    backend = byte_level()
    words = pre_tokenizers.Split(Regex(r"\p{N}{1,3}| ?\p{L}+|\s+|[^\s\p{L}\p{N}]+"), behavior="isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, level])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def byte_fallback(legacy: bool) -> Backend:
    trained = Backend(models.BPE(byte_fallback=True))
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    trained.train_from_iterator([line.lower() for line in CORPUS], trainer)
    model = json.loads(trained.to_str())["model"]
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = dict(model["vocab"]) | {piece: len(model["vocab"]) + byte for byte, piece in enumerate(pieces)}
    merges = [tuple(merge) for merge in model["merges"]]
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    replace = decoders.Replace("▁", " ")
    backend.decoder = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    if legacy:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>", "<|user|>")])
    backend.add_special_tokens([AddedToken("<|end|>", normalized=False, rstrip=True)])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def unigram() -> Backend:
    """SentencePiece's other model, with bytes for what has no piece."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("▁", -2.0), ("▁the", -3.0), ("▁rain", -4.0), ("in", -3.5)]
    pieces += [(letter, -6.0) for letter in "abcdefghijklmnopqrstuvwxyz0123456789.,"]
    pieces += [(f"<0x{byte:02X}>", -12.0) for byte in range(256)]
    backend = Backend(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")])
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>", "<|user|>")])
    backend.add_special_tokens([AddedToken("<|end|>", normalized=False, lstrip=True)])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return backend


BACKENDS: dict[str, Callable[[], Backend]] = {
    "byte-level": byte_level,
    "words-adds-bos": digits_and_words,
    "byte-fallback": lambda: byte_fallback(legacy=False),
    "byte-fallback-legacy": lambda: byte_fallback(legacy=True),
    "unigram": unigram,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each kind of tokenizer as transformers saves it."""
    root = tmp_path_factory.mktemp("tokenizers")
    for name, make in BACKENDS.items():
        saved = PreTrainedTokenizerFast(
            tokenizer_object=make(), bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=CHAT
        )
        saved.save_pretrained(root / name)
    return {name: root / name for name in BACKENDS}


def load(path: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_folder(path)
    assert tokenizer is not None
    return tokenizer


def edit(folder: Path, target: Path, changes: dict[str, Any], special_tokens_map: dict[str, Any] | None = None) -> Path:
    """A copy of a folder with changes to its tokenizer_config.json; `...` takes a key out."""
    shutil.copytree(folder, target)
    config = json.loads((target / "tokenizer_config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if value is not ...}
    (target / "tokenizer_config.json").write_text(json.dumps(config))
    if special_tokens_map is not None:
        (target / "special_tokens_map.json").write_text(json.dumps(special_tokens_map))
    return target


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_ids_and_text_are_those_of_transformers(folders: dict[str, Path], name: str, text: str) -> None:
    ours, theirs = load(folders[name]), AutoTokenizer.from_pretrained(folders[name])
    ids = ours.encode(text, add_special_tokens=False)
    assert ids == theirs(text, add_special_tokens=False).input_ids
    for skip in (True, False):
        assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    if not text.startswith("<s>"):  # there we add no second BOS: B18
        assert ours.encode(text) == theirs(text).input_ids


@pytest.mark.parametrize("name", BACKENDS)
def test_any_text_and_any_ids(folders: dict[str, Path], name: str) -> None:
    ours, theirs = load(folders[name]), AutoTokenizer.from_pretrained(folders[name])

    @settings(max_examples=100, deadline=None, derandomize=True)
    @given(st.text(), st.lists(st.integers(0, ours.vocab_size - 1)))
    def check(text: str, ids: list[int]) -> None:
        assert ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False).input_ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)

    check()


@pytest.mark.parametrize("name", BACKENDS)
def test_facts(folders: dict[str, Path], name: str) -> None:
    ours, theirs = load(folders[name]), AutoTokenizer.from_pretrained(folders[name])
    assert (ours.bos_token, ours.bos_token_id) == ("<s>", theirs.bos_token_id)
    assert ours.eos_token_ids == (theirs.eos_token_id,)
    assert ours.vocab_size == len(theirs)
    assert ours.special_ids == set(theirs.convert_tokens_to_ids(["<unk>", "<s>", "</s>", "<|user|>", "<|end|>"]))
    assert ours.chat_template == CHAT


ADDING = {
    "bos": {"add_bos_token": True},
    "eos": {"add_eos_token": True},
    "both": {"add_bos_token": True, "add_eos_token": True},
    "no-bos": {"add_bos_token": False},
    "bos-without-a-token": {"add_bos_token": True, "bos_token": None},
    "null": {"add_bos_token": None},
}


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("changes", ADDING.values(), ids=ADDING)
def test_what_is_added_is_for_tokenizer_json_to_say(
    folders: dict[str, Path], name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    folder = edit(folders[name], tmp_path / "edited", changes)
    ours, theirs = load(folder), AutoTokenizer.from_pretrained(folder)
    for text in ("rain", "", "a <|end|> b"):
        assert ours.encode(text) == theirs(text).input_ids


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("add_bos_token", [True, False, ...], ids=["add", "do-not-add", "unsaid"])
def test_bos_of_a_text_is_not_doubled(folders: dict[str, Path], name: str, add_bos_token: Any, tmp_path: Path) -> None:
    """B18: plain text gets what the tokenizer says, and a BOS that is written out already is the only one."""
    tokenizer = load(edit(folders[name], tmp_path / "edited", {"add_bos_token": add_bos_token}))
    adds = name != "byte-level"
    bos = tokenizer.bos_token_id
    for text in ("rain", "", "rain<s>"):
        plain = tokenizer.encode(text, add_special_tokens=False)
        end = [2] if name == "unigram" else []
        assert tokenizer.encode(text) == ([bos, *plain, *end] if adds else plain)
    for text in ("<s>rain", "<s>", "<s><s>rain"):
        end = [2] if name == "unigram" else []
        assert tokenizer.encode(text) == [*tokenizer.encode(text, add_special_tokens=False), *end]
    assert tokenizer.encode("<s>rain").count(bos) == 1


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("add_bos_token", [True, False, ...], ids=["add", "do-not-add", "unsaid"])
@pytest.mark.parametrize("template", [CHAT, CHAT.removeprefix("{{ bos_token }}")], ids=["writes-bos", "without-bos"])
def test_bos_of_a_chat_is_the_templates(
    folders: dict[str, Path], name: str, add_bos_token: Any, template: str, tmp_path: Path
) -> None:
    """B18: BOS once if the template writes it, else not at all, whatever the tokenizer adds to plain text."""
    folder = edit(folders[name], tmp_path / "edited", {"add_bos_token": add_bos_token})
    (folder / "chat_template.jinja").write_text(template)
    ours, theirs = load(folder), AutoTokenizer.from_pretrained(folder)
    ids = ours.encode_chat(MESSAGES)
    assert ids == theirs.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert ids.count(ours.bos_token_id or 0) == template.startswith("{{ bos_token }}")


def test_a_rendered_chat_given_as_text_has_one_bos(folders: dict[str, Path]) -> None:
    """B18: the prompt that a template made, sent down the road of plain text."""
    tokenizer = load(folders["words-adds-bos"])
    assert tokenizer.encode(tokenizer.apply_chat_template(MESSAGES)) == tokenizer.encode_chat(MESSAGES)


EXTRA = {"content": "<|extra|>", "lstrip": True, "normalized": False, "rstrip": False, "single_word": False}
ADDED_TOKENS = {
    "numbered": ({"added_tokens_decoder": {"900": EXTRA | {"special": True}}}, None),
    "numbered-plain": ({"added_tokens_decoder": {"900": EXTRA | {"special": False}}}, None),
    "numbered-known": ({"added_tokens_decoder": {"1": EXTRA | {"content": "<s>", "special": False}}}, None),
    "listed": ({"additional_special_tokens": ["<|extra|>", "<|end|>"]}, None),
    "listed-objects": ({"extra_special_tokens": [EXTRA | {"__type": "AddedToken", "special": True}]}, None),
    "named": ({"extra_special_tokens": {"image_token": "<|extra|>"}}, None),
    "eos-not-in-vocabulary": ({"eos_token": "<|extra|>"}, None),
    "eos-object": ({"eos_token": EXTRA | {"__type": "AddedToken", "special": True}}, None),
    "map-alone": ({"eos_token": ..., "bos_token": ...}, {"eos_token": "<|end|>", "bos_token": EXTRA}),
    "map-beside": ({"eos_token": "</s>"}, {"eos_token": "<|end|>"}),
    "map-outdated": ({"added_tokens_decoder": {}, "eos_token": "</s>"}, {"eos_token": "<|end|>"}),
    "no-special-tokens": ({"eos_token": None, "bos_token": None, "unk_token": None}, None),
    "split-special-tokens": ({"split_special_tokens": True}, None),
}


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(("changes", "special_tokens_map"), ADDED_TOKENS.values(), ids=ADDED_TOKENS)
def test_special_tokens_of_the_config(
    folders: dict[str, Path],
    name: str,
    changes: dict[str, Any],
    special_tokens_map: dict[str, Any] | None,
    tmp_path: Path,
) -> None:
    """B11: the tokenizer's part of the stop ids, in each of the shapes in which it is written."""
    folder = edit(folders[name], tmp_path / "edited", changes, special_tokens_map)
    ours, theirs = load(folder), AutoTokenizer.from_pretrained(folder)
    for text in ("rain <|extra|> rain", "<s><|end|> rain"):
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == theirs(text, add_special_tokens=False).input_ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.eos_token_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))
    assert (ours.bos_token, ours.bos_token_id) == (theirs.bos_token, theirs.bos_token_id)


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(2)
    backend.enable_padding(length=64)
    backend.save(str(tmp_path / "tokenizer.json"))
    text = "the rain in the plain"
    assert load(tmp_path).encode(text) == byte_level().encode(text).ids


def test_tokenizer_json_alone_is_enough(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    tokenizer = load(tmp_path)
    assert (tokenizer.bos_token, tokenizer.bos_token_id, tokenizer.eos_token_ids) == (None, None, ())
    assert tokenizer.decode(tokenizer.encode("rain <|end|>")) == "rain "


OTHER, TOOLS = "{{ 'other' }}", "{{ 'tools' }}"
TEMPLATES = {
    "file": (..., CHAT, CHAT),
    "string": (CHAT, None, CHAT),
    "file-beats-string": (OTHER, CHAT, CHAT),
    "named": ([{"name": "tool_use", "template": TOOLS}, {"name": "default", "template": CHAT}], None, CHAT),
    "only-one": ([{"name": "chat", "template": CHAT}], None, CHAT),
    "no-default": ([{"name": "a", "template": OTHER}, {"name": "b", "template": TOOLS}], None, None),
    "object": ({"default": CHAT, "tool_use": TOOLS}, None, CHAT),
    "null": (None, None, None),
    "absent": (..., None, None),
}


@pytest.mark.parametrize(("in_config", "in_file", "expected"), TEMPLATES.values(), ids=TEMPLATES)
def test_where_the_chat_template_is_found(
    folders: dict[str, Path], in_config: Any, in_file: str | None, expected: str | None, tmp_path: Path
) -> None:
    folder = edit(folders["byte-level"], tmp_path / "edited", {"chat_template": in_config})
    (folder / "chat_template.jinja").unlink()
    if in_file is not None:
        (folder / "chat_template.jinja").write_text(in_file, encoding="utf-8")
    assert load(folder).chat_template == expected


SCHEMA = {"type": "function", "function": {"name": "clock", "description": "", "parameters": {"type": "object"}}}
NAMED: dict[str, tuple[Any, dict[str, str]]] = {
    "listed": ([{"name": "tool_use", "template": TOOLS}, {"name": "default", "template": CHAT}], {}),
    "listed-more": ([{"name": "rag", "template": OTHER}, {"name": "default", "template": CHAT}], {}),
    "listed-without-default": ([{"name": "tool_use", "template": TOOLS}, {"name": "rag", "template": OTHER}], {}),
    "files": (..., {"chat_template.jinja": CHAT, "additional_chat_templates/tool_use.jinja": TOOLS}),
    "files-beat-listed": (
        [{"name": "rag", "template": OTHER}],
        {"chat_template.jinja": CHAT, "additional_chat_templates/tool_use.jinja": TOOLS},
    ),
    "one-file": (..., {"chat_template.jinja": CHAT}),
}


@pytest.mark.parametrize(("in_config", "files"), NAMED.values(), ids=NAMED)
def test_which_of_several_templates_is_used(
    folders: dict[str, Path], in_config: Any, files: dict[str, str], tmp_path: Path
) -> None:
    """As in transformers: by name, else `tool_use` if there are tools, else the default; else an error."""
    folder = edit(folders["byte-level"], tmp_path / "edited", {"chat_template": in_config})
    (folder / "chat_template.jinja").unlink()
    for name, source in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(source, encoding="utf-8")
    ours, theirs = load(folder), AutoTokenizer.from_pretrained(folder)

    def result(render: Callable[..., str], **arguments: Any) -> str:
        try:
            return render(MESSAGES, add_generation_prompt=True, **arguments)
        except ValueError:
            return "refused"

    for tools in (None, [SCHEMA]):
        for name in (None, *ours.chat_templates, "{{ messages | length }} messages"):
            if name == "default" and len(ours.chat_templates) == 1:
                continue  # to transformers that is Jinja source
            expected = result(theirs.apply_chat_template, tools=tools, chat_template=name, tokenize=False)
            assert result(ours.apply_chat_template, tools=tools, template=name) == expected


def test_several_templates_and_no_default_are_listed(folders: dict[str, Path], tmp_path: Path) -> None:
    templates = [{"name": "b", "template": TOOLS}, {"name": "a", "template": OTHER}]
    folder = edit(folders["byte-level"], tmp_path / "edited", {"chat_template": templates})
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="no default chat template; name one of those that it has: a, b"):
        load(folder).encode_chat(MESSAGES)
    assert load(folder).apply_chat_template(MESSAGES, template="a") == "other"
    with pytest.raises(ValueError, match="no chat template is called 'c'; there are: a, b"):
        load(folder).encode_chat(MESSAGES, template="c")


def test_the_old_file_of_a_processor_is_the_last_resort(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = edit(folders["byte-level"], tmp_path / "edited", {})
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": OTHER}))
    assert load(folder).chat_template == CHAT
    (folder / "chat_template.jinja").unlink()
    assert load(folder).chat_template == OTHER


@pytest.mark.parametrize("name", BACKENDS)
def test_vocabulary_of_the_model(folders: dict[str, Path], name: str, caplog: pytest.LogCaptureFixture) -> None:
    """A model may have ids that the tokenizer has not: padding. The other way round there is no embedding."""
    tokenizer = load(folders[name])
    for vocab_size in (tokenizer.vocab_size, tokenizer.vocab_size + 20):
        tokenizer.check_vocabulary(vocab_size, Path("m"))
    assert not caplog.records
    tokenizer.check_vocabulary(tokenizer.vocab_size + 100, Path("m"))
    assert "is it the tokenizer of this model?" in caplog.text
    ordinary = tokenizer._backend.get_vocab_size(with_added_tokens=False)
    sizes = rf"m: the tokenizer has {tokenizer.vocab_size} tokens and the model's vocab_size is"
    with pytest.raises(CheckpointError, match=rf"{sizes} {ordinary - 1}: its highest token .* the id {ordinary - 1}"):
        tokenizer.check_vocabulary(ordinary - 1, Path("m"))


def test_a_token_that_was_added_and_has_no_embedding(
    folders: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Choose: told of and left alone if no text needs it, such as a padding token; refused if it is an end."""
    size = load(folders["byte-level"]).vocab_size
    padded = load(edit(folders["byte-level"], tmp_path / "pad", {"pad_token": "<pad>"}))
    padded.check_vocabulary(size, Path("m"))
    [record] = caplog.records
    assert (
        f"has {size + 1} tokens and the model's vocab_size is {size}; prompts with one of these are refused: '<pad>'"
        in (record.getMessage())
    )
    ended = load(edit(folders["byte-level"], tmp_path / "eos", {"eos_token": "<new-end>"}))
    with pytest.raises(CheckpointError, match=f"its eos_token '<new-end>' has the id {size}, for which there is no"):
        ended.check_vocabulary(size, Path("m"))


def test_a_folder_is_compared_with_its_model(folders: dict[str, Path]) -> None:
    with pytest.raises(CheckpointError, match=r"byte-level: the tokenizer has \d+ tokens and .* vocab_size is 7"):
        folder_tokenizer(folders["byte-level"], 7)


def test_ids_put_around_a_text_must_exist(tmp_path: Path) -> None:
    backend = byte_level()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 900)])
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="what it puts around a text None has the id 900"):
        folder_tokenizer(tmp_path, 400)


def test_a_text_without_tokens_is_a_value_error(tmp_path: Path) -> None:
    """The library raises a bare Exception."""
    Backend(models.WordLevel({"a": 0}, unk_token="<unk>")).save(str(tmp_path / "tokenizer.json"))
    assert load(tmp_path).encode("a") == [0]
    with pytest.raises(ValueError, match="the tokenizer cannot encode this text: "):
        load(tmp_path).encode("b")


def test_a_panic_of_the_library_is_an_error_like_others() -> None:
    class PanicException(BaseException):
        pass

    with pytest.raises(CheckpointError, match="the file: index out of bounds"), library_errors("the file"):
        raise PanicException("index out of bounds")
    with pytest.raises(KeyboardInterrupt), library_errors("the file"):
        raise KeyboardInterrupt


def test_without_a_chat_template_only_chats_fail(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="no chat template"):
        load(tmp_path).encode_chat(MESSAGES)


def test_template_variables_win_over_special_tokens(folders: dict[str, Path]) -> None:
    tokenizer = load(folders["byte-level"])
    assert tokenizer.apply_chat_template(MESSAGES, bos_token="<|end|>").startswith("<|end|><|user|>")


def test_no_tokenizer_files_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert Tokenizer.from_folder(tmp_path) is None


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json", "tekken.json", "tokenizer_config.json"])
def test_a_tokenizer_of_another_kind_is_refused_by_name(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(CheckpointError, match=rf"{name} but no tokenizer\.json.*save_pretrained"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("content", ["", '{"model": ', "[]"], ids=["empty", "cut", "list"])
def test_a_damaged_file_is_named(folders: dict[str, Path], name: str, content: str, tmp_path: Path) -> None:
    folder = edit(folders["byte-level"], tmp_path / "edited", {})
    (folder / name).write_text(content)
    with pytest.raises(CheckpointError, match=name):
        Tokenizer.from_folder(folder)


ODD_CONFIGS: dict[str, tuple[str, Any]] = {
    "decoder-is-a-list": ("added_tokens_decoder", [1]),
    "id-is-a-word": ("added_tokens_decoder", {"first": {"content": "<new>"}}),
    "no-content": ("added_tokens_decoder", {"7": {}}),
    "token-is-a-number": ("added_tokens_decoder", {"7": 3}),
    "content-is-a-number": ("added_tokens_decoder", {"7": {"content": 5}}),
    "flag-is-a-word": ("added_tokens_decoder", {"7": {"content": "<new>", "lstrip": "yes"}}),
    "specials-are-a-number": ("additional_special_tokens", 3),
    "special-is-a-number": ("additional_special_tokens", [3]),
    "template-is-a-number": ("chat_template", 3),
    "template-entry-is-a-number": ("chat_template", [3]),
    "template-entry-is-a-list": ("chat_template", [{"name": "default", "template": []}]),
}


@pytest.mark.parametrize(("key", "value"), ODD_CONFIGS.values(), ids=ODD_CONFIGS)
def test_a_config_of_another_form_is_refused(folders: dict[str, Path], key: str, value: Any, tmp_path: Path) -> None:
    folder = edit(folders["byte-level"], tmp_path / "edited", {key: value})
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        Tokenizer.from_folder(folder)


def test_a_chat_template_that_is_no_text_is_named(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = edit(folders["byte-level"], tmp_path / "edited", {})
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja: is not UTF-8"):
        Tokenizer.from_folder(folder)


def test_ids_that_are_not_there_give_no_text(folders: dict[str, Path]) -> None:
    tokenizer = load(folders["byte-level"])
    ids = tokenizer.encode("rain", add_special_tokens=False)
    assert tokenizer.decode([-1, *ids, tokenizer.vocab_size, 2**40]) == "rain"


def test_half_a_surrogate_pair_is_refused(folders: dict[str, Path]) -> None:
    """B55, at the tokenizer: what JSON can hold and UTF-8 cannot."""
    tokenizer = load(folders["byte-level"])
    with pytest.raises(ValueError, match=r"'\\ud83d' at position 2"):
        tokenizer.encode("ab\ud83d")
    with pytest.raises(ValueError, match="surrogate"):
        tokenizer.encode_chat([{"role": "user", "content": "\ud83d"}])


def test_only_text_is_encoded(folders: dict[str, Path]) -> None:
    with pytest.raises(TypeError, match="not list"):
        load(folders["byte-level"]).encode(["rain"])  # type: ignore[arg-type]
