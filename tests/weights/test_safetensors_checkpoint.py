"""Hugging Face folders: what is whole opens and streams, what is damaged is refused before any tensor is used."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ostinato.model import UnsupportedModelError
from ostinato.weights import CheckpointError, TensorInfo, open_checkpoint
from ostinato.weights.safetensors_checkpoint import MAP_BYTES, SafetensorsCheckpoint, _runs

Make = Callable[..., Any]
INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
A, B, C = torch.arange(6.0).view(2, 3), torch.ones(3, dtype=torch.bfloat16), torch.full((2,), 7.0, dtype=torch.float16)


@pytest.fixture
def folder(tmp_path: Path, tiny_config: Make, write_folder: Make) -> Make:
    """`folder(tensors, weight_map=None, **config)` writes a folder with tensors of any names."""

    def make(tensors: dict[str, Any], weight_map: dict[str, Any] | None = None, **config: Any) -> Path:
        path: Path = write_folder(tmp_path / "model", tiny_config(**config), tensors, weight_map)
        return path

    return make


def test_single_file(folder: Make) -> None:
    path = folder({"b": B, "a": A, "c": C})
    checkpoint = open_checkpoint(path)
    assert isinstance(checkpoint, SafetensorsCheckpoint)
    assert (checkpoint.path, checkpoint.format, checkpoint.generation_config) == (path, "safetensors", {})
    assert list(checkpoint.tensor_info().items()) == [
        ("a", TensorInfo(torch.float32, (2, 3), 24)),
        ("b", TensorInfo(torch.bfloat16, (3,), 6)),
        ("c", TensorInfo(torch.float16, (2,), 4)),
    ]
    streamed = {name: tensor.clone() for name, tensor in checkpoint.tensors()}
    torch.testing.assert_close(streamed, {"a": A, "b": B, "c": C}, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["model.safetensors", "other.safetensors"])
def test_a_link_to_nowhere(folder: Make, name: str) -> None:
    """What an interrupted download may leave in the hub's cache."""
    path = folder({"a": A})
    (path / "model.safetensors").unlink()
    (path / name).symlink_to(path / "nowhere")
    with pytest.raises(
        CheckpointError, match=rf"{name}: cannot be read: it is a link to .*nowhere, which is not there"
    ):
        open_checkpoint(path)


def test_shards(folder: Make) -> None:
    checkpoint = open_checkpoint(folder({FIRST: {"c": C, "a": A}, SECOND: {"b": B}}))
    assert list(checkpoint.tensor_info()) == ["a", "b", "c"]
    streamed = [(name, tensor.clone()) for name, tensor in checkpoint.tensors()]
    assert sorted(name for name, _ in streamed) == ["a", "b", "c"]
    torch.testing.assert_close(dict(streamed), {"a": A, "b": B, "c": C}, rtol=0, atol=0)


def test_tensors_can_be_read_again_and_left_early(folder: Make) -> None:
    checkpoint = open_checkpoint(folder({"a": A, "b": B}))
    name, kept = next(iter(checkpoint.tensors()))
    assert name == "a"
    assert [name for name, _ in checkpoint.tensors()] == ["a", "b"]
    assert torch.equal(kept, A)  # the map outlives its reader for as long as a tensor is kept


def test_model_file_wins_over_an_index_that_does_not_name_it(folder: Make) -> None:
    path = folder({"a": A}, weight_map={"b": FIRST})
    assert list(open_checkpoint(path).tensor_info()) == ["a"]


def test_index_that_names_the_model_file(folder: Make) -> None:
    path = folder({"model.safetensors": {"a": A}, SECOND: {"b": B}})
    assert list(open_checkpoint(path).tensor_info()) == ["a", "b"]


def test_one_file_of_another_name(folder: Make) -> None:
    path = folder({"a": A})
    (path / "model.safetensors").rename(path / "weights.safetensors")
    assert list(open_checkpoint(path).tensor_info()) == ["a"]


def test_several_files_without_index(folder: Make) -> None:
    path = folder({FIRST: {"a": A}, SECOND: {"b": B}})
    (path / INDEX).unlink()
    with pytest.raises(CheckpointError, match=f"several safetensors files but no {INDEX}: {FIRST}, {SECOND}"):
        open_checkpoint(path)


