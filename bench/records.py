"""Records of measurements on a GPU, for the scripts that make tables of them."""

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
TITLES = {"llama-3.2-1b": "Llama-3.2-1B", "llama-3.1-8b": "Llama-3.1-8B"}


def runs(name: str) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The header and the cells of one file of records."""
    lines = map(json.loads, (RESULTS / f"{name}.jsonl").read_text().splitlines())
    return next(line for line in lines if "read_ceiling" in line), cells(name)


def cells(name: str) -> dict[str, dict[str, Any]]:
    """The cells of one file of records, the last one of each id."""
    lines = map(json.loads, (RESULTS / f"{name}.jsonl").read_text().splitlines())
    return {line["id"]: line for line in lines if "id" in line}


def environment(header: dict[str, Any]) -> str:
    return (
        f"{header['device']}, torch {header['torch']}, Triton {header['triton']}, {header['date'][:10]}; "
        f"read ceiling {header['read_ceiling'] / 1e12:.3f} TB/s."
    )


def rate(cell: dict[str, Any]) -> str:
    return f"{cell['bytes'] / cell['median'] / 1e3:.0f} | {100 * cell['share']:.1f} %"
