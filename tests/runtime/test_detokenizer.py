"""Streamed text is the text of the whole sequence, for every kind of decoder and whatever the ids."""

import functools
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from ostinato.runtime.detokenizer import REPLACEMENT, StreamDetokenizer
from ostinato.weights.tokenizer import Tokenizer

TRAINING_LINES = [
    "the quick brown fox jumps over the lazy dog " * 3,
    "好奇好奇好奇 " * 5,
    "🙂🙂🙃🙂 héé",
    "안녕 안녕 안녕",
]
WORDS = ["<unk>", "▁", "▁▁", "a", "b", "▁a", "▁b", "é", REPLACEMENT, "<0x4"]
BYTE_FALLBACK = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
HARD_TEXTS = [
    "The quick brown fox, 1234.5 times.",
    "  leading and   inner    spaces \n\n\ttabs\r\n",
    "naïve café Straße ÅÄÖ",
    "你好,世界。好奇 안녕하세요 こんにちは",
    "🙂🙃👩‍👩‍👧‍👦🇩🇪 e\u0301 \u200b\ufeff",
    "def f(x):\n    return x[1:] + '<0x41>' + '\ufffd'\n",
]


def byte_level() -> Backend:
    """Trained over all 256 bytes; some of its merges cut characters in two."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(TRAINING_LINES, trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet))
    return backend


def by_words(decoder: decoders.Decoder | None) -> Backend:
    """A few words and the 256 byte-fallback tokens, which only some decoders understand."""
    tokens = [*WORDS, *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    if decoder is not None:
        backend.decoder = decoder
    return backend


BACKENDS = {
    "byte-level": byte_level,
    "byte-fallback": lambda: by_words(decoders.Sequence([*BYTE_FALLBACK, decoders.Strip(" ", 1, 0)])),
    "byte-fallback-unstripped": lambda: by_words(decoders.Sequence(BYTE_FALLBACK)),
    "metaspace": lambda: by_words(decoders.Metaspace()),
    "no-decoder": lambda: by_words(None),
}
FALLBACK_KINDS = ["byte-fallback", "byte-fallback-unstripped"]
SPLITTING_KINDS = ["byte-level", *FALLBACK_KINDS]


@functools.cache
def tokenizer_of(kind: str) -> Tokenizer:
    backend = BACKENDS[kind]()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens([AddedToken("néw tok"), AddedToken("▁x")])
    return Tokenizer(backend, special_tokens={"eos_token": "</s>"})


@functools.cache
def id_of(kind: str) -> dict[str, int]:
    tokenizer = tokenizer_of(kind)
    return {tokenizer.id_to_token(token_id) or "": token_id for token_id in range(tokenizer.vocab_size)}


def ids_of(kind: str, *tokens: str) -> list[int]:
    return [id_of(kind)[token] for token in tokens]


def byte_ids(kind: str, text: str) -> list[int]:
    """One token for each byte of the text."""
    if kind != "byte-level":
        return ids_of(kind, *(f"<0x{byte:02X}>" for byte in text.encode()))
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return ids_of(kind, *"".join(piece for piece, _ in pieces))


def continuation_byte(kind: str) -> int:
    return byte_ids(kind, "é")[1]


def stream(tokenizer: Tokenizer, ids: list[int], **kwargs: bool) -> list[str]:
    """The piece of each token, and that of the flush."""
    detokenizer = StreamDetokenizer(tokenizer, **kwargs)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@functools.cache
def stretches(kind: str) -> list[list[int]]:
    """Tokens that are no whole characters, one by one; characters of several tokens, whole and cut off."""
    tokenizer = tokenizer_of(kind)
    broken = [[i] for i in range(tokenizer.vocab_size) if REPLACEMENT in tokenizer.decode([i])]
    characters = (
        [byte_ids(kind, text) for text in [" ", "\n", "A", "é", "好", "🙂"] * 8] if kind in SPLITTING_KINDS else []
    )
    return broken + characters + [ids[:-1] for ids in characters if len(ids) > 1]


def random_ids(tokenizer: Tokenizer, pieces: list[list[int]], rng: random.Random) -> list[int]:
    """Ordinary, special and unknown ids among the pieces."""
    ids: list[int] = []
    while len(ids) < 40 and rng.random() < 0.95:
        ids += rng.choice(pieces) if rng.random() < 0.6 else [rng.randrange(tokenizer.vocab_size + 2)]
    return ids


def drawn_ids(kind: str, data: st.DataObject) -> list[int]:
    any_id = st.integers(0, tokenizer_of(kind).vocab_size + 1)
    drawn = data.draw(st.lists(st.sampled_from(stretches(kind)) | any_id.map(lambda token_id: [token_id]), max_size=30))
    return [token_id for ids in drawn for token_id in ids]


class CountingTokenizer(Tokenizer):
    """Keeps the length of every decode."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self.lengths: list[int] = []

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:  # type: ignore[override]
        self.lengths.append(len(ids))
        return super().decode(ids, skip_special_tokens)


