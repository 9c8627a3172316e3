"""The command line: `ostinato generate | chat | inspect | bench | report`.

What a command needs is imported when it runs, so that `--help` and `--version` answer without torch.
"""

import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from . import __version__
from . import cli_options as options
from .bench.cli import app as bench
from .cli_options import Capture, Graphs, LoadFormat, ending, output

if TYPE_CHECKING:
    from .llm import LLM
    from .runtime import EngineConfig, SamplingParams
    from .terminal import Terminal

GENERATE = {"temperature": 0.0, "max_tokens": 256}
CHAT = {"temperature": 0.6, "top_p": 0.9, "max_tokens": 1024}
"""Sampling parameters of the two commands that neither the user nor the checkpoint gives."""

# Raised for arguments that do not parse; typer has no name for it, and newer ones bring a click of their own.
UsageError: type[Exception] = typer.BadParameter.__bases__[0]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.add_typer(bench, name="bench")


def main(args: Sequence[str] | None = None) -> None:
    """Run a command and exit: 0, 1 after a failure, 2 after a user's mistake, 130 after Ctrl-C.

    Args:
        args: instead of those of the process.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a model may write what the terminal's encoding does not have
    settings = _Settings()
    try:
        words = sys.argv[1:] if args is None else list(args)
        command = options.as_written(typer.main.get_command(app))
        sys.exit(command(words or ["--help"], standalone_mode=False, obj=settings))
    except (ValueError, TypeError, OSError, UsageError) as error:
        if settings.debug:
            raise
        _complain(error)
        sys.exit(2)
    except (RuntimeError, MemoryError) as error:
        from .bench.errors import BenchError
        from .runtime import GraphsRequiredError, NotEnoughMemoryError, RequestError

        if settings.debug or not isinstance(
            error, BenchError | GraphsRequiredError | NotEnoughMemoryError | RequestError
        ):
            raise
        _complain(error)
        sys.exit(1)


@dataclass
class _Settings:
    """Of the whole command line; `main` makes them and `_global_options` fills them in."""

    debug: bool = False


def _complain(error: BaseException) -> None:
    format_message = getattr(error, "format_message", None)
    message = str(error) if format_message is None else format_message()
    if isinstance(error, OSError) and error.filename is not None:
        message = f"{error.filename}: {error.strerror}"
    line = Text.assemble(("Error: ", "red"), " ".join(message.split()) or type(error).__name__)
    Console(stderr=True).print(line, soft_wrap=True)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"ostinato {__version__}")
        raise typer.Exit


@app.callback()
def _global_options(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show where in the program an error came up.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Generate text with Llama-style models.

    A first try, with the demo model: ostinato generate --chat "Why is the sky blue?"
    """
    if isinstance(context.obj, _Settings):
        context.obj.debug = debug


