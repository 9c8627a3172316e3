"""docs/kernels.md is what the records say."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_is_made_from_the_records() -> None:
    run = subprocess.run(
        [sys.executable, "-P", ROOT / "bench" / "kernel_tables.py"],
        capture_output=True,
        text=True,
        check=True,
        encoding="utf-8",
    )
    assert run.stdout == (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
