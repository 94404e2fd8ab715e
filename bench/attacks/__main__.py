"""Sends each attack that was found to a server of its own: `python -m bench.attacks [--only N ...] [--out FILE]`.

Beside each attack an honest tenant streams, and `/healthz` is asked. Everything stays on the loopback interface, and an
attack ends within a minute. A stall is told by CPU time of the event loop ("loop CPU ms") beside the clock
("worst healthz ms"), because other programs may use the machine too.
"""

import argparse
import os
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import httpx
import psutil

from bench.attacks.attack import measure
from bench.attacks.catalogue import ATTACKS
from bench.attacks.target import ROOT
from bench.table import Row, print_table, write_json

_SHOWN = (
    "no",
    "attack",
    "worst healthz ms",
    "loop CPU ms",
    "loop blocked ms",
    "RSS before MiB",
    "RSS peak MiB",
    "RSS after MiB",
    "p99 ITL alone ms",
    "p99 ITL ms",
    "victim refused",
    "answer",
)


def _commit(checkout: Path) -> str:
    command = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    return subprocess.run(
        command, capture_output=True, text=True, check=True, encoding="utf-8"
    ).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", type=int, nargs="+", help="numbers of attacks (default: all)")
    parser.add_argument("--out", type=Path, help="a JSON file for the rows")
    parser.add_argument(
        "--sources", type=Path, default=ROOT, help="the checkout whose server is attacked (default: this one)"
    )
    parser.add_argument("--note", default="", help="kept with the rows, for example what else ran")
    arguments = parser.parse_args()
    chosen = [one for one in ATTACKS if not arguments.only or one.number in arguments.only]
    sources = arguments.sources.resolve()
    rows: list[Row] = []
    options = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores": os.cpu_count(),
        "load": psutil.getloadavg(),
        "note": arguments.note,
        "server commit": _commit(sources),
    }
    for attack in chosen:
        try:
            row = measure(attack, sources)
        except (AssertionError, LookupError, OSError, RuntimeError, httpx.HTTPError) as error:
            # The others are measured all the same.
            row = {"no": attack.number, "attack": attack.title, "answer": f"not measured: {error!r}"[:300]}
        rows.append(row)
        print_table(f"{attack.number}", [{name: row.get(name) for name in _SHOWN}])
        if arguments.out is not None:
            write_json(arguments.out, {"attacks": rows}, options)


if __name__ == "__main__":
    main()