def test_b14_character_of_several_tokens() -> None:
    """B14: byte tokens of `a🙂b`, in a batch of two that advance in turn."""
    tokenizer = tokenizer_of("byte-level")
    batch = [StreamDetokenizer(tokenizer) for _ in range(2)]
    pieces: list[list[str]] = [[], []]
    for token_id in byte_ids("byte-level", "a🙂b"):
        for row, detokenizer in enumerate(batch):
            pieces[row].append(detokenizer.push(token_id))
    assert pieces == [["a", "", "", "", "🙂", "b"]] * 2
    assert [detokenizer.flush() for detokenizer in batch] == ["", ""]


@pytest.mark.parametrize("kind", list(BACKENDS))
def test_b15_random_streams(kind: str) -> None:
    """B15: over all kinds 3,000 streams; nothing raises, and the pieces are the text, the unfinished tail included."""
    rng = random.Random(f"streams of {kind}")
    tokenizer = tokenizer_of(kind)
    texts: dict[int, str] = {}
    for index in range(600):
        ids = random_ids(tokenizer, stretches(kind), rng)
        skip = rng.random() < 0.7
        detokenizer = StreamDetokenizer(tokenizer, skip_special_tokens=skip, texts=texts if index % 2 else None)
        pieces = [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]
        assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip), ids


@pytest.mark.parametrize("kind", list(BACKENDS))
@settings(derandomize=True, deadline=None, max_examples=150)
@given(data=st.data())
def test_b15_pieces_add_up(kind: str, data: st.DataObject) -> None:
    """B15, with ids chosen to break it."""
    ids = drawn_ids(kind, data)
    assert "".join(stream(tokenizer_of(kind), ids)) == tokenizer_of(kind).decode(ids)


@settings(derandomize=True, deadline=None, max_examples=150)
@given(data=st.data())
def test_holds_no_more_than_the_unfinished_character(data: st.DataObject) -> None:
    """B15: at each moment the text shown is that of the ids so far, less a U+FFFD at its end."""
    tokenizer = tokenizer_of("byte-level")
    ids = drawn_ids("byte-level", data)
    pieces = stream(tokenizer, ids)
    for count in range(len(ids)):
        assert "".join(pieces[:count]) == tokenizer.decode(ids[:count]).removesuffix(REPLACEMENT)


@pytest.mark.parametrize("kind", list(BACKENDS))
def test_ids_that_are_no_tokens(kind: str) -> None:
    """B15: any integer may come, also in the middle of a character."""
    first, *rest = byte_ids(kind, "é")
    strange = [-1, tokenizer_of(kind).vocab_size, 2**31, 2**70]
    assert "".join(stream(tokenizer_of(kind), [first, *strange, *rest])) == tokenizer_of(kind).decode([first, *rest])


@pytest.mark.parametrize("kind", SPLITTING_KINDS)
def test_skipped_special_tokens_do_not_cut_a_character(kind: str) -> None:
    """B15"""
    eos = id_of(kind)["</s>"]
    ids = [eos, *(token_id for byte_id in byte_ids(kind, "🙂") for token_id in [byte_id, *[eos] * 5])]
    assert "".join(stream(tokenizer_of(kind), ids)) == "🙂"