@app.command()
def generate(
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The text to go on from. Default: what stdin holds.")
    ] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Read the prompt from this file.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="The prompt is a user's message: have it answered.")] = False,
    system: options.System = None,
    model: options.Model = None,
    revision: options.Revision = None,
    load_format: options.Weights = LoadFormat.AUTO,
    skip_tokenizer_init: options.SkipTokenizer = False,
    device: options.Device = None,
    dtype: options.DType = "auto",
    max_model_len: options.MaxModelLen = None,
    graphs: options.GraphMode = Graphs.AUTO,
    capture: options.CaptureTime = Capture.STARTUP,
    enforce_eager: options.EnforceEager = False,
    capture_sizes: options.CaptureSizes = None,
    generation_config: options.GenerationConfig = "auto",
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    presence_penalty: options.PresencePenalty = 0.0,
    frequency_penalty: options.FrequencyPenalty = 0.0,
    seed: options.Seed = None,
    max_tokens: Annotated[
        int | None,
        ending(help=f"Most tokens to generate. Default: {GENERATE['max_tokens']}, or what the context leaves."),
    ] = None,
    min_tokens: options.MinTokens = 0,
    stop: options.Stop = None,
    stop_token_id: options.StopTokenId = None,
    ignore_eos: options.IgnoreEos = False,
    n: Annotated[int, output("-n", help="How many samples.")] = 1,
    json: Annotated[bool, output("--json", help="Print one JSON document when all is done.")] = False,
    logprobs: Annotated[bool, output("--logprobs", help="Log-probability of each token; with --json.")] = False,
    top_logprobs: Annotated[int, output(help="Those of so many most probable tokens too; with --json.")] = 0,
) -> None:
    """Go on from a prompt, or answer it. Greedy, unless the checkpoint or an option says otherwise.

    The text goes to stdout as it comes, everything else to stderr.
    A model without tokenizer (dummy weights, --skip-tokenizer-init) has token ids for a prompt: "1 2 3".
    """
    if system is not None and not chat:
        raise ValueError(f"--system {system!r} needs --chat")
    if (logprobs or top_logprobs) and not json:
        raise ValueError("--logprobs and --top-logprobs need --json")
    text = _read_prompt(prompt, file)

    from .completion import Completion
    from .runtime import SamplingParams
    from .terminal import Terminal

    given = _given(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        max_tokens=max_tokens,
    ) | {
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "seed": seed,
        "min_tokens": min_tokens,
        "stop": stop or (),
        "stop_token_ids": stop_token_id or (),
        "ignore_eos": ignore_eos,
        "logprobs": logprobs or top_logprobs != 0,
        "top_logprobs": top_logprobs,
        "n": n,
    }
    built_in = GENERATE | {"max_tokens": max(GENERATE["max_tokens"], min_tokens)}
    checked = SamplingParams(**built_in | given)  # refuses mistakes before a model is loaded
    terminal = Terminal()
    config = _config(max_model_len, graphs, capture, enforce_eager, capture_sizes, max_num_seqs=min(n, 32))
    loading = (terminal, model, revision, load_format, device, dtype, config, generation_config, checked)
    llm = _load(*loading, skip_tokenizer_init=skip_tokenizer_init)
    params = llm.sampling_defaults.params(given, built_in)
    completion = Completion(llm, text, params, chat=chat, system=system, fit=max_tokens is None)
    if json:
        terminal.write(completion.json(model or "demo") + "\n")
    else:
        completion.stream(terminal)


@app.command()
def chat(
    system: options.System = None,
    model: options.Model = None,
    revision: options.Revision = None,
    device: options.Device = None,
    dtype: options.DType = "auto",
    max_model_len: options.MaxModelLen = None,
    graphs: options.GraphMode = Graphs.AUTO,
    capture: options.CaptureTime = Capture.STARTUP,
    enforce_eager: options.EnforceEager = False,
    generation_config: options.GenerationConfig = "auto",
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    presence_penalty: options.PresencePenalty = 0.0,
    frequency_penalty: options.FrequencyPenalty = 0.0,
    seed: options.Seed = None,
    max_tokens: Annotated[
        int | None,
        ending(help=f"Most tokens of an answer; fewer where the context ends. Default: {CHAT['max_tokens']}."),
    ] = None,
    stop: options.Stop = None,
    stop_token_id: options.StopTokenId = None,
) -> None:
    """Talk with a model. Temperature 0.6 and top-p 0.9, unless the checkpoint or an option says otherwise.

    /help shows the commands. Ctrl-C stops an answer, Ctrl-D ends the conversation.
    Where stdin is not a terminal, each of its lines is a message.
    """
    from .conversation import Conversation
    from .runtime import SamplingParams
    from .terminal import Terminal

    given = _given(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        max_tokens=max_tokens,
    ) | {
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "seed": seed,
        "stop": stop or (),
        "stop_token_ids": stop_token_id or (),
    }
    checked = SamplingParams(**CHAT | given)  # refuses mistakes before a model is loaded
    terminal = Terminal()
    config = _config(max_model_len, graphs, capture, enforce_eager, None, max_num_seqs=1)
    llm = _load(terminal, model, revision, LoadFormat.AUTO, device, dtype, config, generation_config, checked)
    Conversation(llm, llm.sampling_defaults.params(given, CHAT), terminal, system=system).run()


