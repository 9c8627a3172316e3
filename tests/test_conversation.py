"""`ostinato chat`: history, commands, and a context that fills up."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ostinato import LLM, SamplingParams, StreamDelta

Cli = Callable[..., Any]


def test_history(cli: Cli, chat_model: Path) -> None:
    """Each answer is to the whole conversation; /system and /reset change what comes after them."""
    lines = ["Hi", "More", "", "/system Brief.", "/reset", "Hi", " /not a command", "/system", "/reset", "Hi"]
    options = ["--temperature", 0, "--max-tokens", 3]
    result = cli("chat", "-m", chat_model, *options, stdin="\n".join(lines).encode())
    assert result.code == 0
    llm = LLM(chat_model)
    conversations: list[list[dict[str, str]]] = [[], [{"role": "system", "content": "Brief."}], []]
    answers = ""
    for messages, users in zip(conversations, (["Hi", "More"], ["Hi", "/not a command"], ["Hi"]), strict=True):
        for user in users:
            messages.append({"role": "user", "content": user})
            answer = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=3)).outputs[0].text
            messages.append({"role": "assistant", "content": answer})
            answers += answer + "\n"
    assert result.out == answers
    assert sum("tok/s" in line for line in result.err.splitlines()) == 5


def test_options_reach_the_request(cli: Cli, chat_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def stream(self: LLM, prompt: list[int], params: SamplingParams) -> Any:
        seen.append((prompt, params))
        yield StreamDelta(0, "fine", [5], "stop")

    monkeypatch.setattr(LLM, "stream", stream)
    given = SamplingParams(temperature=0.1, top_k=2, top_p=0.3, min_p=0.4, repetition_penalty=1.5,
                           presence_penalty=0.6, frequency_penalty=0.7, seed=8, max_tokens=9, stop="x",
                           stop_token_ids=[10])  # fmt: skip
    words = [
        "--temperature", 0.1, "--top-k", 2, "--top-p", 0.3, "--min-p", 0.4, "--repetition-penalty", 1.5,
        "--presence-penalty", 0.6, "--frequency-penalty", 0.7, "--seed", 8, "--max-tokens", 9, "--stop", "x",
        "--stop-token-id", 10, "--system", "Be brief.",
    ]  # fmt: skip
    assert cli("chat", "-m", chat_model, *words, stdin=b"Hi\n").out == "fine\n"
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert seen == [(LLM(chat_model).encode_chat(messages), given)]


def test_commands(cli: Cli, chat_model: Path) -> None:
    result = cli("chat", "-m", chat_model, stdin=b"/help\n/nonsense x\n/exit\nnot read\n")
    assert (result.code, result.out) == (0, "")
    for text in ("/system TEXT", "/reset", "/exit", "/nonsense"):
        assert text in result.err


def test_full_context(cli: Cli, chat_model: Path) -> None:
    """An answer that the context cuts off, a message that does not fit, and the way on."""
    result = cli("chat", "-m", chat_model, "--max-model-len", 40, "-t", 0, stdin=b"Hi\nMore\n/reset\nHi\n")
    assert result.code == 0
    assert result.err.count("The context of 40 tokens is full. /reset begins") == 2
    assert result.err.count("the message was not sent. /reset begins") == 1
    first, second = result.out.splitlines()
    assert first == second


def test_template_that_refuses(cli: Cli, write_chat_model: Callable[..., Path], tmp_path: Path) -> None:
    """The conversation goes on without the message."""
    path = write_chat_model(tmp_path / "m", chat_template=False)
    template = "{% for m in messages %}{% if 'bad' in m.content %}{{ raise_exception('bad word') }}{% endif %}"
    (path / "chat_template.jinja").write_text(template + "{{ m.content }}{% endfor %}")
    result = cli("chat", "-m", path, "--max-tokens", 2, stdin=b"a bad one\nHi\n")
    assert result.code == 0
    assert "bad word" in result.err
    assert result.err.count("first token after") == 1


def test_no_template(cli: Cli, write_chat_model: Callable[..., Path], tmp_path: Path) -> None:
    result = cli("chat", "-m", write_chat_model(tmp_path / "m", chat_template=False), stdin=b"Hi\n")
    assert result.code == 2
    assert result.err.splitlines()[-1].startswith("Error: the model has no chat template")
