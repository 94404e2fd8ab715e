"""What processes of tests need that are forked, and then run a module as `python -m` does."""

import asyncio
import ctypes
import os
import runpy
import sys
import threading
import traceback
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["ForkedChild", "become_subreaper", "run_main", "set_command_line"]

_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


class ForkedChild:
    """A forked child of this process, with the part of asyncio's Process that the server uses."""

    def __init__(self, pid: int, stdin: Any, stdout: asyncio.StreamReader | None = None) -> None:
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        self.returncode: int | None = None
        self._has_ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._descriptor = os.pidfd_open(pid)
        self._loop.add_reader(self._descriptor, self._note_end)

    def _note_end(self) -> None:
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)
        if isinstance(self.stdin, asyncio.StreamWriter):
            self.stdin.close()
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self._has_ended.set()

    async def wait(self) -> int | None:
        await self._has_ended.wait()
        return self.returncode

    def terminate(self) -> None:
        self._send(15)

    def kill(self) -> None:
        self._send(9)

    def _send(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)


def become_subreaper(on: bool) -> None:
    """The kernel gives a process to this one when the processes between them have ended."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)


def set_command_line(*words: str) -> None:
    """Overwrites the command line of this process, by which tests find it."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    raw = "\0".join(words).encode()[: end - start - 1]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, raw, len(raw))


def run_main(module: str) -> NoReturn:
    """Runs the module as the main one, and ends this process. It does not free what was imported before the fork, which
    takes 0.2 s."""
    status = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]  # As at each end of Python: waits for the other threads.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
