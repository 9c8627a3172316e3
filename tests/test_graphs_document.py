"""docs/graphs.md names tests: each of them exists, and every hazard and promise has one."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_every_row_names_tests_that_exist() -> None:
    defined = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)\(", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    text = (ROOT / "docs" / "graphs.md").read_text(encoding="utf-8")
    rows = [
        line for line in text.splitlines() if line.startswith("| ") and not line.startswith(("| what", "| promise"))
    ]
    assert len(rows) > 50
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row.split("|")[-2])
        assert named, f"no test: {row}"
        assert defined.issuperset(named), set(named) - defined