@app.command()
def inspect(
    model: options.ModelArgument = None,
    revision: options.Revision = None,
    load_format: options.Weights = LoadFormat.AUTO,
    json: Annotated[bool, output("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show what a model is, without loading its weights.

    Of a model on the hub, only config and tokenizer are fetched.
    """
    from .inspect_model import facts_text, model_facts, shape_facts

    facts = shape_facts(model) if load_format is LoadFormat.DUMMY else model_facts(model, revision)
    print(dumps(facts, indent=2) if json else facts_text(facts), end="\n" if json else "")


@app.command()
def report(
    page: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PAGE]...", help="Such as README.md or docs/results.md. Default: all."),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit with 1 if a page would change.")] = False,
) -> None:
    """Make the project's own pages and plots anew, from bench/results and the code. For a checkout.

    Names the pages that changed.
    """
    from . import report as pages

    for name in page or ():
        if name not in pages.PAGES:
            raise ValueError(f"{name!r} is not made here; made are {', '.join(pages.PAGES)}")
    changed = pages.rebuild(page or pages.PAGES, write=not check)
    if not (check or page):
        pages.draw()
    for name in changed:
        print(name)
    if check and changed:
        raise typer.Exit(1)


def _given(**options: object) -> dict[str, Any]:
    """The options that the user gave."""
    return {name: value for name, value in options.items() if value is not None}


def _read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt from where it is given; the newline that ends a file or a pipe is not part of it.

    Raises:
        ValueError: given twice, not at all, or not UTF-8.
    """
    if prompt is not None:
        if file is not None:
            raise ValueError(f"the prompt is given twice: as an argument and by --file {file}")
        return prompt
    if file is not None:
        name, data = str(file), file.read_bytes()
    elif sys.stdin is None or sys.stdin.isatty():
        raise ValueError("no prompt: give it as an argument, by --file, or through a pipe")
    else:
        name, data = "stdin", sys.stdin.buffer.read()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: is not UTF-8 text: byte {data[error.start]:#04x} at {error.start}") from error
    if not text:
        raise ValueError(f"no prompt: {name} is empty")
    return text.removesuffix("\n").removesuffix("\r")


def _config(
    max_model_len: int | None,
    graphs: Graphs,
    capture: Capture,
    enforce_eager: bool,
    sizes: str | None,
    *,
    max_num_seqs: int,
) -> "EngineConfig":
    """One request at a time needs no KV cache for more sequences, and no graphs for more."""
    from .runtime import EngineConfig
    from .runtime.graph_buckets import parse_sizes

    if enforce_eager and graphs not in (Graphs.AUTO, Graphs.OFF):
        raise ValueError(f"--enforce-eager contradicts --graphs {graphs.value}")
    mode = Graphs.OFF if enforce_eager else graphs
    return EngineConfig(
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        graphs=mode.value,
        capture=capture.value,
        capture_sizes=None if sizes is None else tuple(parse_sizes(sizes)),
    )


def _load(
    terminal: "Terminal",
    model: str | None,
    revision: str | None,
    load_format: LoadFormat,
    device: str | None,
    dtype: str,
    config: "EngineConfig",
    generation_config: str,
    params: "SamplingParams",
    *,
    skip_tokenizer_init: bool = False,
) -> "LLM":
    """Load a model with a bar and a line about it, unless it has not the token ids of `params`."""
    from .llm import LLM, named_shape
    from .terminal import eager_warning, graphs_line, load_line
    from .weights import open_checkpoint, resolve

    if params.stop_token_ids and load_format is LoadFormat.DUMMY:
        params.check_vocab(named_shape(model).vocab_size)
    elif params.stop_token_ids:
        params.check_vocab(open_checkpoint(resolve(model, revision=revision)).config.vocab_size)
    with terminal.load_bar() as progress, terminal.capture_bar() as capture_progress:
        llm = LLM(
            model,
            revision=revision,
            device=device,
            dtype=dtype,
            load_format="dummy" if load_format is LoadFormat.DUMMY else "auto",
            config=config,
            generation_config=generation_config,
            skip_tokenizer_init=skip_tokenizer_init,
            progress=progress,
            capture_progress=capture_progress,
        )
    terminal.note(load_line(llm, model or "demo") + graphs_line(llm) + eager_warning(llm))
    if llm.sampling_defaults.values:
        terminal.note(f"sampling defaults of the generation config: {llm.sampling_defaults.text()}")
    return llm
