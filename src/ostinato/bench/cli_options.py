"""Options that several commands of `ostinato bench` share."""

from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Option

output = partial(Option, rich_help_panel="Output")


def _drawable(path: Path | None) -> Path | None:
    """Before anything is measured."""
    if path is not None and path.suffix.lower() not in (".png", ".svg"):
        raise ValueError(f"--plot draws .png and .svg, not {str(path)!r}")
    return path


Json = Annotated[bool, output("--json", help="Print one JSON document, by `ostinato bench schema COMMAND`.")]
Out = Annotated[
    Path | None, output("--out", metavar="FILE", help="Write the JSON document there, too, again after every cell.")
]
Seconds = Annotated[
    float | None, Option(min=0, help="Begin no cell after so long; what was left out is named. Default: no limit.")
]
Plot = Annotated[
    Path | None,
    output("--plot", metavar="FILE", callback=_drawable, help="Draw, as .png or .svg; needs ostinato[bench]."),
]
Model = Annotated[
    str | None, Option("--model", "-m", help="A checkpoint: folder, .gguf file or hub id. Default: demo.")
]
Shape = Annotated[str | None, Option(help="Instead: random weights of a named shape, such as llama-3.2-1b.")]
Device = Annotated[str | None, Option(help="cpu, cuda or cuda:N. Default: CUDA where there is one, else the CPU.")]
DType = Annotated[str, Option(help="float32, float16, bfloat16, or auto.")]
Context = Annotated[int | None, Option(min=1, help="Tokens of each sequence. Default: 1024 on a GPU, else 32.")]

Batch = Annotated[int, Option(min=1, help="Sequences that decode side by side.")]
Batches = Annotated[str | None, Option(metavar="N,N", help="Batch sizes. Default: 1,8,32,128 on a GPU, else 1,4.")]
Contexts = Annotated[
    str | None, Option(metavar="N,N", help="Tokens that each sequence has. Default: 1024 on a GPU, else 32.")
]

CAPTURE_SIZES = "1,2,4 or a list file, as `ostinato bench capture-list --out` writes it."


def parse_cells(batch: str | None, context: str | None, *, on_gpu: bool) -> list[tuple[int, int]]:
    """(batch, context) of each cell that the options ask for."""
    return [
        (one, length)
        for length in parse_numbers(context or ("1024" if on_gpu else "32"), "--context")
        for one in parse_numbers(batch or ("1,8,32,128" if on_gpu else "1,4"), "--batch")
    ]


def parse_numbers(text: str, option: str) -> list[int]:
    """Numbers of at least 1 with commas between them."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(f"{option} must be whole numbers of at least 1, such as 1,8, got {text!r}")
    return [int(part) for part in parts]
