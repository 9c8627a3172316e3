"""What `ostinato bench` wrote to bench/results on an H200, for the pages that show it.

    python bench/result_files.py COMMIT FILE...

notes the commit that results were measured on, and forgets files that are gone. A result is
`h200-COMMAND[-MORE]-SHAPE[-MORE].json`; several of a command and a shape are several runs.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from records import RESULTS

from ostinato.bench.schema import SCHEMAS, check

SHAPES = ("llama-3.2-1b", "llama-3.1-8b")
COMMITS = RESULTS / "commits.json"
"""The commit that each result was measured on, with the digest of its file: other content is of another commit."""

Document = dict[str, Any]


def files(command: str, shape: str = "") -> list[Path]:
    """Of one shape, or of all."""
    return sorted(RESULTS.glob(f"h200-{command}*{f'-{shape}' if shape else ''}*.json"))


def results(command: str) -> list[Document]:
    """Every run of a command, checked, small models first; with `model`, `commit`, and what `more` its name says."""
    found = []
    for shape in SHAPES:
        for path in files(command, shape):
            document: Document = json.loads(path.read_text())
            check(document, SCHEMAS[command])
            more = path.stem.removeprefix(f"h200-{command}").replace(shape, "").strip("-")
            found.append({**document, "model": shape, "commit": commit_of(path), "more": more})
    return found


def commit_of(path: Path) -> str | None:
    noted = json.loads(COMMITS.read_text()).get(path.name)
    return noted["commit"] if noted and noted["sha256"] == digest(path) else None


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def cells(command: str) -> list[Document]:
    """The cells of every run, each with its `model`."""
    return [{**cell, "model": run["model"]} for run in results(command) for cell in run["cells"]]


def where(runs: list[Document]) -> str:
    """Machines, versions, ceilings and commits of some runs, in one line."""
    devices = dict.fromkeys(f"{run['where']['device']}, torch {run['where']['torch']}" for run in runs)
    ceilings = sorted(run["read_ceiling"] / 1e12 for run in runs if "read_ceiling" in run)
    commits = dict.fromkeys(run["commit"] for run in runs if run["commit"])
    said = [*devices]
    if ceilings:
        low, high = f"{ceilings[0]:.2f}", f"{ceilings[-1]:.2f}"
        said.append(f"read ceiling {low if low == high else f'{low} to {high}'} TB/s")
    if commits:
        said.append(f"commit{'s' if len(commits) > 1 else ''} {', '.join(commits)}")
    return "; ".join(said) + "."


if __name__ == "__main__":
    noted = json.loads(COMMITS.read_text())
    for name in map(Path, sys.argv[2:]):
        noted[name.name] = {"commit": sys.argv[1], "sha256": digest(name)}
    there = {name: noted[name] for name in sorted(noted) if (RESULTS / name).exists()}
    COMMITS.write_text(json.dumps(there, indent=2) + "\n")
