"""Windows of time that a process of its own observes: `begin` on its stdin starts one, `end` prints it as JSON."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

from bench.attacks.target import ROOT
from tests.api.served import environment

__all__ = ["Window", "windows_of"]

T = TypeVar("T")


class Window(Generic[T]):
    """`with` it, then read the one element that it gave."""

    def __init__(self, process: subprocess.Popen[str], kind: Callable[..., T]) -> None:
        self._process = process
        self._kind = kind
        self._found: list[T] = []

    def __enter__(self) -> list[T]:
        self._say("begin")
        return self._found

    def __exit__(self, *_: object) -> None:
        self._say("end")
        assert self._process.stdout is not None
        self._found.append(self._kind(**json.loads(self._process.stdout.readline())))

    def _say(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()


@contextmanager
def windows_of(
    module: str, kind: Callable[..., T], arguments: Sequence[str]
) -> Iterator[Callable[[], Window[T]]]:
    """Runs `module`, and gives what makes windows of it. kind: made from the keys of what the module prints."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment(),
        encoding="utf-8",
    )
    try:
        yield lambda: Window(process, kind)
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
