"""GGUF files load as the checkpoint that they were made from, and damaged ones do not load."""

import hashlib
import math
import struct
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from ostinato.model import ModelConfig, RotaryConfig, UnsupportedModelError
from ostinato.weights import load_model, open_checkpoint
from ostinato.weights.checkpoint import CheckpointError
from ostinato.weights.gguf_checkpoint import GGUFCheckpoint
from ostinato.weights.gguf_file import CHUNK_ELEMENTS, GGUFFile

Tensors = dict[str, torch.Tensor]
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTER_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
STORED_AS_IS = (Kind.F32, Kind.F16, Kind.BF16)
QUANTISABLE = (Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0)
K_QUANTS = (Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K)


def gguf_name(name: str) -> str:
    stem, leaf = name.rsplit(".", 1)
    if stem in OUTER_NAMES:
        return f"{OUTER_NAMES[stem]}.{leaf}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{LAYER_NAMES[part]}.{leaf}"


def interleaved(values: torch.Tensor, num_heads: int) -> torch.Tensor:
    """What the conversion to GGUF does to the rows of q and k: (i, i + D / 2) become neighbours."""
    head_dim = values.shape[0] // num_heads
    order = [
        head * head_dim + i + half * (head_dim // 2)
        for head in range(num_heads)
        for i in range(head_dim // 2)
        for half in (0, 1)
    ]
    return values[order]


@pytest.fixture
def wide_config(tiny_config: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """Rows of 256, which every block format divides, and head_dim ≠ hidden / heads."""
    return tiny_config(
        vocab_size=300,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
    )


def write_gguf(
    path: Path,
    config: dict[str, Any],
    tensors: Tensors,
    *,
    kind: Kind = Kind.F32,
    norm_kind: Kind = Kind.F32,
    extra_tensors: dict[str, np.ndarray[Any, Any]] | None = None,
    endianess: gguf.GGUFEndian = gguf.GGUFEndian.LITTLE,
    alignment: int | None = None,
    **changes: Any,
) -> Path:
    """A file of a Hugging Face config and tensors; matrices are stored as `kind`.

    `changes` add metadata, `__` standing for a point; a change to `...` leaves a key out.
    """
    architecture = changes.pop("general__architecture", "llama")
    metadata = {
        f"{architecture}.vocab_size": config["vocab_size"],
        f"{architecture}.context_length": config["max_position_embeddings"],
        f"{architecture}.embedding_length": config["hidden_size"],
        f"{architecture}.block_count": config["num_hidden_layers"],
        f"{architecture}.feed_forward_length": config["intermediate_size"],
        f"{architecture}.attention.head_count": config["num_attention_heads"],
        f"{architecture}.attention.head_count_kv": config["num_key_value_heads"],
        f"{architecture}.attention.key_length": config["head_dim"],
        f"{architecture}.attention.value_length": config["head_dim"],
        f"{architecture}.attention.layer_norm_rms_epsilon": config.get("rms_norm_eps", 1e-6),
        f"{architecture}.rope.dimension_count": config["head_dim"],
        f"{architecture}.rope.freq_base": config.get("rope_theta", 10000.0),
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    writer = gguf.GGUFWriter(path, architecture, endianess=endianess)
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif value is not ...:
            add[type(value)](key, value)
    for name, values in tensors.items():
        if architecture == "llama" and ".q_proj" in name:
            values = interleaved(values, config["num_attention_heads"])
        if architecture == "llama" and ".k_proj" in name:
            values = interleaved(values, config["num_key_value_heads"])
        stored_kind = kind if values.dim() == 2 else norm_kind
        stored = gguf.quants.quantize(values.float().numpy(), stored_kind)
        writer.add_tensor(gguf_name(name), stored, raw_dtype=stored_kind)
    for name, array in (extra_tensors or {}).items():
        writer.add_tensor(name, array)
    return finish(writer, path)


def finish(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_tensor(path: Path, name: str, stored: np.ndarray[Any, Any], kind: Kind | None = None) -> Path:
    """A file of one tensor and nothing else."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor(name, stored, raw_dtype=kind)
    return finish(writer, path)


def assert_same_tensors(actual: Tensors, expected: Tensors) -> None:
    assert actual.keys() == expected.keys()
    for name, values in expected.items():
        assert actual[name].dtype == values.dtype, name
        assert torch.equal(actual[name], values), name


HEADS_AND_BIASES = {
    "untied": {"tie_word_embeddings": False},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "attention-biases": {"attention_bias": True},
    "one-kv-head": {"num_attention_heads": 9, "num_key_value_heads": 1, "head_dim": 10},
    "all-kv-heads": {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 4},
}


@pytest.mark.parametrize("changes", HEADS_AND_BIASES.values(), ids=HEADS_AND_BIASES)
def test_a_file_is_the_checkpoint_it_was_made_from(
    changes: dict[str, Any],
    tiny_config: Callable[..., dict[str, Any]],
    tiny_tensors: Callable[..., Tensors],
    write_folder: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """B01, B09: names, row order, biases, tied and untied heads, and the config, against safetensors."""
    config = tiny_config(dtype="float32", rms_norm_eps=1e-5, **changes)
    tensors = tiny_tensors(config)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "model.gguf", config, tensors))
    folder = open_checkpoint(write_folder(tmp_path / "folder", config, tensors))
    assert checkpoint.format == "gguf"
    assert checkpoint.config == folder.config
    assert checkpoint.tensor_info() == folder.tensor_info()
    assert list(checkpoint.tensor_info()) == sorted(tensors)
    assert_same_tensors(dict(checkpoint.tensors()), tensors)
    loaded, expected = load_model(checkpoint)[0], load_model(folder)[0]
    assert_same_tensors(dict(loaded.named_parameters()), dict(expected.named_parameters()))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen2", {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}}),
        ("qwen3", {}),
        ("qwen3", {"attention_bias": True}),
    ],
    ids=str,
)
def test_files_of_other_architectures(
    family: str,
    changes: dict[str, Any],
    tiny_config: Callable[..., dict[str, Any]],
    tiny_tensors: Callable[..., Tensors],
    write_folder: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """B06, B09: biases without a key, norms of heads, rows in the order of Hugging Face, and yarn."""
    classes = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
    config = tiny_config(
        architectures=[classes[family]], model_type=family, dtype="float32", rms_norm_eps=1e-5, **changes
    )
    tensors = tiny_tensors(config)
    metadata: dict[str, Any] = {"general__architecture": family}
    if "rope_scaling" in changes:
        metadata |= {
            f"{family}__rope__scaling__type": "yarn",
            f"{family}__rope__scaling__factor": 4.0,
            f"{family}__rope__scaling__original_context_length": 16,
        }
    checkpoint = open_checkpoint(write_gguf(tmp_path / "model.gguf", config, tensors, **metadata))
    folder = open_checkpoint(write_folder(tmp_path / "folder", config, tensors))
    assert checkpoint.config == folder.config
    assert checkpoint.config.rotary.kind == ("yarn" if "rope_scaling" in changes else "default")
    assert_same_tensors(dict(checkpoint.tensors()), tensors)
    loaded, expected = load_model(checkpoint)[0], load_model(folder)[0]
    assert_same_tensors(dict(loaded.named_parameters()), dict(expected.named_parameters()))


def test_yarn_without_its_original_length_is_refused(
    tiny_config: Callable[..., dict[str, Any]], tiny_tensors: Callable[..., Tensors], tmp_path: Path
) -> None:
    config = tiny_config()
    changes = {"llama__rope__scaling__type": "yarn", "llama__rope__scaling__factor": 4.0}
    path = write_gguf(tmp_path / "model.gguf", config, tiny_tensors(config), **changes)
    with pytest.raises(CheckpointError, match="original_context_length is missing"):
        open_checkpoint(path)


@pytest.mark.parametrize("kind", STORED_AS_IS, ids=lambda kind: kind.name)
def test_unquantised_weights_keep_their_dtype(
    kind: Kind, wide_config: dict[str, Any], tiny_tensors: Callable[..., Tensors], tmp_path: Path
) -> None:
    """B13: the norms of a half-precision file are float32, and the file still counts as half precision."""
    dtype = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}[kind]
    tensors = tiny_tensors(wide_config)
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "model.gguf", wide_config, tensors, kind=kind))
    assert checkpoint.default_dtype == checkpoint.config.dtype == dtype
    # round to nearest even on both sides, so the cast is exactly what the writer did
    expected = {name: values.to(dtype) if values.dim() == 2 else values for name, values in tensors.items()}
    assert_same_tensors(dict(checkpoint.tensors()), expected)
    info = checkpoint.tensor_info()
    assert {name: values.dtype for name, values in expected.items()} == {n: info[n].dtype for n in info}
    assert all(info[name].nbytes == values.nbytes for name, values in expected.items())


@pytest.mark.parametrize("kind", QUANTISABLE, ids=lambda kind: kind.name)
def test_quantised_weights_come_back_in_float32(
    kind: Kind, wide_config: dict[str, Any], tiny_tensors: Callable[..., Tensors], tmp_path: Path
) -> None:
    """Equal to what the gguf package makes of the same rows, moved back; and near what was quantised."""
    tensors = tiny_tensors(wide_config)
    assert tensors["model.embed_tokens.weight"].numel() > CHUNK_ELEMENTS
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "model.gguf", wide_config, tensors, kind=kind))
    assert checkpoint.default_dtype == torch.float32
    # half a step of a block of 32: the range of normal values within ±5, over the number of levels
    tolerance = {Kind.Q8_0: 0.03, Kind.Q5_0: 0.33, Kind.Q5_1: 0.2, Kind.Q4_0: 0.7, Kind.Q4_1: 0.4}[kind]
    loaded = dict(checkpoint.tensors())
    assert loaded.keys() == tensors.keys()
    for name, values in tensors.items():
        assert loaded[name].dtype == torch.float32
        if values.dim() == 1:
            assert torch.equal(loaded[name], values)
            continue
        stored = gguf.quants.quantize(values.numpy(), kind)  # row by row, so it does not matter in which order
        assert torch.equal(loaded[name], torch.from_numpy(gguf.quants.dequantize(stored, kind))), name
        assert (loaded[name] - values).abs().max() < tolerance, name


def k_quant_block(kind: Kind) -> tuple[bytes, list[float]]:
    """One block of 256 and its values, by the formats' definition, with one scale for all of its parts.

    d = 0.5, d_min = 0.25 (float16); the quants run through all levels of their low bits.
    """
    halves = struct.pack("<ee", 0.5, 0.25)
    d = halves[:2]
    every_two_bits = b"\xe4"  # 0, 1, 2, 3 from the lowest bits up
    if kind == Kind.Q2_K:  # scales (min << 4 | scale), quants, d, d_min
        block = bytes([3 << 4 | 2]) * 16 + every_two_bits * 64 + halves
        return block, [0.5 * 2 * q - 0.25 * 3 for q in (0, 1, 2, 3) for _ in range(32)] * 2
    if kind == Kind.Q3_K:  # high bits (a set one means: do not subtract 4), low bits, 6-bit scales + 32, d
        # the scale 37 - 32 = 5: 37 = 0b10_0101; its low nibble twice a byte, its high bits four times a byte
        block = b"\x0f" * 32 + every_two_bits * 64 + b"\x55" * 8 + b"\xaa" * 4 + d
        first = [0.5 * 5 * q for q in (0, 1, 2, 3) for _ in range(32)]
        return block, first + [0.5 * 5 * (q - 4) for q in (0, 1, 2, 3) for _ in range(32)]
    if kind == Kind.Q4_K:  # d, d_min, 6-bit scales and mins, nibbles
        block = halves + bytes([5] * 4 + [3] * 4 + [3 << 4 | 5] * 4) + b"\x7c" * 128
        return block, ([0.5 * 5 * 12 - 0.25 * 3] * 32 + [0.5 * 5 * 7 - 0.25 * 3] * 32) * 4
    if kind == Kind.Q5_K:  # as Q4_K, with a fifth bit for each: here set in every second run of 32
        block = halves + bytes([5] * 4 + [3] * 4 + [3 << 4 | 5] * 4) + b"\xaa" * 32 + b"\x7c" * 128
        return block, ([0.5 * 5 * 12 - 0.25 * 3] * 32 + [0.5 * 5 * 23 - 0.25 * 3] * 32) * 4
    assert kind == Kind.Q6_K  # low nibbles, high two bits, 8-bit scales, d
    block = b"\x7c" * 128 + every_two_bits * 64 + struct.pack("b", -3) * 16 + d
    low = (12, 12, 7, 7)
    return block, [0.5 * -3 * (low[i] + 16 * i - 32) for i in range(4) for _ in range(32)] * 2


@pytest.mark.parametrize("kind", K_QUANTS, ids=lambda kind: kind.name)
def test_k_quants(kind: Kind, tmp_path: Path) -> None:
    block, values = k_quant_block(kind)
    num_rows = CHUNK_ELEMENTS // 256 + 3
    stored = np.tile(np.frombuffer(block, np.uint8), (num_rows, 1))
    file = GGUFFile(write_tensor(tmp_path / "model.gguf", "w", stored, kind))
    assert torch.equal(file.read(file.tensors["w"]), torch.tensor(values).expand(num_rows, -1))


def test_reading_needs_little_memory_beside_the_result(tmp_path: Path) -> None:
    values = np.zeros((1024, 1024), np.float32)
    stored = gguf.quants.quantize(values, Kind.Q8_0)
    file = GGUFFile(write_tensor(tmp_path / "model.gguf", "w", stored, Kind.Q8_0))
    tracemalloc.start()
    try:
        file.read(file.tensors["w"])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1.5 * values.nbytes


def test_the_header_is_what_the_package_reads(
    wide_config: dict[str, Any], tiny_tensors: Callable[..., Tensors], tmp_path: Path
) -> None:
    path = write_gguf(
        tmp_path / "model.gguf",
        wide_config,
        tiny_tensors(wide_config),
        kind=Kind.Q5_1,
        numbers=[1, -2, 3],
        reals=[0.5, 1.5],
        texts=["", "ünï", "日本"],
        flag=True,
        alignment=64,
    )
    file, reader = GGUFFile(path), gguf.GGUFReader(path)
    expected = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert file.metadata == expected
    assert list(file.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        ours = file.tensors[tensor.name]
        assert ours.shape == tuple(reversed(tensor.shape.tolist()))
        assert (ours.kind, ours.start, ours.nbytes) == (tensor.tensor_type.name, tensor.data_offset, tensor.n_bytes)


METADATA: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "head-size-unsaid": ({"llama__attention__key_length": ..., "llama__attention__value_length": ...}, {}),
    "kv-heads-by-layer": ({"llama__attention__head_count_kv": [1, 1]}, {}),
    "theta-unsaid": ({"llama__rope__freq_base": ...}, {}),
    "linear": (
        {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 4.0},
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
    ),
    "linear-old-key": ({"llama__rope__scale_linear": 2.0}, {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    "no-scaling": ({"llama__rope__scaling__type": "none"}, {}),
    "ends": (
        {"tokenizer__ggml__eos_token_id": 2, "tokenizer__ggml__eot_token_id": 7, "tokenizer__ggml__bos_token_id": 1},
        {"eos_token_id": [2, 7], "bos_token_id": 1},
    ),
    "one-end": (
        {"tokenizer__ggml__eos_token_id": 2, "tokenizer__ggml__eom_token_id": 2},
        {"eos_token_id": 2},
    ),
}


@pytest.mark.parametrize(("changes", "hf_changes"), METADATA.values(), ids=METADATA)
def test_config(
    changes: dict[str, Any],
    hf_changes: dict[str, Any],
    tiny_config: Callable[..., dict[str, Any]],
    tiny_tensors: Callable[..., Tensors],
    tmp_path: Path,
) -> None:
    """B06, B08, B11: the config that Hugging Face's would give, numbers in decimal as written there."""
    config = tiny_config(head_dim=4, dtype="float32", rms_norm_eps=1e-5)
    path = write_gguf(tmp_path / "model.gguf", config, tiny_tensors(config), **changes)
    assert GGUFCheckpoint(path).config == ModelConfig.from_hf(config | hf_changes)


def llama3_factors(theta: float, head_dim: int, factor: float, low: float, high: float, original: int) -> list[float]:
    """What the conversion to GGUF stores for Llama 3's scaling."""
    factors = []
    for i in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * i / head_dim)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors


LLAMA3 = {
    "llama-3.2-1b": (500000.0, 64, 32.0, 1.0, 4.0, 8192),
    "llama-3.1-8b": (500000.0, 128, 8.0, 1.0, 4.0, 8192),
    "one-blended": (500000.0, 16, 8.0, 1.0, 4.0, 8192),
    "other-bounds": (1000000.0, 128, 16.0, 1.0, 3.5, 4096),
    "odd-context": (10000.0, 80, 8.0, 1.0, 4.0, 1000),
}


@pytest.mark.parametrize("parameters", LLAMA3.values(), ids=LLAMA3)
def test_llama3_scaling_is_found_from_its_factors(
    parameters: tuple[float, int, float, float, float, int],
    tiny_config: Callable[..., dict[str, Any]],
    tiny_tensors: Callable[..., Tensors],
    tmp_path: Path,
) -> None:
    """B07: stored as a tensor of divisors, and never dropped in silence."""
    theta, head_dim, factor, low, high, original = parameters
    config = tiny_config(head_dim=head_dim, rope_theta=theta)
    factors = {"rope_freqs.weight": np.array(llama3_factors(*parameters), np.float32)}
    path = write_gguf(tmp_path / "model.gguf", config, tiny_tensors(config), extra_tensors=factors)
    checkpoint = GGUFCheckpoint(path)
    assert checkpoint.config.rotary == RotaryConfig("llama3", theta, head_dim, factor, low, high, original)
    assert "rope_freqs.weight" not in checkpoint.tensor_info()
    load_model(checkpoint)


def test_bounds_in_another_unit_mean_the_same_scaling(
    tiny_config: Callable[..., dict[str, Any]], tiny_tensors: Callable[..., Tensors], tmp_path: Path
) -> None:
    config = tiny_config(head_dim=64, rope_theta=500000.0)
    factors = {"rope_freqs.weight": np.array(llama3_factors(500000.0, 64, 8.0, 2.0, 8.0, 8192), np.float32)}
    path = write_gguf(tmp_path / "model.gguf", config, tiny_tensors(config), extra_tensors=factors)
    assert GGUFCheckpoint(path).config.rotary == RotaryConfig("llama3", 500000.0, 64, 8.0, 1.0, 4.0, 4096)


def test_factors_of_one_scale_nothing(
    tiny_config: Callable[..., dict[str, Any]], tiny_tensors: Callable[..., Tensors], tmp_path: Path
) -> None:
    config = tiny_config()
    factors = {"rope_freqs.weight": np.ones(3, np.float32)}
    path = write_gguf(tmp_path / "model.gguf", config, tiny_tensors(config), extra_tensors=factors)
    assert GGUFCheckpoint(path).config.rotary == RotaryConfig("default", 10000.0, 6)


ROPE_REFUSED: dict[str, tuple[list[float], dict[str, Any], str]] = {
    "not-llama3": ([1.0, 2.0, 1.5], {}, "is not Llama 3's scaling"),
    "all-alike": ([4.0, 4.0, 4.0], {}, "no frequency lies between"),
    "too-few": ([1.0, 2.0], {}, "2 factors for 3"),
    "infinite": ([1.5, float("inf"), 2.0], {}, "divided by inf"),
    "bounds-meet": ([2.0, 7.9999, 8.0], {"llama__rope__freq_base": 1.0000001}, "is not Llama 3's scaling"),
    "one-frequency": ([1.5, 2.0, 8.0], {"llama__rope__freq_base": 1.0}, "is not Llama 3's scaling"),
    "with-linear": ([1.0, 2.0, 4.0], {"llama__rope__scaling__type": "linear"}, "both rope_freqs.weight and"),
}


@pytest.mark.parametrize(("factors", "changes", "complaint"), ROPE_REFUSED.values(), ids=ROPE_REFUSED)
def test_factors_of_another_scaling_are_refused(
    factors: list[float],
    changes: dict[str, Any],
    complaint: str,
    tiny_config: Callable[..., dict[str, Any]],
    tiny_tensors: Callable[..., Tensors],
    tmp_path: Path,
) -> None:
    config = tiny_config()
    extra = {"rope_freqs.weight": np.array(factors, np.float32)}
    path = write_gguf(tmp_path / "model.gguf", config, tiny_tensors(config), extra_tensors=extra, **changes)
    with pytest.raises(CheckpointError, match=complaint):
        GGUFCheckpoint(path)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"general__architecture": "mamba"}, "'mamba' is not supported; supported: llama"),
    "adapter": ({"general__type": "adapter"}, "holds a 'adapter', not a model"),
    "split": ({"split__count": 3}, "one of 3 parts.*merge"),
    "split-of-text": ({"split__count": "many"}, "one of many parts"),
    "experts": ({"llama__expert_count": 8}, r"llama\.expert_count = 8"),
    "sliding-window": ({"llama__attention__sliding_window": 4096}, r"sliding_window = 4096"),
    "not-causal": ({"llama__attention__causal": False}, "causal = False"),
    "missing": ({"llama__embedding_length": ...}, r"llama\.embedding_length is missing"),
    "no-epsilon": ({"llama__attention__layer_norm_rms_epsilon": ...}, "epsilon is missing"),
    "zero": ({"llama__block_count": 0}, "block_count = 0"),
    "text-for-number": ({"llama__context_length": "long"}, "context_length = 'long'"),
    "layers-differ": ({"llama__feed_forward_length": [20, 24]}, "differs between layers"),
    "partial-rotary": ({"llama__rope__dimension_count": 4}, "rope.dimension_count 4 differs from the head size 6"),
    "value-size": ({"llama__attention__value_length": 8}, "value_length 8 differs"),
    "alignment": ({"general__alignment": 32.0}, "general.alignment 32.0"),
}


@pytest.mark.parametrize(("changes", "complaint"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_supported_is_refused_by_name(
    changes: dict[str, Any],
    complaint: str,
    tiny_config: Callable[..., dict[str, Any]],
    tiny_tensors: Callable[..., Tensors],
    tmp_path: Path,
) -> None:
    config = tiny_config()
    path = write_gguf(tmp_path / "model.gguf", config, tiny_tensors(config), **changes)
    with pytest.raises(CheckpointError, match=f"model.gguf.*{complaint}"):
        open_checkpoint(path)


@pytest.mark.parametrize("kind", ["longrope", "invented"])
def test_other_rope_scalings_are_refused_by_name(
    kind: str, tiny_config: Callable[..., dict[str, Any]], tiny_tensors: Callable[..., Tensors], tmp_path: Path
) -> None:
    """B06"""
    config = tiny_config()
    changes = {"llama__rope__scaling__type": kind, "llama__rope__scaling__factor": 4.0}
    path = write_gguf(tmp_path / "model.gguf", config, tiny_tensors(config), **changes)
    with pytest.raises(CheckpointError, match=f"rope.scaling.type = '{kind}' is not supported; supported: none"):
        open_checkpoint(path)


def test_a_format_that_cannot_be_dequantised_is_refused_by_name(tmp_path: Path) -> None:
    """B12"""
    write_tensor(tmp_path / "model.gguf", "blk.0.attn_q.weight", np.zeros((2, 32), np.int8))
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_q\.weight is stored as I8"):
        open_checkpoint(tmp_path / "model.gguf")


@pytest.mark.parametrize("extra", ["blk.0.attn_sinks.weight", "rope_factors_long.weight"])
def test_a_tensor_without_a_place_is_not_dropped(
    extra: str, tiny_config: Callable[..., dict[str, Any]], tiny_tensors: Callable[..., Tensors], tmp_path: Path
) -> None:
    """B09"""
    config = tiny_config()
    tensors = {extra: np.ones(4, np.float32)}
    path = write_gguf(tmp_path / "model.gguf", config, tiny_tensors(config), extra_tensors=tensors)
    with pytest.raises(CheckpointError, match=f"unexpected: {extra}"):
        load_model(open_checkpoint(path))


def test_a_tensor_under_two_names_is_not_dropped(
    tiny_config: Callable[..., dict[str, Any]], tiny_tensors: Callable[..., Tensors], tmp_path: Path
) -> None:
    """B09: a tensor that is called already what another one will be."""
    config = tiny_config()
    extra = {"model.norm.weight": np.ones(config["hidden_size"], np.float32)}
    path = write_gguf(tmp_path / "model.gguf", config, tiny_tensors(config), extra_tensors=extra)
    with pytest.raises(CheckpointError, match=r"output_norm\.weight and model\.norm\.weight are the same tensor"):
        open_checkpoint(path)


def test_a_list_is_no_end_id(
    tiny_config: Callable[..., dict[str, Any]], tiny_tensors: Callable[..., Tensors], tmp_path: Path
) -> None:
    config = tiny_config()
    ids = {"tokenizer__ggml__eos_token_id": [1, 2]}
    path = write_gguf(tmp_path / "model.gguf", config, tiny_tensors(config), **ids)
    with pytest.raises(UnsupportedModelError, match="eos_token_id"):
        open_checkpoint(path)


@pytest.fixture
def sound(tiny_config: Callable[..., dict[str, Any]], tiny_tensors: Callable[..., Tensors], tmp_path: Path) -> bytes:
    config = tiny_config()
    return write_gguf(
        tmp_path / "sound.gguf", config, tiny_tensors(config), texts__a=["a"], texts__b=["b"]
    ).read_bytes()


def move(data: bytes, name: bytes, offset: int) -> bytes:
    """Say of a tensor that it begins at another offset."""
    position = data.index(name) + len(name)
    position += 4 + 8 * struct.unpack_from("<I", data, position)[0] + 4
    return data[:position] + struct.pack("<Q", offset) + data[position + 8 :]


DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda data: b"", "is not a GGUF file: it has 0 bytes"),
    "seven-bytes": (lambda data: data[:7], "it has 7 bytes"),
    "other-magic": (lambda data: b"GGML" + data[4:], "begins with b'GGML'"),
    "safetensors": (lambda data: struct.pack("<Q", 20) + data, "is not a GGUF file"),
    "version-1": (lambda data: data[:4] + struct.pack("<I", 1) + data[8:], "has GGUF version 1; supported: 2 and 3"),
    "version-4": (lambda data: data[:4] + struct.pack("<I", 4) + data[8:], "has GGUF version 4"),
    "big-endian": (lambda data: data[:4] + struct.pack(">I", 3) + data[8:], "big-endian"),
    "header-alone": (lambda data: data[:24], "header runs past byte 24"),
    "many-pairs": (lambda data: data[:16] + struct.pack("<Q", 2**60) + data[24:], "truncated|damaged|twice|unknown"),
    "many-tensors": (
        lambda data: data[:8] + struct.pack("<Q", 2**60) + data[16:],
        "truncated|damaged|twice|dimensions",
    ),
    "long-key": (lambda data: data[:24] + struct.pack("<Q", 2**62) + data[32:], "header runs past"),
    "last-8-bytes": (lambda data: data[:-8], "is truncated: tensor .* ends at byte"),
    "not-utf-8": (lambda data: data.replace(b"general.arch", b"\xff\xfe\xfd\xfcral.arch"), "not UTF-8"),
    "key-twice": (lambda data: data.replace(b"texts.b", b"texts.a"), "lists the key texts.a twice"),
    "same-bytes": (
        lambda data: move(data, b"blk.0.attn_k.weight", 0),
        r"tensor \S+ begins at byte \d+, inside tensor \S+, which ends at",
    ),
    "overlap": (
        lambda data: move(data, b"blk.0.attn_k.weight", 32),
        r"tensor blk\.0\.attn_k\.weight begins at byte \d+, inside tensor \S+, which ends at",
    ),
    "not-aligned": (
        lambda data: move(data, b"blk.0.attn_k.weight", 1),
        r"tensor blk\.0\.attn_k\.weight begins at 1, not a multiple of 32",
    ),
    "beyond-the-end": (
        lambda data: move(data, b"blk.0.attn_k.weight", 2**60),
        r"is truncated: tensor blk\.0\.attn_k\.weight ends at byte \d+ of",
    ),
    "tensor-twice": (lambda data: data.replace(b"blk.0.attn_k.", b"blk.0.attn_q."), "lists tensor .* twice"),
}


@pytest.mark.parametrize(("damage", "complaint"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_refused_on_opening(
    damage: Callable[[bytes], bytes], complaint: str, sound: bytes, tmp_path: Path
) -> None:
    """B04, for GGUF: before any tensor is used, naming the file."""
    (tmp_path / "model.gguf").write_bytes(damage(sound))
    with pytest.raises(CheckpointError, match=rf"model\.gguf: .*({complaint})"):
        open_checkpoint(tmp_path / "model.gguf")


def test_a_file_cut_anywhere_is_refused(sound: bytes, tmp_path: Path) -> None:
    """B04"""
    path = tmp_path / "model.gguf"
    for size in range(0, len(sound) - 1, 101):
        path.write_bytes(sound[:size])
        with pytest.raises(CheckpointError, match=r"model\.gguf: "):
            open_checkpoint(path)


def test_a_file_changed_anywhere_never_fails_otherwise(sound: bytes, tmp_path: Path) -> None:
    """One byte of the header at a time: it still opens, or it is refused as a checkpoint or as a config."""
    path = tmp_path / "model.gguf"
    for position in range(0, sound.index(b"output_norm"), 7):
        path.write_bytes(sound[:position] + bytes([sound[position] ^ 0xFF]) + sound[position + 1 :])
        try:
            open_checkpoint(path)
        except (CheckpointError, UnsupportedModelError) as error:
            assert str(error)  # noqa: PT017 (either outcome is right)


def test_big_endian_files_are_refused(
    tiny_config: Callable[..., dict[str, Any]], tiny_tensors: Callable[..., Tensors], tmp_path: Path
) -> None:
    config = tiny_config()
    path = write_gguf(tmp_path / "m.gguf", config, tiny_tensors(config), endianess=gguf.GGUFEndian.BIG)
    with pytest.raises(CheckpointError, match="big-endian"):
        open_checkpoint(path)


def test_without_the_package_the_extra_is_named(sound: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(CheckpointError, match=r"pip install 'ostinato\[gguf\]'"):
        open_checkpoint(tmp_path / "sound.gguf")


def test_a_file_without_a_tokenizer_has_none(sound: bytes, tmp_path: Path) -> None:
    assert GGUFCheckpoint(tmp_path / "sound.gguf").load_tokenizer() is None


@pytest.mark.demo
def test_demo_config(demo_path: Path) -> None:
    config = GGUFCheckpoint(demo_path).config
    assert config == ModelConfig(
        architecture="llama",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        norm_eps=1e-5,
        rotary=RotaryConfig("default", 100000.0, 64),
        max_position=8192,
        tie_embeddings=True,
        dtype=torch.float32,
        eos_token_ids=(2,),
        bos_token_id=1,
    )


@pytest.mark.demo
def test_demo_weights_are_those_of_transformers(demo_path: Path) -> None:
    """Q4_1 and Q8_0, bit for bit: the digest is that of the float32 safetensors that transformers makes of the file."""
    weights = dict(GGUFCheckpoint(demo_path).tensors())
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(weights[name].numpy().data)
    assert digest.hexdigest() == "785e20b3e653276b0579b744214a1186d730ba80af04f397f642d6432e5e0154"
