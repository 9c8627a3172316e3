"""Options that several commands share; their defaults stand with the commands."""

from enum import StrEnum
from functools import partial
from typing import Annotated, Any

from rich.markup import escape
from typer import Argument, Option


def as_written(command: Any) -> Any:
    """The command, whose help and that of all below it is shown as written: rich takes what is in brackets for markup.

    Args:
        command: of `typer.main.get_command`; typer has no name for its class.
    """
    if command.rich_markup_mode == "rich":
        for one in (command, *command.params):
            one.help = escape(one.help) if one.help else one.help
    for below in getattr(command, "commands", {}).values():
        as_written(below)
    return command


class LoadFormat(StrEnum):
    """Where weights come from."""

    AUTO = "auto"
    DUMMY = "dummy"


class Capture(StrEnum):
    """When graphs are recorded."""

    STARTUP = "startup"
    LAZY = "lazy"


class Graphs(StrEnum):
    """How decode steps run."""

    AUTO = "auto"
    WHOLE = "whole"
    PIECEWISE = "piecewise"
    OFF = "off"


_model = partial(Option, rich_help_panel="Model")
_sampling = partial(Option, rich_help_panel="Sampling")
ending = partial(Option, rich_help_panel="Where the text ends")
output = partial(Option, rich_help_panel="Output")

_MODEL_HELP = "A folder of a Hugging Face checkpoint, a .gguf file, or a hub id. Default: the demo model."

ModelArgument = Annotated[str | None, Argument(metavar="MODEL", help=_MODEL_HELP)]
Model = Annotated[str | None, _model("--model", "-m", help=_MODEL_HELP)]
Revision = Annotated[str | None, _model(help="Branch, tag or commit of a hub id.")]
Weights = Annotated[
    LoadFormat, _model("--load-format", help="dummy: random weights of a named shape, such as -m llama-3.2-1b.")
]
SkipTokenizer = Annotated[
    bool,
    _model("--skip-tokenizer-init", help="Pass over the tokenizer: prompts are token ids, and so is what is printed."),
]
Device = Annotated[str | None, _model(help="cpu, cuda or cuda:N. Default: CUDA where there is one, else the CPU.")]
DType = Annotated[
    str, _model(help="Of weights and KV cache: float32, float16, bfloat16, or auto, what the checkpoint says.")
]
MaxModelLen = Annotated[
    int | None, _model(help="Tokens of prompt and output together. Default: as many as model and memory admit.")
]

GraphMode = Annotated[
    Graphs, _model("--graphs", help="Record decode steps, as CUDA graphs or on a CPU's tape. auto: whole on a GPU.")
]
CaptureTime = Annotated[
    Capture, _model("--capture", help="When to record: all at start-up, or lazy, each batch size once it is in use.")
]
CaptureSizes = Annotated[
    str | None,
    _model(
        "--capture-sizes",
        metavar="SIZES",
        help="Batch sizes to record: 1,2,4 or a list file of `ostinato bench capture-list --out`.",
    ),
]
EnforceEager = Annotated[bool, _model("--enforce-eager", help="No CUDA graphs, as --graphs off; for debugging.")]

GenerationConfig = Annotated[
    str,
    _sampling(
        help="Where options below come from that are not given: auto, the checkpoint's generation_config.json; "
        "builtin (or vllm), not from there; or a folder with such a file."
    ),
]
Temperature = Annotated[
    float | None,
    _sampling("--temperature", "-t", help="0 is greedy: the most probable token, the same text every time."),
]
TopK = Annotated[int | None, _sampling(help="Draw from so many most probable tokens. 0: from all.")]
TopP = Annotated[float | None, _sampling(help="Draw from the fewest tokens that hold this share of the probability.")]
MinP = Annotated[
    float | None,
    _sampling(help="Draw only from tokens this probable, as a share of the most probable one's probability."),
]
RepetitionPenalty = Annotated[
    float | None, _sampling(help="Above 1: against tokens that are in the prompt or the output.")
]
PresencePenalty = Annotated[float, _sampling(help="Above 0: against tokens that are in the output.")]
FrequencyPenalty = Annotated[float, _sampling(help="Above 0: the same, for each time that they are in the output.")]
Seed = Annotated[int | None, _sampling(help="Makes random draws repeatable. Default: others each time.")]

MinTokens = Annotated[int, ending(help="Nothing ends the text before so many tokens.")]
Stop = Annotated[list[str] | None, ending(help="A string that ends the text; may be given several times.")]
StopTokenId = Annotated[list[int] | None, ending(help="A token id that ends the text; may be given several times.")]
IgnoreEos = Annotated[bool, ending("--ignore-eos", help="Go on past the model's own end tokens.")]

System = Annotated[str | None, Option("--system", metavar="TEXT", help="The system message of the conversation.")]
