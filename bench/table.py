"""A plain table on the terminal, and the same rows as JSON."""

import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def print_table(title: str, rows: Sequence[Row]) -> None:
    print(f"\n{format_table(title, rows)}")


def format_table(title: str, rows: Sequence[Row]) -> str:
    """Columns in the order of the first row's keys; numbers to the right, with as many digits as are worth reading."""
    columns = list(rows[0])
    cells = [columns, *([_show(row.get(column)) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    numeric = [all(isinstance(row.get(column), int | float | None) for row in rows) for column in columns]
    lines = [title]
    for line in cells:
        pairs = zip(line, widths, numeric, strict=True)
        lines.append(
            "  ".join(cell.rjust(w) if right else cell.ljust(w) for cell, w, right in pairs).rstrip()
        )
    return "\n".join(lines)


def read_rows(path: Path) -> list[Row]:
    """The rows of a file of JSON lines. A line that a killed process did not finish is skipped."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        with suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


def markdown(title: str, rows: Sequence[Row]) -> str:
    columns = list(rows[0])
    lines = [columns, ["---"] * len(columns), *([_show(row.get(c)) for c in columns] for row in rows)]
    return f"### {title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write_json(path: Path, tables: Mapping[str, Sequence[Row]], options: dict[str, Any]) -> None:
    """With the commit and what the script was told."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, encoding="utf-8"
    )
    facts = {"commit": commit.stdout.strip(), "python": platform.python_version(), **options}
    path.write_text(
        json.dumps({"environment": facts, "tables": tables}, indent=1, default=_plain) + "\n",
        encoding="utf-8",
    )


def _show(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return (
            f"{value:.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.3f}"
        )
    return str(value)


def _plain(value: object) -> object:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)
