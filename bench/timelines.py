"""What is drawn of one step a mode, out of the traces that `ostinato bench profile --trace FOLDER` keeps.

    python bench/timelines.py FOLDER BATCH CONTEXT OUT.json

`ostinato report` draws OUT.json, if that is bench/results/h200-timeline-SHAPE.json.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from ostinato.bench.timeline import picture, read_steps

MODES = ("piecewise", "whole", "eager")


def main(folder: Path, batch: int, context: int, out: Path) -> None:
    found = {}
    for mode in MODES:
        rows = asdict(picture(read_steps(folder / f"{mode}-{batch}-{context}.json", on_gpu=True)))
        found[mode] = {name: [[round(x, 1) for x in bar] for bar in bars] for name, bars in rows.items()}
    out.write_text(json.dumps({"batch": batch, "context": context, "modes": found}, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
