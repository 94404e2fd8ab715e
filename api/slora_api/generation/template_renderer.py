"""The server's side of one rendering process: starts it, sends one request at a time, and ends it."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process

from slora_api.generation.template_process import (
    MAX_RENDERED_BYTES,
    RenderedText,
    RendererSettings,
    pack_request,
    read_length,
)

__all__ = ["RendererDied", "RendererStalled", "TemplateRenderer"]

# Tenants' templates run in the process, so it receives no secrets, only what Python needs to start.
_PASSED_ON = ("PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH")


class RendererDied(Exception):
    """The process ended before it answered. exit_code: negative if a signal ended the process."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"the rendering process ended with exit code {exit_code}")
        self.exit_code = exit_code

    @property
    def hit_cpu_limit(self) -> bool:
        return self.exit_code == -signal.SIGPROF


class RendererStalled(Exception):
    """The process neither answered nor ended in time."""


class TemplateRenderer:
    """Create it with `start`. After any error the process has ended, and the renderer cannot be used again."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._cpu_s = 0.0

    @staticmethod
    async def start(settings: RendererSettings, timeout_s: float) -> "TemplateRenderer":
        """Starts a process and waits until it answers. Raises RendererDied, RendererStalled or OSError."""
        environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "slora_api.generation.template_process", settings.to_json()),
            stdin=PIPE,
            stdout=PIPE,
            limit=MAX_RENDERED_BYTES,
            env=environment,
        )
        renderer = TemplateRenderer(process)
        # The first answer shows that the process has finished its imports.
        await renderer._exchange(pack_request(""), timeout_s)
        return renderer

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    async def ask(self, request: bytes, timeout_s: float) -> tuple[RenderedText, float]:
        """Returns the answer to a packed request and the CPU seconds used for it. For the first request, these include
        the start of the process.

        Ends the process on any error, and when the caller is cancelled. Raises RendererDied or RendererStalled.
        """
        answer = await self._exchange(request, timeout_s)
        used_s, self._cpu_s = answer.cpu_s - self._cpu_s, answer.cpu_s
        return answer, used_s

    async def close(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    async def _exchange(self, request: bytes, timeout_s: float) -> RenderedText:
        answered = False
        try:
            async with asyncio.timeout(timeout_s):
                content = await self._round_trip(request)
            answered = True
        except TimeoutError:
            raise RendererStalled from None
        except (OSError, asyncio.IncompleteReadError):
            raise RendererDied(await self._process.wait()) from None
        finally:
            # Also after a cancellation, because the next request must not read this answer.
            if not answered:
                await self.close()
        return RenderedText.unpack(content)

    async def _round_trip(self, request: bytes) -> bytes:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(request)
        await stdin.drain()
        return await stdout.readexactly(read_length(await stdout.readexactly(4)))
