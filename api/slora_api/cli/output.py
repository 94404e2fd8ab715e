"""Prints the results of subcommands, as tables or as JSON."""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

Record = Mapping[str, Any]
# Column heading -> the function that makes the cell of a record.
Columns = Mapping[str, Callable[[Record], str]]


def print_json(value: object) -> None:
    print(json.dumps(value, indent=2))


def print_records(records: Iterable[Record], columns: Columns, *, as_json: bool) -> None:
    """Prints records as a table with headings, or as one JSON list."""
    found = list(records)
    if as_json:
        print_json(found)
        return
    rows = [list(columns), *([cell(record) for cell in columns.values()] for record in found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
