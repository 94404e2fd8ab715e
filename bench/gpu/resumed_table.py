"""A table that is written row by row, so that a run that ends early, or is killed, goes on where it stopped."""

import json
import os
import platform
import subprocess
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import triton

from bench.table import Row, read_rows
from slora_adapters.process.progress_bar import show_progress

Case = tuple[Row, Callable[[], Row]]


class ResumedTable:
    """One JSON object a line: what was measured, with which versions, on which device. Lines of other commits, versions
    or devices count as not measured, and so do lines with an error.

    key: of all rows that this table adds.
    """

    def __init__(self, path: Path, device: torch.device, key: Row | None = None) -> None:
        self._path = path
        self._key = key or {}
        self._where = {
            "commit": _read_commit(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "torch": torch.__version__,
            "triton": triton.__version__,
            "python": platform.python_version(),
        }
        self._rows = read_rows(path)

    def rows(self) -> list[Row]:
        """The rows that were measured here and with this code, without what they have in common."""
        same = [row for row in self._rows if self._where.items() <= row.items()]
        return [{name: value for name, value in row.items() if name not in self._where} for row in same]

    def add(self, row: Row) -> None:
        whole = {**self._where, **self._key, **row}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(whole) + "\n")
        self._rows.append(whole)

    def fill(self, cases: Iterable[Case], seconds: float, *, errors: bool = False) -> bool:
        """Measures each case whose key (a row's first part) is not there yet, and begins none after `seconds`. Returns
        whether all cases are there.

        errors: a case that raises becomes a row with the error, and the next case follows.
        """
        end = time.monotonic() + seconds
        done = [row.items() for row in self.rows() if "error" not in row]
        # The cases are made one at a time, so their number is not known before.
        with show_progress("Cases", None, "case") as advance:
            for key, measure in cases:
                whole_key = {**self._key, **key}
                if any(whole_key.items() <= row for row in done):
                    continue
                if time.monotonic() >= end:
                    return False
                self.add(key | (self._try(measure) if errors else measure()))
                advance(1)
        return True

    def _try(self, measure: Callable[[], Row]) -> Row:
        try:
            return measure()
        except Exception as error:
            traceback.print_exc()
            return {"error": f"{type(error).__name__}: {error}"[:300]}


def _read_commit() -> str:
    """The checkout's commit, from SLORA_COMMIT where the machine has a copy of the files without git."""
    if commit := os.environ.get("SLORA_COMMIT"):
        return commit
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, encoding="utf-8"
    ).stdout.strip()
