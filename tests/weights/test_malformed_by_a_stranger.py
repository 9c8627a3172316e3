"""Checkpoints as they are found in the wild, by someone who had read the documents and not the loader.

Every case damages a copy of a good checkpoint, asks `LLM` for it, and wants one error of a public type, on one line,
that names what is wrong, before any tensor was read. `test_malformed.py` is the same from the inside.
"""

import contextlib
import json
import logging
import os
import resource
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from ostinato import LLM, EngineConfig, SamplingParams
from ostinato.model import UnsupportedModelError
from ostinato.weights import CheckpointError, ResolveError, open_checkpoint

HIDDEN, INTERMEDIATE, LAYERS, HEADS, HEAD_DIM, VOCAB = 12, 20, 2, 3, 6, 40
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 1,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
SIZES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1}
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
Q = "model.layers.0.self_attn.q_proj.weight"

Stored = dict[str, tuple[str, tuple[int, ...]]]


def stored(dtype: str = "F32") -> Stored:
    """Names and shapes of a small Llama, written down from memory and not taken from the package."""
    layer = {
        "input_layernorm.weight": (HIDDEN,),
        "self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj.weight": (HEAD_DIM, HIDDEN),
        "self_attn.v_proj.weight": (HEAD_DIM, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        "post_attention_layernorm.weight": (HIDDEN,),
        "mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for index in range(LAYERS):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)}
    return {name: (dtype, shape) for name, shape in shapes.items()}


def header_of(tensors: Stored) -> tuple[dict[str, Any], int]:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + SIZES[dtype] * _product(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    return header, end


def _product(shape: tuple[int, ...]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result


def write_raw(path: Path, header: Any, num_bytes: int, *, length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + b"\x3c" * num_bytes)


def write_tensors(path: Path, tensors: Stored) -> None:
    header, num_bytes = header_of(tensors)
    write_raw(path, header, num_bytes)


def change_header(name: str, **changes: Any) -> "Damage":
    """In model.safetensors, with the data as long as it was."""

    def damage(folder: Path) -> None:
        header, num_bytes = header_of(stored())
        header[name] = {**header[name], **changes}
        write_raw(folder / "model.safetensors", header, num_bytes)

    return damage


def change_config(**changes: Any) -> "Damage":
    """Keys of config.json; `...` takes a key out."""

    def damage(folder: Path) -> None:
        config = {**CONFIG, **changes}
        text = json.dumps({key: value for key, value in config.items() if value is not ...})
        (folder / "config.json").write_text(text)

    return damage


def change_tensors(changes: dict[str, Any]) -> "Damage":
    """Tensors of model.safetensors: a (dtype, shape), or `...` to take one out."""

    def damage(folder: Path) -> None:
        tensors = {**stored(), **changes}
        write_tensors(folder / "model.safetensors", {k: v for k, v in tensors.items() if v is not ...})

    return damage


def change_index(change: Callable[[dict[str, Any]], Any]) -> "Damage":
    def damage(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        result = change(index)
        (folder / INDEX).write_text(json.dumps(index if result is None else result))

    return damage


def content(name: str, data: bytes | str | Any) -> "Damage":
    def damage(folder: Path) -> None:
        if not isinstance(data, bytes | str):
            (folder / name).write_text(json.dumps(data))
        else:
            (folder / name).write_bytes(data.encode() if isinstance(data, str) else data)

    return damage


def without(*names: str) -> "Damage":
    def damage(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return damage


def cut(name: str, keep: Callable[[int], int]) -> "Damage":
    def damage(folder: Path) -> None:
        os.truncate(folder / name, keep((folder / name).stat().st_size))

    return damage


def link(name: str, target: str) -> "Damage":
    def damage(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return damage


def both(*parts: "Damage") -> "Damage":
    def damage(folder: Path) -> None:
        for part in parts:
            part(folder)

    return damage


Damage = Callable[[Path], None]


def a_tokenizer(size: int = VOCAB, *, added: tuple[str, ...] = ()) -> str:
    letters = [chr(code) for code in range(0x61, 0x61 + size - 2)]
    vocabulary = {"<s>": 0, "</s>": 1, **{letter: 2 + index for index, letter in enumerate(letters)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in ("<s>", "</s>", *added)])
    text = tokenizer.to_str()
    assert isinstance(text, str)
    return text


@pytest.fixture(scope="session")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two checkpoints without a fault: one of a single file, one of two shards and an index."""
    folders = {name: tmp_path_factory.mktemp("stranger") / name for name in ("single", "sharded")}
    for folder in folders.values():
        folder.mkdir()
        change_config()(folder)
        (folder / "tokenizer.json").write_text(a_tokenizer())
        (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    write_tensors(folders["single"] / "model.safetensors", stored())
    names = list(stored())
    parts = {ONE: names[:11], TWO: names[11:]}
    for file, part in parts.items():
        write_tensors(folders["sharded"] / file, {name: stored()[name] for name in part})
    weight_map = {name: file for file, part in parts.items() for name in part}
    document = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folders["sharded"] / INDEX).write_text(json.dumps(document))
    return folders


def load(folder: Path, progress: Callable[[int, int], None] | None = None) -> LLM:
    return LLM(folder, device="cpu", config=EngineConfig(max_num_seqs=1), progress=progress)


def refusal(folder: Path) -> str:
    """The message of the one error that loading ends in. No tensor was read when it came."""

    def read(done: int, total: int) -> None:
        assert done == 0, f"{done} of {total} bytes were read of a checkpoint that is not in order"

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((CheckpointError, UnsupportedModelError, ResolveError)) as caught:
        load(folder, read)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
    assert grown < 100_000, f"{grown} KiB more than before"  # the file has 20 KB; the rest is imports
    message = str(caught.value)
    assert "\n" not in message, "one line"
    assert len(message) < 2500, "short enough to read"
    message.encode()  # can be printed
    return message


def expect(folder: Path, facts: tuple[str, ...]) -> None:
    message = refusal(folder)
    missing = [fact for fact in facts if fact.lower() not in message.lower()]
    assert not missing, f"{missing} not in: {message}"


@pytest.mark.parametrize("kind", ["single", "sharded"])
def test_the_undamaged_ones_load(good: dict[str, Path], kind: str) -> None:
    """Else nothing below would show anything. The index has a wrong total_size, as many have: nobody reads it."""
    [output] = load(good[kind]).generate("a b c", SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 2


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4d7a" * 16 + b"\nsize 4943162336\n"

SINGLE: dict[str, dict[str, tuple[Damage, tuple[str, ...]]]] = {
    "truncated": {
        "last 8 bytes": (cut("model.safetensors", lambda n: n - 8), ("model.safetensors", "truncated")),
        "half": (cut("model.safetensors", lambda n: n // 2), ("model.safetensors", "truncated")),
        "in the header": (cut("model.safetensors", lambda n: 100), ("model.safetensors", "100 bytes")),
        "in the length": (cut("model.safetensors", lambda n: 5), ("model.safetensors", "5 bytes")),
        "empty": (cut("model.safetensors", lambda n: 0), ("model.safetensors", "0 bytes")),
        "git lfs pointer": (content("model.safetensors", LFS), ("model.safetensors", "lfs")),
        "html": (content("model.safetensors", "<!doctype html><title>404</title>"), ("model.safetensors",)),
        "still downloading": (
            both(without("model.safetensors"), content("model.safetensors.incomplete", b"\0" * 64)),
            ("no .safetensors files",),
        ),
        "a layer short": (
            change_tensors({name: ... for name in stored() if ".layers.1." in name}),
            ("model.layers.1.", "missing"),
        ),
    },
    "header": {
        "longest length": (
            lambda folder: write_raw(folder / "model.safetensors", {}, 100, length=2**64 - 1),
            ("model.safetensors", str(2**64 - 1)),
        ),
        "length is the file's size": (
            lambda folder: write_raw(folder / "model.safetensors", {}, 100, length=110),
            ("model.safetensors", "110"),
        ),
        "data beyond the end": (
            change_header("lm_head.weight", data_offsets=[10**12, 10**12 + VOCAB * HIDDEN * 4]),
            ("model.safetensors", "lm_head.weight", str(10**12 + VOCAB * HIDDEN * 4), "14448"),
        ),
        "shape beyond the data": (
            change_header("lm_head.weight", shape=[10**9, 10**9]),
            ("model.safetensors", "lm_head.weight", str(10**9)),
        ),
        "negative offset": (change_header(Q, data_offsets=[-4, 860]), ("model.safetensors", Q, "-4")),
        "end before start": (change_header(Q, data_offsets=[864, 0]), ("model.safetensors", Q, "864")),
        "negative size": (change_header(Q, shape=[-18, -12]), ("model.safetensors", Q, "-18")),
        "offsets of another kind": (change_header(Q, data_offsets="0-864"), ("model.safetensors", Q)),
        "a fraction of a row": (change_header(Q, shape=[18.5, 12]), ("model.safetensors", Q, "18.5")),
        "a true size": (change_header("model.norm.weight", shape=[True]), ("model.safetensors", "model.norm.weight")),
        "two tensors on the same bytes": (
            change_header("lm_head.weight", data_offsets=[0, VOCAB * HIDDEN * 4]),
            ("model.safetensors",),
        ),
        "not an object": (
            lambda folder: write_raw(folder / "model.safetensors", [1, 2], 0),
            ("model.safetensors", "header"),
        ),
        "not utf-8": (
            lambda folder: write_raw(folder / "model.safetensors", b'{"\xff\xfe": 1}', 0),
            ("model.safetensors", "header"),
        ),
        "no json": (
            lambda folder: write_raw(folder / "model.safetensors", b"not json at all", 0),
            ("model.safetensors", "header"),
        ),
        "deep": (
            lambda folder: write_raw(folder / "model.safetensors", b"[" * 200_000, 0),
            ("model.safetensors", "header"),
        ),
        "a name twice": (
            lambda folder: write_raw(
                folder / "model.safetensors",
                b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},'
                b' "a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
                8,
            ),
            ("model.safetensors", "'a'"),
        ),
        "no tensors": (
            lambda folder: write_raw(folder / "model.safetensors", {"__metadata__": {"format": "pt"}}, 0),
            ("missing", "model.embed_tokens.weight"),
        ),
        "bytes behind the last tensor": (
            lambda folder: write_raw(folder / "model.safetensors", header_of(stored())[0], header_of(stored())[1] + 64),
            ("model.safetensors", "64"),
        ),
        "of a sparse terabyte": (
            both(
                lambda folder: write_raw(folder / "model.safetensors", {}, 0, length=2**39),
                lambda folder: os.truncate(folder / "model.safetensors", 2**40),
            ),
            ("model.safetensors", str(2**39)),
        ),
    },
    "dtypes": {
        "int8": (change_tensors({Q: ("I8", (18, 12))}), ("model.safetensors", Q, "I8")),
        "float64": (change_tensors({Q: ("F64", (18, 12))}), ("model.safetensors", Q, "F64")),
        "bool": (change_tensors({"model.norm.weight": ("BOOL", (12,))}), ("model.norm.weight", "BOOL")),
        "float8 without a word": (
            change_tensors({name: ("F8_E4M3", shape) for name, (_, shape) in stored().items() if "proj" in name}),
            ("F8_E4M3", Q),
        ),
        "unknown": (change_header(Q, dtype="F4_E2M1X"), (Q, "F4_E2M1X")),
        "no name": (change_header(Q, dtype=None), (Q, "None")),
        "config float8": (change_config(torch_dtype="float8_e4m3fn"), ("config.json", "float8_e4m3fn")),
        "config int8": (change_config(dtype="int8", torch_dtype=...), ("config.json", "int8")),
        "config number": (change_config(torch_dtype=16), ("config.json", "torch_dtype", "16")),
        "config list": (change_config(torch_dtype=["float16"]), ("config.json", "torch_dtype")),
    },
    "quantised": {
        "gptq": (
            change_config(quantization_config={"quant_method": "gptq", "bits": 4}),
            ("quantization_config", "gptq"),
        ),
        "fp8": (
            both(
                change_config(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]}),
                change_tensors({Q: ("F8_E4M3", (18, 12)), Q + "_scale_inv": ("F32", (1, 1))}),
            ),
            ("quantization_config", "fp8"),
        ),
        "bitsandbytes of old": (change_config(quantization_config={"load_in_4bit": True}), ("quantization_config",)),
        "bitsandbytes without a word": (
            change_tensors({Q: ("U8", (108, 1)), Q + ".absmax": ("F32", (4,)), Q + ".quant_map": ("F32", (16,))}),
            ("quant", Q),
        ),
        "a made-up method": (
            change_config(quantization_config={"quant_method": "zip9"}),
            ("quantization_config", "zip9"),
        ),
        "an empty block": (change_config(quantization_config={}), ("quantization_config",)),
        "a word": (change_config(quantization_config="awq"), ("quantization_config", "awq")),
        "in compression_config": (
            change_config(compression_config={"format": "pack-quantized", "quant_method": "compressed-tensors"}),
            ("compression_config",),
        ),
        "autogptq's tensors": (
            change_tensors(
                {
                    Q: ...,
                    Q.replace("weight", "qweight"): ("I32", (2, 18)),
                    Q.replace("weight", "qzeros"): ("I32", (1, 3)),
                    Q.replace("weight", "scales"): ("F16", (1, 18)),
                    Q.replace("weight", "g_idx"): ("I32", (12,)),
                }
            ),
            ("quantised", Q.replace("weight", "qweight")),
        ),
        "compressed-tensors' tensors": (
            change_tensors({Q: ..., Q + "_packed": ("I32", (18, 2)), Q + "_scale": ("BF16", (18, 1))}),
            ("quantised", Q + "_packed"),
        ),
        "float scales alone": (change_tensors({Q + "_scale": ("F32", (18, 1))}), ("quantised", Q + "_scale")),
        "scales of the cache": (
            change_tensors({"model.layers.0.self_attn.k_scale": ("F32", (1,))}),
            ("model.layers.0.self_attn.k_scale",),
        ),
        "modelopt's file": (
            content("hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}}),
            ("hf_quant_config.json",),
        ),
        "autogptq's file": (content("quantize_config.json", {"bits": 4, "group_size": 128}), ("quantize_config.json",)),
    },
    "vocabulary": {
        "tokenizer too large": (content("tokenizer.json", a_tokenizer(VOCAB + 3)), ("43", "40", "tokenizer")),
        "embedding resized, config not": (
            change_tensors({"model.embed_tokens.weight": ("F32", (48, 12)), "lm_head.weight": ("F32", (48, 12))}),
            ("model.embed_tokens.weight", "48", "40"),
        ),
        "head resized alone": (change_tensors({"lm_head.weight": ("F32", (48, 12))}), ("lm_head.weight", "48", "40")),
        "eos negative": (change_config(eos_token_id=-1), ("eos_token_id", "-1")),
        "eos a word": (change_config(eos_token_id="</s>"), ("eos_token_id", "</s>")),
        "eos of generation a word": (
            content("generation_config.json", {"eos_token_id": "</s>"}),
            ("generation_config.json", "eos_token_id", "</s>"),
        ),
        "bos unknown to the tokenizer": (
            content("tokenizer_config.json", {"bos_token": "<|begin|>", "eos_token": "</s>"}),
            ("<|begin|>",),
        ),
        "tokenizer truncated": (cut("tokenizer.json", lambda n: n // 2), ("tokenizer.json",)),
        "tokenizer empty object": (content("tokenizer.json", {}), ("tokenizer.json",)),
        "tokenizer a pointer": (content("tokenizer.json", LFS), ("tokenizer.json", "lfs")),
        "tokenizer of another version": (
            content("tokenizer.json", a_tokenizer().replace('"BPE"', '"BytePairs"')),
            ("tokenizer.json",),
        ),
        "only sentencepiece": (
            both(without("tokenizer.json"), content("tokenizer.model", b"\n\x0e\n\x05<unk>")),
            ("tokenizer.model", "tokenizer.json"),
        ),
        "bos a number": (
            content("tokenizer_config.json", {"bos_token": 0, "eos_token": "</s>"}),
            ("bos_token", "not 0"),
        ),
        "eos a list": (
            content("tokenizer_config.json", {"bos_token": "<s>", "eos_token": ["</s>"]}),
            ("eos_token", "['</s>']"),
        ),
        "template not text": (
            content("tokenizer_config.json", {"chat_template": 7, "bos_token": "<s>", "eos_token": "</s>"}),
            ("chat_template",),
        ),
    },
    "null and absent": {
        **{
            f"{key} {'absent' if value is ... else 'null'}": (change_config(**{key: value}), ("config.json", key))
            for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
            for value in (..., None)
        },
        "architectures absent": (change_config(architectures=..., model_type=...), ("config.json", "architectures")),
        "architectures empty": (change_config(architectures=[], model_type="bert"), ("architectures", "bert")),
        "architectures a word": (change_config(architectures="LlamaForCausalLM"), ("config.json", "architectures")),
        "architectures of numbers": (change_config(architectures=[None]), ("config.json", "architectures")),
        "another class": (change_config(architectures=["MambaForCausalLM"]), ("MambaForCausalLM",)),
        "nothing": (content("config.json", {}), ("config.json", "architectures")),
        "tie true, head differs in shape": (
            both(change_config(tie_word_embeddings=True), change_tensors({"lm_head.weight": ("F32", (39, 12))})),
            ("lm_head.weight", "39"),
        ),
        "tie false, no head": (change_tensors({"lm_head.weight": ...}), ("lm_head.weight", "missing")),
        "tie absent, no head": (
            both(change_config(tie_word_embeddings=...), change_tensors({"lm_head.weight": ...})),
            ("lm_head.weight", "missing"),
        ),
        "head_dim zero": (change_config(head_dim=0), ("head_dim", "0")),
        "bias without a flag": (
            change_tensors({Q.replace("weight", "bias"): ("F32", (18,))}),
            (Q.replace("weight", "bias"),),
        ),
        "flag without a bias": (change_config(attention_bias=True), (Q.replace("weight", "bias"), "missing")),
        "rope parameters null inside": (
            change_config(rope_scaling={"rope_type": "linear", "factor": None}),
            ("config.json", "factor"),
        ),
        "rope type unknown": (
            change_config(rope_scaling={"rope_type": "mrope9", "factor": 2.0}),
            ("config.json", "mrope9"),
        ),
        "rope a word": (change_config(rope_scaling="linear"), ("config.json", "rope_scaling", "linear")),
    },
    "stray": {
        "two files, no index": (
            lambda folder: (
                (folder / "model.safetensors").rename(folder / "a.safetensors")
                and write_tensors(folder / "b.safetensors", stored())
            ),
            ("a.safetensors", "b.safetensors"),
        ),
        "a copy": (
            lambda folder: write_tensors(folder / "model (1).safetensors", stored()),
            ("model (1).safetensors",),
        ),
        "a variant": (
            lambda folder: write_tensors(folder / "model.fp16.safetensors", stored("F16")),
            ("model.fp16.safetensors",),
        ),
        "an adapter": (
            both(
                content("adapter_config.json", {"peft_type": "LORA"}),
                lambda folder: write_tensors(folder / "adapter_model.safetensors", {"lora_A": ("F32", (2, 2))}),
            ),
            ("adapter_config.json", "merge"),
        ),
        "only pickles": (
            both(without("model.safetensors"), content("pytorch_model.bin", b"\x80\x04")),
            ("pytorch_model.bin",),
        ),
        "an adapter without its config": (
            lambda folder: write_tensors(folder / "adapter_model.safetensors", {"lora_A": ("F32", (2, 2))}),
            ("adapter_model.safetensors",),
        ),
        "only an adapter": (
            both(
                without("model.safetensors"),
                lambda folder: write_tensors(folder / "adapter_model.safetensors", {"lora_A": ("F32", (2, 2))}),
            ),
            ("missing", "unexpected: lora_A"),
        ),
        "no files": (
            both(without("model.safetensors"), without("tokenizer.json", "tokenizer_config.json")),
            ("no .safetensors files",),
        ),
        "no config": (without("config.json"), ("config.json",)),
    },
    "links": {
        "config to itself": (link("config.json", "config.json"), ("config.json", "symbolic links")),
        "weights to themselves": (link("model.safetensors", "model.safetensors"), ("model.safetensors",)),
        "two in a ring": (
            both(link("config.json", "other.json"), link("other.json", "config.json")),
            ("config.json", "symbolic links"),
        ),
        "tokenizer to itself": (link("tokenizer.json", "tokenizer.json"), ("tokenizer.json", "symbolic links")),
        "a blob that was cleaned away": (
            link("model.safetensors", "../../blobs/4d7a4d7a"),
            ("model.safetensors", "4d7a4d7a"),
        ),
        "config nowhere": (link("config.json", "gone.json"), ("config.json",)),
        "generation config nowhere": (link("generation_config.json", "gone.json"), ("generation_config.json",)),
        "template nowhere": (link("chat_template.jinja", "gone"), ("chat_template.jinja",)),
        "weights to a folder": (link("model.safetensors", "."), ("model.safetensors",)),
    },
    "config is no json": {
        "empty": (content("config.json", b""), ("config.json",)),
        "html": (content("config.json", "<html><body>Access denied</body></html>"), ("config.json", "json")),
        "truncated": (cut("config.json", lambda n: n - 9), ("config.json", "json")),
        "a pointer": (content("config.json", LFS), ("config.json", "lfs")),
        "python": (content("config.json", "{'hidden_size': 12}"), ("config.json", "json")),
        "comment": (content("config.json", '{"hidden_size": 12} // twelve'), ("config.json", "json")),
        "a comma too many": (content("config.json", '{"hidden_size": 12,}'), ("config.json", "json")),
        "two objects": (content("config.json", "{}{}"), ("config.json", "json")),
        "list": (content("config.json", "[]"), ("config.json", "list")),
        "null": (content("config.json", "null"), ("config.json",)),
        "number": (content("config.json", "12"), ("config.json",)),
        "zeros": (content("config.json", b"\0" * 700), ("config.json",)),
        "deep": (content("config.json", '{"a":' * 100_000), ("config.json",)),
        "key twice": (
            content("config.json", json.dumps(CONFIG)[:-1] + ', "hidden_size": 24}'),
            ("config.json", "hidden_size"),
        ),
        "a number of 5000 digits": (
            content("config.json", json.dumps(CONFIG)[:-1] + ', "spam": 1' + "0" * 5000 + "}"),
            ("config.json",),
        ),
        "half an emoji": (change_config(architectures=["\ud83d"]), ("config.json", "architecture", "d83d")),
        "a line break in a name": (
            change_config(architectures=["Llama\nForCausalLM\x1b[31m"]),
            ("ForCausalLM\\x1b[31m",),
        ),
        "a very long name": (change_config(architectures=["L" * 1_000_000]), ("architecture LLL",)),
        "a folder": (
            lambda folder: (folder / "config.json").unlink() or (folder / "config.json").mkdir(),
            ("config.json",),
        ),
        "a pipe": (
            lambda folder: (folder / "config.json").unlink() or os.mkfifo(folder / "config.json"),
            ("config.json",),
        ),
    },
    "sizes": {
        **{
            f"{key} = {value}": (change_config(**{key: value}), ("config.json", key, str(value)))
            for key, values in {
                "vocab_size": (-1, 0, 2**40, 10**30),
                "hidden_size": (-12, 0, 2**63, "12", 12.5),
                "intermediate_size": (0, -(2**70)),
                "num_hidden_layers": (0, -1, 10**9, True),
                "num_attention_heads": (0, -3),
                "num_key_value_heads": (0, -1, 2, 6),
                "head_dim": (-6, 7, 2**31),
                "max_position_embeddings": (0, -1, 1.5, 2**62),
                "rms_norm_eps": (-1e-5, "1e-5"),
                "rope_theta": (0, -10000.0, "10000"),
                "attention_bias": ("yes", 2),
                "tie_word_embeddings": ("false",),
            }.items()
            for value in values
        },
        "vocab_size beyond the file": (
            change_config(vocab_size=2**31 - 1),
            ("model.embed_tokens.weight", str(2**31 - 1)),
        ),
        "hidden_size beyond the file": (change_config(hidden_size=2**31 - 1), ("model.embed_tokens.weight",)),
        "layers beyond the file": (change_config(num_hidden_layers=4000), ("model.layers.",)),
        "all of them": (
            change_config(
                vocab_size=2**31 - 1, hidden_size=2**31 - 1, intermediate_size=2**31 - 1, num_hidden_layers=4096
            ),
            (str(2**31 - 1),),
        ),
        "eps not a number": (change_config(rms_norm_eps=float("nan")), ("rms_norm_eps", "nan")),
        "eps overflows": (
            content("config.json", json.dumps(CONFIG).replace("1e-05", "1e400")),
            ("rms_norm_eps", "inf"),
        ),
        "theta infinite": (change_config(rope_theta=float("inf")), ("rope_theta", "inf")),
        "factor zero": (change_config(rope_scaling={"type": "linear", "factor": 0}), ("factor", "0")),
        "factor negative": (change_config(rope_scaling={"type": "linear", "factor": -4.0}), ("factor", "-4")),
        "factor infinite": (
            change_config(rope_scaling={"type": "dynamic", "factor": float("inf")}),
            ("factor", "inf"),
        ),
        "original length negative": (
            change_config(
                rope_scaling={
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": -8192,
                }
            ),
            ("original_max_position_embeddings", "-8192"),
        ),
        "low above high": (
            change_config(
                rope_scaling={
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 4.0,
                    "high_freq_factor": 1.0,
                    "original_max_position_embeddings": 8192,
                }
            ),
            ("low_freq_factor", "high_freq_factor"),
        ),
        "factors of another length": (
            change_config(
                architectures=["Phi3ForCausalLM"],
                original_max_position_embeddings=32,
                rope_scaling={"type": "longrope", "short_factor": [1.0] * 2, "long_factor": [2.0] * 3},
            ),
            ("short_factor", "[1.0, 1.0]", "3 numbers"),
        ),
        "window zero": (
            change_config(architectures=["MistralForCausalLM"], sliding_window=0),
            ("sliding_window", "0"),
        ),
        "window negative": (
            change_config(architectures=["MistralForCausalLM"], sliding_window=-1),
            ("sliding_window", "-1"),
        ),
        "part of a head zero": (
            change_config(architectures=["Phi3ForCausalLM"], partial_rotary_factor=0.0),
            ("partial_rotary_factor", "0.0"),
        ),
        "more than a head": (
            change_config(architectures=["Phi3ForCausalLM"], partial_rotary_factor=1.5),
            ("partial_rotary_factor", "1.5"),
        ),
        "layer types of another number": (
            change_config(architectures=["Qwen3ForCausalLM"], layer_types=["full_attention"] * 3),
            ("layer_types", "each of 2 layers"),
        ),
    },
}

SHARDED: dict[str, dict[str, tuple[Damage, tuple[str, ...]]]] = {
    "truncated": {
        "second shard absent": (without(TWO), (TWO,)),
        "all shards absent": (without(ONE, TWO), (ONE, TWO)),
        "second shard truncated": (cut(TWO, lambda n: n - 8), (TWO, "truncated")),
        "second shard a pointer": (content(TWO, LFS), (TWO, "lfs")),
        "second shard empty": (cut(TWO, lambda n: 0), (TWO, "0 bytes")),
        "index absent": (without(INDEX), (ONE, TWO)),
        "index and a shard absent": (without(INDEX, TWO), (ONE,)),
        "index truncated": (cut(INDEX, lambda n: n - 30), (INDEX, "json")),
    },
    "index": {
        "tensor not in its shard": (
            change_index(lambda index: index["weight_map"].update({Q: TWO})),
            (INDEX, Q, TWO),
        ),
        "tensor in no shard": (
            change_index(lambda index: index["weight_map"].update({"model.layers.9.mlp.up_proj.weight": ONE})),
            (INDEX, "model.layers.9.mlp.up_proj.weight", ONE),
        ),
        "tensor not in the index": (
            change_index(lambda index: index["weight_map"].pop(Q) and None),
            (INDEX, Q, ONE),
        ),
        "tensor in two shards": (
            lambda folder: write_tensors(folder / TWO, {Q: ("F32", (18, 12)), **dict(list(stored().items())[11:])}),
            (Q, TWO),
        ),
        "no map": (change_index(lambda index: index.pop("weight_map") and None), (INDEX, "weight_map")),
        "map of another kind": (change_index(lambda index: index.update(weight_map=[ONE, TWO])), (INDEX, "weight_map")),
        "empty map": (change_index(lambda index: index.update(weight_map={})), (INDEX,)),
        "null for a file": (change_index(lambda index: index["weight_map"].update({Q: None})), (INDEX, Q)),
        "a list": (change_index(lambda index: [index]), (INDEX,)),
        "outside the folder": (
            change_index(lambda index: index["weight_map"].update({Q: "../single/model.safetensors"})),
            (INDEX, "../single/model.safetensors"),
        ),
        "an absolute path": (
            change_index(lambda index: index["weight_map"].update({Q: "/etc/passwd"})),
            (INDEX, "/etc/passwd"),
        ),
        "a pickle": (
            both(
                content("pytorch_model.bin", b"\x80\x04"),
                change_index(lambda index: index["weight_map"].update({Q: "pytorch_model.bin"})),
            ),
            (INDEX, "pytorch_model.bin"),
        ),
        "a zero byte in a name": (
            change_index(lambda index: index["weight_map"].update({Q: "model\0.safetensors"})),
            (INDEX,),
        ),
    },
    "stray": {
        "one file beside the shards": (
            lambda folder: write_tensors(folder / "model.safetensors", stored()),
            ("model.safetensors", INDEX),
        ),
        "a shard of an older save": (
            lambda folder: write_tensors(folder / "model-00003-of-00003.safetensors", {"x": ("F32", (1,))}),
            ("model-00003-of-00003.safetensors",),
        ),
        "an unnamed shard": (
            lambda folder: write_tensors(folder / "model-00002-of-00002 copy.safetensors", {"x": ("F32", (1,))}),
            ("model-00002-of-00002 copy.safetensors",),
        ),
    },
    "links": {
        "a shard to itself": (link(TWO, TWO), (TWO,)),
        "the index to itself": (link(INDEX, INDEX), (INDEX,)),
        "a shard to nowhere": (link(TWO, "gone"), (TWO,)),
    },
}


def cases() -> Iterator[Any]:
    for base, kinds in (("single", SINGLE), ("sharded", SHARDED)):
        for kind, of_kind in kinds.items():
            for name, (damage, facts) in of_kind.items():
                yield pytest.param(base, damage, facts, id=f"{kind}: {name}")


@pytest.mark.parametrize(("base", "damage", "facts"), list(cases()))
def test_one_clear_error(
    good: dict[str, Path], tmp_path: Path, base: str, damage: Damage, facts: tuple[str, ...]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(good[base], folder, symlinks=True)
    damage(folder)
    expect(folder, facts)


@pytest.fixture
def unprivileged_folder(good: dict[str, Path]) -> Iterator[Path]:
    """A copy of the good checkpoint, and no privileges that would see through permissions."""
    with tempfile.TemporaryDirectory() as root:
        os.chmod(root, 0o755)
        shutil.copytree(good["single"], Path(root) / "model")
        load(Path(root) / "model")  # all modules are imported while they can be
        with contextlib.ExitStack() as stack:
            if os.geteuid() == 0:
                os.chown(Path(root) / "model", 65534, -1)
                os.seteuid(65534)
                stack.callback(os.seteuid, 0)
            yield Path(root) / "model"
            os.chmod(Path(root) / "model", 0o755)


@pytest.mark.parametrize(
    "name",
    ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "."],
)
def test_without_permission(unprivileged_folder: Path, name: str) -> None:
    path = unprivileged_folder / name
    if name == "generation_config.json":
        path.write_text("{}")
    euid = os.geteuid()
    with contextlib.ExitStack() as stack:
        if euid == 65534:
            os.seteuid(0)
            stack.callback(os.seteuid, euid)
        path.chmod(0)
    expect(unprivileged_folder, ("permission denied", "model" if name == "." else name))


@pytest.mark.parametrize("kind", ["absent", "ring", "file", "pipe", "empty name", "name too long"])
def test_no_folder(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model"
    if kind == "ring":
        path.symlink_to("model")
    elif kind == "file":
        path.write_text("{}")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "name too long":
        path = tmp_path / ("m" * 300)
    refused = refusal(Path("") / "no-such-folder" if kind == "empty name" else path)
    assert kind == "empty name" or path.name[:8] in refused


# What loads all the same, and must


def loaded(folder: Path, caplog: pytest.LogCaptureFixture) -> tuple[LLM, str]:
    with caplog.at_level(logging.WARNING):
        llm = load(folder)
    [output] = llm.generate([[2, 3, 4]], SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 2
    return llm, "\n".join(record.getMessage() for record in caplog.records)


HARMLESS: dict[str, Damage] = {
    "nulls": change_config(rope_scaling=None, rms_norm_eps=None, attention_bias=None, tie_word_embeddings=None),
    "architectures absent": change_config(architectures=...),
    "config in utf-16": content("config.json", json.dumps(CONFIG).encode("utf-16")),
    "a gguf beside": content("model-q4.gguf", b"GGUF"),
    "bos beyond": change_config(bos_token_id=40),
    "no pad token, in the manner of 2023": change_config(pad_token_id=-1),
    "quantization_config null": change_config(quantization_config=None),
    "rope_scaling default": change_config(rope_scaling={"rope_type": "default"}),
    "eos null": change_config(eos_token_id=None),
    "remote code announced": change_config(auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"}),
    "keys of training": change_config(attention_dropout=0.1, use_cache=False, pretraining_tp=2, initializer_range=0.1),
    "metadata of the header null": lambda folder: write_raw(
        folder / "model.safetensors", {**header_of(stored())[0], "__metadata__": {}}, header_of(stored())[1]
    ),
    "pickles beside": content("pytorch_model.bin", b"\x80\x04"),
    "the original in a folder": lambda folder: (
        (folder / "original").mkdir() or content("original/consolidated.00.pth", b"\x80")(folder)
    ),
    "finder's leftovers": both(content("._model.safetensors", b"\0\5\x16\7"), content(".DS_Store", b"\0")),
    "rotary buffers of old": change_tensors(
        {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": ("F32", (HEAD_DIM // 2,)) for i in range(LAYERS)}
    ),
    "head stored though tied": change_config(tie_word_embeddings=True),
    "blobs behind links": lambda folder: (
        (folder.parent / "blobs").mkdir()
        or (
            (folder / "model.safetensors").rename(folder.parent / "blobs" / "4d7a")
            and (folder / "model.safetensors").symlink_to("../blobs/4d7a")
        )
    ),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_loads_all_the_same(good: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(good["single"], folder)
    HARMLESS[name](folder)
    loaded(folder, caplog)


def test_half_and_single_precision_in_one_file(
    good: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Norms in float32 beside half-precision weights are common: one dtype comes out, the config's if it names one."""
    folder = tmp_path / "model"
    shutil.copytree(good["single"], folder)
    half = {name: ("BF16", shape) for name, (_, shape) in stored().items() if "norm" not in name}
    both(change_config(torch_dtype="bfloat16"), change_tensors(half))(folder)
    llm, _ = loaded(folder, caplog)
    assert str(llm.dtype) == "torch.bfloat16"


def test_padding_of_the_vocabulary_is_warned_of_when_it_is_large(
    good: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As vLLM and transformers load it: most vocabularies are padded. A third of it is worth a word."""
    folder = tmp_path / "model"
    shutil.copytree(good["single"], folder)
    (folder / "tokenizer.json").write_text(a_tokenizer(26))
    _, warnings = loaded(folder, caplog)
    assert "26" in warnings
    assert "40" in warnings


def test_an_added_token_without_an_embedding(
    good: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """[PAD] as id 32000 of 32000 is in hundreds of fine-tunes of Llama 2. It loads; a prompt with it does not run."""
    folder = tmp_path / "model"
    shutil.copytree(good["single"], folder)
    (folder / "tokenizer.json").write_text(a_tokenizer(added=("[PAD]",)))
    llm, warnings = loaded(folder, caplog)
    assert "[PAD]" in warnings
    assert "40" in warnings
    with pytest.raises(ValueError, match="40"):
        llm.generate("a [PAD] b", SamplingParams(max_tokens=1))


def test_added_tokens_with_other_ids(good: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A tokenizer.json and a config of two versions: as in transformers, the first stands, but not without a word."""
    folder = tmp_path / "model"
    shutil.copytree(good["single"], folder)
    (folder / "tokenizer.json").write_text(a_tokenizer(36))
    added = {"1": {"content": "</s>"}, "7": {"content": "<s>"}, "39": {"content": "<|im_end|>"}}
    settings = {"bos_token": "<s>", "eos_token": "</s>", "added_tokens_decoder": added}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    _, warnings = loaded(folder, caplog)
    assert "'<s>' is 0, not 7, '<|im_end|>' is 36, not 39" in warnings


def test_the_same_weights_in_mistrals_own_format_beside(
    good: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`consolidated.safetensors` beside the shards is in Mistral's repositories; passed over as elsewhere."""
    folder = tmp_path / "model"
    shutil.copytree(good["sharded"], folder)
    write_tensors(folder / "consolidated.safetensors", {"layers.0.attention.wq.weight": ("F32", (18, 12))})
    (folder / "params.json").write_text("{}")
    _, warnings = loaded(folder, caplog)
    assert not warnings


@pytest.mark.parametrize(
    "damage",
    [change_config(eos_token_id=[1, 128009]), content("generation_config.json", {"eos_token_id": [1, 128009]})],
    ids=["config", "generation config"],
)
def test_an_end_that_cannot_be_generated(
    good: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Damage
) -> None:
    """It loads elsewhere, and harms nobody; but a model that never ends may have this reason."""
    folder = tmp_path / "model"
    shutil.copytree(good["single"], folder)
    damage(folder)
    llm, warnings = loaded(folder, caplog)
    assert "128009" in warnings
    assert "40" in warnings
    assert llm.eos_token_ids == {1}


# Nothing of a checkpoint is executed


def test_no_code_of_the_checkpoint_runs(good: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "model"
    shutil.copytree(good["single"], folder)
    mark = tmp_path / "it ran"
    code = f"open({str(mark)!r}, 'w').close()\n"
    for name in (
        "modeling_evil.py",
        "configuration_evil.py",
        "tokenization_evil.py",
        "__init__.py",
        "sitecustomize.py",
    ):
        (folder / name).write_text(code)
    change_config(
        auto_map={"AutoConfig": "configuration_evil.C", "AutoModelForCausalLM": "modeling_evil.M"},
        trust_remote_code=True,
    )(folder)
    template = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    settings = {"auto_map": {"AutoTokenizer": ["tokenization_evil.T", None]}, "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    monkeypatch.chdir(folder)
    llm = load(folder)
    llm.generate("a", SamplingParams(max_tokens=1))
    with pytest.raises(ValueError, match="chat template"):
        llm.chat([{"role": "user", "content": "a"}], SamplingParams(max_tokens=1))
    assert not mark.exists()


@pytest.mark.parametrize(
    "template",
    [
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10**12) %}{% endfor %}",
        "{{ 'x' * 10**12 }}",
        "{{ messages[0].content.format_map }}{{ undefined.attribute.of }}",
        "{% include '/etc/passwd' %}",
        "{% if %}",
        "{{ raise_exception('roles must alternate') }}",
    ],
)
def test_templates_that_do_harm(good: dict[str, Path], tmp_path: Path, template: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(good["single"], folder)
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = open_checkpoint(folder).load_tokenizer()
    assert tokenizer is not None
    with pytest.raises(ValueError, match="chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}])


# What the command line shows


@pytest.mark.parametrize(
    ("base", "damage", "fact"),
    [
        pytest.param("sharded", without(TWO), TWO, id="shard absent"),
        pytest.param("single", content("config.json", b"\xff\xfe"), "config.json", id="config of bytes"),
        pytest.param("single", link("config.json", "config.json"), "config.json", id="ring"),
        pytest.param("single", change_config(architectures=["\ud83d\x1b[2J"]), "architecture", id="unprintable"),
        pytest.param("single", change_config(quantization_config={"quant_method": "awq"}), "awq", id="quantised"),
    ],
)
@pytest.mark.parametrize("command", ["inspect", "generate"])
def test_the_command_line(
    good: dict[str, Path], tmp_path: Path, cli: Callable[..., Any], base: str, damage: Damage, fact: str, command: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(good[base], folder)
    damage(folder)
    result = (
        cli("inspect", folder) if command == "inspect" else cli("generate", "a", "--model", folder, "--device", "cpu")
    )
    assert result.code == 2
    assert result.out == ""
    assert len(result.err.splitlines()) == 1
    assert fact in result.err
