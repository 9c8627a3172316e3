"""How a command shows what it found: a table, a JSON document, a plot."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich import table as rich_table
from rich.console import Console

from .schema import SCHEMAS, check


@dataclass(frozen=True)
class Column:
    """A column of a table; numbers are formatted by `form`."""

    title: str
    form: str = ""


@dataclass(frozen=True)
class Table:
    """Attributes:
    rows: a cell for each column; None is a cell that is not known.
    """

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Any]]


@dataclass(frozen=True)
class Report(Table):
    """What a command found.

    Attributes:
        notes: lines below the table.
        document: all of it as JSON, by the schema of its command.
        details: more tables, which come last.
    """

    notes: Sequence[str]
    document: dict[str, Any]
    details: Sequence[Table] = ()

    def json(self) -> str:
        check(self.document, SCHEMAS[self.document["command"]])
        return json.dumps(self.document, indent=2, allow_nan=False)

    def print(self) -> None:
        """The tables and the notes, on stdout; a column without any cell is left out."""
        console = Console(highlight=False)
        if not console.is_terminal:
            console.width = 200  # a pipe has no width to keep to
        _print_table(console, self)
        for note in self.notes:
            console.print(note, soft_wrap=True, markup=False)
        for table in self.details:
            console.print()
            _print_table(console, table)

    def write(self, path: Path) -> None:
        """The document, in place of what the file held."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.json() + "\n", encoding="utf-8")

    def show(self, *, as_json: bool, out: Path | None = None) -> None:
        if out is not None:
            self.write(out)
        if as_json:
            print(self.json())
        else:
            self.print()


def _print_table(console: Console, table: Table) -> None:
    shown = [index for index, _ in enumerate(table.columns) if any(row[index] is not None for row in table.rows)]
    drawn = rich_table.Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index in shown:
        column = table.columns[index]
        drawn.add_column(column.title, justify="right" if column.form else "left")
    for row in table.rows:
        drawn.add_row(*(_cell(row[index], table.columns[index].form) for index in shown))
    console.print(table.title, soft_wrap=True, markup=False)
    console.print(drawn)


def _cell(value: Any, form: str) -> str:
    return "" if value is None else format(value, form)


@contextmanager
def figure(path: Path, width: float, height: float, count: int = 1, *, stacked: bool = False) -> Iterator[list[Any]]:
    """The axes of `count` plots in one picture, which is written at the end.

    Args:
        stacked: one above the other with one x axis, not side by side.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("--plot needs matplotlib: pip install 'ostinato[bench]'") from error
    drawing = Figure(figsize=(width, height), layout="constrained")
    rows, columns = (count, 1) if stacked else (1, count)
    yield list(drawing.subplots(rows, columns, sharex=stacked, squeeze=False).flat)
    drawing.savefig(path, dpi=150)
