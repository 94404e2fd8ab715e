"""A contender as the bench sees it: a process of its own that is asked for runs. See `bench.contenders.answering`."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.contenders.answering import Run, Setup

ROOT = Path(__file__).parents[1]
SOURCES = os.pathsep.join(str(ROOT / folder) for folder in (".", "kernels", "adapters", "api"))


class ContenderFailed(Exception):
    """It could not start, or ended while it was asked; says where its log is."""


@dataclass(frozen=True, slots=True)
class Measured:
    tokens: int
    seconds: float
    peak_rss_mib: int

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Launch:
    """How a contender starts. environment: beside this process's own."""

    name: str
    module: str
    python: Path
    environment: Mapping[str, str]


def slora_launch(threads: int) -> Launch:
    # As `slora serve` starts its engine.
    environment = {"PYTHONPATH": SOURCES, "OMP_NUM_THREADS": str(threads), "GOMP_SPINCOUNT": "10000"}
    return Launch("slora", "bench.contenders.slora_engine", Path(sys.executable), environment)


class ContenderProcess:
    """ready_s: from its start until it would have served. Raises ContenderFailed from the constructor and `run`.

    Between its answers it is stopped, with all that it has started: threads of an idle one that look for work would
    take the cores from the others.
    """

    def __init__(self, launch: Launch, setup: Setup, log: Path) -> None:
        self.name = launch.name
        self._log = log
        start = time.perf_counter()
        inherited = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
        with log.open("w", encoding="utf-8") as errors:
            self._process = subprocess.Popen(
                [str(launch.python), "-P", "-m", launch.module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**inherited, **launch.environment},
                text=True,
                # A group of this session: should we die, the system wakes the group and hangs up on it.
                process_group=0,
                encoding="utf-8",
            )
        self.version: str = self._ask(asdict(setup))["version"]
        self.ready_s = time.perf_counter() - start

    def run(self, run: Run) -> Measured:
        return Measured(**self._ask(asdict(run)))

    def stop(self) -> int:
        """Its exit code: it ends when its standard input does."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._signal(signal.SIGCONT)
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        code = self._process.wait(60)
        self._process.stdout.close()
        return code

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._signal(signal.SIGCONT)
        with suppress(BrokenPipeError):
            print(json.dumps(message), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            code = self.stop()
            last = self._log.read_text(errors="replace", encoding="utf-8").strip().splitlines()[-1:] or [
                "it printed nothing"
            ]
            raise ContenderFailed(f"{self.name} ended with {code}: {last[0]:.200}")
        self._signal(signal.SIGSTOP)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)
