"""Malformed checkpoints, by kind: each ends in one line that names what is wrong, before any tensor is read.

Every case spoils a sound model that loads. It goes through the face: `LLM` must raise an error of ours, the command
line must print the same line and no more.
"""

import json
import os
import re
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ostinato import LLM, EngineConfig
from ostinato.model import UnsupportedModelError
from ostinato.weights import CheckpointError, ResolveError, open_checkpoint
from ostinato.weights.gguf_file import GGUFFile
from ostinato.weights.safetensors_checkpoint import SafetensorsCheckpoint

Spoil = Callable[[Path], object]
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
Q = "model.layers.0.self_attn.q_proj.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
VOCAB, HIDDEN = 104, 24


def config(**changes: Any) -> Spoil:
    """Change config.json; `...` takes a key out."""

    def spoil(path: Path) -> None:
        found = json.loads((path / "config.json").read_text()) | changes
        found = {key: value for key, value in found.items() if value is not ...}
        (path / "config.json").write_text(json.dumps(found))

    return spoil


def write(name: str, content: bytes | str) -> Spoil:
    data = content.encode() if isinstance(content, str) else content
    return lambda path: (path / name).write_bytes(data)


def append(name: str, data: bytes) -> Spoil:
    return lambda path: (path / name).write_bytes((path / name).read_bytes() + data)


def remove(name: str) -> Spoil:
    return lambda path: (path / name).unlink()


def cut(name: str, nbytes: int) -> Spoil:
    """Take the last bytes off a file."""
    return lambda path: os.truncate(path / name, (path / name).stat().st_size - nbytes)


def tensors(change: Callable[[dict[str, torch.Tensor]], object], name: str = WEIGHTS) -> Spoil:
    def spoil(path: Path) -> None:
        stored = load_file(path / name)
        change(stored)
        save_file(stored, path / name)

    return spoil


def header(change: Callable[[dict[str, Any]], object], name: str = WEIGHTS) -> Spoil:
    """Change what a header says and leave the data."""

    def spoil(path: Path) -> None:
        data = (path / name).read_bytes()
        [length] = struct.unpack_from("<Q", data)
        described = json.loads(data[8 : 8 + length])
        change(described)
        text = json.dumps(described).encode()
        (path / name).write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])

    return spoil


def header_length(length: int, name: str = WEIGHTS) -> Spoil:
    return lambda path: (path / name).write_bytes(struct.pack("<Q", length) + (path / name).read_bytes()[8:])


def sharded(path: Path) -> None:
    """The sound model in two shards with an index."""
    stored = load_file(path / WEIGHTS)
    (path / WEIGHTS).unlink()
    halves = {FIRST: dict(list(stored.items())[::2]), SECOND: dict(list(stored.items())[1::2])}
    for name, half in halves.items():
        save_file(half, path / name)
    weight_map = {tensor: name for name, half in halves.items() for tensor in half}
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def index(change: Callable[[dict[str, Any]], object]) -> Spoil:
    def spoil(path: Path) -> None:
        found = json.loads((path / INDEX).read_text())
        change(found)
        (path / INDEX).write_text(json.dumps(found))

    return spoil


def rows(name: str, count: int) -> Spoil:
    return tensors(lambda stored: stored.update({name: torch.zeros(count, stored[name].shape[1])}))


def vocabulary(count: int) -> Spoil:
    """Embedding, head and config of another number of tokens than the tokenizer's."""
    return both(rows(EMBED, count), rows("lm_head.weight", count), config(vocab_size=count))


def tokenizer(change: Callable[[dict[str, Any]], object]) -> Spoil:
    def spoil(path: Path) -> None:
        found = json.loads((path / "tokenizer.json").read_text())
        change(found)
        (path / "tokenizer.json").write_text(json.dumps(found))

    return spoil


def link(name: str, target: str) -> Spoil:
    def spoil(path: Path) -> None:
        (path / name).unlink(missing_ok=True)
        (path / name).symlink_to(target)

    return spoil


def both(*steps: Spoil) -> Spoil:
    def spoil(path: Path) -> None:
        for step in steps:
            step(path)

    return spoil


