"""`ostinato report`: the project's own pages, made again from what was measured and from the code.

A page is what a script of `bench/` prints; `docs/feature-interactions.md` comes from the engine itself.
"""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PAGES = {
    "README.md": ["bench/tables.py"],
    "docs/graphs.md": ["bench/graph_tables.py"],
    "docs/kernels.md": ["bench/kernel_tables.py"],
    "docs/models.md": ["bench/model_tables.py"],
    "docs/results.md": ["bench/result_tables.py"],
    "docs/feature-interactions.md": ["-P", "-m", "ostinato.bench.interactions"],
}
"""What Python is given to print each."""


def make(page: str) -> str:
    """The text of a page as it should be.

    Raises:
        ValueError: the package does not lie in a checkout of the project.
        RuntimeError: a script failed; the message is what it wrote.
    """
    return _run(PAGES[page])


def draw() -> None:
    """Write the plots that pages show to docs/plots, as far as they are not of the committed results."""
    _run(["bench/result_tables.py", "--plots", "docs/plots"])


def rebuild(pages: Iterable[str], *, write: bool) -> list[str]:
    """Make the pages, and write those that have changed; returns their names."""
    changed = []
    for page in pages:
        text, path = make(page), ROOT / page
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            changed.append(page)
            if write:
                path.write_text(text, encoding="utf-8")
    return changed


def _run(arguments: list[str]) -> str:
    if not (ROOT / "bench" / "results").is_dir():
        raise ValueError(f"{ROOT} is no checkout of the project: it has no bench/results")
    run = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, encoding="utf-8")
    if run.returncode:
        raise RuntimeError(f"{' '.join(arguments)}: {run.stderr}")
    return run.stdout
