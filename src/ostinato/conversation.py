"""A conversation on the command line."""

import signal
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace

from .llm import LLM
from .runtime import RequestError, SamplingParams
from .terminal import StreamClock, Terminal, speed_line

HELP = """\
/system TEXT  give the model this system message; without TEXT none
/reset        begin a new conversation, with the same system message
/help         this list
/exit         leave, as does Ctrl-D
Ctrl-C stops an answer. A line that begins with a space is a message even if a / follows."""


@contextmanager
def _ticking() -> Iterator[None]:
    """Within the body a signal arrives every tenth of a second and does nothing.

    Python's `input` looks for Ctrl-C only when a signal ends its wait for a key. One that came just before the wait,
    when the prompt stands there already, would be overlooked until the next key is pressed.
    """
    if not hasattr(signal, "setitimer"):  # not a Unix
        yield
        return
    # Stays in place: without it, a tick that comes late would end the process.
    signal.signal(signal.SIGALRM, lambda number, frame: None)
    signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


class Conversation:
    """Messages of a user and answers of a model, in turns.

    Args:
        params: for each answer; `max_tokens` is lowered to what the context leaves.
        system: the system message, None for what the chat template does without one.

    Raises:
        ValueError: the model has no chat template.
    """

    def __init__(self, llm: LLM, params: SamplingParams, terminal: Terminal, *, system: str | None) -> None:
        if llm.tokenizer is None or llm.tokenizer.chat_template is None:
            raise ValueError("the model has no chat template, so it cannot chat; try `ostinato generate`")
        params.check_vocab(llm.model_config.vocab_size)
        self._llm = llm
        self._params = params
        self._terminal = terminal
        self._system = system
        self._turns: list[dict[str, str]] = []
        self._is_interactive = sys.stdin.isatty() and sys.stdout.isatty()

    def run(self) -> None:
        """Read and answer until the input ends."""
        if self._is_interactive:
            with suppress(ImportError):  # a Python may be built without it
                import readline  # noqa: F401 (arrow keys and earlier lines in `input`)
            self._terminal.note("/help shows the commands, Ctrl-D leaves")
        while self._take_turn():
            pass

    def _take_turn(self) -> bool:
        """Read a line and do what it says; False: leave."""
        try:
            line = self._read()
            if line is None:
                return False
            if line.startswith("/"):
                return self._obey(*line.split(maxsplit=1))
            if line.strip():
                self._answer(line.strip())
        except KeyboardInterrupt:
            if not self._is_interactive:
                raise
            self._terminal.write("\n")
            self._terminal.note("Ctrl-D or /exit leaves")
        return True

    def _read(self) -> str | None:
        """The next line, None at the end."""
        if not self._is_interactive:
            line = sys.stdin.readline()
            return line.removesuffix("\n") if line else None
        try:
            with _ticking():
                return input("> ")
        except EOFError:
            self._terminal.write("\n")
            return None

    def _obey(self, command: str, argument: str = "") -> bool:
        """Carry out a command; False: leave."""
        match command:
            case "/exit":
                return False
            case "/help":
                self._terminal.note(HELP)
            case "/reset":
                self._turns.clear()
                self._terminal.note("a new conversation")
            case "/system":
                self._system = argument.strip() or None
                self._terminal.note("no system message" if self._system is None else "system message set")
            case _:
                self._terminal.note(f"no such command: {command}; /help shows those there are")
        return True

    def _answer(self, message: str) -> None:
        """Stream the answer to a message and remember both; neither if there was no answer."""
        turns = [*self._turns, {"role": "user", "content": message}]
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        try:
            prompt_ids = self._llm.encode_chat([*system, *turns])
        except ValueError as error:  # a template may refuse a system message, say
            self._terminal.note(f"Error: {error}")
            return
        room = self._llm.max_model_len - len(prompt_ids)
        if room < 1:
            self._terminal.note(
                f"This would make the conversation {len(prompt_ids)} tokens long, and the context has room for "
                f"{self._llm.max_model_len}: the message was not sent. /reset begins a new conversation."
            )
            return
        answer, was_cut = self._stream(prompt_ids, room)
        if answer:
            self._turns = [*turns, {"role": "assistant", "content": answer}]
        if was_cut:
            self._terminal.note(
                f"The context of {self._llm.max_model_len} tokens is full. /reset begins a new conversation."
            )

    def _stream(self, prompt_ids: list[int], room: int) -> tuple[str, bool]:
        """The answer, or its beginning after Ctrl-C; and whether the end of the context cut it off."""
        assert self._params.max_tokens is not None, "the command line has a default"
        params = replace(self._params, max_tokens=min(self._params.max_tokens, room))
        clock = StreamClock(len(prompt_ids))
        pieces: list[str] = []
        failure: RequestError | None = None
        try:
            with closing(self._llm.stream(prompt_ids, params)) as deltas:
                for delta in deltas:
                    clock.saw(delta)
                    pieces.append(delta.text)
                    self._terminal.write(delta.text)
        except KeyboardInterrupt:
            if not self._is_interactive:
                raise
            clock.finish_reasons.append("stopped")
        except RequestError as error:
            failure = error
        finally:
            self._terminal.write("\n")
        if failure is not None:
            self._terminal.note(f"Error: {failure}")
        self._terminal.note(speed_line(self._llm, clock.metrics(), clock.finish_reasons))
        return "".join(pieces), clock.finish_reasons == ["length"] and params.max_tokens == room