@pytest.mark.parametrize("other", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_only_pickled_weights(folder: Make, other: str) -> None:
    path = folder({"a": A})
    (path / "model.safetensors").rename(path / other)
    with pytest.raises(CheckpointError, match=rf"no \.safetensors file, only pickled weights.*{other}"):
        open_checkpoint(path)


def test_no_weights(folder: Make) -> None:
    path = folder({"a": A})
    (path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"holds no \.safetensors file$"):
        open_checkpoint(path)


def test_absent_shard(folder: Make) -> None:
    """B02: an interrupted download."""
    path = folder({FIRST: {"a": A}, SECOND: {"b": B}})
    (path / SECOND).unlink()
    with pytest.raises(CheckpointError, match=f"incomplete: {SECOND}"):
        open_checkpoint(path)


def test_absent_tensor(folder: Make) -> None:
    """B02: the shard is there but lacks a tensor that the index assigns to it."""
    path = folder({FIRST: {"a": A}, SECOND: {"b": B}}, weight_map={"a": FIRST, "b": SECOND, "c": SECOND})
    with pytest.raises(CheckpointError, match=f"disagree: c is assigned to {SECOND}, which lacks it$"):
        open_checkpoint(path)


def test_stray_tensor(folder: Make) -> None:
    path = folder({FIRST: {"a": A, "c": C}, SECOND: {"b": B}}, weight_map={"a": FIRST, "b": SECOND})
    with pytest.raises(CheckpointError, match=f"disagree: c in {FIRST} is not in the index$"):
        open_checkpoint(path)


def test_tensor_stored_twice(folder: Make) -> None:
    path = folder({FIRST: {"a": A}, SECOND: {"b": B, "a": A}}, weight_map={"a": FIRST, "b": SECOND})
    with pytest.raises(CheckpointError, match=f"disagree: a is stored in {SECOND} too, though assigned to {FIRST}$"):
        open_checkpoint(path)


def test_all_faults_of_an_index_together(folder: Make) -> None:
    path = folder({FIRST: {"a": A}, SECOND: {"a": A, "c": C}}, weight_map={"a": FIRST, "b": SECOND})
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(path)
    assert str(error.value).count(SECOND) == 3


@pytest.mark.parametrize("weight_map", [None, {}, [], "a"], ids=repr)
def test_index_without_map(folder: Make, weight_map: Any) -> None:
    path = folder({FIRST: {"a": A}, SECOND: {"b": B}})
    (path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=f"{INDEX}: has no weight_map"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    "file", ["../model.safetensors", "/model.safetensors", "sub/model.safetensors", "..", "", "a.bin", 3]
)
def test_index_that_leads_elsewhere(folder: Make, file: Any) -> None:
    path = folder({FIRST: {"a": A}, SECOND: {"b": B}}, weight_map={"a": file})
    with pytest.raises(CheckpointError, match=f"assigns a to {re.escape(repr(file))}"):
        open_checkpoint(path)


def test_truncated_shard_is_found_on_opening(folder: Make) -> None:
    """B04: the last 8 bytes of the last shard."""
    path = folder({FIRST: {"a": A}, SECOND: {"b": torch.ones(64)}})
    whole = (path / SECOND).read_bytes()
    (path / SECOND).write_bytes(whole[:-8])
    with pytest.raises(CheckpointError, match=f"{SECOND}: is truncated"):
        open_checkpoint(path)


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_quantised_config(folder: Make, key: str) -> None:
    """B12: refused by the name of the method, whether it is known or not."""
    path = folder({"a": A}, **{key: {"quant_method": "shrinkray", "bits": 3}})
    with pytest.raises(CheckpointError, match=f"{key} asks for the method 'shrinkray'; quantised .* not supported"):
        open_checkpoint(path)


@pytest.mark.parametrize("value", [{}, {"bits": 4}, "awq", True], ids=repr)
def test_quantised_config_of_odd_shape(folder: Make, value: Any) -> None:
    """B12"""
    with pytest.raises(CheckpointError, match=r"quantization_config asks for the method ('unnamed'|'awq'|True);"):
        open_checkpoint(folder({"a": A}, quantization_config=value))


def test_null_quantisation_is_none(folder: Make) -> None:
    """B12"""
    assert list(open_checkpoint(folder({"a": A}, quantization_config=None)).tensor_info()) == ["a"]


@pytest.mark.parametrize(
    "leaf",
    [
        "qweight",
        "qzeros",
        "scales",
        "g_idx",
        "weight_scale",
        "weight_scale_inv",
        "weight_zero_point",
        "weight_packed",
        "input_scale",
        "k_scale",
        "weight.absmax",
        "weight.quant_map",
        "weight.quant_state.bitsandbytes__nf4",
    ],
)
def test_quantised_tensors(folder: Make, leaf: str) -> None:
    """B12: a config that says nothing, beside tensors that do; also when they are stored as plain float32."""
    name = f"model.layers.0.mlp.down_proj.{leaf}"
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: .* quantised .*: {re.escape(name)}$"):
        open_checkpoint(folder({"a": A, name: B}))


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [
        (torch.float8_e4m3fn, "F8_E4M3"),
        (torch.int8, "I8"),
        (torch.uint8, "U8"),
        (torch.int64, "I64"),
        (torch.bool, "BOOL"),
        (torch.float64, "F64"),
    ],
)
def test_dtype_that_is_no_weight(folder: Make, dtype: torch.dtype, stored: str) -> None:
    """B12"""
    with pytest.raises(CheckpointError, match=rf"only F32, F16, BF16 weights can be loaded: w is {stored}$"):
        open_checkpoint(folder({"a": A, "w": torch.zeros(2).to(dtype)}))


def test_config_that_is_no_json(folder: Make) -> None:
    path = folder({"a": A})
    (path / "config.json").write_text("<html>")
    with pytest.raises(CheckpointError, match=r"config\.json: is not valid JSON"):
        open_checkpoint(path)


def test_config_of_another_architecture(folder: Make) -> None:
    with pytest.raises(UnsupportedModelError, match="BertModel"):
        open_checkpoint(folder({"a": A}, architectures=["BertModel"]))


def test_generation_config(folder: Make) -> None:
    path = folder({"a": A})
    (path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert open_checkpoint(path).generation_config == {"eos_token_id": [1, 2]}
    (path / "generation_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"generation_config\.json: must hold a JSON object"):
        open_checkpoint(path)


def test_no_tokenizer_files(folder: Make) -> None:
    assert open_checkpoint(folder({"a": A})).load_tokenizer() is None


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(0, 2 * MAP_BYTES), max_size=30))
def test_runs(sizes: list[int]) -> None:
    """Mapped runs hold every tensor in order, are as long as the limit lets them, and exceed it only for one tensor."""
    stored = {str(i): TensorInfo(torch.float32, (), size) for i, size in enumerate(sizes)}
    runs = list(_runs(stored))
    assert [name for run in runs for name in run] == list(stored)
    nbytes = [sum(stored[name].nbytes for name in run) for run in runs]
    assert all(size <= MAP_BYTES or len(run) == 1 for size, run in zip(nbytes, runs, strict=True))
    assert all(size + stored[after[0]].nbytes > MAP_BYTES for size, after in zip(nbytes, runs[1:], strict=False))
