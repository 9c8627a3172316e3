"""The command line: what goes to stdout and stderr, what is refused, and with which exit code."""

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import ostinato
from ostinato import LLM, SamplingParams
from ostinato.cli import app, main
from ostinato.model import SHAPES, ModelConfig, RotaryConfig

DATA = Path(__file__).parent / "data"

Cli = Callable[..., Any]


@pytest.mark.parametrize("command", [(), ("generate",), ("chat",), ("inspect",)], ids=lambda c: "-".join(c) or "none")
def test_help(cli: Cli, command: tuple[str, ...]) -> None:
    result = cli(*command, "--help")
    assert (result.code, result.err) == (0, "")
    assert "Usage: " in result.out
    if not command:
        assert result == cli()


def _commands(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield words, command
    for name, below in getattr(command, "commands", {}).items():
        yield from _commands(below, (*words, name))


def test_help_shows_what_is_written(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every command and every option; what is in brackets is no markup."""
    monkeypatch.setenv("COLUMNS", "500")
    written = []
    for words, command in _commands(typer.main.get_command(app)):
        shown = " ".join(cli(*words, "--help").out.replace("│", " ").split())
        for one in (command, *command.params):
            text = " ".join((one.help or "").split())
            assert text in shown, f"{' '.join(words)} {one.name}"
            written.append(text)
    assert sum("[" in text for text in written) >= 2, "or nothing is shown by this"


def test_version(cli: Cli) -> None:
    result = cli("--version")
    assert (result.code, result.out, result.err) == (0, f"ostinato {ostinato.__version__}\n", "")


def test_help_and_version_come_without_torch() -> None:
    code = """
        import sys
        from ostinato.cli import main
        for args in (["--version"], ["--help"], ["generate", "--help"], ["nonsense"], ["generate", "--file", "/none"]):
            try:
                main(args)
            except SystemExit:
                pass
        import ostinato
        assert "LLM" in dir(ostinato) and not hasattr(ostinato, "nonsense")
        assert "torch" not in sys.modules
    """
    run = subprocess.run([sys.executable, "-P", "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_package_exports() -> None:
    for name in ostinato.__all__:
        assert getattr(ostinato, name) is not None
        assert name in dir(ostinato)
    with pytest.raises(AttributeError, match="nonsense"):
        _ = ostinato.nonsense  # type: ignore[attr-defined]


GENERATE: dict[str, list[str]] = {
    "defaults": [],
    "chat": ["--chat"],
    "chat-with-system": ["--chat", "--system", "Be brief."],
    "sampled": ["-t", "0.9", "--seed", "7", "--top-k", "30", "--top-p", "0.9", "--min-p", "0.01"],
    "penalties": ["--repetition-penalty", "1.3", "--presence-penalty", "0.5", "--frequency-penalty", "0.2"],
    "stops": ["--stop", "e", "--stop", "[", "--stop-token-id", "40", "--stop-token-id", "41", "--min-tokens", "5"],
    "ignore-eos": ["--ignore-eos", "--max-tokens", "30"],
    "samples": ["-n", "3", "-t", "1", "--seed", "1", "--max-tokens", "12"],
    "samples-that-end-before-the-first": ["-n", "6", "-t", "1", "--seed", "8", "--max-tokens", "60", "--stop", "e"],
    "model-options": ["--dtype", "bfloat16", "--device", "cpu", "--max-model-len", "40", "--load-format", "auto"],
}


@pytest.mark.parametrize("options", GENERATE.values(), ids=GENERATE)
def test_json_says_what_is_streamed(cli: Cli, chat_model: Path, options: list[str]) -> None:
    arguments = ["generate", "-m", chat_model, *options, "Hello"]
    shown, result = cli(*arguments), cli(*arguments, "--json")
    assert shown.code == result.code == 0
    document = result.json()
    texts = [output["text"] for output in document["outputs"]]
    if len(texts) == 1:
        assert shown.out == texts[0] + "\n"
    else:
        headers = [f"--- {index + 1} of {len(texts)} ---\n" for index in range(len(texts))]
        assert shown.out == "\n\n".join(map(str.__add__, headers, texts)) + "\n"
    loaded, speed = shown.err.splitlines()
    assert result.err.splitlines()[0].split(", in ")[0] == loaded.split(", in ")[0]
    for fact in (f"prompt {document['metrics']['prompt_tokens']} tokens",
                 f"output {document['metrics']['generated_tokens']} tokens", "tok/s", "first token after",
                 document["outputs"][0]["finish_reason"], f"{document['dtype']} on {document['device']}"):  # fmt: skip
        assert fact in speed


def test_json_is_what_llm_gives(cli: Cli, chat_model: Path) -> None:
    """All options reach the request."""
    options = {
        "temperature": 0.9, "seed": 7, "top_k": 30, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.3,
        "presence_penalty": 0.5, "frequency_penalty": 0.2, "max_tokens": 20, "min_tokens": 5, "top_logprobs": 3, "n": 2,
    }  # fmt: skip
    words = [
        word for name, value in options.items() for word in ("-" * (1 + (name != "n")) + name.replace("_", "-"), value)
    ]
    document = cli("generate", "-m", chat_model, *words, "--stop", "e", "--stop-token-id", 40,
                               "--ignore-eos", "--json", "Hello").json()  # fmt: skip
    params = SamplingParams(**options, logprobs=True, stop="e", stop_token_ids=[40], ignore_eos=True)  # type: ignore[arg-type]
    llm = LLM(chat_model, device=document["device"])
    [expected] = llm.generate("Hello", params)
    assert (document["model"], document["prompt"]) == (str(chat_model), "Hello")
    assert document["prompt_token_ids"] == expected.prompt_token_ids
    assert set(document["metrics"]) >= {"time_to_first_token", "prefill_seconds", "decode_tokens_per_second"}
    for output, wanted in zip(document["outputs"], expected.outputs, strict=True):
        for name in ("index", "text", "token_ids", "finish_reason", "stop_reason"):
            assert output[name] == getattr(wanted, name)
        assert wanted.logprobs is not None
        assert llm.tokenizer is not None
        for entry, token_id, logprobs in zip(output["logprobs"], wanted.token_ids, wanted.logprobs, strict=True):
            assert (entry["token_id"], entry["token"]) == (token_id, llm.tokenizer.id_to_token(token_id))
            assert entry["logprob"] == pytest.approx(logprobs.logprob)
            assert [top["token_id"] for top in entry["top"]] == [other for other, _ in logprobs.top]


def test_sources_of_a_prompt(cli: Cli, chat_model: Path, tmp_path: Path) -> None:
    """The newline that ends a file is not part of the prompt; one before it is. An argument leaves stdin alone."""

    def prompt(*args: object, stdin: bytes | None = None) -> str:
        result = cli("generate", "-m", chat_model, "--json", "--max-tokens", 1, *args, stdin=stdin)
        return str(result.json()["prompt"])

    file = tmp_path / "prompt.txt"
    for data, text in ((b"a\nb\n", "a\nb"), (b"a\r\n", "a"), (b"a\n\n", "a\n"), ("é🙂".encode(), "é🙂")):
        file.write_bytes(data)
        assert prompt("--file", file) == prompt(stdin=data) == text
    assert prompt("argument", stdin=b"piped") == "argument"


def test_max_tokens_by_default(cli: Cli, write_chat_model: Callable[..., Path], tmp_path: Path) -> None:
    """256, or what the context leaves."""
    long = write_chat_model(tmp_path / "long", max_position_embeddings=400)
    short = write_chat_model(tmp_path / "short", max_position_embeddings=100)
    for model, expected in ((long, 256), (short, 95)):
        document = cli("generate", "-m", model, "--json", "--ignore-eos", "Hello").json()
        assert len(document["outputs"][0]["token_ids"]) == expected


TINY = ModelConfig("llama", 50, 16, 24, 1, 2, 1, 8, 1e-5, RotaryConfig("linear", 1e4, 8, 2.0), 64, dtype=torch.float16,
                   eos_token_ids=(3,), attention_bias=True, sliding_window=9)  # fmt: skip


@pytest.fixture
def tiny_shape(monkeypatch: pytest.MonkeyPatch) -> ModelConfig:
    """A shape of the name `tiny`."""
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    return TINY


@pytest.mark.usefixtures("tiny_shape")
def test_dummy_weights(cli: Cli) -> None:
    """Without a tokenizer, prompt and text are token ids."""
    arguments = ["generate", "--load-format", "dummy", "-m", "tiny", "--max-tokens", 5, "--ignore-eos", "1 2, 3"]
    shown, document = cli(*arguments), cli(*arguments, "--json", "--top-logprobs", 1).json()
    assert document["prompt_token_ids"] == [1, 2, 3]
    assert shown.out.split() == [str(token_id) for token_id in document["outputs"][0]["token_ids"]]
    assert document["outputs"][0]["text"] == ""
    assert document["outputs"][0]["logprobs"][0]["token"] is None
    assert "random" in shown.err


@pytest.mark.usefixtures("tiny_shape")
def test_infinities_are_null_in_json(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    generate = LLM.generate

    def overflown(self: LLM, *args: Any) -> Any:
        [result] = generate(self, *args)
        [output] = result.outputs
        assert output.logprobs is not None
        low = [entry._replace(logprob=float("-inf"), top=[(1, float("nan"))]) for entry in output.logprobs]
        return [replace(result, outputs=[replace(output, logprobs=low)])]

    monkeypatch.setattr(LLM, "generate", overflown)
    result = cli("generate", "--load-format", "dummy", "-m", "tiny", "--json", "--logprobs", "--max-tokens", 1, "1")
    entry = result.json()["outputs"][0]["logprobs"][0]
    assert (entry["logprob"], entry["top"][0]["logprob"]) == (None, None)


MISTAKES: dict[str, tuple[list[str], str]] = {
    "command": (["nonsense"], "nonsense"),
    "option": (["generate", "--tempature", "1", "a"], "--tempature"),
    "not-a-number": (["generate", "--temperature", "warm", "a"], "--temperature"),
    "not-a-choice": (["generate", "--load-format", "pickle", "a"], "pickle"),
    "two-prompts": (["generate", "one", "two"], "two"),
    "no-prompt": (["generate", "-m", "MODEL"], "--file"),
    "argument-and-file": (["generate", "-m", "MODEL", "--file", "p.txt", "a"], "p.txt"),
    "no-such-file": (["generate", "-m", "MODEL", "--file", "absent.txt"], "absent.txt"),
    "empty-prompt": (["generate", "-m", "MODEL", ""], "empty"),
    "system-without-chat": (["generate", "-m", "MODEL", "--system", "Brief.", "a"], "'Brief.' needs --chat"),
    "logprobs-without-json": (["generate", "-m", "MODEL", "--logprobs", "a"], "--json"),
    "no-such-model": (["generate", "-m", "./absent-model", "a"], "absent-model"),
    "revision-of-a-path": (["generate", "-m", "MODEL", "--revision", "v1", "a"], "'v1'"),
    "no-such-shape": (["generate", "-m", "gpt-5", "--load-format", "dummy", "1"], "'gpt-5'"),
    "text-for-a-dummy": (["generate", "-m", "tiny", "--load-format", "dummy", "1 two"], "'two'"),
    "device": (["generate", "-m", "MODEL", "--device", "tpu", "a"], "'tpu'"),
    "device-absent": (["generate", "-m", "MODEL", "--device", "cuda:99", "a"], "'cuda:99'"),
    "dtype": (["generate", "-m", "MODEL", "--dtype", "int8", "a"], "'int8'"),
    "max-model-len": (["generate", "-m", "MODEL", "--max-model-len", "9999", "a"], "9999"),
    "max-model-len-0": (["generate", "-m", "MODEL", "--max-model-len", "0", "a"], "got 0"),
    "temperature": (["generate", "-m", "MODEL", "--temperature", "-1", "a"], "-1.0"),
    "temperature-nan": (["generate", "-m", "MODEL", "--temperature", "nan", "a"], "nan"),
    "top-k": (["generate", "-m", "MODEL", "--top-k", "-2", "a"], "-2"),
    "top-p": (["generate", "-m", "MODEL", "--top-p", "1.5", "a"], "1.5"),
    "min-p": (["generate", "-m", "MODEL", "--min-p", "-0.5", "a"], "-0.5"),
    "repetition-penalty": (["generate", "-m", "MODEL", "--repetition-penalty", "0", "a"], "got 0.0"),
    "presence-penalty": (["generate", "-m", "MODEL", "--presence-penalty", "3", "a"], "3.0"),
    "frequency-penalty": (["generate", "-m", "MODEL", "--frequency-penalty", "3", "a"], "3.0"),
    "seed": (["generate", "-m", "MODEL", "--seed", "-5", "a"], "-5"),
    "max-tokens": (["generate", "-m", "MODEL", "--max-tokens", "0", "a"], "got 0"),
    "beyond-the-context": (["generate", "-m", "MODEL", "--max-tokens", "500", "a"], "500"),
    "prompt-is-the-context": (["generate", "-m", "MODEL", "a" * 160], "160"),
    "min-tokens": (["generate", "-m", "MODEL", "--max-tokens", "5", "--min-tokens", "6", "a"], "6"),
    "stop": (["generate", "-m", "MODEL", "--stop", "", "a"], "''"),
    "stop-token-id": (["generate", "-m", "MODEL", "--stop-token-id", "5000", "a"], "5000"),
    "n": (["generate", "-m", "MODEL", "-n", "0", "a"], "got 0"),
    "top-logprobs": (["generate", "-m", "MODEL", "--json", "--top-logprobs", "21", "a"], "21"),
    "chat-temperature": (["chat", "-m", "MODEL", "--temperature", "-1"], "-1.0"),
    "chat-stop-token-id": (["chat", "-m", "MODEL", "--stop-token-id", "5000"], "5000"),
    "inspect-no-such-model": (["inspect", "./absent-model"], "absent-model"),
    "inspect-no-such-shape": (["inspect", "gpt-5", "--load-format", "dummy"], "'gpt-5'"),
}


@pytest.mark.usefixtures("tiny_shape")
@pytest.mark.parametrize(("words", "named"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes(cli: Cli, chat_model: Path, words: list[str], named: str) -> None:
    """Exit code 2, nothing on stdout, and one line on stderr, beside the one about a model that was loaded before."""
    result = cli(*(chat_model if word == "MODEL" else word for word in words))
    assert (result.code, result.out) == (2, "")
    *before, line = result.err.splitlines()
    assert len(before) <= 1
    assert all("parameters" in other for other in before)
    assert line.startswith("Error: ")
    assert named in line


@pytest.mark.usefixtures("tiny_shape")
@pytest.mark.parametrize(
    "words", [["generate", "-m", "MODEL", "a"], ["chat", "-m", "MODEL"], ["generate", "-m", "tiny"]]
)
def test_a_stop_id_is_refused_before_weights_are_loaded(
    cli: Cli, chat_model: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    for load in ("load_model", "dummy_model"):
        monkeypatch.setattr(f"ostinato.llm.{load}", lambda *args, **options: pytest.fail("weights were loaded"))
    dummy = ["--load-format", "dummy", "1"] if "tiny" in words else []
    result = cli(*(chat_model if word == "MODEL" else word for word in words), "--stop-token-id", 5000, *dummy)
    assert result.code == 2
    assert result.err.startswith("Error: stop_token_ids: token id 5000 is not in the vocabulary")


@pytest.mark.parametrize("where", ["load_model", "Engine"])
def test_memory_that_runs_out_is_one_line(
    cli: Cli, chat_model: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def full(*args: object, **options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nDetails")

    monkeypatch.setattr(f"ostinato.llm.{where}", full)
    result = cli("generate", "-m", chat_model, "a")
    assert (result.code, result.out) == (1, "")
    [line] = result.err.splitlines()
    assert line.startswith("Error: not enough memory for ")
    assert "on cpu" in line


def test_a_request_that_fails_is_one_line(cli: Cli, chat_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> str:
        raise RuntimeError("no text")

    for option in ([], ["--json"]):
        with monkeypatch.context() as patched:
            patched.setattr("ostinato.weights.Tokenizer.decode", fail)
            result = cli("generate", "-m", chat_model, *option, "a")
        assert (result.code, result.out.strip()) == (1, "")
        assert "Error: the tokenizer, for output token " in result.err.splitlines()[-1]
        assert "raised RuntimeError: no text" in result.err.splitlines()[-1]


@pytest.mark.parametrize(("data", "named"), [(b"", "stdin is empty"), (b"a\xffb", "0xff at 1")], ids=["empty", "latin"])
def test_mistakes_in_stdin(cli: Cli, chat_model: Path, data: bytes, named: str) -> None:
    """B55."""
    result = cli("generate", "-m", chat_model, stdin=data)
    assert result.code == 2
    assert named in result.err
    assert len(result.err.splitlines()) == 1


def test_debug_shows_where(chat_model: Path) -> None:
    with pytest.raises(ValueError, match="top_k"):
        main(["--debug", "generate", "-m", str(chat_model), "--top-k", "-2", "a"])


@pytest.mark.parametrize("option", [[], ["--json"]], ids=["stream", "json"])
def test_ctrl_c(cli: Cli, chat_model: Path, monkeypatch: pytest.MonkeyPatch, option: list[str]) -> None:
    run, count = LLM._run, iter(range(100))

    def interrupted(self: LLM, *args: Any) -> Any:
        for _ in run(self, *args):
            if next(count) == 5:
                raise KeyboardInterrupt
            yield

    monkeypatch.setattr(LLM, "_run", interrupted)
    result = cli("generate", "-m", chat_model, *option, "a")
    assert result.code == 130
    assert len(result.err.splitlines()) == 1, "the line about the loaded model"
    assert result.out == "" if option else result.out.endswith("\n")


@pytest.mark.demo
def test_demo(cli: Cli) -> None:
    """Without a model named: the tokens of the reference."""
    case = json.loads((DATA / "smollm2_reference.json").read_text(encoding="utf-8"))["greedy_float32_weights"][0]
    words = ["generate", "--chat", "--dtype", "float32", "--json", case["messages"][0]["content"]]
    document = cli(*words).json()
    [output] = document["outputs"]
    assert document["model"] == "demo"
    assert document["prompt_token_ids"] == case["prompt_ids"]
    assert output["token_ids"] == case["output_ids"]
    assert (output["text"], output["finish_reason"]) == ("The capital of France is Paris.", "stop")
