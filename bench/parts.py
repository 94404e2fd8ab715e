"""A bench of several parts: which of them to run, their tables on the terminal, and all rows as JSON if asked for."""

import argparse
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from bench.table import Row, print_table, write_json

Tables = dict[str, list[Row]]


def run_parts(about: str, parts: Mapping[str, Callable[..., Tables]]) -> None:
    """Reads the command line. about: the bench's docstring. parts: by name, what makes a part's tables by their titles,
    given `quick`."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--parts", nargs="+", default=list(parts), choices=list(parts))
    parser.add_argument("--quick", action="store_true", help="a quick run, to check that it works")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    tables: Tables = {}
    stolen: dict[str, float] = {}
    for part in options.parts:
        begun_at, lost_s = time.monotonic(), _lost_s()
        made = parts[part](quick=options.quick)
        cores_s = (time.monotonic() - begun_at) * (os.cpu_count() or 1)
        stolen[part] = round((_lost_s() - lost_s) / cores_s, 4)
        for title, rows in made.items():
            print_table(title, rows)
        print(f"\nof this machine's cores its host gave {stolen[part]:.1%} to others meanwhile")
        tables |= made
    if options.json:
        write_json(options.json, tables, {"quick": options.quick, "stolen": stolen})


def _lost_s() -> float:
    """Seconds, of all cores together, that a virtual machine was ready to compute and its host did not let it."""
    with open("/proc/stat", encoding="utf-8") as file:
        return int(file.readline().split()[8]) / os.sysconf("SC_CLK_TCK")
