"""Documents that name tests: each test exists, and every hazard, promise and report has one or a sentence."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def defined() -> set[str]:
    """The names of all tests."""
    return {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)\(", path.read_text(encoding="utf-8"), re.MULTILINE)
    }


def rows_of(document: str) -> list[list[str]]:
    """The cells of each row of its tables, heads, rules, and what `ostinato report` makes aside."""
    text = (ROOT / "docs" / document).read_text(encoding="utf-8")
    lines = re.sub(r"<!-- (\w+) -->.*?<!-- /\1 -->", "", text, flags=re.DOTALL).splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]
    return [row for row in rows if row[0] not in ("what goes wrong", "promise", "")]


def named_tests(text: str) -> list[str]:
    return re.findall(r"`(test_\w+)`", text)


def test_every_row_names_tests_that_exist(defined: set[str]) -> None:
    rows = rows_of("graphs.md")
    assert len(rows) > 50
    for row in rows:
        named = named_tests(row[-1])
        assert named, f"no test: {row}"
        assert defined.issuperset(named), set(named) - defined


def test_every_report_has_a_test_or_says_why_not(defined: set[str]) -> None:
    """All 49 in order, each with its source."""
    rows = rows_of("graph_reports.md")
    assert [row[0] for row in rows] == [str(number) for number in range(1, 50)]
    for number, source, _, here in rows:
        assert re.match(r"[\w-]+ #\d+", source), f"no source: {number}"
        assert named_tests(here) or here.startswith(("Needs a device.", "Cannot occur: ")), f"no answer: {number}"
    everywhere = set(named_tests((ROOT / "docs" / "graph_reports.md").read_text(encoding="utf-8")))
    assert everywhere <= defined, everywhere - defined
