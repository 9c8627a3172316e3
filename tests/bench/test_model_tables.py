"""docs/models.md is what the table of families says."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_is_made_from_the_table() -> None:
    run = subprocess.run(
        [sys.executable, "-P", ROOT / "bench" / "model_tables.py"],
        capture_output=True,
        text=True,
        check=True,
        encoding="utf-8",
    )
    assert run.stdout == (ROOT / "docs" / "models.md").read_text(encoding="utf-8"), (
        "run: .venv/bin/python bench/model_tables.py > docs/models.md"
    )
