"""A table that is written row by row, so that a run that ends early, or is ended, goes on where it stopped."""

import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import triton

from bench.table import Row
from slora_kernels.progress_bar import show_progress


class ResumedTable:
    """One JSON object a line: what was measured, with which versions, on which device. Lines of other commits, versions
    or devices count as not measured."""

    def __init__(self, path: Path, device: torch.device) -> None:
        self._path = path
        self._where = {
            "commit": _read_commit(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "torch": torch.__version__,
            "triton": triton.__version__,
            "python": platform.python_version(),
        }
        lines = path.read_text().splitlines() if path.exists() else []
        self._rows: list[Row] = [json.loads(line) for line in lines]

    def rows(self) -> list[Row]:
        """Those measured here and with this code, without what they have in common."""
        same = [row for row in self._rows if self._where.items() <= row.items()]
        return [{name: value for name, value in row.items() if name not in self._where} for row in same]

    def fill(self, cases: Iterable[tuple[Row, Callable[[], Row]]], seconds: float) -> bool:
        """Measures each case whose key (a row's first part) is not there yet, and begins none after `seconds`. Returns
        whether all cases are there."""
        end = time.monotonic() + seconds
        done = [row.items() for row in self.rows()]
        # The cases are made one at a time, so their number is not known before.
        with show_progress("Cases", None, "case") as advance:
            for key, measure in cases:
                if any(key.items() <= row for row in done):
                    continue
                if time.monotonic() >= end:
                    return False
                row = {**self._where, **key, **measure()}
                with self._path.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                self._rows.append(row)
                advance(1)
        return True


def _read_commit() -> str:
    """The checkout's commit, from SLORA_COMMIT where the machine has a copy of the files without git."""
    if commit := os.environ.get("SLORA_COMMIT"):
        return commit
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