def test_special_tokens_shown() -> None:
    ids = [*ids_of("byte-level", "<s>"), *byte_ids("byte-level", "a"), *ids_of("byte-level", "</s>")]
    assert stream(tokenizer_of("byte-level"), ids, skip_special_tokens=False) == ["<s>", "a", "</s>", ""]


@pytest.mark.parametrize("kind", ["byte-fallback", "metaspace"])
@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (["▁a", "▁b", "b", "▁a"], ["a", " b", "b", " a", ""]),
        (["▁", "▁a"], ["", " a", ""]),
        (["<s>", "▁a", "▁"], ["", "a", " ", ""]),
        (["a", "▁", "▁", "</s>", "▁", "b"], ["a", " ", " ", "", " ", "b", ""]),
    ],
    ids=["words", "space-first", "after-bos", "spaces"],
)
def test_only_the_first_space_is_stripped(kind: str, tokens: list[str], expected: list[str]) -> None:
    assert stream(tokenizer_of(kind), ids_of(kind, *tokens)) == expected


@pytest.mark.parametrize("kind", FALLBACK_KINDS)
@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (["a", "<0xF0>", "<0x9F>", "<0x99>", "<0x82>", "b"], ["a", "", "", "", "", "🙂b", ""]),
        (["a", "<0x0A>", "<0x41>"], ["a", "", "", "\nA"]),
        (["<0x41>", "<0x80>", "<0x42>", "a"], ["", "��", "�", "a", ""]),
        (["<0x41>", "<0xE2>", "<0x82>", "a"], ["", "", "", "���a", ""]),
        (["�", "<0xC3>"], ["", "", "��"]),
        (["<0x41>", "</s>", "<0x80>"], ["", "", "��", ""]),
    ],
    ids=["closed-by-a-word", "open-at-the-end", "broken", "cut-off", "after-a-held-character", "special-inside"],
)
def test_run_of_byte_fallback_tokens(kind: str, tokens: list[str], expected: list[str]) -> None:
    """The decoder judges a run as a whole, so it waits for its end, or until it is known to be broken."""
    ids = ids_of(kind, *tokens)
    assert stream(tokenizer_of(kind), ids) == expected
    assert "".join(expected) == tokenizer_of(kind).decode(ids)


@pytest.mark.parametrize("kind", FALLBACK_KINDS)
def test_endless_run_of_byte_tokens_does_not_stall(kind: str) -> None:
    """B20: the pending run is bounded; text of whole characters comes out right all the same."""
    detokenizer = StreamDetokenizer(tokenizer_of(kind))
    text = " " + "🙂é\n" * 100
    pieces = [detokenizer.push(token_id) for token_id in byte_ids(kind, text)]
    silent = max(len(part) for part in "".join("x" if piece else "." for piece in pieces).split("x"))
    assert silent < 64 + 4
    assert "".join([*pieces, detokenizer.flush()]) == tokenizer_of(kind).decode(byte_ids(kind, text))


@pytest.mark.parametrize("ending", ["closed", "open"])
@pytest.mark.parametrize("spoiler", ["<0x80>", "<0xE2>"], ids=["broken", "cut-off"])
def test_what_was_shown_of_a_long_run_stays(spoiler: str, ending: str) -> None:
    """The one case in which the whole decodes differently: 64 valid bytes were shown before the run went bad."""
    ids = [*byte_ids("byte-fallback", "🙂" * 17), *ids_of("byte-fallback", spoiler)]
    if ending == "closed":
        ids += ids_of("byte-fallback", "a")
    text = "".join(stream(tokenizer_of("byte-fallback"), ids))
    assert text == "🙂" * 16 + "�" * 5 + "a" * (ending == "closed")


def test_token_that_decodes_to_nothing() -> None:
    """B15: after a broken run, whose last U+FFFD must not come again."""
    tokenizer = Tokenizer(by_words(decoders.Sequence([decoders.Replace("b", ""), *BYTE_FALLBACK])))
    assert stream(tokenizer, ids_of("byte-fallback", "<0x80>", "b", "a", "b")) == ["�", "", "a", "", ""]


