"""Python programs that tests kill, or run several of at once. A start takes milliseconds instead of a second.

Each program is a process of its own, forked from a process that has imported the modules below and has no threads.
"""

import multiprocessing
import os
import sys
from multiprocessing.connection import Connection
from types import TracebackType

__all__ = ["ForkedProgram"]

# The longest that a test waits for the end of a program.
_WAIT_S = 120
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "slora_adapters.database.database",
        "slora_adapters.registry.catalog",
        "slora_adapters.registry.registry_storage",
        "slora_adapters.store.file_store",
        "slora_adapters.store.object_store",
        "slora_adapters.store.redis_store",
        "slora_adapters.store.store_url",
        "slora_adapters.store.tiered_store",
        "slora_api.tenants.tenant_store",
        "slora_api.tenants.usage_ledger",
        # What a store or a database imports when it is opened.
        "fsspec.implementations.local",
        "sqlalchemy.dialects.postgresql.psycopg",
        "sqlalchemy.dialects.sqlite.pysqlite",
    ]
)


def _execute(code: str, arguments: tuple[str, ...], output: Connection) -> None:
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    output.close()
    sys.argv = ["-c", *arguments]
    exec(compile(code, "<program of a test>", "exec"), {"__name__": "__main__"})


class ForkedProgram:
    """A running program. As a context manager, it is killed at the end if it still runs.

    code, arguments: as for `python -c`. The program sees the arguments in `sys.argv[1:]`.
    output: the lines that it writes to standard output and standard error, together.
    """

    def __init__(self, code: str, *arguments: object) -> None:
        reader, writer = _context.Pipe(duplex=False)
        self._process = _context.Process(target=_execute, args=(code, tuple(map(str, arguments)), writer))
        self._process.start()
        writer.close()
        self.output = os.fdopen(os.dup(reader.fileno()))
        reader.close()

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> int:
        """Waits for the end. Returns the exit status, or minus the number of the signal that killed the program."""
        self._process.join(_WAIT_S)
        status = self._process.exitcode
        assert status is not None, f"the program runs after {_WAIT_S} s"
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
        self._process.kill()
        self.wait()
        self.output.close()
        self._process.close()
