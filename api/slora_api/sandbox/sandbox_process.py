"""The server's side of one sandbox: starts the process, sends one request at a time, and ends it."""

import asyncio
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from typing import Any

from slora_adapters.process.children import BASE_VARIABLES, describe_exit, pass_on, start_tenant_child
from slora_adapters.process.wire import BrokenFrame, read_message
from slora_api.core.request_context import current_request
from slora_api.sandbox.sandbox import SandboxAnswer


class SandboxDied(Exception):
    """The process ended before it answered. exit_code: negative if a signal ended the process."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"the process ended with {describe_exit(exit_code)}")
        self.exit_code = exit_code

    @property
    def hit_cpu_limit(self) -> bool:
        return self.exit_code == -signal.SIGPROF


class SandboxStalled(Exception):
    """The process neither answered nor ended in time."""


class SandboxProcess:
    """One running sandbox; create it with `start`. After any error, the process has ended, and the sandbox cannot be
    used again.
    """

    def __init__(self, process: Process) -> None:
        self._process = process
        self._cpu_s = 0.0

    @staticmethod
    async def start(
        command: Sequence[str], first: bytes, timeout_s: float, limit: int = 1 << 20
    ) -> "SandboxProcess":
        """Starts a process and waits until it answers. Raises SandboxDied, SandboxStalled or OSError.

        command: the module and its arguments. first: the first packed request. limit: how many bytes of an answer may
        be buffered.
        """
        environment = pass_on(os.environ, BASE_VARIABLES)
        # asyncio passes on the answers in the context of the start. The process also answers other tenants, whose
        # answers must not wait in the queue of the tenant that has started it (`FairEventLoop`).
        starting = current_request.set(None)
        try:
            process = await start_tenant_child(
                "-m", *command, environment=environment, stdin=PIPE, stdout=PIPE, limit=limit
            )
        finally:
            current_request.reset(starting)
        sandbox = SandboxProcess(process)
        # The first answer shows that the process has finished its imports.
        await sandbox._exchange(first, timeout_s)
        return sandbox

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    async def ask(self, request: bytes, timeout_s: float) -> tuple[SandboxAnswer, float]:
        """Returns the answer to a packed request and the CPU seconds used for it. For the first request, these include
        the start of the process.

        Ends the process on any error, and when the caller is cancelled. Raises SandboxDied or SandboxStalled.
        """
        answer = await self._exchange(request, timeout_s)
        used_s, self._cpu_s = answer.cpu_s - self._cpu_s, answer.cpu_s
        return answer, used_s

    async def close(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    async def _exchange(self, request: bytes, timeout_s: float) -> SandboxAnswer:
        answered = False
        try:
            async with asyncio.timeout(timeout_s):
                row = await self._round_trip(request)
            answered = True
        except TimeoutError:
            raise SandboxStalled from None
        except (OSError, EOFError):
            raise SandboxDied(await self._process.wait()) from None
        finally:
            # Also end the process after a cancellation. Otherwise, the next request would read the answer to this one.
            if not answered:
                await self.close()
        return SandboxAnswer(*row)

    async def _round_trip(self, request: bytes) -> Sequence[Any]:
        """Returns the fields of the answer. Raises OSError or EOFError if the process has ended."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(request)
        await stdin.drain()
        try:
            row: Sequence[Any] | None = await read_message(stdout)
        except BrokenFrame:
            if not stdout.at_eof():
                raise
            row = None
        if row is None:
            raise EOFError
        return row