@pytest.mark.parametrize("kind", ["byte-level", "metaspace", "no-decoder"])
def test_spelling_of_a_byte_token_is_text_elsewhere(kind: str) -> None:
    """A decoder without byte fallback takes `<0x41>` as it stands."""
    backend = BACKENDS[kind]()
    backend.add_tokens(["<0x41>"])
    tokenizer = Tokenizer(backend)
    assert stream(tokenizer, [backend.token_to_id("<0x41>")]) == ["<0x41>", ""]


@pytest.mark.parametrize("kind", SPLITTING_KINDS)
@pytest.mark.parametrize("stretch", ["lone-continuation", "ordinary", "characters-of-bytes", "unknown"])
def test_b20_work_is_linear(kind: str, stretch: str) -> None:
    """B20, counted: a push decodes a handful of tokens, whatever came before it."""
    tokenizer = CountingTokenizer(BACKENDS[kind]())
    ids = {
        "lone-continuation": [continuation_byte(kind)] * 4000,
        "ordinary": tokenizer.encode("a b", add_special_tokens=False) * 2000,
        "characters-of-bytes": byte_ids(kind, "好") * 1000,
        "unknown": [tokenizer.vocab_size] * 4000,
    }[stretch]
    text = "".join(stream(tokenizer, ids))
    # Three tokens of context and the new one. A run of byte-fallback tokens is decoded once, when it has 64 to 67.
    assert max(tokenizer.lengths, default=0) <= (4 if kind == "byte-level" else 4 + 67)
    assert sum(tokenizer.lengths) <= 8 * len(ids)
    assert text == tokenizer.decode(ids)


def test_b20_text_that_always_ends_inside_a_character() -> None:
    """B20: tokens of the last two bytes of one character and the first of the next; the text is never whole."""
    lead, *rest = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str("好")[0][0]
    tail = "".join(rest)
    vocab = {token: index for index, token in enumerate([lead, *rest, tail, tail + lead])}
    backend = Backend(models.BPE(vocab=vocab, merges=[(rest[0], rest[1]), (tail, lead)]))
    backend.decoder = decoders.ByteLevel()
    tokenizer = CountingTokenizer(backend)
    pieces = stream(tokenizer, [vocab[lead], *[vocab[tail + lead]] * 4000, vocab[tail]])
    assert pieces == ["", *["好"] * 4001, ""]
    assert max(tokenizer.lengths) <= 4


def test_streams_share_what_tokens_mean() -> None:
    tokenizer = CountingTokenizer(byte_level())
    ids = tokenizer.encode("the quick brown fox jumps over the lazy dog")
    texts: dict[int, str] = {}
    first = StreamDetokenizer(tokenizer, texts=texts)
    pieces = [first.push(token_id) for token_id in ids]
    first.push(ids[0])
    tokenizer.lengths.clear()
    second = StreamDetokenizer(tokenizer, texts=texts)
    assert [second.push(token_id) for token_id in ids] == pieces
    assert sum(tokenizer.lengths) == 1  # a text's first token may lose a space, so it is always decoded


@pytest.mark.demo
@pytest.mark.parametrize("text", HARD_TEXTS)
def test_demo_tokenizer_texts(demo_path: Path, text: str) -> None:
    tokenizer = demo_tokenizer(demo_path)
    pieces = stream(tokenizer, tokenizer.encode(text))
    assert "".join(pieces) == text
    assert REPLACEMENT in text or not any(REPLACEMENT in piece for piece in pieces)


@pytest.mark.demo
def test_demo_tokenizer_random_streams(demo_path: Path) -> None:
    """B15 with a real vocabulary."""
    tokenizer = demo_tokenizer(demo_path)
    rng = random.Random(15)
    pieces = [[i] for i in tokenizer.encode("🙂🙃é好奇안녕ぁ") if REPLACEMENT in tokenizer.decode([i])]
    for _ in range(300):
        ids = random_ids(tokenizer, pieces, rng)
        assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids), ids


@functools.cache
def demo_tokenizer(path: Path) -> Tokenizer:
    from ostinato.weights import open_checkpoint

    tokenizer = open_checkpoint(path).load_tokenizer()
    assert tokenizer is not None
    return tokenizer
