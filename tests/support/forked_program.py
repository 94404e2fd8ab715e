"""Python programs that tests kill, or run several of at once. A start takes milliseconds instead of a second or two.

Each program is a process of its own, forked from a process that has imported the modules below and has no threads.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from types import TracebackType

__all__ = ["ForkedProgram"]

# The longest that a test waits for the end of a program.
_WAIT_S = 300
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "slora_adapters.database.database",
        "slora_adapters.loader.loader_process",
        "slora_adapters.registry.registry",
        "slora_adapters.registry.registry",
        "slora_adapters.store.file_store",
        "slora_adapters.store.object_store",
        "slora_adapters.store.redis_store",
        "slora_adapters.store.store_url",
        "slora_adapters.store.tiered_store",
        "slora_api.serve.serve",
        # What a store or a database imports when it is opened.
        "fsspec.implementations.local",
        "sqlalchemy.dialects.postgresql.psycopg",
        "sqlalchemy.dialects.sqlite.pysqlite",
    ]
)


def _execute(
    code: str,
    arguments: tuple[str, ...],
    environment: Mapping[str, str] | None,
    output: Connection,
    errors: Connection,
) -> None:
    os.dup2(output.fileno(), 1)
    os.dup2(errors.fileno(), 2)
    output.close()
    errors.close()
    # The streams of the process that was forked belong to files that it may seek in.
    sys.stdout, sys.stderr = (
        open(number, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115
        for number in (1, 2)
    )
    if environment is not None:
        os.environ.clear()
        os.environ.update(environment)
    sys.argv = ["-c", *arguments]
    exec(compile(code, "<program of a test>", "exec"), {"__name__": "__main__"})


class ForkedProgram:
    """A running program, with the methods of a Popen. As a context manager, it is killed at the end if it still runs.

    code, arguments: as for `python -c`. The program sees the arguments in `sys.argv[1:]`.
    environment: all environment variables of the program; by default those of this process.
    stderr: the descriptor for the program's standard error; by default it is a part of `output`.
    output: the lines that the program writes to standard output.
    """

    def __init__(
        self,
        code: str,
        *arguments: object,
        environment: Mapping[str, str] | None = None,
        stderr: int | None = None,
    ) -> None:
        reader, writer = _context.Pipe(duplex=False)
        with (
            writer,
            Connection(os.dup(writer.fileno() if stderr is None else stderr), readable=False) as errors,
        ):
            words = tuple(map(str, arguments))
            self._process = _context.Process(target=_execute, args=(code, words, environment, writer, errors))
            self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        self.output = os.fdopen(os.dup(reader.fileno()), encoding="utf-8")
        reader.close()

    @property
    def returncode(self) -> int | None:
        """The exit status, or minus the number of the signal that killed the program. None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with suppress(ProcessLookupError):  # it has ended, and its status is not here yet
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout_s: float = _WAIT_S) -> int:
        """Waits for the end, and returns `returncode`. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout_s)
        if (status := self.returncode) is None:
            raise subprocess.TimeoutExpired("a forked program", timeout_s)
        return status

    def finish(self) -> tuple[int, str]:
        """Reads all output, and waits for the end. Returns the exit status and the output."""
        with self:
            output = self.output.read()
            return self.wait(), output

    def __enter__(self) -> "ForkedProgram":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self.wait()
        self.output.close()
        self._process.close()
