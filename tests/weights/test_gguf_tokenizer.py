"""Tokenizers built from GGUF metadata give the ids of the tokenizer that the metadata were made from."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from ostinato.weights.checkpoint import CheckpointError
from ostinato.weights.gguf_checkpoint import GGUFCheckpoint
from ostinato.weights.gguf_tokenizer import gguf_tokenizer
from ostinato.weights.tokenizer import Tokenizer

DATA = Path(__file__).parents[1] / "data"
FILE = Path("model.gguf")
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
CORPUS = [
    "The rain in the plain falls mainly on the train; it's 1234567 o'clock, isn't it?",
    "def fibonacci(n):\n\treturn n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\r\n\n",
    "naïve café — “quotes” and 3.14 or 1,000  ½ ²  日本語とEnglishの混在",
    "WE'LL SHOUT   and    indent\n    again and again",
] * 4
TEXTS = [
    *CORPUS,
    "  two  spaces ",
    "12 345 \uff16\uff17",
    "Å and Å",
    "don'T",
    "x\n\n  y",
    "🙂🙂 \u200b",
    "<|end|>a<|end|> b",
    "<tool>1</tool>",
]
CHAT = "{{ bos_token }}{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"


def gpt2() -> list[Any]:
    return [pre_tokenizers.ByteLevel(add_prefix_space=False)]


def smollm() -> list[Any]:
    return [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]


def by_regex(digits: str) -> list[Any]:
    """The pre-tokenizer in the tokenizer.json of Llama 3 (three digits) and Qwen 2 (one)."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


KINDS: dict[str, tuple[Callable[[], list[Any]], bool]] = {
    "gpt-2": (gpt2, False),
    "default": (gpt2, False),
    "smollm": (smollm, False),
    "llama-bpe": (lambda: by_regex("{1,3}"), True),
    "qwen2": (lambda: by_regex(""), False),
}
"""How each kind cuts a text, and whether it puts BOS in front unless told otherwise."""