def copy(name: str, target: str) -> Spoil:
    return lambda path: shutil.copy(path / name, path / target)


def rename(name: str, target: str) -> Spoil:
    return lambda path: (path / name).rename(path / target)


def of_index(change: Callable[[dict[str, str]], object]) -> Spoil:
    return both(sharded, index(lambda found: change(found["weight_map"])))


def deep(path: Path) -> None:
    (path / "config.json").write_text('{"rope_scaling": ' + "[" * 50_000 + "]" * 50_000 + "}")


LENGTH_LEFT = r"its header would have \d+ bytes, and \d+ are left"

KINDS: dict[str, dict[str, tuple[Spoil, str]]] = {
    "missing or truncated shards (B02, B04)": {
        "second is gone": (both(sharded, remove(SECOND)), f"names files that are not there, .*incomplete: {SECOND}"),
        "all are gone": (both(sharded, remove(FIRST), remove(SECOND)), f"incomplete: {FIRST}, {SECOND}"),
        "no weights": (remove(WEIGHTS), r"has no \.safetensors files"),
        "8 bytes short": (both(sharded, cut(SECOND, 8)), rf"{SECOND}: .*tensor .* ends at byte \d+ .* has \d+"),
        "cut in the header": (both(sharded, lambda path: os.truncate(path / FIRST, 30)), f"{FIRST}: .*{LENGTH_LEFT}"),
        "empty": (both(sharded, write(FIRST, b"")), rf"{FIRST}: .*\(0 bytes\): the length of the header alone takes 8"),
        "git-lfs pointer": (write(WEIGHTS, "version https://git-lfs.github.com/spec/v1\n"), "Git LFS pointer"),
        "bytes too many": (append(WEIGHTS, b"more"), "4 bytes after .* no tensor"),
    },
    "header beyond the file (B04)": {
        "one byte": (lambda path: header_length(path.joinpath(WEIGHTS).stat().st_size - 7)(path), LENGTH_LEFT),
        "huge": (header_length(2**63), f"{2**63} bytes, and .* are left"),
        "all ones": (header_length(2**64 - 1), f"{2**64 - 1} bytes, and .* are left"),
        "data beyond": (header(lambda h: h[Q].update(data_offsets=[0, 2**40])), f"{Q}: F32 .* hold {2**40}"),
        "no json inside": (header_length(40), "its header: is not valid JSON"),
    },
    "tensors that the index names and the shard lacks (B02)": {
        "lacks one": (both(sharded, tensors(lambda t: t.popitem(), FIRST)), f"is assigned to {FIRST}, which lacks it"),
        "names another": (of_index(lambda m: m.update(extra=FIRST)), f"extra is assigned to {FIRST}, which lacks it"),
        "swapped": (
            of_index(lambda m: m.update({EMBED: m[HEAD], HEAD: m[EMBED]})),
            f"{EMBED} is assigned to .*, which lacks it.*{EMBED} is stored in .* too, though assigned to",
        ),
        "not in the index": (of_index(lambda m: m.pop(EMBED)), f"{EMBED} in model-.* is not in the index"),
        "in two shards": (
            both(sharded, tensors(lambda t: t.update({EMBED: torch.zeros(1)}), FIRST)),
            f"{EMBED} is stored in {FIRST} too, though assigned to {SECOND}",
        ),
        "another folder": (of_index(lambda m: m.update(extra="../a.safetensors")), r"extra to '\.\./a\.safetensors'"),
        "no map": (both(sharded, write(INDEX, "{}")), f"{INDEX}: has no weight_map"),
    },
    "dtypes that cannot be mixed in (B13)": {
        "float64": (tensors(lambda t: t.update({Q: t[Q].double()})), f"only F32, F16, BF16 .*: {Q} is F64"),
        "int8": (tensors(lambda t: t.update({DOWN: t[DOWN].to(torch.int8)})), f"{DOWN} is I8"),
        "bool": (tensors(lambda t: t.update({DOWN: t[DOWN].bool()})), f"{DOWN} is BOOL"),
        "float8": (tensors(lambda t: t.update({Q: t[Q].to(torch.float8_e4m3fn)})), f"{Q} is F8_E4M3"),
        "unknown": (header(lambda h: h[Q].update(dtype="F4X")), f"{Q} is F4X"),
        "header lies": (header(lambda h: h[Q].update(dtype="F16")), f"{Q}: F16 of shape .* takes .* hold"),
        "config names another": (config(dtype="int4"), "config.json: .*config key dtype = 'int4' is not supported"),
    },
    "quantised checkpoints (B12)": {
        "known method": (config(quantization_config={"quant_method": "gptq"}), "quantization_config .* 'gptq'"),
        "unknown method": (config(quantization_config={"quant_method": "shrink", "bits": 1}), "'shrink'"),
        "without a method": (config(quantization_config={"bits": 4}), "quantization_config .* 'unnamed'"),
        "mlx": (config(quantization={"group_size": 64, "bits": 4}), "quantization asks for"),
        "qweight": (tensors(lambda t: t.update({Q.replace("weight", "qweight"): t.pop(Q)})), "q_proj.qweight"),
        "scales": (tensors(lambda t: t.update({Q + "_scale": torch.ones(1)})), f"quantised .*: {Q}_scale"),
        "its own file": (
            write("quantize_config.json", "{}"),
            "quantize_config.json: belongs to a quantised checkpoint",
        ),
    },
    "vocabulary and tokenizer of different sizes": {
        "tokenizer larger by one": (vocabulary(VOCAB - 1), f"has {VOCAB} tokens .* vocab_size is {VOCAB - 1}"),
        "tokenizer much larger": (vocabulary(8), f"has {VOCAB} tokens and the model's vocab_size is 8"),
        "a token far away": (
            tokenizer(lambda t: t["model"]["vocab"].update(far=10**6)),
            f"has {10**6 + 1} tokens .* {VOCAB}: its highest token 'far' has the id {10**6}",
        ),
        "an end that was added": (
            write("tokenizer_config.json", '{"eos_token": "<end>"}'),
            f"its eos_token '<end>' has the id {VOCAB}",
        ),
        "embedding smaller than the config": (rows(EMBED, 99), rf"{EMBED} \(\[99, 24\] instead of \[{VOCAB}, 24\]\)"),
        "config larger than embedding": (config(vocab_size=500), rf"\[{VOCAB}, 24\] instead of \[500, 24\]"),
    },
    "null and absent keys": {
        "vocab_size null": (config(vocab_size=None), r"config\.json: config key vocab_size is missing"),
        "hidden_size absent": (config(hidden_size=...), r"config\.json: config key hidden_size is missing"),
        "architectures null": (
            config(architectures=None),
            r"config\.json: architectures names no class, and model_type None is not",
        ),
        "no keys at all": (
            write("config.json", "{}"),
            r"config\.json: architectures names no class, .* is not supported",
        ),
        "weight_map null": (both(sharded, write(INDEX, '{"weight_map": null}')), "has no weight_map"),
        "shape null": (header(lambda h: h[Q].update(shape=None)), f"tensor {Q} has the shape None"),
        "offsets absent": (header(lambda h: h[Q].pop("data_offsets")), f"tensor {Q} is not described by"),
        "tied null, head absent (B01)": (
            both(config(tie_word_embeddings=None), tensors(lambda t: t.pop("lm_head.weight"))),
            "missing: lm_head.weight",
        ),
    },
    "duplicated or stray weight files": {
        "single and shards": (
            both(copy(WEIGHTS, "keep"), sharded, rename("keep", WEIGHTS)),
            f"{WEIGHTS} beside the files that {INDEX} names",
        ),
        "two singles": (
            copy(WEIGHTS, "other.safetensors"),
            f"holds other.safetensors beside {WEIGHTS};",
        ),
        "shards without index": (
            both(sharded, remove(INDEX)),
            f"several safetensors files but no {INDEX}: {FIRST}, {SECOND}",
        ),
        "a shard of another split": (
            both(sharded, copy(FIRST, "model-00003-of-00003.safetensors")),
            f"holds model-00003-of-00003.safetensors beside the files that {INDEX} names",
        ),
        "adapter": (write("adapter_config.json", "{}"), r"adapter_config\.json says that an adapter"),
        "only pickles": (rename(WEIGHTS, "pytorch_model.bin"), r"only as pickled files.*pytorch_model\.bin"),
        "tensor that nothing asks for": (tensors(lambda t: t.update(extra=torch.ones(3))), "unexpected: extra"),
    },
    "symbolic links that lead nowhere": {
        "config to itself": (link("config.json", "config.json"), r"config\.json: cannot be read: Too many levels"),
        "weights to themselves": (link(WEIGHTS, WEIGHTS), f"{WEIGHTS}: cannot be read: Too many levels"),
        "in a circle": (
            both(link("tokenizer.json", "b"), link("b", "tokenizer.json")),
            r"tokenizer\.json: cannot be read: Too many levels",
        ),
        "tokenizer config to nowhere": (link("tokenizer_config.json", "blob"), "a link to blob, which is not there"),
        "generation config to nowhere": (
            link("generation_config.json", "blob"),
            "generation_config.json: .* link to blob",
        ),
        "weights to a folder": (link(WEIGHTS, "."), f"{WEIGHTS}: cannot be read: Is a directory"),
        "weights to a device": (link(WEIGHTS, "/dev/zero"), f"{WEIGHTS}: cannot be read: it is not a regular file"),
    },
    "config.json that is no JSON object": {
        "html": (write("config.json", "<html>404</html>"), r"config\.json: is not valid JSON: Expecting value"),
        "empty": (write("config.json", ""), r"config\.json: is not valid JSON"),
        "cut": (write("config.json", '{"vocab_size": 1'), r"config\.json: is not valid JSON"),
        "list": (write("config.json", "[]"), r"config\.json: must hold a JSON object, not list"),
        "null": (write("config.json", "null"), r"config\.json: must hold a JSON object, not NoneType"),
        "nested without end": (deep, r"config\.json: .*nests deeper than 64 levels"),
        "bytes": (write("config.json", b"\x80\x02}q\x00."), r"config\.json: is not valid JSON"),
        "a key twice": (write("config.json", '{"vocab_size": 1, "vocab_size": 2}'), "gives 'vocab_size' twice"),
    },
    "huge or negative sizes": {
        "negative": (config(vocab_size=-1), "vocab_size = -1 is not a whole number from 1 to"),
        "zero": (config(num_hidden_layers=0), "num_hidden_layers = 0 is not a whole number from 1 to"),
        "beyond 64 bits": (config(hidden_size=2**64), f"hidden_size = {2**64} is not a whole number from 1 to"),
        "fraction": (config(intermediate_size=40.0), r"intermediate_size = 40\.0 is not a whole number"),
        "a billion layers": (config(num_hidden_layers=10**9), f"num_hidden_layers = {10**9} is not .* to 4096"),
        "larger than stored": (config(vocab_size=2**30), rf"{EMBED} \(\[{VOCAB}, 24\] instead of \[{2**30}, 24\]\)"),
        "many digits": (write("config.json", '{"vocab_size": ' + "9" * 9999 + "}"), r"config\.json: is not valid JSON"),
        "header: negative": (header(lambda h: h[Q].update(shape=[-1, 24])), rf"tensor {Q} has the shape \[-1, 24\]"),
        "header: overflow": (
            header(lambda h: h[Q].update(shape=[2**40, 2**40])),
            f"tensor {Q}: .* takes {2**82} bytes",
        ),
        "a context of millions": (config(max_position_embeddings=10**9), rf"{10**9} is above \d+; .*max_model_len"),
        "context": (config(max_position_embeddings=2**31), f"max_position_embeddings = {2**31} is not"),
    },
    "other files": {
        "tokenizer of another kind": (
            rename("tokenizer.json", "tokenizer.model"),
            "has tokenizer.model.* no tokenizer.json",
        ),
        "tokenizer is no json": (
            write("tokenizer.json", "hello"),
            r"tokenizer\.json: is not a tokenizer that can be read",
        ),
        "merges of unknown tokens": (
            tokenizer(lambda t: t["model"].update(merges=[["zz", "y"]])),
            r"tokenizer\.json: is not",
        ),
        "special token is a number": (write("tokenizer_config.json", '{"added_tokens_decoder": 5}'), "unknown form"),
        "template is a number": (
            write("tokenizer_config.json", '{"chat_template": 5}'),
            "chat_template must be a text.* 5",
        ),
        "end id is a text": (write("generation_config.json", '{"eos_token_id": "</s>"}'), "eos_token_id '</s>' is not"),
        "temperature is a text": (
            write("generation_config.json", '{"temperature": "hot"}'),
            "temperature must be .* 'hot'",
        ),
        "a name with an escape": (
            header(lambda h: h.update({"\x1b[2J\n": h.pop(Q) | {"shape": [-1]}})),
            r"tensor \\x1b\[2J  has the shape \[-1\]",
        ),
    },
}
CASES = {f"{kind}: {case}": spoil for kind, cases in KINDS.items() for case, spoil in cases.items()}


