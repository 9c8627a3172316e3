"""The command line as a process of its own: signals, pipes and terminals."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ENDLESS = ["--max-tokens", "25000"]


@pytest.fixture(scope="module")
def long_model(write_chat_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without an end token and with so much context that no output ends while a test looks at it."""
    path = write_chat_model(tmp_path_factory.mktemp("models") / "long", max_position_embeddings=30000)
    settings = json.loads((path / "tokenizer_config.json").read_text())
    del settings["eos_token"]
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


@contextmanager
def start(*args: object, **streams: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run the command line; what still runs at the end of the block, after a failure say, is killed."""
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "ostinato", *map(str, args)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm"},
        # Jobs in the background of a shell ignore Ctrl-C, and so would their children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **{"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams},
    ) as process:
        try:
            yield process
            process.wait()
        finally:
            process.kill()


def test_ctrl_c(long_model: Path) -> None:
    with start("generate", "-m", long_model, *ENDLESS, "Hello") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(10), "text comes before the end"
        process.send_signal(signal.SIGINT)
        assert process.stdout.read().endswith(b"\n")
        assert len(process.stderr.read().splitlines()) == 1, "the line about the loaded model"
    assert process.returncode == 130


def test_closed_pipe(long_model: Path) -> None:
    """As with `| head -c 10`: it ends at once and quietly."""
    with start("generate", "-m", long_model, *ENDLESS, "Hello") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert len(process.stderr.read().splitlines()) == 1, "the line about the loaded model"
    assert process.returncode not in (0, 2)


class Terminal:
    """A terminal with a program in it."""

    def __init__(self) -> None:
        self._master, self.slave = pty.openpty()
        self.seen = ""

    def wait_for(self, pattern: str) -> None:
        """Read until what came since the last call has the pattern."""
        fresh = b""
        while not re.search(pattern, fresh.decode(errors="replace")):
            ready, _, _ = select.select([self._master], [], [], 120)
            assert ready, f"waited for {pattern!r} in vain, after {fresh!r}"
            fresh += os.read(self._master, 4096)
        self.seen += fresh.decode(errors="replace")

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())


def test_chat_in_a_terminal(long_model: Path) -> None:
    """Ctrl-C stops an answer and no more, and at the prompt only says how to leave; Ctrl-D leaves."""
    terminal = Terminal()
    streams = {"stdin": terminal.slave, "stdout": terminal.slave, "stderr": terminal.slave}
    with start("chat", "-m", long_model, *ENDLESS, **streams) as process:
        terminal.wait_for("> ")
        terminal.type("Hello\n")
        terminal.wait_for("(?s)Hello\r\n.{9}")
        process.send_signal(signal.SIGINT)
        terminal.wait_for("(?s)stopped.*> ")
        for _ in range(5):  # most of them come between the prompt and the wait for a key
            process.send_signal(signal.SIGINT)
            terminal.wait_for("(?s)/exit leaves.*> ")
        terminal.type("More\n")
        terminal.wait_for("(?s)More\r\n.{9}")
        process.send_signal(signal.SIGINT)
        terminal.wait_for("(?s)stopped.*> ")
        terminal.type("\x04")
        assert process.wait() == 0
    assert "Traceback" not in terminal.seen
    assert "\x1b[2m" in terminal.seen, "notes are dimmed in a terminal"
