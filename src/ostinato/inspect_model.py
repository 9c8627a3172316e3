"""What can be said of a model without loading its weights."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.filesize import decimal

from .llm import eos_token_ids, named_shape
from .model import ModelConfig, RotaryConfig
from .model.rotary import NUMBERS
from .sampling_defaults import SamplingDefaults
from .weights import Checkpoint, Tokenizer, open_checkpoint, resolve
from .weights.checkpoint import model_config
from .weights.files import list_folder, read_json_object, read_optional
from .weights.folder_tokenizer import folder_tokenizer
from .weights.gguf_file import GGUFFile
from .weights.names import match_names
from .weights.safetensors_checkpoint import INDEX_FILE


def model_facts(model: str | None, revision: str | None) -> dict[str, Any]:
    """Facts of a model on disk or on the hub; of the latter, weights are looked at only if they are here already.

    `sampling_defaults` are those of its generation config, by field of SamplingParams.

    What is not known is None: dtypes and stored tensors without weights, the tokenizer where there is none.

    Raises:
        ValueError, OSError: as `LLM` does.
    """
    path = resolve(model, revision=revision, config_only=True)
    name = model or "demo"
    if path.is_file() or any(name.endswith((".safetensors", INDEX_FILE)) for name in list_folder(path)):
        checkpoint = open_checkpoint(path)
        match_names(checkpoint.config, checkpoint.tensor_info(), path)
        facts = _facts(name, checkpoint.config, checkpoint.generation_config, checkpoint.load_tokenizer(), path)
        stored = _stored(_stored_tensors(checkpoint))
        return facts | _sizes(checkpoint.config, checkpoint.default_dtype, stored, checkpoint.format, path)
    config = model_config(read_json_object(path / "config.json"), path / "config.json")
    generation_config = read_optional(path, "generation_config.json", list_folder(path))
    facts = _facts(name, config, generation_config, folder_tokenizer(path, config.vocab_size), path)
    return facts | _sizes(config, config.dtype, None, None, path)


def shape_facts(model: str | None) -> dict[str, Any]:
    """Facts of a named shape, as `model_facts` gives them.

    Raises:
        ValueError: no shape has this name.
    """
    config = named_shape(model)
    return _facts(model or "demo", config, {}, None, Path()) | _sizes(config, config.dtype, None, None, None)


def facts_text(facts: Mapping[str, Any]) -> str:
    """The facts as lines of label and value, for people."""
    return "".join(f"{label:<13}{value}\n" for label, value in _lines(facts))


def _facts(
    name: str, config: ModelConfig, generation_config: Mapping[str, Any], tokenizer: Tokenizer | None, path: Path
) -> dict[str, Any]:
    defaults = SamplingDefaults.chosen("auto", generation_config, path)
    stop_ids = sorted(eos_token_ids(config, generation_config, tokenizer, path))
    return {
        "model": name,
        "architecture": config.architecture,
        "num_parameters": config.num_parameters,
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "tie_embeddings": config.tie_embeddings,
        "attention_bias": config.attention_bias,
        "output_bias": config.output_bias,
        "mlp_bias": config.mlp_bias,
        "qk_norm": config.qk_norm,
        "post_norms": config.post_norms,
        "sliding_window": config.sliding_window,
        "full_layers": list(config.full_layers),
        "unrotated_layers": list(config.unrotated_layers),
        "embedding_multiplier": config.embedding_multiplier,
        "attention_scale": config.attention_scale,
        "residual_multiplier": config.residual_multiplier,
        "logits_divisor": config.logits_divisor,
        "max_position": config.max_position,
        "rotary": _rotary(config.rotary),
        "tokenizer": None if tokenizer is None else _tokenizer(tokenizer),
        "stop_tokens": [_token(token_id, tokenizer) for token_id in stop_ids],
        "sampling_defaults": dict(defaults.values),
        "generation_keys_not_used": list(defaults.unused),
    }


def _sizes(
    config: ModelConfig,
    dtype: torch.dtype | None,
    stored: dict[str, dict[str, int]] | None,
    file_format: str | None,
    path: Path | None,
) -> dict[str, Any]:
    return {
        "path": None if path is None else str(path),
        "format": file_format,
        "stored": stored,
        "stored_bytes": None if stored is None else sum(entry["bytes"] for entry in stored.values()),
        "dtype": None if dtype is None else _dtype_name(dtype),
        "loaded_bytes": None if dtype is None else config.num_parameters * dtype.itemsize,
        "kv_bytes_per_token": None if dtype is None else config.kv_bytes_per_token(dtype),
    }


def _stored_tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, int]]:
    """Format and bytes in the file of every stored tensor."""
    if checkpoint.format == "gguf":
        for tensor in GGUFFile(checkpoint.path).tensors.values():
            yield tensor.kind, tensor.nbytes
    else:
        for info in checkpoint.tensor_info().values():
            yield _dtype_name(info.dtype), info.nbytes


def _stored(tensors: Iterable[tuple[str, int]]) -> dict[str, dict[str, int]]:
    stored: dict[str, dict[str, int]] = {}
    for kind, nbytes in tensors:
        entry = stored.setdefault(kind, {"tensors": 0, "bytes": 0})
        entry["tensors"] += 1
        entry["bytes"] += nbytes
    return dict(sorted(stored.items(), key=lambda item: -item[1]["bytes"]))


def _rotary(rotary: RotaryConfig) -> dict[str, Any]:
    facts = asdict(rotary)
    return {name: facts[name] for name in ("kind", "theta", "rotary_dim", *NUMBERS[rotary.kind])}


def _tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    bos = tokenizer.bos_token_id
    return {
        "kind": tokenizer.kind,
        "vocab_size": tokenizer.vocab_size,
        "num_special_tokens": len(tokenizer.special_ids),
        "bos_token": None if bos is None else _token(bos, tokenizer),
        "eos_tokens": [_token(token_id, tokenizer) for token_id in tokenizer.eos_token_ids],
        "chat_template": tokenizer.chat_template is not None,
    }


def _token(token_id: int, tokenizer: Tokenizer | None) -> dict[str, Any]:
    return {"id": token_id, "token": None if tokenizer is None else tokenizer.id_to_token(token_id)}


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _lines(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "model", facts["model"]
    if facts["path"] is not None:
        yield "path", facts["path"]
    yield "architecture", ", ".join([facts["architecture"], *_traits(facts)])
    yield "parameters", f"{facts['num_parameters']:,}"
    if facts["stored"] is not None:
        kinds = ", ".join(f"{entry['tensors']} {kind}" for kind, entry in facts["stored"].items())
        yield "stored", f"{decimal(facts['stored_bytes'])}, {facts['format']}: {kinds}"
    elif facts["path"] is not None:
        yield "stored", "weights are not downloaded"
    if facts["dtype"] is not None:
        yield "loaded", f"{decimal(facts['loaded_bytes'])} as {facts['dtype']}"
    yield "layers", f"{facts['num_layers']} of {facts['hidden_size']} wide, MLP {facts['intermediate_size']}"
    yield "heads", f"{facts['num_heads']} query, {facts['num_kv_heads']} key/value, of {facts['head_dim']}"
    yield "vocabulary", str(facts["vocab_size"])
    kind, *numbers = facts["rotary"].items()
    yield "rotary", ", ".join([kind[1], *(f"{name} {value:g}" for name, value in numbers)])
    yield "context", f"{facts['max_position']} tokens"
    if facts["dtype"] is not None:
        per_token, whole = facts["kv_bytes_per_token"], facts["kv_bytes_per_token"] * facts["max_position"]
        yield "KV cache", f"{per_token:,} bytes a token as {facts['dtype']}, {decimal(whole)} for a full context"
    yield "tokenizer", _tokenizer_line(facts["tokenizer"])
    yield "stop tokens", ", ".join(map(_token_text, facts["stop_tokens"])) or "none"
    not_used = facts["generation_keys_not_used"]
    defaults = SamplingDefaults(facts["sampling_defaults"]).text()
    yield "sampling", defaults + (f"; not used: {', '.join(not_used)}" if not_used else "")


def _traits(facts: Mapping[str, Any]) -> Iterator[str]:
    yield "tied embeddings" if facts["tie_embeddings"] else "separate output head"
    if facts["attention_bias"]:
        yield "attention biases" if facts["output_bias"] else "q, k and v biases"
    if facts["mlp_bias"]:
        yield "MLP biases"
    if facts["qk_norm"] is not None:
        yield "norms of query and key heads" if facts["qk_norm"] == "head" else "norms of all queries and all keys"
    if facts["post_norms"]:
        yield "norms behind attention and MLP"
    if facts["sliding_window"] is not None:
        num_windowed = facts["num_layers"] - len(facts["full_layers"])
        where = f" in {num_windowed} of {facts['num_layers']} layers" if facts["full_layers"] else ""
        yield f"sliding window {facts['sliding_window']}{where}"
    if facts["unrotated_layers"]:
        yield f"{len(facts['unrotated_layers'])} of {facts['num_layers']} layers unrotated"
    for name in ("embedding_multiplier", "residual_multiplier", "logits_divisor"):
        if facts[name] != 1.0:
            yield f"{name.replace('_', ' ')} {facts[name]:g}"
    if facts["attention_scale"] is not None:
        yield f"attention scale {facts['attention_scale']:g}"


def _tokenizer_line(tokenizer: Mapping[str, Any] | None) -> str:
    if tokenizer is None:
        return "none"
    bos, eos = tokenizer["bos_token"], tokenizer["eos_tokens"]
    return ", ".join(
        [
            tokenizer["kind"],
            f"{tokenizer['vocab_size']} tokens",
            f"{tokenizer['num_special_tokens']} special",
            "bos " + ("none" if bos is None else _token_text(bos)),
            "eos " + (" and ".join(map(_token_text, eos)) or "none"),
            "with chat template" if tokenizer["chat_template"] else "no chat template",
        ]
    )


def _token_text(token: Mapping[str, Any]) -> str:
    return str(token["id"]) if token["token"] is None else f"{token['id']} {token['token']}"
