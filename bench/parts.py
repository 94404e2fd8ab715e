"""A bench of several parts: which of them to run, their tables on the terminal, and all rows as JSON if asked for."""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

from bench.table import Row, print_table, write_json

Tables = dict[str, list[Row]]


def run_parts(about: str, parts: Mapping[str, Callable[..., Tables]]) -> None:
    """Reads the command line. about: the bench's docstring. parts: by name, what makes a part's tables by their titles,
    given `quick`."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--parts", nargs="+", default=list(parts), choices=list(parts))
    parser.add_argument("--quick", action="store_true", help="few and short: to see that it runs")
    parser.add_argument("--json", type=Path, help="write the rows here as well")
    options = parser.parse_args()
    tables: Tables = {}
    for part in options.parts:
        made = parts[part](quick=options.quick)
        for title, rows in made.items():
            print_table(title, rows)
        tables |= made
    if options.json:
        write_json(options.json, tables, {"quick": options.quick})
