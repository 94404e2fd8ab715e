"""How a contender is driven: a process in an environment of its own reads lines of JSON and answers each with one.

The first line is the `Setup`, answered when it is ready; each further one asks for a `Run`, answered with what it took.
Needs nothing but Python, because every contender's environment is another.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Setup:
    """adapters: PEFT directories; a contender for the bare base has none. max_batch: requests of the largest run."""

    model: str
    adapters: list[str]
    dtype: str
    threads: int
    max_model_len: int
    max_batch: int
    pool_bytes: int


@dataclass(frozen=True, slots=True)
class Run:
    """Each prompt of token ids is continued greedily by `output_tokens`; its adapter by number, None is the base."""

    prompts: list[list[int]]
    adapters: list[int | None]
    output_tokens: int


class Contender(Protocol):
    version: str

    def generate(self, run: Run) -> int:
        """Returns the number of tokens generated."""


def answer(prepare: Callable[[Setup], Contender]) -> None:
    """Until standard input ends. Whatever libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def tell(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=answers, flush=True)

    contender = prepare(Setup(**json.loads(sys.stdin.readline())))
    tell({"version": contender.version})
    for line in sys.stdin:
        run = Run(**json.loads(line))
        start = time.perf_counter()
        tokens = contender.generate(run)
        tell({"tokens": tokens, "seconds": time.perf_counter() - start, "peak_rss_mib": _peak_rss_mib()})


def _peak_rss_mib() -> int:
    """Of this process and those that it has started, the sum of their peaks."""
    tree = [os.getpid()]
    for parent in tree:  # grows as children are found
        for listed in Path(f"/proc/{parent}/task").glob("*/children"):
            tree += [int(child) for child in listed.read_text(encoding="utf-8").split()]
    return sum(_peak_kib(process_id) for process_id in tree) // 1024


def _peak_kib(process_id: int) -> int:
    lines = Path(f"/proc/{process_id}/status").read_text(encoding="utf-8").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
