"""The README's tables are what the results in bench/results give."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_tables_are_those_of_the_results() -> None:
    spec = importlib.util.spec_from_file_location("tables", ROOT / "bench" / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    readme = (ROOT / "README.md").read_text()
    assert tables.fill(readme) == readme