@pytest.fixture
def sound(chat_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(chat_model, tmp_path / "m"))


@pytest.fixture
def no_tensor_is_read(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refuse(*_: object) -> None:
        raise AssertionError("a tensor is read")

    with monkeypatch.context() as patch:
        patch.setattr(SafetensorsCheckpoint, "tensors", refuse)
        patch.setattr(GGUFFile, "read", refuse)
        yield


def complaint(path: Path) -> str:
    with pytest.raises((CheckpointError, UnsupportedModelError, ResolveError)) as caught:
        LLM(path, device="cpu")
    message = str(caught.value)
    assert message.isprintable(), "one line, without control characters"
    assert message.startswith(str(path)), "the file or folder comes first"
    return message


@pytest.mark.usefixtures("no_hang")
def test_the_sound_model_loads(sound: Path) -> None:
    for step in (lambda path: None, sharded):
        step(sound)
        LLM(sound, device="cpu")


@pytest.mark.usefixtures("no_hang", "no_tensor_is_read")
@pytest.mark.parametrize(("spoil", "facts"), CASES.values(), ids=CASES)
def test_malformed_checkpoint(spoil: Spoil, facts: str, sound: Path, cli: Callable[..., Any]) -> None:
    spoil(sound)
    message = complaint(sound)
    assert re.search(facts, message), message
    result = cli("generate", "-m", sound, "Hello")
    assert (result.code, result.out) == (2, "")
    assert result.err == f"Error: {' '.join(message.split())}\n"
    if any(sound.glob("*.safetensors*")) and "max_model_len" not in message:  # else there is nothing to be said
        assert cli("inspect", sound).err == result.err


def test_a_context_of_millions_can_be_had_in_part(sound: Path) -> None:
    config(max_position_embeddings=10**9)(sound)
    llm = LLM(sound, device="cpu", config=EngineConfig(max_model_len=64))
    assert llm.max_model_len == 64


def test_token_ids_need_no_tokenizer(sound: Path, cli: Callable[..., Any]) -> None:
    """Neither a sound one nor a broken one."""
    write("tokenizer.json", "broken")(sound)
    assert "tokenizer.json: is not a tokenizer" in complaint(sound)
    llm = LLM(sound, device="cpu", skip_tokenizer_init=True)
    assert llm.tokenizer is None
    greedy = llm.sampling_params(temperature=0.0, max_tokens=4)
    first = llm.generate([5, 6, 7], greedy)[0].outputs[0].token_ids
    shown = cli("generate", "-m", sound, "5 6 7", "--skip-tokenizer-init", "--max-tokens", 4).out
    assert shown.split() == [str(token_id) for token_id in first]
    (sound / "tokenizer.json").unlink()
    (sound / "tokenizer_config.json").unlink()
    assert LLM(sound, device="cpu").generate([5, 6, 7], greedy)[0].outputs[0].token_ids == first


def test_what_is_odd_but_loads_is_told(sound: Path, caplog: pytest.LogCaptureFixture) -> None:
    """End ids that cannot be generated, and a vocabulary with far more ids than the tokenizer has."""
    both(vocabulary(2 * VOCAB), config(vocab_size=2 * VOCAB, eos_token_id=[1, 500]))(sound)
    assert LLM(sound, device="cpu").eos_token_ids == {1}
    told = [record.getMessage() for record in caplog.records if record.name.startswith("ostinato")]
    assert f"{sound}: end ids [500] are above the model's {2 * VOCAB} and can never be generated" in told
    assert f"{sound}: the tokenizer has {VOCAB} tokens and the model's vocab_size is {2 * VOCAB}: is it" in " ".join(
        told
    )


def test_at_least_ten_kinds_of_at_least_three() -> None:
    assert len(KINDS) >= 10
    assert all(len(cases) >= 3 for cases in KINDS.values())


@pytest.mark.parametrize("kind", KINDS)
def test_the_document_shows_what_is_seen(kind: str, sound: Path) -> None:
    """docs/loading.md has the first case of every kind, in the words that a user sees."""
    spoil, _ = next(iter(KINDS[kind].values()))
    spoil(sound)
    document = (Path(__file__).parents[2] / "docs" / "loading.md").read_text(encoding="utf-8")
    assert f"Error: {' '.join(complaint(sound).split())}".replace(str(sound), "model") in document


UNREADABLE = ("config.json", WEIGHTS, "tokenizer.json", "tokenizer_config.json", "generation_config.json")


@pytest.mark.usefixtures("no_tensor_is_read")
@pytest.mark.parametrize("name", UNREADABLE)
def test_a_file_that_may_not_be_read(unprivileged: Path, chat_model: Path, name: str) -> None:
    """Also of the files that may be absent: one that is there is not passed over."""
    os_is_root = os.getuid() == 0
    if os_is_root:
        os.seteuid(0)
    for file in chat_model.iterdir():
        shutil.copyfile(file, unprivileged / file.name)
    (unprivileged / "generation_config.json").write_text("{}")
    (unprivileged / name).chmod(0)
    if os_is_root:
        os.seteuid(65534)
    assert re.search(rf"{name}: cannot be read: Permission denied$", complaint(unprivileged))


@pytest.mark.usefixtures("no_tensor_is_read")
@pytest.mark.parametrize("mode", [0o000, 0o311, 0o644], ids=oct)
def test_a_folder_that_may_not_be_read(unprivileged: Path, chat_model: Path, mode: int) -> None:
    """Closed; not to be listed; to be listed but not entered."""
    (unprivileged / "config.json").write_text("{}")
    (unprivileged / WEIGHTS).write_bytes(b"")
    unprivileged.chmod(mode)
    for path in (unprivileged, unprivileged / "inner", unprivileged / "a.gguf"):
        message = complaint(path)
        assert "Permission denied" in message or ("no such file or folder" in message and path != unprivileged)
    with pytest.raises(CheckpointError, match="cannot be read: Permission denied"):
        open_checkpoint(unprivileged)
    unprivileged.chmod(0o700)


def test_nothing_of_a_checkpoint_is_executed(sound: Path, tmp_path: Path) -> None:
    """Code, `auto_map` and pickled files beside sound weights are passed over."""
    proof = tmp_path / "executed"
    code = f"open({str(proof)!r}, 'w').close()\n"
    for name in ("modeling_evil.py", "configuration_evil.py", "tokenization_evil.py", "conftest.py", "__init__.py"):
        (sound / name).write_text(code)
    pickled = b"cbuiltins\nexec\n(S" + repr(code).encode() + b"\ntR."
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "consolidated.00.pth"):
        (sound / name).write_bytes(pickled)
    auto = {"AutoConfig": "configuration_evil.Config", "AutoModelForCausalLM": "modeling_evil.Model"}
    config(auto_map=auto, trust_remote_code=True)(sound)
    found = json.loads((sound / "tokenizer_config.json").read_text())
    found |= {"auto_map": {"AutoTokenizer": ["tokenization_evil.Tokenizer", None]}, "tokenizer_class": "Evil"}
    (sound / "tokenizer_config.json").write_text(json.dumps(found))
    llm = LLM(sound, device="cpu")
    llm.generate("Hello")
    llm.chat([{"role": "user", "content": "Hi"}])
    assert not proof.exists()