def reference(kind: str) -> Backend:
    """A tokenizer as the model's own tokenizer.json would describe it, trained here."""
    backend = Backend(models.BPE(ignore_merges=kind == "llama-bpe"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(KINDS[kind][0]())
    backend.decoder = decoders.ByteLevel()
    if kind == "qwen2":
        backend.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=["<s>", "</s>", "<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("</tool>", normalized=False)])
    return backend


def metadata_of(backend: Backend, kind: str | None, **changes: Any) -> dict[str, Any]:
    """What a GGUF file says of a byte-level tokenizer; a change to `...` leaves a key out."""
    model = json.loads(backend.to_str())["model"]
    vocab = backend.get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=vocab.__getitem__)
    types = {"<s>": CONTROL, "</s>": CONTROL, "<|end|>": CONTROL, "<tool>": USER_DEFINED, "</tool>": USER_DEFINED}
    values = {
        "model": "gpt2",
        "pre": kind,
        "tokens": tokens,
        "token_type": [types.get(token, NORMAL) for token in tokens],
        "merges": [" ".join(merge) for merge in model["merges"]],
        "bos_token_id": vocab["<s>"],
        "eos_token_id": vocab["</s>"],
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not ...} | {
        "tokenizer.chat_template": CHAT
    }


def build(metadata: dict[str, Any]) -> Tokenizer:
    tokenizer = gguf_tokenizer(metadata, FILE)
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_cuts_as_its_model_does(kind: str) -> None:
    backend = reference(kind)
    tokenizer = build(metadata_of(backend, kind))
    for text in TEXTS:
        ids = backend.encode(text).ids
        assert tokenizer.encode(text, add_special_tokens=False) == ids
        for skip in (True, False):
            assert tokenizer.decode(ids, skip_special_tokens=skip) == backend.decode(ids, skip_special_tokens=skip)

    @settings(max_examples=100, deadline=None, derandomize=True)
    @given(st.text())
    def check(text: str) -> None:
        assert tokenizer.encode(text, add_special_tokens=False) == backend.encode(text).ids

    check()


def test_the_kinds_differ() -> None:
    """The texts above would show one kind taken for another: same vocabulary, other ids."""
    backend = reference("gpt-2")
    kinds = ("gpt-2", "smollm", "llama-bpe", "qwen2")
    ids = {kind: [build(metadata_of(backend, kind)).encode(text, False) for text in TEXTS] for kind in kinds}
    assert all(ids[a] != ids[b] for a in ids for b in ids if a != b)


def test_smollm_takes_digits_one_by_one() -> None:
    tokenizer = build(metadata_of(reference("gpt-2"), "smollm"))
    assert [tokenizer.decode([index]) for index in tokenizer.encode("1234567")] == list("1234567")


@pytest.mark.parametrize(("alias", "kind"), [("llama3", "llama-bpe"), ("llama-v3", "llama-bpe"), (..., "gpt-2")])
def test_other_names_of_a_kind(alias: Any, kind: str) -> None:
    backend = reference(kind)
    named, aliased = build(metadata_of(backend, kind)), build(metadata_of(backend, alias))
    assert [named.encode(text) for text in TEXTS] == [aliased.encode(text) for text in TEXTS]


def test_llama_3_takes_a_word_that_is_a_token_whole() -> None:
    metadata = metadata_of(reference("llama-bpe"), "llama-bpe")
    tokens = metadata["tokenizer.ggml.tokens"]
    tokens.append("Ġuncommonword")
    metadata["tokenizer.ggml.token_type"].append(NORMAL)
    assert build(metadata).encode(" uncommonword", add_special_tokens=False) == [len(tokens) - 1]
    metadata["tokenizer.ggml.pre"] = "qwen2"
    assert len(build(metadata).encode(" uncommonword", add_special_tokens=False)) > 1


def test_facts() -> None:
    """B11: all three ways in which a file names an end of text count."""
    backend = reference("gpt-2")
    end, tool = backend.token_to_id("<|end|>"), backend.token_to_id("</tool>")
    tokenizer = build(metadata_of(backend, "gpt-2", eot_token_id=end, eom_token_id=tool))
    assert (tokenizer.bos_token, tokenizer.bos_token_id) == ("<s>", backend.token_to_id("<s>"))
    assert tokenizer.eos_token_ids == (backend.token_to_id("</s>"), end, tool)
    assert tokenizer.special_ids == {backend.token_to_id(token) for token in ("<s>", "</s>", "<|end|>")}
    assert tokenizer.vocab_size == backend.get_vocab_size()
    assert tokenizer.chat_template == CHAT
    bare = build(metadata_of(backend, "gpt-2", bos_token_id=..., eos_token_id=..., token_type=...))
    assert (bare.bos_token, bare.bos_token_id, bare.eos_token_ids, bare.special_ids) == (None, None, (), frozenset())


ADDING: dict[str, tuple[dict[str, Any], bool | None, bool]] = {
    "unsaid": ({}, None, False),
    "bos": ({"add_bos_token": True}, True, False),
    "no-bos": ({"add_bos_token": False}, False, False),
    "eos": ({"add_eos_token": True, "add_bos_token": True}, True, True),
    "bos-is-eos": ({"add_eos_token": True, "add_bos_token": True, "eos_token_id": 0}, True, True),
    "no-such-token": ({"add_bos_token": True, "bos_token_id": ...}, False, False),
}


@pytest.mark.parametrize("kind", [*KINDS, "sentencepiece"])
@pytest.mark.parametrize(("changes", "adds_bos", "adds_eos"), ADDING.values(), ids=ADDING)
def test_bos_is_never_doubled(kind: str, changes: dict[str, Any], adds_bos: bool | None, adds_eos: bool) -> None:
    """B18: plain text by what the file says, BOS once; chats by the template alone."""
    if kind == "sentencepiece":
        metadata = {**sentencepiece_metadata(), **{f"tokenizer.ggml.{key}": value for key, value in changes.items()}}
        metadata = {key: value for key, value in metadata.items() if value is not ...}
        adds_bos = True if adds_bos is None else adds_bos
    else:
        metadata = metadata_of(reference(kind), kind, **changes)
        adds_bos = KINDS[kind][1] if adds_bos is None else adds_bos
    tokenizer = build(metadata)
    before = [tokenizer.bos_token_id] if adds_bos else []
    after = [metadata["tokenizer.ggml.eos_token_id"]] if adds_eos else []
    for text in ("rain", "rain<s>"):
        plain = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.encode(text) == [*before, *plain, *after]
    assert tokenizer.encode("<s>rain") == [*tokenizer.encode("<s>rain", add_special_tokens=False), *after]
    if tokenizer.bos_token_id is not None:
        messages = [{"role": "user", "content": "rain"}]
        assert tokenizer.encode_chat(messages)[0] == tokenizer.bos_token_id
        assert tokenizer.encode_chat(messages).count(tokenizer.bos_token_id) == 1
    no_bos = build({**metadata, "tokenizer.chat_template": CHAT.removeprefix("{{ bos_token }}")})
    assert tokenizer.bos_token_id not in no_bos.encode_chat([{"role": "user", "content": "rain"}])


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    data = json.loads((DATA / "sentencepiece_bpe.json").read_text(encoding="utf-8"))
    values = {
        "model": "llama",
        **{key: data[key] for key in ("tokens", "scores", "token_type")},
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not ...} | {
        "tokenizer.chat_template": CHAT
    }


def test_sentencepiece_ids_are_those_of_sentencepiece() -> None:
    """The expected ids come from the sentencepiece library itself; runs of one letter and of spaces are among them."""
    tokenizer = build(sentencepiece_metadata())
    data = json.loads((DATA / "sentencepiece_bpe.json").read_text(encoding="utf-8"))
    assert len(data["texts"]) > 40
    for entry in data["texts"]:
        ids = tokenizer.encode(entry["text"], add_special_tokens=False)
        assert ids == entry["ids"], entry["text"]
        assert tokenizer.decode(ids) == entry["text"].replace("▁", " "), "the mark of a space comes back as one"


def test_sentencepiece_stands_a_space_before_each_stretch_of_text() -> None:
    tokenizer = build(sentencepiece_metadata())
    rain = tokenizer.encode("rain", add_special_tokens=False)
    assert tokenizer.encode("<s>rain</s>rain", add_special_tokens=False) == [1, *rain, 2, *rain]
    assert tokenizer.special_ids == {0, 1, 2}
    unspaced = build(sentencepiece_metadata(add_space_prefix=False))
    assert unspaced.encode(" rain", add_special_tokens=False) == rain
    assert unspaced.decode(rain) == " rain"


def test_sentencepiece_spells_unknown_characters_in_bytes() -> None:
    tokenizer = build(sentencepiece_metadata())
    tokens = sentencepiece_metadata()["tokenizer.ggml.tokens"]
    ids = tokenizer.encode("🙂", add_special_tokens=False)
    assert [tokens[index] for index in ids] == ["▁", "<0xF0>", "<0x9F>", "<0x99>", "<0x82>"]
    assert tokenizer.decode(ids) == "🙂"


def test_a_file_without_a_tokenizer() -> None:
    assert gguf_tokenizer({"general.architecture": "llama"}, FILE) is None
    assert gguf_tokenizer({"tokenizer.ggml.model": "no_vocab"}, FILE) is None


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "model": ({"model": "t5"}, "'t5' is not supported; supported: gpt2, llama"),
    "kind": ({"pre": "deepseek-llm"}, "'deepseek-llm' is not supported; supported: .*smollm, llama-bpe.*qwen2"),
    "no-merges": ({"merges": ...}, r"needs tokenizer\.ggml\.merges"),
    "no-tokens": ({"tokens": ...}, r"needs tokenizer\.ggml\.tokens"),
    "no-scores": ({"model": "llama"}, r"needs tokenizer\.ggml\.scores"),
    "kind-is-a-list": ({"pre": ["gpt-2"]}, r"\['gpt-2'\] is not supported"),
    "types-are-a-number": ({"token_type": NORMAL}, "token_type must be an array, not 1"),
    "types-too-few": ({"token_type": [NORMAL]}, "1 entries in tokenizer.ggml.token_type"),
    "bos-beyond-the-end": ({"bos_token_id": 100000}, "bos_token_id 100000"),
    "eot-beyond-the-end": ({"eot_token_id": 100000}, "eot_token_id 100000"),
    "merge-of-unknown-tokens": ({"merges": ["no such"]}, "cannot be built"),
    "merge-of-one-token": ({"merges": ["a"]}, "cannot be built"),
    "merge-of-three-tokens": ({"merges": ["a b c"]}, "cannot be built"),
}


@pytest.mark.parametrize(("changes", "complaint"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_built_is_refused_by_name(changes: dict[str, Any], complaint: str) -> None:
    metadata = metadata_of(reference("gpt-2"), "gpt-2", **changes)
    with pytest.raises(CheckpointError, match=rf"model\.gguf.*{complaint}"):
        gguf_tokenizer(metadata, FILE)


def test_a_piece_of_any_length_is_not_taken_apart() -> None:
    """A few megabytes of long pieces would become gigabytes of merges."""
    pieces = {"tokens": ["<unk>", "a", "a" * 257], "scores": [0.0] * 3, "token_type": [UNKNOWN, NORMAL, NORMAL]}
    metadata = {f"tokenizer.ggml.{key}": value for key, value in {"model": "llama", **pieces}.items()}
    with pytest.raises(CheckpointError, match="a piece has 257 characters, the limit is 256"):
        gguf_tokenizer(metadata, FILE)


def test_a_chat_template_is_a_text() -> None:
    metadata = metadata_of(reference("gpt-2"), "gpt-2") | {"tokenizer.chat_template": 5}
    with pytest.raises(CheckpointError, match="chat_template must be a text, not 5"):
        gguf_tokenizer(metadata, FILE)


def test_a_token_listed_twice_is_refused() -> None:
    metadata = metadata_of(reference("gpt-2"), "gpt-2")
    metadata["tokenizer.ggml.tokens"][5] = "a"
    with pytest.raises(CheckpointError, match="listed twice: 'a'"):
        gguf_tokenizer(metadata, FILE)


@pytest.fixture(scope="module")
def smollm2() -> dict[str, Any]:
    """Ids and greedy outputs that transformers gives for the demo model."""
    expected: dict[str, Any] = json.loads((DATA / "smollm2_reference.json").read_text(encoding="utf-8"))
    return expected


@pytest.mark.demo
def test_demo_tokenizer_on_hard_strings(demo_path: Path, smollm2: dict[str, Any]) -> None:
    tokenizer = GGUFCheckpoint(demo_path).load_tokenizer()
    assert tokenizer is not None
    for entry in smollm2["tokenize"]:
        assert tokenizer.encode(entry["text"], add_special_tokens=False) == entry["ids"], entry["text"]
        assert tokenizer.encode(entry["text"]) == entry["ids"], "this tokenizer adds nothing"
        assert tokenizer.decode(entry["ids"], skip_special_tokens=False) == entry["text"]


@pytest.mark.demo
def test_demo_tokenizer_on_prompts(demo_path: Path, smollm2: dict[str, Any]) -> None:
    tokenizer = GGUFCheckpoint(demo_path).load_tokenizer()
    assert tokenizer is not None
    for entry in smollm2["greedy_float32_weights"]:
        chat = "messages" in entry
        ids = tokenizer.encode_chat(entry["messages"]) if chat else tokenizer.encode(entry["text"])
        assert ids == entry["prompt_ids"], entry["name"]
    assert (tokenizer.bos_token, tokenizer.bos_token_id, tokenizer.eos_token_ids) == ("<|im_start|>", 1, (2,))
    assert tokenizer.vocab_size == 49152
