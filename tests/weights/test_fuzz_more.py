"""Two thousand spoiled checkpoints: each loads, or is refused by an error of ours; none hangs or allocates beyond it.

The sound checkpoint has some 20 kB. What Python allocates is held against a bound for all, and every tensor that torch
makes against the size of the file.
"""

import json
import re
import signal
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from torch.utils._python_dispatch import TorchDispatchMode

from ostinato.model import UnsupportedModelError
from ostinato.sampling_defaults import FIELDS, NEUTRAL, SamplingDefaults
from ostinato.weights import CheckpointError, load_model, open_checkpoint
from ostinato.weights.folder_tokenizer import folder_tokenizer

Make = Callable[..., Any]
SECONDS = 10
PYTHON_BYTES = 4 * 2**20
CONTEXT = 32


def cases(count: int) -> settings:
    """The same cases on every run."""
    return settings(
        max_examples=count * 6,
        derandomize=False,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


class LargestTensor(TorchDispatchMode):
    """Remembers the largest tensor that any operation gave."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, torch.Tensor):
                self.nbytes = max(self.nbytes, value.nbytes)
        return result


@contextmanager
def bounded(file_bytes: int) -> Iterator[None]:
    """Fails what takes too long or too much."""

    def give_up(*_: object) -> None:
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(SECONDS)
    tracemalloc.start()
    try:
        with LargestTensor() as largest:
            yield
        assert tracemalloc.get_traced_memory()[1] < PYTHON_BYTES
        assert largest.nbytes <= file_bytes
    finally:
        tracemalloc.stop()
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def load(path: Path, weights: Path) -> str:
    """What became of it: "loaded" or the error, which must be one of ours and one line."""
    with bounded(weights.stat().st_size):
        try:
            load_model(open_checkpoint(path), context=CONTEXT)
            return "loaded"
        except (CheckpointError, UnsupportedModelError) as caught:
            error = caught
    assert str(error).isprintable()
    assert str(path) in str(error)
    return type(error).__name__


JUNK: list[Any] = [
    *(None, True, False, 0, 1, 2, 3, 6, 12, 20, 40, 64, -1, -(2**63), 2**31 - 1, 2**31, 2**63, 2**64, 10**30, 10**400),
    *(0.0, -0.0, 0.5, 1.0, 2.5, -1.0, 1e-320, 1e308, float("nan"), float("inf"), float("-inf")),
    *(
        "",
        "auto",
        "default",
        "linear",
        "llama3",
        "yarn",
        "longrope",
        "dynamic",
        "silu",
        "float16",
        "F16",
        "12",
        "\x1b[2J",
    ),
    *([], {}, [None], [1, 1], [2, "a"], [[1], {}], [float("nan")] * 3, [1.0] * 3, ["full_attention"] * 2, ["", ""]),
    *({"a": 1}, {"": {"": None}}, {"rope_type": "yarn"}, {"type": 5}, {"full_attention": {"rope_theta": 1.0}}),
]
VALUES = st.one_of(st.sampled_from(JUNK), st.sampled_from(JUNK), st.integers(), st.floats(), st.text(max_size=3))
KEYS = re.findall(
    r"\w+",
    "architectures model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim max_position_embeddings tie_word_embeddings rms_norm_eps rope_theta rope_scaling "
    "rope_parameters partial_rotary_factor original_max_position_embeddings attention_bias mlp_bias hidden_act "
    "sliding_window use_sliding_window max_window_layers layer_types no_rope_layers no_rope_layer_interval dtype "
    "torch_dtype eos_token_id bos_token_id quantization_config attention_multiplier embedding_multiplier "
    "residual_multiplier logits_scaling qk_norm num_experts final_logit_softcapping auto_map",
)
ROPE_KEYS = re.findall(
    r"\w+",
    "type rope_type factor rope_theta low_freq_factor high_freq_factor original_max_position_embeddings "
    "attention_factor beta_fast beta_slow mscale mscale_all_dim long_factor short_factor partial_rotary_factor",
)
ARCHITECTURES = [
    f"{name}ForCausalLM"
    for name in ("Llama", "Mistral", "Qwen2", "Qwen3", "Phi3", "SmolLM3", "Granite", "Olmo2", "Gemma2", "Mixtral")
]


def dictionaries(keys: list[str], most: int) -> st.SearchStrategy[dict[str, Any]]:
    return st.lists(st.tuples(st.sampled_from(keys), VALUES), max_size=most).map(dict)


ROPE = dictionaries(ROPE_KEYS, 5)
CHANGES = st.one_of(
    dictionaries(KEYS, 4),
    st.tuples(dictionaries(KEYS, 2), st.sampled_from(ARCHITECTURES)).map(lambda p: p[0] | {"architectures": [p[1]]}),
    st.tuples(st.sampled_from(["rope_scaling", "rope_parameters"]), ROPE).map(lambda pair: {pair[0]: pair[1]}),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_config: Make, tiny_tensors: Make, write_folder: Make) -> Path:
    config = tiny_config(num_hidden_layers=1)
    path = Path(write_folder(tmp_path_factory.mktemp("fuzz") / "m", config, tiny_tensors(config)))
    with LargestTensor():
        torch.empty(1)  # the first use of a mode imports much of torch, which is none of the cases' doing
    return path


def test_configs(folder: Path, tiny_config: Make) -> None:
    """1,000 of them."""
    sound, outcomes = tiny_config(num_hidden_layers=1), set()

    @cases(1000)
    @given(CHANGES, st.sampled_from(["", "", *KEYS]))
    def check(changes: dict[str, Any], left_out: str) -> None:
        config = {key: value for key, value in (sound | changes).items() if key != left_out}
        (folder / "config.json").write_text(json.dumps(config))
        outcomes.add(load(folder, folder / "model.safetensors"))

    check()
    (folder / "config.json").write_text(json.dumps(sound))
    assert outcomes >= {"loaded", "CheckpointError", "UnsupportedModelError", "NameMismatchError"}


def test_safetensors_headers(folder: Path, tiny_config: Make, tiny_tensors: Make) -> None:
    """700: a field of an entry, an entry, the length, or any bytes."""
    file = folder / "model.safetensors"
    sound = save(tiny_tensors(tiny_config(num_hidden_layers=1)))
    [length] = struct.unpack_from("<Q", sound)
    described, data = json.loads(sound[8 : 8 + length]), sound[8 + length :]
    names = st.sampled_from(sorted(described))
    outcomes = set()

    def written(entries: dict[str, Any], length: int | None = None, more: bytes = b"") -> bytes:
        text = json.dumps(entries).encode()
        return struct.pack("<Q", len(text) if length is None else length) + text + data + more

    sizes = st.lists(st.sampled_from([*JUNK, 12, 20, 40, 480, 1920]), max_size=4)
    dtypes = st.one_of(VALUES, st.sampled_from(["F32", "F16", "BF16", "I8", "F8_E4M3", "F4"]))
    fields = st.one_of(
        dtypes.map(lambda value: {"dtype": value}),
        *(st.one_of(sizes, VALUES).map(lambda value, key=key: {key: value}) for key in ("shape", "data_offsets")),
        st.tuples(dtypes, sizes).map(lambda pair: {"dtype": pair[0], "shape": pair[1]}),
    )
    spoiled = st.one_of(
        st.tuples(names, fields).map(lambda pair: written(described | {pair[0]: described[pair[0]] | pair[1]})),
        st.tuples(names, VALUES).map(lambda pair: written(described | {pair[0]: pair[1]})),
        st.tuples(names, st.text(max_size=8)).map(
            lambda pair: written({(pair[1] if key == pair[0] else key): entry for key, entry in described.items()})
        ),
        names.map(lambda name: written({key: entry for key, entry in described.items() if key != name})),
        st.sampled_from([0, 1, length - 1, length + 1, len(sound), 2**32, 2**63, 2**64 - 1]).map(
            lambda claimed: written(described, claimed)
        ),
        st.binary(min_size=1, max_size=9).map(lambda more: written(described, more=more)),
        st.integers(0, len(sound)).map(lambda size: sound[:size]),
        st.tuples(st.integers(0, 8 + length), st.binary(min_size=1, max_size=8)).map(
            lambda pair: sound[: pair[0]] + pair[1] + sound[pair[0] + len(pair[1]) :]
        ),
    )

    @cases(700)
    @given(spoiled)
    def check(content: bytes) -> None:
        file.write_bytes(content)
        outcomes.add(load(folder, file))

    check()
    file.write_bytes(sound)
    assert load(folder, file) == "loaded"
    assert outcomes >= {"CheckpointError", "NameMismatchError"}


def test_gguf_headers(folder: Path, tmp_path: Path, tiny_config: Make, tiny_tensors: Make) -> None:
    """300: numbers and bytes of the header."""
    sound, header_end = write_gguf(tmp_path / "sound.gguf")
    file = tmp_path / "m.gguf"
    file.write_bytes(sound)
    assert load(file, file) == "loaded"
    numbers = [struct.pack("<Q", n) for n in (0, 1, 31, 2**20, 2**31, 2**32, 2**60, 2**63, 2**64 - 1)]
    patches = st.one_of(st.sampled_from(numbers), st.binary(min_size=1, max_size=8))
    outcomes = set()

    @cases(300)
    @given(st.lists(st.tuples(st.integers(0, header_end), patches), min_size=1, max_size=3), st.integers(0, 200))
    def check(changes: list[tuple[int, bytes]], cut: int) -> None:
        content = bytearray(sound)
        for position, patch in changes:
            content[position : position + len(patch)] = patch
        file.write_bytes(content[: len(content) - (cut if cut > 100 else 0)])
        outcomes.add(load(file, file))

    check()
    assert "CheckpointError" in outcomes


def test_generation_and_tokenizer_configs(chat_model: Path, tmp_path: Path) -> None:
    """Beyond the two thousand: the files beside."""
    names = [*FIELDS, *NEUTRAL, "do_sample"]
    special = re.findall(r"\w+", "added_tokens_decoder bos_token eos_token additional_special_tokens chat_template")
    for file in chat_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())

    @cases(300)
    @given(dictionaries(names, 3), dictionaries(special, 3))
    def check(generation: dict[str, Any], tokenizer: dict[str, Any]) -> None:
        with bounded(0):
            for attempt in (
                lambda: SamplingDefaults.from_config(generation, tmp_path),
                lambda: (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer)),
                lambda: folder_tokenizer(tmp_path, 104),
            ):
                with suppress(CheckpointError):
                    attempt()

    check()


def write_gguf(path: Path) -> tuple[bytes, int]:
    """A sound file of one layer, and where its header ends."""
    hidden, inner, vocab, dim = 12, 20, 40, 6
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(hidden)
    writer.add_block_count(1)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"t{index}" for index in range(vocab)])
    writer.add_token_scores([0.0] * vocab)
    writer.add_token_types([1] * vocab)
    shapes = {"token_embd": (vocab, hidden), "output_norm": (hidden,), "output": (vocab, hidden)}
    layer = {"attn_norm": (hidden,), "attn_q": (2 * dim, hidden), "attn_k": (dim, hidden), "attn_v": (dim, hidden)}
    layer |= {"attn_output": (hidden, 2 * dim), "ffn_norm": (hidden,), "ffn_gate": (inner, hidden)}
    layer |= {"ffn_up": (inner, hidden), "ffn_down": (hidden, inner)}
    for name, shape in (shapes | {f"blk.0.{name}": shape for name, shape in layer.items()}).items():
        writer.add_tensor(f"{name}.weight", torch.rand(shape).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    content = path.read_bytes()
    return content, content.rindex(b".weight") + 40
