"""Options that several commands of `ostinato bench` share."""

from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Option

output = partial(Option, rich_help_panel="Output")

Json = Annotated[bool, output("--json", help="Print one JSON document, by `ostinato bench schema COMMAND`.")]
Plot = Annotated[Path | None, output("--plot", metavar="FILE", help="Draw, as .png or .svg; needs ostinato[bench].")]
Model = Annotated[
    str | None, Option("--model", "-m", help="A checkpoint: folder, .gguf file or hub id. Default: demo.")
]
Shape = Annotated[str | None, Option(help="Instead: random weights of a named shape, such as llama-3.2-1b.")]
Device = Annotated[str | None, Option(help="cpu, cuda or cuda:N. Default: CUDA where there is one, else the CPU.")]
DType = Annotated[str, Option(help="float32, float16, bfloat16, or auto.")]
Context = Annotated[int | None, Option(min=1, help="Tokens of each sequence. Default: 1024 on a GPU, else 32.")]

CAPTURE_SIZES = "1,2,4 or a list file, as `ostinato bench capture-list --out` writes it."
