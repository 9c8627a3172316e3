"""Where the commands write: what was asked for to stdout, everything else to stderr."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, ProgressColumn
from rich.text import Text

from .llm import LLM
from .outputs import RequestMetrics, StreamDelta


class Terminal:
    """Plain text, with a bar and dimmed notes where stderr is a terminal and no control characters where not."""

    def __init__(self) -> None:
        self._notes = Console(stderr=True)
        self._is_terminal = self._notes.is_terminal
        self._live: Progress | None = None

    def write(self, text: str) -> None:
        """Text of the result, seen at once."""
        sys.stdout.write(text)
        sys.stdout.flush()

    def note(self, text: str) -> None:
        """One line about what is going on."""
        self._notes.print(Text(text, style="dim"), soft_wrap=True)

    def load_bar(self) -> AbstractContextManager[Callable[[int, int], None]]:
        """A bar that appears with the first call of the function it gives, called with (bytes done, bytes in all)."""
        return self._bar("loading", DownloadColumn())

    def capture_bar(self) -> AbstractContextManager[Callable[[int, int], None]]:
        """The same for graphs, its function called with (graphs done, graphs in all)."""
        return self._bar("Capturing CUDA graphs (decode):", MofNCompleteColumn())

    @contextmanager
    def _bar(self, title: str, amount: ProgressColumn) -> Iterator[Callable[[int, int], None]]:
        bar = Progress(title, BarColumn(), amount, console=self._notes, transient=True, disable=not self._is_terminal)
        task = bar.add_task(title)

        def show(done: int, total: int) -> None:
            if self._live is not bar:  # one at a time
                if self._live is not None:
                    self._live.stop()
                self._live = bar
                bar.start()
            bar.update(task, completed=done, total=total)

        try:
            yield show
        finally:
            bar.stop()


@dataclass
class StreamClock:
    """Times a stream of deltas from its making on."""

    prompt_tokens: int
    num_samples: int = 1
    generated_tokens: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)
    first: float = 0.0
    last: float = 0.0

    def saw(self, delta: StreamDelta) -> None:
        self.last = time.perf_counter()
        self.first = self.first or self.last
        self.generated_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            self.finish_reasons.append(delta.finish_reason)

    def metrics(self) -> RequestMetrics:
        waited = self.first - self.started if self.first else 0.0
        return RequestMetrics(
            prompt_tokens=self.prompt_tokens,
            generated_tokens=self.generated_tokens,
            num_samples=self.num_samples,
            time_to_first_token=waited,
            prefill_seconds=waited,
            decode_seconds=self.last - self.first,
        )


def speed_line(llm: LLM, metrics: RequestMetrics, finish_reasons: list[str]) -> str:
    """What a request took, in one line."""
    return " · ".join(
        [
            f"prompt {metrics.prompt_tokens} tokens, {metrics.prompt_tokens_per_second:.1f} tok/s",
            f"output {metrics.generated_tokens} tokens, {metrics.decode_tokens_per_second:.1f} tok/s",
            f"first token after {metrics.time_to_first_token:.2f} s",
            ", ".join(dict.fromkeys(finish_reasons)),
            f"{dtype_name(llm)} on {llm.device}",
        ]
    ) + eager_warning(llm)


def eager_warning(llm: LLM) -> str:
    """An end to a line where a GPU decodes without graphs; else nothing."""
    report = llm.graph_report()
    if llm.device.type != "cuda" or (report.capture != "off" and not report.eager_decodes):
        return ""
    return " · WITHOUT CUDA GRAPHS: slow" if report.capture == "off" else f" · {report.eager_decodes} eager steps"


def graphs_line(llm: LLM) -> str:
    """What graphs there are, as the end of a line; nothing where there are none."""
    report = llm.graph_report()
    if report.capture == "off":
        return ""
    if report.capture == "lazy":
        return f" · graphs: {report.path.value}, captured when used"
    sizes = (
        f"{len(report.sizes)} sizes up to {max(report.sizes)}" if len(report.sizes) > 1 else f"size {report.sizes[0]}"
    )
    missing = f", {len(report.missing)} missing" if report.missing else ""
    took = f"in {report.seconds:.1f} s, {decimal(report.num_bytes)}"
    return f" · graphs: {report.path.value}, {sizes}, {took}{missing}"


def load_line(llm: LLM, name: str) -> str:
    """What a load took, in one line."""
    size = f"{llm.model_config.num_parameters / 1e6:.1f} million parameters"
    report = llm.load_report
    if report is None:
        return f"{name}: {size}, random, {dtype_name(llm)} on {llm.device}"
    return f"{name}: {size}, {decimal(report.nbytes)} as {dtype_name(llm)} on {llm.device}, in {report.seconds:.1f} s"


def dtype_name(llm: LLM) -> str:
    return str(llm.dtype).removeprefix("torch.")
